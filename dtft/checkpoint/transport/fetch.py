"""Fetches slices from one peer over several connections, and serves such fetches.

Bytes are received directly into their target memory and verified chunk by chunk; each
chunk has a digest. A broken connection is opened again; verified chunks are not
requested again. A chunk with a wrong digest is requested again, and after `TRIES` (4)
wrong copies its slice is reported as corrupt. A request names a range, some whole
chunks of one or several slices. Each connection has at most `DEPTH` (2) requests
without an answer, so memory use stays bounded on both sides.
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
    MAX_CHUNK_BYTES,
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
from dtft.checkpoint.transport.rdma import Nixl, NixlError, NixlUnreleased
from dtft.checkpoint.transport.server import connect

logger = logging.getLogger(__name__)

STREAMS = 4
"""Default limit of the connections of one fetch."""
STREAM_BYTES = 32 << 20
"""Least bytes per connection of a fetch that uses several connections, because each
connection costs a handshake."""
RANGE_BYTES = 8 << 20
"""Largest number of bytes in one request's range, unless a single chunk is larger."""
DEPTH = 2
"""Most requests without an answer on one connection: an answer is verified while the
next one arrives."""
BEGIN_S = 10.0
"""Longest wait in seconds for a connection to a peer, and for the first byte of an
answer. After that a new connection is opened."""
READ_S = 30.0
"""Limit of one read of a peer's lent memory, in seconds."""
TRIES = 4
"""Number of connections in a row that may fail without progress (no whole range arrived
and no chunk was verified) before a connection is no longer opened again. Also the
number of wrong copies of a chunk after which its slice is reported as corrupt."""
_PAUSE_S = 0.05


