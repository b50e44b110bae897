"""Keeps a store small whose keys are written at every commit.

A store keeps what every key was, until it is told to forget; a quota then fills within
minutes of short steps, and etcd's own compaction looks every five. So whoever commits
compacts the history as it grows. etcd compacts all keys at once, so this is done only
to a store that dtft has for itself (`Store.private`); the operator of a shared etcd
compacts it, as with --auto-compaction-mode=periodic --auto-compaction-retention=5m.
"""

import logging
import time
from collections.abc import Callable

from dtft.elastic.store import Store, StoreUnavailable

logger = logging.getLogger(__name__)

PERIOD_BYTES = 512 << 10
PERIOD_WRITES = 500
"""After so much, whichever is first, what was before the last time is forgotten."""
RECLAIM_PAUSE_S = 5.0
FULL_PAUSE_S = 60.0
"""That a shared store is full is said this often."""


class Upkeep:
    """The history that one writer leaves behind. Used by one thread."""

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Forgets nothing yet."""
        self._store, self._clock = store, clock
        self._bytes = self._writes = self._mark = 0
        self._pause_s = RECLAIM_PAUSE_S if store.private else FULL_PAUSE_S
        self._reclaimed = -self._pause_s

    def wrote(self, num_bytes: int) -> None:
        """Counts one write, and forgets old history when it is time.

        Between one and two periods of it are kept, so that a watch that was cut for a
        moment can go on where it was. A shared store is left as it is.
        """
        if not self._store.private:
            return
        self._bytes, self._writes = self._bytes + num_bytes, self._writes + 1
        if self._bytes < PERIOD_BYTES and self._writes < PERIOD_WRITES:
            return
        self._bytes = self._writes = 0
        try:
            _, now = self._store.list("none/")
            if self._mark:
                self._store.compact(self._mark)
            self._mark = now
        except (StoreUnavailable, ValueError) as error:  # somebody else may have
            logger.info("history was not compacted: %s", error)

    def reclaim(self) -> None:
        """Makes room in a store that takes no writes because its quota is used up.

        Of a shared store it is only said that it is full.
        """
        if self._clock() < self._reclaimed + self._pause_s:
            return
        self._reclaimed = self._clock()
        if not self._store.private:
            logger.warning(
                "the store is full and has other users, so commits wait for its "
                "operator: compact and defragment it, raise --quota-backend-bytes, and "
                "run `etcdctl alarm disarm`"
            )
            return
        logger.warning("the store is full: forgetting its history to make room")
        try:
            self._store.reclaim()
        except StoreUnavailable as error:
            logger.warning("the store could not be made smaller: %s", error)
