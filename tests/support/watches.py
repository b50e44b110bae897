"""Watches of a store, each in a thread of its own."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dtft.elastic.store.api import Compare, Events, StoreEvent
from dtft.elastic.store.etcd import EtcdStore
from dtft.elastic.store.memory import MemoryStore

AnyStore = MemoryStore | EtcdStore


class Watcher:
    """Runs a watch in a thread and hands out what it yields."""

    def __init__(
        self,
        store: AnyStore,
        prefix: str,
        revision: int,
        known: Callable[[], Sequence[Compare]] = tuple,
    ) -> None:
        self._batches: queue.Queue[Events] = queue.Queue()
        self.stop = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(store, prefix, revision, known), daemon=True
        )
        self.thread.start()

    def _run(self, store: AnyStore, *watched: Any) -> None:
        prefix, revision, known = watched
        for batch in store.watch(prefix, revision, self.stop, known):
            self._batches.put(batch)

    def batch(self) -> Events:
        """The next batch; fails when none comes."""
        return self._batches.get(timeout=20)

    def events(self, count: int) -> list[StoreEvent]:
        """The next events, at least `count` of them."""
        found: list[StoreEvent] = []
        while len(found) < count:
            found += self.batch()
        return found

    def silent(self) -> bool:
        """Whether nothing came that has not been handed out."""
        return self._batches.empty()

    def end(self) -> None:
        """Ends the watch, also when nothing happens that would wake it."""
        self.stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()
