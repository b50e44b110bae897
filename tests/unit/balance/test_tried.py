"""What nodes need, from the divisions that were tried, and what is done with it."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dtft.balance.balance import Balance, StepTimes
from dtft.balance.load_shares import Counts, Layers, Microbatches, makespan
from dtft.balance.speed_estimator import MOST, SpeedEstimator

Floats = NDArray[np.float64]


def tried_with(
    rounds: Sequence[tuple[Sequence[float], Sequence[float]]], steps: int = 10
) -> SpeedEstimator:
    """Of rounds, each a load and the seconds of each node."""
    tried = SpeedEstimator(num_nodes=len(rounds[0][0]))
    for load, busy in rounds:
        tried, _ = tried.after(np.tile(busy, (steps, 1)), np.array(load))
    return tried


def test_with_one_division_all_seconds_are_of_the_load() -> None:
    speeds = tried_with([([4, 2], [8.0, 6.0])]).speeds()
    assert speeds.fixed_s.tolist() == pytest.approx([0, 0], abs=0.4)
    assert speeds.needed(np.array([4, 2])) == pytest.approx([8, 6], rel=1e-3)


def test_a_second_division_shows_what_a_node_needs_whatever_it_holds() -> None:
    fixed, unit = np.array([0.0, 3.0, 1.0]), np.array([1.0, 2.0, 4.0])
    loads = np.array([[8.0, 8.0, 8.0], [14.0, 4.0, 3.0]])
    speeds = tried_with([(load, fixed + load * unit) for load in loads]).speeds()
    assert speeds.fixed_s == pytest.approx(fixed, abs=0.1)
    assert speeds.unit_s == pytest.approx(unit, rel=0.02)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_where_nothing_is_fixed_noise_makes_little_of_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unit = np.exp(rng.uniform(0, np.log(4), 64))
    tried = SpeedEstimator(num_nodes=64)
    for _ in range(3):
        load = rng.integers(10, 40, 64).astype(float)
        noisy = 1 + 0.03 * rng.standard_normal((10, 64))
        tried, _ = tried.after(load * unit * noisy, load)
    speeds = tried.speeds()
    assert np.median(speeds.fixed_s / (20 * unit)) < 0.02
    assert speeds.needed(20 * np.ones(64)) == pytest.approx(20 * unit, rel=0.06)


def test_another_division_is_no_drift_and_the_same_one_may_be() -> None:
    tried = tried_with([([4.0, 4.0], [4.0, 8.0])])
    tried, gone = tried.after(np.tile([6.0, 5.0], (10, 1)), np.array([6.0, 2.0]))
    assert gone == ()  # the second node needs more than half of 8 for half of 4
    tried, gone = tried.after(np.tile([6.0, 9.0], (10, 1)), np.array([6.0, 2.0]))
    assert gone == (1,)
    # Of the other division only what the first node took is still known.
    assert tried.measured(np.array([4.0, 4.0])) is None
    assert tried.speeds().needed(np.array([4.0, 2.0])) == pytest.approx(
        [4, 9], rel=0.15
    )


def test_other_divisions_go_along_where_all_nodes_are_slower() -> None:
    tried = tried_with([([4.0, 4.0], [4.0, 8.0]), ([6.0, 2.0], [6.0, 4.0])])
    tried, gone = tried.after(np.tile([12.0, 8.0], (10, 1)), np.array([6.0, 2.0]))
    assert gone == ()
    there = tried.measured(np.array([4.0, 4.0]))
    assert there is not None and there.unit_s == pytest.approx([2.0, 4.0], rel=1e-6)


def test_the_newest_divisions_are_remembered() -> None:
    loads = [[float(4 + i), float(20 - i)] for i in range(MOST + 2)]
    tried = tried_with([(load, load) for load in loads])
    kept = [list(load) for load in tried.times]
    assert kept == loads[2:]


def test_a_node_never_measured_is_taken_for_a_middling_one() -> None:
    tried = tried_with([([2, 1, 0, 1], [2.0, 4.0, 0.0, 3.0])])
    assert tried.known.tolist() == [True, True, False, True]
    assert tried.speeds().unit_s == pytest.approx([1, 4, 3, 3], rel=0.15)
    assert not SpeedEstimator(num_nodes=2).known.any()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_nodes_with_fixed_parts_get_about_the_best_shares(seed: int) -> None:
    """Where a unit's mean seconds depend on the load, and a loop that took them for
    the same would go back and forth."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(3, 6))
    unit = np.exp(rng.uniform(0, np.log(4), num))
    fixed = unit * rng.uniform(0, 0.15, num) * 64 / num
    work = Microbatches(num_nodes=num, total=64)
    balance: Balance[Counts] = Balance.begin(work)
    while not balance.settled and balance.rounds < 15:
        noisy = 1 + 0.02 * rng.standard_normal((8, num))
        balance = balance.after((fixed + balance.division * unit) * noisy)
    best = makespan(work.best(unit, fixed), unit, fixed)
    assert balance.settled
    assert makespan(balance.division, unit, fixed) <= 1.08 * best


