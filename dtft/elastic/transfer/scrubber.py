"""Has all that a host holds read again, slowly, for bits that have rotted.

`Rota` decides what is read when, `Scrubber` is the thread that does it, at the lowest
priority. What is wrong is said in the agent's log; what follows for the copy is
`scrub`'s business.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtft.checkpoint.memory import ReplicaStore

logger = logging.getLogger(__name__)

BYTES_PER_S = 8 << 20
"""A gigabyte in two minutes."""
LEAST_BYTES = 256 << 10
"""A chunk counts as so much at least: to wake up costs something, too."""
PASS_S = 60.0
"""One pass over all begins this long after the one before, or later."""
_LOWEST = 19


@dataclass(kw_only=True)
class Rota:
    """What is read next, and not before when: every chunk once in a pass.

    >>> rota = Rota(next_at=100.0)
    >>> rota.pause(97.0), rota.turn(num_chunks=1)
    (3.0, 0)
    >>> rota.read(BYTES_PER_S, now=100.0)
    >>> rota.pause(100.0), rota.turn(num_chunks=1)
    (1.0, None)
    >>> rota.pause(101.0)
    59.0
    """

    next_at: float
    """When the first pass begins, in seconds of any clock."""
    _begun: float | None = None
    """When this pass did."""
    _chunk: int = 0

    def pause(self, now: float) -> float:
        """Seconds until the next turn."""
        return max(0.0, self.next_at - now)

    def turn(self, num_chunks: int) -> int | None:
        """The chunk whose turn it is, of so many; None if the pass is over."""
        if self._begun is None:
            self._begun = self.next_at
        if self._chunk < num_chunks:
            self._chunk += 1
            return self._chunk - 1
        self.next_at = max(self.next_at, self._begun + PASS_S)
        self._begun, self._chunk = None, 0
        return None

    def read(self, nbytes: int, now: float) -> None:
        """So much was read; time that was not used is not made up for."""
        seconds = max(nbytes, LEAST_BYTES) / BYTES_PER_S
        self.next_at = max(self.next_at, now) + seconds


class Scrubber:
    """A thread over all holders of one host, until `close`."""

    def __init__(
        self,
        holders: Callable[[], Sequence[ReplicaStore]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins the first pass in `PASS_S`; `holders` is asked at every turn."""
        self._holders, self._clock = holders, clock
        self._rota = Rota(next_at=clock() + PASS_S)
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        while not self._closed.wait(self._rota.pause(self._clock())):
            self._turn()

    def _turn(self) -> None:
        holders = self._holders()
        number = self._rota.turn(sum(it.scrub.num_chunks for it in holders))
        if number is None:
            return
        for holder in holders:
            if number < holder.scrub.num_chunks:
                self._rota.read(self._look(holder, number), self._clock())
                return
            number -= holder.scrub.num_chunks

    def _look(self, holder: ReplicaStore, number: int) -> int:
        """Bytes read."""
        try:
            look = holder.scrub.look(number)
        except ValueError:
            return 0  # it was closed meanwhile
        for text in look.wrong:
            logger.warning(
                "memory is wrong, %s: given to nobody any more, written anew with the "
                "next step",
                text,
            )
        return look.nbytes

    def close(self) -> None:
        """Ends the thread; it may still be reading one chunk."""
        self._closed.set()
