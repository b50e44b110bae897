"""Replies of etcd's JSON gateway: read to their end, or refused with the reason."""

import http.client
import http.server
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dtft.elastic.store.address import StoreAddress
from dtft.elastic.store.api import (
    LeaseGone,
    Put,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from dtft.elastic.store.etcd import EtcdStore
from dtft.elastic.store.etcd_wire import read_reply
from dtft.elastic.store.mirror import ThreadMirrors
from tests.support.hosts import wait_until

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def reply_to(data: bytes, *, ends: bool = True) -> tuple[int, bytes, bool]:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        if ends:
            there.shutdown(socket.SHUT_WR)
        return read_reply(here, time.monotonic() + (10 if ends else 0.05))


@pytest.mark.parametrize(
    ("data", "status", "body", "closes"),
    [
        (OK + b"Content-Length: 2\r\n\r\n{}", 200, b"{}", False),
        (OK + b"content-length:2\r\nConnection: Close\r\n\r\n{}", 200, b"{}", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", 200, b"{}", True),
        (OK + b"\r\n{}", 200, b"{}", True),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\n1;x=y\r\n{\r\nb\r\n"
            b'"a": 12345}\r\n0\r\nLast: 1\r\n\r\n',
            200,
            b'{"a": 12345}',
            False,
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\n1",
            200,
            b"1",
            False,
        ),
        (
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nnone",
            503,
            b"none",
            False,
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", False),
    ],
)
def test_the_body_of_every_kind_of_reply(
    data: bytes, status: int, body: bytes, closes: bool
) -> None:
    assert reply_to(data) == (status, body, closes)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", http.client.RemoteDisconnected),
        (b"\x15\x03\x03\x00\x02", http.client.BadStatusLine),
        (b"HTTP/1.1 OK\r\n\r\n", http.client.BadStatusLine),
        (OK + b"no colon\r\n\r\n", http.client.HTTPException),
        (OK, http.client.HTTPException),
        (OK + b"A: b\r\n" * 200, http.client.HTTPException),
        (OK + b"Content-Length: 3\r\n\r\n{}", http.client.IncompleteRead),
        (OK + b"Content-Length: -1\r\n\r\n{}", http.client.HTTPException),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", http.client.HTTPException),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", http.client.HTTPException),
    ],
)
def test_what_is_no_reply(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        reply_to(data)


@pytest.mark.parametrize("data", [b"", OK, OK + b"Content-Length: 3\r\n\r\n{}"])
def test_a_reply_has_a_deadline(data: bytes) -> None:
    with pytest.raises(TimeoutError):
        reply_to(data, ends=False)


# ------------------------------------------------------------- replies to a client

HEADER = {"cluster_id": "14841639068965178418", "revision": "7"}
NO_LEASE = "etcdserver: requested lease not found"


class Gateway(http.server.ThreadingHTTPServer):
    """A server whose replies a test chooses; the last one of a path is repeated."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Replies)
        self.replies: dict[str, list[tuple[int, bytes]]] = {}
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, *replies: tuple[int, Any]) -> None:
        self.replies[f"/v3/{path}"] = [
            (status, body if isinstance(body, bytes) else json.dumps(body).encode())
            for status, body in replies
        ]


class Replies(http.server.BaseHTTPRequestHandler):
    """Sends the replies of a `Gateway`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, Gateway)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        left = self.server.replies[self.path]
        status, body = left.pop(0) if len(left) > 1 else left[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test says what it needs."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def store(gateway: Gateway) -> Iterator[EtcdStore]:
    made = EtcdStore(StoreAddress.parse(gateway.address, private=True), 10.0)
    yield made
    made.close()


def form(version: str, code: int, message: str) -> dict[str, Any]:
    """The body of an error: etcd 3.6 leaves out the field "error"."""
    body = {"code": code, "message": message}
    return body | ({"error": message} if version == "3.5" else {})


@pytest.mark.parametrize("version", ["3.5", "3.6"])
@pytest.mark.parametrize(
    ("status", "code", "message", "error"),
    [
        (404, 5, NO_LEASE, LeaseGone),
        (429, 8, "etcdserver: mvcc: database space exceeded", StoreFull),
        (400, 3, "etcdserver: request is too large", ValueError),
        (403, 7, "etcdserver: permission denied", StoreRefused),
        (503, 14, "etcdserver: request timed out", StoreUnavailable),
        (500, 2, "etcdserver: something new", StoreUnavailable),
    ],
)
def test_a_refused_call_is_an_error_in_either_form(
    gateway: Gateway,
    store: EtcdStore,
    version: str,
    status: int,
    code: int,
    message: str,
    error: type[Exception],
) -> None:
    if code == 14:  # then a grant is repeated until its time is over
        store._timeout_s = 1.0
    for path in ("kv/put", "kv/txn", "lease/grant"):
        gateway.answer(path, (status, form(version, code, message)))
    for call in (
        lambda: store.put("a", b"", lease=7),
        lambda: store.txn([], [Put(key="a", value=b"", lease=7)]),
        lambda: store.grant(5),
    ):
        with pytest.raises(error, match=message) as caught:
            call()
        assert type(caught.value) is error


@pytest.mark.parametrize("error", ["grpc_code", "code"])
def test_a_refused_renewal_is_an_error_in_either_form(
    gateway: Gateway, store: EtcdStore, error: str
) -> None:
    body = {"error": {error: 5, "message": NO_LEASE}}
    gateway.answer("lease/keepalive", (404, body))
    with pytest.raises(LeaseGone, match=NO_LEASE):
        store.keepalive(7)
    gateway.answer("lease/revoke", (404, form("3.6", 5, NO_LEASE)))
    store.revoke(7)


def test_an_invalid_token_leads_to_a_new_login(gateway: Gateway, tmp_path: Any) -> None:
    (tmp_path / "password").write_text("secret")
    gateway.answer("auth/authenticate", (200, {"header": HEADER, "token": "t"}))
    gateway.answer(
        "kv/put",
        (401, form("3.6", 16, "etcdserver: invalid auth token")),
        (200, {"header": HEADER}),
    )
    address = StoreAddress.parse(
        gateway.address, user="u", password_file=tmp_path / "password"
    )
    store = EtcdStore(address)
    store.put("a", b"")
    assert [it.rpartition("/")[2] for it in gateway.asked] == [
        *("authenticate", "put", "authenticate", "put")
    ]
    store.close()


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, {"status": "ok"}, "no reply of etcd .*ok.* Give --store an etcd"),
        (200, {"result": {"status": "ok"}}, "no reply of etcd"),
        (200, {}, "no reply of etcd"),
        (200, [], "no reply of etcd"),
        (200, None, "no reply of etcd"),
        (200, b"<html>", "no reply of etcd .*<html>"),
        (204, b"", "no reply of etcd"),
        (404, {"detail": "Not Found"}, "HTTP status 404: .*Not Found"),
        (404, {"code": "none", "message": "no such path"}, "no such path"),
        (404, [], "HTTP status 404"),
        (502, b"Bad Gateway", "HTTP status 502: Bad Gateway"),
        (200, {"error": 7}, "7"),
    ],
)
def test_another_service_is_no_store(
    gateway: Gateway, store: EtcdStore, status: int, body: Any, text: str
) -> None:
    for path in ("kv/put", "kv/range", "kv/txn", "lease/grant", "lease/keepalive"):
        gateway.answer(path, (status, body))
    for call in (
        lambda: store.put("a", b""),
        lambda: store.get("a"),
        lambda: store.list("a"),
        lambda: store.txn([], []),
        lambda: store.grant(5),
        lambda: store.keepalive(7),
    ):
        with pytest.raises(StoreUnavailable, match=text):
            call()


