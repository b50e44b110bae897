"""Stacks that loops read and write are counted: nothing in the program says so."""

from dtft.planner.ir.fusion import CHEAP
from dtft.planner.ir.op_groups import loop_copies
from dtft.planner.workload import of_loss
from tests.support.layer_chain import (
    BATCH,
    LAYERS,
    OPTIMIZER,
    PARAMS,
    ROWS,
    WIDTH,
    loss,
)


def test_stacks_of_both_passes_are_copied() -> None:
    """By hand: hidden states kept for the backward pass, weights, their gradients."""
    question = of_loss(loss, OPTIMIZER, PARAMS, BATCH)
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for operator, passes in loop_copies(question.graph, CHEAP):
        assert operator.trips == LAYERS
        key = operator.primitive, question.graph.values[operator.outputs[0]].shape
        found[key] = found.get(key, 0) + passes
    weight, hidden = (WIDTH, WIDTH), (ROWS, WIDTH)
    assert found["dynamic_slice", weight] == 2 * 2  # forward and backward
    assert found["dynamic_update_slice", weight] == 3  # gradients
    assert found["dynamic_update_slice", (WIDTH,)] == 3
    assert found["dynamic_update_slice", hidden] >= 3  # residuals
    assert ("dynamic_slice", (WIDTH,)) not in found  # a bias is added in place


def test_copies_count_as_memory_traffic_that_no_cache_has() -> None:
    question = of_loss(loss, OPTIMIZER, PARAMS, BATCH)
    graph, copies = question.graph, [g for g in question.groups if g.copies]
    counted = sum(g.times * graph.bytes_of(g.operator) for g in copies)
    expected = sum(
        passes * op.trips * graph.values[op.outputs[0]].num_bytes
        for op, passes in loop_copies(graph, CHEAP)
    )
    assert abs(counted - expected) < 1e-6 * expected
    assert all(group.uncached for group in copies)
    assert {group.region for group in copies} == {"forward", "backward"}
