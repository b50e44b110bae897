"""How a push travels: what a peer lacks of a step is asked first, and only that sent.

The sender says the digests of all chunks; the receiver answers which it lacks, and
those come in frames of some chunks each, over more connections where there is much to
send. A chunk counts once its digest is right; after a cut the next try begins with what
is still lacking. At most a frame per connection is under way, straight from and into
the hosts' arenas. Must not know layouts, steps' meaning, or who is alive.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.checkpoint import wire
from dtft.checkpoint.channel import Channel
from dtft.checkpoint.chunks import pack_flags, unpack_flags
from dtft.checkpoint.receiving import Receiving

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
class Sent:
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
) -> Sent:
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
        return Sent(done=answer["done"] is True, nbytes=0)
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
    return Sent(done=_end(channel, deadline), nbytes=nbytes)


def _announce(channel: Channel, outgoing: Outgoing, deadline: float) -> dict[str, Any]:
    channel.send(outgoing.header, timeout_s=deadline - time.monotonic())
    return channel.receive(deadline - time.monotonic())[0]


def _lacking(answer: dict[str, Any], count: int) -> np.ndarray:
    try:
        return unpack_flags(answer["lacks"], count)
    except (KeyError, TypeError, ValueError) as error:
        raise wire.WireError(f"a peer answered a push with {sorted(answer)}") from error


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
            header, _ = channel.receive(IDLE_S, sink, max_header=wire.MAX_DATA_HEADER)
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
    numbers, sizes = header.get("chunks", []), receiving.shelf.chunks.sizes
    if (
        not isinstance(numbers, list)
        or len(numbers) > MAX_NUMBERS
        or any(type(one) is not int or not 0 <= one < len(sizes) for one in numbers)
        or len(set(numbers)) != len(numbers)
        or int(sizes[numbers].sum() if numbers else 0) != size
    ):
        raise wire.WireError("a frame of a push does not have chunks of that push")
    return numbers
