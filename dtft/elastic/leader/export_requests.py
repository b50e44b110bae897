"""The leader's part in exports: requests for them, and their outcomes.

`ExportRequests` keeps the requesters of an export and how to answer each of them.
`StorageExports` handles the outcome of each export: it updates the list of the steps in
storage and the record of failed exports, prints failures, writes the number of the
stored step to the store (etcd), and answers the requesters.
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
    """The requests for an export that have no answer yet. For the event loop's thread.

    Each request is kept with the earliest step whose export answers the request.
    """

    def __init__(self) -> None:
        """Starts with no request."""
        self._waiting: list[tuple[int, Answer]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, committed: int, answer: Answer) -> None:
        """Adds a request; an export of step `committed` or a later step answers it.

        `answer` sends the reply to the requester.
        """
        self._waiting.append((committed, answer))

    def outcome(self, step: int, ok: bool, error: str) -> None:
        """Answers the requests that wait for `step` or an earlier step to be exported.

        Args:
            step: the step whose export has ended.
            ok: whether the step was written; the reply then has the step.
            error: why it was not written; the reply has this text if not `ok`.
        """
        reply = {"step": step} if ok else {"error": error}
        for committed, answer in self._waiting:
            if step >= committed:
                answer(reply)
        self._waiting = [one for one in self._waiting if one[0] > step]

    def refuse(self, reason: str, *, moved: bool = False) -> None:
        """Answers all waiting requests with an error: no step is exported for them.

        Args:
            reason: the reason, for people.
            moved: whether another host leads by now, so the requester should ask that
                host.
        """
        for _, answer in self._waiting:
            answer({"error": reason, "moved": moved})
        self._waiting.clear()

    def close(self) -> None:
        """Replies to all waiting requesters that they must ask the new leader."""
        self.refuse("this host does not lead any more; ask again", moved=True)


def serve_export(
    channel: Channel, config: AgentConfig, ask: Callable[[Answer], None]
) -> None:
    """Serves one export request: replies on `channel` when the export is over.

    The reply is an error if the request is refused, if the export fails, or if it is
    not over in time. The limit is the config's limit of an export plus `timeouts.stage`
    (its limit for one step of a snapshot interval): 420 s by default.

    Args:
        channel: the connection of the requester.
        config: settings of this host's agent.
        ask: passes the request to the leader; its argument is the function that the
            leader calls with the reply.
    """
    _asked(channel)
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    ask(answers.put)
    limit_s = config.timeouts.export + config.timeouts.stage
    try:
        reply = answers.get(timeout=limit_s)
    except queue.Empty:
        reply = {"error": f"no step was written within {limit_s:.0f} s"}
    channel.send(reply, timeout_s=10.0)
    _asked(channel)  # the caller confirms that it has the reply


def _asked(channel: Channel) -> None:
    channel.receive(10.0, no_payload, max_header=MAX_REQUEST_HEADER)


class StorageExports:
    """The steps in one job's storage, and the requests for exports and their outcomes.

    Used by the event loop.

    Attributes:
        watch: lists the steps in storage.
        health: decides when an export may be tried again.
    """

    def __init__(
        self,
        config: AgentConfig,
        records: Records,
        journal: Journal,
        loop: Loop,
        list_steps: Callable[[Path], Iterable[int]],
    ) -> None:
        """Starts with no failed export and no request.

        `list_steps` lists the steps that a storage directory holds.
        """
        self._records, self._journal, self._loop = records, journal, loop
        directory = config.storage_directory
        self.watch = StorageWatch(directory, loop, list_steps=list_steps)
        self.health = StorageHealth(config.storage_directory)
        self._requests = ExportRequests()

    def asked(self, rendezvous: Rendezvous, answer: Answer) -> bool:
        """Handles a request to export the next commit; returns whether it is accepted.

        Refuses the request unless the job trains. `answer` sends the reply to the
        requester: at once for a refused request, else once the export has ended.
        """
        coordinator = rendezvous.coordinator
        if coordinator is None or rendezvous.phase != "running" or rendezvous.frozen:
            text = f"the job does not train now ({rendezvous.phase}); ask again later"
            answer({"error": text})
            return False
        self._requests.add(coordinator.committed, answer)
        return True

    def committed(self, coordinator: CommitCoordinator, step: int) -> None:
        """Handles a commit: orders the export of `step` if a requester waits for one.

        Also prints a message if an earlier export is so slow that another is due.
        """
        if self._requests:
            coordinator.export(step)
        if (due := coordinator.overdue) is not None:
            self._say(self.health.overdue(due, self._loop.now()))

    def ended(self, host: str, step: int, ok: bool, error: str) -> None:
        """Handles the end of an export: logs it and answers the waiting requesters.

        Args:
            host: the host whose answer ended the export: the one that failed, or the
                last one that succeeded. For an export past its deadline, the names of
                the hosts that have not answered, separated by commas.
            step: the exported step.
            ok: whether the whole step was written.
            error: the error; "" without one.
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
        """Adds a request; an export of step `committed` or a later step answers it.

        Orders no export. `answer` sends the reply to the requester.
        """
        self._requests.add(committed, answer)

    def has(self, step: int) -> None:
        """Answers the requests for `step` and earlier steps: storage has the step."""
        self._requests.outcome(step, True, "")

    def refuse(self, reason: str) -> None:
        """Answers all waiting requests with an error: no step is exported for them.

        `reason` is the text of the error.
        """
        self._requests.refuse(reason)

    def close(self) -> None:
        """Replies to all waiting requesters that they must ask the new leader."""
        self._requests.close()
