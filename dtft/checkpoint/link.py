"""The local link between a trainer and its agent: messages over a Unix socket.

One msgpack map per message with a 4-byte length before it. Bytes of state never
travel here; they are in the arena. What the messages mean is not known here.
"""

import contextlib
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

from dtft.checkpoint.socket_owner import peer_of

_LENGTH = struct.Struct("<I")
_LARGEST = 256 << 20


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """An address for a Unix socket at any path; they may only have 107 bytes."""
    directory = os.open(path.parent, os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path) -> socket.socket:
    """A listening Unix socket at `path`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(path) as address:
        listener.bind(address)
    listener.listen(8)
    return listener


def serve(
    listener: socket.socket, hear: Callable[["Link"], None], send_s: int = 0
) -> None:
    """Hears whoever connects, each on a thread of its own, until the listener ends.

    Args:
        listener: from `listen`.
        hear: is given each link.
        send_s: a peer that does not read for so many seconds fails the send to it; 0
            for no limit.
    """

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            limit = struct.pack("ll", send_s, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            link = Link(connection)
            threading.Thread(target=hear, args=(link,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def packed(op: str, fields: Mapping[str, Any]) -> bytes:
    """A message as it is sent.

    Raises:
        TypeError, ValueError, OverflowError: a value cannot be sent.
    """
    body = msgpack.packb({"op": op, **fields})
    assert body is not None
    return _LENGTH.pack(len(body)) + body


class LinkClosed(ConnectionError):
    """The process at the other end has gone."""


class NotReading(LinkClosed):
    """The process at the other end is there, but has read nothing for the limit."""


class Link:
    """One connected end; sending is thread-safe, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        """Wraps a connected stream socket."""
        self._socket = connection
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, path: Path, timeout_s: float) -> "Link":
        """Connects to the agent that listens at `path`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            with _address(path) as address:
                connection.connect(address)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        return cls(connection)

    def send(self, op: str, **fields: Any) -> None:
        """Sends one message.

        Raises:
            LinkClosed: the other end has gone.
            NotReading: it does not read; only with a limit, see `serve`.
        """
        self.send_packed(packed(op, fields))

    def send_packed(self, message: bytes) -> None:
        """As `send`, of what `packed` made."""
        try:
            with self._lock:
                self._socket.sendall(message)
        except BlockingIOError as error:  # SO_SNDTIMEO, see `serve`
            raise NotReading("nothing was read at the other end") from error
        except OSError as error:
            raise LinkClosed(f"sending failed: {error}") from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits for the next message; the other end's death ends the wait.

        Args:
            timeout_s: limit of every wait for bytes, also of those after this one.

        Raises:
            LinkClosed: the other end has gone.
            TimeoutError: nothing came within `timeout_s`.
        """
        try:
            self._socket.settimeout(timeout_s)
        except OSError as error:
            raise LinkClosed("the link was closed here") from error
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _LARGEST:
            raise LinkClosed(f"message of {length} bytes refused, at most {_LARGEST}")
        return msgpack.unpackb(self._exactly(length), strict_map_key=False)

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkClosed(f"receiving failed: {error}") from error
            if not part:
                raise LinkClosed("the other end closed the link")
            parts += part
        return bytes(parts)

    def wait_closed(self) -> None:
        """Waits until the other end has gone; takes nothing from who receives here."""
        ended = select.poll()
        ended.register(self._socket, select.POLLRDHUP)
        ended.poll()

    @property
    def peer(self) -> tuple[int, int]:
        """Process id and user id at the other end, from the kernel.

        Raises:
            OSError: the link was closed here.
        """
        return peer_of(self._socket)

    def close(self) -> None:
        """Closes the socket; a receiving thread gets LinkClosed."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class Outbox:
    """Sends on a thread of its own, in order: whoever has more to do goes on at once.

    A send wakes the other end, which on a busy machine runs before the sender does; and
    one to a process that does not read waits, which an event loop must not.
    """

    def __init__(
        self, link: Link, failed: Callable[[LinkClosed], None] | None = None
    ) -> None:
        """Starts the thread.

        Args:
            link: to send over.
            failed: called once on the thread, which then ends, when a send fails. By
                default nobody is told: whoever receives from the link knows.
        """
        self._link, self._failed = link, failed
        self._messages: queue.Queue[bytes | None] = queue.Queue()
        self._closes_link = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, op: str, **fields: Any) -> None:
        """Queues one message. What cannot be sent is refused here: see `packed`."""
        self._messages.put(packed(op, fields))

    def close(self, *, link: bool = False) -> None:
        """Ends the thread once everything is sent, and with `link` the link then."""
        self._closes_link = self._closes_link or link
        self._messages.put(None)

    def join(self, limit_s: float) -> None:
        """Waits until the thread has ended, but not longer than `limit_s`."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._link.send_packed(message)
        except LinkClosed as error:
            if self._failed is not None:
                self._failed(error)
        if self._closes_link:
            self._link.close()
