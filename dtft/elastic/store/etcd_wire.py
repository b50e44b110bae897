"""The wire format of etcd's JSON gateway, and the sockets that carry it.

Keys and values are in Base64, integers are strings, and fields of value 0 are left out.
Calls use HTTP/1.1, endless responses HTTP/1.0. Every wait on the network ends at a
deadline that the caller gives (`end`, a time of `time.monotonic` in seconds). Only the
wait for the next message of an endless response has a fixed limit, 0.2 s.
"""

import base64
import contextlib
import functools
import http.client
import io
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from dtft.elastic.store.address import endpoint_text
from dtft.elastic.store.api import (
    Compare,
    Delete,
    Events,
    KeyValue,
    LeaseGone,
    Put,
    StoreEvent,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)

_POLL_S = 0.2  # longest wait of `EtcdStream.receive`
# gRPC codes
_INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _NOT_FOUND, _UNAVAILABLE = 3, 4, 5, 14
_NEW_TOKEN = (
    # The last text: users changed after the call was accepted, before it was applied.
    *("invalid auth token", "revision of auth store is old", "token is expired"),
    "auth: revision in header is old",
)
_NOT_APPLIED = (
    *("etcdserver: no leader", "etcdserver: not leader", "raft proposal dropped"),
    *("too many requests", "rpc not supported for learner"),
)
_REFUSED = {
    "authentication failed": "Change --store-user or the text in --store-password-file",
    "user name is empty": "This etcd asks who calls: give --store-user NAME and "
    "--store-password-file FILE",
    "user name not found": "Change --store-user",
    "permission denied": "Give --store-user a user who may read and write below "
    "--store-prefix P: etcdctl role grant-permission ROLE readwrite --prefix=true P/",
    "CommonName of client": "An etcd with users takes no certificate that has a common "
    "name (CN) through its JSON gateway: give --store-cert one whose subject has none, "
    "as of openssl req -subj /O=NAME",
    "authentication is not enabled": "This etcd has no users: leave --store-user out",
}


def encode(text: str | bytes) -> str:
    """Encodes a key or value in Base64 for the gateway."""
    data = text.encode() if isinstance(text, str) else text
    return base64.b64encode(data).decode()


def prefix_range(prefix: str) -> dict[str, Any]:
    """Returns etcd's key range of all keys with `prefix`, which must not be empty."""
    first = prefix.encode()  # UTF-8 has no byte 255, so the last byte can be raised
    end = first[:-1] + bytes([first[-1] + 1])
    return {"key": encode(first), "range_end": encode(end)}


def put_request(put: Put, below: str) -> dict[str, Any]:
    """Encodes a put as a request body; `below` is the client's key prefix."""
    body = {"key": encode(below + put.key), "value": encode(put.value)}
    return body | {"lease": str(put.lease)} if put.lease else body


def change_request(change: Put | Delete, below: str) -> dict[str, Any]:
    """Encodes one change of a transaction; `below` is the client's key prefix."""
    if isinstance(change, Put):
        return {"request_put": put_request(change, below)}
    return {"request_delete_range": {"key": encode(below + change.key)}}


def comparison(compare: Compare, below: str) -> dict[str, Any]:
    """Encodes one compare of a transaction; `below` is the client's key prefix."""
    target, key = compare.target, encode(below + compare.key)
    field = target if target in ("version", "value") else f"{target}_revision"
    found = compare.value
    text = encode(found) if isinstance(found, bytes) else str(found)
    return {"key": key, "target": target.upper(), "result": "EQUAL", field: text}


def key_value(pair: dict[str, Any], below: str) -> KeyValue:
    """Decodes a key-value pair of a reply; removes the prefix `below` from its key."""
    return KeyValue(
        key=base64.b64decode(pair["key"]).decode().removeprefix(below),
        value=base64.b64decode(pair.get("value", "")),
        mod_revision=int(pair.get("mod_revision", 0)),
        create_revision=int(pair.get("create_revision", 0)),
        lease=int(pair.get("lease", 0)),
    )


def event_value(event: dict[str, Any], below: str) -> StoreEvent:
    """Decodes one event of a watch message; removes the prefix `below` from its key."""
    kind = "delete" if event.get("type") == "DELETE" else "put"
    return StoreEvent(kind=kind, kv=key_value(event["kv"], below))


def next_position(position: int, result: dict[str, Any], events: Events) -> int:
    """Returns the revision from which a watch continues after a message.

    Args:
        position: the revision from which the watch continued before the message.
        result: field `result` of the message.
        events: the events of the message; empty for a progress notice, for example.
    """
    if events:  # while history is replayed, the header's revision is newer
        return max(event.kv.mod_revision for event in events) + 1
    if result.get("created") and position:
        return position
    # The watch starts now, or this progress notice says that all events were sent.
    return max(position, int(result["header"]["revision"]) + 1)


