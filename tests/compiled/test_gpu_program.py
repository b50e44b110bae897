"""What is read before machine code is made is what the whole compilation has."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dtft._jax_internals import compile_module
from dtft.planner.aot.check import Compiled, CompileFailure
from dtft.planner.aot.compile import LoweredStep, compile_all, lower
from dtft.planner.aot.hlo import CompiledCollective, collectives
from tests.support import gpu_compiler

F32 = jnp.float32
MESH = {"fsdp": 4, "tensor": 2}
PARAMS = {
    "up": jax.ShapeDtypeStruct((3, 256, 512), F32),
    "down": jax.ShapeDtypeStruct((3, 512, 256), F32),
}
BATCH = jax.ShapeDtypeStruct((512, 256), F32)
SPECS = {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}


def _step(params: Any, x_BD: Any) -> Any:
    def loss(params: Any) -> Any:
        def layer(h_BD: Any, weights: Any) -> Any:
            hidden = jax.nn.gelu(h_BD @ weights["up"])
            return h_BD + hidden @ weights["down"], None

        return jnp.mean(jnp.square(lax.scan(layer, x_BD, params)[0]))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def _candidate() -> LoweredStep:
    return lower(
        _step,
        (PARAMS, BATCH),
        mesh=MESH,
        specs=(SPECS, P("fsdp")),
        out_specs=(SPECS, P()),
        donate=(0,),
        target="h200",
    )


def _nameless(found: tuple[CompiledCollective, ...]) -> list[str]:
    """XLA writes down some operations under the name of what wraps them."""
    return sorted(repr(replace(one, name="", where="")) for one in found)


@pytest.mark.timeout(180)  # a child imports JAX, on a busy machine too
def test_memory_and_collectives_are_those_of_the_whole_compilation() -> None:
    devices = gpu_compiler.devices(8)
    broken = LoweredStep(name="broken", mesh=MESH, target="h200", module=b"no module")
    early, failed = compile_all([_candidate(), broken], deadline_s=150.0)
    assert isinstance(early, Compiled), early
    assert isinstance(failed, CompileFailure)
    assert "Error" in failed.reason
    whole = compile_module(_candidate().module, devices, {})
    stats = whole.get_compiled_memory_stats()
    assert early.memory.arguments == stats.argument_size_in_bytes
    assert early.memory.outputs == stats.output_size_in_bytes
    assert early.memory.temporaries == stats.temp_size_in_bytes
    assert early.memory.aliased == stats.alias_size_in_bytes > 0
    found = collectives(whole.hlo_modules()[0].to_string(), MESH)
    assert _nameless(early.collectives) == _nameless(found)
    assert found