def streams_each(num_peers: int) -> int:
    """Computes how many connections a host opens to each of the peers it fetches from.

    The host receives the bytes of all peers. So it has at most `STREAMS` (4)
    connections in all, or one for each peer if there are more than `STREAMS` peers.

    >>> [streams_each(num_peers) for num_peers in (1, 2, 3, 9)]
    [4, 2, 1, 1]
    """
    return max(1, STREAMS // num_peers)


class FetchError(Exception):
    """Slices could not be fetched from a peer; the message gives the reason."""

    def __init__(
        self, reason: str, corrupt: Sequence[str] = (), unreleased: bool = False
    ) -> None:
        """Makes the error with the message `reason`.

        `corrupt` has the keys of the slices whose copies on the peer are corrupt.
        `unreleased` is whether NIXL may still write to the memory of the slices, at any
        later time.
        """
        super().__init__(reason)
        self.corrupt, self.unreleased = tuple(corrupt), unreleased


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Counts of a successful fetch: verified and received bytes, failed connections."""

    nbytes: int
    """Verified bytes in the target memory."""
    received: int
    """Bytes received in whole answers, repeated chunks included."""
    cuts: int
    """Number of times that a connection failed or could not be opened."""


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
    given_up: Callable[[], bool] = lambda: False,
) -> Fetched:
    """Fetches slices from one peer into their memory.

    Args:
        address: "host:port" of the peer's server.
        credentials: the job and its secret.
        hello: first message on each connection; its "op" selects the peer's handler,
            which must call `serve_fetches`.
        request: fields of the request that the peer's `serve_fetches` passes to its
            `find`; the slices' keys are added as field "keys".
        wanted: the slices, each with its memory and its digests. On failure their
            memory has unspecified contents.
        chunk_bytes: bytes per digest.
        limit_s: limit of the whole fetch, in seconds.
        streams: most connections at a time; with NIXL only one is opened.
        nixl: reads the bytes from the peer's memory if the peer has NIXL too. Without
            it, or once it has failed, the bytes arrive in the peer's answers.
        given_up: called before each request; once it returns True, nothing more is
            requested. Requests without an answer still end first.

    Raises:
        FetchError: the peer is unreachable, lacks a slice, has a slice of another size,
            or sent corrupt bytes; or the fetch took more than `limit_s`, or was given
            up.
    """
    work = _Work(wanted, chunk_bytes, nixl, given_up)
    asked = {**request, "keys": [one.key for one in wanted]}
    if nixl is not None:
        streams = 1
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
    """The ranges that are still to be fetched, shared by the connections of one fetch.

    A range is what one request names: some whole chunks of one or several slices. A
    chunk is the bytes of one digest.
    """

    def __init__(
        self,
        wanted: Sequence[WantedSlice],
        chunk_bytes: int,
        nixl: Nixl | None,
        given_up: Callable[[], bool],
    ) -> None:
        self.given_up, self.unreleased = given_up, False
        self.wanted, self.chunk_bytes, self.nixl = wanted, chunk_bytes, nixl
        sizes = [one.memory.nbytes for one in wanted]
        self.waiting = deque(split_ranges(sizes, chunk_bytes, RANGE_BYTES))
        self.sizes, self.error = sizes, "nothing was tried"
        self._verified, self._received, self._cuts = 0, 0, 0
        self._failures: dict[tuple[int, int], int] = {}
        self._corrupt: dict[str, None] = {}
        self._lock = threading.Lock()

    def next(self) -> Range | None:
        """Takes the next range to request.

        None if no range is waiting, or if the fetch is given up.
        """
        with self._lock:
            if not self.waiting or self.given_up():
                return None
            return self.waiting.popleft()

    def arrived(self, range_: Range) -> None:
        """Verifies the bytes of a range that a peer has sent.

        Chunks that do not match their digests are requested again. After 4 wrong copies
        of a chunk (`TRIES`), its slice is recorded as corrupt instead.
        """
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
        """Counts a failed connection; its unverified chunks are requested again.

        Args:
            begun: the range whose answer may have arrived in part, or () if there is
                none. Its chunks with right digests count as verified and are not
                queued.
            others: the other ranges that were requested on the connection and not
                answered.
            error: the reason, for the text of a FetchError.

        Returns:
            The number of verified bytes in `begun`.
        """
        bad = not_right(begun, self.wanted, self.chunk_bytes)
        gained = _nbytes(begun) - _nbytes(bad)
        with self._lock:
            self._verified += gained
            self._cuts += 1
            self.error = error
            self.waiting.extendleft(reversed([one for one in (bad, *others) if one]))
        return gained

    def outcome(self) -> Fetched:
        """Returns the counts of the finished fetch.

        Raises:
            FetchError: slices are corrupt, or not all bytes were received and verified.
        """
        if self._corrupt:
            text = f"{len(self._corrupt)} corrupt slices"
            raise FetchError(text, tuple(self._corrupt), self.unreleased)
        if self._verified < sum(self.sizes) or self.waiting:
            raise FetchError(self.error, unreleased=self.unreleased)
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
    """Fetches ranges over one connection until no range of `work` is left to request.

    Opens a broken connection again. The unverified ranges of a broken connection return
    to `work`, where other connections can take them. After an error of NIXL (RDMA),
    fetches over TCP. Gives up in these cases:

    * The peer refuses connections, lacks a slice, or has a slice of another size.
    * NIXL cannot end a read that took too long, so it may still write to its targets.
    * The deadline has passed, or `_Work.given_up` says that the caller gives up.
    * 4 connections in a row (`TRIES`) made no progress.

    Args:
        work: the ranges to fetch; failures are recorded here.
        address: "host:port" of the peer.
        credentials: the job and its secret.
        hello: first message on a connection.
        asked: second message: the request for the slices.
        deadline: monotonic time in seconds by which the fetch must end.
    """
    tries = 0
    while tries < TRIES and work.waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            work.cut((), (), f"out of time; {work.error}")
            return
        if work.given_up():
            work.cut((), (), "the fetch was given up")
            return
        flying: deque[Range] = deque()
        gained = [0]
        first = (
            [asked | {"nixl": True}]
            if work.nixl is not None
            else [asked, *_ask(work, flying)]
        )
        try:
            with connect(
                *(address, credentials, hello, min(left, BEGIN_S)), first
            ) as channel:
                offer = _opened(channel, work.sizes, deadline)
                if work.nixl is not None and offer:
                    _read(channel, work, offer, flying, gained, deadline)
                else:
                    if work.nixl is not None:
                        logger.info(
                            "%s lends no memory through NIXL: fetching over TCP",
                            address,
                        )
                    _pump(channel, work, flying, gained, deadline)
        except (FetchError, NixlUnreleased) as error:
            work.unreleased = isinstance(error, NixlUnreleased)
            work.cut((), tuple(flying), str(error))
            return
        except NixlError as error:
            logger.warning("%s; fetching from %s over TCP", error, address)
            work.cut((), tuple(flying), str(error))
            work.nixl = None
        except (OSError, TimeoutError) as error:
            begun = flying.popleft() if flying else ()
            gained[0] += work.cut(begun, tuple(flying), str(error))
            if isinstance(error, ConnectionRefusedError):
                return  # the peer's server no longer listens
            tries = 0 if gained[0] else tries + 1
            time.sleep(min(_PAUSE_S, max(left, 0)))


def _opened(
    channel: Channel, sizes: Sequence[int], deadline: float
) -> dict[str, Any] | None:
    """Receives the peer's first answer and compares its slice sizes with `sizes`.

    `sizes` has the bytes of each requested slice.

    Returns:
        The argument `offer` of `_read`, which describes the memory of the slices on the
        peer, so that it can be read with NIXL (remote memory access). None if the peer
        lends no memory through NIXL; its answers to requests then have the bytes.

    Raises:
        FetchError: the peer lacks a slice, or the sizes differ.
    """
    left = min(deadline - time.monotonic(), BEGIN_S)
    reply, _ = channel.receive(left, no_payload)
    if "error" in reply:
        raise FetchError(str(reply["error"]))
    if reply.get("sizes") != list(sizes):
        raise FetchError("the peer's slices have other sizes")
    return reply.get("nixl")


def _ask(work: _Work, flying: deque[Range]) -> Iterator[dict[str, Any]]:
    """Yields requests until two have no answer yet (`DEPTH`), or no range is left.

    Each request is for one range, which is appended to `flying`: the requested ranges
    that have no answer yet.
    """
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
    """Requests and receives ranges over a connection until `work` has no more.

    Args:
        channel: connection to the peer.
        work: the ranges to fetch.
        flying: the ranges that were requested and not yet received, in order; changed.
        gained: the size in bytes of each received range is added to `gained[0]`, also
            if chunks of the range do not match their digests.
        deadline: monotonic time in seconds by which the fetch must end.

    Raises:
        WireError: an answer does not have the size of its range.
        ChannelClosed: the connection has ended.
        TimeoutError: an answer did not come in time.
    """
    while True:
        for asked in _ask(work, flying):
            channel.send(asked, timeout_s=deadline - time.monotonic())
        if not flying:
            return

        def sink(_: dict[str, Any], size: int) -> list[memoryview]:
            if size != _nbytes(flying[0]):
                raise protocol.WireError(
                    f"an answer has {size} bytes, not as many as requested"
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
    """Reads slices from memory that a peer lends through NIXL (RDMA), range by range.

    Returns when `work` has no more ranges. After each read this host sends an empty
    request; the peer's answer shows that the peer still lends the memory. Then the
    range is verified, and chunks (the parts with a digest each) that do not match their
    digests return to `work`.

    Args:
        channel: connection to the peer.
        work: the ranges to fetch.
        offer: describes the lent memory: name and metadata of the peer's NIXL agent
            (NIXL's library object), and addresses and sizes of each slice's pieces.
            The peer's `Nixl.lend` made it.
        flying: changed; has the range that is being read, until its bytes have arrived
            and the peer has answered.
        gained: the size of each range read is added to `gained[0]`, also if chunks of
            the range do not match their digests.
        deadline: monotonic time in seconds by which the fetch must end.
    """
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


OPEN_S = 10.0
"""Limit in seconds for a peer's first request to arrive, and again for the answer to be
sent."""
IDLE_S = 60.0
"""Limit in seconds for a peer's next request to arrive, and again for the answer to be
sent. After that the connection is ended."""


def serve_fetches(
    channel: Channel,
    find: Callable[[dict[str, Any]], Sequence[Parts]],
    nixl: Nixl | None = None,
) -> None:
    """Serves one connection of a peer's `fetch_slices` until the peer closes it.

    Answers are sent one at a time, directly from the memory that `find` returns. If a
    slice is not held, the only answer is an error.

    Args:
        channel: the connection.
        find: function from the peer's request, which is untrusted, to the bytes of the
            requested slices; raises KeyError if a slice is not held.
        nixl: lends the slices' memory to a peer that has NIXL too.

    Raises:
        WireError: the peer requests parts (byte ranges of slices) that are malformed,
            outside of the slices or too large.
        ChannelClosed: the connection has ended before the first request, or while an
            answer was sent.
        TimeoutError: the peer sends no request, or does not take an answer, in time.
    """
    request, _ = channel.receive(OPEN_S, no_payload)
    try:
        slices = find(request)
    except KeyError as error:
        channel.send({"error": f"not held here: {error}"}, timeout_s=OPEN_S)
        _let_go(channel)
        return
    opened: dict[str, Any] = {"sizes": [parts.nbytes for parts in slices]}
    if nixl is None or request.get("nixl") is not True:
        _answer(channel, slices, opened)
        return
    with contextlib.ExitStack() as lent:
        try:
            opened["nixl"] = lent.enter_context(nixl.lend(slices))
        except NixlError as error:
            logger.warning("%s; serving a fetch over TCP", error)
        _answer(channel, slices, opened)


def _let_go(channel: Channel) -> None:
    """Lets the peer read the error that was sent, before the connection is closed.

    Reads and ignores requests until the peer closes the connection, for at most
    `OPEN_S` (10) seconds: the peer may have requested parts of slices already. If the
    socket were closed with unread bytes, the connection would be reset, and the error
    could be lost.
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
    """Returns the bytes that a peer requests of the slices, without copies.

    `parts` is from the peer: a list of (index in `slices`, first byte, one past the
    last byte).

    Raises:
        WireError: `parts` is malformed, a part is outside of its slice, or the parts
            have more than `MAX_CHUNK_BYTES` bytes (256 MiB).
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
        if not inside or size > MAX_CHUNK_BYTES:
            raise protocol.WireError(
                f"a request's part {part} is outside of its slice, or is too large"
            )
        found += slices[index].cut(start, stop)
    return found