def decode_reply(path: str, status: int, body: bytes) -> dict[str, Any]:
    """Decodes the reply to a call; an error reply has the field "error".

    A reply with an HTTP status of 400 or more is an error reply, whatever its body is:
    etcd 3.6 leaves out the field "error" that etcd 3.5 sends. A reply that no etcd
    sends becomes an error reply, too. All replies of etcd have a header with the
    cluster's id, except that the reply to `maintenance/defragment` is empty.

    Args:
        path: URL path of the call.
        status: HTTP status of the reply.
        body: body of the reply.
    """
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    reply = found if isinstance(found, dict) else {}
    is_error = status >= 400 or "error" in reply
    if is_error and (message := error_text(reply)):
        return {"error": message, "code": grpc_code(reply)}
    result = reply.get("result")  # of a stream
    header = (result if isinstance(result, dict) else reply).get("header")
    named = isinstance(header, dict) and "cluster_id" in header
    if not is_error and (named or path == "maintenance/defragment" and found == {}):
        return reply
    shown = f"HTTP status {status}: {body[:200].decode(errors='replace')}"
    if is_error:
        return {"error": shown, "code": grpc_code(reply)}
    return {"error": f"this is no reply of etcd ({shown}). Give --store an etcd"}


def grpc_code(reply: Mapping[str, Any]) -> int:
    """Returns the gRPC code of an error reply to a call or watch; 0 for no code.

    The code is in the field "code"; for a watch and `lease/keepalive` it is in the
    field "error", as "grpc_code" (etcd 3.5) or "code" (etcd 3.6).
    """
    error = reply.get("error")
    fields = error if isinstance(error, dict) else reply
    found = fields.get("grpc_code", fields.get("code"))
    return found if isinstance(found, int) else 0


def error_text(reply: Mapping[str, Any]) -> str:
    """Returns the error message of an error reply; "" for no message.

    The message is the field "error" (etcd 3.5) or "message" (etcd 3.6); for a watch and
    `lease/keepalive` it is the field "message" of "error".
    """
    error = reply.get("error", reply.get("message", ""))
    return str(error.get("message", error) if isinstance(error, dict) else error)


def wants_token(message: str) -> bool:
    """Whether an error message means that the login token is invalid.

    A call with an invalid token was not applied.
    """
    return any(text in message for text in _NEW_TOKEN)


def not_applied(message: str) -> bool:
    """Whether an error message means that this member did not apply the call.

    The call may then be sent to another member.

    >>> not_applied("etcdserver: no leader"), not_applied("request timed out")
    (True, False)
    """
    return any(text in message for text in _NOT_APPLIED)


def may_answer_elsewhere(reply: Mapping[str, Any]) -> bool:
    """Whether an error reply has gRPC code DEADLINE_EXCEEDED or UNAVAILABLE.

    Another member may then answer the call. The call may have been applied already.
    """
    return grpc_code(reply) in (_DEADLINE_EXCEEDED, _UNAVAILABLE)


def refusal(said: str, reply: Mapping[str, Any]) -> Exception:
    """Makes the exception for an error reply.

    Returns StoreRefused if the store refuses this client, LeaseGone for a missing
    lease, StoreFull for a used-up quota, ValueError for an otherwise invalid request,
    and StoreUnavailable for every other error.

    Args:
        said: first words of the exception's text: the store and the operation.
        reply: error reply to a call, or error message of a watch.
    """
    code, message = grpc_code(reply), error_text(reply)
    for text, cure in _REFUSED.items():
        if text in message:
            return StoreRefused(f"{said}: {message.strip()}. {cure}.")
    if code == _NOT_FOUND and "lease" in message:
        return LeaseGone(f"{said}: {message}")
    if "database space exceeded" in message:
        return StoreFull(f"{said}: {message}")
    if code == _INVALID_ARGUMENT and not wants_token(message):
        return ValueError(f"{said}: {message}")
    return StoreUnavailable(f"{said}: {message}")