def test_whole_steps_say_which_tried_division_is_faster() -> None:
    """Nodes are as fast as expected, but with fewer layers here others wait longer."""
    layers, speeds = Layers(layer_s=np.ones((8, 2)), microbatches=4), np.array([1, 3.0])
    balance, divisions = Balance.begin(layers), []
    while not balance.settled and balance.rounds < 20:
        divisions.append(balance.division.tolist())
        step_s = 20.0 if divisions[-1] == [4, 4] else 22.0
        busy = np.tile(layers.load(balance.division) * speeds, (5, 1))
        balance = balance.after(busy, step_s=[step_s] * 5)
    assert divisions == [[4, 4], [6, 2], *[[4, 4]] * 3]
    assert balance.settled and balance.division.tolist() == [4, 4]
    # Of a node that changed speed all is forgotten, and the other is tried again.
    busy = np.tile(layers.load(balance.division) * np.array([1, 9.0]), (5, 1))
    balance = balance.after(busy, step_s=[50.0] * 5)
    assert balance.judgement is not None and balance.judgement.drifted == (1,)
    assert balance.division.tolist() == [7, 1]


def test_steps_of_a_machine_that_became_slower_are_all_taken_for_longer() -> None:
    steps = StepTimes().after("a", (4.0,), [10.0] * 5, 1.0)
    steps = steps.after("b", (5.0,), [12.0] * 5, 1.0)
    steps = steps.after("b", (5.0,), [24.0] * 5, 2.0)
    assert steps.gain((5.0,), (4.0,)) == pytest.approx(1 - 10 / 12)
    assert steps.fastest((5.0,)) == ("a", pytest.approx(1 - 10 / 12))
    assert steps.gain((5.0,), (6.0,)) is None and steps.fastest((6.0,)) is None


@pytest.mark.parametrize("step_s", [[], [1.0, 0.0], [[1.0]]])
def test_seconds_of_steps_that_are_none_are_refused(step_s: list[float]) -> None:
    balance = Balance.begin(Microbatches(num_nodes=2, total=8))
    with pytest.raises(ValueError, match=r"step_s=.* Allowed: a number above 0"):
        balance.after(np.ones((2, 2)), step_s=step_s)


def test_a_division_that_disappointed_is_not_taken_again() -> None:
    """Nodes that take what no speeds explain: each finds its own division bad."""
    layers = Layers(layer_s=np.ones((8, 2)), microbatches=4)

    def busy(division: Counts) -> Floats:
        own = {4: [5.0, 9.0], 5: [12.0, 7.0], 3: [9.0, 14.0]}
        return 4 * np.array(own.get(int(division[0]), [20.0, 20.0]))

    balance, divisions = Balance.begin(layers), []
    while not balance.settled and balance.rounds < 20:
        divisions.append(balance.division.tolist())
        balance = balance.after(np.tile(busy(balance.division), (5, 1)))
    changes = sum(a != b for a, b in zip(divisions, divisions[1:], strict=False))
    assert balance.settled and changes <= 3
    tried = {tuple(it): busy(np.array(it)) for it in divisions}
    step_s = {it: 3 * own.max() / 4 + own.sum() / 4 for it, own in tried.items()}
    assert step_s[tuple(balance.division.tolist())] <= 1.01 * min(step_s.values())
