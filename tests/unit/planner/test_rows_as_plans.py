"""Rows of the published tables: `predict` and `dtft.plan` give the same seconds.

The planner searches with a row's layout as pins, and finds the one candidate that
`predict` prices.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

import dtft
from dtft.planner.cluster import Cluster, Pool
from dtft.planner.plan import Plan
from dtft.planner.search import Scales, best_of
from dtft.planner.transformer import (
    ParallelLayout,
    Shape,
    Table,
    pool_of,
    predict_table,
    step_cost,
    workload_of,
)
from dtft.planner.transformer.predict import habits_of
from dtft.planner.transformer.program import (
    batch_of,
    loss_of,
    mixed_adam,
    parameters_of,
)
from experiments.published_rows import Published, bigscience, llm_foundry, megatron

SHAPE = Shape(hidden=1024, layers=6, heads=8, seq_len=512, vocab=4096)
LAYOUT = ParallelLayout(tp=1, pp=1, dp=8, micro_batch=1, global_batch=16)
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"cp": 2, "dp": 4}),
    ({}, {"cp": 2, "dp": 4, "flash_attention": True, "recompute": "none"}),
    ({"kv_heads": 2, "gated": True}, {"cp": 2, "dp": 4, "flash_attention": True}),
    ({}, {"tp": 2, "dp": 4, "sequence_parallel": True, "recompute": "selective"}),
    ({"experts": 4, "top_k": 2}, {"ep": 4}),
    ({"experts": 4, "top_k": 2}, {"ep": 2, "zero": 1}),
    ({"experts": 4, "top_k": 2}, {"ep": 2, "zero": 3}),
    ({}, {"pp": 2, "dp": 4, "virtual_stages": 3}),
    ({}, {"pp": 4, "dp": 2, "stage_layers": (1, 2, 2, 1), "zero": 1}),
]
"""Fields of shapes and of layouts that no row of the tables has, or few have."""


def pins_of(layout: ParallelLayout) -> dict[str, Any]:
    """The pins of `dtft.plan` that leave a layout as the only candidate."""
    data = "fsdp" if layout.zero else "replica"
    sizes = {
        "stage": layout.pp, data: layout.replicas, "expert": layout.ep,
        "sequence": layout.cp, "tensor": layout.tp,
    }  # fmt: skip
    uneven = len(set(layout.stage_layers)) > 1
    return {
        **sizes,
        "order": tuple(sizes),
        "microbatches": layout.num_microbatches,
        "zero": layout.zero if layout.replicas > 1 else 0,
        "remat": "none",  # what is recomputed is in the program
        **({"stage_layers": layout.stage_layers} if uneven else {}),
        **({} if uneven else {"virtual_stages": layout.virtual_stages}),
    }


def roomy(pool: Pool) -> Pool:
    """A pool on which every plan fits, with the same seconds."""
    return replace(pool, device=replace(pool.device, memory_bytes=2**60))


def planned(shape: Shape, layout: ParallelLayout, pool: Pool) -> Plan:
    """What `dtft.plan` finds for a row's program, run by XLA."""
    return dtft.plan(
        loss=loss_of(shape, layout),
        optimizer=mixed_adam(),
        params=parameters_of(shape, layout),
        batch=batch_of(shape, layout),
        cluster=Cluster(pools=(roomy(pool),)),
        what_if=layout.pp > 1,
        **pins_of(layout),
    )


def searched(shape: Shape, layout: ParallelLayout, pool: Pool) -> Plan:
    """What the search of `dtft.plan` finds for a row's program and software."""
    question, pins = workload_of(shape, layout), pins_of(layout)
    cluster = Cluster(pools=(pool,))
    return best_of(question, cluster, pins, what_if=layout.pp > 1).plan


def by_term(terms: dict[str, float]) -> dict[str, float]:
    """Predicted seconds of a row, summed to the terms of plans."""
    return {
        "compute": terms["matmul"] + terms["elementwise"],
        "collectives": terms["tensor"] + terms["pipeline"] + terms["data"],
        **{name: terms[name] for name in ("launch", "optimizer", "bubble")},
    }


