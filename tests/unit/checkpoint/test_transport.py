"""Real sockets: bytes arrive whole, waits end, and hostile clients change nothing."""

import logging
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport import server as transport
from dtft.checkpoint.transport.connection import Channel, ChannelClosed, SocketStream
from dtft.checkpoint.transport.protocol import Credentials
from dtft.checkpoint.transport.server import TransportServer, connect
from tests.support.hosts import echo, wait_until

JOB = Credentials(job="job", secret=b"s" * 32)
Handler = Callable[[Channel], None]
Serve = Callable[..., TransportServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[TransportServer] = []

    def start(max_connections: int = 100, **handlers: Handler) -> TransportServer:
        server = TransportServer(
            "127.0.0.1:0", JOB, handlers, max_connections=max_connections
        )
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def call(server: TransportServer, op: str = "echo", **hello: object) -> Channel:
    return connect(server.address, JOB, {"op": op, **hello}, 5)


def raw(server: TransportServer) -> socket.socket:
    return socket.create_connection(transport.parse_address(server.address), 5)


def start_of_frame(channel: Channel, header: dict, payload_bytes: int) -> bytes:
    """A frame up to its payload, sealed as the next one of the channel."""
    assert channel._sealer is not None
    return channel._sealer.frame(header, payload_bytes)


def assert_serves(server: TransportServer) -> None:
    with call(server) as channel:
        channel.send({"still": "alive"}, [b"x"], timeout_s=5)
        header, payload = channel.receive(5)
        assert (header, bytes(payload)) == ({"still": "alive"}, b"x")


def test_payload_parts_arrive_as_one(serve: Serve) -> None:
    parts = [os.urandom(random.Random(i).choice([0, 1, 100])) for i in range(3000)]
    with call(serve(echo=echo)) as channel:
        channel.send({"n": {2: [b"\x00", None]}}, parts, timeout_s=5)
        header, payload = channel.receive(5)
    assert header == {"n": {2: [b"\x00", None]}}
    assert bytes(payload) == b"".join(parts)


def test_large_payload_goes_straight_into_the_sinks_memory(serve: Serve) -> None:
    data, memory = os.urandom(20 << 20), bytearray(20 << 20)
    done = threading.Event()

    def take(channel: Channel) -> None:
        channel.receive(10, lambda header, size: memoryview(memory))
        done.set()

    with call(serve(echo=take)) as channel:
        views = [memoryview(data)[i : i + 999_999] for i in range(0, 20 << 20, 999_999)]
        channel.send({}, views, timeout_s=10)
        assert done.wait(10)
    assert memory == data


def test_a_refused_payload_is_discarded_and_the_channel_goes_on(serve: Serve) -> None:
    with call(serve(echo=echo)) as channel:
        for body in (bytes(3 << 20), b"", b"second"):
            channel.send({"size": len(body)}, [body], timeout_s=5)
        asked: list[tuple[dict, int]] = []
        for size in (3 << 20, 0):
            header, payload = channel.receive(
                5, lambda header, size: asked.append((header, size))
            )
            assert (header, len(payload)) == ({"size": size}, 0)
        assert asked == [({"size": 3 << 20}, 3 << 20), ({"size": 0}, 0)]
        assert bytes(channel.receive(5)[1]) == b"second"


def test_a_sink_of_the_wrong_size_is_refused(serve: Serve) -> None:
    with call(serve(echo=echo)) as channel:
        channel.send({}, [b"four"], timeout_s=5)
        with pytest.raises(ValueError, match="sink gave 3 bytes for a payload of 4"):
            channel.receive(5, lambda header, size: memoryview(bytearray(3)))
        with pytest.raises(ChannelClosed):
            channel.receive(5)


def test_many_threads_may_send(serve: Serve) -> None:
    with call(serve(echo=echo)) as channel:

        def send(number: int) -> None:
            for i in range(20):
                channel.send({"n": (number, i)}, [bytes([number]) * 5000], timeout_s=5)

        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        seen = set()
        for _ in range(80):
            header, payload = channel.receive(5)
            assert bytes(payload) == bytes([header["n"][0]]) * 5000
            seen.add(tuple(header["n"]))
        for thread in threads:
            thread.join(5)
    assert len(seen) == 80


def test_handlers_get_the_hello_and_own_the_channel(serve: Serve) -> None:
    seen: list[dict] = []
    server = serve(a=lambda channel: seen.append(channel.peer), echo=echo)
    with call(server, "a", host="host-03") as channel:
        with pytest.raises(ChannelClosed, match=server.address):
            channel.receive(5)
    assert seen == [{"op": "a", "host": "host-03"}]


@pytest.mark.parametrize("op", ["unknown", None, ["list"], 7])
def test_unknown_ops_are_refused(serve: Serve, op: object) -> None:
    server = serve(echo=echo, push=echo)
    with pytest.raises(ChannelClosed, match="not served here. Allowed: echo, push"):
        connect(server.address, JOB, {"op": op}, 5)
    assert_serves(server)


@pytest.mark.parametrize(
    "wrong",
    [Credentials(job="job", secret=b"t" * 32), Credentials(job="j", secret=b"s" * 32)],
)
def test_wrong_secrets_are_told_on_both_sides(
    serve: Serve, wrong: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(echo=echo)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(protocol.AuthenticationError, match=server.address) as error:
            connect(server.address, wrong, {"op": "echo"}, 5)
        assert "secret file of this host differs" in str(error.value)
        assert_serves(server)
        # The refusal is sent before the server says why, in a thread of its own.
        wait_until(lambda: "wrong proof" in caplog.text)


def test_a_server_without_the_secret_learns_nothing_and_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        got: list[bytes] = []

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(connection.recv(100))  # reflects the nonce
                got.append(connection.recv(100))
                connection.sendall(got[0])  # and the proof

        thread = threading.Thread(target=impostor)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(protocol.AuthenticationError, match="wrong proof"):
            connect(address, JOB, {"op": "echo"}, 5)
        thread.join(5)
    assert len(got[0]) == protocol.PROOF_BYTES


def test_nobody_listening_is_connection_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConnectionRefusedError, match=address):
        connect(address, JOB, {"op": "echo"}, 5)


def test_a_silent_server_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=address):
            connect(address, JOB, {"op": "echo"}, 0.2)


