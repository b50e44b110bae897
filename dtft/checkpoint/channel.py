"""One TCP connection between two hosts: sends and receives frames.

Sends from and receives into memory that others own, without copies, and gives every
wait a deadline. A silent peer is noticed by keepalive. Must not know what frames mean,
nor who may connect.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtft.checkpoint import wire

Buffer = bytes | bytearray | memoryview
Header = dict[str, Any]
Sink = Callable[[Header, int], memoryview | None]
"""From header and payload size to the memory for the payload; None discards it."""

SILENCE_MS = 10_000
"""A peer whose kernel acknowledges nothing for this long is gone."""
_BUFFERS_PER_CALL = 512  # the kernel takes at most 1024
_SCRATCH_BYTES = 1 << 20


class ChannelClosed(ConnectionError):
    """The connection has ended, from either side."""


class Channel:
    """One connection, authenticated. Sending is thread-safe; one thread receives."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        """Takes over a connected socket; `address` is for messages."""
        self.address = address
        self.peer: Header = {}
        """What the client said in its hello; at the client, the server's answer."""
        self._socket = connection
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._users, self._closed = 0, False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)

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
        head = wire.encode_header(header, sum(map(len, parts)))
        with self._use():
            if not self._sending.acquire(timeout=max(timeout_s, 0)):
                raise self._late("another thread's send to end")
            try:
                self.write(head, *parts, deadline=deadline)
            finally:
                self._sending.release()

    def receive(
        self, timeout_s: float, sink: Sink | None = None
    ) -> tuple[Header, memoryview]:
        """Waits for the next frame.

        Args:
            timeout_s: limit for the whole frame.
            sink: asked once per frame, also when the payload is empty, for memory of
                the payload's size. Without it small payloads get new memory.

        Returns:
            The header, and the memory with the payload (empty if discarded).

        Raises:
            ChannelClosed: the connection has ended.
            TimeoutError: no whole frame in time. If it had begun, the channel is
                closed.
            WireError: the peer sent no valid frame; the channel is closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._use():
            self._wait(select.POLLIN, deadline, "a frame")
            try:
                prefix = self.read(wire.PREFIX_BYTES, deadline=deadline)
                header_bytes, payload_bytes = wire.decode_prefix(prefix)
                header = wire.decode_header(self.read(header_bytes, deadline=deadline))
                memory = self._memory_for(header, payload_bytes, sink)
                if memory is None:
                    self._discard(payload_bytes, deadline)
                    return header, memoryview(b"")
                self._fill(memory, deadline)
                return header, memory
            except BaseException:
                self.close()  # what comes next would not be the start of a frame
                raise

    def close(self) -> None:
        """Ends the connection; threads that wait on it get ChannelClosed."""
        with self._state:
            if self._closed:
                return
            self._closed, idle = True, not self._users
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if idle:
            self._socket.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """The last user closes the descriptor, so no other gets its number early."""
        with self._state:
            if self._closed:
                raise ChannelClosed(f"channel to {self._name} was closed on this host")
            self._users += 1
        try:
            yield
        finally:
            with self._state:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                self._socket.close()

    @property
    def _name(self) -> str:
        host = self.peer.get("host")
        return f"{host} ({self.address})" if host else self.address

    def _late(self, what: str) -> TimeoutError:
        return TimeoutError(f"peer {self._name}: timed out waiting for {what}")

    def _ended(self, error: OSError | None = None) -> ChannelClosed:
        who = "this host" if self._closed else f"peer {self._name}"
        return ChannelClosed(
            f"channel to {self._name} ended: {error or f'{who} closed the connection'}"
        )

    def _wait(self, event: int, deadline: float, what: str) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        if not poller.poll(max(deadline - time.monotonic(), 0) * 1000):
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
                    sent = self._socket.sendmsg(buffers[at : at + _BUFFERS_PER_CALL])
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline, "room to send")
                    continue
                begun = True
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
        data = bytearray(size)
        self._fill(memoryview(data), deadline)
        return data

    def _fill(self, memory: memoryview, deadline: float) -> None:
        at = 0
        while at < len(memory):
            try:
                received = self._socket.recv_into(memory[at:])
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, "the rest of a frame")
                continue
            except OSError as error:
                raise self._ended(error) from error
            if not received:
                raise self._ended()
            at += received
            if at < len(memory) and time.monotonic() > deadline:
                raise self._late("the rest of a frame")

    def _discard(self, size: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._fill(part, deadline)
            size -= len(part)

    def _memory_for(
        self, header: Header, size: int, sink: Sink | None
    ) -> memoryview | None:
        if sink is None:
            if size > wire.MAX_UNPLACED:
                raise wire.WireError(
                    f"peer {self._name} sent a payload of {size} bytes where at most "
                    f"{wire.MAX_UNPLACED} are allowed. Give `receive` a sink."
                )
            return memoryview(bytearray(size))
        memory = sink(header, size)
        if memory is not None and memory.nbytes != size:
            raise ValueError(
                f"sink gave {memory.nbytes} bytes for a payload of {size} from "
                f"{self._name}. Give memory of just that size, or None to discard it."
            )
        return memory.cast("B") if memory else memory
