"""Fetches slices from one peer over several connections, and answers such fetches.

Bytes go straight into the memory they are wanted in, and count chunk by chunk once
their digests match. A connection that is cut is made again and goes on after the last
verified chunk. A chunk that arrives wrong is asked for again, and is the peer's corrupt
copy if it stays wrong. At most `DEPTH` answers per connection are on their way, so
memory stays bounded on both sides.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dtft.checkpoint.state import (
    Parts,
    Range,
    WantedSlice,
    cut_lent,
    not_right,
    range_memory,
    split_ranges,
)
from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.connection import Channel, ChannelClosed, no_payload
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.rdma import Nixl
from dtft.checkpoint.transport.server import connect

logger = logging.getLogger(__name__)

STREAMS = 4
"""Most connections of one fetch."""
STREAM_BYTES = 32 << 20
"""A further connection costs a handshake: it is made for every so many bytes."""
RANGE_BYTES = 8 << 20
"""What is asked for at a time, unless a chunk is larger."""
DEPTH = 2
"""Answers on their way on one connection: one is checked while the next arrives."""
BEGIN_S = 10.0
"""A peer that does not begin to answer for this long is given up and tried again."""
READ_S = 30.0
"""One read of a peer's lent memory takes at most this long."""
TRIES = 4
"""Attempts of one connection without a byte gained, and of one chunk."""
_PAUSE_S = 0.05


