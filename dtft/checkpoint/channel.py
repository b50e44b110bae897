"""One TCP connection between two hosts: sends and receives frames.

Sends from and receives into memory that others own, without copies, and gives every
wait a deadline. A silent peer is noticed by keepalive; frames that were changed, lost,
repeated or reordered by their seals. Must not know what frames mean, nor who may
connect.
"""

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtft.checkpoint import seal, wire
from dtft.checkpoint.stream import Stream, WouldBlock

Buffer = bytes | bytearray | memoryview
Header = dict[str, Any]
Memory = memoryview | Sequence[memoryview]
Sink = Callable[[Header, int], Memory | None]
"""From header and payload size to the memory for the payload, in one or more parts;
None discards it."""

SILENCE_MS = 10_000
"""A peer whose kernel acknowledges nothing for this long is gone."""
SILENCE_S = 10.0
"""A peer that stops for this long in the middle of a frame is given up."""
_BUFFERS_PER_CALL = 512  # the kernel takes at most 1024
_SCRATCH_BYTES = 1 << 20


def no_payload(_: Header, size: int) -> None:
    """A sink for frames that have no payload.

    Raises:
        WireError: it has one.
    """
    if size:
        raise wire.WireError(f"a frame has a payload of {size} bytes where none is due")


class ChannelClosed(ConnectionError):
    """The connection has ended, from either side."""


class Unsent:
    """A frame without payload that has not left this host, or not all of it."""

    def __init__(self, header: Header) -> None:
        """Packs the header, which may change afterwards.

        Raises:
            ValueError: the header is too large.
        """
        self.plain = wire.encode_header(header, 0)
        self.rest: memoryview | None = None
        """What the socket has not taken; None while the frame has no place in the
        connection's order."""


