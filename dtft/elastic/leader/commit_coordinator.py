"""Commits and exports of one formation, and its snapshot interval.

`CommitCoordinator` turns reports into commits, releases and export orders. `Intervals`
collects the trainers' measurements, has `dtft.checkpoint` choose the snapshot interval,
and names the boundary after which a change takes effect. `records` writes commits to
the store.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from dtft.checkpoint.replication import (
    Commit,
    Experience,
    StepTracker,
    Window,
    inflation,
    next_interval,
)
from dtft.checkpoint.state import Layout
from dtft.checkpoint.storage import export_world
from dtft.elastic.assignment import SlotAssignment
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.export_plan import borrowed, digests_for
from dtft.elastic.leader.recovery import transfers_to
from dtft.elastic.leader.storage import StorageHealth


class Intervals:
    """The snapshot interval of one generation.

    A change of the interval takes effect after the next boundary at which trainers
    stage. Trainers get the change with the release of the boundary before, so no
    trainer passes that boundary without the change.
    """

    def __init__(self, config: AgentConfig) -> None:
        """Starts without a measured snapshot cost."""
        self._cadence, self._automatic = config.cadence, config.automatic
        self._seen = Experience()
        self._windows: dict[int, list[Window]] = {}
        self._reported: dict[int, int] = {}
        self._decided: int | None = None
        self._news: str | None = None
        self.reach = self._cadence.period
        """The number of steps that may pass until the next snapshot."""
        self.changes: Sequence[tuple[int, int]] = ()
        """The last change to send: (boundary after which it takes effect, interval)."""

    def resumed(self, assignment: SlotAssignment, commits: Sequence[Commit]) -> None:
        """Sets `reach` until the first report, from the restored commit's interval."""
        known = {commit.step: commit.interval for commit in commits}
        if assignment.source == "init":
            self.reach = self._cadence.interval
        elif assignment.source == "memory":
            self.reach = known.get(assignment.step, self.reach)

    def heard(
        self, step: int, interval: int | None, window: Mapping[str, float] | None
    ) -> None:
        """Records that a trainer staged a step and stages again `interval` steps later.

        `window` has the fields of `Window`, or is None without measurements.
        """
        self._reported[step] = interval or self._cadence.interval
        if window is not None:
            self._windows.setdefault(step, []).append(Window(**window))  # type: ignore[arg-type]

    def concluded(self, step: int) -> tuple[int, int]:
        """Decides the interval once every trainer has staged a step.

        Returns:
            The interval in force after the step, and the next boundary.
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
        """The message about the last change; returned once per change, otherwise
        None."""
        news, self._news = self._news, None
        return news


def _slowest(windows: Sequence[Window]) -> Window:
    """The window of the slowest host, which delays all hosts in a step."""
    return min(windows, key=lambda it: (it.quiet_steps, -it.stall_s, -it.affected_s))


GRACE_S = 30.0
"""Seconds after the export timeout at which a silent exporter counts as hung."""

KEPT_TRACKERS = 4
"""Number of newest complete steps whose trackers are kept for export; a tracker has the
slices that each host copied."""


class CommitCoordinator:
    """Commits and exports the steps of one formation. Used by the leader's event
    loop."""

    def __init__(
        self,
        config: AgentConfig,
        layout: Layout,
        assignment: SlotAssignment,
        *,
        stored: int,
        export_addresses: Mapping[str, str],
        addresses: Mapping[str, str],
        record: Callable[[Commit], None],
        send: Callable[..., None],
        health: StorageHealth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts with no staged step.

        Args:
            config: the settings of the leader's agent.
            layout: the layout that the trainers announced.
            assignment: the assignment of the formation.
            stored: the newest step in storage, -1 for none.
            export_addresses: host to the host:port at which it would lead an export.
            addresses: host to the host:port at which it serves its peers.
            record: queues the write of a commit.
            send: send(host, op, **fields).
            health: the health of storage, which decides when an export may be retried.
            clock: returns the time in seconds.
        """
        self._config, self.layout, self._assignment = config, layout, assignment
        self._export_addresses, self._addresses = export_addresses, addresses
        self._record, self._send = record, send
        self._health, self._clock = health, clock
        self.placement = assignment.spread.place(layout)
        self._trackers: dict[int, StepTracker] = {}
        self._complete: dict[int, StepTracker] = {}
        """Step to its complete tracker, for steps that may still be exported."""
        self.pending: Commit | None = None
        """The complete commit that the store has not confirmed yet; None if there is
        none."""
        self.committed = -1 if assignment.source == "init" else assignment.step
        self.intervals = Intervals(config)
        self.stop_at: int | None = None
        self.stopping = False
        self._export: tuple[int, set[str]] | None = None
        self._export_until = 0.0
        self._lenders: list[str] = []
        self._exported = stored
        self._failures = 0
        self._failed: dict[int, int] = {}
        self.overdue: int | None = None
        """The newest step that was due during another step's export."""
        self._passed = 0
        """The newest step that was released before its commit was recorded."""

    def staged(
        self,
        slot: int,
        step: int,
        digests: Sequence[bytes],
        interval: int | None = None,
        window: Mapping[str, float] | None = None,
    ) -> None:
        """Handles a slot's staged step; raises Divergence, Mislabelled.

        Args:
            slot: the trainer's slot.
            step: the staged step.
            digests: the digests of the slot's slices.
            interval: steps until the slot stages again; by default the config's.
            window: the measurements since the step before; the fields of `Window`.
        """
        if step <= self.committed:
            return
        self.intervals.heard(step, interval, window)
        self._tracker(step).staged(slot, digests)
        self._conclude(step)

    def held(self, step: int, source: int, target: int, root: str) -> None:
        """Handles a push that its target has verified; ignores committed steps."""
        if step <= self.committed:
            return
        self._tracker(step).held(source, target, root)
        self._conclude(step)

    def _tracker(self, step: int) -> StepTracker:
        if step not in self._trackers:
            self._trackers[step] = StepTracker(self.layout, self.placement, step)
        return self._trackers[step]

    def _conclude(self, step: int) -> None:
        tracker = self._trackers[step]
        if not tracker.complete:
            return
        del self._trackers[step]
        if self._config.share == "divided":
            self._complete[step] = tracker
            for old in sorted(self._complete)[:-KEPT_TRACKERS]:
                del self._complete[old]
        interval, following = self.intervals.concluded(step)
        self.pending = Commit(
            step=step,
            generation=self._assignment.generation,
            attempt=self._assignment.attempt,
            root=tracker.root(),
            layout=self.layout.digest,
            holders=self._assignment.slots,
            copies=self.placement.effective_copies,
            share=self._config.share,
            interval=interval,
        )
        if self.stopping and self.stop_at is None:
            self.stop_at = following
        self._record(self.pending)

    def waiting_for(self) -> str:
        """The copies or slots for which the oldest incomplete step waits, as text."""
        if not self._trackers:
            return "the next step"
        step = min(self._trackers)
        return f"step {step}: {self._trackers[step].missing}"

    def delayed(self, commit: Commit) -> None:
        """Releases the trainers from a complete step before the store has its commit.

        The hosts get the commit with the release, so a later leader can learn it.
        """
        self._passed = max(self._passed, commit.step)
        self._release(commit, is_recorded=False)

    def recorded(self, commit: Commit) -> None:
        """Records the commit without releasing the trainers."""
        if self.pending is not None and self.pending.step <= commit.step:
            self.pending = None
        self.committed = max(self.committed, commit.step)

    def written(self, commit: Commit) -> None:
        """Records the commit, releases the trainers and exports the step if due."""
        self.recorded(commit)
        self._release(commit, is_recorded=True)
        self._export_if_due(commit.step)

    def _export_if_due(self, step: int) -> None:
        interval = self._config.storage_interval
        if not interval:
            return
        last = self._exported if self._export is None else self._export[0]
        due = step // interval > last // interval
        if self._export is not None:
            self.overdue = step if due else self.overdue
        elif due and self._health.may_try(self._clock()):
            self.export(step)

    def _release(self, commit: Commit, *, is_recorded: bool) -> None:
        # Holders are omitted: every host has them from its order.
        text = replace(commit, holders=()).to_json()
        for host in self._assignment.slots:
            self._send(
                host,
                "release",
                step=commit.step,
                committed=is_recorded,
                commit=text,
                stop_at=self.stop_at,
                changes=self.intervals.changes,
            )

    # -------------------------------------------------------------------- export

    @property
    def is_waiting(self) -> bool:
        """Whether some step is staged by a slot but not complete."""
        return bool(self._trackers)

    @property
    def exported(self) -> int:
        """The newest step in storage, -1 for none."""
        return self._exported

    @property
    def exporting(self) -> int | None:
        """The step that is being written to storage; None for none."""
        return self._export[0] if self._export else None

    def export(self, step: int) -> None:
        """Orders the fewest hosts that hold every slice to export a step.

        Orders nothing while another step is written, or if a later step was released
        before this step was recorded: the step's copies are then gone.
        """
        if self._export is None and step >= self._passed:
            self._order_export(step, set(self._assignment.slots), self._held(step))

    def export_from(
        self, step: int, alive: Collection[str], held: Mapping[str, Mapping[str, bytes]]
    ) -> bool:
        """Orders the remaining hosts to export a step; False if some slice is missing.

        An export in progress is replaced, because some of its hosts are lost.

        Args:
            step: the step to export.
            alive: the hosts that are left.
            held: host -> slice key -> digest, of verified slices of the step.
        """
        return self._order_export(step, alive, held)

    def _held(self, step: int) -> dict[str, dict[str, bytes]] | None:
        """Host -> slice key -> digest, of the slices that each host copied of a step.

        None if every host has all slices of its slot.
        """
        tracker = self._complete.get(step)
        if tracker is None:
            return None  # every host has its whole slot, also of a restored step
        held: dict[str, dict[str, bytes]] = {
            host: {} for host in self._assignment.slots
        }
        for key, slots in tracker.copied.items():
            for slot in slots:
                held[self._assignment.slots[slot]][key] = tracker.digests[key]
        return held

    def _order_export(
        self,
        step: int,
        alive: Collection[str],
        held: Mapping[str, Mapping[str, bytes]] | None,
    ) -> bool:
        hosts = []
        for slot in (slots := export_world(self.layout).slots):
            same = [
                host
                for other, host in enumerate(self._assignment.slots)
                if self.layout.slices(other) == self.layout.slices(slot)
            ]
            able = [host for host in same if host in alive and host not in hosts]
            if not able:
                return False
            mine = self._assignment.slots[slot]
            hosts.append(mine if mine in able else able[0])
        loans = borrowed(self.layout, dict(zip(hosts, slots, strict=True)), held, alive)
        if loans is None:
            return False
        self._end_loans()
        self._lenders = sorted({loan.source for loan in loans})
        for host in self._lenders:
            self._send(host, "lend", step=step)
        self._export, self.overdue = (step, set(hosts)), None
        self._health.begun(step, self._clock())
        self._export_until = self._clock() + self._config.timeouts.export + GRACE_S
        for rank, host in enumerate(hosts):
            self._send(
                host,
                "export",
                step=step,
                slot=slots[rank],
                rank=rank,
                world=len(hosts),
                coordinator=self._export_addresses[hosts[0]] if len(hosts) > 1 else "",
                failures=self._failures,
                transfers=transfers_to(loans, self._addresses, host),
                digests=digests_for(loans, held, host),
            )
        return True

    def _end_loans(self) -> None:
        for host in self._lenders:
            self._send(host, "lend", step=-1)
        self._lenders = []

    def export_answer(
        self, host: str, step: int, ok: bool, attempt: int | None = None
    ) -> bool | None:
        """Handles the outcome of one host's part of an export.

        Returns whether the export succeeded. Returns None while other hosts still write
        and for outdated answers.

        Args:
            host: the answering host.
            step: the exported step.
            ok: whether the host has written its part.
            attempt: the attempt that the host answers; by default the newest.
        """
        if self._export is None or self._export[0] != step:
            return None
        if attempt not in (None, self._failures):
            return None  # answers an attempt that another host's failure has ended
        if not ok:
            self._export = None
            self._end_loans()
            self._failures += 1
            self._failed[step] = self._failed.get(step, 0) + 1
            return False
        self._export[1].discard(host)
        if self._export[1]:
            return None
        self._export, self._exported = None, step
        self._end_loans()
        self._failed.clear()
        return True

    def silent_export(self) -> tuple[int, str] | None:
        """The step of an export past its deadline, and the silent hosts, as text."""
        if self._export is None or self._clock() < self._export_until:
            return None
        return self._export[0], ", ".join(sorted(self._export[1]))

    @property
    def may_export(self) -> bool:
        """Whether storage may be written now; not soon after a failed export."""
        return self._health.may_try(self._clock())

    def export_failures(self, step: int) -> int:
        """The number of failed exports of a step."""
        return self._failed.get(step, 0)
