"""Pushes a step's slices to the peer that keeps a copy of them, at a chosen pace.

A slice consists of chunks, which have a digest each. `send_push` announces the digests
of all chunks; the receiver answers which chunks it lacks, and only those are sent.
Large pushes use several connections. `PushPace` decides whether a push is sent at full
speed or spread over the time until the next snapshot.
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

logger = logging.getLogger(__name__)

SETTLE = 8
"""Number of snapshots at the start whose step times are ignored, because the first
steps are slow."""
TRIED = 16
"""Number of snapshots that a `Trial` measures at each pace: full speed, and spread."""
AGAIN = 1024
"""Snapshots after which a new `Trial` begins."""
GAIN = 0.98
"""Pushes are spread if the step time with spread pushes is at most this fraction of the
step time with pushes at full speed."""
SPREAD = 0.5
"""Fraction of the time until the next snapshot over which a push is spread; the other
half is for verification, the commit, and delays."""
MOST_STEPS = 2
"""`spread_rate` counts at most this many steps until the next snapshot, so that a push
does not take long. If a host is lost during a push, the steps since the previous
snapshot are lost."""
LIMIT_PART = 0.25
"""Largest fraction of a push's deadline over which the push is spread."""
SMALL_BYTES = 1 << 20
"""`PushPace` chooses a pace if all pushes of one snapshot together have at least this
many bytes; fewer bytes are always pushed at full speed."""
LONGEST_S = 0.25
"""Longest single pause of `Bucket.sent`, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Compares step times with pushes at full speed and with spread pushes. Immutable.

    A push at full speed ends sooner, but takes processor time and network bandwidth
    from the steps that run meanwhile. The first `SETTLE` (8) snapshots of a run are not
    measured. Then the trial measures step times while the pushes of `TRIED` (16)
    snapshots run at full speed, then while the pushes of `TRIED` more snapshots are
    spread over time. From then on, pushes are spread if the median step time with
    spread pushes is at most `GAIN` (0.98) times the median at full speed. After `AGAIN`
    (1024) snapshots a new trial begins.

    In the example, a step takes 1 s with spread pushes and 1.25 s with pushes at full
    speed.

    >>> trial = Trial()
    >>> for number in range(SETTLE + 2 * TRIED):
    ...     trial = trial.observed(1.0 if trial.spread else 1.25)
    >>> trial.spread
    True
    """

    count: int = -SETTLE
    """Snapshots since the beginning of the trial; negative while the first `SETTLE`
    snapshots are ignored."""
    full_s: tuple[float, ...] = ()
    """Seconds per step, one value for each snapshot pushed at full speed."""
    spread_s: tuple[float, ...] = ()
    """Seconds per step, one value for each snapshot with spread pushes."""

    @property
    def spread(self) -> bool:
        """Whether the pushes of the next snapshot are spread over time."""
        if self.count < TRIED:
            return False
        if self.count < 2 * TRIED:
            return True
        return median(self.spread_s) <= GAIN * median(self.full_s)

    def text(self, rate: float) -> str:
        """Describes the result of the trial for the log.

        Pushes at full speed and spread pushes must have been measured. `rate` is the
        total rate of spread pushes, in bytes per second.
        """
        how = f"at {rate / 1e6:.1f} MB/s in total" if self.spread else "at full speed"
        return (
            f"the next pushes are sent {how}: a step takes "
            f"{median(self.full_s) * 1e3:.1f} ms with pushes at full speed, "
            f"{median(self.spread_s) * 1e3:.1f} ms with pushes spread over time"
        )

    def observed(self, step_s: float) -> "Trial":
        """Returns the trial with the step time of one more snapshot.

        After `AGAIN` (1024) snapshots returns a new trial. `step_s` is the wall time
        per step during the snapshot's pushes, in seconds.
        """
        count = self.count + 1
        if count >= AGAIN:
            return Trial(count=0)
        if 0 < count <= TRIED:
            return replace(self, count=count, full_s=(*self.full_s, step_s))
        if TRIED < count <= 2 * TRIED:
            return replace(self, count=count, spread_s=(*self.spread_s, step_s))
        return replace(self, count=count)


