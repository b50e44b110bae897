"""Numbers in words can be read back: to four digits, or to those of their error."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner import wording
from tests.support import reading

MAGNITUDES = st.floats(1e-9, 1e9) | st.floats(-1e9, -1e-9) | st.just(0.0)


@given(MAGNITUDES)
def test_seconds_are_read_back(value: float) -> None:
    text = wording.seconds(value)
    assert "e" not in text
    assert reading.value(text) == pytest.approx(value, rel=1e-3, abs=5e-10)


@given(MAGNITUDES, st.floats(1e-4, 2.0))
def test_the_last_digit_has_a_place_that_the_error_reaches(
    value: float, error: float
) -> None:
    shown = wording.rounded(value, error)
    # Off by half of the last place, which is at most the error, or of the fourth digit.
    least = 0.5 if error >= 1 else max(0.5 * error, 5e-4)
    assert abs(shown - value) <= least * abs(value) * (1 + 1e-9)
    _, digits, place = Decimal(repr(shown)).normalize().as_tuple()
    assert isinstance(place, int)
    if len(digits) > 1:
        assert 10.0 ** (place + 1) > error * abs(value) * (1 - 1e-9)


@given(st.integers(-(2**59), 2**59))
def test_bytes_are_read_back(num_bytes: int) -> None:
    text = wording.size(num_bytes)
    assert reading.value(text) == pytest.approx(num_bytes, rel=1e-3)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_a_change_is_the_share_that_came_on_top(value: float, reference: float) -> None:
    text = wording.change(value, reference)
    expected = value / reference - 1
    assert reading.change(text) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_table_is_aligned_and_has_its_notes() -> None:
    section = wording.Section(
        title="T", columns=("a", "b"), rows=(("long cell", "1"),), notes=("why",)
    )
    assert wording.text([section]).splitlines() == [
        "T", "  a          b", "  long cell  1", "  why",
    ]  # fmt: skip
