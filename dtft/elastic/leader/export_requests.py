"""Exports as the leader answers for them: how they ended, and who waits for one.

`ExportRequests` has the people who asked for an export and their answers.
`StorageExports` keeps `StorageWatch` and `StorageHealth` in step with the outcomes, and
tells people, the store and whoever asked.
"""

import queue
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dtft.checkpoint.transport import MAX_REQUEST_HEADER, Channel, no_payload
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.commit_coordinator import CommitCoordinator
from dtft.elastic.leader.events import Journal
from dtft.elastic.leader.records import Records
from dtft.elastic.leader.rendezvous import Rendezvous
from dtft.elastic.leader.storage import StorageHealth, StorageWatch

Answer = Callable[[dict[str, Any]], None]


class ExportRequests:
    """Who waits for an export, and since which commit. Used by the event loop."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: list[tuple[int, Answer]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, committed: int, answer: Answer) -> None:
        """Somebody wants step `committed` or a later one."""
        self._waiting.append((committed, answer))

    def outcome(self, step: int, ok: bool, error: str) -> None:
        """A step was written to storage, or not."""
        reply = {"step": step} if ok else {"error": error}
        for committed, answer in self._waiting:
            if step >= committed:
                answer(reply)
        self._waiting = [one for one in self._waiting if one[0] > step]

    def refuse(self, reason: str, *, moved: bool = False) -> None:
        """Nothing will come: all who still wait are told why.

        Args:
            reason: for people.
            moved: another host should be asked.
        """
        for _, answer in self._waiting:
            answer({"error": reason, "moved": moved})
        self._waiting.clear()

    def close(self) -> None:
        """Another host leads now: all who still wait should ask that one."""
        self.refuse("this host does not lead any more; ask again", moved=True)


def serve_export(
    channel: Channel, config: AgentConfig, ask: Callable[[Answer], None]
) -> None:
    """Has the leader asked for an export, and answers when it is over."""
    _asked(channel)
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    ask(answers.put)
    limit_s = config.timeouts.export + config.timeouts.stage
    try:
        reply = answers.get(timeout=limit_s)
    except queue.Empty:
        reply = {"error": f"no step was written within {limit_s:.0f} s"}
    channel.send(reply, timeout_s=10.0)
    _asked(channel)  # the caller has it


def _asked(channel: Channel) -> None:
    channel.receive(10.0, no_payload, max_header=MAX_REQUEST_HEADER)


class StorageExports:
    """One job's storage in the eyes of its leader. Used by the event loop.

    Attributes:
        watch: which steps storage has.
        health: when an export may be tried again.
    """

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        journal: Journal,
        loop: Loop,
        list_steps: Callable[[Path], Iterable[int]],
    ) -> None:
        """Takes storage to be well; nobody waits."""
        self._records, self._journal, self._loop = records, journal, loop
        directory = config.storage_directory
        self.watch = StorageWatch(directory, loop, list_steps=list_steps)
        self.health = StorageHealth(config.storage_directory)
        self._requests = ExportRequests()

    def asked(self, rendezvous: Rendezvous, answer: Answer) -> None:
        """Somebody wants the newest commit in storage: the next one is written."""
        coordinator = rendezvous.coordinator
        if coordinator is None or rendezvous.phase != "running" or rendezvous.frozen:
            text = f"the job does not train now ({rendezvous.phase}); ask again later"
            answer({"error": text})
        else:
            self._requests.add(coordinator.committed, answer)

    def committed(self, coordinator: CommitCoordinator, step: int) -> None:
        """A step is safe in memory: it is written to storage if somebody waits."""
        if self._requests:
            coordinator.export(step)
        if (due := coordinator.overdue) is not None:
            self._say(self.health.overdue(due, self._loop.now()))

    def ended(self, host: str, step: int, ok: bool, error: str) -> None:
        """A step is in storage, or could not be written.

        Args:
            host: that answered last, or was the first to fail.
            step: of the export.
            ok: whether all of it is there.
            error: what went wrong.
        """
        self._journal.event("export", step=step, ok=ok, error=error)
        if ok:
            self.watch.wrote(step)
            self._records.put("stored", step, "stored", str(step))
            self._say(self.health.succeeded(step))
        else:
            self._say(self.health.failed(step, host, error, self._loop.now()))
        self._requests.outcome(step, ok, error)

    def _say(self, line: str | None) -> None:
        if line:
            self._journal.say(line)

    def wanted(self, committed: int, answer: Answer) -> None:
        """Somebody waits for step `committed` or a later one, which is seen to."""
        self._requests.add(committed, answer)

    def has(self, step: int) -> None:
        """A step is there already: who waits for it is told so."""
        self._requests.outcome(step, True, "")

    def refuse(self, reason: str) -> None:
        """Tells all who wait why nothing will come."""
        self._requests.refuse(reason)

    def close(self) -> None:
        """Tells all who still wait that nothing will come."""
        self._requests.close()
