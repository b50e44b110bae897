"""After which steps a snapshot is taken. Pure.

Decides from step numbers alone, so that hosts which were told the same take snapshots
after the same steps. Must not know clocks, costs or messages.
"""

from dataclasses import dataclass, replace

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
class Schedule:
    """A cadence that changes now and then, each change told before it is in force.

    >>> schedule = Schedule.of(Cadence(interval=1, period=8)).changed(4, after=2)
    >>> [step for step in range(1, 13) if schedule.is_boundary(step)]
    [1, 2, 4, 8, 12]
    >>> schedule.interval(after=1), schedule.interval(after=2)
    (1, 4)
    """

    changes: tuple[tuple[int, Cadence], ...]
    """Step and the cadence that is in force after it, ascending."""

    @classmethod
    def of(cls, cadence: Cadence) -> "Schedule":
        """One cadence from the beginning."""
        return cls(changes=((-1, cadence),))

    def changed(self, interval: int, *, after: int) -> "Schedule":
        """With another interval in force after step `after`, a boundary.

        What is known already, or was overtaken, changes nothing.
        """
        last, cadence = self.changes[-1]
        if after <= last or interval == cadence.interval:
            return self
        changes = (*self.changes, (after, cadence.at(interval)))
        return Schedule(changes=changes[-KEPT_CHANGES:])

    def is_boundary(self, step: int) -> bool:
        """Whether a snapshot is taken after `step`."""
        return self._in_force(step - 1).is_boundary(step)

    def following(self, step: int) -> int:
        """The first boundary after `step`, a boundary.

        >>> schedule = Schedule.of(Cadence(interval=2, period=8)).changed(4, after=2)
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