def tls_refusal(error: object, own_certificate: bool) -> str:
    """Describes a TLS refusal and its remedy; "" if `error` is not a TLS refusal.

    Args:
        error: error of a connection that uses TLS.
        own_certificate: whether this client presents a certificate.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate was not accepted: {error.verify_message} Give --store-ca "
            "the authority that signed it, and --store a host that it names."
        )
    asked = not own_certificate and isinstance(error, ConnectionError)
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason:
            return "it does not speak TLS. Leave --store-ca out, or change --store."
        asked = "ALERT" in reason and ("CERTIFICATE" in reason or "CA" in reason)
    if not asked:
        return ""
    return (
        f"it refused this client in the TLS handshake ({error}). Give --store-cert and "
        "--store-key a pair signed by the authority that etcd trusts."
    )


def left_s(end: float) -> float:
    """Returns the seconds until the time `end` of `time.monotonic`.

    Raises:
        TimeoutError: `end` has passed.
    """
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def connect(
    endpoint: tuple[str, int], context: ssl.SSLContext | None, end: float
) -> socket.socket:
    """Connects to one member; makes the TLS handshake if there is a context.

    Raises:
        OSError: there is no connection by the time `end`.
    """
    problem: OSError = TimeoutError("timed out")
    addresses = _addresses(*endpoint, end)
    for number, (family, address) in enumerate(addresses):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left_s(end) / (len(addresses) - number))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                sock.settimeout(left_s(end))
                sock = context.wrap_socket(sock, server_hostname=endpoint[0])
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise problem


def _addresses(host: str, port: int, end: float) -> list[tuple[int, Any]]:
    """Resolves a host name on a thread, which is abandoned if the resolver hangs.

    Returns:
        For each address: the address family, and the socket address with the port, as
        Python's module `socket` takes them.

    Raises:
        OSError: the name cannot be resolved by the time `end`.
    """
    find = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    with contextlib.suppress(socket.gaierror):  # a numeric address needs no resolver
        return [(it[0], it[4]) for it in find(flags=socket.AI_NUMERICHOST)]
    found: list[tuple[int, Any]] = []
    problem: list[OSError] = []

    def resolve() -> None:
        try:
            found.extend((it[0], it[4]) for it in find())
        except OSError as error:
            problem.append(error)

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(left_s(end))
    if found:
        return found
    raise problem[0] if problem else TimeoutError(f"no address of {host} in time")


class _Readable(io.RawIOBase):
    """The reading side of a socket, with one deadline for all reads together."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        super().__init__()
        self._sock, self._end = sock, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(left_s(self._end))
        return self._sock.recv_into(buffer)


_LONGEST_LINE, _MOST_HEADERS = 1 << 16, 100


def read_reply(sock: socket.socket, end: float) -> tuple[int, bytes, bool]:
    """Reads one HTTP/1 reply.

    Python's `http.client` is not used here: it parses headers like those of an e-mail,
    which takes longer than everything else in a call.

    Returns:
        The HTTP status, the body, and whether the peer then disconnects.

    Raises:
        OSError: no complete reply by the time `end`.
        http.client.HTTPException: the received bytes are not an HTTP reply.
    """
    with io.BufferedReader(_Readable(sock, end)) as reader:
        version, status, headers = _reply_head(reader)
        while status == 100:  # "Continue": the reply follows
            version, status, headers = _reply_head(reader)
        closes = version < b"HTTP/1.1" or headers.get(b"connection") == b"close"
        if status in (204, 304):
            return status, b"", closes
        try:
            if headers.get(b"transfer-encoding") == b"chunked":
                return status, _chunked_body(reader), closes
            if b"content-length" in headers:
                body = _exactly(reader, int(headers[b"content-length"]))
                return status, body, closes
        except ValueError as error:
            raise http.client.HTTPException(f"a wrong length: {error}") from error
        return status, reader.read(), True


def _reply_head(
    reader: io.BufferedIOBase,
) -> tuple[bytes, int, Mapping[bytes, bytes]]:
    """Reads the status line and the headers of a reply.

    Returns:
        HTTP version, status code, and a mapping of header name to value, both in lower
        case.
    """
    line = reader.readline(_LONGEST_LINE)
    if not line:
        raise http.client.RemoteDisconnected(
            "Remote end closed connection without response"
        )
    version, _, rest = line.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise http.client.BadStatusLine(repr(line[:80]))
    headers: dict[bytes, bytes] = {}
    for _ in range(_MOST_HEADERS):
        line = reader.readline(_LONGEST_LINE)
        if line in (b"\r\n", b"\n"):
            return version, int(rest[:3]), headers
        name, colon, value = line.partition(b":")
        if not colon or not line.endswith(b"\n"):
            raise http.client.HTTPException(f"a wrong header: {line[:80]!r}")
        headers[name.strip().lower()] = value.strip().lower()
    raise http.client.HTTPException(f"more than {_MOST_HEADERS} headers")


def _chunked_body(reader: io.BufferedIOBase) -> bytes:
    parts = list[bytes]()
    while size := int(reader.readline(_LONGEST_LINE).partition(b";")[0], 16):
        parts.append(_exactly(reader, size))
        reader.readline(_LONGEST_LINE)  # the end of the chunk
    while reader.readline(_LONGEST_LINE) not in (b"\r\n", b"\n", b""):
        pass  # headers after the body
    return b"".join(parts)


