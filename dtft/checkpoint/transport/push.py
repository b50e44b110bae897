"""How a push travels, and how fast.

The receiver says which chunks it lacks; only those are sent, over more connections
where there is much to send. A chunk counts once its digest is right. `PushPace` sends
at full speed, or spread over the time until the next snapshot.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from dtft.checkpoint.memory import Receiving
from dtft.checkpoint.state import pack_flags, unpack_flags
from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.connection import Channel

# How fast a step's copies are sent: at full speed, or spread over the time there is.
#
# Sending at full speed is over sooner, but takes processor and network from the steps
# beside it. Whether steps become shorter when pushes are spread is found out by trying,
# now and then anew. Decides from the steps' wall times.


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
        """Pauses after `nbytes` were sent, to keep the rate; `LONGEST_S` at most."""
        with self._lock:
            if self._rate is None:
                return
            now = self._clock()
            self._free_at = max(self._free_at, now) + nbytes / self._rate
            pause = self._free_at - now
        self._sleep(min(pause, LONGEST_S))


class PushPace:
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


# How a push travels: what a peer lacks of a step is asked first, and only that sent.
#
# The sender says the digests of all chunks; the receiver answers which it lacks, and
# those come in frames of some chunks each, over more connections where there is much to
# send. A chunk counts once its digest is right; after a cut the next try begins with
# what is still lacking. At most a frame per connection is under way, straight from and
# into the hosts' arenas.


FRAME_BYTES = 8 << 20
"""Chunks that are sent as one frame, unless one chunk is larger."""
MAX_NUMBERS = 1024
"""Most chunks of one frame."""
STREAMS = 4
"""Connections of one push, if there is enough for each to do."""
STREAM_BYTES = 64 << 20
"""What makes one more connection worth opening."""
ANSWER_S = 10.0
"""A receiver's answer is taken by its peer within this time."""
IDLE_S = 60.0
"""A sender that sends nothing for this long in the middle of a push is given up."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One push to one peer."""

    header: dict[str, Any]
    """What is said first; its "digests" are those of all chunks, slice by slice."""
    sizes: np.ndarray
    """[chunks] int64: bytes of each chunk."""
    chunks: Callable[[Sequence[int]], list[memoryview]]
    """The bytes of some chunks, by number."""


@dataclass(frozen=True, kw_only=True)
class PushedBytes:
    """How one try to push ended."""

    done: bool
    """The peer has all of it, or wants none of it ever."""
    nbytes: int
    """Bytes of the chunks that it lacked."""


