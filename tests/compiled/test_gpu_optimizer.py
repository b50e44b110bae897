"""T6: what the GPU compiler makes of an update and of a step, ours against optax's."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dtft.optim import max_adabelief
from dtft.planner.aot.hlo import HloProgram, parse
from tests.support import gpu_compiler, hlo

Shapes = tuple[tuple[int, ...], ...]
ONE: Shapes = ((4096, 4096),)
SEVERAL: Shapes = ((2048, 2048), (3, 3, 64, 128), (8192,), (2048, 2048), (1000, 512))
WIDTH = 4096


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a compiled update is judged by."""

    kernels: int
    copies: int
    bytes: int
    temporary: int


@cache
def _gate(make: Callable[..., Any], shapes: Shapes, finite_only: bool = False) -> Gate:
    solver = make(1e-3)
    solver = optax.apply_if_finite(solver, 5) if finite_only else solver

    def step(carried: Any, gradients: Any) -> Any:
        params, state = carried
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            updates, state = solver.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    carried = gpu_compiler.on_one((params, jax.eval_shape(solver.init, params)))
    compiled = jax.jit(step, donate_argnums=0).lower(carried, carried[0]).compile()
    program = parse(compiled.as_text())
    memory: Any = compiled.memory_analysis()
    smallest = min(math.prod(shape) for shape in shapes)
    return Gate(
        kernels=len(hlo.kernels(program, smallest)),
        copies=len(hlo.copies(program, smallest)),
        bytes=hlo.bytes_moved(program),
        temporary=memory.temp_size_in_bytes,
    )


@pytest.mark.parametrize("shapes", [ONE, SEVERAL], ids=["one", "several"])
def test_an_update_is_one_kernel_per_leaf_at_the_floor_of_traffic(
    shapes: Shapes,
) -> None:
    gate = _gate(max_adabelief, shapes)
    parameters = sum(math.prod(shape) for shape in shapes)
    assert gate.kernels == len(shapes)
    assert gate.copies == 0
    assert gate.temporary < 4096 + 0.01 * parameters
    # 36 bytes per parameter; the scalars of all leaves are a few bytes more.
    assert 36 * parameters <= gate.bytes < 36 * parameters + 4096


@pytest.mark.parametrize("shapes", [ONE, SEVERAL], ids=["one", "several"])
def test_an_update_costs_what_amsgrad_costs(shapes: Shapes) -> None:
    ours, theirs = _gate(max_adabelief, shapes), _gate(optax.amsgrad, shapes)
    assert (ours.kernels, ours.copies) == (theirs.kernels, theirs.copies)
    parameters = sum(math.prod(shape) for shape in shapes)
    assert ours.bytes // parameters == theirs.bytes // parameters == 36
    assert abs(ours.bytes - theirs.bytes) < 4096


def test_refusing_what_is_not_finite_copies_no_leaf() -> None:
    assert _gate(max_adabelief, SEVERAL, True).copies == 0


def _perceptron_loss(params: Any, x_BD: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x_BD @ params["first"]) @ params["second"]))


def _train_step(make: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """A perceptron's step (state, batch) -> (state, loss), and its state's shapes."""
    solver = make(1e-3)
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = {"first": matrix, "second": matrix}

    def step(carried: Any, x_BD: Any) -> Any:
        params, state = carried
        loss, gradients = jax.value_and_grad(_perceptron_loss)(params, x_BD)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = solver.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), loss

    return step, (params, jax.eval_shape(solver.init, params))


def _copies_in_train_step(make: Callable[..., Any]) -> int:
    step, carried = _train_step(make)
    batch = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
    lowered = jax.jit(step, donate_argnums=0).lower(
        *gpu_compiler.on_one((carried, batch))
    )
    return len(hlo.copies(parse(lowered.compile().as_text()), WIDTH**2))


def test_a_train_step_copies_no_more_leaves_than_with_adam() -> None:
    assert _copies_in_train_step(max_adabelief) <= _copies_in_train_step(optax.adam)


@cache
def _divided(params_spec: PartitionSpec, state_spec: PartitionSpec) -> tuple[Any, int]:
    """The step on eight GPUs: its program, and the bytes of each one's arguments."""
    mesh = gpu_compiler.mesh(replica=8)
    step, (params, state) = _train_step(max_adabelief)
    batch = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)

    def place(tree: Any, spec: PartitionSpec) -> Any:
        def one(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            where = NamedSharding(mesh, spec if a.ndim else PartitionSpec())
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)

        return jax.tree.map(one, tree)

    carried = place(params, params_spec), place(state, state_spec)
    placed = place(batch, PartitionSpec("replica"))
    out = jax.tree.map(lambda a: a.sharding, carried)
    compiled = (
        jax.jit(step, donate_argnums=0, out_shardings=(out, None))
        .lower(carried, placed)
        .compile()
    )
    memory: Any = compiled.memory_analysis()
    return parse(compiled.as_text()), memory.argument_size_in_bytes


WHOLE, DIVIDED = PartitionSpec(), PartitionSpec("replica")
MATRIX_BYTES = 4 * WIDTH**2
BATCH_BYTES = 4 * 1024 * WIDTH // 8


def _large_all_reduces(program: HloProgram) -> int:
    return sum(
        o.opcode.startswith("all-reduce") and hlo.largest(o) > 1
        for o in program.operations
    )


@pytest.mark.parametrize(
    ("params_spec", "matrices"),
    [(WHOLE, 2 + 6 / 8), (DIVIDED, 8 / 8)],
    ids=["zero-1", "fsdp"],
)
def test_a_divided_state_is_reduced_by_parts_and_gathered(
    params_spec: PartitionSpec, matrices: float
) -> None:
    program, arguments = _divided(params_spec, DIVIDED)
    found = hlo.collectives(program)
    assert found["reduce-scatter"] >= 1 and found["all-gather"] >= 2, found
    assert _large_all_reduces(program) == 0  # the loss is one number
    expected = matrices * MATRIX_BYTES + BATCH_BYTES
    assert arguments == pytest.approx(expected, abs=4096)


def test_a_whole_state_is_all_reduced() -> None:
    program, arguments = _divided(WHOLE, WHOLE)
    assert _large_all_reduces(program) >= 1
    assert hlo.collectives(program)["reduce-scatter"] == 0
    expected = 8 * MATRIX_BYTES + BATCH_BYTES
    assert arguments == pytest.approx(expected, abs=4096)
