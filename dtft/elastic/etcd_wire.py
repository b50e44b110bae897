"""How etcd's JSON gateway spells requests and replies, and its endless responses.

Base64, integers as strings, zero fields left out. Must not know leases' owners, when to
try again, or what the keys are used for.
"""

import base64
import contextlib
import http.client
import json
import select
import socket
import time
from typing import Any, Self

from dtft.elastic.store import (
    Compare,
    Delete,
    Event,
    Events,
    KeyValue,
    LeaseGone,
    Put,
    StoreFull,
    StoreUnavailable,
)

_POLL_S = 0.2  # longest wait of `Stream.receive`
_INVALID_ARGUMENT, _NOT_FOUND = 3, 5  # gRPC codes


def encode(text: str | bytes) -> str:
    """Base64, as the gateway wants keys and values."""
    data = text.encode() if isinstance(text, str) else text
    return base64.b64encode(data).decode()


def prefix_range(prefix: str) -> dict[str, Any]:
    """The range of all keys that begin with `prefix`."""
    if not prefix:
        return {"key": encode(b"\0"), "range_end": encode(b"\0")}  # every key
    first = prefix.encode()  # UTF-8 has no byte 255: the last one can be raised
    end = first[:-1] + bytes([first[-1] + 1])
    return {"key": encode(first), "range_end": encode(end)}


def put_request(put: Put) -> dict[str, Any]:
    """The body of a put."""
    body = {"key": encode(put.key), "value": encode(put.value)}
    return body | {"lease": str(put.lease)} if put.lease else body


def change_request(change: Put | Delete) -> dict[str, Any]:
    """One operation of a transaction."""
    if isinstance(change, Put):
        return {"request_put": put_request(change)}
    return {"request_delete_range": {"key": encode(change.key)}}


def comparison(compare: Compare) -> dict[str, Any]:
    """One condition of a transaction."""
    field = "version" if compare.target == "version" else f"{compare.target}_revision"
    target, key = compare.target.upper(), encode(compare.key)
    return {"key": key, "target": target, "result": "EQUAL", field: str(compare.value)}


def key_value(pair: dict[str, Any]) -> KeyValue:
    """A key as a reply tells it."""
    return KeyValue(
        key=base64.b64decode(pair["key"]).decode(),
        value=base64.b64decode(pair.get("value", "")),
        mod_revision=int(pair.get("mod_revision", 0)),
        create_revision=int(pair.get("create_revision", 0)),
        lease=int(pair.get("lease", 0)),
    )


def event_value(event: dict[str, Any]) -> Event:
    """A change as a watch tells it."""
    kind = "delete" if event.get("type") == "DELETE" else "put"
    return Event(kind=kind, kv=key_value(event["kv"]))


def next_position(position: int, result: dict[str, Any], events: Events) -> int:
    """Where a watch goes on after a message."""
    if events:  # the header may be ahead of them while history is replayed
        return max(event.kv.mod_revision for event in events) + 1
    if result.get("created") and position:
        return position
    # Now, for a watch that starts now; else a progress notice: all up to here was told.
    return max(position, int(result["header"]["revision"]) + 1)


def refusal(said: str, reply: dict[str, Any]) -> Exception:
    """What a reply with an error means.

    Args:
        said: which store was asked for what, the beginning of the error's text.
        reply: of a call, or a message of a watch.
    """
    error = reply["error"]
    if isinstance(error, dict):  # in streams
        code, message = error.get("grpc_code"), error.get("message")
    else:
        code, message = reply.get("code"), error
    if code == _NOT_FOUND and "lease" in str(message):
        return LeaseGone(f"{said}: {message}")
    if code == _INVALID_ARGUMENT:
        return ValueError(f"{said}: {message}")
    if "database space exceeded" in str(message):
        return StoreFull(f"{said}: {message}")
    return StoreUnavailable(f"{said}: {message}")


def shut(connection: http.client.HTTPConnection) -> None:
    """Closes a connection that another thread may be waiting on."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):  # wakes a thread that waits for its reply
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def has_input(sock: socket.socket) -> bool:
    """Whether bytes, or the end, wait to be read."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class Stream:
    """A response without an end, one JSON object per line.

    HTTP/1.0, so that the body is not in chunks and plain `recv` with a timeout can be
    repeated; a timeout makes the reader of `http.client` unusable.
    """

    def __init__(
        self, target: tuple[str, int], timeout_s: float, body: dict[str, Any]
    ) -> None:
        """Connects, asks and reads the head of the answer.

        Args:
            target: host and port.
            timeout_s: limit of each wait until the head is there.
            body: the watch request.

        Raises:
            OSError: no connection, no answer in time, or a refusal.
        """
        self._buffer = b""
        self._heard = time.monotonic()
        self._socket = socket.create_connection(target, timeout=timeout_s)
        try:
            payload = json.dumps(body).encode()
            head = f"POST /v3/watch HTTP/1.0\r\nContent-Length: {len(payload)}\r\n\r\n"
            self._socket.sendall(head.encode() + payload)
            while b"\r\n\r\n" not in self._buffer:
                self._read()
        except BaseException:
            self._socket.close()
            raise
        head_bytes, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        if head_bytes.split(b" ", 2)[1] != b"200":
            self._socket.close()
            raise ConnectionError(f"{head_bytes[:80]!r} {self._buffer[:200]!r}")
        self._socket.settimeout(_POLL_S)

    def __enter__(self) -> Self:
        """Open since it was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the connection."""
        self._socket.close()

    @property
    def quiet_s(self) -> float:
        """Seconds since anything came."""
        return time.monotonic() - self._heard

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if there is none soon."""
        if b"\n" not in self._buffer:
            with contextlib.suppress(TimeoutError):
                self._read()
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        return json.loads(line) if line.strip() else None

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("closed by the store")
        self._buffer += data
        self._heard = time.monotonic()
