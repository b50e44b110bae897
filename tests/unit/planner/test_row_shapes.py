"""Rows of models unlike GPT: grouped-query attention, experts, long contexts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dtft.planner.ir import PRODUCTS
from dtft.planner.search import Scales
from dtft.planner.transformer import (
    Habits,
    ParallelLayout,
    Row,
    Shape,
    Table,
    memory,
    pool_of,
    step_cost,
    workload_of,
)
from dtft.planner.transformer.predict import predict_table, search_of, space_of

LLAMA = Shape(
    hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, gated=True, seq_len=8192,
    vocab=128256,
)  # fmt: skip
MIXTRAL = replace(LLAMA, experts=8, top_k=2, seq_len=4096, vocab=32000)
LAYOUT = ParallelLayout(
    tp=1, pp=1, dp=8, micro_batch=1, global_batch=16, recompute="none",
    flash_attention=True, gradient_bytes=4,
)  # fmt: skip
SEQUENCES = LAYOUT.global_batch
POOL = pool_of("a100", 8)
HEADER = (
    "heads,hidden,layers,seq_len,vocab,gpus,tp,pp,dp,micro_batch,virtual_stages,"
    "recompute,global_batch"
)
ROW = "32,4096,32,8192,128256,16,2,2,4,1,1,none,64"


def row(**cells: object) -> Row:
    """A row with further columns, or with other cells."""
    names, values = (
        HEADER.split(","),
        dict(zip(HEADER.split(","), ROW.split(","), strict=True)),
    )
    values |= {name: str(cell) for name, cell in cells.items()}
    header = ",".join([*names, *(name for name in cells if name not in names)])
    (found,) = Table.parse(f"{header}\n{','.join(values.values())}\n").rows(Habits())
    return found


def products(shape: Shape, layout: ParallelLayout) -> float:
    graph = workload_of(shape, layout).graph
    return sum(
        op.flops * op.trips
        for op in graph.operators
        if op.kind in PRODUCTS and not op.unread
    )


def held(shape: Shape, layout: ParallelLayout = LAYOUT) -> int:
    graph = workload_of(shape, layout).graph
    inputs = graph.inputs.items()
    arrays = [graph.values[i].shape for path, i in inputs if path.startswith("params")]
    return sum(int(np.prod(shape)) for shape in arrays)


def seconds(shape: Shape, layout: ParallelLayout) -> dict[str, float]:
    cost = step_cost(shape, layout, pool_of("a100", layout.gpus))
    return {k: float(v[0]) for k, v in cost.terms(Scales().vector()).items()}


def sent(shape: Shape, layout: ParallelLayout) -> Counter[tuple[str, str, int]]:
    """Counts collectives of one layer by kind, axis and total bytes."""
    pool = pool_of("a100", layout.gpus)
    search, space = search_of(shape, layout, pool), space_of([layout])
    found: Counter[tuple[str, str, int]] = Counter()
    for group, work in search.works(search.price(space).division_of(0)):
        for one in work.sent:
            key = one.kind, "+".join(one.axes), int(one.amount.total)
            found[key] += round(group.times) // shape.layers
    return found


# ------------------------------------------------- grouped-query attention, gated


def test_parameters_of_a_llama_by_hand() -> None:
    """Llama 3 8B without its second embedding, RoPE in place of learnt positions."""
    h, kv, f = 4096, 1024, 14336
    matrices = 32 * (2 * h * h + 2 * h * kv + 3 * h * f) + 128256 * h
    positions = 8192 * h
    assert LLAMA.parameters == pytest.approx(matrices + positions, rel=5e-4)
    assert LLAMA.parameters + 128256 * h - positions == pytest.approx(8.03e9, rel=1e-3)
    assert held(LLAMA) == pytest.approx(LLAMA.parameters, rel=1e-3)


def test_flops_of_a_llama_by_hand() -> None:
    h, kv, f, s = 4096, 1024, 14336, 8192
    layer = 2 * (2 * h * h + 2 * h * kv + 3 * h * f) + 4 * s * h
    by_hand = 3 * SEQUENCES * s * (32 * layer + 2 * h * 128256)
    assert LLAMA.flops(SEQUENCES, "none") == by_hand
    plain = replace(LAYOUT, flash_attention=False)
    assert products(LLAMA, plain) == by_hand
    again = 4 * s * h * 32 * SEQUENCES * s / 2  # flash computes scores once more
    assert products(LLAMA, LAYOUT) == by_hand + again


def test_fewer_heads_of_keys_are_smaller_and_faster() -> None:
    whole = replace(LLAMA, kv_heads=0)
    assert held(whole) > held(LLAMA)
    assert seconds(whole, LAYOUT)["matmul"] > seconds(LLAMA, LAYOUT)["matmul"]
    kept = [memory(s, [LAYOUT], POOL)["activations"][0] for s in (whole, LLAMA)]
    assert kept[0] > kept[1]


def test_tensor_parallelism_has_two_reductions_per_pass() -> None:
    layout = replace(LAYOUT, tp=4, dp=2)
    found = sent(LLAMA, layout)
    rows = 2 * SEQUENCES * 8192 * 4096
    of_layer = {
        key[0]: n for key, n in found.items() if n and key[1:] == ("tensor", rows)
    }
    assert of_layer == {"all_reduce": 4}


# ------------------------------------------------------------------------ experts


def test_parameters_of_a_mixtral_by_hand() -> None:
    """Mixtral 8x7B without its second embedding."""
    h, kv, f = 4096, 1024, 14336
    layer = 2 * h * h + 2 * h * kv + 8 * 3 * h * f + 8 * h
    by_hand = 32 * layer + 32000 * h + 4096 * h
    assert MIXTRAL.parameters == pytest.approx(by_hand, rel=1e-4)
    real = MIXTRAL.parameters + (32000 - 4096) * h
    assert real == pytest.approx(46.7e9, rel=1e-3)
    assert held(MIXTRAL) == pytest.approx(MIXTRAL.parameters, rel=1e-4)


def test_flops_of_a_mixtral_by_hand() -> None:
    """Each token uses two of eight experts."""
    h, kv, f, s = 4096, 1024, 14336, 4096
    layer = 2 * (2 * h * h + 2 * h * kv + 2 * 3 * h * f + 8 * h) + 4 * s * h
    by_hand = 3 * SEQUENCES * s * (32 * layer + 2 * h * 32000)
    assert MIXTRAL.flops(SEQUENCES, "none") == by_hand
    assert products(MIXTRAL, replace(LAYOUT, flash_attention=False)) == by_hand


def test_expert_parallelism_divides_experts_and_exchanges_tokens() -> None:
    divided = replace(LAYOUT, ep=8)
    whole, parts = (
        memory(MIXTRAL, [one], POOL)["parameters"][0] for one in (LAYOUT, divided)
    )
    experts = 2 * 32 * 8 * 3 * 4096 * 14336
    assert whole - parts == pytest.approx(experts * 7 / 8, rel=1e-3)
    tokens = 2 * 2 * SEQUENCES * 4096 * 4096  # each goes to two experts
    found = sent(MIXTRAL, divided)
    # To the experts and back, in both passes.
    assert found["all_to_all", "expert", tokens] == 4
    assert not any(
        "expert" in key[1] for key, n in found.items() if key[0] == "all_gather"
    )
    costs = [seconds(MIXTRAL, one) for one in (LAYOUT, divided)]
    assert costs[1]["data"] < 0.2 * costs[0]["data"]
    assert costs[1]["tensor"] > costs[0]["tensor"] == 0
    assert costs[1]["matmul"] == pytest.approx(costs[0]["matmul"], rel=0.02)


# ------------------------------------------------------------------ long contexts


@pytest.mark.parametrize(
    ("shape", "ep"), [(LLAMA, 1), (replace(LLAMA, kv_heads=0), 1), (MIXTRAL, 1),
                      (MIXTRAL, 4)],
)  # fmt: skip
def test_context_parallelism_halves_the_work_of_a_sequence(
    shape: Shape, ep: int
) -> None:
    divided = replace(LAYOUT, cp=2, dp=4, ep=ep)
    whole = replace(LAYOUT, dp=4, ep=ep)
    one, two = seconds(shape, whole), seconds(shape, divided)
    assert two["matmul"] == pytest.approx(one["matmul"] / 2, rel=0.03)
    if ep == 1:
        assert two["tensor"] > one["tensor"] == 0
    sizes = [memory(shape, [each], POOL) for each in (whole, divided)]
    assert sizes[1]["activations"][0] == pytest.approx(
        sizes[0]["activations"][0] / 2, rel=0.1
    )
    assert sizes[1]["parameters"][0] == pytest.approx(
        sizes[0]["parameters"][0], rel=0.01
    )


def test_context_parallelism_gathers_keys_and_values() -> None:
    """Of all positions, in both passes."""
    found = sent(LLAMA, replace(LAYOUT, cp=2, dp=4))
    keys = 2 * SEQUENCES * 8192 * 1024
    of_layer = {key: n for key, n in found.items() if n and key[1] == "sequence"}
    assert of_layer == {("all_gather", "sequence", keys): 4}


def test_positions_are_divided_by_both_kinds_of_sequence_parallelism() -> None:
    layout = replace(LAYOUT, tp=2, dp=2, cp=2, recompute="selective")
    both = replace(layout, sequence_parallel=True)
    kept = [memory(LLAMA, [one], POOL)["activations"][0] for one in (layout, both)]
    assert kept[1] < 0.9 * kept[0]
    alone = memory(LLAMA, [replace(both, cp=1, dp=4)], POOL)["activations"][0]
    assert kept[1] == pytest.approx(alone / 2, rel=0.1)


# ------------------------------------------------------------------------- tables


def test_columns_are_read() -> None:
    found = row(ffn=14336, kv_heads=8, gated="yes", experts=8, top_k=1, ep=2)
    assert found.shape == replace(LLAMA, experts=8, top_k=1, seq_len=8192, vocab=128256)
    assert found.layout.ep == 2
    assert row(experts=4).shape.top_k == 2
    assert row().shape == row(ffn="", kv_heads="", cp="", ep="", gated="").shape
    assert row(ffn=4 * 4096, kv_heads=32).shape.parameters == row().shape.parameters
    assert row(cp=2, gpus=32).layout.cp == 2


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"kv_heads": 5}, "column heads: 32 is not divisible by kv_heads = 5. Change"),
        ({"kv_heads": 1}, "column kv_heads: 1 is not divisible by tp = 2. Change"),
        (
            {"ffn": 1001},
            "column ffn: 1001 is not divisible by tp = 2. Change ffn, or tp",
        ),
        ({"ffn": "wide"}, "column ffn: 'wide' is no whole number above 0"),
        ({"ffn": 0}, "column ffn: '0' is no whole number above 0"),
        ({"experts": 6, "ep": 4}, "column experts: 6 is not divisible by ep = 4"),
        ({"experts": 3}, "column seq_len: 16384 is not divisible by experts = 3"),
        ({"experts": 8, "ep": 8}, "column dp: 4 is not divisible by ep = 8"),
        ({"ep": 2}, "column experts: 1 is not divisible by ep = 2"),
        ({"experts": 4, "top_k": 5}, "column top_k: 5 of experts=4. Allowed: 1 to 4"),
        ({"top_k": 2}, "column top_k: 2 of experts=1. Allowed: 1 to 1"),
        ({"cp": 3, "gpus": 48}, "column seq_len: 8192 is not divisible by cp = 3"),
        (
            {"cp": 2},
            "gpus: 16 is not tp x pp x dp x cp = 2 x 2 x 4 x 2 = 32. Change gpus",
        ),
        ({"gated": "maybe"}, "column gated: 'maybe'. Allowed: true, yes"),
        ({"kv_head": 8}, "column 'kv_head' is not known"),
    ],
)
def test_bad_combinations_say_what_to_change(
    cells: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError) as refused:
        row(**cells)
    assert said in str(refused.value)


@pytest.mark.parametrize("software", ["megatron", "eager", "xla"])
def test_every_software_runs_them(software: str) -> None:
    text = f"{HEADER},software,ffn,kv_heads,gated,experts,ep\n"
    text += f"{ROW},{software},14336,8,yes,,\n{ROW},{software},14336,8,yes,8,2\n"
    _, (dense, experts) = predict_table(text, "h100")
    assert 0 < dense.step_s < experts.step_s
    assert 100 < dense.tflops_per_gpu < 700
