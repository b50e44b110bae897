"""The loop over simulated nodes: it stops, near the optimum, and drift re-opens it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dtft.balance.balance import Balance, Policy, Rules
from dtft.balance.load_shares import Counts, Microbatches, makespan
from dtft.balance.speed_estimator import SpeedEstimator, UnitTimes

Floats = NDArray[np.float64]


def begin(num_nodes: int, total: int, policy: Policy = "exact") -> Balance[Counts]:
    low = 1 if total >= num_nodes else 0
    work = Microbatches(num_nodes=num_nodes, total=total, low=low)
    return Balance.begin(work, Rules(policy=policy))


def measured(
    balance: Balance[Counts], unit_s: Floats, noise: float, rng: np.random.Generator
) -> Floats:
    factors = np.maximum(0.2, 1 + noise * rng.standard_normal((10, unit_s.size)))
    return balance.division * unit_s * factors


def until_settled(
    balance: Balance[Counts],
    unit_s: Floats,
    noise: float,
    rng: np.random.Generator,
    most: int = 60,
) -> Balance[Counts]:
    for _ in range(most):
        balance = balance.after(measured(balance, unit_s, noise, rng))
        if balance.settled:
            break
    return balance


@settings(max_examples=60)
@given(
    st.integers(2, 40),
    st.sampled_from([40, 256, 1024]),
    st.sampled_from([0.0, 0.05, 0.1]),
    st.integers(0, 10**6),
)
def test_exact_stops_and_its_guarantee_holds(
    num_nodes: int, total: int, noise: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    unit_s = np.exp(rng.uniform(0, np.log(8), num_nodes))
    end = until_settled(begin(num_nodes, total), unit_s, noise, rng)
    assert end.settled
    assert end.judgement is not None
    speeds, shares = end.tried.speeds(), (end.division, end.work.best(unit_s))
    off = [speeds.needed(it) / np.where(it > 0, it * unit_s, np.inf) for it in shares]
    wrong = max(float(np.max(np.abs(it[it > 0] - 1))) for it in off)
    bound = (1 + wrong) / ((1 - wrong) * (1 - end.judgement.threshold))
    best = makespan(end.work.best(unit_s), unit_s)
    assert makespan(end.division, unit_s) <= best * bound * (1 + 1e-9)


def test_without_noise_one_change_is_enough() -> None:
    unit_s = np.array([1.0, 1.3, 2.0, 4.0])
    end = until_settled(begin(4, 64), unit_s, 0.0, np.random.default_rng(0))
    assert end.rounds == 4
    assert end.division.tolist() == [26, 20, 12, 6]  # done after 26, 26, 24, 24
    # Ten steps show how sure equal measurements are, so nothing moves afterwards.
    assert end.judgement is not None
    assert not end.judgement.changed


def test_alike_nodes_are_left_alone() -> None:
    end = until_settled(begin(8, 64), np.ones(8), 0.05, np.random.default_rng(1))
    assert end.division.tolist() == [8] * 8
    assert end.rounds == 3


def test_waits_fall() -> None:
    unit_s, rng = np.array([1.0, 2.0, 4.0]), np.random.default_rng(2)
    balance = begin(3, 70)
    first = balance.after(measured(balance, unit_s, 0.02, rng))
    end = until_settled(first, unit_s, 0.02, rng)
    assert first.judgement is not None and end.judgement is not None
    assert end.judgement.max_wait_s < first.judgement.max_wait_s / 5
    assert end.judgement.mean_wait_s < first.judgement.mean_wait_s / 5


@pytest.mark.parametrize("factor", [0.5, 1.3, 3.0])
def test_a_node_that_changes_speed_opens_the_loop(factor: float) -> None:
    unit_s, rng = np.array([1.0, 1.0, 2.0, 2.0]), np.random.default_rng(3)
    settled = until_settled(begin(4, 96), unit_s, 0.03, rng)
    changed = unit_s * np.array([factor, 1.0, 1.0, 1.0])
    balance, seen = settled, None
    for rounds in range(1, 11):
        balance = balance.after(measured(balance, changed, 0.03, rng))
        if balance.judgement is not None and balance.judgement.drifted:
            seen = rounds
        if seen is not None and balance.settled:
            break
    assert seen is not None and seen <= 3
    assert balance.settled
    best = makespan(balance.work.best(changed), changed)
    assert makespan(balance.division, changed) <= 1.06 * best


@pytest.mark.parametrize("num_nodes", [2, 4, 16])
def test_nodes_that_all_become_faster_together_leave_it_settled(num_nodes: int) -> None:
    rng = np.random.default_rng(9)
    unit_s = np.exp(rng.uniform(0, np.log(4), num_nodes))
    settled = until_settled(begin(num_nodes, 256), unit_s, 0.02, rng)
    balance = settled
    for level in (0.8, 1.3, 0.7, 1.1, 1.0, 2.0):
        balance = balance.after(measured(balance, level * unit_s, 0.02, rng))
        assert balance.judgement is not None and not balance.judgement.drifted
    best = makespan(balance.work.best(unit_s), unit_s)
    assert makespan(balance.division, unit_s) <= 1.02 * best
    found = balance.tried.speeds().unit_s / unit_s
    assert found / found.mean() == pytest.approx(np.ones(num_nodes), rel=0.03)
    assert found.mean() == pytest.approx(2.0, rel=0.05)  # as in the newest round


def test_a_node_that_changed_speed_is_compared_with_what_others_take_now() -> None:
    unit_s, rng = np.array([1.0, 1.0, 2.0, 2.0]), np.random.default_rng(10)
    balance = until_settled(begin(4, 96), unit_s, 0.02, rng)
    changed = unit_s * np.array([2.0, 1.0, 1.0, 1.0])
    for _ in range(4):  # the machine is slower, and one node twice as much
        balance = balance.after(measured(balance, 1.5 * changed, 0.02, rng))
    found = balance.tried.speeds().unit_s / changed
    assert found / found.mean() == pytest.approx(np.ones(4), rel=0.03)


def test_noise_alone_rarely_opens_it() -> None:
    unit_s, rng = np.ones(16), np.random.default_rng(4)
    balance, alarms = begin(16, 64), 0
    for _ in range(300):
        balance = balance.after(measured(balance, unit_s, 0.05, rng))
        alarms += balance.judgement is not None and bool(balance.judgement.drifted)
    assert alarms <= 6


def test_a_change_that_costs_more_than_it_saves_is_left() -> None:
    unit_s, rng = np.array([1.0, 2.0]), np.random.default_rng(5)
    balance = begin(2, 30)
    busy = measured(balance, unit_s, 0.0, rng)  # 30 s a step, 20 s would do
    assert not balance.after(busy, remaining_steps=5, cost_s=51).division[1] < 15
    assert balance.after(busy, remaining_steps=5, cost_s=49).division[1] < 15
    # Whole steps that take twice as long have twice as much to save.
    twice = [60.0] * len(busy)
    told = balance.after(busy, step_s=twice, remaining_steps=5, cost_s=99)
    assert told.division[1] < 15


def test_the_proportional_rule_moves_weights_against_waits() -> None:
    unit_s, rng = np.array([1.0, 2.0]), np.random.default_rng(6)
    balance = begin(2, 64, "proportional")
    after = balance.after(measured(balance, unit_s, 0.0, rng))
    # w *= 1 + 0.3 (wait - mean) / T with waits 32 and 0 of 64 seconds.
    assert after.weights.tolist() == [1 + 0.3 * 16 / 64, 1 - 0.3 * 16 / 64]
    assert after.division.tolist() == [34, 30]


@pytest.mark.parametrize("cap", [None, (7, 8)])
def test_proportional_weights_of_a_node_with_the_least_share_stay_bounded(
    cap: tuple[int, int] | None,
) -> None:
    work = Microbatches(num_nodes=2, total=8, cap=cap)
    balance = Balance.begin(work, Rules(policy="proportional"))
    for _ in range(600):
        balance = balance.after([balance.division * np.array([1.0, 100.0])])
    assert balance.division.tolist() == [7, 1]
    assert 0.001 <= balance.weights.min() and balance.weights.max() <= 2.0
    for _ in range(60):  # the slow node is as fast as the other again
        balance = balance.after([balance.division * 1.0])
    assert balance.division.tolist() == [4, 4]


@pytest.mark.parametrize("recorded", [[1.7e308, 0.0], [1.7e308, 1.7e308]])
def test_the_proportional_rule_goes_on_from_recorded_weights_of_any_size(
    recorded: list[float],
) -> None:
    begun = replace(begin(2, 8, "proportional"), weights=np.array(recorded))
    after = begun.after([[4.0, 400.0]])
    assert after.division[0] > 4
    assert 0.001 <= after.weights.min() and after.weights.max() <= 2.0


def test_the_proportional_rule_does_not_stop_where_exact_does() -> None:
    unit_s = np.exp(np.random.default_rng(7).uniform(0, np.log(4), 16))
    for policy, stops in (("exact", True), ("proportional", False)):
        balance = begin(16, 256, policy)  # pyright: ignore[reportArgumentType]
        end = until_settled(balance, unit_s, 0.05, np.random.default_rng(8))
        assert end.settled is stops


def test_one_pause_of_the_machine_is_no_speed() -> None:
    busy = np.ones((10, 2))
    busy[3, 0] = 40.0
    times = UnitTimes.unknown(2).after(busy, [1, 1])
    assert times.mean_s.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("busy", "load", "words"),
    [
        ([1.0, 2.0], [1, 1], r"busy_s has shape \(2,\); \[steps, 2\] is needed"),
        ([[1.0, 2.0]], [1], r"load has shape \(1,\)"),
        ([[1.0, 0.0]], [1, 1], r"busy_s has \[0.0\] for node 1 with load 1"),
        ([[1.0, np.nan]], [1, 1], "for node 1 with load 1"),
    ],
)
def test_measurements_that_are_none(
    busy: list[list[float]], load: list[int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        UnitTimes.unknown(2).after(busy, load)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"policy": "nope"}, "policy='nope'. Allowed: proportional, exact"),
        ({"least_gain": float("nan")}, "least_gain=nan. Allowed: .* from 0 to 1"),
        ({"noise_factor": -1}, "noise_factor=-1. Allowed: a finite number from 0 on"),
        ({"step": 5.0}, "step=5.0. Allowed: a finite number from 0.001 to 1"),
        ({"noise_factor": 10**400}, "noise_factor=10*. Allowed: a finite number from"),
        ({"patience": 0}, "patience=0 is no whole number of 1 or more"),
    ],
)
def test_rules_that_are_none_are_refused(rules: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Rules(**rules)


def test_no_work_or_no_rules_are_refused_at_the_beginning() -> None:
    work: Any = Microbatches(num_nodes=2, total=4)
    wrong: Any = "exact"
    with pytest.raises(ValueError, match=r"rules='exact'. Allowed: balance.Rules"):
        Balance.begin(work, wrong)
    with pytest.raises(ValueError, match=r"work='exact'. Allowed: Microbatches"):
        Balance.begin(wrong)


def test_a_long_round_after_a_short_one_still_shows_a_drift() -> None:
    load, known = np.array([4.0, 4.0, 4.0]), SpeedEstimator(num_nodes=3)
    for other in (np.array([5.0, 4.0, 3.0]), load):
        known, _ = known.after(np.tile(other, (2, 1)), other)
    slower = np.tile([12.0, 4.0, 4.0], (5, 1))
    after, gone = known.after(slower, load)
    assert gone == (0,)
    steps = [times.num_steps.tolist() for times in after.times.values()]
    assert steps == [[0, 2, 2], [5, 7, 7]]
