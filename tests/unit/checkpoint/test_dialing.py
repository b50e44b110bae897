"""Addresses are read and written in one way, and connecting ends in time."""

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.transport import dialing
from dtft.checkpoint.transport.connection import Channel
from dtft.checkpoint.transport.dialing import (
    dial,
    format_address,
    is_loopback,
    local_host,
    parse_address,
    resolve,
    with_port,
)
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.server import TransportServer, connect
from tests.support.hosts import echo

JOB = Credentials(job="job", secret=b"s" * 32)
IPV6 = "::1"


@pytest.mark.parametrize("host", ["10.0.0.5", "node-5.rack", "::1", "fe80::1%eth0"])
def test_what_is_written_is_read(host: str) -> None:
    assert parse_address(format_address(host, 7000)) == (host, 7000)
    assert with_port(format_address(host, 7000), 1) == format_address(host, 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":80", "host:65536", "host:-1", "host:+1", "host:1_0"),
        *("::1:80", "[::1]", "[::1:80", "::1]:80", "[host]:80", "[[::1]]:80", "[]:80"),
        *("http://host:80", "a@b:80", "a b:80", "a\n:80", "x" * 300 + ":80"),
        *("host:" + "9" * 5000, "host:٣"),
    ],
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT\. Allowed: .*brackets"):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_not(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ValueError:
        return
    assert parse_address(format_address(host, port)) == (host, port)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_hosts_meet_over_both_kinds_of_ip(bind: str) -> None:
    server = TransportServer(bind, JOB, {"echo": echo})
    try:
        assert server.address.startswith("[::1]:" if IPV6 in bind else "127.0.0.1:")
        with connect(server.address, JOB, {"op": "echo"}, 5) as channel:
            assert channel.address == server.address
            channel.send({"n": 1}, timeout_s=5)
            assert channel.receive(5)[0] == {"n": 1}
    finally:
        server.close()
    with pytest.raises(ConnectionRefusedError):
        connect(server.address, JOB, {"op": "echo"}, 5)


def test_who_calls_over_ipv6_is_named() -> None:
    heard: list[str] = []

    def hear(channel: Channel) -> None:
        heard.append(channel.address)
        echo(channel)

    server = TransportServer("[::1]:0", JOB, {"echo": hear})
    try:
        with connect(server.address, JOB, {"op": "echo"}, 5) as channel:
            channel.send({}, timeout_s=5)
            channel.receive(5)
        assert parse_address(heard[0])[0] == IPV6
    finally:
        server.close()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "[fe80::1]:0"])
def test_an_address_that_peers_cannot_reach_is_refused(bind: str) -> None:
    with pytest.raises(ValueError, match=r"could connect to: .*Change --bind"):
        TransportServer(bind, JOB, {})


def test_a_name_is_looked_up_once_for_all_and_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resolver that hangs: none can be had here, so the system's is held up."""
    asked, go_on, real = [], threading.Event(), dialing._ask

    def slow(host: str, port: int, flags: int) -> dialing.Found:
        if host == "node-5" and not flags & socket.AI_NUMERICHOST:
            asked.append(host)
            assert go_on.wait(20)
            host = "127.0.0.1"
        return real(host, port, flags)

    monkeypatch.setattr(dialing, "_ask", slow)
    begun = time.monotonic()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"'node-5' was not found within 0\.1 s"):
            dial("node-5:80", 0.1)
    with pytest.raises(TimeoutError, match=r"peer node-5:80: 0\.1 s connecting"):
        connect("node-5:80", JOB, {}, 0.1)
    assert time.monotonic() - begun < 10 and asked == ["node-5"]
    assert resolve("10.0.0.5", 80, 0) == [(socket.AF_INET, ("10.0.0.5", 80))]
    go_on.set()
    assert resolve("node-5", 80, 5) == [(socket.AF_INET, ("127.0.0.1", 80))]


def test_a_name_is_looked_up_again_after_no_thread_could_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        for _ in range(2):
            with pytest.raises(OSError, match="peer localhost:1: .*'localhost' cannot"):
                connect("localhost:1", JOB, {}, 5)
    assert dialing._lookups == {}
    assert resolve("localhost", 80, 5)


def test_a_name_that_is_not_known_is_an_error() -> None:
    with pytest.raises(OSError, match="is no name"):
        dial("a..b:80", 5)
    with pytest.raises(OSError) as caught:
        dial("no-such-host.invalid:80", 20)
    assert not isinstance(caught.value, ConnectionRefusedError)


def test_every_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a host that refuses at all of its addresses is provably dead."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        refusing = (socket.AF_INET6, ("::1", port, 0, 0))
        there = (socket.AF_INET, ("127.0.0.1", port))
        nowhere = (socket.AF_INET6, ("100::1", port, 0, 0))  # discarded by all
        found: dialing.Found = []
        monkeypatch.setattr(dialing, "resolve", lambda *_: found)
        found[:] = [refusing, there]
        dial(f"host:{port}", 5).close()
        found[:] = [nowhere, there]
        begun = time.monotonic()
        dial(f"host:{port}", 20).close()
        assert time.monotonic() - begun < 15
        found[:] = [refusing, refusing]
        with pytest.raises(ConnectionRefusedError):
            dial(f"host:{port}", 5)
        found[:] = [nowhere, refusing]
        with pytest.raises(OSError) as caught:
            dial(f"host:{port}", 0.5)
        assert not isinstance(caught.value, ConnectionRefusedError)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_host_reaches_itself_over_loopback(host: str) -> None:
    assert is_loopback(local_host(host, 5.0))


def test_another_machine_is_not_reached_over_loopback() -> None:
    try:
        found = local_host("192.0.2.1", 5.0)
    except OSError as error:
        pytest.skip(f"this machine has no route there: {error}")
    assert not is_loopback(found)
