"""The leader's ledger of one formation: who staged what, what is committed, exported.

Turns reports into commits, releases and export orders. Writes go through a thread of
their own (`Writer`), so that a store that is away delays commits and nothing else. Does
not know how a formation came about.
"""

import json
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dtft.checkpoint.commit import Commit, StepTracker
from dtft.checkpoint.export_plan import export_world
from dtft.checkpoint.placement import place
from dtft.checkpoint.slices import Layout
from dtft.elastic.config import AgentConfig
from dtft.elastic.roles import Assignment
from dtft.elastic.store import StoreUnavailable

logger = logging.getLogger(__name__)

RETRY_S = 0.1
KEPT_COMMITS = 2


Task = tuple[str, Any, Callable[[], bool]]


class Writer:
    """Performs store writes in order, again and again until the store answers.

    Emits ("written", label, value, allowed) when a write was answered, and
    ("write_delayed", label, value) when the store does not answer. While it is away a
    newer commit takes the place of an older one; nothing else is left out.
    """

    def __init__(self, emit: Callable[..., None]) -> None:
        """Starts the thread."""
        self._emit = emit
        self._tasks: queue.Queue[Task] = queue.Queue()
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def write(self, label: str, value: Any, action: Callable[[], bool]) -> None:
        """Queues one write; `action` says whether the fence let it through."""
        self._tasks.put((label, value, action))

    def _run(self) -> None:
        waiting: list[Task] = []
        while not self._closed.is_set():
            try:
                task = self._tasks.get(timeout=RETRY_S if waiting else None)
                fresh = True
                waiting = [w for w in waiting if w[0] != task[0]] + [task]
            except queue.Empty:
                fresh = False
            while waiting and self._written(waiting[0]):
                waiting.pop(0)
            if fresh and waiting:
                self._emit("write_delayed", *waiting[-1][:2])

    def _written(self, task: Task) -> bool:
        label, value, action = task
        try:
            self._emit("written", label, value, action())
        except StoreUnavailable:
            return False
        return True

    def close(self) -> None:
        """Lets the thread end; a queued write may be lost."""
        self._closed.set()
        self._tasks.put(("", None, lambda: True))


class Ledger:
    """Commits and exports of one formation. Driven by the leader's events."""

    def __init__(
        self,
        config: AgentConfig,
        layout: Layout,
        assignment: Assignment,
        *,
        stored: int,
        export_addresses: Mapping[str, str],
        record: Callable[[Commit], None],
        send: Callable[..., None],
    ) -> None:
        """Opens the ledger of a formation.

        Args:
            config: the leader's own settings.
            layout: what the trainers announced.
            assignment: the formation.
            stored: the newest step in storage, 0 for none.
            export_addresses: host to the host:port at which it would lead an export.
            record: queues the write of a commit.
            send: send(host, op, **fields).
        """
        self._config, self.layout, self._assignment = config, layout, assignment
        self._export_addresses = export_addresses
        self._record, self._send = record, send
        self.placement = place(layout, config.copies)
        self._trackers: dict[int, StepTracker] = {}
        self.pending: Commit | None = None
        """Complete, but the store has not confirmed it yet."""
        self.committed = assignment.step
        self.stop_at: int | None = None
        self.stopping = False
        self._export: tuple[int, set[str]] | None = None
        self._exported = stored
        self.export_failures = 0

    def staged(self, slot: int, step: int, digests: Sequence[bytes]) -> None:
        """A slot has staged a step; raises Divergence."""
        self._tracker(step).staged(slot, digests)
        self._conclude(step)

    def held(self, step: int, source: int, target: int) -> None:
        """A push has arrived and was verified."""
        self._tracker(step).held(source, target)
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
        self.pending = Commit(
            step=step,
            generation=self._assignment.generation,
            attempt=self._assignment.attempt,
            root=tracker.root(),
            layout=self.layout.digest,
            holders=self._assignment.slots,
            copies=self.placement.effective_copies,
        )
        if self.stopping and self.stop_at is None:
            self.stop_at = step + self._config.interval
        self._record(self.pending)

    def waiting_for(self) -> str:
        """What the oldest incomplete step waits for."""
        if not self._trackers:
            return "the next step"
        step = min(self._trackers)
        return f"step {step}: {self._trackers[step].missing}"

    def delayed(self, commit: Commit) -> None:
        """The store is away: training goes on, the commit waits."""
        self._release(commit.step, committed=False)

    def written(self, commit: Commit) -> None:
        """A commit is recorded."""
        if self.pending is not None and self.pending.step <= commit.step:
            self.pending = None
        self.committed = max(self.committed, commit.step)
        self._release(commit.step, committed=True)
        interval = self._config.storage_interval
        due = (
            commit.step // interval > self._exported // interval if interval else False
        )
        if due or (interval and not self._exported):
            self.export(commit.step)

    def _release(self, step: int, *, committed: bool) -> None:
        for host in self._assignment.slots:
            self._send(
                host, "release", step=step, committed=committed, stop_at=self.stop_at
            )

    # -------------------------------------------------------------------- export

    @property
    def exporting(self) -> int | None:
        """The step that is being written to storage."""
        return self._export[0] if self._export else None

    def export(self, step: int) -> None:
        """Orders the fewest hosts that hold every slice to write a step."""
        if self._export is None:
            self._order_export(step, set(self._assignment.slots))

    def export_from(self, step: int, alive: Collection[str]) -> bool:
        """As `export`, from the hosts that are left; False if they lack a slice.

        An export that was under way is taken for lost with its hosts.
        """
        return self._order_export(step, alive)

    def _order_export(self, step: int, alive: Collection[str]) -> bool:
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
        self._export = (step, set(hosts))
        for rank, host in enumerate(hosts):
            self._send(
                host,
                "export",
                step=step,
                slot=slots[rank],
                rank=rank,
                world=len(hosts),
                coordinator=self._export_addresses[hosts[0]] if len(hosts) > 1 else "",
            )
        return True

    def export_answer(self, host: str, step: int, ok: bool) -> bool | None:
        """One host's outcome; True or False once all have answered or one failed."""
        if self._export is None or self._export[0] != step:
            return None
        if not ok:
            self._export = None
            self.export_failures += 1
            return False
        self._export[1].discard(host)
        if self._export[1]:
            return None
        self._export, self._exported, self.export_failures = None, step, 0
        return True


def result_json(status: str, step: int, message: str = "", code: int = 0) -> str:
    """The value of a job's result key; `code` is every agent's exit code."""
    return json.dumps(
        {"status": status, "step": step, "message": message, "code": code}
    )
