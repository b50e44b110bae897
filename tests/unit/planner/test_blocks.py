"""Repeated blocks: equal layers share classes, and what only looks alike does not."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.planner.ir.graph import Graph
from dtft.planner.ir.repeats import RepeatClasses, find_repeats
from dtft.planner.ir.tracing import trace
from tests.support.zoo import gpt, mlp


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def residual(x: jax.Array, layers: Sequence[Any]) -> jax.Array:
    for up, down in layers:
        x = x + jnp.tanh(x @ up) @ down
    return x


def traced(layers: int, hidden: Sequence[int] = ()) -> tuple[Graph, RepeatClasses]:
    sizes = hidden or [32] * layers
    weights = [(array(8, size), array(size, 8)) for size in sizes]
    graph = trace(jax.grad(lambda w, x: jnp.sum(residual(x, w))), weights, array(4, 8))
    return graph, find_repeats(graph)


def classes(graph: Graph, found: RepeatClasses, path: str) -> tuple[int, ...]:
    return tuple(found.dims[dim] for dim in graph.values[graph.inputs[path]].dims)


def test_hidden_dims_of_equal_layers_are_one_class_and_the_width_another() -> None:
    graph, found = traced(5)
    ups = {classes(graph, found, f"0/{layer}/0") for layer in range(5)}
    downs = {classes(graph, found, f"0/{layer}/1") for layer in range(5)}
    (width, hidden), *others = ups
    assert not others
    assert downs == {(hidden, width)}
    assert width != hidden
    forward, *_ = found.repeats
    assert (forward.period, forward.count) == (
        5,
        5,
    )  # product, tanh, its slope, product, sum


def test_layers_of_other_sizes_are_left_apart() -> None:
    graph, found = traced(4, hidden=(32, 32, 16, 16))
    ups = [classes(graph, found, f"0/{layer}/0")[1] for layer in range(4)]
    assert ups[0] == ups[1] and ups[2] == ups[3]
    assert ups[1] != ups[2]


def test_equal_widths_in_a_row_alternate() -> None:
    """Column and row parallel layers differ, though all are of one shape."""
    model = mlp(widths=(64, 64, 64, 64, 64, 64, 64, 64, 64))
    graph = trace(model.loss, model.params, model.batch)
    found = find_repeats(graph)
    kernels = [classes(graph, found, f"0/{i}/kernel") for i in range(1, 7)]
    assert len(set(kernels)) == 2
    assert kernels[0] == kernels[0::2][-1] == kernels[1][::-1]


def test_projections_side_by_side_are_no_layers() -> None:
    def heads(x: jax.Array, weights: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.tanh(x @ w) for w in weights]

    graph = trace(heads, array(4, 8), [array(8, 16)] * 3)
    found = find_repeats(graph)
    assert not found.repeats
    assert len({classes(graph, found, f"1/{i}")[1] for i in range(3)}) == 3


@given(st.integers(4, 9))
@settings(max_examples=6)
def test_more_equal_layers_cost_no_more_to_plan(layers: int) -> None:
    few, many = traced(3)[1], traced(layers)[1]
    assert len(set(few.dims)) == len(set(many.dims))
    assert len(set(few.operators)) == len(set(many.operators))


@pytest.mark.parametrize("entry", ["loss", "step"])
def test_a_deep_gpt_has_as_many_classes_as_a_shallow_one(entry: str) -> None:
    found = []
    for layers in (3, 5):
        model = gpt(layers=layers, width=64, heads=4, vocabulary=128, time=32)
        args = (model.params if entry == "loss" else model.state), model.batch
        graph = trace(getattr(model, entry), *args)
        found.append((graph, find_repeats(graph)))
    (_, shallow), (graph, deep) = found
    assert len(set(shallow.operators)) == len(set(deep.operators))
    assert len(set(shallow.dims)) == len(set(deep.dims))
    prefix = "0/" if entry == "loss" else "0/params/"
    kernels = {
        classes(graph, deep, f"{prefix}blocks/{layer}/up/kernel") for layer in range(5)
    }
    assert len(kernels) == 1


def test_a_program_without_operators_has_no_blocks() -> None:
    graph = trace(lambda x: x, array(4))
    assert find_repeats(graph) == RepeatClasses(dims=(0,), operators=(), repeats=())
