"""Experts of `jax.lax.ragged_dot`: priced as XLA compiles them, never divided."""

from typing import Any

import jax
import pytest

from dtft.planner.cluster import device_type
from dtft.planner.cluster.topology import Cluster
from dtft.planner.cost import computing_s
from dtft.planner.ir import trace
from dtft.planner.memory.peak import LivenessTrace, PeakModel, Timeline
from dtft.planner.report.lints import Lint, find_lints
from dtft.planner.search.decision import decide
from dtft.planner.spmd import ShardingAssignment, work_of
from dtft.planner.workload import Workload, of_loss
from tests.support.zoo import MODELS
from tests.support.zoo_parts import array, ints

ROWS, WIDTH, HIDDEN = 4096, 512, 1024
WHOLE = ShardingAssignment(axes={})


def forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, sizes)


def gradient(x: jax.Array, w: jax.Array, sizes: jax.Array, y: jax.Array) -> jax.Array:
    return jax.vjp(lambda w: forward(x, w, sizes), w)[1](y)[0]


def arguments(groups: int, function: Any) -> list[jax.ShapeDtypeStruct]:
    known = array(ROWS, WIDTH), array(groups, WIDTH, HIDDEN), ints(groups)
    return [*known, *([array(ROWS, HIDDEN)] if function is gradient else [])]


def takes(device: str, groups: int, function: Any) -> float:
    graph = trace(function, *arguments(groups, function))
    (operator,) = (
        op for op in graph.operators if op.kind == "matmul" and not op.unread
    )
    work = work_of(graph, operator, WHOLE)
    return float(computing_s(graph, device_type(device), work, {}))


@pytest.mark.parametrize("function", [forward, gradient])
def test_only_a_tpu_multiplies_each_row_once(function: Any) -> None:
    few, many = (takes("h100", groups, function) for groups in (2, 16))
    assert 6 * few < many <= 8 * few
    few, many = (takes("tpu-v5p", groups, function) for groups in (2, 16))
    assert many < 3 * few


@pytest.mark.parametrize("function", [forward, gradient])
def test_rows_are_copied_for_each_group_except_on_a_tpu(function: Any) -> None:
    groups = 8

    def needs(has_ragged_matmul: bool) -> float:
        graph = trace(function, *arguments(groups, function))
        timeline = Timeline(graph=graph, has_ragged_matmul=has_ragged_matmul)
        peaks = PeakModel(LivenessTrace(timeline), WHOLE)
        return peaks.matrix.sum(axis=1).max()

    rows = ROWS * (WIDTH + (HIDDEN if function is gradient else 0)) * 4
    assert needs(False) >= groups * rows > needs(True)


def transformer(name: str) -> Workload:
    """A model of the zoo with eight experts."""
    model = MODELS[name](
        batch=8, time=32, width=32, layers=1, hidden=64, experts=8, heads=2,
        vocabulary=64,
    )  # fmt: skip
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


def ragged_lints(question: Workload, cluster: str) -> list[Lint]:
    decision = decide(question, Cluster.parse(cluster), {"remat": "none"})
    return [lint for lint in find_lints(decision) if lint.kind == "ragged"]


def test_sorted_tokens_have_no_axis_of_experts_and_lints_say_why() -> None:
    question = transformer("moe_sorted")
    assert not question.expert_arrays
    for cluster, said in (("8xH100", 1), ("8xcpu", 1), ("8xtpu-v5p", 0)):
        found = ragged_lints(question, cluster)
        assert len(found) == said
        assert all(lint.cost_s > 0 and "all 8 groups" in lint.text for lint in found)
    with pytest.raises(ValueError, match="expert=8"):
        decide(question, Cluster.parse("8xH100"), {"expert": 8})


def test_experts_with_places_of_their_own_have_no_such_lint() -> None:
    assert not ragged_lints(transformer("moe"), "8xH100")
