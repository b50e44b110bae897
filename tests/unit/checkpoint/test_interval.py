"""The automatic interval: within its budget, no more changes than needed, in step."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.replication.snapshot_interval import (
    AIM,
    Automatic,
    Cadence,
    Costs,
    Experience,
    SnapshotSchedule,
    Window,
    affordable,
    inflation,
    next_interval,
)

fewer = settings(deadline=None, max_examples=30)
costs = st.builds(
    Costs,
    step_s=st.floats(1e-3, 10.0),
    snapshot_s=st.floats(0.0, 5.0),
)
budgets = st.floats(0.001, 0.2)
maxima = st.integers(8, 200)


class Job:
    """Steps and snapshots of given cost, measured with noise, an interval decided."""

    def __init__(self, allowed: Automatic, seed: int, noise: float) -> None:
        self.allowed, self.noise = allowed, noise
        self.schedule = SnapshotSchedule.of(Cadence(interval=1, period=allowed.maximum))
        self.seen, self.decided, self.step = Experience(), 1, 0
        self.changes: list[int] = []
        self._random = random.Random(seed)

    def run(self, true: Costs, boundaries: int) -> None:
        """Each measured sum is off by up to `noise` of a snapshot's cost."""
        for _ in range(boundaries):
            begin = self.step
            self.step = self.schedule.following(begin)
            self.seen = self.seen.and_window(self._window(true, self.step - begin))
            following = self.schedule.following(self.step)
            wanted = next_interval(self.decided, self.seen, self.allowed)
            if wanted != self.decided:
                self.decided = wanted
                self.changes.append(wanted)
                self.schedule = self.schedule.changed(wanted, after=following)

    def _window(self, true: Costs, steps: int) -> Window:
        affected = min(3, steps)
        off = [self._random.uniform(-1, 1) * self.noise for _ in range(2)]
        each = true.step_s + off[0] * min(true.snapshot_s / 4, true.step_s)
        quiet = (steps - affected) * each
        return Window(
            affected_steps=affected,
            affected_s=affected * true.step_s + true.snapshot_s * (1 + off[1]),
            quiet_steps=steps - affected,
            quiet_s=quiet,
            stall_s=true.snapshot_s / 3,
        )


@settings(deadline=None)
@given(costs, budgets, maxima)
def test_it_is_the_smallest_that_the_budget_allows(
    true: Costs, budget: float, maximum: int
) -> None:
    interval = affordable(true, budget, maximum)
    assert 1 <= interval <= maximum
    if interval > 1:
        assert inflation(interval - 1, true, maximum) > budget * (1 - 1e-9)
    if interval < maximum:
        assert inflation(interval, true, maximum) <= budget * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 500))
def test_boundaries_follow_each_other(interval: int, more: int, step: int) -> None:
    cadence = Cadence(interval=interval, period=interval + more - 1)
    following = cadence.following(step)
    assert cadence.is_boundary(following)
    assert not any(cadence.is_boundary(s) for s in range(step + 1, following))
    assert following - step <= interval


