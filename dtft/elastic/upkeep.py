"""Keeps a store small whose keys are written at every commit.

A store keeps what every key was, until it is told to forget; a quota then fills within
minutes of short steps, and etcd's own compaction looks every five. So whoever commits
has the history forgotten as it grows. A shared etcd forgets that of its other users
too, never their keys. Must not know what is written.
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


class Upkeep:
    """The history that one writer leaves behind. Used by one thread."""

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Forgets nothing yet."""
        self._store, self._clock = store, clock
        self._bytes = self._writes = self._mark = 0
        self._reclaimed = -RECLAIM_PAUSE_S

    def wrote(self, num_bytes: int) -> None:
        """Counts one write, and forgets old history when it is time.

        Between one and two periods of it are kept, so that a watch that was cut for a
        moment can go on where it was.
        """
        self._bytes, self._writes = self._bytes + num_bytes, self._writes + 1
        if self._bytes < PERIOD_BYTES and self._writes < PERIOD_WRITES:
            return
        self._bytes = self._writes = 0
        try:
            _, now = self._store.list("/dtft/none/")
            if self._mark:
                self._store.compact(self._mark)
            self._mark = now
        except (StoreUnavailable, ValueError) as error:  # somebody else may have
            logger.info("history was not compacted: %s", error)

    def reclaim(self) -> None:
        """Makes room in a store that takes no writes because its quota is used up."""
        if self._clock() < self._reclaimed + RECLAIM_PAUSE_S:
            return
        self._reclaimed = self._clock()
        logger.warning("the store is full: forgetting its history to make room")
        try:
            self._store.reclaim()
        except StoreUnavailable as error:
            logger.warning("the store could not be made smaller: %s", error)