def test_a_defragmentation_is_answered_without_a_header(
    gateway: Gateway, store: EtcdStore
) -> None:
    for path in ("kv/range", "kv/compaction", "maintenance/alarm"):
        gateway.answer(path, (200, {"header": HEADER}))
    gateway.answer("maintenance/defragment", (200, {}))
    store.reclaim()
    assert gateway.asked[-1] == "/v3/maintenance/alarm"


def test_a_mirror_lives_through_answers_that_lack_fields(
    gateway: Gateway, store: EtcdStore
) -> None:
    told: queue.Queue[int] = queue.Queue()
    short = {"header": {"cluster_id": "1"}}
    kvs = [{"key": "YQ=="}]
    gateway.answer(
        "kv/range",
        (500, form("3.6", 14, "etcdserver: request timed out")),
        (200, {}),
        (200, short),
        (200, {"header": HEADER, "kvs": [{}]}),
        (200, {"header": HEADER, "kvs": kvs}),
    )
    gateway.answer(
        "watch",
        (200, b"[]\n"),
        (200, b'{"result": 1}\n'),
        (200, b'{"result": {}}\n'),
        (200, {"error": {"code": 14, "message": "etcdserver: no leader"}}),
    )
    end = ThreadMirrors(store).mirror("", lambda _, revision: told.put(revision))
    assert told.get(timeout=10) == 7
    wait_until(lambda: gateway.asked.count("/v3/watch") > 4)
    end()
