"""The leader's writes to the store, and the view and commits that the leader knows.

A view is the job's records in the store at one moment. The store applies a write only
while the leader key and the era (which changes when the store has lost data) are
unchanged. Writes run in order on one thread, which is not that of the event loop. Each
write is retried until the store answers. Training continues meanwhile: a delayed commit
is reported, and the trainers go on without it. Only a new formation (an assignment of
hosts to slots) waits until its assignment is recorded.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dtft.checkpoint.replication import Commit
from dtft.elastic.event_loop import Loop
from dtft.elastic.leader.events import Journal
from dtft.elastic.store import Membership, Put, StoreFull, StoreUnavailable, View

RETRY_S = 0.1
PATIENCE_S = 0.5
"""Seconds after which an unrecorded commit counts as delayed: trainers go on without
waiting longer for the store."""
ASSIGNMENT_PATIENCE_S = 2.0
"""Seconds after which an unrecorded assignment is reported to people."""
KEPT_COMMITS = 2
_WAITS = {
    "commit": "training goes on, the commit waits",
    "stored": "training goes on, the number of the stored step waits",
    "budget": "training goes on, the counts of failures wait",
    "size": "the number of replicas waits to be recorded",
    "assignment": "training stands still, as a new assignment of slots waits",
    "result": "the job has ended, its result waits",
}
"""Maps the label of a write to the part of a message that says what is delayed while
the store does not answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Write:
    label: str
    value: Any
    number: int
    """Sequence number; later writes have higher numbers."""
    change: Callable[[], Put]
    """Makes the key and value to write; called for each attempt."""


