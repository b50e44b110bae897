"""A TCP proxy between two hosts that knows dtft's frames and does one thing wrong.

It reads both directions message by message (greeting, proof, then frames), so a fault
can name the message and the field that it hits. Real sockets on loopback.
"""

import contextlib
import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.dialing import parse_address

Kind = Literal[
    "flip",
    "truncate",
    "reset",
    "drop",
    "duplicate",
    "reorder",
    "replay",
    "stall",
    "slow",
    "kill",
    "die",
    "memory",
]
"""`kill` plays a peer's death, `die` has `on_fault` really kill it, and `memory` leaves
the bytes as they are: what goes wrong then is up to `on_fault`."""
Direction = Literal["up", "down"]
PREFIX_FIELDS = {
    "magic": 4,
    "version": 1,
    "pad": 3,
    "header size": 4,
    "payload size": 8,
}
_libc = ctypes.CDLL(None, use_errno=True)
STALL_S = 1.0
"""How long a stalled connection stands still: longer than the hosts wait here."""
PROXY_S = 20.0
"""Longest life of a proxied connection."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One field of one message."""

    connection: int
    """Number of the connection, in the order in which they came, or a later one."""
    direction: Direction
    """From client to server, or back."""
    message: int
    """Number of the message on that connection in that direction."""
    field: str
    offset: int
    """Where the field starts in the message."""
    size: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, where, and at which bit of the field."""

    kind: Kind
    place: Place
    bit: int = 0
    old: bytes = b""
    """For `replay`: the bytes that arrive in the message's stead."""


class FaultProxy:
    """Forwards to one server; does at most one fault, once."""

    def __init__(self, target: str, fault: Fault | None = None) -> None:
        """Listens on loopback, at `address`.

        Args:
            target: "host:port" of the server.
            fault: what goes wrong; None only records.
        """
        self.fault, self.fired = fault, threading.Event()
        self.places: list[Place] = []
        self.messages: dict[tuple[int, Direction, int], bytes] = {}
        self.on_fault: Callable[[], None] = lambda: None
        self._target = parse_address(target)
        self._sockets: list[socket.socket] = []
        self._lock, self._dead = threading.Lock(), False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=32)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """What clients see when the server's process dies: resets, then refusals."""
        with self._lock:
            self._dead = True
            sockets, self._sockets = self._sockets, []
        self._refuse()
        for one in sockets:
            _reset(one)

    def _refuse(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, 5)
            except OSError:
                _reset(client)
                continue
            with self._lock:
                if self._dead:
                    _reset(client)
                    _reset(server)
                    return
                self._sockets += [client, server]
                client.settimeout(PROXY_S)
                server.settimeout(PROXY_S)
            for direction, source, sink in (
                ("up", client, server),
                ("down", server, client),
            ):
                threading.Thread(
                    target=self._pump,
                    args=(number, direction, source, sink),
                    daemon=True,
                ).start()
            number += 1

    def _pump(
        self,
        connection: int,
        direction: Direction,
        source: socket.socket,
        sink: socket.socket,
    ) -> None:
        number, held = 0, b""
        try:
            while True:
                message, fields = _read(source, number)
                self._record(connection, direction, number, message, fields)
                for part in self._changed(connection, direction, number, message):
                    if part is None:  # goes after the next message
                        held = message
                        continue
                    sink.sendall(part)
                if held and held is not message:
                    sink.sendall(held)
                    held = b""
                number += 1
        except _Reset:
            _reset(sink)
            _reset(source)
        except (OSError, EOFError, struct.error):
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _record(
        self,
        connection: int,
        direction: Direction,
        number: int,
        message: bytes,
        fields: dict[str, int],
    ) -> None:
        if self.fault is not None:
            return
        offset = 0
        self.messages[connection, direction, number] = message
        for name, size in fields.items():
            if size:
                self.places.append(
                    Place(
                        connection=connection,
                        direction=direction,
                        message=number,
                        field=name,
                        offset=offset,
                        size=size,
                    )
                )
            offset += size

    def _changed(
        self, connection: int, direction: Direction, number: int, message: bytes
    ) -> Iterable[bytes | None]:
        """What is forwarded instead of a message; None holds it back once."""
        fault = self.fault
        if fault is None or self.fired.is_set():
            return [message]
        place = fault.place
        here = place.direction == direction and place.message == number
        if not here or connection < place.connection:
            return [message]
        if place.offset + place.size > len(message):
            return [message]  # this run's message is a shorter one
        self.fired.set()
        if fault.kind in ("kill", "die", "memory"):
            self.on_fault()
        if fault.kind in ("kill", "die"):
            self._refuse()
        if fault.kind == "kill":
            self.kill()
        return _faulty(fault, message)


def _faulty(fault: Fault, message: bytes) -> Iterator[bytes | None]:
    middle = fault.place.offset + fault.bit // 8
    if fault.kind == "flip":
        flipped = bytearray(message)
        flipped[middle] ^= 1 << fault.bit % 8
        yield bytes(flipped)
    elif fault.kind == "duplicate":
        yield message
        yield message
    elif fault.kind == "reorder":
        yield None
    elif fault.kind == "replay":
        yield fault.old
    elif fault.kind == "memory":
        yield message
    elif fault.kind == "slow":
        step = max(len(message) // 10, 1)
        for start in range(0, len(message), step):
            time.sleep(0.005)
            yield message[start : start + step]
    elif fault.kind != "drop":
        yield message[:middle]
        if fault.kind in ("reset", "kill"):
            raise _Reset
        if fault.kind in ("truncate", "die"):
            raise EOFError
        time.sleep(STALL_S)
        yield message[middle:]


class _Reset(Exception):
    """The connection is to end with a reset."""


def _read(source: socket.socket, number: int) -> tuple[bytes, dict[str, int]]:
    """The next message of one direction and the sizes of its fields."""
    if number == 0:
        fields = {"magic": 4, "version": 1, "pad": 3, "nonce": 32}
        return _exactly(source, protocol.GREETING_BYTES), fields
    if number == 1:
        return _exactly(source, protocol.PROOF_BYTES), {"proof": protocol.PROOF_BYTES}
    start = _exactly(source, protocol.FRAME_START_BYTES)
    header_bytes, payload_bytes = protocol.decode_prefix(start[: protocol.PREFIX_BYTES])
    rest = _exactly(source, header_bytes + protocol.SEAL_BYTES + payload_bytes)
    fields = PREFIX_FIELDS | {
        "prefix seal": protocol.SEAL_BYTES,
        "header": header_bytes,
        "header seal": protocol.SEAL_BYTES,
        "payload": payload_bytes,
    }
    return start + rest, fields


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _reset(connection: socket.socket) -> None:
    """Sends a reset, though another thread may be waiting on the socket."""
    with contextlib.suppress(OSError):
        unspecified = bytes(16)  # connecting to no address disconnects
        _libc.connect(connection.fileno(), unspecified, len(unspecified))
        connection.close()