def spread_rate(nbytes: int, step_s: float, interval: int, limit_s: float) -> float:
    """Computes the rate, in bytes per second, of a push that is spread over time.

    The push then takes half (`SPREAD`) of the time until the next snapshot, of which at
    most two steps count (`MOST_STEPS`). It takes at most a quarter (`LIMIT_PART`) of
    `limit_s`.

    Args:
        nbytes: size of the push in bytes.
        step_s: wall time of a step, in seconds.
        interval: steps until the next snapshot.
        limit_s: deadline of a push, in seconds.

    The 100 bytes take half of one step of 2 s in the first example, and half of two
    steps in the second example.

    >>> spread_rate(100, step_s=2.0, interval=1, limit_s=30.0)
    100.0
    >>> spread_rate(100, step_s=2.0, interval=64, limit_s=30.0)
    50.0
    """
    spread_s = SPREAD * step_s * min(interval, MOST_STEPS)
    return nbytes / min(spread_s, LIMIT_PART * limit_s)


class Bucket:
    """Limits the rate, in bytes per second, at which several threads send in total.

    Each thread calls `sent` after it has sent bytes, and `sent` pauses the thread.
    Thread-safe.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Starts without a limit.

        Args:
            clock: returns seconds on a monotonic clock.
            sleep: pauses the calling thread for some seconds.
        """
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._rate: float | None = None
        self._free_at = 0.0

    def limit(self, rate: float | None) -> None:
        """Sets the rate in bytes per second; None removes the limit."""
        with self._lock:
            self._rate, self._free_at = rate, self._clock()

    def sent(self, nbytes: int) -> None:
        """Pauses after `nbytes` were sent, so that the rate is kept.

        Does not pause if no limit is set. A pause is at most `LONGEST_S` (0.25 s), so
        single large sends can exceed the rate.
        """
        with self._lock:
            if self._rate is None:
                return
            now = self._clock()
            self._free_at = max(self._free_at, now) + nbytes / self._rate
            pause = self._free_at - now
        self._sleep(min(pause, LONGEST_S))


class PushPace:
    """Chooses whether pushes run at full speed or are spread over time.

    A `Trial` measures with which pushes the training steps are faster. `bucket` limits
    the rate of the pushes.
    """

    def __init__(self, nbytes: int, limit_s: float) -> None:
        """Starts at full speed; nothing is measured yet.

        Args:
            nbytes: bytes of all pushes of one snapshot.
            limit_s: deadline of a push, in seconds.
        """
        self._nbytes, self._limit_s, self._trial = nbytes, limit_s, Trial()
        self.bucket = Bucket()

    def staged(self, step_s: float, interval: int) -> None:
        """Records the last step time; sets the rate of the next pushes.

        Called when a new snapshot is in host memory. Does nothing if a snapshot's
        pushes have less than `SMALL_BYTES` (1 MiB) in all.

        Args:
            step_s: wall time per step since the last snapshot, in seconds.
            interval: steps until the next snapshot.
        """
        if self._nbytes < SMALL_BYTES:
            return
        self._trial = self._trial.observed(step_s)
        rate = spread_rate(self._nbytes, step_s, interval, self._limit_s)
        self.bucket.limit(rate if self._trial.spread else None)
        if self._trial.count == 2 * TRIED:
            logger.info("%s", self._trial.text(rate))


FRAME_BYTES = 8 << 20
"""Most bytes of chunks in one frame, unless one chunk is larger."""
MAX_NUMBERS = 1024
"""Most chunks of one frame."""
STREAMS = 4
"""Most connections of one push."""
STREAM_BYTES = 64 << 20
"""Least bytes per connection of a push that uses several connections."""
ANSWER_S = 10.0
"""Limit in seconds for the receiver to send the message that names lacking chunks."""
IDLE_S = 60.0
"""Limit in seconds to receive the next frame of a push; the receiver then gives up."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One push to one peer: slices of a step, in chunks.

    A chunk is the bytes of one digest. Chunks are numbered from 0 over all slices.
    """

    header: dict[str, Any]
    """First message of the push; "digests" has the chunk digests of each slice."""
    sizes: np.ndarray
    """[chunks] int64: bytes of each chunk."""
    chunks: Callable[[Sequence[int]], list[memoryview]]
    """Function from chunk numbers to the bytes of those chunks."""


