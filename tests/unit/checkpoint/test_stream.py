"""TLS under the same channel: hidden bytes, and only the true server's certificate."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.transport import protocol
from dtft.checkpoint.transport.connection import Channel, ChannelClosed, TlsStream
from dtft.checkpoint.transport.dialing import parse_address
from dtft.checkpoint.transport.protocol import Credentials, Tls
from dtft.checkpoint.transport.server import TransportServer, connect
from dtft.elastic.transfer.replication import Pusher
from tests.support.certificates import certificate
from tests.support.hosts import (
    EPOCH,
    content,
    divided,
    echo,
    fetch_back,
    hosts,
    order_after_loss,
    wait_until,
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    folder = tmp_path_factory.mktemp("tls")
    return {name: certificate(folder, name) for name in ("host", "impostor")}


@pytest.fixture
def job(tls: dict[str, Tls]) -> Credentials:
    return Credentials(job="job", secret=b"s" * 32, tls=tls["host"])


@pytest.fixture
def server(job: Credentials) -> Iterator[TransportServer]:
    server = TransportServer("127.0.0.1:0", job, {"echo": echo})
    yield server
    server.close()


class Tap:
    """Forwards one connection and listens."""

    def __init__(self, target: str) -> None:
        self.heard = bytearray()
        self._target = parse_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def join(self) -> None:
        """Waits until both ends have hung up."""
        self._thread.join(20)

    def _forward(self) -> None:
        with self._listener:
            client, _ = self._listener.accept()
        with client, socket.create_connection(self._target, 5) as server:
            back = threading.Thread(target=self._pump, args=(server, client))
            back.start()
            self._pump(client, server)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(20)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def test_large_frames_cross_both_ways_and_nobody_reads_along(
    server: TransportServer, job: Credentials
) -> None:
    body = content(1, "body", 3 << 20)
    tap = Tap(server.address)
    with connect(tap.address, job, {"op": "echo"}, 10) as channel:
        sender = threading.Thread(
            target=lambda: [
                channel.send({"secret header": n}, [body[:1000], body], timeout_s=20)
                for n in range(2)
            ]
        )
        sender.start()  # sends while this thread receives, on one TLS session
        for number in range(2):
            header, payload = channel.receive(20)
            assert header == {"secret header": number}
            assert payload == body[:1000] + body
        sender.join(20)
    tap.join()
    assert len(tap.heard) > 4 * len(body)
    assert b"secret header" not in tap.heard
    assert body[:64] not in tap.heard


def test_steps_are_pushed_and_fetched_under_tls(
    tmp_path: Path, job: Credentials
) -> None:
    with hosts(tmp_path, divided(2), job) as (lost, peer):
        lost.stage(1)
        pusher = Pusher(
            lost.holder, lost.holder.outgoing[0], peer.address, job, EPOCH, 20.0
        )
        pusher.offer(1)
        wait_until(lambda: peer.held == [(1, 0)], 20.0)
        pusher.close()
        fetch_back(lost.holder, order_after_loss(lost, peer, 1), job, 20.0)
        assert lost.wrong() == peer.wrong() == []


def test_a_man_in_the_middle_with_a_certificate_of_his_own_is_refused(
    server: TransportServer, tls: dict[str, Tls], job: Credentials
) -> None:
    """He relays every byte inside TLS; the proofs are bound to the certificate."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            connection, _ = listener.accept()
            victim = TlsStream(connection, 10_000, tls["impostor"], server=True)
            onward = socket.create_connection(parse_address(server.address), 5)
            genuine = TlsStream(onward, 10_000, tls["host"], server=False)
            deadline = time.monotonic() + 10
            victim.greet(deadline)
            genuine.greet(deadline)
            up, down = Channel(genuine, "genuine"), Channel(victim, "victim")
            with up, down:
                for source, sink, size in (
                    (down, up, protocol.GREETING_BYTES),
                    (up, down, protocol.GREETING_BYTES),
                    (down, up, protocol.PROOF_BYTES),
                    (up, down, protocol.PROOF_BYTES),
                ):
                    said = source.read(size, deadline=deadline)
                    sink.write(said, deadline=deadline)

        thread = threading.Thread(target=relay)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(protocol.AuthenticationError, match="refused this host's"):
            connect(address, job, {"op": "echo"}, 10)
        thread.join(10)


def test_one_side_without_tls_is_an_error_that_says_so(
    server: TransportServer, job: Credentials
) -> None:
    plain = Credentials(job="job", secret=b"s" * 32)
    with pytest.raises((ChannelClosed, ConnectionError)):
        connect(server.address, plain, {"op": "echo"}, 5)
    other = TransportServer("127.0.0.1:0", plain, {"echo": echo})
    try:
        with pytest.raises(OSError, match="given a certificate"):
            connect(other.address, job, {"op": "echo"}, 5)
    finally:
        other.close()


def test_unreadable_certificates_are_named_before_anybody_connects(
    tmp_path: Path,
) -> None:
    missing = Tls(certificate=tmp_path / "absent.pem", key=tmp_path / "absent.key")
    job = Credentials(job="job", secret=b"s", tls=missing)
    with pytest.raises(ValueError, match="absent.pem"):
        TransportServer("127.0.0.1:0", job, {"echo": echo})
