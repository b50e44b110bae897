"""NIXL: bytes read out of a peer's memory, over UCX on loopback if it is installed."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.state.digests import Parts, chunk_digests
from dtft.checkpoint.state.ranges import WantedSlice
from dtft.checkpoint.transport.fetch import FetchError, fetch_slices, serve_fetches
from dtft.checkpoint.transport.rdma import Nixl, start_nixl
from dtft.checkpoint.transport.server import TransportServer
from dtft.elastic.transfer.restore_executor import restore_into
from tests.support.hosts import (
    CHUNK,
    EPOCH,
    JOB,
    Host,
    content,
    digests_of,
    replicated,
)

INSTALLED = importlib.util.find_spec("nixl") is not None
SIZES = (200_000, 0, 777)
LENDER = "import tests.multiprocess.test_nixl as t; t.lend()"


def test_without_nixl_the_error_says_how_to_get_it() -> None:
    if INSTALLED:
        pytest.skip("NIXL is installed")
    with pytest.raises(ImportError, match="--no-deps"):
        Nixl()


def lend(nixl: bool = True) -> None:
    """Serves slices until stdin ends; runs in a process of its own."""
    whole = [memoryview(content(1, str(i), size)) for i, size in enumerate(SIZES)]
    slices = [
        Parts([one[:512], one[512:]] if i else [one]) for i, one in enumerate(whole)
    ]
    agent = Nixl() if nixl else None
    answers: list[int] = []

    def answer(channel) -> None:
        send = channel.send

        def counted(header, payload=(), *, timeout_s) -> None:
            answers.append(sum(len(part) for part in payload))
            send(header, payload, timeout_s=timeout_s)

        channel.send = counted
        serve_fetches(channel, lambda request: slices, agent)

    server = TransportServer("127.0.0.1:0", JOB, {"fetch": answer})
    print(server.address, flush=True)
    for line in sys.stdin:
        if line == "sent\n":
            print(sum(answers), flush=True)
    os._exit(0)  # NIXL's threads may not end


def lend_holder(folder: str) -> None:
    """Serves a holder as an agent with --nixl does; runs in a process of its own."""
    host = Host(Path(folder), 0, replicated(2), nixl=start_nixl())
    host.stage(7)
    print(host.address, flush=True)
    sys.stdin.read()
    host.close()
    os._exit(0)  # NIXL's threads may not end


def wanted() -> list[WantedSlice]:
    return [
        WantedSlice(
            key=str(i),
            memory=Parts([memoryview(bytearray(size))]),
            digests=chunk_digests(content(1, str(i), size), CHUNK),
        )
        for i, size in enumerate(SIZES)
    ]


def fetched(address: str, slices: list[WantedSlice], nixl: Nixl | None) -> int:
    return fetch_slices(
        address,
        JOB,
        {"op": "fetch"},
        {},
        slices,
        chunk_bytes=CHUNK,
        limit_s=30.0,
        nixl=nixl,
    ).nbytes


@contextlib.contextmanager
def peer(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of its own that runs `code`, and the address that it prints first."""
    environment = os.environ | {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    killer = threading.Timer(50, process.kill)
    killer.start()
    try:
        yield process, process.stdout.readline().strip()
    finally:
        killer.cancel()
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def bytes_sent(process: subprocess.Popen[str]) -> int:
    """The bytes of slices that a lender has sent in its answers."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("sent\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@pytest.mark.skipif(not INSTALLED, reason="NIXL is not installed")
def test_slices_are_read_from_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with peer(LENDER) as (process, address):
        nixl = Nixl()
        for _ in range(2):  # a peer can be read from again
            slices = wanted()
            assert fetched(address, slices, nixl) == sum(SIZES)
            for one in slices:
                assert bytes(one.memory) == content(1, one.key, len(one.memory))
        assert bytes_sent(process) == 0
        process.kill()
        process.wait(10)
        begun = time.monotonic()
        with pytest.raises(FetchError):
            fetched(address, wanted(), nixl)
        assert time.monotonic() - begun < 30


@pytest.mark.skipif(not INSTALLED, reason="NIXL is not installed")
def test_bytes_come_over_tcp_while_a_call_of_nixl_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    go = threading.Event()
    with peer(LENDER) as (process, address):
        nixl = Nixl()
        add = nixl._agent.add_remote_agent
        monkeypatch.setattr(
            nixl._agent, "add_remote_agent", lambda offer: (go.wait(40), add(offer))[1]
        )
        for said in ("did not end within 5 s", "waits for an earlier call"):
            caplog.clear()
            assert fetched(address, wanted(), nixl) == sum(SIZES)
            assert said in caplog.text
        assert bytes_sent(process) == 2 * sum(SIZES)
        go.set()


@pytest.mark.skipif(not INSTALLED, reason="NIXL is not installed")
def test_a_peer_without_nixl_answers_over_tcp() -> None:
    whole = [memoryview(content(1, str(i), size)) for i, size in enumerate(SIZES)]
    slices = [
        Parts([one[:512], one[512:]] if i else [one]) for i, one in enumerate(whole)
    ]
    server = TransportServer(
        "127.0.0.1:0",
        JOB,
        {"fetch": lambda channel: serve_fetches(channel, lambda _: slices)},
    )
    try:
        assert fetched(server.address, wanted(), Nixl()) == sum(SIZES)
    finally:
        server.close()


@pytest.mark.skipif(not INSTALLED, reason="NIXL is not installed")
def test_a_restore_reads_from_a_peers_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    code = "import sys, tests.multiprocess.test_nixl as t; t.lend_holder(sys.argv[1])"
    (tmp_path / "peer").mkdir()
    with peer(code, str(tmp_path / "peer")) as (_, address):
        host = Host(tmp_path, 1, replicated(2))
        try:
            order = {
                "generation": EPOCH[0],
                "attempt": EPOCH[1],
                "step": 7,
                "digests": digests_of(host, 7),
                "items": {},
                "read": True,
                "transfers": [
                    {
                        "host": "peer",
                        "address": address,
                        "keys": [piece.key for piece in host.holder.own_slices],
                    }
                ],
            }
            reads: list[int] = []
            nixl = start_nixl()
            assert nixl is not None
            read = nixl.read
            monkeypatch.setattr(
                nixl, "read", lambda *a: (reads.append(len(a[1])), read(*a))[1]
            )
            outcome = restore_into(host.holder, order, "h1", JOB, 30.0, nixl)
            assert outcome["peers"] == sum(p.nbytes for p in host.holder.own_slices)
            assert reads and host.wrong() == []
        finally:
            host.close()