def streams_each(num_peers: int) -> int:
    """Connections to each peer when so many are fetched from at once.

    They share those of one fetch: the receiving host is the same for all of them.

    >>> [streams_each(num_peers) for num_peers in (1, 2, 3, 9)]
    [4, 2, 1, 1]
    """
    return max(1, STREAMS // num_peers)


class FetchError(Exception):
    """Slices could not be had from a peer; says why."""

    def __init__(self, reason: str, corrupt: Sequence[str] = ()) -> None:
        """Keeps the keys of slices that the peer has, but not intact."""
        super().__init__(reason)
        self.corrupt = tuple(corrupt)


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Bytes that a fetch verified and received, and connections that broke."""

    nbytes: int
    """Size of what is there now, verified."""
    received: int
    """Bytes that arrived in whole answers, repeated ones included."""
    cuts: int
    """Connections that broke and were made again."""


def fetch_slices(
    address: str,
    credentials: Credentials,
    hello: dict[str, Any],
    request: dict[str, Any],
    wanted: Sequence[WantedSlice],
    *,
    chunk_bytes: int,
    limit_s: float,
    streams: int = STREAMS,
    nixl: Nixl | None = None,
) -> Fetched:
    """Fetches slices from one peer into their memory.

    Args:
        address: "host:port" of the peer's server.
        credentials: the job and its secret.
        hello: chooses the peer's handler; that must be `serve`.
        request: what the peer's `find` is asked; "keys" is added.
        wanted: the slices. On failure their memory has unspecified contents.
        chunk_bytes: size of the chunks of the digests.
        limit_s: limit for all of it, in seconds.
        streams: most connections at a time.
        nixl: reads the bytes if the peer has NIXL too, with one connection beside it;
            the peer's answers carry them otherwise.

    Raises:
        FetchError: the peer is gone, lacks a slice, is too late or sent corrupt bytes.
    """
    work = _Work(wanted, chunk_bytes, nixl)
    asked = {**request, "keys": [one.key for one in wanted]}
    if nixl is not None:
        asked, streams = asked | {"nixl": True}, 1
    deadline = time.monotonic() + limit_s

    def run() -> None:
        _stream(work, address, credentials, hello, asked, deadline)

    paying = sum(work.sizes) // STREAM_BYTES
    others = [
        threading.Thread(target=run, daemon=True)
        for _ in range(min(streams, len(work.waiting), paying) - 1)
    ]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()  # each ends by the deadline
    return work.outcome()


class _Work:
    """What is still to be done, shared by the connections of one fetch."""

    def __init__(
        self, wanted: Sequence[WantedSlice], chunk_bytes: int, nixl: Nixl | None
    ) -> None:
        self.wanted, self.chunk_bytes, self.nixl = wanted, chunk_bytes, nixl
        sizes = [one.memory.nbytes for one in wanted]
        self.waiting = deque(split_ranges(sizes, chunk_bytes, RANGE_BYTES))
        self.sizes, self.error = sizes, "nothing was tried"
        self._verified, self._received, self._cuts = 0, 0, 0
        self._failures: dict[tuple[int, int], int] = {}
        self._corrupt: dict[str, None] = {}
        self._lock = threading.Lock()

    def next(self) -> Range | None:
        """A range to ask for; None if none is waiting."""
        with self._lock:
            return self.waiting.popleft() if self.waiting else None

    def arrived(self, range_: Range) -> None:
        """A whole answer is in memory: what is wrong is asked for again, at most so
        often that a passing fault is over."""
        bad = not_right(range_, self.wanted, self.chunk_bytes)
        with self._lock:
            self._received += _nbytes(range_)
            self._verified += _nbytes(range_) - _nbytes(bad)
            for part in bad:
                place = (part.index, part.start)
                self._failures[place] = self._failures.get(place, 0) + 1
                if self._failures[place] < TRIES:
                    self.waiting.append((part,))
                else:
                    self._corrupt[self.wanted[part.index].key] = None

    def cut(self, begun: Range, others: Sequence[Range], error: str) -> int:
        """A connection broke; `begun` may be there in part. Returns bytes gained."""
        bad = not_right(begun, self.wanted, self.chunk_bytes)
        gained = _nbytes(begun) - _nbytes(bad)
        with self._lock:
            self._verified += gained
            self._cuts += 1
            self.error = error
            self.waiting.extendleft(reversed([one for one in (bad, *others) if one]))
        return gained

    def outcome(self) -> Fetched:
        """What was fetched, or why not all of it."""
        if self._corrupt:
            text = f"{len(self._corrupt)} corrupt slices"
            raise FetchError(text, tuple(self._corrupt))
        if self._verified < sum(self.sizes) or self.waiting:
            raise FetchError(self.error)
        return Fetched(nbytes=self._verified, received=self._received, cuts=self._cuts)


def _nbytes(range_: Range) -> int:
    return sum(part.nbytes for part in range_)


def _stream(
    work: _Work,
    address: str,
    credentials: Credentials,
    hello: dict[str, Any],
    asked: dict[str, Any],
    deadline: float,
) -> None:
    """One connection, made again after every cut, until nothing waits any more.

    When it gives up, what it had goes back to `work` for the others.
    """
    tries = 0
    while tries < TRIES and work.waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            work.cut((), (), f"out of time; {work.error}")
            return
        flying: deque[Range] = deque()
        gained = [0]
        first = [asked] if work.nixl is not None else [asked, *_ask(work, flying)]
        try:
            with connect(
                *(address, credentials, hello, min(left, BEGIN_S)), first
            ) as channel:
                offer = _opened(channel, work.sizes, deadline)
                if work.nixl is not None and offer:
                    _read(channel, work, offer, flying, gained, deadline)
                else:
                    if work.nixl is not None:
                        logger.info("%s has no NIXL: fetching over TCP", address)
                    _pump(channel, work, flying, gained, deadline)
        except FetchError as error:
            work.cut((), tuple(flying), str(error))
            return
        except (OSError, TimeoutError) as error:
            begun = flying.popleft() if flying else ()
            gained[0] += work.cut(begun, tuple(flying), str(error))
            if isinstance(error, ConnectionRefusedError):
                return  # nobody listens there any more
            tries = 0 if gained[0] else tries + 1
            time.sleep(min(_PAUSE_S, max(left, 0)))


def _opened(
    channel: Channel, sizes: Sequence[int], deadline: float
) -> dict[str, Any] | None:
    """Hears whether the peer has what is wanted; returns what it lends, if it does."""
    left = min(deadline - time.monotonic(), BEGIN_S)
    reply, _ = channel.receive(left, no_payload, max_header=protocol.MAX_DATA_HEADER)
    if "error" in reply:
        raise FetchError(str(reply["error"]))
    if reply.get("sizes") != list(sizes):
        raise FetchError("the peer's slices have other sizes")
    return reply.get("nixl")


def _ask(work: _Work, flying: deque[Range]) -> Iterator[dict[str, Any]]:
    """What to send so that as much as may be is on its way, which is in `flying`."""
    while len(flying) < DEPTH and (range_ := work.next()) is not None:
        flying.append(range_)
        parts = [(part.index, part.start, part.stop) for part in range_]
        yield {"parts": parts}


def _pump(
    channel: Channel,
    work: _Work,
    flying: deque[Range],
    gained: list[int],
    deadline: float,
) -> None:
    """Asks and receives until nothing waits; `flying` is what was asked for."""
    while True:
        for asked in _ask(work, flying):
            channel.send(asked, timeout_s=deadline - time.monotonic())
        if not flying:
            return

        def sink(_: dict[str, Any], size: int) -> list[memoryview]:
            if size != _nbytes(flying[0]):
                raise protocol.WireError(
                    f"an answer has {size} bytes, asked were others"
                )
            return range_memory(flying[0], work.wanted)

        channel.receive(deadline - time.monotonic(), sink, begin_s=BEGIN_S)
        work.arrived(flying[0])
        gained[0] += _nbytes(flying.popleft())


def _read(
    channel: Channel,
    work: _Work,
    offer: dict[str, Any],
    flying: deque[Range],
    gained: list[int],
    deadline: float,
) -> None:
    """Reads the lent memory until nothing waits; the peer says that it still holds."""
    assert work.nixl is not None
    own = [view for one in work.wanted for view in one.memory.views]
    with work.nixl.receiving(own), work.nixl.borrow(offer):
        while (range_ := work.next()) is not None:
            flying.append(range_)
            lent = [
                piece
                for part in range_
                for piece in cut_lent(offer["addresses"][part.index], part)
            ]
            work.nixl.read(
                offer["name"],
                lent,
                range_memory(range_, work.wanted),
                min(deadline, time.monotonic() + READ_S),
            )
            channel.send({"parts": []}, timeout_s=deadline - time.monotonic())
            channel.receive(deadline - time.monotonic(), no_payload, begin_s=BEGIN_S)
            work.arrived(flying.popleft())
            gained[0] += _nbytes(range_)


# Answers the fetches of `fetch_slices`: opens slices, then sends ranges of them.
#
# Sends straight from the memory that `find` gives, one answer at a time, and only what
# lies inside.


OPEN_S = 10.0
"""A peer says what it wants within this time."""
IDLE_S = 60.0
"""A connection on which nothing is asked for this long is ended."""
MAX_ANSWER = 256 << 20
"""Largest answer in bytes; chunks must be smaller."""


def serve_fetches(
    channel: Channel,
    find: Callable[[dict[str, Any]], Sequence[Parts]],
    nixl: Nixl | None = None,
) -> None:
    """Answers one connection of a peer's `fetch_slices` until the peer ends it.

    Args:
        channel: the connection.
        find: from the peer's request, which is not to be trusted, to the slices' bytes.
        nixl: lends those bytes to a peer that has NIXL too.

    Raises:
        WireError: the peer asks for what it may not.
    """
    request, _ = channel.receive(
        OPEN_S, no_payload, max_header=protocol.MAX_DATA_HEADER
    )
    try:
        slices = find(request)
    except KeyError as error:
        channel.send({"error": f"not held here: {error}"}, timeout_s=OPEN_S)
        _let_go(channel)
        return
    opened = {"sizes": [parts.nbytes for parts in slices]}
    if nixl is None or request.get("nixl") is not True:
        _answer(channel, slices, opened)
        return
    with nixl.lend(slices) as offer:
        _answer(channel, slices, opened | {"nixl": offer})


def _let_go(channel: Channel) -> None:
    """Reads on until the peer ends the connection.

    It has asked for parts already: ending here with those unread would reset the
    connection, and what it was told could be lost.
    """
    deadline = time.monotonic() + OPEN_S
    with contextlib.suppress(ChannelClosed, TimeoutError):
        while (left := deadline - time.monotonic()) > 0:
            channel.receive(left, no_payload, max_header=protocol.MAX_DATA_HEADER)


def _answer(channel: Channel, slices: Sequence[Parts], opened: dict[str, Any]) -> None:
    channel.send(opened, timeout_s=OPEN_S)
    while True:
        try:
            asked, _ = channel.receive(
                IDLE_S, no_payload, max_header=protocol.MAX_DATA_HEADER
            )
        except ChannelClosed:
            return
        payload = _cut_out(slices, asked.get("parts"))
        channel.send({}, payload, timeout_s=IDLE_S)


def _cut_out(slices: Sequence[Parts], parts: object) -> list[memoryview]:
    """The bytes that a peer asks for.

    Raises:
        WireError: they are not inside the slices, or too many.
    """
    found: list[memoryview] = []
    size = 0
    for part in parts if isinstance(parts, list) else [None]:
        if (
            not isinstance(part, list)
            or len(part) != 3
            or any(type(number) is not int for number in part)
        ):
            raise protocol.WireError("a request's parts are not (slice, start, stop)")
        index, start, stop = part
        inside = 0 <= index < len(slices) and 0 <= start <= stop <= slices[index].nbytes
        size += stop - start
        if not inside or size > MAX_ANSWER:
            raise protocol.WireError(f"a request's part {part} is not to be had here")
        found += slices[index].cut(start, stop)
    return found
