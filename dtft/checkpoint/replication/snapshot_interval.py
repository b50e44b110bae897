"""The snapshot interval: after which steps a snapshot is taken, within a cost budget.

`Cadence` decides from step numbers alone, so that all hosts take snapshots after the
same steps. `next_interval` chooses the smallest interval whose cost, averaged over all
steps, is within a budget. The cost estimate is a median plus its standard error, so
fewer measurements give a higher estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

KEPT_CHANGES = 3
"""Number of entries that `SnapshotSchedule.changes` keeps. The newest entry may not be
in force yet; the steps before it are looked up in the older entries."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """A snapshot every `interval` steps, counted from each multiple of `period`.

    Every multiple of `period` has a snapshot, for any interval.

    >>> cadence = Cadence(interval=3, period=8)
    >>> [step for step in range(1, 17) if cadence.is_boundary(step)]
    [3, 6, 8, 11, 14, 16]
    >>> cadence.following(6), cadence.following(8)
    (8, 11)
    """

    interval: int = 1
    """Steps from one snapshot to the next; the last interval of a period may have
    fewer."""
    period: int = 1
    """Steps after which counting starts again. With a period equal to the interval, all
    intervals are equal."""

    def __post_init__(self) -> None:
        if not 1 <= self.interval <= self.period:
            raise ValueError(
                f"interval={self.interval} is out of range. Allowed: 1 to period="
                f"{self.period}. Change one of them."
            )

    @classmethod
    def every(cls, interval: int) -> "Cadence":
        """Makes a cadence with a snapshot at every multiple of `interval`."""
        return cls(interval=interval, period=interval)

    def is_boundary(self, step: int) -> bool:
        """Whether a snapshot is taken after `step` (the step is a boundary)."""
        return step % self.period % self.interval == 0

    def following(self, step: int) -> int:
        """Returns the first step after `step` that is followed by a snapshot."""
        begin = step - step % self.period
        within = (step - begin) // self.interval * self.interval + self.interval
        return begin + min(within, self.period)

    def at(self, interval: int) -> "Cadence":
        """Returns a cadence with another interval, limited to 1 to `period` steps."""
        return replace(self, interval=max(1, min(interval, self.period)))


@dataclass(frozen=True, kw_only=True)
class SnapshotSchedule:
    """After which steps snapshots are taken, if the interval changes at known steps.

    Between two changes a `Cadence` is in force. A boundary is a step after which a
    snapshot is taken.

    >>> schedule = SnapshotSchedule.of(Cadence(interval=1, period=8))
    >>> schedule = schedule.changed(4, after=2)
    >>> [step for step in range(1, 13) if schedule.is_boundary(step)]
    [1, 2, 4, 8, 12]
    >>> schedule.interval(after=1), schedule.interval(after=2)
    (1, 4)
    """

    changes: tuple[tuple[int, Cadence], ...]
    """Pairs of a step and the cadence that is in force after the step, ascending."""

    @classmethod
    def of(cls, cadence: Cadence) -> "SnapshotSchedule":
        """Makes a schedule with one cadence for all steps."""
        return cls(changes=((-1, cadence),))

    def changed(self, interval: int, *, after: int) -> "SnapshotSchedule":
        """Returns a schedule that has the given interval after step `after`.

        `after` must be a boundary; the interval is limited to 1 to the `period` of the
        cadence in force. Returns this schedule if `interval` is already its newest
        interval, or if its last change is at or after step `after`.
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
        """Returns the first boundary after `step`; `step` must be a boundary or 0.

        >>> schedule = SnapshotSchedule.of(Cadence(interval=2, period=8))
        >>> schedule = schedule.changed(4, after=2)
        >>> schedule.following(0), schedule.following(2)
        (2, 4)
        """
        return self._in_force(step).following(step)

    def interval(self, *, after: int) -> int:
        """Returns the interval, in steps, that is in force after step `after`."""
        return self._in_force(after).interval

    def _in_force(self, after: int) -> Cadence:
        known = [cadence for step, cadence in self.changes if step <= after]
        return known[-1] if known else self.changes[0][1]


KEPT_WINDOWS = 32
"""Number of newest windows (`Window`), and of newest values of `quiet_step_s`, that the
cost estimate of `Experience` uses."""
WARM_WINDOWS = 8
"""Number of windows (`Window`) before `next_interval` first changes the interval; the
first steps are slow."""
PROBE_STEPS = 16
"""Interval, in steps, to which `next_interval` raises a shorter interval to measure
quiet steps (steps that run without replication in the background)."""
LEAST_MAXIMUM = 8
"""Least allowed `Automatic.maximum`, in steps. A shorter interval may have no quiet
step (without replication); the cost of a snapshot could then not be measured."""
PROBE_EVERY = 1000
"""Steps without a quiet step (without replication) after which `next_interval` raises
the interval to `PROBE_STEPS`."""
AIM = 0.8
"""Fraction of the budget that a newly chosen interval may cost. A longer interval is
chosen only when the current one costs more than the whole budget, except to measure
quiet steps (`PROBE_STEPS`)."""
WORTHWHILE = 0.8
"""Greatest ratio of a shorter interval to the current interval at which `next_interval`
adopts the shorter one."""