def test_a_wait_for_a_frame_may_be_repeated(serve: Serve) -> None:
    with call(serve(echo=echo)) as channel:
        with pytest.raises(TimeoutError, match="127.0.0.1:"):
            channel.receive(0.05)
        channel.send({"n": 1}, timeout_s=5)
        assert channel.receive(5)[0] == {"n": 1}


def test_a_peer_that_does_not_read_ends_a_send(serve: Serve) -> None:
    release = threading.Event()
    server = serve(echo=lambda channel: release.wait(10) and None)
    with call(server) as channel:
        # The last bytes that find room may be copied after the limit.
        with pytest.raises(TimeoutError, match="room to send|rest of a frame"):
            channel.send({}, [bytes(64 << 20)], timeout_s=0.3)
        with pytest.raises(ChannelClosed):
            channel.send({}, timeout_s=1)
    release.set()


def test_half_a_frame_is_a_timeout_and_closes(serve: Serve) -> None:
    def half(channel: Channel) -> None:
        channel.write(start_of_frame(channel, {}, 10), deadline=time.monotonic() + 5)
        with pytest.raises(ChannelClosed):
            channel.receive(10)

    with call(serve(half=half), "half") as channel:
        assert channel.stream.poll(select.POLLIN, 10)  # the first half is here
        with pytest.raises(TimeoutError, match="rest of a frame"):
            channel.receive(0.2)
        with pytest.raises(ChannelClosed, match="on this host"):
            channel.receive(0.2)


def test_closing_wakes_a_thread_that_waits(serve: Serve) -> None:
    channel = call(serve(echo=echo))
    threading.Timer(0.1, channel.close).start()
    with pytest.raises(ChannelClosed):
        channel.receive(10)


