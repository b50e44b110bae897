"""What a transformer computes, sends and keeps, against hand counts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner.transformer.model import (
    RECOMPUTE,
    MicrobatchWork,
    ParallelLayout,
    Recompute,
    Shape,
    embedding_work,
    head_work,
    kept_layers,
    layer_work,
    memory,
    stage_memory,
    stage_parameters,
)
from experiments.published_rows import DATA, bigscience, llm_foundry, megatron

SHAPE = Shape(hidden=4096, layers=36, heads=32, seq_len=2048, vocab=51200)
LAYOUT = ParallelLayout(tp=4, pp=1, dp=1, micro_batch=2, global_batch=8)


def counted(work: MicrobatchWork) -> float:
    return sum(2 * p.m * p.n * p.k * p.batch * p.trips for p in work.matmuls)


@pytest.mark.parametrize("published", megatron(), ids=lambda p: p.name)
def test_parameters_of_megatron(published) -> None:
    text = (DATA / "megatron_a100.csv").read_text().splitlines()
    row = next(line for line in text if line.startswith(published.name + ","))
    printed = float(row.split(",")[1])
    assert published.row.shape.parameters / 1e9 == pytest.approx(printed, rel=0.03)


def test_parameters_of_the_other_tables() -> None:
    text = (DATA / "bigscience_176b_a100.csv").read_text().splitlines()
    printed = {line.split(",")[0]: float(line.split(",")[6]) for line in text[1:]}
    for p in bigscience():
        size = p.row.shape.parameters / 1e9
        assert size == pytest.approx(printed[p.name], rel=0.03), p.name
    lines = (DATA / "llmfoundry_fsdp.csv").read_text().splitlines()[1:]
    exact = [int(li.split(",")[-1]) for li in lines if li.split(",")[-2] == "false"]
    for p, size in zip(llm_foundry(), exact, strict=True):
        assert p.row.shape.parameters == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("published", megatron(), ids=lambda p: p.name)
def test_flops_of_the_readme(published) -> None:
    shape, batch = published.row.shape, published.row.layout.global_batch
    h, s, v, n = shape.hidden, shape.seq_len, shape.vocab, shape.layers
    by_hand = 96 * batch * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    assert shape.flops(batch, "full") == pytest.approx(by_hand, rel=1e-12)
    once = 72 * batch * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    assert shape.flops(batch, "none") == pytest.approx(once, rel=1e-12)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_matmuls_are_the_flops(recompute: Recompute, tp: int) -> None:
    layout = replace(LAYOUT, tp=tp, recompute=recompute)
    found = SHAPE.layers * counted(layer_work(SHAPE, layout))
    found += counted(head_work(SHAPE, layout)) + counted(embedding_work(SHAPE, layout))
    assert found * tp == SHAPE.flops(layout.micro_batch, recompute)


def test_flash_attention_computes_scores_once_more() -> None:
    plain = replace(LAYOUT, recompute="none")
    flash = replace(plain, flash_attention=True)
    attention = 4 * 2 * 2048**2 * 4096 / LAYOUT.tp  # forward, of two sequences
    more = counted(layer_work(SHAPE, flash)) - counted(layer_work(SHAPE, plain))
    assert more == attention / 2
    saved = layer_work(SHAPE, plain).num_bytes - layer_work(SHAPE, flash).num_bytes
    assert saved == pytest.approx((9 + 11) * 2 * 2048**2 * 32 / LAYOUT.tp)


@pytest.mark.parametrize(
    "recompute, parallel, expected",
    [
        ("full", False, {"all_reduce": 6}),
        ("none", False, {"all_reduce": 4}),
        ("selective", True, {"all_gather": 6, "reduce_scatter": 4}),
    ],
)
def test_collectives_of_a_layer(recompute, parallel, expected) -> None:
    layout = replace(LAYOUT, recompute=recompute, sequence_parallel=parallel)
    found = layer_work(SHAPE, layout).collectives
    assert {c.kind: c.trips for c in found} == expected
    assert {c.num_bytes for c in found} == {2 * 2048 * 4096 * 2}
    assert layer_work(SHAPE, replace(layout, tp=1)).collectives == ()


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    more=st.sampled_from([2, 4]),
    recompute=st.sampled_from(RECOMPUTE),
    parallel=st.booleans(),
)
def test_more_tensor_parallelism_is_less_work_of_each(
    tp: int, more: int, recompute: Recompute, parallel: bool
) -> None:
    layout = replace(LAYOUT, tp=tp, recompute=recompute, sequence_parallel=parallel)
    wider = replace(layout, tp=tp * more)
    for work_of in (layer_work, embedding_work, head_work):
        one, other = work_of(SHAPE, layout), work_of(SHAPE, wider)
        assert counted(other) <= counted(one)
        assert other.num_bytes <= one.num_bytes


# -------------------------------------------------------------------- memory


def test_bytes_per_parameter() -> None:
    """16 without ZeRO; then the optimizer's 12, the gradient's 2, all are divided."""
    dp, held = 8, SHAPE.parameters
    for zero, each in ((0, 16), (1, 4 + 12 / dp), (2, 2 + 14 / dp), (3, 16 / dp)):
        layout = ParallelLayout(
            tp=1, pp=1, dp=dp, micro_batch=16, global_batch=128, zero=zero,
            recompute="none",
        )  # fmt: skip
        terms = memory(SHAPE, layout)
        state = terms["parameters"] + terms["gradients"] + terms["optimizer"]
        assert state == pytest.approx(each * held, rel=1e-6)


def test_the_update_needs_fp32_gradients_when_activations_are_few() -> None:
    layout = ParallelLayout(tp=1, pp=1, dp=1, micro_batch=1, global_batch=1)
    terms = memory(SHAPE, layout)
    together = terms["optimizer"] + terms["activations"]
    assert together == pytest.approx(16 * SHAPE.parameters, rel=1e-6)


def test_activations_by_hand() -> None:
    """arXiv 2205.05198, tables 2 and 3, for one layer and microbatch."""
    one = replace(SHAPE, layers=1, vocab=128)
    rows = 2 * 2048 * 4096
    scores = 5 * 32 * 2048 / 4096
    rest = rows * (1 + 4) + 2 * 2048 * 10 * 128 / 4
    cases: list[tuple[Recompute, bool, bool, float]] = [
        ("none", False, False, 10 + 24 / 4 + scores / 4),
        ("none", False, True, 10 + 24 / 4),
        ("selective", False, False, 10 + 24 / 4 + scores / 4),
        ("full", False, False, 2 + 10 + 24 / 4 + scores / 4),
    ]
    for recompute, parallel, flash, each in cases:
        layout = replace(
            LAYOUT,
            recompute=recompute,
            sequence_parallel=parallel,
            flash_attention=flash,
        )
        assert memory(one, layout)["activations"] == pytest.approx(rows * each + rest)
    shared = replace(LAYOUT, recompute="none", sequence_parallel=True)
    expected = rows * (34 + scores) / 4 + rows * 5 / 4 + 2 * 2048 * 10 * 128 / 4
    assert memory(one, shared)["activations"] == pytest.approx(expected)


def test_first_and_last_stage_hold_the_embedding() -> None:
    layout = replace(LAYOUT, tp=1, pp=4, global_batch=64)
    held = [stage_parameters(SHAPE, layout, stage) for stage in range(4)]
    assert sum(held) == SHAPE.parameters + SHAPE.embedding_parameters
    assert held[1] == held[2] == 9 * SHAPE.layer_parameters


def test_layers_kept_in_a_pipeline() -> None:
    plain = replace(LAYOUT, tp=1, pp=4, global_batch=64)
    assert [kept_layers(SHAPE, plain, s) for s in range(4)] == [36, 27, 18, 9]
    few = replace(plain, global_batch=4)
    assert kept_layers(SHAPE, few, 0) == 18
    # arXiv 2205.05198: L (1 + (p - 1) / (p v)) on the first stage.
    parts = replace(plain, virtual_stages=3)
    assert kept_layers(SHAPE, parts, 0) == pytest.approx(36 * (1 + 3 / 12))


@given(
    micro_batch=st.integers(1, 8),
    zero=st.integers(0, 2),
    recompute=st.sampled_from(RECOMPUTE),
    pp=st.sampled_from([1, 2, 4, 6]),
)
def test_memory_grows_and_shrinks_as_it_should(
    micro_batch, zero, recompute, pp
) -> None:
    layout = ParallelLayout(
        tp=2, pp=pp, dp=4, micro_batch=micro_batch, global_batch=4 * 64 * micro_batch,
        recompute=recompute, zero=zero,
    )  # fmt: skip
    size = sum(memory(SHAPE, layout).values())
    larger = replace(
        layout, micro_batch=micro_batch + 1, global_batch=256 * (micro_batch + 1)
    )
    assert sum(memory(SHAPE, larger).values()) >= size
    more = memory(SHAPE, replace(layout, zero=zero + 1))
    state = ("parameters", "gradients", "optimizer")
    assert sum(more[n] for n in state) <= sum(memory(SHAPE, layout)[n] for n in state)
    parallel = replace(layout, sequence_parallel=True)
    assert sum(memory(SHAPE, parallel).values()) <= size
    flash = replace(layout, flash_attention=True)
    assert sum(memory(SHAPE, flash).values()) <= size
    every = [sum(stage_memory(SHAPE, layout, s).values()) for s in range(pp)]
    assert size == max(every)
