"""Fetches: every byte once over several connections, and on after a cut."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.state.digests import Parts, chunk_digests
from dtft.checkpoint.state.ranges import (
    MAX_PARTS,
    Part,
    WantedSlice,
    not_right,
    split_ranges,
)
from dtft.checkpoint.transport import fetch
from dtft.checkpoint.transport.connection import Channel
from dtft.checkpoint.transport.server import TransportServer, connect
from dtft.elastic.leader.storage import is_corrupt
from dtft.elastic.transfer.replication import Pusher
from dtft.elastic.transfer.restore_executor import (
    FetchFailed,
    FetchOrder,
    restore_into,
)
from tests.support.hosts import (
    CHUNK,
    EPOCH,
    JOB,
    Host,
    content,
    digests_of,
    divided,
    fetch_back,
    hosts,
    order_after_loss,
    replicated,
    restore_order,
    wait_until,
)


@given(
    st.lists(st.integers(0, 100), max_size=20), st.integers(1, 20), st.integers(1, 60)
)
@settings(deadline=None)
def test_ranges_cover_every_byte_once(
    sizes: list[int], chunk_bytes: int, range_bytes: int
) -> None:
    ranges = split_ranges(sizes, chunk_bytes, range_bytes)
    parts = [part for one in ranges for part in one]
    for index, size in enumerate(sizes):
        mine = [part for part in parts if part.index == index]
        assert mine[0].start == 0
        assert mine[-1].stop == size
        assert all(a.stop == b.start for a, b in zip(mine, mine[1:], strict=False))
    assert all(part.start % chunk_bytes == 0 for part in parts)
    for one in ranges:
        assert len(one) <= MAX_PARTS
        assert sum(part.nbytes for part in one) <= max(range_bytes, chunk_bytes)


@given(st.binary(max_size=70), st.integers(1, 9), st.data())
@settings(deadline=None)
def test_only_wrong_chunks_are_not_right(
    data: bytes, chunk: int, choose: st.DataObject
) -> None:
    memory = bytearray(data)
    digests = chunk_digests(data, chunk)
    wanted = [WantedSlice(key="k", memory=Parts([memoryview(memory)]), digests=digests)]
    (range_,) = split_ranges([len(data)], chunk, 1000) or [()]
    flips = choose.draw(st.sets(st.integers(0, max(len(data) - 1, 0))))
    for at in flips if data else ():
        memory[at] ^= 255
    bad = {at // chunk for at in flips} if data else set()
    expected = [
        Part(0, c * chunk, min((c + 1) * chunk, len(data))) for c in sorted(bad)
    ]
    assert list(not_right(range_, wanted, chunk)) == expected


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    monkeypatch.setattr(fetch, "RANGE_BYTES", 4 * CHUNK)
    monkeypatch.setattr(fetch, "STREAM_BYTES", 4 * CHUNK)
    with hosts(tmp_path, divided(2)) as made:
        yield made


def lost_and_ordered(pair: list[Host], step: int = 1) -> FetchOrder:
    """Host 0 pushed a step to host 1 and lost it; what it must fetch now."""
    lost, peer = pair
    lost.stage(step)
    (one,) = lost.holder.outgoing
    pusher = Pusher(lost.holder, one, peer.address, JOB, EPOCH, 10.0)
    pusher.offer(step)
    wait_until(lambda: peer.held == [(step, 0)])
    pusher.close()
    return order_after_loss(lost, peer, step)


def test_what_was_lost_comes_back_over_several_connections(pair: list[Host]) -> None:
    ordered = lost_and_ordered(pair)
    opened: list[str] = []
    serving = pair[1].server._handlers["fetch"]

    def count(channel: Channel) -> None:
        opened.append(channel.address)
        wait_until(lambda: len(opened) > 1)  # or the first may have it all
        serving(channel)

    pair[1].server._handlers["fetch"] = count
    received = fetch_back(pair[0].holder, ordered, JOB, 10.0)
    assert received == sum(piece.nbytes for piece in pair[0].holder.own_slices)
    assert pair[0].wrong() == []
    assert 1 < len(opened) <= fetch.STREAMS


def test_a_corrupt_copy_is_named_and_never_taken(pair: list[Host]) -> None:
    ordered = lost_and_ordered(pair)
    key = next(key for key in ordered.digests if key.startswith("odd"))
    (parts,) = pair[1].holder.find(1, [key])
    (chunk,) = parts.cut(700, 701)
    chunk[0] ^= 4
    with pytest.raises(FetchFailed, match="1 corrupt slices") as failed:
        fetch_back(pair[0].holder, ordered, JOB, 10.0)
    assert failed.value.corrupt == (f"host-1 step 1: {key}",)
    # An export may need this slice (`borrow`): then the leader forms the job anew.
    assert is_corrupt(str(failed.value))


def test_an_order_older_than_the_peers_is_refused(pair: list[Host]) -> None:
    ordered = lost_and_ordered(pair)
    pair[1].epoch = (EPOCH[0] + 1, 0)
    with pytest.raises(FetchFailed, match="older than this host's"):
        fetch_back(pair[0].holder, ordered, JOB, 10.0)


def test_a_step_that_is_not_held_is_an_error_with_the_keys_name(
    pair: list[Host],
) -> None:
    with pytest.raises(FetchFailed, match=r"not held here: .*big\["):
        fetch_back(pair[0].holder, order_after_loss(pair[0], pair[1], 9), JOB, 10.0)


def test_a_dead_peer_is_noticed_at_once(pair: list[Host]) -> None:
    ordered = lost_and_ordered(pair)
    pair[1].server.close()
    with pytest.raises(FetchFailed, match="cannot connect"):
        fetch_back(pair[0].holder, ordered, JOB, 60.0)


def test_a_silent_peer_ends_at_the_deadline(pair: list[Host]) -> None:
    ordered = lost_and_ordered(pair)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        transfer = {**ordered.transfer, "address": address}
        silent = FetchOrder(
            step=1, epoch=EPOCH, transfer=transfer, digests=ordered.digests
        )
        with pytest.raises(FetchFailed, match="out of time|timed out"):
            fetch_back(pair[0].holder, silent, JOB, 0.3)


@pytest.mark.parametrize(
    "parts",
    [None, 3, [1], [[0, 0]], [[0, 0, 10**9]], [[99, 0, 1]], [[-1, 0, 1]], [[0, 9, 3]]]
    + [[[0, -5, 3]], [["a", 0, 1]], [[True, False, True]], [[0, 0, 12_000]] * 40_000],
)
def test_requests_outside_the_slices_end_their_connection_only(
    pair: list[Host], parts: object
) -> None:
    pair[1].stage(2)
    keys = [piece.key for piece in pair[1].holder.own_slices]
    with connect(pair[1].address, JOB, {"op": "fetch"}, 5) as channel:
        channel.send({"step": 2, "epoch": EPOCH, "keys": keys}, timeout_s=5)
        assert channel.receive(5)[0] == {"sizes": [12_000, 1_001, 7, 0]}
        channel.send({"parts": parts}, timeout_s=5)
        with pytest.raises(ConnectionError):
            channel.receive(5)
    assert pair[1].wrong() == []


def test_a_fetch_of_very_many_slices_is_answered() -> None:
    memory = memoryview(bytearray(60_000))
    keys = {f"{number:0100}": number for number in range(len(memory))}
    digests = chunk_digests(b"x", CHUNK)
    wanted = [
        WantedSlice(key=key, memory=Parts([memory[at : at + 1]]), digests=digests)
        for key, at in keys.items()
    ]
    here = Parts([memoryview(b"x")])
    server = TransportServer(
        "127.0.0.1:0",
        JOB,
        {"fetch": lambda it: fetch.serve_fetches(it, lambda _: [here] * len(keys))},
    )
    fetch.fetch_slices(
        *(server.address, JOB, {"op": "fetch"}, {}, wanted),
        chunk_bytes=CHUNK,
        limit_s=30.0,
    )
    server.close()
    assert bytes(memory) == b"x" * len(memory)


class Former(threading.Thread):
    """A restore that is held up at the peer until `go_on`."""

    def __init__(self, lost: Host, peer: Host, step: int, **rest: Any) -> None:
        super().__init__(daemon=True)
        self.outcome: dict[str, Any] = {}
        self._lost, self._rest = lost, rest
        self._order = restore_order(lost, peer, step)
        serving, asks = peer.server._handlers["fetch"], threading.Event()
        self._gate = gate = threading.Event()

        def held_up(channel: Channel) -> None:
            asks.set()
            assert gate.wait(9)
            serving(channel)

        peer.server._handlers["fetch"] = held_up
        self.start()
        assert asks.wait(9)
        peer.server._handlers["fetch"] = serving

    def run(self) -> None:
        """Restores."""
        self.outcome = restore_into(
            *(self._lost.holder, self._order, "host-0", JOB, 20.0), **self._rest
        )

    def go_on(self) -> dict[str, Any]:
        """Lets the peer answer; the outcome of the restore."""
        self._gate.set()
        self.join(20)
        return self.outcome


def test_a_restore_that_was_given_up_writes_into_no_other_step(tmp_path: Path) -> None:
    with hosts(tmp_path, replicated(2)) as (lost, peer):
        peer.stage(5)
        former = Former(lost, peer, 5)
        lost.holder.keep_only(set())  # a newer order: from storage
        lost.stage(1)
        assert "error" not in former.go_on()
        assert lost.holder.holdings()[1] == []
        assert lost.holder.steps() == (1,) and lost.wrong() == []
        lost.holder.keep_only(set())
        assert lost.holder._own.pool.ref_counts.free_buffers.all()


def test_a_restore_that_was_given_up_completes_no_newer_one(tmp_path: Path) -> None:
    with hosts(tmp_path, replicated(2)) as (lost, peer):
        peer.stage(5)
        former = Former(lost, peer, 5)
        with lost.holder.begin_restore(5, digests_of(lost, 5), {}) as newer:
            assert "error" not in former.go_on()
            big = newer.missing[0]
            assert bytes(newer.parts(big)) != content(5, big.key, big.nbytes)
            assert big.key not in lost.holder.here(5)
        outcome = restore_into(
            lost.holder, restore_order(lost, peer, 5), "host-0", JOB, 20.0
        )
        assert "error" not in outcome and lost.wrong() == []


def test_a_restore_that_was_given_up_asks_for_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "RANGE_BYTES", CHUNK)
    with hosts(tmp_path, replicated(2)) as (lost, peer):
        peer.stage(5)
        newer, asked = threading.Event(), list[int]()
        serving = fetch._cut_out

        def cut_out(*arguments: Any) -> list[memoryview]:
            asked.append(1)
            newer.set()
            return serving(*arguments)

        monkeypatch.setattr(fetch, "_cut_out", cut_out)
        former = Former(lost, peer, 5, given_up=newer.is_set)
        assert "the fetch was given up" in former.go_on()["error"]
        assert 1 <= len(asked) <= fetch.DEPTH
