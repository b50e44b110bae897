"""The leader's hold on the snapshot interval of one formation.

Gathers what the trainers measured, has `checkpoint.interval` decide, and names the
boundary after which a change is in force: one that no trainer passes before it was told
(with the release of the boundary before it). Must not know how it is told.
"""

from collections.abc import Mapping, Sequence

from dtft.checkpoint.replication import (
    Commit,
    Experience,
    Window,
    inflation,
    next_interval,
)
from dtft.elastic.config import AgentConfig
from dtft.elastic.roles import Assignment


class Intervals:
    """Which steps follow each other as snapshots."""

    def __init__(self, config: AgentConfig) -> None:
        """Knows nothing yet of what a snapshot costs."""
        self._cadence, self._automatic = config.cadence, config.automatic
        self._seen = Experience()
        self._windows: dict[int, list[Window]] = {}
        self._reported: dict[int, int] = {}
        self._decided: int | None = None
        self._news: str | None = None
        self.reach = self._cadence.period
        """Steps that may pass until the next snapshot."""
        self.changes: Sequence[tuple[int, int]] = ()
        """The last change, to be told: (after which boundary, interval)."""

    def resumed(self, assignment: Assignment, commits: Sequence[Commit]) -> None:
        """Until the first report: what the commit says that the job goes on from."""
        known = {commit.step: commit.interval for commit in commits}
        if assignment.source == "init":
            self.reach = self._cadence.interval
        elif assignment.source == "memory":
            self.reach = known.get(assignment.step, self.reach)

    def heard(
        self, step: int, interval: int | None, window: Mapping[str, float] | None
    ) -> None:
        """A trainer has staged a step; the next one follows after `interval` steps."""
        self._reported[step] = interval or self._cadence.interval
        if window is not None:
            self._windows.setdefault(step, []).append(Window(**window))  # type: ignore[arg-type]

    def concluded(self, step: int) -> tuple[int, int]:
        """Every trainer has staged a step: decides.

        Returns:
            The interval in force after it, and the boundary that follows.
        """
        interval = self._reported.get(step, self._cadence.interval)
        following = self._cadence.at(interval).following(step)
        windows = self._windows.get(step)
        for table in (self._reported, self._windows):
            for old in [known for known in table if known <= step]:
                del table[old]
        if self._automatic is not None and windows:
            self._decide(interval, following, _slowest(windows))
        self.reach = max(interval, self._decided or 1)
        return interval, following

    def _decide(self, interval: int, following: int, window: Window) -> None:
        assert self._automatic is not None
        self._seen = self._seen.and_window(window)
        current = self._decided or interval
        wanted = next_interval(current, self._seen, self._automatic)
        if wanted == current:
            return
        self._decided, self.changes = wanted, ((following, wanted),)
        self._news = self._text(wanted, following)

    def _text(self, interval: int, after: int) -> str:
        costs, allowed = self._seen.costs, self._automatic
        assert allowed is not None
        text = f"a snapshot every {interval} steps after step {after}: "
        if costs is None:
            return text + "what a step takes without one is looked for"
        part = inflation(interval, costs, allowed.maximum)
        text += (
            f"a step takes {costs.step_s * 1e3:.1f} ms, a snapshot adds "
            f"{costs.snapshot_s * 1e3:.1f} ms, so {part:.2%} of the wall time "
            f"(checkpoint.stall_budget {allowed.budget:.2%})"
        )
        if part > allowed.budget:
            text += "; raise checkpoint.max_interval to spend less"
        return text

    def news(self) -> str | None:
        """A line for people after a change, once."""
        news, self._news = self._news, None
        return news


def _slowest(windows: Sequence[Window]) -> Window:
    """The measurement that counts: steps are common, the latest host delays all."""
    return min(windows, key=lambda it: (it.quiet_steps, -it.stall_s, -it.affected_s))
