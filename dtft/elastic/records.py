"""The leader's side of the store: what it has read there and what it writes there.

Every write is fenced by the term of the view it was decided in, and goes through a
thread of its own, so that a store that is away delays commits and nothing else. Says
that the store is away or back; must not know why something is written.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from dtft.checkpoint.commit import Commit
from dtft.elastic.journal import Journal
from dtft.elastic.membership import Membership, View
from dtft.elastic.store import Put, StoreFull, StoreUnavailable

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
        self._tasks: queue.Queue[Task | None] = queue.Queue()
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
                if task is None:
                    return
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
        self._tasks.put(None)


class Records:
    """The newest view, the last commits, and the writes of one leader."""

    def __init__(
        self,
        membership: Membership,
        view: View,
        emit: Callable[..., None],
        journal: Journal,
        store: str,
    ) -> None:
        """Reads the commits; `store` is the store's address, for people.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        self._membership, self.view = membership, view
        self._emit, self._journal, self._store = emit, journal, store
        self.commits = list(membership.commits())
        """Newest first; the newest may still wait for the store."""
        self._writer = Writer(emit)
        self._away = False

    @property
    def last_step(self) -> int:
        """The newest committed step, 0 for none."""
        return max((commit.step for commit in self.commits), default=0)

    def put(self, label: str, value: Any, name: str, text: str) -> None:
        """Queues the write of one key; `label` and `value` name its answer."""
        change = Put(key=self._membership.key(f"m/{name}"), value=text.encode())
        self._write(label, value, change)

    def commit(self, commit: Commit) -> None:
        """Queues the write of a commit."""
        self.commits = [commit, *self.commits][:KEPT_COMMITS]
        self._emit("committing", commit.step)
        change = self._membership.commit_change(tuple(self.commits))
        self._write("commit", commit, change)

    def _write(self, label: str, value: Any, change: Put) -> None:
        view = self.view
        self._writer.write(label, value, lambda: self._fenced(view, change))

    def _fenced(self, view: View, change: Put) -> bool:
        """One write on the writer's thread, and the upkeep that it makes necessary."""
        upkeep = self._membership.upkeep
        try:
            allowed = self._membership.fenced(view, [change])
        except StoreFull:
            upkeep.reclaim()
            raise
        upkeep.wrote(len(change.value))
        return allowed

    def answered(self, label: str) -> None:
        """A write got through: the store is there."""
        if self._away:
            self._away = False
            self._journal.say(f"the store answers again; {label} recorded")

    def delayed(self, label: str) -> None:
        """The store does not answer; the write is tried again and again."""
        if not self._away:
            self._away = True
            self._journal.say(
                f"the store {self._store} does not answer; training goes on, "
                f"the {label} waits (last commit: step {self._journal.last_commit})"
            )

    def close(self) -> None:
        """Ends the writing; what is queued may be lost."""
        self._writer.close()
