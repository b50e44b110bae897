"""Real sockets: who posts never waits, whatever the peer does with its end.

That a post did not wait is seen from what is still queued after it: the peer has read
nothing, so a post that waited for it would not have returned.
"""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dtft.checkpoint.transport.connection import (
    SILENCE_MS,
    Channel,
    ChannelClosed,
    SocketStream,
    TlsStream,
)
from dtft.checkpoint.transport.outbound import Outbound, OutboundLimits
from dtft.checkpoint.transport.protocol import Tls
from tests.support.hosts import wait_until

Pair = Callable[[], tuple[Channel, Channel]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    files = Tls(certificate=folder / "cert.pem", key=folder / "key.pem")
    command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:"
    subprocess.run(
        f"{command}prime256v1 -subj /CN=dtft -days 2 -out {files.certificate} "
        f"-keyout {files.key}".split(),
        check=True,
        capture_output=True,
    )
    return files


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return near, far


def plain() -> tuple[Channel, Channel]:
    near, far = sockets()
    return protected(SocketStream(near, SILENCE_MS), SocketStream(far, SILENCE_MS))


def encrypted(tls: Tls) -> tuple[Channel, Channel]:
    near, far = sockets()
    ends = (
        TlsStream(near, SILENCE_MS, tls, server=False),
        TlsStream(far, SILENCE_MS, tls, server=True),
    )
    until = time.monotonic() + 5
    other = threading.Thread(target=ends[1].greet, args=(until,))
    other.start()
    ends[0].greet(until)
    other.join()
    return protected(*ends)


def protected(near: SocketStream, far: SocketStream) -> tuple[Channel, Channel]:
    here, there = Channel(near, "far:1"), Channel(far, "near:1")
    here.peer, there.peer = {"host": "slow"}, {"host": "here"}
    here.protect(b"a" * 32, b"b" * 32)
    there.protect(b"b" * 32, b"a" * 32)
    return here, there


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, certificate: Tls) -> Iterator[Pair]:
    made: list[Channel] = []

    def make() -> tuple[Channel, Channel]:
        ends = plain() if request.param == "plain" else encrypted(certificate)
        made.extend(ends)
        return ends

    yield make
    for channel in made:
        channel.close()
    wait_until(lambda: not writers(), 5)


def writers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "outbound"]


FILLING = 2 << 20


def fill(outbound: Outbound) -> None:
    """Posts a message that the kernel's buffers cannot hold."""
    assert outbound.post({"n": 0, "pad": bytes(FILLING)})
    assert outbound.waiting == 1


def test_what_the_socket_takes_needs_no_thread(pair: Pair) -> None:
    here, there = pair()
    outbound = Outbound(here)
    for number in range(50):
        assert outbound.post({"n": number})
        assert outbound.waiting == 0
        assert there.receive(5)[0] == {"n": number}
    assert not writers()


def test_a_peer_that_stops_and_goes_on_gets_all_in_order(pair: Pair) -> None:
    here, there = pair()
    outbound = Outbound(here)
    fill(outbound)
    late = {"n": 0, "pad": b""}
    for number in range(1, 300):
        late["n"] = number  # what was posted does not change with it
        assert outbound.post(late)
        assert outbound.waiting == 1 + number
    assert len(writers()) == 1
    assert not outbound.flush(0.1)
    for number in range(300):
        assert there.receive(5)[0]["n"] == number
    assert outbound.flush(5)
    assert outbound.waiting == 0
    wait_until(lambda: not writers(), 5)
    assert outbound.post({"n": -1})
    assert there.receive(5)[0] == {"n": -1}


def test_a_message_larger_than_all_buffers_arrives(pair: Pair) -> None:
    here, there = pair()
    outbound, data = Outbound(here), os.urandom(15 << 20)
    assert outbound.post({"data": data})
    assert outbound.waiting == 1
    assert there.receive(10)[0] == {"data": data}
    assert outbound.flush(5)


