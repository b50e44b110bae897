"""How fast a step's copies are sent: at full speed, or spread over the time there is.

Sending at full speed is over sooner, but takes processor and network from the steps
beside it. Whether steps become shorter when pushes are spread is found out by trying,
now and then anew. Decides from the steps' wall times; must not know what is sent where.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

logger = logging.getLogger(__name__)

SETTLE = 8
"""Pushes at the beginning that are not counted: the first steps are slow."""
TRIED = 16
"""Pushes of each kind that are compared."""
AGAIN = 1024
"""After so many pushes both are tried anew."""
GAIN = 0.98
"""Pushes are spread if that makes steps at most this much as long."""
SPREAD = 0.5
"""Part of the time until the next snapshot over which a push is spread: the rest is for
checking, committing, and being late."""
MOST_STEPS = 2
"""As if the next snapshot came after so many steps at most: until a push has ended, a
loss costs the steps of the snapshot before."""
LIMIT_PART = 0.25
"""A push is never spread over more than this part of its deadline."""
SMALL_BYTES = 1 << 20
"""Less than this is sent in one piece in any case."""
LONGEST_S = 0.25
"""One pause is no longer than this."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Wall times of steps beside pushes of both kinds. A value.

    >>> trial = Trial()
    >>> for number in range(SETTLE + 2 * TRIED):
    ...     trial = trial.observed(1.0 if trial.spread else 1.25)
    >>> trial.spread
    True
    """

    count: int = -SETTLE
    """Pushes counted, from the beginning of the present trial."""
    full_s: tuple[float, ...] = ()
    """Seconds per step while pushes went at full speed."""
    spread_s: tuple[float, ...] = ()
    """Seconds per step while they were spread."""

    @property
    def spread(self) -> bool:
        """Whether the next push is spread."""
        if self.count < TRIED:
            return False
        if self.count < 2 * TRIED:
            return True
        return median(self.spread_s) <= GAIN * median(self.full_s)

    def text(self, rate: float) -> str:
        """What both kinds came to, for the log."""
        how = f"spread, {rate / 1e6:.1f} MB/s" if self.spread else "at full speed"
        return (
            f"pushes go on {how}: a step takes {median(self.full_s) * 1e3:.1f} ms at "
            f"full speed, {median(self.spread_s) * 1e3:.1f} ms when they are spread"
        )

    def observed(self, step_s: float) -> "Trial":
        """After one more push, beside which steps took `step_s`."""
        count = self.count + 1
        if count >= AGAIN:
            return Trial(count=0)
        if 0 < count <= TRIED:
            return replace(self, count=count, full_s=(*self.full_s, step_s))
        if TRIED < count <= 2 * TRIED:
            return replace(self, count=count, spread_s=(*self.spread_s, step_s))
        return replace(self, count=count)


def spread_rate(nbytes: int, step_s: float, interval: int, limit_s: float) -> float:
    """Bytes per second at which a push ends well before the next snapshot.

    Args:
        nbytes: of the push.
        step_s: wall time of a step, in seconds.
        interval: steps until the next snapshot.
        limit_s: deadline of a push, in seconds.

    >>> spread_rate(100, step_s=2.0, interval=1, limit_s=30.0)
    100.0
    >>> spread_rate(100, step_s=2.0, interval=64, limit_s=30.0)
    50.0
    """
    spread_s = SPREAD * step_s * min(interval, MOST_STEPS)
    return nbytes / min(spread_s, LIMIT_PART * limit_s)


class Bucket:
    """Holds senders to a rate that they share; thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Holds up nobody yet."""
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._rate: float | None = None
        self._free_at = 0.0

    def limit(self, rate: float | None) -> None:
        """From now on at most `rate` bytes per second; None: no limit."""
        with self._lock:
            self._rate, self._free_at = rate, self._clock()

    def sent(self, nbytes: int) -> None:
        """Some bytes were sent: pauses until more may be."""
        with self._lock:
            if self._rate is None:
                return
            now = self._clock()
            self._free_at = max(self._free_at, now) + nbytes / self._rate
            pause = self._free_at - now
        self._sleep(min(pause, LONGEST_S))


class Pace:
    """The pace of one host's pushes, from what its trainer measures."""

    def __init__(self, nbytes: int, limit_s: float) -> None:
        """Of pushes of `nbytes` in all, each with a deadline of `limit_s`."""
        self._nbytes, self._limit_s, self._trial = nbytes, limit_s, Trial()
        self.bucket = Bucket()

    def staged(self, step_s: float, interval: int) -> None:
        """A snapshot is about to be pushed.

        Args:
            step_s: wall time per step since the last one, in seconds.
            interval: steps until the next one.
        """
        if self._nbytes < SMALL_BYTES:
            return
        self._trial = self._trial.observed(step_s)
        rate = spread_rate(self._nbytes, step_s, interval, self._limit_s)
        self.bucket.limit(rate if self._trial.spread else None)
        if self._trial.count == 2 * TRIED:
            logger.info("%s", self._trial.text(rate))
