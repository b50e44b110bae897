"""Candidates compiled in a child: the program of `jit`, known collectives, its end."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dtft.planner.aot import gpu_targets, worker
from dtft.planner.aot.check import Compiled, CompileFailure
from dtft.planner.aot.compile import LoweredStep, compile_all, lower, place

F32 = jnp.float32
DEADLINE_S = 150.0
pytestmark = pytest.mark.timeout(180)  # children import JAX, on a busy machine too


def _shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _step(params: Any, x_BD: Any) -> Any:
    def loss(params: Any) -> Any:
        def layer(h_BD: Any, weights: Any) -> Any:
            hidden = jax.nn.relu(h_BD @ weights["up"])
            hidden = lax.with_sharding_constraint(hidden, P("data", "tensor"))
            return h_BD + hidden @ weights["down"], None

        return jnp.mean(jnp.square(lax.scan(layer, x_BD, params)[0]))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


PARAMS = {"up": _shape(3, 32, 64), "down": _shape(3, 64, 32)}
SPECS = {"up": P(None, None, "tensor"), "down": P(None, "tensor")}
MESH = {"data": 4, "tensor": 2}


def _candidate(mesh: dict[str, int] = MESH, **more: Any) -> LoweredStep:
    return lower(
        _step,
        (PARAMS, _shape(64, 32)),
        mesh=mesh,
        specs=(SPECS, P("data")),
        out_specs=(SPECS, P()),
        donate=(0,),
        name="step",
        **more,
    )


def _only(candidate: LoweredStep, deadline_s: float = DEADLINE_S) -> Compiled:
    (result,) = compile_all([candidate], deadline_s=deadline_s)
    assert isinstance(result, Compiled), result
    return result


def _found(compiled: Compiled) -> list[tuple[str, tuple[str, ...], int, int]]:
    return sorted((c.kind, c.axes, c.num_bytes, c.trips) for c in compiled.collectives)


def _nested(x_BD: Any, w_DD: Any) -> Any:
    def inner(h_BD: Any, _: None) -> Any:
        product = lax.with_sharding_constraint(h_BD @ w_DD, P())
        return jnp.tanh(product), None

    def outer(h_BD: Any, _: None) -> Any:
        return lax.scan(inner, h_BD, None, length=5)[0], None

    return lax.scan(outer, x_BD, None, length=3)[0]


def test_the_module_is_the_program_that_jit_would_compile() -> None:
    from dtft._jax_internals import compile_module

    mesh = Mesh(
        np.asarray(jax.devices()).reshape(4, 2),
        tuple(MESH),
        axis_types=(AxisType.Auto,) * 2,
    )
    out = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        (SPECS, P()),
        is_leaf=lambda part: isinstance(part, P),
    )
    with jax.set_mesh(mesh):
        direct = (
            jax.jit(_step, donate_argnums=0, out_shardings=out)
            .lower(place(PARAMS, SPECS, mesh), place(_shape(64, 32), P("data"), mesh))
            .compile()
        )
    ours = compile_module(_candidate().module, jax.devices(), {})
    text = ours.hlo_modules()[0].to_string()
    assert _essence(text) == _essence(direct.as_text())
    assert "alias" in text.splitlines()[0]  # donation is part of it


def test_memory_read_before_machine_code_is_that_of_the_whole_compilation(
    results: tuple[Compiled | CompileFailure, ...],
) -> None:
    from dtft._jax_internals import compile_module

    whole = compile_module(_candidate().module, jax.devices(), {})
    stats, ours = whole.get_compiled_memory_stats(), cast(Compiled, results[1]).memory
    assert ours.arguments == stats.argument_size_in_bytes > 0
    assert ours.outputs == stats.output_size_in_bytes
    assert ours.temporaries == stats.temp_size_in_bytes > 0
    assert ours.aliased == stats.alias_size_in_bytes > 0


def _essence(text: str | None) -> list[str]:
    """The program without where it was written."""
    text = re.sub(r", (metadata=\{[^}]*\}|backend_config=.*)", "", text or "")
    return [
        line for line in text.splitlines() if re.match(r"\s*(ROOT )?%|HloMod", line)
    ]


@pytest.fixture(scope="module", name="results")
def compiled_in_two_children() -> tuple[Compiled | CompileFailure, ...]:
    """A broken module, the step on 8 and a loop in a loop; the step on 16 devices."""
    broken = LoweredStep(name="broken", mesh=MESH, target="cpu", module=b"no module")
    nested = lower(
        _nested,
        (_shape(16, 32), _shape(32, 32)),
        mesh={"tensor": 8},
        specs=(P(), P("tensor")),
        out_specs=P(),
        name="nested",
    )
    sixteen = _candidate({"data": 8, "tensor": 2})
    return compile_all([broken, _candidate(), nested, sixteen], deadline_s=DEADLINE_S)


def test_errors_of_the_compiler_come_back_as_text_and_the_next_is_compiled(
    results: tuple[Compiled | CompileFailure, ...],
) -> None:
    broken, *others = results
    assert isinstance(broken, CompileFailure) and broken.name == "broken"
    assert "Error" in broken.reason
    assert [result.name for result in others] == ["step", "nested", "step"]


@pytest.mark.parametrize(("number", "data"), [(1, 4), (3, 8)], ids=["8", "16"])
def test_known_collectives(
    results: tuple[Compiled | CompileFailure, ...], number: int, data: int
) -> None:
    compiled = results[number]
    assert isinstance(compiled, Compiled), compiled
    found = _found(compiled)
    # Each layer: the second product is a partial sum forwards, the first backwards.
    rows = 64 // data * 32 * 4
    assert found.count(("all_reduce", ("tensor",), rows, 3)) == 2, found
    gradients = sum(
        num_bytes * trips
        for kind, axes, num_bytes, trips in found
        if kind == "all_reduce" and axes == ("data",) and num_bytes > 4
    )
    params = 3 * 2 * 32 * 64 // 2 * 4
    assert gradients == params
    assert all(c.trips_known for c in compiled.collectives)
    assert compiled.memory.arguments == params + rows
    assert compiled.memory.aliased == params


def test_trips_of_a_loop_in_a_loop_are_multiplied(
    results: tuple[Compiled | CompileFailure, ...],
) -> None:
    nested = results[2]
    assert isinstance(nested, Compiled), nested
    found = [c for c in nested.collectives if c.trips > 1]
    assert [(c.kind, c.axes, c.num_bytes, c.trips) for c in found] == [
        ("all_reduce", ("tensor",), 16 * 32 * 4, 15)
    ]


def test_the_gpu_compiler_scatters_and_keeps_bfloat16() -> None:
    if not gpu_targets.is_gpu_compiler_installed():
        pytest.skip(f"no GPU compiler: {gpu_targets.INSTALL}")

    def step(w_DF: Any, x_BD: Any) -> Any:
        loss = lambda w: jnp.mean(jnp.square(x_BD @ w))  # noqa: E731
        return w_DF - jax.grad(loss)(w_DF).astype(w_DF.dtype)

    candidate = lower(
        step,
        (_shape(64, 128, dtype=jnp.bfloat16), _shape(4096, 64, dtype=jnp.bfloat16)),
        mesh={"fsdp": 8},
        specs=(P("fsdp"), P("fsdp")),
        out_specs=P("fsdp"),
        donate=(0,),
        target="h100",
    )
    compiled = _only(candidate)
    num_bytes = 64 * 128 * 2
    assert _found(compiled) == [
        ("all_gather", ("fsdp",), num_bytes, 1),
        ("reduce_scatter", ("fsdp",), num_bytes, 1),
    ]
    assert {c.dtype for c in compiled.collectives} == {"bf16"}
    assert compiled.memory.arguments >= (64 * 128 + 4096 * 64) * 2 // 8
    assert compiled.exact_memory


@pytest.mark.parametrize(
    ("first", "retried"), [("INTERNAL: no tiles", True), ("INVALID_ARGUMENT: x", False)]
)
def test_after_an_internal_error_it_is_compiled_without_triton(
    monkeypatch: pytest.MonkeyPatch, first: str, retried: bool
) -> None:
    done: dict[str, Any] = {"text": "", "memory": {}, "seconds": 0.0}

    def whole(module: Any, devices: Any, options: Any) -> Any:
        return done if "xla_gpu_enable_triton_gemm" in options else first

    monkeypatch.setattr(worker, "_whole", whole)
    monkeypatch.setattr(worker, "until_assigned", lambda compiled: compiled({}))
    without = worker._WITHOUT_TRITON
    found = worker._compile(b"", list, {}, without)
    assert found == (done if retried else first)
    assert worker._compile(b"", list, {}, {}) == first


def test_what_jax_refuses_is_said_before_anything_is_compiled() -> None:
    with pytest.raises(ValueError, match="evenly divide"):
        lower(_nested, (_shape(16, 30), _shape(30, 30)), mesh={"tensor": 8},
              specs=(P(), P("tensor")))  # fmt: skip
    with pytest.raises(ValueError, match="target='h1000'"):
        _candidate(target="h1000")


def _children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if worker.__name__ in _words_of(child)
    ]


def _words_of(process: psutil.Process) -> list[str]:
    try:
        while not (words := process.cmdline()):  # it is about to run its program
            time.sleep(0.001)
        return words
    except psutil.Error:  # it has ended, as another test's may at any time
        return []


def test_the_child_ends_at_the_deadline() -> None:
    late = compile_all([_candidate()] * 12, deadline_s=0.2)
    assert len(late) <= 12  # making what comes after it would be in vain
    assert all("deadline_s=0.2" in cast(CompileFailure, one).reason for one in late)
    assert not _children()


def test_of_many_candidates_each_has_its_result() -> None:
    """More than children are given at a time; some of them are no modules."""
    one = _candidate()
    many = [
        replace(one, name=str(n), module=b"" if n % 4 == 2 else one.module)
        for n in range(9)
    ]
    results = compile_all(many, deadline_s=DEADLINE_S)
    assert [result.name for result in results] == [str(n) for n in range(9)]
    failed = [
        n for n, result in enumerate(results) if isinstance(result, CompileFailure)
    ]
    assert failed == [2, 6]


def test_a_crash_fails_one_candidate_and_a_new_child_takes_the_others() -> None:
    def candidates() -> Iterator[LoweredStep]:
        yield _candidate()
        for child in _children():
            child.kill()
        yield _candidate()

    crashed, compiled = compile_all(candidates(), deadline_s=DEADLINE_S)
    assert isinstance(crashed, CompileFailure) and "crashed" in crashed.reason
    assert isinstance(compiled, Compiled)


def test_children_start_while_the_first_candidate_is_made() -> None:
    def candidates() -> Iterator[LoweredStep]:
        assert len(_children()) == 1
        yield from ()

    assert compile_all(candidates(), coming=[("cpu", 8)]) == ()
    assert not _children()


def test_an_error_of_the_caller_ends_the_child() -> None:
    def candidates() -> Iterator[LoweredStep]:
        yield _candidate()
        assert _children()
        raise RuntimeError("the next candidate cannot be made")

    with pytest.raises(RuntimeError, match="next candidate"):
        compile_all(candidates())
    assert not _children()


ABANDON = """
import os, sys
from dtft.planner.aot.compile import LoweredStep, compile_all

def candidates():
    yield LoweredStep(name="", mesh={"a": 2}, target="cpu", module=b"")
    import psutil
    print(psutil.Process().children()[0].pid, flush=True)
    os.kill(os.getpid(), 9)

compile_all(candidates())
"""


def test_the_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.run(
        [sys.executable, "-c", ABANDON], stdout=subprocess.PIPE, check=False
    )
    child = int(parent.stdout)
    end = time.monotonic() + 30
    while psutil.pid_exists(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)


def test_without_the_gpu_compiler_it_is_said_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not gpu_targets.is_gpu_compiler_installed()
    with pytest.raises(ImportError, match=r"dtft\[aot\]"):
        gpu_targets.load_gpu_compiler()


def test_a_child_keeps_what_its_parent_told_the_c_library() -> None:
    def tunables(known: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GLIBC_TUNABLES", known)
            return worker.environment(2)["GLIBC_TUNABLES"]

    assert tunables("") == "glibc.malloc.hugetlb=1"
    assert tunables("glibc.malloc.tcache_count=1") == (
        "glibc.malloc.tcache_count=1:glibc.malloc.hugetlb=1"
    )
    assert tunables("glibc.malloc.hugetlb=0") == "glibc.malloc.hugetlb=0"
