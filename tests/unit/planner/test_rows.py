"""Predicted steps: how they move with what they depend on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.planner.search import Scales, StepCost, stack
from dtft.planner.search.step_cost import STAGE_SCALES
from dtft.planner.transformer.fitting import HEADROOM, layouts, search
from dtft.planner.transformer.model import ParallelLayout, Recompute, Shape
from dtft.planner.transformer.predict import (
    A100_SCALES,
    elsewhere,
    memory,
    pool_of,
    scales_of,
    step_cost,
)

SHAPE = Shape(hidden=4096, layers=32, heads=32, seq_len=2048, vocab=51200)
LAYOUT = ParallelLayout(tp=4, pp=4, dp=4, micro_batch=2, global_batch=128)
CATALOG = Scales()
ONE = CATALOG.vector()


def seconds(
    layout: ParallelLayout,
    shape: Shape = SHAPE,
    cluster: str = "a100",
    scales: Scales = CATALOG,
) -> float:
    cost = step_cost(shape, layout, pool_of(cluster, layout.gpus))
    return float(cost.step_s(scales.vector())[0])


def made(stages: list[float], microbatches: int, parts: int = 1) -> StepCost:
    """A step of stages that only multiply matrices."""
    rows = np.zeros((1, len(stages), len(STAGE_SCALES)))
    rows[..., 0] = stages
    one = np.ones(1)
    return StepCost(
        stages=rows,
        counts=np.ones((1, len(stages))),
        behind=np.zeros((1, len(stages), 2)),
        state=np.zeros((1, 2)),
        optimizer=0 * one,
        dispatch=0 * one,
        num_microbatches=np.array([microbatches]),
        virtual_stages=np.array([parts]),
        overlap_slowdown=1.1 * one,
        overlap_share=one,
        order=np.ones((1, 1, 2)),
    )


def test_the_pipeline_by_hand() -> None:
    """(m - 1) max + sum; interleaved the fill and drain are 1/v of it."""
    assert made([1, 1, 1, 1], 8).step_s(ONE) == 7 + 4
    assert made([1, 2, 1], 5).step_s(ONE) == 4 * 2 + 4
    assert made([1, 1, 1, 1], 8, 3).step_s(ONE) == 8 + 3 / 3
    terms = made([1, 2, 1], 5).terms(ONE)
    assert terms["matmul"] == pytest.approx(5 * 4 / 3)
    assert sum(terms.values()) == pytest.approx(12)


@given(
    base=st.lists(
        st.lists(st.floats(1e-6, 1.0), min_size=6, max_size=6), min_size=1, max_size=4
    ),
    same=st.booleans(),
    microbatches=st.integers(1, 64),
    parts=st.integers(1, 4),
)
def test_no_rounding_error_makes_a_bubble_negative(
    base: list[list[float]], same: bool, microbatches: int, parts: int
) -> None:
    cost = made([0.0] * len(base), microbatches, parts)
    rows = [base[0]] * len(base) if same else base
    cost = replace(cost, stages=np.array([rows]))
    (bubble,) = cost.terms(ONE)["bubble"]
    assert bubble >= 0 and (len(base) > 1 or bubble == 0)


def test_what_is_behind_computation_slows_it_down() -> None:
    """Of 3 s beside 2 s of products 1 s is left, and the products take 1.1 x as long;
    activations wait. Of 1 s, the third that is read first has nothing beside it."""
    cost = replace(made([2.0], 1), behind=np.array([[[3.0, 0.0]]]))
    assert cost.step_s(ONE)[0] == pytest.approx(2 + 1 + 0.2)
    stages = cost.stages.copy()
    stages[..., 3] = 1.0
    waits = replace(cost, stages=stages)
    assert waits.step_s(ONE)[0] == pytest.approx(2 + 1 + 0.2 + 1)
    assert waits.terms(ONE)["tensor"] == 1
    order = np.array([[[0.0, 1 / 3], [2 / 3, 1.0]]])
    short = replace(cost, behind=cost.behind / 3, order=order)
    assert short.step_s(ONE)[0] == pytest.approx(2 + 1 / 3 + 0.1 * 2 / 3)
    half = replace(short, overlap_share=np.array([0.5]))  # 1 - 2/3 x 1 is the same
    assert half.step_s(ONE)[0] == pytest.approx(2 + 1 / 3 + 0.1 * 2 / 3)
    none = replace(short, overlap_share=np.zeros(1))
    assert none.step_s(ONE)[0] == pytest.approx(3)


def test_a_stack_is_its_rows() -> None:
    found = [
        step_cost(SHAPE, layout, pool_of("a100", layout.gpus))
        for layout in (LAYOUT, replace(LAYOUT, pp=1), replace(LAYOUT, pp=2, zero=3))
    ]
    together = stack(found)
    scales = A100_SCALES.vector()
    assert together.step_s(scales) == pytest.approx(
        [float(c.step_s(scales)[0]) for c in found]
    )
    for name, values in together.terms(scales).items():
        assert values == pytest.approx([float(c.terms(scales)[name][0]) for c in found])


def test_the_terms_are_where_they_belong() -> None:
    cost = step_cost(SHAPE, replace(LAYOUT, tp=1, pp=1, dp=1), pool_of("a100", 1))
    terms = cost.terms(ONE)
    assert not any(terms[n] for n in ("tensor", "pipeline", "data", "bubble"))
    assert all(terms[name] > 0 for name in ("matmul", "elementwise", "optimizer"))


@pytest.mark.parametrize("field", Scales.names())
def test_every_scalar_lengthens_the_step(field: str) -> None:
    layout = replace(LAYOUT, tp=8, dp=2)
    assert seconds(layout, scales=replace(Scales(), **{field: 2.0})) > seconds(layout)


@settings(max_examples=25)
@given(
    tp=st.sampled_from([1, 2, 8, 16]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 3, 4]),
    micro_batch=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["full", "selective", "none"]),
)
def test_the_step_is_never_below_the_peak(
    tp: int, pp: int, dp: int, micro_batch: int, zero: int, recompute: Recompute
) -> None:
    layout = ParallelLayout(
        tp=tp, pp=pp, dp=dp, micro_batch=micro_batch, zero=zero,
        global_batch=8 * micro_batch * dp, recompute=recompute,
    )  # fmt: skip
    cost = step_cost(SHAPE, layout, pool_of("a100", layout.gpus))
    terms = cost.terms(ONE)
    assert all(np.isfinite(v[0]) and v[0] > -1e-9 for v in terms.values())
    flops = SHAPE.flops(layout.global_batch, recompute)
    step_s = float(np.sum(list(terms.values())))
    assert step_s > flops / layout.gpus / 312e12
    twice = replace(layout, global_batch=2 * layout.global_batch)
    again = seconds(twice)
    assert step_s < again <= 2 * step_s * (1 + 1e-9)


def test_what_makes_a_step_longer() -> None:
    base = seconds(LAYOUT)
    assert seconds(replace(LAYOUT, recompute="none")) < base
    assert seconds(LAYOUT, replace(SHAPE, seq_len=8192)) > 4 * base
    assert seconds(LAYOUT, cluster="h100") < base
    assert seconds(LAYOUT, cluster="jean-zay") > base  # half the network
    interleaved = replace(LAYOUT, virtual_stages=2)
    assert seconds(interleaved) < base
    across = replace(LAYOUT, tp=16, dp=1, global_batch=64)  # leaves the host
    within = replace(LAYOUT, tp=8, dp=2, global_batch=64)
    assert seconds(across) > seconds(within)


def test_computing_hides_the_gathering_of_zero_3() -> None:
    layout = ParallelLayout(tp=1, pp=1, dp=64, micro_batch=8, global_batch=512, zero=3)
    hidden = step_cost(SHAPE, layout, pool_of("a100", 64)).terms(ONE)
    assert hidden["data"] < 0.1 * hidden["matmul"]
    starved = replace(layout, micro_batch=1, global_batch=64)
    slow = replace(Scales(), network=10.0).vector()
    bare = step_cost(SHAPE, starved, pool_of("jean-zay", 64)).terms(slow)
    assert bare["data"] > bare["matmul"]


def test_uneven_stages_wait_for_the_longest() -> None:
    even = replace(LAYOUT, stage_layers=(8, 8, 8, 8))
    assert seconds(even) == seconds(LAYOUT)
    assert seconds(replace(LAYOUT, stage_layers=(9, 9, 9, 5))) > seconds(LAYOUT)


# -------------------------------------------------------------------- search


@pytest.mark.more
def test_the_best_layout_is_the_best_of_all() -> None:
    like = replace(LAYOUT, pp=2, dp=2, global_batch=16)
    pool, shape = pool_of("a100", 16), replace(SHAPE, layers=6)
    found = search(shape, like, pool, Scales())
    times = {}
    for layout in layouts(shape, like):
        assert layout.gpus == 16 and layout.global_batch == like.global_batch
        room = (1 - HEADROOM) * pool.device.memory_bytes
        if np.sum(list(memory(shape, [layout], pool).values())) <= room:
            times[layout] = seconds(layout, shape)
    assert len(found) == len(times)
    assert found[0].step_s == pytest.approx(min(times.values()))
    assert [c.step_s for c in found] == sorted(c.step_s for c in found)


def test_what_cannot_fit_says_by_how_much() -> None:
    large = replace(SHAPE, hidden=25600, layers=128)
    with pytest.raises(ValueError, match=r"needs .* GB of 76.6 GB .*Give more devices"):
        search(large, replace(LAYOUT, pp=1, dp=1), pool_of("a100", 4), Scales())


def test_a_batch_that_no_layout_divides_is_said() -> None:
    small = replace(SHAPE, hidden=1024, layers=4)
    like = ParallelLayout(tp=1, pp=1, dp=7, micro_batch=1, global_batch=8)
    said = "7 devices .*global_batch=8.*Allowed: such as a multiple of 7"
    with pytest.raises(ValueError, match=said):
        search(small, like, pool_of("a100", 7), Scales())
    found = search(small, replace(like, global_batch=14), pool_of("a100", 7), Scales())
    assert {one.split for one in found} == {(1, 1, 7)}


# -------------------------------------------------------------------- scales


def test_only_what_belongs_to_the_device_is_carried_over() -> None:
    carried = elsewhere(A100_SCALES)
    kept = carried.matmul, carried.memory
    assert kept == (A100_SCALES.matmul, A100_SCALES.memory)
    others = ("launch", "fast_link", "network", "next_stage")
    assert {getattr(carried, name) for name in others} == {1.0}
    assert scales_of("a100") == scales_of("v100") == carried
    assert scales_of("h100").matmul > carried.matmul