@dataclass(frozen=True, kw_only=True)
class Automatic:
    """Limits that a user sets for automatic snapshot intervals."""

    budget: float = 0.01
    """Wall time that snapshots may add, as a fraction of the steps' own wall time."""
    maximum: int = 64
    """Largest number of steps between two snapshots, whatever a snapshot costs."""

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
    """Measured times of the steps between two snapshots.

    The first steps are affected by the snapshot and its replication in the background.
    The last steps, if any, are quiet: no replication runs.
    """

    affected_steps: int
    affected_s: float
    """Wall time of the affected steps, including the snapshot, in seconds."""
    quiet_steps: int = 0
    quiet_s: float = 0.0
    """Wall time of the quiet steps, in seconds."""
    stall_s: float = 0.0
    """Seconds for which the snapshot blocked the training thread."""

    @property
    def step_s(self) -> float:
        """Mean wall time per step of the window, in seconds."""
        steps = self.affected_steps + self.quiet_steps
        return (self.affected_s + self.quiet_s) / steps


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Estimated seconds of a step, and seconds that one snapshot adds to the run."""

    step_s: float
    """Wall time of a step without snapshot or replication."""
    snapshot_s: float
    """Upper estimate of the wall time that one snapshot adds."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Measured step times of the newest windows, and mean times of quiet steps.

    A window is the steps between two snapshots. Its quiet steps are those at its end,
    without replication in the background; each mean is over those of one window.
    Immutable.
    """

    windows: tuple[Window, ...] = ()
    quiet_step_s: tuple[float, ...] = ()
    """Mean seconds per quiet step, for each window with quiet steps."""
    unseen_steps: int = 0
    """Steps since the last quiet step."""

    def and_window(self, window: Window) -> "Experience":
        """Returns the measurements with one more window.

        A window is the steps between two snapshots. Keeps the newest 32 windows
        (`KEPT_WINDOWS`), and as many mean times of the quiet steps (those without
        replication in the background) at the end of a window.
        """
        windows = (*self.windows, window)[-KEPT_WINDOWS:]
        if not window.quiet_steps:
            unseen = self.unseen_steps + window.affected_steps
            return replace(self, windows=windows, unseen_steps=unseen)
        quiet = (*self.quiet_step_s, window.quiet_s / window.quiet_steps)
        return Experience(windows=windows, quiet_step_s=quiet[-KEPT_WINDOWS:])

    @property
    def costs(self) -> Costs | None:
        """The estimated costs; None before the first quiet step (without replication).

        In the example, a quiet step takes 1 s. Two affected steps take 2.5 s, so the
        snapshot adds 0.5 s.

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
    """Returns the median of values plus the standard error of the median.

    The standard error is computed from the median absolute deviation, because outliers
    are frequent. It is 0 for one value.
    """
    middle = median(values)
    spread = 1.48 * median(abs(value - middle) for value in values)
    return middle + 1.25 * spread / len(values) ** 0.5


def inflation(interval: int, costs: Costs, maximum: int) -> float:
    """Computes the wall time that snapshots add, as a fraction of the steps' wall time.

    The steps' wall time does not include snapshots. Snapshots are taken as in a
    `Cadence` with interval `interval` and period `maximum`. In the second example, 4
    snapshots in 64 steps add 1 s to 32 s.

    >>> costs = Costs(step_s=0.5, snapshot_s=0.25)
    >>> inflation(1, costs, maximum=64), inflation(16, costs, maximum=64)
    (0.5, 0.03125)
    """
    snapshots = -(-maximum // interval)
    return snapshots * costs.snapshot_s / (maximum * costs.step_s)


def affordable(costs: Costs, budget: float, maximum: int) -> int:
    """Computes the smallest interval in steps whose `inflation` is within the budget.

    The budget is the wall time that snapshots may add, as a fraction of the steps' wall
    time. Returns `maximum` if no interval is within the budget.

    In the first example, a snapshot takes a tenth of a step. An interval of 10 has 7
    snapshots in 64 steps, which add 1.1 %; an interval of 11 has 6, which add 0.9 %.

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
    """Computes the next snapshot interval, in steps, from the measurements.

    A window is the steps between two snapshots; quiet steps are those without
    replication in the background. The rules apply in this order:

    * Before `WARM_WINDOWS` (8) windows are measured, returns `current`.
    * While the costs are unknown, or after `PROBE_EVERY` (1000) steps without a quiet
      step, raises a shorter interval to `PROBE_STEPS` (16 steps, but at most
      `allowed.maximum`), so that quiet steps can be measured. Keeps a longer interval.
    * Computes the wanted interval: the shortest that costs at most `AIM` (0.8) times
      the budget, or `allowed.maximum` if there is none. If `current` costs more than
      the budget, returns the wanted interval, but at least `current`.
    * Otherwise returns the wanted interval if it is at most `WORTHWHILE` (0.8)
      times `current`, else `current`.
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
