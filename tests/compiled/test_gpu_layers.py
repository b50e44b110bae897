"""The GPU compiler keeps per-layer reductions inside the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dtft.planner.aot.hlo import HloProgram, parse
from tests.support import gpu_compiler, hlo

gradients = pytest.importorskip("dtft.collectives.gradients")
LAYERS, WIDTH = 4, 1024


def _compile(trigger: str) -> HloProgram:
    mesh = gpu_compiler.mesh(replica=8)

    def loss(params: Any, x_BD: Any) -> Any:
        def body(h_BD: Any, layer: Any) -> Any:
            if trigger == "layer":
                layer = gradients.reduce_in_backward(layer, "replica")
            return jnp.tanh(h_BD @ layer), None

        return jnp.mean(jnp.square(jax.lax.scan(body, x_BD, params["layers"])[0]))

    def shape(*sizes: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=where)

    step = jax.jit(
        gradients.reduced_gradients(
            loss,
            mesh,
            "replica",
            trigger=trigger,
            **({"reduced_by_loss": ("layers",)} if trigger == "layer" else {}),
        )
    )
    params = {"layers": shape(LAYERS, WIDTH, WIDTH, spec=PartitionSpec())}
    batch = shape(64, WIDTH, spec=PartitionSpec("replica"))
    return parse(step.lower(params, batch).compile().as_text())


def _reduces(operations: Any) -> int:
    kinds = ("all-reduce", "all-reduce-start")
    return sum(o.opcode in kinds and hlo.largest(o) >= WIDTH**2 for o in operations)


def test_stacked_layers_are_reduced_inside_of_the_backward_loop() -> None:
    layer, device = _compile("layer"), _compile("device")
    assert _reduces(device.operations) == 1
    assert _reduces(layer.operations) == 0
    inside = [name for name, lines in layer.computations.items() if _reduces(lines)]
    assert inside and layer.entry not in inside