def check(shape: Shape, layout: ParallelLayout, pool: Pool, plan: Plan) -> None:
    """Compares a plan's terms with those that `predict` gives before scalars."""
    found = step_cost(shape, layout, pool).terms(Scales().vector())
    expected = by_term({name: float(s[0]) for name, s in found.items()})
    assert {axis: n for axis, n in plan.mesh.items() if n > 1} == {
        axis: n
        for axis, n in pins_of(layout).items()
        if axis in ("stage", "replica", "fsdp", "expert", "sequence", "tensor")
        and n > 1
    }
    terms = {"bubble": 0.0, **plan.prediction.terms}
    assert terms == pytest.approx(expected, rel=1e-9, abs=1e-12)


def by_program(rows: Iterable[Published]) -> list[Published]:
    """Rows of one program after another, so that each program is traced once."""
    keys = ("global_batch", "recompute", "flash_attention", "dtype", "gradient_bytes")
    return sorted(
        rows,
        key=lambda p: (
            repr(p.row.shape),
            *(str(getattr(p.row.layout, key)) for key in keys),
        ),
    )


def uneven_row() -> Published:
    rows = (p for p in bigscience() if len(set(p.row.layout.stage_layers)) > 1)
    return next(rows)


def test_a_sample_of_rows_is_priced_as_plans_are() -> None:
    """An interleaved one, one of many microbatches, an uneven one, ZeRO 2 and 3."""
    rows = [megatron()[7], bigscience()[0], uneven_row()]
    rows += [next(p for p in llm_foundry() if p.row.layout.zero == z) for z in (2, 3)]
    for p in rows:
        shape, own = p.row.shape, p.row.layout
        pool = pool_of(p.cluster, own.gpus)
        check(shape, own, pool, searched(shape, own, pool))
        jax = replace(own, software="xla")
        check(shape, jax, pool, planned(shape, jax, pool))


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("table", [bigscience, megatron, llm_foundry])
def test_every_row_is_priced_as_the_search_prices_it(table) -> None:
    for p in by_program(table()):
        pool = pool_of(p.cluster, p.row.layout.gpus)
        plan = searched(p.row.shape, p.row.layout, pool)
        check(p.row.shape, p.row.layout, pool, plan)


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("table", [bigscience, megatron, llm_foundry])
def test_every_row_run_by_xla_is_priced_as_a_plan(table) -> None:
    """`dtft.plan` itself plans the first row of each model, which it traces again."""
    known = set()
    for p in by_program(table()):
        shape, layout = p.row.shape, replace(p.row.layout, software="xla")
        pool = pool_of(p.cluster, layout.gpus)
        model = shape.hidden, shape.layers, layout.recompute, layout.dtype
        find = searched if model in known else planned
        check(shape, layout, pool, find(shape, layout, pool))
        known.add(model)


@pytest.mark.parametrize("cluster", ["a100", "h100", "v100"])
def test_a_table_gets_the_seconds_of_a_plan_for_a_row_of_xla(cluster: str) -> None:
    """No scalars fitted to PyTorch's programs, and the interval of the catalog."""
    text = (
        "heads,hidden,layers,seq_len,vocab,gpus,tp,pp,dp,micro_batch,virtual_stages,"
        "recompute,global_batch,software,sequence_parallel\n"
        "8,1024,6,512,4096,8,2,1,4,1,1,none,16,xla,no\n"
    )
    _, (found,) = predict_table(text, cluster)
    pool = pool_of(cluster, 8)
    (row,) = Table.parse(text).rows(habits_of(pool.device))
    plan = planned(row.shape, row.layout, pool).prediction
    terms = {"bubble": 0.0, **plan.terms}
    assert by_term(found.terms) == pytest.approx(terms, rel=1e-9, abs=1e-12)
    assert (found.low_s, found.high_s) == pytest.approx((plan.low_s, plan.high_s))


@pytest.mark.parametrize("software", ["megatron", "eager", "xla"])
@pytest.mark.parametrize(("of_shape", "of_layout"), OPTIONS)
def test_what_the_tables_lack_is_priced_as_plans_are(
    of_shape, of_layout, software
) -> None:
    shape = replace(SHAPE, **of_shape)
    layout = replace(LAYOUT, **of_layout, software=software)
    pool = pool_of("a100", layout.gpus)
    check(shape, layout, pool, searched(shape, layout, pool))
    if software == "xla" and not layout.sequence_parallel:
        check(shape, layout, pool, planned(shape, layout, pool))
