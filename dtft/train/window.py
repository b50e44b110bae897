"""What the steps between two snapshots took, as the training loop sees it.

Steps are dispatched ahead: when the loop dispatches step s, it has just heard that step
s - 2 is finished, except right after a boundary, where it has waited for everything.
From these moments follow the steps that ran beside a replication and those that did
not. Is told the times; must not know clocks, managers or agents.
"""

from dtft.checkpoint.replication import Window

AHEAD = 2
"""Dispatching step s, the loop has heard of the end of step s - AHEAD."""


class WindowClock:
    """Follows one process's loop from boundary to boundary.

    >>> clock = WindowClock()
    >>> clock.finished(10, 10.0, released_at=0.0, stall_s=0.0) is None
    True
    >>> for step in range(11, 19):
    ...     clock.dispatched(step, step - 1.0)
    >>> clock.finished(18, 18.5, released_at=11.5, stall_s=0.25)
    Window(affected_steps=4, affected_s=4.5, quiet_steps=4, quiet_s=4.0, stall_s=0.25)
    """

    def __init__(self) -> None:
        """Has seen nothing yet."""
        self._last: tuple[int, float] | None = None
        self._dispatched: list[tuple[int, float]] = []

    def dispatched(self, step: int, now: float) -> None:
        """A step was handed to the devices."""
        self._dispatched.append((step, now))

    def finished(
        self, step: int, now: float, *, released_at: float, stall_s: float
    ) -> Window | None:
        """A boundary's step is finished.

        Args:
            step: the step.
            now: the moment, in seconds.
            released_at: when the snapshot of the boundary before became safe.
            stall_s: what it held up this thread.

        Returns:
            The window since the boundary before; None for the first one.
        """
        last, dispatched = self._last, self._dispatched
        self._last, self._dispatched = (step, now), []
        if last is None:
            return None
        begin, begun_at = last
        quiet = [
            (number, at)
            for number, at in dispatched
            if number > begin + AHEAD and at >= released_at
        ][1:]  # the step that ran at the first of these moments began before it
        quiet_steps = quiet[-1][0] - quiet[0][0] if quiet else 0
        quiet_s = quiet[-1][1] - quiet[0][1] if quiet else 0.0
        return Window(
            affected_steps=step - begin - quiet_steps,
            affected_s=now - begun_at - quiet_s,
            quiet_steps=quiet_steps,
            quiet_s=quiet_s,
            stall_s=stall_s,
        )