class Channel:
    """One connection, authenticated. Sending is thread-safe; one thread receives."""

    def __init__(self, stream: Stream, address: str) -> None:
        """Takes over a connected stream; `address` is for messages."""
        self.address = address
        self.peer: Header = {}
        """What the client said in its hello; at the client, the server's answer."""
        self.stream = stream
        self.paced: Callable[[int], None] | None = None
        """Called with every number of bytes sent; pauses, to send more slowly."""
        self._sealer: seal.Sealer | None = None
        self._opener: seal.Opener | None = None
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._users, self._closed = 0, False

    def protect(self, send_key: bytes, receive_key: bytes) -> None:
        """Gives the keys of the seals; before that there are no frames."""
        self._sealer, self._opener = seal.Sealer(send_key), seal.Opener(receive_key)

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self, header: Header, payload: Sequence[Buffer] = (), *, timeout_s: float
    ) -> None:
        """Sends one frame; the payload's parts are received as one.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the peer did not take it in time. Unless nothing was sent
                yet, the channel is closed.
            ValueError: header or payload is too large.
        """
        deadline = time.monotonic() + timeout_s
        parts = [memoryview(p).cast("B") for p in payload if memoryview(p).nbytes]
        size = sum(map(len, parts))
        assert self._sealer is not None, "no frames before the handshake"
        with self._use():
            if not self._sending.acquire(timeout=max(timeout_s, 0)):
                raise self._late("another thread's send to end")
            try:
                head = self._sealer.frame(header, size)
                self.write(head, *parts, deadline=deadline)
                self._sealer.advance()
            finally:
                self._sending.release()

    def send_some(self, unsent: Unsent) -> int | None:
        """Sends what the socket takes now, without waiting.

        From its first call until it is done, no other frame can be sent; who gives up
        before calls `give_up`.

        Returns:
            None: the frame is sent. 0: another thread is sending. Otherwise what to
            poll for before the next call: POLLOUT, or POLLIN (TLS).

        Raises:
            ChannelClosed: the connection has ended.
        """
        assert self._sealer is not None, "no frames before the handshake"
        with self._use():
            if unsent.rest is None:
                if not self._sending.acquire(blocking=False):
                    return 0
                unsent.rest = memoryview(self._sealer.seal(unsent.plain))
            try:
                while unsent.rest:
                    unsent.rest = unsent.rest[self.stream.send([unsent.rest]) :]
            except WouldBlock as wait:
                return wait.event
            except OSError as error:
                self.give_up(unsent)
                raise self._ended(error) from error
            self._sealer.advance()
            self._sending.release()
            return None

    def give_up(self, unsent: Unsent) -> None:
        """Closes the channel on account of a frame that cannot be sent."""
        self.close()
        if unsent.rest:
            unsent.rest = None
            self._sending.release()

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """The socket's descriptor, which is nobody else's until the block ends.

        Raises:
            ChannelClosed: the connection has ended.
        """
        with self._use():
            yield self.stream.socket.fileno()

    def receive(
        self,
        timeout_s: float,
        sink: Sink | None = None,
        *,
        begin_s: float | None = None,
        max_header: int = wire.MAX_HEADER,
    ) -> tuple[Header, memoryview]:
        """Waits for the next frame.

        Args:
            timeout_s: limit for the whole frame.
            sink: asked once per frame, also when the payload is empty, for memory of
                the payload's size. Without it small payloads get new memory.
            begin_s: limit for the frame to begin, if that is less.
            max_header: largest header that is accepted, in bytes; it also bounds of
                how many values a header may be made.

        Returns:
            The header, and the memory with the payload (empty if discarded, or if the
            sink gave it in parts).

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: no whole frame in time. If it had begun, the channel is
                closed.
            WireError: the peer sent no valid frame; the channel is closed.
        """
        now = time.monotonic()
        wait_s = timeout_s if begin_s is None else min(timeout_s, begin_s)
        with self._use():
            self._wait(select.POLLIN, now + wait_s, "a frame")
            try:
                return self._next_frame(now + timeout_s, sink, max_header)
            except BaseException:
                self.close()  # what comes next would not be the start of a frame
                raise

    def _next_frame(
        self, deadline: float, sink: Sink | None, max_header: int
    ) -> tuple[Header, memoryview]:
        assert self._opener is not None, "no frames before the handshake"
        start = self._take(seal.FRAME_START_BYTES, deadline)
        header_bytes, payload_bytes = self._opener.start(start)
        if header_bytes > max_header:
            raise wire.WireError(
                f"peer {self.name} sent a header of {header_bytes} bytes where at "
                f"most {max_header} are allowed"
            )
        sealed = self._take(header_bytes + seal.SEAL_BYTES, deadline)
        header = self._opener.header(sealed, max_header)
        memory = self._memory_for(header, payload_bytes, sink)
        if memory is None:
            self._discard(payload_bytes, deadline)
            return header, memoryview(b"")
        self._fill(memory, deadline)
        return header, memory[0] if len(memory) == 1 else memoryview(b"")

    def close(self) -> None:
        """Ends the connection; threads that wait on it get ChannelClosed."""
        with self._state:
            if self._closed:
                return
            self._closed, idle = True, not self._users
        self.stream.end()
        if idle:
            self.stream.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """The last user closes the descriptor, so no other gets its number early."""
        with self._state:
            if self._closed:
                raise ChannelClosed(f"channel to {self.name} was closed on this host")
            self._users += 1
        try:
            yield
        finally:
            with self._state:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                self.stream.close()

    @property
    def name(self) -> str:
        """The peer, for messages: its host name if it told one, and its address."""
        host = self.peer.get("host")
        return f"{host} ({self.address})" if host else self.address

    def _late(self, what: str) -> TimeoutError:
        return TimeoutError(f"peer {self.name}: timed out waiting for {what}")

    def _ended(self, error: OSError | None = None) -> ChannelClosed:
        who = "this host" if self._closed else f"peer {self.name}"
        return ChannelClosed(
            f"channel to {self.name} ended: {error or f'{who} closed the connection'}"
        )

    def _wait(self, event: int, deadline: float, what: str) -> None:
        if not self.stream.poll(event, deadline - time.monotonic()):
            raise self._late(what)

    def write(self, *parts: Buffer, deadline: float) -> None:
        """Sends bytes that are no frame; for the handshake.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the monotonic clock has passed `deadline`.
        """
        buffers = [memoryview(part) for part in parts if len(part)]
        at, begun = 0, False
        try:
            while at < len(buffers):
                try:
                    sent = self.stream.send(buffers[at : at + _BUFFERS_PER_CALL])
                except WouldBlock as wait:
                    begun = begun or self.stream.keeps_unsent
                    self._wait(wait.event, deadline, "room to send")
                    continue
                begun = True
                if self.paced is not None:
                    self.paced(sent)
                while sent and sent >= len(buffers[at]):
                    sent, at = sent - len(buffers[at]), at + 1
                if sent:
                    buffers[at] = buffers[at][sent:]
                if at < len(buffers) and time.monotonic() > deadline:
                    raise self._late("the rest of a frame to be taken")
        except TimeoutError:
            if begun:
                self.close()  # the peer has part of a frame
            raise
        except OSError as error:
            self.close()
            raise self._ended(error) from error

    def read(self, size: int, *, deadline: float) -> bytearray:
        """Receives bytes that are no frame; for the handshake.

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: the monotonic clock has passed `deadline`.
        """
        return self._take(size, deadline)

    def _take(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        self._fill([memoryview(data)], deadline)
        return data

    def _fill(self, memory: Sequence[memoryview], deadline: float) -> None:
        rest = [part for part in memory if len(part)]
        rest.reverse()  # what comes next is at the end
        while rest:
            try:
                got = self.stream.receive_into(rest[: -_BUFFERS_PER_CALL - 1 : -1])
            except WouldBlock as wait:
                silent = min(deadline, time.monotonic() + SILENCE_S)
                self._wait(wait.event, silent, "the rest of a frame")
                continue
            except OSError as error:
                raise self._ended(error) from error
            if not got:
                raise self._ended()
            while got and got >= len(rest[-1]):
                got -= len(rest.pop())
            if got:
                rest[-1] = rest[-1][got:]
            if rest and time.monotonic() > deadline:
                raise self._late("the rest of a frame")

    def _discard(self, size: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._fill([part], deadline)
            size -= len(part)

    def _memory_for(
        self, header: Header, size: int, sink: Sink | None
    ) -> list[memoryview] | None:
        if sink is None:
            if size > wire.MAX_UNPLACED:
                raise wire.WireError(
                    f"peer {self.name} sent a payload of {size} bytes where at most "
                    f"{wire.MAX_UNPLACED} are allowed. Give `receive` a sink."
                )
            return [memoryview(bytearray(size))]
        memory = sink(header, size)
        if memory is None:
            return None
        parts = [memory] if isinstance(memory, memoryview) else list(memory)
        given = sum(part.nbytes for part in parts)
        if given != size:
            raise ValueError(
                f"sink gave {given} bytes for a payload of {size} from {self.name}. "
                "Give memory of just that size, or None to discard it."
            )
        return [part.cast("B") if part.nbytes else memoryview(b"") for part in parts]
