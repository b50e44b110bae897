"""A row's program: what it computes, sends and keeps, against hand counts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dtft.planner.ir import PRODUCTS
from dtft.planner.search import Scales
from dtft.planner.transformer import ParallelLayout, Shape, memory, pool_of, step_cost
from dtft.planner.transformer.model import RECOMPUTE, Recompute
from dtft.planner.transformer.predict import search_of, space_of
from dtft.planner.transformer.program import workload_of
from experiments.published_rows import (
    DATA,
    bigscience,
    llm_foundry,
    megatron,
)

SHAPE = Shape(hidden=4096, layers=36, heads=32, seq_len=2048, vocab=51200)
LAYOUT = ParallelLayout(tp=4, pp=1, dp=1, micro_batch=2, global_batch=8)
ONE = Scales().vector()


def counted(layout: ParallelLayout) -> float:
    graph = workload_of(SHAPE, layout).graph
    return sum(
        op.flops * op.trips
        for op in graph.operators
        if op.kind in PRODUCTS and not op.unread
    )


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


@pytest.mark.parametrize("software", ["megatron", "eager"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_products_are_the_flops(recompute: Recompute, software) -> None:
    """PyTorch recomputes all of a layer, also its last product."""
    layout = replace(LAYOUT, recompute=recompute, software=software)
    assert counted(layout) == SHAPE.flops(layout.global_batch, recompute)


def test_jax_leaves_out_what_no_gradient_needs() -> None:
    layout = replace(LAYOUT, software="xla")
    last = 2 * 8 * 2048 * 4 * SHAPE.hidden**2 * SHAPE.layers
    assert counted(layout) == SHAPE.flops(8, "full") - last


def test_flash_attention_computes_scores_once_more() -> None:
    plain = replace(LAYOUT, recompute="none")
    flash = replace(plain, flash_attention=True)
    attention = 4 * 8 * 2048**2 * 4096 * SHAPE.layers  # forward, of all sequences
    assert counted(flash) - counted(plain) == attention / 2
    pool = pool_of("a100", 4)
    costs = [step_cost(SHAPE, one, pool).terms(ONE) for one in (plain, flash)]
    saved = costs[0]["elementwise"] - costs[1]["elementwise"]
    scores = (9 + 11) * 8 * 2048**2 * 32 / LAYOUT.tp * SHAPE.layers
    copied = 8 * 8 * 2048 * 4096 / LAYOUT.tp * SHAPE.layers
    bandwidth = pool.device.memory_bandwidth * pool.device.efficiency.memory
    # Flash attention reads and writes queries, keys, values while it computes.
    assert saved[0] * bandwidth == pytest.approx(scores + copied, rel=1e-3)


def sent(layout: ParallelLayout) -> Counter[str]:
    """Counts the collectives of activations of one layer and microbatch."""
    pool = pool_of("a100", layout.gpus)
    search, space = search_of(SHAPE, layout, pool), space_of([layout])
    priced = search.price(space)
    rows = layout.global_batch * SHAPE.seq_len * SHAPE.hidden
    found: Counter[str] = Counter()
    for group, work in search.works(priced.division_of(0)):
        for one in work.sent:
            if one.axes == ("tensor",) and one.amount.total == 2 * rows:
                found[one.kind] += round(group.times) // SHAPE.layers
    return found


@pytest.mark.parametrize(
    "recompute, parallel, expected",
    [
        ("full", False, {"all_reduce": 6}),
        ("none", False, {"all_reduce": 4}),
        # Two gradients of a layer are gathered for each of two products.
        ("selective", True, {"all_gather": 8, "reduce_scatter": 4}),
    ],
)
def test_collectives_of_a_layer(recompute, parallel, expected) -> None:
    layout = replace(LAYOUT, recompute=recompute, sequence_parallel=parallel)
    assert {kind: n for kind, n in sent(layout).items() if n} == expected


def test_sequence_parallelism_divides_the_rest() -> None:
    layout = replace(LAYOUT, recompute="selective")
    divided = replace(layout, sequence_parallel=True)
    pool = pool_of("a100", 4)
    whole, parts = (
        step_cost(SHAPE, one, pool).terms(ONE)["elementwise"][0]
        for one in (layout, divided)
    )
    assert parts < whole
    kept = [memory(SHAPE, [one], pool)["activations"][0] for one in (layout, divided)]
    assert kept[1] < 0.75 * kept[0]


def test_rows_of_one_program_are_priced_together() -> None:
    layouts = [
        replace(LAYOUT, tp=tp, pp=pp, micro_batch=1) for tp, pp in ((4, 1), (2, 2))
    ]
    pool = pool_of("a100", 4)
    both = search_of(SHAPE, layouts[0], pool).step_cost(space_of(layouts))
    for at, layout in enumerate(layouts):
        alone = step_cost(SHAPE, layout, pool).step_s(ONE)
        assert both.step_s(ONE)[at] == pytest.approx(alone[0])


# -------------------------------------------------------------------- memory


def test_bytes_per_parameter() -> None:
    """16 without ZeRO; then the optimizer's 12, the gradient's 2, all are divided."""
    dp = 8
    held = sum(
        np.prod(one.shape)
        for one in map(
            workload_of(SHAPE, LAYOUT).graph.values.__getitem__,
            [
                index
                for path, index in workload_of(SHAPE, LAYOUT).graph.inputs.items()
                if path.startswith("params")
            ],
        )
    )
    assert held == pytest.approx(SHAPE.parameters, rel=1e-3)
    pool = pool_of("a100", dp)
    for zero, each in ((0, 16), (1, 4 + 12 / dp), (2, 2 + 14 / dp), (3, 16 / dp)):
        layout = ParallelLayout(
            tp=1, pp=1, dp=dp, micro_batch=16, global_batch=128, zero=zero,
            recompute="none",
        )  # fmt: skip
        terms = memory(SHAPE, [layout], pool)
        state = terms["parameters"] + terms["gradients"] + terms["optimizer"]
        assert state[0] == pytest.approx(each * held, rel=1e-6)


def test_activations_by_hand() -> None:
    """arXiv 2205.05198, table 2: 34 + 5 a s / h bytes of each token and hidden unit,
    here without norms' 32-bit statistics; logits are small."""
    shape = replace(SHAPE, vocab=128)
    pool = pool_of("a100", 1)
    layout = ParallelLayout(
        tp=1, pp=1, dp=1, micro_batch=1, global_batch=1, recompute="none"
    )
    rows = 2048 * 4096
    scores = 5 * 32 * 2048 / 4096
    found = memory(shape, [layout], pool)["activations"][0]
    assert found == pytest.approx(36 * rows * (34 + scores), rel=0.1)
    full = replace(layout, recompute="full")
    kept = memory(shape, [full], pool)["activations"][0]
    by_hand = rows * (36 * 2 + 34 + scores)
    assert by_hand < kept < 1.6 * by_hand  # gradients of scores come on top


def test_a_pipeline_keeps_as_many_microbatches_as_stages() -> None:
    layout = ParallelLayout(tp=1, pp=4, dp=1, micro_batch=1, global_batch=32)
    shape = replace(SHAPE, vocab=128)
    one, four = (
        memory(shape, [one], pool_of("a100", 4))["activations"][0]
        for one in (replace(layout, global_batch=1), layout)
    )
    assert four == pytest.approx(4 * one, rel=1e-3)
