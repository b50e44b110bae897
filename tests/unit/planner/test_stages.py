"""Pipelines: formulas against a hand count and against a simulation of the schedule."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner.cost.pipeline import in_flight, pipeline_s, transfers


def piped(
    first: float, middle: float, last: float, stages: int, batches: int, chunks: int
) -> float:
    """Seconds of stages that are alike but for the ends."""
    each = np.array([first, middle if stages > 2 else 0.0, last])
    return float(pipeline_s(each, np.array([1, stages - 2, 1]), batches, chunks))


def gpipe_order(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """All forward passes, then all backward passes, last in first out."""
    del stage, stages
    forward = [("f", n) for n in range(batches)]
    return [*forward, *(("b", n) for n in reversed(range(batches)))]


def one_f_one_b_order(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """Fill up, then one forward and one backward in turn, then drain."""
    ahead = min(batches, stages - stage - 1)
    order = [("f", n) for n in range(ahead)]
    for n in range(batches):
        order += [("f", ahead + n)] if ahead + n < batches else []
        order += [("b", n)]
    return order


def simulated(
    forward: Sequence[float], backward: Sequence[float], batches: int, order_of: object
) -> tuple[float, int]:
    """The end of a step, and the most microbatches that the first stage keeps."""
    stages = len(forward)
    orders = [order_of(s, stages, batches) for s in range(stages)]  # type: ignore[operator]
    done: dict[tuple[int, str, int], float] = {}
    free, place = [0.0] * stages, [0] * stages
    kept = most = 0
    while any(place[s] < len(orders[s]) for s in range(stages)):
        for stage in range(stages):
            if place[stage] == len(orders[stage]):
                continue
            what, number = orders[stage][place[stage]]
            source = stage - 1 if what == "f" else stage + 1
            if what == "b" and stage == stages - 1:
                ready = done.get((stage, "f", number))
            elif what == "f" and stage == 0:
                ready = 0.0
            else:
                ready = done.get((source, what, number))
            if ready is None:
                continue
            takes = forward[stage] if what == "f" else backward[stage]
            free[stage] = max(free[stage], ready) + takes
            done[stage, what, number] = free[stage]
            place[stage] += 1
            if stage == 0:
                kept += 1 if what == "f" else -1
                most = max(most, kept)
    return max(free), most


def interleaved(stages: int, batches: int, chunks: int, stage_s: float) -> float:
    """The end of a step of equal chunks, forward passes only, in Megatron's order.

    A stage runs groups of `stages` microbatches chunk after chunk; backward passes
    mirror forward ones, so a step takes as long as both together.
    """
    free = [0.0] * stages
    done: dict[tuple[int, int], float] = {}  # (chunk in the whole model, microbatch)
    for stage_place in range(batches * chunks):
        for stage in range(stages):
            group, rest = divmod(stage_place, stages * chunks)
            chunk, inside = divmod(rest, stages)
            number, whole = group * stages + inside, chunk * stages + stage
            # The previous chunk of the model is on the stage before, in this round or,
            # on the first stage, from the last stage in the round before.
            ready = done.get((whole - 1, number), 0.0) if whole else 0.0
            free[stage] = max(free[stage], ready) + stage_s / chunks
            done[whole, number] = free[stage]
    return max(free)


@given(
    stages=st.integers(2, 6),
    batches=st.integers(1, 12),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_equal_stages_take_what_a_simulation_takes(stages, batches, schedule) -> None:
    order = gpipe_order if schedule == "gpipe" else one_f_one_b_order
    end, kept = simulated([1.0] * stages, [2.0] * stages, batches, order)
    assert piped(3.0, 3.0, 3.0, stages, batches, 1) == pytest.approx(end)
    assert in_flight(schedule, stages, batches, 1) == kept


@given(
    times=st.lists(st.integers(1, 8), min_size=3, max_size=3),
    stages=st.integers(3, 6),
    batches=st.integers(1, 12),
)
def test_unequal_ends_take_what_a_simulation_takes(times, stages, batches) -> None:
    first, middle, last = times
    forward = [float(first), *[float(middle)] * (stages - 2), float(last)]
    backward = [2 * each for each in forward]
    formula = piped(3.0 * first, 3.0 * middle, 3.0 * last, stages, batches, 1)
    end, _ = simulated(forward, backward, batches, gpipe_order)
    assert formula == pytest.approx(end)
    end, _ = simulated(forward, backward, batches, one_f_one_b_order)
    # A slow first stage runs ahead while the others fill: the formula is never short.
    assert 3.0 * batches * max(times) <= end <= formula + 1e-9


@given(stages=st.integers(2, 5), groups=st.integers(1, 4), chunks=st.integers(2, 4))
def test_chunks_take_what_a_simulation_takes(stages, groups, chunks) -> None:
    batches = stages * groups
    end = interleaved(stages, batches, chunks, 1.0)
    assert piped(1.0, 1.0, 1.0, stages, batches, chunks) == pytest.approx(end)


def test_hand_counts() -> None:
    # 8 microbatches, 4 stages: 3 of 11 rounds are bubble; two chunks halve it.
    assert piped(2.0, 2.0, 2.0, 4, 8, 1) == 22.0
    assert piped(2.0, 2.0, 2.0, 4, 8, 2) == 19.0
    # A head twice as slow sets the pace: 7 x 2 + 1 + 1 + 1 + 2.
    assert piped(1.0, 1.0, 2.0, 4, 8, 1) == 19.0
    assert piped(1.0, 99.0, 1.0, 2, 8, 1) == 9.0  # two stages have no middle
    assert transfers(3) == 6
    assert in_flight("1f1b", 4, 3, 1) == 3
    assert in_flight("circular", 4, 8, 2) == 8
