"""The planner against published runs (reference section 12, T5 and T6).

Targets stand in the tests; where one is missed, the test holds what is reached and
says so. All figures are deterministic.
"""

import numpy as np
import pytest

from dtft.planner.cluster import CARRIED_OVER, CATALOG
from dtft.planner.transformer import A100_SCALES, H100_SCALES, elsewhere
from experiments.public_measurements import memory_bytes
from experiments.public_studies import (
    FROM_CATALOG,
    FROM_OTHERS,
    FROM_OWN,
    FROM_RUNS,
    H100_TABLE,
    TRANSFERS,
    LeaveOneOut,
    Transfer,
    as_bfloat16,
    bigscience_loo,
    costs_of,
    fp8_rows,
    h100_fit,
    h100_rows,
    interval_coverage,
    left_out_tables,
    seconds_of,
    transfer,
    widths_without,
)
from experiments.published_rows import (
    bigscience,
    llm_foundry,
    megatron,
    ranking_set,
)


@pytest.fixture(scope="module")
def carried() -> list[Transfer]:
    return transfer()


@pytest.fixture(scope="module")
def found() -> LeaveOneOut:
    return bigscience_loo()


def test_bigscience_leave_one_out(found: LeaveOneOut) -> None:
    assert len(found.rows) == 21
    judged = found.judgement
    assert (judged.num_pairs_5, judged.num_pairs_10) == (130, 94)
    assert judged.median_error <= 0.06
    assert judged.concordance_5 >= 0.85
    assert judged.concordance_10 >= 0.90
    assert found.top_3 <= 1.02
    # What is reached: 3.7 %, 0.938, 1.000; top 1 by itself.
    assert judged.median_error <= 0.038
    assert judged.concordance_5 >= 0.93
    assert found.top_1 <= 1.02


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_kept_scalars_are_those_of_the_fit(found: LeaveOneOut) -> None:
    assert A100_SCALES.vector() == pytest.approx(found.fitted.values, rel=2e-3)
    h100 = h100_fit().values
    assert H100_SCALES.vector() == pytest.approx(h100, rel=2e-3)


@pytest.mark.more
def test_other_days_of_bigscience_are_near() -> None:
    rows = [p for p in bigscience() if p.group in "FG"]
    errors = costs_of(rows).step_s(A100_SCALES.vector()) / seconds_of(rows) - 1
    assert len(rows) > 30 and np.median(np.abs(errors)) < 0.04


@pytest.mark.more
def test_memory_of_bigscience() -> None:
    rows = [p for p in bigscience() if p.memory_bytes]
    errors = memory_bytes(rows) / np.array([p.memory_bytes for p in rows]) - 1
    assert np.median(np.abs(errors)) < 0.06
    assert np.quantile(errors, 0.1) > -0.11  # the headroom of `row_search`


def test_megatron_by_transfer(carried: list[Transfer]) -> None:
    """Target 9 of 10 within 15 %: met by all ten, the worst is 8.5 % off."""
    within = [t for t in carried if abs(t.rate_error) <= 0.15]
    assert len(within) >= 9
    assert max(abs(t.rate_error) for t in carried) < 0.10


def test_megatron_splits(carried: list[Transfer]) -> None:
    """Target 9 of 10 within 10 % of our best: missed by one; 18B is faster with tp=2
    here, and 39B by 12 % with tp=4 and 12 virtual stages."""
    apart = {t.published.name for t in carried if t.split_ratio > 1.1}
    assert apart == {"18B", "39B"}
    assert max(t.split_ratio for t in carried) < 1.171


@pytest.mark.parametrize("rule", TRANSFERS)
def test_megatron_rates_hold_whatever_else_is_carried(rule: str) -> None:
    """The result is not one lucky rule's."""
    rows = megatron()
    errors = seconds_of(rows) / costs_of(rows).step_s(TRANSFERS[rule].vector()) - 1
    assert (np.abs(errors) <= 0.15).all()


def test_published_plans_fit(carried: list[Transfer]) -> None:
    assert memory_bytes([t.published for t in carried]).max() < 85.1e9


@pytest.mark.more
@pytest.mark.timeout(300)
def test_llm_foundry() -> None:
    """A100, nothing fitted here; and H100, fitted to the same rows: target 12 %."""
    rows = [p for p in llm_foundry() if p.group.startswith("a100")]
    times = costs_of(rows).step_s(elsewhere(A100_SCALES).vector())
    assert np.median(np.abs(times / seconds_of(rows) - 1)) < 0.095
    own = h100_rows()
    times = costs_of(own).step_s(elsewhere(H100_SCALES).vector())
    assert np.median(np.abs(times / seconds_of(own) - 1)) < 0.07


def test_rows_of_8_bits_have_the_peak_of_8_bits() -> None:
    """They are 16 % too fast then: what casts and scales take is not priced."""
    rows = fp8_rows()
    assert len(rows) == 7
    scales = elsewhere(H100_SCALES).vector()
    costs, wide = costs_of(rows), costs_of(as_bfloat16(rows))
    assert (costs.terms(scales)["matmul"] < 0.925 * wide.terms(scales)["matmul"]).all()
    errors = costs.step_s(scales) / seconds_of(rows) - 1
    assert np.median(np.abs(errors)) < 0.16


@pytest.mark.more
@pytest.mark.timeout(300)
def test_each_table_of_a100_without_itself() -> None:
    for name, one in left_out_tables().items():
        for times in (one.device_only, one.starts):
            errors = times / seconds_of(one.rows) - 1
            assert np.median(np.abs(errors)) <= 0.15, name


def test_the_ranking_set_is_the_protocols() -> None:
    rows = ranking_set()
    assert {p.row.shape.heads for p in rows} == {64}
    assert sum(p.row.layout.global_batch >= 2016 for p in rows) == 18


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_kept_errors_are_those_of_rows_that_no_fit_saw() -> None:
    for kept, level in ((CATALOG, FROM_CATALOG), (CARRIED_OVER, FROM_OTHERS)):
        found = widths_without("", level)
        assert kept.errors == pytest.approx(found.errors, abs=2e-3)
        assert kept.below == pytest.approx(found.below, abs=2e-3)


MISSED = {
    ("BigScience", FROM_RUNS),  # 95.2 %
    ("Megatron", FROM_CATALOG),  # all 10 rows, thrice
    ("Megatron", FROM_OTHERS),
    ("Megatron", FROM_RUNS),
    (H100_TABLE, FROM_OWN),  # 97.1 %
    (H100_TABLE, FROM_RUNS),  # 97.1 %
}
"""Tables and levels of which more than the target of 95 % are held."""
LEVELS = (
    *(
        (table, level)
        for table in ("BigScience", "Megatron", "llm-foundry", H100_TABLE)
        for level in (FROM_CATALOG, FROM_OTHERS, FROM_RUNS)
    ),
    (H100_TABLE, FROM_OWN),
)


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("table", "level"), LEVELS)
def test_intervals_of_tables_they_were_not_made_with(table: str, level: str) -> None:
    """Target: 75 to 95 % held, and a median half width of at most 20 %."""
    found = interval_coverage(table)[level]
    assert 0.75 <= found.held
    assert found.half_width <= 0.2
    if (table, level) in MISSED:
        assert 0.95 < found.held <= 1.0  # take it out of `MISSED` once it is met
        assert table == "Megatron" or found.held <= 0.98
    else:
        assert found.held <= 0.95
