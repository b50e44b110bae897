"""Fits, leave-one-out and what judges them, on made-up numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner.cluster import Accuracy
from dtft.planner.transformer.fitting import (
    UnseenRows,
    accuracy_from,
    concordance,
    coverage,
    fit,
    judge,
    leave_one_out,
    regret,
)

PARTS = np.array([[1.0, 4, 2], [3, 1, 1], [2, 2, 5], [6, 1, 3], [1, 1, 8], [5, 5, 1]])


def predict(scales: np.ndarray) -> np.ndarray:
    return PARTS @ scales


def test_a_fit_finds_what_made_the_rows() -> None:
    true = np.array([1.3, 0.8, 1.1])
    found = fit(predict, predict(true), np.ones(3), spread=5.0)
    assert found.values == pytest.approx(true, rel=1e-3)
    assert np.abs(found.errors).max() < 1e-3


def test_one_wild_row_does_not_carry_the_fit_away() -> None:
    true = np.array([1.3, 0.8, 1.1])
    measured = predict(true)
    measured[2] *= 1.5
    found = fit(predict, measured, np.ones(3))
    assert np.median(np.abs(found.errors)) < 0.03


def test_what_rows_do_not_show_stays_as_the_data_sheet_says() -> None:
    blind = PARTS * [1, 1, 0]
    found = fit(lambda x: blind @ x, blind @ np.array([1.2, 1.2, 9.0]), np.ones(3))
    assert found.values[2] == pytest.approx(1.0)


def test_a_row_left_out_is_not_seen() -> None:
    """Whatever the left-out row measured, its prediction is the same."""
    measured = predict(np.array([1.3, 0.8, 1.1]))
    found = leave_one_out(predict, measured, np.ones(3))
    for row in range(len(measured)):
        other = measured.copy()
        other[row] *= 3
        assert leave_one_out(predict, other, np.ones(3))[row] == found[row]


def test_concordance_by_hand() -> None:
    measured = np.array([100.0, 104.0, 112.0, 130.0])
    predicted = np.array([10.0, 9.0, 11.0, 10.5])
    # Of the five pairs more than 5 % apart only (112, 130) is the wrong way round.
    assert concordance(predicted, measured, 0.05) == (4 / 5, 5)
    # 104 and 112 are less than 10 % apart.
    assert concordance(predicted, measured, 0.10) == (3 / 4, 4)


def test_of_no_pairs_far_enough_apart_none_is_ordered_wrongly() -> None:
    times = np.array([30.0, 31.0, 32.0])
    assert concordance(times[::-1], times, 0.10) == (1.0, 0)


def test_regret_by_hand() -> None:
    measured, predicted = np.array([5.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0])
    assert regret(predicted, measured, 1) == 5 / 4
    assert regret(predicted, measured, 2) == 1.0


@given(st.lists(st.floats(1.0, 100.0), min_size=3, max_size=12, unique=True))
def test_a_perfect_prediction_has_nothing_to_regret(times: list[float]) -> None:
    measured = np.array(times)
    found = judge(measured, measured, np.ones(len(times), bool))
    assert found.worst_error == 0 and regret(measured, measured, 1) == 1
    assert found.concordance_5 == found.concordance_10 == 1.0


def table(errors: np.ndarray, collectives: float = 0.0) -> UnseenRows:
    """Rows that are predicted to take 1 s, and took longer by relative errors."""
    compute = np.full(len(errors), 1 - collectives)
    return UnseenRows(
        terms={"compute": compute, "collectives": collectives + 0 * compute},
        measured=1 + errors,
    )


def test_the_interval_holds_four_fifths_of_rows_it_was_not_made_of() -> None:
    rng = np.random.default_rng(0)
    seen = table(rng.normal(0.1, 0.1, 500))
    found = accuracy_from([seen], "made up")
    assert found.errors["compute"] == pytest.approx(0.1 + 0.128, abs=0.02)
    assert found.below * found.errors["compute"] == pytest.approx(0.028, abs=0.02)
    new = coverage(table(rng.normal(0.1, 0.1, 500)), found)
    assert new.held == pytest.approx(0.8, abs=0.05)
    assert new.half_width == pytest.approx(0.128, abs=0.02)
    assert new.num_below == pytest.approx(50, abs=25)
    assert new.num_above == pytest.approx(50, abs=25)


def test_collectives_are_twice_as_uncertain() -> None:
    errors = np.linspace(-0.2, 0.2, 41)
    plain, sent = (accuracy_from([table(errors, one)], "") for one in (0.0, 1.0))
    assert plain.errors["compute"] == pytest.approx(2 * sent.errors["compute"])
    assert plain.errors["compute"] == pytest.approx(sent.errors["collectives"])


def test_a_table_of_many_rows_counts_as_one_of_few() -> None:
    few = table(np.full(10, 0.3))
    some, many = (table(np.tile([0.0, 0.1], n)) for n in (500, 5000))
    narrow, wide = (accuracy_from([few, one], "").errors for one in (some, many))
    assert narrow["compute"] == pytest.approx(wide["compute"], rel=1e-3)


def test_tables_that_differ_widen_the_interval() -> None:
    """A further table of normal errors is held as often as intended."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(400):
        first, *others = (table(rng.normal(e, 0.05, 20)) for e in rng.normal(0, 0.1, 4))
        held.append(coverage(first, accuracy_from(others, "")).held)
    assert np.mean(held) == pytest.approx(0.8, abs=0.05)


def test_the_prediction_is_in_its_interval() -> None:
    """Also if all rows took longer; or none is known to."""
    found = accuracy_from([table(np.full(10, 0.3))], "")
    assert found.below == 0 and found.errors["compute"] == pytest.approx(0.3)
    exact = accuracy_from([table(np.zeros(10))], "")
    assert exact == Accuracy(source="", errors={"compute": 0.0, "collectives": 0.0})
