"""Replies of etcd's JSON gateway: read to their end, or refused with the reason."""

import http.client
import socket
import time

import pytest

from dtft.elastic.store.etcd_wire import read_reply

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def reply_to(data: bytes, *, ends: bool = True) -> tuple[bytes, bool]:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        if ends:
            there.shutdown(socket.SHUT_WR)
        return read_reply(here, time.monotonic() + (10 if ends else 0.05))


@pytest.mark.parametrize(
    ("data", "body", "closes"),
    [
        (OK + b"Content-Length: 2\r\n\r\n{}", b"{}", False),
        (OK + b"content-length:2\r\nConnection: Close\r\n\r\n{}", b"{}", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"{}", True),
        (OK + b"\r\n{}", b"{}", True),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\n1;x=y\r\n{\r\nb\r\n"
            b'"a": 12345}\r\n0\r\nLast: 1\r\n\r\n',
            b'{"a": 12345}',
            False,
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\n1",
            b"1",
            False,
        ),
        (
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nnone",
            b"none",
            False,
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", False),
    ],
)
def test_the_body_of_every_kind_of_reply(
    data: bytes, body: bytes, closes: bool
) -> None:
    assert reply_to(data) == (body, closes)


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