@pytest.mark.parametrize("part", ["read", "write"])
def test_a_descriptor_stays_open_while_a_handshake_waits_on_it(part: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    channel = Channel(SocketStream(near, 1000), "10.0.0.1:1")
    polling, poll = threading.Event(), channel.stream.poll
    goes_on, seen = threading.Event(), list[int]()

    def late(event: int, timeout_s: float) -> bool:
        polling.set()
        assert goes_on.wait(20)
        seen.append(near.fileno())
        return poll(event, timeout_s)

    def wait() -> None:
        with pytest.raises(ChannelClosed):
            until = time.monotonic() + 20
            if part == "read":
                channel.read(1, deadline=until)
            else:
                channel.write(bytes(64 << 20), deadline=until)

    channel.stream.poll = late  # type: ignore[method-assign]
    thread = threading.Thread(target=wait)
    thread.start()
    assert polling.wait(20)
    channel.close()
    goes_on.set()
    thread.join(20)
    assert len(seen) == 1 and seen[0] > 0 and near.fileno() == -1
    far.close()


def test_a_reset_is_channel_closed(serve: Serve) -> None:
    def reset(channel: Channel) -> None:
        linger = struct.pack("ii", 1, 0)
        channel.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        channel.stream.socket.close()

    with call(serve(reset=reset), "reset") as channel:
        with pytest.raises(ChannelClosed, match="127.0.0.1:"):
            channel.receive(5)
        with pytest.raises(ChannelClosed):
            channel.send({}, timeout_s=5)


def test_a_failing_handler_ends_its_channel_only(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(channel: Channel) -> None:
        raise RuntimeError("handler bug")

    server = serve(fail=fail, echo=echo)
    with call(server, "fail") as channel, pytest.raises(ChannelClosed):
        channel.receive(5)
    assert_serves(server)
    assert "handler bug" in caplog.text


def test_too_many_connections_are_dropped_until_one_ends(serve: Serve) -> None:
    server = serve(2, echo=echo)
    with call(server), call(server) as second:
        with pytest.raises((ChannelClosed, ConnectionError)):
            call(server)
        second.close()
        deadline = time.monotonic() + 5
        while True:
            try:
                assert_serves(server)
                break
            except ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_a_crowd_of_strangers_does_not_keep_a_member_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_STRANGERS", 3)
    server = serve(echo=echo)
    strangers = [raw(server) for _ in range(8)]
    assert_serves(server)
    for dropped in strangers[:4]:
        assert dropped.recv(100) == b""
    for stranger in strangers:
        stranger.close()


def test_close_ends_connections_and_threads(serve: Serve) -> None:
    before = set(threading.enumerate())
    server = serve(echo=echo)
    with call(server) as channel:
        server.close()  # without waiting in vain: no thread is left
        with pytest.raises(ChannelClosed):
            channel.receive(5)
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        call(server)


def test_slow_strangers_are_dropped(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(echo=echo)
    with monkeypatch.context() as patch:
        patch.setattr(transport, "HANDSHAKE_S", 0.3)
        with raw(server) as stranger:
            stranger.sendall(b"D")  # and never comes to the point
            assert select.select([stranger], [], [], 10)[0]
    assert_serves(server)


def test_talkative_strangers_are_dropped_early(serve: Serve) -> None:
    server = serve(echo=echo)
    with raw(server) as stranger, pytest.raises(ConnectionError):
        for _ in range(10_000):
            stranger.sendall(bytes(1 << 16))
    assert_serves(server)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[TransportServer]:
    server = TransportServer("127.0.0.1:0", JOB, {"echo": echo})
    yield server
    server.close()


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=150, deadline=None)
def test_fuzzed_handshakes(
    shared_server: TransportServer, data: bytes, greet: bool
) -> None:
    with raw(shared_server) as stranger:
        answer = b""
        try:
            stranger.sendall((protocol.greeting()[0] if greet else b"") + data)
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(4096):
                answer += part
        except OSError as error:  # the server may have hung up at any point
            assert not isinstance(error, TimeoutError)
    assert len(answer) <= protocol.GREETING_BYTES + protocol.PROOF_BYTES
    assert answer[protocol.GREETING_BYTES :] in (b"", protocol.REFUSAL)


@given(
    st.dictionaries(st.text(), st.binary(), max_size=2), st.data(), st.integers(1, 255)
)
@settings(max_examples=200, deadline=None)
def test_fuzzed_frames_from_a_member(
    shared_server: TransportServer, header: dict, choose: st.DataObject, flip: int
) -> None:
    with call(shared_server) as channel:
        frame = bytearray(start_of_frame(channel, header, 5) + b"12345")
        frame[choose.draw(st.integers(0, len(frame) - 1))] ^= flip
        cut = choose.draw(st.integers(0, len(frame)))
        try:
            channel.write(frame[:cut], deadline=time.monotonic() + 5)
            channel.stream.socket.shutdown(socket.SHUT_WR)
            channel.receive(5)
        except OSError as error:  # the server may have hung up at any point
            assert not isinstance(error, TimeoutError)


def test_the_fuzzed_server_still_serves(shared_server: TransportServer) -> None:
    assert_serves(shared_server)


def test_unusable_addresses_are_refused() -> None:
    for bad in ("", "host", ":80", "host:", "host:http", "host:70000"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            connect(bad, JOB, {"op": "echo"}, 1)
    with pytest.raises(ValueError, match="Change --bind"):
        TransportServer("0.0.0.0:0", JOB, {})
