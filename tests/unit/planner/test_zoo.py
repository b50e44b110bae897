"""Ten unlike models: operations as counted by hand, and none left out."""

import functools

import jax
import pytest

from dtft.planner.ir import repeats
from dtft.planner.ir.graph import Graph
from dtft.planner.ir.jaxprs import operators
from dtft.planner.ir.tracing import trace
from tests.support.zoo import MODELS
from tests.support.zoo_parts import Model

SMALL: dict[str, dict[str, object]] = {
    "resnet": {"depths": (1, 1, 1, 1), "size": 64},
    "vit": {"layers": 3},
    "gpt": {"layers": 3},
    "moe": {"layers": 2},
    "moe_sorted": {"layers": 2},
    "unet": {"multiples": (1, 2), "size": 16},
}
"""Fewer layers where a whole step is traced."""
BACKWARD: dict[str, tuple[float, float]] = {
    "lora": (2.0, 2.1),  # the base has no gradients of its own
    "llama": (3.5, 3.7),  # layers are computed again
    "mlp": (2.5, 3.0),  # the first layer needs no gradient of its input
    "user_step": (3.0, 3.5),  # the optimizer works on large tables
    "resnet": (2.9, 3.1),
}
"""Operations of a step over those of its loss."""


@functools.cache
def step_of(name: str) -> tuple[Model, Graph]:
    model = MODELS[name](**SMALL.get(name, {}))
    step = model.step
    graph = trace(step, model.state, model.batch)
    program = jax.make_jaxpr(step)(model.state, model.batch).jaxpr
    numbered = [eqn.primitive.name for eqn in operators(program)]
    assert [op.primitive for op in graph.operators] == numbered
    return model, graph


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_the_loss_are_those_counted_by_hand(name: str) -> None:
    model = MODELS[name]()
    graph = trace(model.loss, model.params, model.batch)
    assert graph.flops == pytest.approx(model.forward_flops, rel=0.01)
    assert not graph.unknown
    assert not any(op.again for op in graph.operators)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_traced_whole(name: str) -> None:
    model, graph = step_of(name)
    low, high = BACKWARD.get(name, (2.9, 3.05))
    assert low <= graph.flops / model.forward_flops <= high
    assert not graph.unknown
    assert any(op.again for op in graph.operators) == (name == "llama")


@pytest.mark.parametrize("name", MODELS)
def test_equal_layers_share_classes_and_no_array_has_one_twice(name: str) -> None:
    _, graph = step_of(name)
    found = repeats.find_repeats(graph)
    for value in graph.values:
        assert len({found.dims[dim] for dim in value.dims}) == len(set(value.dims))
    for number, first in enumerate(found.operators):
        one, other = graph.operators[first], graph.operators[number]
        assert (one.primitive, one.flops, one.trips) == (
            other.primitive, other.flops, other.trips,
        )  # fmt: skip
    unrolled = {"vit": 3, "gpt": 3, "moe": 2, "moe_sorted": 2}
    layers = [repeat.count for repeat in found.repeats if repeat.period > 50]
    assert layers == [unrolled[name]] * 2 if name in unrolled else not layers


XLA: dict[str, dict[str, object]] = {
    "mlp": {},
    "user_step": {},
    "gpt": {"layers": 2, "batch": 2, "time": 128},
    "moe": {"layers": 1, "batch": 2, "time": 128},
}
"""Models without padded convolutions, of which XLA leaves the padding out."""


@pytest.mark.parametrize("name", XLA)
def test_xla_counts_the_same_operations(name: str) -> None:
    model = MODELS[name](**XLA[name])
    graph = trace(model.loss, model.params, model.batch)
    lowered = jax.jit(model.loss).lower(model.params, model.batch)
    counted = lowered.cost_analysis() or {}
    assert graph.flops == pytest.approx(counted["flops"], rel=0.005)
