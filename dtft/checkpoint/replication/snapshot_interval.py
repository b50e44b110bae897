"""After which steps a snapshot is taken, and how often one is affordable.

`Cadence` decides from step numbers alone, so that all hosts take snapshots after the
same steps. `next_interval` returns the smallest interval whose cost, spread over all
steps, stays within a budget; where less is known of the cost, more is assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

KEPT_CHANGES = 3
"""Changes that a schedule remembers: the last may not be in force yet, and the one
before it may still be asked for."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """Every so many steps; counting begins anew at every multiple of `period`.

    So every multiple of `period` has a snapshot, whatever the interval is.

    >>> cadence = Cadence(interval=3, period=8)
    >>> [step for step in range(1, 17) if cadence.is_boundary(step)]
    [3, 6, 8, 11, 14, 16]
    >>> cadence.following(6), cadence.following(8)
    (8, 11)
    """

    interval: int = 1
    """Steps from one snapshot to the next."""
    period: int = 1
    """Where counting begins anew. As large as the interval: no more than that."""

    def __post_init__(self) -> None:
        if not 1 <= self.interval <= self.period:
            raise ValueError(
                f"interval={self.interval} is out of range. Allowed: 1 to period="
                f"{self.period}. Change one of them."
            )

    @classmethod
    def every(cls, interval: int) -> "Cadence":
        """The same interval for ever."""
        return cls(interval=interval, period=interval)

    def is_boundary(self, step: int) -> bool:
        """Whether a snapshot is taken after `step`."""
        return step % self.period % self.interval == 0

    def following(self, step: int) -> int:
        """The first boundary after `step`."""
        begin = step - step % self.period
        within = (step - begin) // self.interval * self.interval + self.interval
        return begin + min(within, self.period)

    def at(self, interval: int) -> "Cadence":
        """The same period with another interval, at most the period."""
        return replace(self, interval=max(1, min(interval, self.period)))


@dataclass(frozen=True, kw_only=True)
class SnapshotSchedule:
    """A cadence that changes now and then, each change told before it is in force.

    >>> schedule = SnapshotSchedule.of(Cadence(interval=1, period=8))
    >>> schedule = schedule.changed(4, after=2)
    >>> [step for step in range(1, 13) if schedule.is_boundary(step)]
    [1, 2, 4, 8, 12]
    >>> schedule.interval(after=1), schedule.interval(after=2)
    (1, 4)
    """

    changes: tuple[tuple[int, Cadence], ...]
    """Step and the cadence that is in force after it, ascending."""

    @classmethod
    def of(cls, cadence: Cadence) -> "SnapshotSchedule":
        """One cadence from the beginning."""
        return cls(changes=((-1, cadence),))

    def changed(self, interval: int, *, after: int) -> "SnapshotSchedule":
        """With another interval in force after step `after`, a boundary.

        What is known already, or was overtaken, changes nothing.
        """
        last, cadence = self.changes[-1]
        if after <= last or interval == cadence.interval:
            return self
        changes = (*self.changes, (after, cadence.at(interval)))
        return SnapshotSchedule(changes=changes[-KEPT_CHANGES:])

    def is_boundary(self, step: int) -> bool:
        """Whether a snapshot is taken after `step`."""
        return self._in_force(step - 1).is_boundary(step)

    def following(self, step: int) -> int:
        """The first boundary after `step`, a boundary.

        >>> schedule = SnapshotSchedule.of(Cadence(interval=2, period=8))
        >>> schedule = schedule.changed(4, after=2)
        >>> schedule.following(0), schedule.following(2)
        (2, 4)
        """
        return self._in_force(step).following(step)

    def interval(self, *, after: int) -> int:
        """The interval in force after a step."""
        return self._in_force(after).interval

    def _in_force(self, after: int) -> Cadence:
        known = [cadence for step, cadence in self.changes if step <= after]
        return known[-1] if known else self.changes[0][1]


KEPT_WINDOWS = 32
"""Snapshots, and quiet spans, whose measurements count."""
WARM_WINDOWS = 8
"""Snapshots before anything is decided: the first steps are slow."""
PROBE_STEPS = 16
"""An interval long enough that steps without replication are seen."""
LEAST_MAXIMUM = 8
"""Intervals up to here need not have a step without replication."""
PROBE_EVERY = 1000
"""Where no such steps occur by themselves they are looked for after so many steps."""
AIM = 0.8
"""A new interval is to cost this part of the budget; it is kept while it costs less
than the whole."""
WORTHWHILE = 0.8
"""An interval is given up for a shorter one only if that is at most so much as long."""


@dataclass(frozen=True, kw_only=True)
class Automatic:
    """What a user allows."""

    budget: float = 0.01
    """Part of the wall time that snapshots may cost."""
    maximum: int = 64
    """Most steps from one snapshot to the next, whatever they cost."""

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1:
            raise ValueError(
                f"budget={self.budget} is out of range. Allowed: above 0 and below 1, "
                "a part of the wall time. Set 0.01 for 1 %."
            )
        if self.maximum < LEAST_MAXIMUM:
            raise ValueError(
                f"maximum={self.maximum} is too small. Allowed: {LEAST_MAXIMUM} steps "
                "or more. With fewer hardly a step is free of snapshots, and what one "
                "costs cannot be told. Raise it, or give a fixed interval."
            )


@dataclass(frozen=True, kw_only=True)
class Window:
    """What was measured from one finished boundary to the next one.

    The steps at the beginning pay for the snapshot and for what is done with it in the
    background; those at the end, if there are any, are quiet.
    """

    affected_steps: int
    affected_s: float
    """Wall time of the affected steps, the snapshot among it, in seconds."""
    quiet_steps: int = 0
    quiet_s: float = 0.0
    """Wall time of the quiet steps, in seconds."""
    stall_s: float = 0.0
    """Seconds that taking the snapshot held up the training thread."""

    @property
    def step_s(self) -> float:
        """Wall time per step, of all of them."""
        steps = self.affected_steps + self.quiet_steps
        return (self.affected_s + self.quiet_s) / steps


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What is known of steps and snapshots, in seconds."""

    step_s: float
    """A step without snapshot or replication."""
    snapshot_s: float
    """What one snapshot adds to the wall time, at most (as far as is known)."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """The newest measurements. A value: `and_window` makes the next one."""

    windows: tuple[Window, ...] = ()
    quiet_step_s: tuple[float, ...] = ()
    """Seconds per step of quiet spans."""
    unseen_steps: int = 0
    """Steps since the last quiet one."""

    def and_window(self, window: Window) -> "Experience":
        """With one more window; the oldest is forgotten."""
        windows = (*self.windows, window)[-KEPT_WINDOWS:]
        if not window.quiet_steps:
            unseen = self.unseen_steps + window.affected_steps
            return replace(self, windows=windows, unseen_steps=unseen)
        quiet = (*self.quiet_step_s, window.quiet_s / window.quiet_steps)
        return Experience(windows=windows, quiet_step_s=quiet[-KEPT_WINDOWS:])

    @property
    def costs(self) -> Costs | None:
        """What it comes to; None as long as no quiet step was seen.

        >>> seen = Experience()
        >>> for _ in range(3):
        ...     seen = seen.and_window(Window(
        ...         affected_steps=2, affected_s=2.5, quiet_steps=4, quiet_s=4.0))
        >>> seen.costs
        Costs(step_s=1.0, snapshot_s=0.5)
        """
        if not self.quiet_step_s or not self.windows:
            return None
        step_s = median(self.quiet_step_s)
        extra = [it.affected_s - it.affected_steps * step_s for it in self.windows]
        stall_s = median(it.stall_s for it in self.windows)
        return Costs(step_s=step_s, snapshot_s=max(_at_most(extra), stall_s))


def _at_most(values: Sequence[float]) -> float:
    """The median and its standard error, both from ranks: single outliers are many."""
    middle = median(values)
    spread = 1.48 * median(abs(value - middle) for value in values)
    return middle + 1.25 * spread / len(values) ** 0.5


def inflation(interval: int, costs: Costs, maximum: int) -> float:
    """The part of the wall time that snapshots add at an interval.

    >>> costs = Costs(step_s=0.5, snapshot_s=0.25)
    >>> inflation(1, costs, maximum=64), inflation(16, costs, maximum=64)
    (0.5, 0.03125)
    """
    snapshots = -(-maximum // interval)
    return snapshots * costs.snapshot_s / (maximum * costs.step_s)


def affordable(costs: Costs, budget: float, maximum: int) -> int:
    """The smallest interval whose inflation is within the budget, else `maximum`.

    >>> affordable(Costs(step_s=0.1, snapshot_s=0.01), budget=0.01, maximum=64)
    11
    >>> affordable(Costs(step_s=0.1, snapshot_s=9.0), budget=0.01, maximum=64)
    64
    """
    if inflation(1, costs, maximum) <= budget:
        return 1
    snapshots = int(budget * maximum * costs.step_s / costs.snapshot_s)
    return -(-maximum // max(1, snapshots))


def next_interval(current: int, seen: Experience, allowed: Automatic) -> int:
    """The interval to go on with.

    At first every step has a snapshot; then a longer interval shows what a step takes
    without one; then the interval follows from the costs, and changes only when it
    must (it costs more than the budget) or when that is worth while.
    """
    maximum, costs = allowed.maximum, seen.costs
    if len(seen.windows) < WARM_WINDOWS:
        return current
    if costs is None or seen.unseen_steps >= PROBE_EVERY:
        return max(current, min(PROBE_STEPS, maximum))
    wanted = affordable(costs, AIM * allowed.budget, maximum)
    if inflation(current, costs, maximum) > allowed.budget:
        return max(current, wanted)
    return wanted if wanted <= WORTHWHILE * current else current