def test_a_peer_that_never_reads_loses_its_connection(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = pair()
    outbound = Outbound(here, OutboundLimits(deadline_s=0.5))
    ended: list[float] = []

    def receive() -> None:  # as a link does: it notices that the channel is closed
        with pytest.raises(ChannelClosed):
            here.receive(30)
        ended.append(time.monotonic())

    receiver = threading.Thread(target=receive)
    receiver.start()
    begun = time.monotonic()
    fill(outbound)
    receiver.join(10)
    assert 0.4 < ended[0] - begun < 5
    assert not outbound.post({})
    assert not outbound.flush(1)
    assert outbound.waiting == 0
    wait_until(lambda: "peer slow (far:1): 1 messages" in caplog.text, 5)
    assert "not taken within 0.5 s" in caplog.text
    with pytest.raises(ChannelClosed):
        here.send({}, timeout_s=5)
    del there


@pytest.mark.parametrize(
    "limits",
    [OutboundLimits(max_messages=40), OutboundLimits(max_bytes=FILLING + 400_000)],
    ids=str,
)
def test_only_so_much_waits(
    pair: Pair, limits: OutboundLimits, caplog: pytest.LogCaptureFixture
) -> None:
    here, _ = pair()
    outbound = Outbound(here, limits)
    fill(outbound)
    number = 0
    for number in range(100):
        if not outbound.post({"n": number, "pad": bytes(10_000)}):
            break
        assert outbound.waiting == 2 + number
    assert 30 <= number <= 41
    wait_until(lambda: "more than may wait for one peer" in caplog.text, 5)
    with pytest.raises(ChannelClosed):
        here.receive(5)


def test_a_peer_that_dies_with_messages_queued_is_noticed_at_once(pair: Pair) -> None:
    here, there = pair()
    outbound = Outbound(here)
    fill(outbound)
    there.close()
    begun = time.monotonic()
    assert not outbound.flush(8)
    assert time.monotonic() - begun < 4
    assert not outbound.post({})
    with pytest.raises(ChannelClosed):
        here.receive(5)


@pytest.mark.parametrize("closer", ["outbound", "channel"])
def test_closing_drops_what_is_queued(pair: Pair, closer: str) -> None:
    here, _ = pair()
    outbound = Outbound(here)
    fill(outbound)
    (outbound if closer == "outbound" else here).close()
    assert not outbound.flush(5)
    wait_until(lambda: not writers(), 5)
    assert here.stream.socket.fileno() == -1  # nobody keeps the descriptor
    assert not outbound.post({})


def test_posts_of_many_threads_keep_each_ones_order(pair: Pair) -> None:
    here, there = pair()
    outbound = Outbound(here)

    def post(who: int) -> None:
        for number in range(200):
            assert outbound.post({"who": who, "n": number, "pad": bytes(number * 7)})

    def send() -> None:  # the old way meets the new one on the same channel
        for number in range(50):
            here.send({"who": -1, "n": number}, [b"payload"], timeout_s=10)

    threads = [threading.Thread(target=post, args=(who,)) for who in range(8)]
    threads.append(threading.Thread(target=send))
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {}
    for index in range(8 * 200 + 50):
        header, _ = there.receive(10)
        seen.setdefault(header["who"], []).append(header["n"])
        if index % 100 == 0:
            time.sleep(0.005)
    for thread in threads:
        thread.join(5)
    assert seen == {-1: list(range(50)), **{w: list(range(200)) for w in range(8)}}
    assert outbound.flush(5)


def test_two_hundred_stuck_peers_take_one_thread_and_disturb_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pairs = [plain() for _ in range(200)]
    outbounds = [Outbound(here, OutboundLimits(deadline_s=50)) for here, _ in pairs]
    wait_until(lambda: not writers(), 5)  # one of an earlier test
    try:
        for outbound in outbounds[:190]:
            fill(outbound)
        assert len(writers()) == 1
        for outbound in outbounds:
            assert outbound.post({"n": -1})
        assert all(outbound.waiting == 2 for outbound in outbounds[:190])
        for _, there in pairs[190:]:  # those who read are not kept waiting
            assert there.receive(1)[0] == {"n": -1}
        for _, there in pairs[:95]:
            assert [there.receive(5)[0]["n"] for _ in range(2)] == [0, -1]
        for here, _ in pairs[95:190]:
            here.close()
        wait_until(lambda: not writers(), 5)
        assert not caplog.records
    finally:
        for ends in pairs:
            for channel in ends:
                channel.close()


def test_a_message_over_the_limit_is_the_posters_fault(pair: Pair) -> None:
    here, there = pair()
    outbound = Outbound(here)
    with pytest.raises(ValueError, match="header has"):
        outbound.post({"data": bytes(17 << 20)})
    assert outbound.post({"n": 1})
    assert there.receive(5)[0] == {"n": 1}


def test_a_send_that_timed_out_under_tls_does_not_garble_the_next(
    certificate: Tls,
) -> None:
    """OpenSSL keeps the record that the socket did not take, and sends it next."""
    here, there = encrypted(certificate)
    try:
        with pytest.raises(TimeoutError):
            while True:
                here.send({"pad": bytes(10_000)}, timeout_s=0.3)
        with pytest.raises(ChannelClosed):
            here.send({"pad": bytes(20_000)}, timeout_s=1)
    finally:
        here.close()
        there.close()