class Records:
    """One leader's knowledge of the store, and its queue of writes to the store.

    The knowledge is the view (the job's records in the store at one moment) and the
    last commits. A write replaces an older write with the same label (kind) that has
    not begun; no other write is dropped. Used by the event loop.
    """

    def __init__(
        self,
        membership: Membership,
        view: View,
        commits: Sequence[Commit],
        loop: Loop,
        journal: Journal,
        store: str,
        *,
        on_written: Callable[[str, Any], None],
        on_delayed: Callable[[str, Any], None],
        on_committing: Callable[[int], None],
    ) -> None:
        """Starts with no queued write.

        Args:
            membership: writes to the store while this host holds the leader key.
            view: the job's records in the store when this host began to lead.
            commits: the commits that the store had at that time, newest first.
            loop: the agent's event loop.
            journal: tells people that the store does not answer.
            store: the store's address, for messages.
            on_written: called with label (kind) and value of each recorded write.
            on_delayed: called once for each commit or assignment that the store has not
                recorded in time, with the write's label and value.
            on_committing: called with the step of each commit that is queued.
        """
        self._membership, self.view = membership, view
        self._loop, self._journal, self._store = loop, journal, store
        self._on_written, self._on_delayed = on_written, on_delayed
        self._on_committing = on_committing
        self.commits = list(commits)
        """The known commits, newest first; the newest may still wait for the store."""
        self._recorded = list(commits[:1])
        """The newest commit that the store has or that hosts have reported, and whose
        copies hosts keep; empty without one. It is written again beside the next
        commit."""
        self._lane = loop.lane("records")
        self._waiting: list[_Write] = []
        self._numbers = itertools.count(1)
        self._told = 0
        """Sequence number of the last write that was reported as a delayed commit."""
        self._busy = self._closed = self._away = self._fenced_off = False

    @property
    def last_step(self) -> int:
        """The newest step of the known commits; 0 without a commit."""
        return max((commit.step for commit in self.commits), default=0)

    def learn(self, commits: Sequence[Commit]) -> None:
        """Adds commits that hosts have reported, if newer than the known commits.

        A host can know a commit that the store has lost, or that the store has not
        recorded because it did not answer the leader. Every slice of such a commit had
        all its copies.

        A commit is added if its step is higher than that of the newest known commit,
        and its assignment of hosts to slots is not older. An older assignment means
        that training was restored from an earlier step since then. Without a known
        commit, all are added.

        Args:
            commits: the reported commits.
        """
        newest = self.commits[0] if self.commits else None
        found = [
            commit
            for commit in commits
            if newest is None
            or (commit.step > newest.step and _epoch(commit) >= _epoch(newest))
        ]
        if found:
            both = sorted([*self.commits, *found], key=lambda it: it.step, reverse=True)
            self.commits = both[:KEPT_COMMITS]
            self._recorded = self.commits[:1]

    @property
    def away(self) -> bool:
        """Whether the store does not answer.

        True after the store failed to answer a write, or was late to record a commit,
        until it answers a write.
        """
        return self._away

    def put(self, label: str, value: Any, name: str, text: str) -> None:
        """Queues the write of `text` to the job's key `name` in the store.

        The write replaces a queued write with the same label. If an assignment is not
        recorded within 2 s (`ASSIGNMENT_PATIENCE_S`), the delay is reported to the
        leader; training waits on.

        Args:
            label: the kind of the write, such as "stored"; passed to the callbacks.
            value: passed to the callbacks, such as the object that `text` encodes.
            name: the name of the key within the job.
            text: the text to write.
        """
        change = Put(key=self._membership.key(f"m/{name}"), value=text.encode())
        write = self._new(label, value, lambda: change)
        self._write(write)
        if label == "assignment":
            self._loop.call_later(ASSIGNMENT_PATIENCE_S, self._still_waits, write)

    def commit(self, commit: Commit) -> None:
        """Queues the write of a commit.

        The delay is reported to the leader, which lets training go on, as soon as an
        attempt to write fails, or after 0.5 s without an answer of the store
        (`PATIENCE_S`). It is reported at once if the store is known not to answer.
        """
        self.commits = [commit, *self._recorded][:KEPT_COMMITS]
        self._on_committing(commit.step)

        def change() -> Put:
            # An earlier commit may have been recorded while this one waited.
            both = (commit, *self._recorded)[:KEPT_COMMITS]
            return self._membership.commit_change(both)

        write = self._new("commit", commit, change)
        self._write(write)
        if self._away:
            self._late(write)
        else:
            self._loop.call_later(PATIENCE_S, self._late, write)

    def _new(self, label: str, value: Any, change: Callable[[], Put]) -> _Write:
        number = next(self._numbers)
        return _Write(label=label, value=value, number=number, change=change)

    def _late(self, write: _Write) -> None:
        """Reports a delayed commit to the leader, once, unless the store has it."""
        if write not in self._waiting or write.number <= self._told or self._closed:
            return
        self._told = write.number
        self._say_away(write.label)
        self._on_delayed(write.label, write.value)

    def _still_waits(self, write: _Write) -> None:
        if write in self._waiting and not self._closed:
            self._on_delayed(write.label, write.value)

    def _write(self, write: _Write) -> None:
        busy = self._waiting[:1] if self._busy else []
        replaceable = [it for it in self._waiting if it not in busy]
        kept = [it for it in replaceable if it.label != write.label]
        self._waiting = [*busy, *kept, write]
        self._next()

    def _next(self) -> None:
        if self._busy or self._closed or self._fenced_off or not self._waiting:
            return
        self._busy, write, view = True, self._waiting[0], self.view
        change = write.change()

        def work() -> bool:
            return self._perform(view, change)

        self._lane.submit(work, lambda outcome: self._done(write, view, outcome))

    def _perform(self, view: View, change: Put) -> bool:
        """Performs one write on the thread for writes; the event loop does not wait.

        Also compacts a private store (drops old versions of keys) if enough was
        written, or if the store is full.

        Args:
            view: the view (the job's records) whose leader key and era the store must
                still have; otherwise the store refuses the write.
            change: the key and the value to write.

        Returns:
            False if the store refused the write, because the leader key or the era
            (which changes when the store has lost data) has changed.

        Raises:
            StoreUnavailable: the store does not answer, or it is full.
        """
        compaction = self._membership.compaction
        try:
            allowed = self._membership.fenced(view, [change])
        except StoreFull:
            compaction.reclaim()
            raise
        compaction.wrote(len(change.value))
        return allowed

    def _done(self, write: _Write, view: View, outcome: "Future[bool]") -> None:
        if self._closed:
            return
        self._busy = False
        error = outcome.exception()
        if error is not None:
            if not isinstance(error, StoreUnavailable):
                raise error
            self._say_away(write.label)
            if write.label == "commit":
                self._late(write)
            self._loop.call_later(RETRY_S, self._next)
            return
        if self._away:
            self._away = False
            self._journal.say(f"the store answers again ({self._store})")
        if not outcome.result():
            self._fenced_off = view.term == self.view.term
            self._next()
            return
        self._waiting.remove(write)
        if write.label == "commit" and write.number >= self._told:
            # The release of a delayed commit freed the copies of older commits.
            self._recorded = [write.value]
            if write.value is not self.commits[0]:
                self.commits = [self.commits[0], write.value]
        self._on_written(write.label, write.value)
        self._next()

    def _say_away(self, label: str) -> None:
        if self._away:
            return
        self._away = True
        self._journal.say(
            f"the store {self._store} does not answer; {_WAITS[label]} "
            f"(last commit: step {self._journal.last_commit})"
        )

    def see(self, view: View) -> None:
        """Takes a newer view of the store (the job's records in it at one moment).

        If this host has got the leader key anew, retries writes that the store has
        refused.
        """
        renewed, self.view = view.term != self.view.term, view
        if renewed:
            self._fenced_off = False
            self._next()

    def close(self) -> None:
        """Stops writing; queued writes may be lost."""
        self._closed = True
        self._lane.close()


def _epoch(commit: Commit) -> tuple[int, int]:
    return commit.generation, commit.attempt
