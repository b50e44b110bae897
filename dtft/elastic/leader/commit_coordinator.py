"""Commits and exports of one assignment of hosts to slots, and its snapshot interval.

`CommitCoordinator` turns reports into commits, `release` messages (after which trainers
go on) and export orders. `Intervals` collects the trainers' measurements, has
`dtft.checkpoint` choose the snapshot interval, and chooses the step after which a
changed interval takes effect. `records` writes commits to the store.
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
    """The number of steps from one snapshot to the next, in one formation of the job.

    A formation is an assignment of hosts to slots. If the config has an automatic
    interval, the interval is chosen anew at every snapshot, from the times that
    trainers have measured. A new interval applies from the next snapshot on. Trainers
    get it with the leader's message that the present snapshot is committed (`release`),
    so that all of them know it in time.
    """

    def __init__(self, config: AgentConfig) -> None:
        """Starts with the config's interval and no measurements."""
        self._cadence, self._automatic = config.cadence, config.automatic
        self._seen = Experience()
        self._windows: dict[int, list[Window]] = {}
        self._reported: dict[int, int] = {}
        self._decided: int | None = None
        self._news: str | None = None
        self.reach = self._cadence.period
        """Largest number of steps until the next snapshot. The leader's deadline for
        the snapshot is proportional to it."""
        self.changes: Sequence[tuple[int, int]] = ()
        """The last change of the interval, as (the step after which it takes effect,
        the new interval); empty before a change."""

    def resumed(self, assignment: SlotAssignment, commits: Sequence[Commit]) -> None:
        """Sets the largest number of steps until the first snapshot (`reach`).

        Called once for a formation; each complete snapshot sets the number anew
        (`concluded`). The number is:

        * the config's interval, if training begins from the initial state;
        * the interval recorded in the restored commit, if the state was restored from
          memory;
        * else the longest interval that the config allows.

        Args:
            assignment: the assignment of hosts to slots, with the source of the state.
            commits: the recorded commits, in which the restored one is looked up.
        """
        known = {commit.step: commit.interval for commit in commits}
        if assignment.source == "init":
            self.reach = self._cadence.interval
        elif assignment.source == "memory":
            self.reach = known.get(assignment.step, self.reach)

    def heard(
        self, step: int, interval: int | None, window: Mapping[str, float] | None
    ) -> None:
        """Records a trainer's report of a snapshot.

        Args:
            step: the step of the snapshot.
            interval: the snapshot interval in force after `step`, in steps; None for
                the config's interval.
            window: what the trainer has measured since its last snapshot, such as
                seconds of steps and of the snapshot, by the field names of `Window`;
                None if it has measured nothing.
        """
        self._reported[step] = interval or self._cadence.interval
        if window is not None:
            self._windows.setdefault(step, []).append(Window(**window))  # type: ignore[arg-type]

    def concluded(self, step: int) -> tuple[int, int]:
        """Chooses the next interval from the measurements in the reports of `step`.

        Called once all snapshots and copies of the step are complete. The interval
        stays if the config has a fixed interval, or if no trainer has measured times.

        Returns:
            The interval in force after `step`, in steps, and the step of the next
            snapshot. A newly chosen interval takes effect only after the next snapshot,
            so it is not in this result.
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
            return text + "the time of a step without a snapshot is measured next"
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
        """Returns the message about a newly chosen interval.

        Returns None if no interval was chosen since the last call.
        """
        news, self._news = self._news, None
        return news


def _slowest(windows: Sequence[Window]) -> Window:
    """Returns the measurements of the slowest trainer, for which the others wait.

    `windows` has the measurements of each trainer between the same two snapshots. The
    slowest trainer is the one that took the fewest steps after it had sent its copies
    (`quiet_steps`). Of trainers with equally many, it is the one whose snapshot blocked
    training longest.
    """
    return min(windows, key=lambda it: (it.quiet_steps, -it.stall_s, -it.affected_s))


GRACE_S = 30.0
"""The leader waits this many seconds longer than `timeouts.export` for the hosts that
export; then the export counts as failed."""

KEPT_TRACKERS = 4
"""Number of newest complete steps whose `StepTracker`, the reports about the step, is
kept. Trackers are kept only if `share` is "divided", because an export then needs to
know which slices each host copied."""


class CommitCoordinator:
    """Commits and exports the steps of one formation (an assignment of hosts to slots).

    Used by the leader's event loop.
    """

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
        """Starts with no reported snapshot and no export.

        Args:
            config: the settings of the leader's agent.
            layout: the layout (mesh and leaves of the state) that the trainers
                announced.
            assignment: the host of each slot.
            stored: the newest step in storage, -1 for none.
            export_addresses: host to the host:port of an export's coordination service,
                for an export in which the host has rank 0.
            addresses: host to the host:port at which it serves its peers.
            record: queues the write of a commit to the store.
            send: `send(host, op, **fields)` sends an order to a host.
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
        """The commit of a complete step that the store has not recorded yet; None if
        there is no such commit."""
        self.committed = -1 if assignment.source == "init" else assignment.step
        self.intervals = Intervals(config)
        self.stop_at: int | None = None
        self.stopping = False
        self._export: tuple[int, set[str]] | None = None
        self._export_until = 0.0
        self._lenders: list[str] = []
        self._exported = stored
        self._failures = 0
        """Number of exports that failed or were replaced by another order."""
        self._failed: dict[int, int] = {}
        self.overdue: int | None = None
        """The newest step that was due for export while the export ordered last was in
        progress; None if there is none."""
        self._passed = 0
        """The newest step after which trainers went on before the store had recorded
        its commit; 0 if there is none."""

    def staged(
        self,
        slot: int,
        step: int,
        digests: Sequence[bytes],
        interval: int | None = None,
        window: Mapping[str, float] | None = None,
    ) -> None:
        """Handles a slot's report that its snapshot of a step is in host memory.

        Ignores every step up to the newest committed one.

        Args:
            slot: the trainer's slot.
            step: the step of the snapshot.
            digests: the digest of each of the slot's slices; b"" for a slice that the
                slot did not copy.
            interval: the snapshot interval in force after `step`, in steps; None for
                the config's interval.
            window: what the trainer has measured since the last snapshot, such as
                seconds of steps and of the snapshot, by the field names of `Window`;
                None if it has measured nothing.

        Raises:
            Divergence: another slot has different bytes for the same slice.
            Mislabelled: a peer has reported a copy of the slot's slices for this step,
                and the copy has different bytes.
        """
        if step <= self.committed:
            return
        self.intervals.heard(step, interval, window)
        self._tracker(step).staged(slot, digests)
        self._conclude(step)

    def held(self, step: int, source: int, target: int, root: str) -> None:
        """Handles the report that slot `target` holds slot `source`'s slices of `step`.

        Ignores every step up to the newest committed one.

        Raises:
            Mislabelled: `root`, one digest over the copied slices, differs from that of
                the slices in the snapshot of slot `source`.
        """
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
        """Describes the snapshots and copies that the oldest incomplete step lacks.

        Returns "the next step" if no step is incomplete.
        """
        if not self._trackers:
            return "the next step"
        step = min(self._trackers)
        return f"step {step}: {self._trackers[step].missing}"

    def delayed(self, commit: Commit) -> None:
        """Lets the trainers go on although the store has not recorded a commit in time.

        Tells the host of every slot that its trainer may go on (`release`). The message
        contains the commit, so a later leader can learn the commit from the hosts.
        """
        self._passed = max(self._passed, commit.step)
        self._release(commit, is_recorded=False)

    def recorded(self, commit: Commit) -> None:
        """Remembers that the store has a commit; does not let the trainers go on."""
        if self.pending is not None and self.pending.step <= commit.step:
            self.pending = None
        self.committed = max(self.committed, commit.step)

    def written(self, commit: Commit) -> None:
        """Handles a commit that the store has recorded: lets the trainers go on.

        Also orders an export of the step if the config's storage interval makes one
        due, no export is in progress, and no pause after a failed export lasts.
        """
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
        """Whether, for some step, only a part of the snapshots and copies is reported.

        The other reports are then still to come.
        """
        return bool(self._trackers)

    @property
    def exported(self) -> int:
        """The step exported last.

        If none was exported since hosts were last assigned to slots: the newest step
        that storage had then, or -1 if it had none.
        """
        return self._exported

    @property
    def exporting(self) -> int | None:
        """The step that is being written to storage; None for none."""
        return self._export[0] if self._export else None

    def export(self, step: int) -> None:
        """Orders hosts that together own all slices to write a step to storage.

        Of hosts with the same slices, only one writes. Orders nothing in these cases:

        * An export is in progress.
        * A slice of the step is on no host.
        * Trainers have gone on after a later step whose commit the store had not
          recorded in time. The hosts may then have dropped the copies of `step`.
        """
        if self._export is None and step >= self._passed:
            self._order_export(step, set(self._assignment.slots), self._held(step))

    def export_from(
        self, step: int, alive: Collection[str], held: Mapping[str, Mapping[str, bytes]]
    ) -> bool:
        """Orders the remaining hosts to export a step, after other hosts were lost.

        Replaces an export in progress, because some of its hosts are lost.

        Args:
            step: the step to export.
            alive: the remaining hosts.
            held: for each host, the slices of the step that it holds and has verified:
                slice key to digest.

        Returns:
            Whether the export was ordered; False if some slice is on none of the hosts.
        """
        return self._order_export(step, alive, held)

    def _held(self, step: int) -> dict[str, dict[str, bytes]] | None:
        """Returns which slices of a step each host has copied at the snapshot.

        Returns:
            Host -> slice key -> digest. None if every host has all slices of its slot:
            in a job without `share="divided"`, and for the restored step.
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
        if self._export is not None:
            self._failures += 1  # answers to the order that this one replaces are late
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
        """Handles one host's answer to the order to write its slices of an export.

        Returns:
            True once every host has written; False if this host has failed, which ends
            the export. None while other hosts still write, and for an answer to an
            earlier order.

        Args:
            host: the answering host.
            step: the exported step.
            ok: whether the host has written its slices.
            attempt: identifies the order that the host answers: its field `failures`,
                the number of exports that had failed or were replaced before. None
                stands for the newest order.
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
        """Returns an export that is past its deadline; None if no export is late.

        Returns:
            The exported step, and the names of the hosts that have not answered.
        """
        if self._export is None or self._clock() < self._export_until:
            return None
        return self._export[0], ", ".join(sorted(self._export[1]))

    @property
    def may_export(self) -> bool:
        """Whether the pause after a failed export is over; True without a failure."""
        return self._health.may_try(self._clock())

    def export_failures(self, step: int) -> int:
        """Returns the number of failed exports of a step.

        Counting starts anew when an export of any step succeeds.
        """
        return self._failed.get(step, 0)