def _exactly(reader: io.BufferedIOBase, size: int) -> bytes:
    if size < 0:
        raise ValueError(f"{size} bytes")
    found = reader.read(size)
    if len(found) < size:
        raise http.client.IncompleteRead(found, size - len(found))
    return found


class Connection:
    """One HTTP/1.1 connection to one member, for one call at a time."""

    def __init__(
        self, endpoint: tuple[str, int], context: ssl.SSLContext | None
    ) -> None:
        """Stores the address and the TLS context (None: no TLS); does not connect."""
        self.endpoint, self._context = endpoint, context
        self._sock: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent.

        If the peer has closed the connection, closes this end, too.
        """
        if self._sock is not None and _has_input(self._sock):
            self.close()  # on an idle connection, input means that the peer closed
        return self._sock is not None

    def open(self, end: float) -> None:
        """Connects to the member.

        Raises:
            OSError: there is no connection by the time `end`; nothing was sent.
        """
        self._sock = connect(self.endpoint, self._context, end)

    def post(
        self, path: str, body: bytes, headers: Mapping[str, str], end: float
    ) -> tuple[int, bytes]:
        """Sends one request; returns the HTTP status and the body of the reply.

        Raises:
            OSError: no complete reply by `end`; the request may have been applied.
            http.client.HTTPException: the received bytes are not an HTTP reply.
        """
        if self._sock is None:
            raise ConnectionError("the connection is closed")
        sock = self._sock
        sock.settimeout(left_s(end))
        sock.sendall(_request(self.endpoint, path, body, headers, "1.1"))
        status, found, closes = read_reply(sock, end)
        if closes:
            self.close()
        return status, found

    def close(self) -> None:
        """Closes the connection, which may be opened again."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def shut(self) -> None:
        """Closes the connection from another thread; wakes a thread that reads."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        self.close()


def _request(
    endpoint: tuple[str, int],
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    version: str,
) -> bytes:
    lines = [f"POST /v3/{path} HTTP/{version}", f"Host: {endpoint_text(endpoint)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def _has_input(sock: socket.socket) -> bool:
    """Whether a read of the socket would return at once.

    It returns bytes that have arrived, or no bytes if the peer has closed the stream.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class EtcdStream:
    """An endless response with one JSON object per line.

    Uses HTTP/1.0, so the body is not chunked and plain `recv` can be repeated after a
    timeout. The reader of `http.client` cannot be used after a timeout.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        context: ssl.SSLContext | None,
        body: dict[str, Any],
        headers: Mapping[str, str],
        end: float,
    ) -> None:
        """Connects, sends a watch request and reads the header of the response.

        Args:
            endpoint: host and port.
            context: TLS context; None for no TLS.
            body: the watch request.
            headers: headers of the request.
            end: time (`time.monotonic`) by which the response's header must be there.

        Raises:
            OSError: no connection, no response in time, or a refusal.
        """
        self._buffer = b""
        self._heard = time.monotonic()
        self._socket = connect(endpoint, context, end)
        try:
            payload = json.dumps(body).encode()
            self._socket.settimeout(left_s(end))
            self._socket.sendall(_request(endpoint, "watch", payload, headers, "1.0"))
            while b"\r\n\r\n" not in self._buffer:
                self._socket.settimeout(left_s(end))
                self._read()
            head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
            if head.split(b" ", 2)[1] != b"200":
                raise ConnectionError(self._refused(head, end))
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(_POLL_S)

    def _refused(self, head: bytes, end: float) -> str:
        """Returns the start of a refusal's header and body, for an error text.

        `head` is the header. Waits until 200 bytes of the body have arrived, the body
        is over, or the deadline `end` has passed.
        """
        with contextlib.suppress(OSError):
            while len(self._buffer) < 200:
                self._socket.settimeout(left_s(end))
                self._read()
        return f"{head[:80]!r} {self._buffer[:200]!r}"

    def __enter__(self) -> Self:
        """Returns this stream, which the constructor has opened."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self._socket.close()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last received bytes."""
        return time.monotonic() - self._heard

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message; None if none arrives within 0.2 s.

        Raises:
            OSError: the connection has ended.
            ValueError: the received bytes are not a message of etcd.
        """
        if b"\n" not in self._buffer:
            with contextlib.suppress(TimeoutError):
                self._read()
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        if not line.strip():
            return None
        message = json.loads(line)
        if not isinstance(message, dict) or not (
            "error" in message or isinstance(message.get("result"), dict)
        ):
            raise ValueError(f"this is no message of etcd: {line[:200]!r}")
        return message

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("closed by the store")
        self._buffer += data
        self._heard = time.monotonic()