@fewer
@given(costs, budgets, maxima, st.integers(0, 99), st.floats(0.0, 0.1))
def test_the_budget_is_held_and_the_interval_settles(
    true: Costs, budget: float, maximum: int, seed: int, noise: float
) -> None:
    job = Job(Automatic(budget=budget, maximum=maximum), seed, noise)
    job.run(true, 30)
    settled = job.decided
    cost = inflation(settled, true, maximum)
    assert cost <= budget or settled == maximum
    # Not much longer than needed: what is known exactly would allow this.
    assert settled <= max(2, affordable(true, 0.6 * AIM * budget, maximum))
    before = len(job.changes)
    job.run(true, 60)
    # Now and then it is looked what a step takes without a snapshot.
    probes = 2 * (job.step // 1000 + 1) if settled < 5 else 0
    assert len(job.changes) - before <= 1 + probes
    assert inflation(job.decided, true, maximum) <= budget or job.decided == maximum


@fewer
@given(st.integers(0, 99), st.floats(2.0, 30.0), st.booleans())
def test_it_follows_a_cost_that_changes(seed: int, factor: float, up: bool) -> None:
    allowed = Automatic(budget=0.02, maximum=100)
    cheap = Costs(step_s=0.1, snapshot_s=0.005)
    dear = Costs(step_s=0.1, snapshot_s=0.005 * factor)
    job = Job(allowed, seed, 0.05)
    job.run(cheap if up else dear, 40)
    job.run(dear if up else cheap, 40)
    now = dear if up else cheap
    # The costs are measured with 5 % of noise, so the interval is off by as much.
    assert inflation(job.decided, now, 100) <= 0.02 * 1.05 or job.decided == 100
    assert job.decided <= affordable(now, 0.01, 100)


@pytest.mark.parametrize("part, changes", [(0.99, 0), (0.7, 0), (1.02, 1), (0.5, 1)])
def test_small_differences_change_nothing(part: float, changes: int) -> None:
    """`part` of the budget is what the present interval costs."""
    allowed = Automatic(budget=0.01, maximum=64)
    current = 16  # four snapshots in 64 steps
    snapshot_s = part * 0.01 * 64 * 0.1 / 4
    seen = Experience()
    for _ in range(20):
        seen = seen.and_window(
            Window(
                affected_steps=3,
                affected_s=0.3 + snapshot_s,
                quiet_steps=13,
                quiet_s=1.3,
            )
        )
    assert (next_interval(current, seen, allowed) != current) == bool(changes)


def test_a_single_slow_step_changes_nothing() -> None:
    allowed = Automatic(budget=0.01, maximum=64)
    seen = Experience()
    for number in range(20):
        slow = 5.0 if number == 7 else 0.0  # a disk, a page fault
        seen = seen.and_window(
            Window(
                affected_steps=3,
                affected_s=0.308 + slow,
                quiet_steps=10,
                quiet_s=1.0,
            )
        )
    assert next_interval(11, seen, allowed) == 11


def test_without_a_quiet_step_one_is_looked_for() -> None:
    allowed = Automatic()
    seen, window = Experience(), Window(affected_steps=1, affected_s=0.1)
    for _ in range(7):
        seen = seen.and_window(window)
        assert next_interval(1, seen, allowed) == 1
    assert next_interval(1, seen.and_window(window), allowed) == 16


@fewer
@given(st.lists(st.integers(1, 16), min_size=1, max_size=30), st.data())
def test_two_hosts_that_learn_at_different_moments_agree(
    intervals: list[int], data: st.DataObject
) -> None:
    """Told with the release of a boundary, a change is in force after the next one."""
    hosts = [SnapshotSchedule.of(Cadence(interval=2, period=16)) for _ in range(2)]
    known: list[tuple[int, int]] = []
    found: list[list[int]] = [[], []]
    for number, interval in enumerate(intervals):
        begin = found[0][-1] if found[0] else 0
        for host in range(2):
            step = begin + 1
            while True:
                late = data.draw(st.booleans())  # the news of the last release
                if known and not late:
                    hosts[host] = hosts[host].changed(known[-1][1], after=known[-1][0])
                if hosts[host].is_boundary(step):
                    break
                step += 1
            if known:  # at the boundary it waits for that release
                hosts[host] = hosts[host].changed(known[-1][1], after=known[-1][0])
            found[host].append(step)
        assert found[0] == found[1], number
        following = found[0][-1] + 1
        while not hosts[0].is_boundary(following):
            following += 1
        known.append((following, interval))
    assert all(b - a <= 16 for a, b in zip(found[0], found[0][1:], strict=False))


def test_an_experience_forgets() -> None:
    seen = Experience()
    for _ in range(40):
        seen = seen.and_window(
            Window(affected_steps=3, affected_s=9.0, quiet_steps=3, quiet_s=3.0)
        )
    for _ in range(32):
        seen = seen.and_window(
            Window(affected_steps=3, affected_s=3.1, quiet_steps=3, quiet_s=3.0)
        )
    assert seen.costs is not None and seen.costs.step_s == 1.0
    assert seen.costs.snapshot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    "changes, text",
    [({"budget": 0.0}, "budget=0.0"), ({"maximum": 4}, "maximum=4 is too small")],
)
def test_bounds_that_cannot_be_are_refused(changes: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Automatic(**changes)
