"""Operators that cost alike: what an update moves, what functions cost."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from dtft.planner.ir.op_groups import OpGroup
from dtft.planner.spmd.partitioner import ShardedSize, ShardingAssignment, work_of
from dtft.planner.workload import Workload, of_loss, of_step

SIDE = 64


def _question(optimizer: optax.GradientTransformation) -> Workload:
    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ params))

    weight = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    rows = jax.ShapeDtypeStruct((32, SIDE), jnp.float32)
    return of_loss(loss, optimizer, weight, rows)


def _bytes(question: Workload, group: OpGroup) -> float:
    return group.times * question.graph.bytes_of(group.operator)


def _updates(question: Workload) -> list[OpGroup]:
    return [
        group
        for group in question.groups
        if group.region == "update" and group.operator.kind == "elementwise"
    ]


@pytest.mark.parametrize(
    ("optimizer", "arrays"), [(optax.adam(1e-3), 7), (optax.sgd(0.1), 3)]
)
def test_an_update_moves_its_state_once(
    optimizer: optax.GradientTransformation, arrays: int
) -> None:
    """Adam reads weight, gradient and two moments, and writes all but the gradient."""
    question = _question(optimizer)
    largest = max(_bytes(question, group) for group in _updates(question))
    assert largest == pytest.approx(arrays * 4 * SIDE**2, rel=0.01)


@pytest.mark.parametrize("num", [1, 10])
def test_an_update_in_a_loop_moves_its_state_each_time(num: int) -> None:
    """A step that scans train steps: of each, Adam moves as much as of a single one."""
    optimizer = optax.adam(1e-3)

    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ params))

    def train(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        gradient = jax.grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def step(state: Any, batches: jax.Array) -> Any:
        return jax.lax.scan(train, state, batches)[0]

    weight = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        state = weight, jax.eval_shape(optimizer.init, weight)
    question = of_step(step, state, jax.ShapeDtypeStruct((num, 32, SIDE), jnp.float32))
    largest = max(_bytes(question, group) for group in _updates(question))
    assert largest == pytest.approx(num * 7 * 4 * SIDE**2, rel=0.01)


def test_functions_are_counted_apart() -> None:
    question = _question(optax.sgd(0.1))
    found = {
        group.region: group.times * group.operator.special
        for group in question.groups
        if group.operator.special
    }
    assert found == {"forward": 32 * SIDE}


def test_a_convolution_has_the_channels_that_each_device_keeps() -> None:
    def loss(kernel: jax.Array, image: jax.Array) -> jax.Array:
        made = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(made * made)

    kernel = jax.ShapeDtypeStruct((3, 3, 8, 16), jnp.float32)
    image = jax.ShapeDtypeStruct((4, 8, 8, 8), jnp.float32)
    question = of_loss(loss, optax.sgd(0.1), kernel, image)
    graph = question.graph
    channels = graph.values[graph.inputs["params"]].dims[3]
    divided = ShardingAssignment(axes={channels: ("tensor",)}, alias=question.alias)
    found = [
        work_of(graph, op, divided).sides
        for op in graph.operators
        if op.kind == "convolution"
    ]
    columns = ShardedSize(total=16, axes=("tensor",))
    # The channels of the gradient of a kernel are the examples.
    assert found == [(columns, ShardedSize(total=8)), (columns, ShardedSize(total=4))]
    matmuls = [op for op in graph.operators if op.kind == "matmul"]
    assert all(work_of(graph, op, divided).sides is None for op in matmuls)