def send_push(
    channel: Channel,
    outgoing: Outgoing,
    connect: Callable[[float], Channel],
    deadline: float,
) -> PushedBytes:
    """Brings one push to a peer, or what it lacks of it.

    Args:
        channel: to the peer; on an error its next use would be misunderstood.
        outgoing: what to send.
        connect: opens one more channel to the same peer, by a deadline.
        deadline: of all of it, on the monotonic clock.

    Raises:
        ChannelClosed: the connection has ended.
        TimeoutError: the deadline has passed.
        KeyError: `outgoing.chunks` does not have them any more.
    """
    answer = _announce(channel, outgoing, deadline)
    if "done" in answer:
        return PushedBytes(done=answer["done"] is True, nbytes=0)
    lacks = np.flatnonzero(_lacking(answer, len(outgoing.sizes)))
    frames = deque(frames_of(lacks, outgoing.sizes))
    nbytes = int(outgoing.sizes[lacks].sum())
    helpers = [
        threading.Thread(
            target=_help, args=(connect, outgoing, frames, deadline), daemon=True
        )
        for _ in range(min(STREAMS, nbytes // STREAM_BYTES) - 1)
    ]
    for thread in helpers:
        thread.start()
    try:
        _send_frames(channel, outgoing, frames, deadline)
    finally:
        frames.clear()  # after an error the others have nothing more to do
        for thread in helpers:
            thread.join()  # each ends by the deadline
    return PushedBytes(done=_end(channel, deadline), nbytes=nbytes)


def _announce(channel: Channel, outgoing: Outgoing, deadline: float) -> dict[str, Any]:
    channel.send(outgoing.header, timeout_s=deadline - time.monotonic())
    return channel.receive(deadline - time.monotonic())[0]


def _lacking(answer: dict[str, Any], count: int) -> np.ndarray:
    try:
        return unpack_flags(answer["lacks"], count)
    except (KeyError, TypeError, ValueError) as error:
        raise protocol.WireError(
            f"a peer answered a push with {sorted(answer)}"
        ) from error


def _send_frames(
    channel: Channel, outgoing: Outgoing, frames: deque[list[int]], deadline: float
) -> None:
    while frames:
        try:
            numbers = frames.popleft()
        except IndexError:
            return  # another connection took the last one
        memory = outgoing.chunks(numbers)
        left = deadline - time.monotonic()
        channel.send({"chunks": numbers}, memory, timeout_s=left)


def _end(channel: Channel, deadline: float) -> bool:
    channel.send({"end": True}, timeout_s=deadline - time.monotonic())
    return channel.receive(deadline - time.monotonic())[0].get("done") is True


def _help(
    connect: Callable[[float], Channel],
    outgoing: Outgoing,
    frames: deque[list[int]],
    deadline: float,
) -> None:
    """One more connection; what it does not bring, the next try does."""
    with contextlib.suppress(OSError, TimeoutError, KeyError):
        with connect(deadline) as channel:
            if "done" not in _announce(channel, outgoing, deadline):
                _send_frames(channel, outgoing, frames, deadline)
                _end(channel, deadline)


def frames_of(numbers: np.ndarray, sizes: np.ndarray) -> list[list[int]]:
    """Chunks in groups of at most `FRAME_BYTES` and `MAX_NUMBERS`, one at least.

    >>> frames_of(np.array([0, 2, 3]), np.array([1, 1, 6 << 20, 6 << 20]))
    [[0, 2], [3]]
    """
    frames: list[list[int]] = []
    room = 0
    for number in numbers.tolist():
        size = int(sizes[number])
        if not frames or size > room or len(frames[-1]) == MAX_NUMBERS:
            frames.append([])
            room = FRAME_BYTES
        frames[-1].append(number)
        room -= size
    return frames


def receive_chunks(channel: Channel, receiving: Receiving) -> None:
    """Says what is lacking and receives until the sender says that this was all.

    Raises:
        ChannelClosed: the connection has ended.
        TimeoutError: the sender has stopped.
        WireError: the sender sent what is not part of this push.
    """
    lacks = pack_flags(receiving.lacks())
    channel.send({"lacks": lacks}, timeout_s=ANSWER_S)
    claimed: list[int] = []

    def sink(header: dict[str, Any], size: int) -> list[memoryview] | None:
        numbers = _announced(header, size, receiving)
        memory = receiving.claim(numbers)
        claimed[:] = numbers if memory is not None else []
        return memory

    while True:
        try:
            header, _ = channel.receive(
                IDLE_S, sink, max_header=protocol.MAX_DATA_HEADER
            )
        except BaseException:
            receiving.failed(claimed)
            raise
        receiving.arrived(claimed)
        claimed.clear()
        if header.get("end") is True:
            return


def _announced(header: dict[str, Any], size: int, receiving: Receiving) -> list[int]:
    """The numbers of the chunks in a frame.

    Raises:
        WireError: they are not chunks of this push, or not as large.
    """
    numbers, sizes = header.get("chunks", []), receiving.pool.chunks.sizes
    if (
        not isinstance(numbers, list)
        or len(numbers) > MAX_NUMBERS
        or any(type(one) is not int or not 0 <= one < len(sizes) for one in numbers)
        or len(set(numbers)) != len(numbers)
        or int(sizes[numbers].sum() if numbers else 0) != size
    ):
        raise protocol.WireError("a frame of a push does not have chunks of that push")
    return numbers
