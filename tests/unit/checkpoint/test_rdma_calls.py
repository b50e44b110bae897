"""Calls of NIXL that hang, and fetches that then take the bytes over TCP."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.memory.arena import OWN_BUFFERS
from dtft.checkpoint.state.digests import Parts, chunk_digests
from dtft.checkpoint.state.ranges import WantedSlice
from dtft.checkpoint.transport import rdma
from dtft.checkpoint.transport.fetch import FetchError, fetch_slices, serve_fetches
from dtft.checkpoint.transport.server import TransportServer
from dtft.elastic.transfer.restore_executor import restore_into
from tests.support.hosts import (
    CHUNK,
    JOB,
    Host,
    content,
    replicated,
    restore_order,
)

SIZE = 300_000


def test_results_and_errors_reach_the_caller() -> None:
    call = rdma._OneThread()
    assert call("to divide", divmod, 7, 2) == (3, 1)
    with pytest.raises(rdma.NixlError, match="to divide failed: ZeroDivisionError"):
        call("to divide", divmod, 7, 0)
    assert call("to divide", divmod, 9, 2) == (4, 1)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Limits count from the moment at which the call of a test has set this."""
    begun, wait = threading.Event(), rdma.wait

    def late(futures: Any, limit_s: float) -> Any:
        assert begun.wait(30)
        return wait(futures, limit_s)

    monkeypatch.setattr(rdma, "wait", late)
    return begun


def test_a_call_that_hangs_is_given_up_and_undone_when_it_ends(
    begun: threading.Event,
) -> None:
    call, go, undone = rdma._OneThread(), threading.Event(), threading.Event()
    results: list[int] = []

    def undo(result: int) -> None:
        results.append(result)
        undone.set()

    def hangs() -> int:
        begun.set()
        assert go.wait(30)
        return 5

    with pytest.raises(rdma.NixlError, match="to hang did not end within 0.05 s"):
        call("to hang", hangs, limit_s=0.05, undo=undo)
    with pytest.raises(rdma.NixlError, match="waits for an earlier call"):
        call("the next", results.append, 1, limit_s=30)
    go.set()
    assert undone.wait(30) and results == [5]
    assert call("the next", divmod, 3, 2) == (1, 1)


def test_a_call_whose_turn_comes_too_late_is_not_made() -> None:
    call, go = rdma._OneThread(), threading.Event()
    made: list[str] = []

    begun = threading.Event()

    def hangs() -> None:
        begun.set()
        assert go.wait(30)

    def first() -> None:
        with contextlib.suppress(rdma.NixlError):
            call("to hang", hangs)

    hanging = threading.Thread(target=first)
    hanging.start()
    assert begun.wait(30)
    with pytest.raises(rdma.NixlError, match="to append did not begin within 0.05 s"):
        call("to append", made.append, "late", limit_s=0.05)
    go.set()
    hanging.join(30)
    call("to append", made.append, "now")
    assert made == ["now"]


def test_what_ends_something_is_called_after_a_call_that_hangs(
    begun: threading.Event,
) -> None:
    call, go, ended = rdma._OneThread(), threading.Event(), threading.Event()

    def hangs() -> None:
        begun.set()
        go.wait(30)

    with pytest.raises(rdma.NixlError):
        call("to hang", hangs, limit_s=0.05)
    assert not call.end("to end", ended.set)
    assert not ended.is_set()
    go.set()
    assert ended.wait(30)
    assert call.end("to end", divmod, 3, 2)
    assert not call.end("to end", divmod, 3, 0)


class Broken:
    """Stands for a NIXL that fails at one place."""

    def __init__(self, place: str, error: type[rdma.NixlError]) -> None:
        self._place, self._error = place, error

    def _at(self, place: str) -> None:
        if place == self._place:
            raise self._error(f"NIXL: {place} did not end within 5 s")

    @contextlib.contextmanager
    def lend(self, slices: Any) -> Iterator[dict[str, Any]]:
        self._at("lend")
        addresses = [[(1, parts.nbytes)] for parts in slices]
        yield {"name": "peer", "metadata": b"", "addresses": addresses}

    @contextlib.contextmanager
    def borrow(self, _: Any) -> Iterator[None]:
        self._at("borrow")
        yield

    @contextlib.contextmanager
    def receiving(self, _: Any) -> Iterator[None]:
        self._at("receiving")
        yield

    def read(self, *_: Any) -> None:
        self._at("read")


@pytest.fixture
def fetch() -> Iterator[Callable[[Any, Any], bytes]]:
    """Fetches a slice with the NIXL of a lender and of a reader; returns its bytes."""
    lender: list[Any] = []
    held = Parts([memoryview(content(1, "0", SIZE))])
    server = TransportServer(
        "127.0.0.1:0",
        JOB,
        {"fetch": lambda channel: serve_fetches(channel, lambda _: [held], *lender)},
    )

    def call(of_lender: Any, of_reader: Any) -> bytes:
        lender[:] = [of_lender]
        memory = memoryview(bytearray(SIZE))
        digests = chunk_digests(content(1, "0", SIZE), CHUNK)
        wanted = WantedSlice(key="0", memory=Parts([memory]), digests=digests)
        fetch_slices(
            *(server.address, JOB, {"op": "fetch"}, {}, [wanted]),
            chunk_bytes=CHUNK,
            limit_s=30.0,
            nixl=of_reader,
        )
        return bytes(memory)

    yield call
    server.close()


@pytest.mark.parametrize(
    ("lender", "reader"),
    [("lend", "nowhere"), *(("nowhere", at) for at in ("borrow", "receiving", "read"))],
)
def test_a_fetch_goes_over_tcp_where_nixl_fails(
    fetch: Callable[[Any, Any], bytes], lender: str, reader: str
) -> None:
    error = rdma.NixlError
    found = fetch(Broken(lender, error), Broken(reader, error))
    assert found == bytes(content(1, "0", SIZE))


def test_memory_that_nixl_may_still_write_is_not_used(
    fetch: Callable[[Any, Any], bytes],
) -> None:
    unreleased = Broken("read", rdma.NixlUnreleased)
    with pytest.raises(FetchError, match="NIXL: read did not end"):
        fetch(Broken("nowhere", rdma.NixlError), unreleased)


def test_memory_that_nixl_may_still_write_is_given_to_no_other_step(
    tmp_path: Path,
) -> None:
    lender: Any = Broken("nowhere", rdma.NixlError)
    reader: Any = Broken("read", rdma.NixlUnreleased)
    layout = replicated(2)
    lost, peer = (Host(tmp_path, slot, layout, nixl=lender) for slot in range(2))
    peer.stage(5)
    order = restore_order(lost, peer, 5)
    outcome = restore_into(lost.holder, order, "host-0", JOB, 20.0, reader)
    assert "NIXL: read did not end" in outcome["error"]
    lost.holder.keep_only(set())
    assert lost.holder._own.pool.ref_counts.free_buffers.sum() == OWN_BUFFERS - 1
    assert "error" not in restore_into(lost.holder, order, "host-0", JOB, 20.0)
    assert lost.wrong() == []
    for host in (lost, peer):
        host.close()
