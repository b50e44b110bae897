"""Shares against handing out one microbatch after the other."""

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.balance.load_shares import (
    Microbatches,
    allocate,
    by_weight,
    even,
    makespan,
    waits,
)

SECONDS = st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0]) | st.floats(0.05, 5.0)
FIXED = st.sampled_from([0.0, 1.0, 2.5]) | st.floats(0.0, 9.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int, list[int], int]:
    seconds = draw(st.lists(SECONDS, min_size=1, max_size=8))
    low = draw(st.integers(0, 1))
    cap = [draw(st.integers(low, 30)) for _ in seconds]
    total = draw(st.integers(low * len(seconds), sum(cap)))
    return seconds, total, cap, low


def one_by_one(
    seconds: list[float], fixed: list[float], total: int, cap: list[int], low: int
) -> list[int]:
    shares = [low] * len(seconds)
    queue = [own + (low + 1) * unit for own, unit in zip(fixed, seconds, strict=True)]
    heap = [(finish, i) for i, finish in enumerate(queue) if cap[i] > low]
    heapq.heapify(heap)
    for _ in range(total - low * len(seconds)):
        _, i = heapq.heappop(heap)
        shares[i] += 1
        if shares[i] < cap[i]:
            heapq.heappush(heap, (fixed[i] + (shares[i] + 1) * seconds[i], i))
    return shares


@given(problems(), st.none() | st.lists(FIXED, min_size=8, max_size=8))
def test_no_shares_end_earlier(
    problem: tuple[list[float], int, list[int], int], each: list[float] | None
) -> None:
    seconds, total, cap, low = problem
    fixed = None if each is None else each[: len(seconds)]
    shares = allocate(seconds, total, fixed_s=fixed, cap=cap, low=low)
    assert shares.sum() == total
    assert all(low <= share <= most for share, most in zip(shares, cap, strict=True))
    zeros = [0.0] * len(seconds)
    best = makespan(
        one_by_one(seconds, fixed or zeros, total, cap, low), seconds, fixed
    )
    assert makespan(shares, seconds, fixed) <= best * (1 + 1e-12)


@pytest.mark.parametrize("fixed", [[1.0], [0.0, -1.0], [0.0, float("inf")]])
def test_fixed_seconds_that_are_none_are_refused(fixed: list[float]) -> None:
    with pytest.raises(ValueError, match="fixed_s is .* for each of 2 nodes"):
        allocate([1.0, 2.0], 8, fixed_s=fixed)


def test_a_thousand_nodes_and_many_microbatches() -> None:
    rng = np.random.default_rng(0)
    seconds = np.exp(rng.uniform(0, np.log(8), 1024))
    shares = allocate(seconds, 65536)
    assert shares.sum() == 65536
    # No integers can end before the real-valued optimum, and these end one unit later
    # at most.
    ideal = 65536 / (1 / seconds).sum()
    assert ideal <= makespan(shares, seconds) <= ideal + seconds.max()


@given(st.lists(st.floats(0.01, 9.0), min_size=1, max_size=8), st.integers(8, 99))
def test_shares_by_weight_are_within_one_of_proportion(
    weights: list[float], total: int
) -> None:
    shares = by_weight(weights, total, low=0)
    assert shares.sum() == total
    ideal = np.array(weights) / sum(weights) * total
    assert np.abs(shares - ideal).max() < 1 + 1e-9


@given(st.lists(st.floats(0.01, 9.0), min_size=1, max_size=8), st.integers(8, 99))
def test_no_share_by_weight_is_below_the_least(
    weights: list[float], total: int
) -> None:
    shares = by_weight(weights, total, low=1)
    assert shares.sum() == total
    assert shares.min() >= 1


def test_even_shares_differ_by_one_at_most() -> None:
    assert even(10, 4).tolist() == [3, 3, 2, 2]
    assert even(2, 4).tolist() == [1, 1, 0, 0]


def test_waits_are_for_the_slowest() -> None:
    assert waits([[1.0, 3.0], [2.0, 2.0]]).tolist() == [[2.0, 0.0], [0.0, 0.0]]


def test_a_cap_holds_for_weights_too() -> None:
    work = Microbatches(num_nodes=3, total=9, cap=(2, 9, 9))
    assert work.by_weight(np.array([8.0, 1.0, 1.0])).tolist() == [2, 4, 3]


def test_a_weight_of_0_gets_what_it_must_with_a_cap_and_without() -> None:
    weights = np.array([0.0, 3.0, 1.0])
    for cap in (None, (9, 9, 9)):
        work = Microbatches(num_nodes=3, total=9, low=0, cap=cap)
        assert work.by_weight(weights).tolist()[0] == 0
    work = Microbatches(num_nodes=3, total=9, cap=(9, 4, 3))
    assert work.by_weight(weights).tolist() == [2, 4, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0, 0.0], 4), r"unit_s\[1\] is 0.0: .*Measure this node again"),
        (([[1.0]], 4), r"unit_s has shape \(1, 1\): one finite number per node"),
        (([1.0, np.inf], 4), r"unit_s\[1\] is inf: one finite number per node"),
        (([1.0, 1.0], 2.5), "total=2.5 is no whole number"),
        (([1.0, 1.0], 0), "total is 0: 2 nodes with at least 1 each"),
        (([1.0] * 3, 2), r"total is 2: 3 nodes with at least 1 each need 3.*low=0"),
    ],
)
def test_bad_input_says_what_to_change(
    arguments: tuple[list[float], int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        allocate(*arguments)


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0], [-1.0, 2.0], [np.nan, 1.0], [10**400, 1]]
)
def test_weights_are_finite_and_not_all_0(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights=.*(none is above 0|finite number)"):
        by_weight(weights, 4)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_nodes": 4, "total": 3}, "4 nodes with at least 1 each need 4"),
        ({"num_nodes": 0, "total": 3}, "num_nodes=0 is no whole number"),
        ({"num_nodes": 2, "total": 30, "cap": (5, 5)}, "together can take 10"),
        ({"num_nodes": 2, "total": 4, "cap": (5,)}, "a number for each of 2 nodes"),
    ],
)
def test_microbatches_that_cannot_be_divided_are_refused(
    sizes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Microbatches(**sizes)


def test_caps_that_are_too_small_say_so() -> None:
    with pytest.raises(ValueError, match="together can take 4 .cap .2, 2."):
        allocate([1.0, 1.0], 5, cap=[2, 2])
    with pytest.raises(ValueError, match=r"cap is \[0, 9\] and low is 1"):
        allocate([1.0, 1.0], 5, cap=[0, 9])


@pytest.mark.parametrize("shares", [[3, 3], [2, 2, 2], [[4, 0]]])
def test_shares_that_are_no_division_are_refused(shares: list[int]) -> None:
    work = Microbatches(num_nodes=2, total=4)
    with pytest.raises(ValueError, match="division=.*each of 2 nodes, 4 in all"):
        work.load(np.array(shares))
    with pytest.raises(ValueError, match="division="):
        work.seconds(np.array(shares), np.ones(2))