@dataclass(frozen=True, kw_only=True)
class PushedBytes:
    """Result of one attempt to push.

    Says whether another attempt is needed, and how many bytes the peer asked for.
    """

    done: bool
    """Whether no further attempt is needed: the peer has the whole push, or will never
    accept the push."""
    nbytes: int
    """Bytes of the chunks that the peer asked for in this attempt; 0 if it already has
    the whole push, or does not accept the push."""


def send_push(
    channel: Channel,
    outgoing: Outgoing,
    connect: Callable[[float], Channel],
    deadline: float,
) -> PushedBytes:
    """Sends the chunks (bytes of one digest each) of a push that a peer lacks.

    The chunks are sent in frames, directly from the memory that `outgoing.chunks`
    returns, one frame after the other on each connection. After an error, another
    attempt sends only the chunks that the peer still lacks.

    Args:
        channel: connection to the peer; must not be used again after an error.
        outgoing: the push.
        connect: opens another channel to the same peer, by a deadline on the monotonic
            clock; called only for large pushes.
        deadline: time limit of the whole push, on the monotonic clock.

    Returns:
        Whether the push is done, and how many bytes the peer asked for.

    Raises:
        WireError: the peer's answer is invalid.
        ChannelClosed: the connection has ended.
        TimeoutError: the deadline has passed.
        KeyError: `outgoing.chunks` does not have the chunks any more.
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
        frames.clear()  # after an error, stops the other connections
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
    """Sends frames of a push over another connection to the same peer.

    Ends silently if the connection fails, or if chunks are no longer in memory
    (KeyError). The chunks of a frame that could not be sent are sent by the next
    attempt of the push.

    Args:
        connect: opens the connection, by a deadline on the monotonic clock.
        outgoing: the push.
        frames: the chunk numbers of each frame that is still to be sent; all
            connections of the push take frames from it.
        deadline: time limit, on the monotonic clock.
    """
    with contextlib.suppress(OSError, TimeoutError, KeyError):
        with connect(deadline) as channel:
            if "done" not in _announce(channel, outgoing, deadline):
                _send_frames(channel, outgoing, frames, deadline)
                _end(channel, deadline)


def frames_of(numbers: np.ndarray, sizes: np.ndarray) -> list[list[int]]:
    """Groups chunks into frames of up to 8 MiB and 1024 chunks.

    The limits are `FRAME_BYTES` and `MAX_NUMBERS`. A chunk of more than 8 MiB is alone
    in its frame. In the example, chunks 2 and 3 have 6 MiB each, too many for one
    frame; chunk 1 is not sent.

    Args:
        numbers: [n] numbers of the chunks to send.
        sizes: [chunks] bytes of every chunk of the push.

    Returns:
        The chunk numbers of each frame.

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
    """Receives a push: asks for the chunks that this host lacks, then stores them.

    A chunk is the bytes of one digest. Returns at the sender's end message.

    Args:
        channel: connection from the sender, which has announced the push.
        receiving: the push; knows which chunks this host has, and has memory for the
            chunks that this host lacks.

    Raises:
        ChannelClosed: the connection has ended.
        TimeoutError: no whole frame arrived within `IDLE_S` (60) seconds, or the
            request was not sent within `ANSWER_S` (10) seconds.
        WireError: a frame has chunks that are not of this push.
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
    """Returns the numbers of the chunks in a frame of a push, from the frame's header.

    Args:
        header: the frame's header.
        size: bytes of the frame's payload.
        receiving: the push.

    Raises:
        WireError: the chunks are not of this push, or their sizes do not add up to
            `size`.
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
