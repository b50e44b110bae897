"""Pushes: only what is lacking travels, a cut goes on, and nothing else is touched."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.managers.agent_client import (
    MAX_ITEMS_BYTES,
    AgentCheckpointManager,
    SaveArgs,
)
from dtft.checkpoint.managers.agent_link import AgentLink, Dialogue
from dtft.checkpoint.state.digests import Chunks, chunk_digests, unpack_flags
from dtft.checkpoint.transport import push
from dtft.checkpoint.transport.connection import Channel
from dtft.checkpoint.transport.push import frames_of
from dtft.checkpoint.transport.server import connect
from dtft.elastic.transfer import replication
from dtft.elastic.transfer.replication import Pusher
from tests.support.hosts import (
    CHUNK,
    EPOCH,
    JOB,
    Host,
    content,
    divided,
    hosts,
    recorded_pushes,
    stage,
    wait_until,
    write,
)


@given(st.lists(st.integers(0, 30)), st.integers(1, 40), st.sets(st.integers(0, 50)))
def test_frames_have_every_lacking_chunk_once(sizes, most, numbers) -> None:
    lacks = np.array(sorted(n for n in numbers if n < len(sizes)), np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "FRAME_BYTES", most)
        frames = frames_of(lacks, np.array(sizes, np.int64))
    assert [number for frame in frames for number in frame] == lacks.tolist()
    for frame in frames:
        assert len(frame) == 1 or sum(sizes[n] for n in frame) <= most


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    monkeypatch.setattr(push, "FRAME_BYTES", 4 * CHUNK)
    with hosts(tmp_path, divided(2)) as made:
        yield made


def announce(host: Host, source: int, step: int) -> tuple[dict, list[bytes]]:
    """What a push says first, and its chunks."""
    push = host.holder.map.incoming[source]
    parts = [content(step, piece.key, piece.nbytes) for piece in push.slices]
    header = {
        "epoch": EPOCH,
        "source": source,
        "step": step,
        "digests": [chunk_digests(part, CHUNK) for part in parts],
        "items": {},
    }
    cut = [part[i : i + CHUNK] for part in parts for i in range(0, len(part), CHUNK)]
    sizes = Chunks.of(push.slices, CHUNK).sizes.tolist()
    for number, size in enumerate(sizes):
        if not size:
            cut.insert(number, b"")
    return header, cut


def answer(channel: Channel, header: dict, count: int) -> list[int]:
    """The chunks that a peer lacks."""
    channel.send(header, timeout_s=5)
    reply = channel.receive(5)[0]
    return np.flatnonzero(unpack_flags(reply["lacks"], count)).tolist()


def end(channel: Channel) -> dict[str, Any]:
    channel.send({"end": True}, timeout_s=5)
    return channel.receive(5)[0]


def send(channel: Channel, chunks: list[bytes], numbers: list[int]) -> None:
    payload = [chunks[number] for number in numbers]
    channel.send({"chunks": numbers}, payload, timeout_s=5)


def pushed(pair: list[Host], step: int) -> int:
    """Pushes a staged step from the first host to the second; the bytes that went."""
    (one,) = pair[0].holder.outgoing
    with recorded_pushes() as sent:
        pusher = Pusher(pair[0].holder, one, pair[1].address, JOB, EPOCH, 10.0)
        pusher.offer(step)
        wait_until(lambda: any(try_.done for try_ in sent))
        pusher.close()
    return sum(try_.nbytes for try_ in sent)


def test_only_changed_chunks_travel(pair: list[Host]) -> None:
    sender, receiver = pair
    whole = sum(piece.nbytes for piece in sender.holder.outgoing[0].slices)
    sender.stage(1)
    assert pushed(pair, 1) == whole
    big = next(p for p in sender.holder.own_slices if p.path == "big")

    def changed(key: str, size: int) -> bytes:
        data = bytearray(content(1, key, size))
        if key == big.key:
            data[3 * CHUNK] ^= 1
        return bytes(data)

    stage(sender.holder, 2, changed)
    assert pushed(pair, 2) == CHUNK
    assert pushed(pair, 2) == 0  # it is there: nothing travels again
    stage(sender.holder, 3, changed)
    assert pushed(pair, 3) == 0
    receiver.holder.keep_only({3})
    (parts,) = receiver.holder.find(3, [big.key])
    assert bytes(parts) == changed(big.key, big.nbytes)
    assert receiver.holder.holdings()[1] == []


def test_a_step_with_large_items_arrives(pair: list[Host]) -> None:
    sender, receiver = pair
    sender.stage(1)
    items = sender.holder.items(1)
    items["text"] = "x" * (5 << 20)
    pushed(pair, 1)
    assert receiver.holder.items(1) == items and receiver.wrong() == []


def test_a_step_that_can_never_be_sent_is_told_and_the_next_is_sent(
    pair: list[Host], caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = pair
    for step in (1, 2):
        sender.stage(step)
    sender.holder.items(1)["text"] = "x" * (17 << 20)
    (one,) = sender.holder.outgoing
    pusher = Pusher(sender.holder, one, receiver.address, JOB, EPOCH, 10.0)
    pusher.offer(1)
    pusher.offer(2)
    wait_until(lambda: receiver.held == [(2, 0)])
    pusher.close()
    (record,) = [it for it in caplog.records if it.levelname == "WARNING"]
    assert "step 1 cannot be sent" in record.getMessage()
    assert "Allowed: 16777216" in record.getMessage()


def test_items_too_large_to_be_pushed_are_refused_when_they_are_saved(
    tmp_path: Path,
) -> None:
    ours, theirs = (AgentLink(end) for end in socket.socketpair())
    manager = AgentCheckpointManager(
        Dialogue(ours, 5.0), slot=0, chunk_bytes=CHUNK, storage_directory=tmp_path
    )
    args = SaveArgs(arrays={}, items={"text": "x" * MAX_ITEMS_BYTES})
    with pytest.raises(ValueError, match=r"items of step 3 .*Allowed: 3145728\."):
        manager.save(3, args=args)
    with pytest.raises(TimeoutError):  # nothing was asked for
        theirs.receive(0.01)
    for end in (ours, theirs):
        end.close()


def test_a_pusher_that_is_closed_as_it_connects_sends_nothing(
    pair: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Channel] = []

    def connecting(*arguments: Any) -> Channel:
        made.append(connect(*arguments))
        pusher.close()
        return made[0]

    monkeypatch.setattr(replication, "connect", connecting)
    pair[0].stage(1)
    (one,) = pair[0].holder.outgoing
    pusher = Pusher(pair[0].holder, one, pair[1].address, JOB, EPOCH, 10.0)
    pusher.offer(1)
    wait_until(lambda: bool(made) and made[0]._closed)
    assert pair[1].held == [] and not pair[1].receiving


def test_a_push_that_was_cut_goes_on_after_what_was_verified(pair: list[Host]) -> None:
    header, chunks = announce(pair[1], 0, 5)
    everything = list(range(len(chunks)))
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        assert answer(channel, header, len(chunks)) == everything
        send(channel, chunks, everything[:3])
        damaged = [bytes(len(one)) for one in chunks]
        send(channel, damaged, everything[3:5])
        send(channel, chunks, everything[5:9])
        assert end(channel) == {"done": False}
        assert answer(channel, header, len(chunks)) == [3, 4, *everything[9:]]
        send(channel, chunks, [3])
        assert channel._sealer is not None
        begun = channel._sealer.frame({"chunks": [4]}, len(chunks[4]))
        channel.stream.socket.setblocking(True)
        channel.stream.socket.sendall(begun + chunks[4][:7])
    wait_until(lambda: not pair[1].holder._hosting.receiving[5, 0].users)
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        assert answer(channel, header, len(chunks)) == [4, *everything[9:]]
        send(channel, chunks, [4, *everything[9:]])
        assert end(channel) == {"done": True}
    assert pair[1].held == [(5, 0)] and pair[1].wrong() == []


def test_large_pushes_take_several_connections(
    pair: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "STREAM_BYTES", 4000)
    opened: list[str] = []
    serving = pair[1].server._handlers["push"]

    def count(channel: Channel) -> None:
        opened.append(channel.address)
        serving(channel)

    pair[1].server._handlers["push"] = count
    pair[0].stage(1)
    pushed(pair, 1)
    assert pair[1].wrong() == [] and pair[1].held == [(1, 0)]
    assert len(opened) == 3  # of 13,008 bytes
    assert not pair[1].holder._hosting.receiving


def test_two_connections_never_write_the_same_chunk(pair: list[Host]) -> None:
    header, chunks = announce(pair[1], 0, 5)
    everything = list(range(len(chunks)))
    hello = {"op": "push"}
    with connect(pair[1].address, JOB, hello, 5) as one:
        with connect(pair[1].address, JOB, hello, 5) as other:
            answer(one, header, len(chunks))
            assert answer(other, header, len(chunks)) == everything
            send(one, chunks, everything)
            assert end(one) == {"done": True}
            send(other, [b"?" * len(part) for part in chunks], everything)
            assert end(other) == {"done": True}  # it was there already
    assert pair[1].held == [(5, 0)] and pair[1].wrong() == []


def test_other_bytes_of_the_same_step_do_not_touch_what_is_here(
    pair: list[Host],
) -> None:
    header, chunks = announce(pair[1], 0, 5)
    changed = [b"?" * len(one) for one in header["digests"]]
    other = header | {"digests": changed}
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        answer(channel, header, len(chunks))
        with connect(pair[1].address, JOB, {"op": "push"}, 5) as second:
            second.send(other, timeout_s=5)
            assert second.receive(5)[0] == {"done": False}
        send(channel, chunks, list(range(len(chunks))))
        assert end(channel) == {"done": True}
        channel.send(other, timeout_s=5)
        assert channel.receive(5)[0] == {"done": False}
    assert pair[1].wrong() == [] and 5 in pair[1].holder.holdings()[0]


def test_a_dropped_step_is_not_taken_up_again_by_its_late_bytes(
    pair: list[Host],
) -> None:
    header, chunks = announce(pair[1], 0, 5)
    holder = pair[1].holder
    ref_counts = holder._hosting.pools[0].ref_counts
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        numbers = answer(channel, header, len(chunks))
        send(channel, chunks, numbers[:2])
        holder.keep_only(set())
        assert (
            ref_counts.free_buffers.sum() == 2
        )  # what may be written is nobody else's
        send(channel, chunks, numbers[2:])
        assert end(channel) == {"done": False}
        wait_until(lambda: bool(ref_counts.free_buffers.all()))
    assert holder.holdings() == ({}, []) and pair[1].held == []


def test_an_older_epochs_push_counts_no_more(pair: list[Host]) -> None:
    header, chunks = announce(pair[1], 0, 5)
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        answer(channel, header, len(chunks))
        pair[1].epoch = (EPOCH[0] + 1, 0)
        send(channel, chunks, list(range(len(chunks))))
        assert end(channel) == {"done": False}
        channel.send(header, timeout_s=5)
        assert channel.receive(5)[0] == {"done": True}  # not to be repeated
    assert pair[1].held == []


def test_too_many_steps_at_once_are_refused_and_leave_nothing(pair: list[Host]) -> None:
    holder = pair[1].holder
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        for step in range(20):
            header, chunks = announce(pair[1], 0, step)
            if step < 3:
                numbers = answer(channel, header, len(chunks))
                send(channel, chunks, numbers)
                assert end(channel) == {"done": True}
            else:
                channel.send(header, timeout_s=5)
                assert channel.receive(5)[0] == {"done": False}
    assert holder.steps() == (0, 1, 2) and not holder._hosting.receiving


def test_unfinished_pushes_give_way(pair: list[Host]) -> None:
    for step in (7, 8, 9, 10, 11):
        header, chunks = announce(pair[1], 0, step)
        with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
            numbers = answer(channel, header, len(chunks))
            send(channel, chunks, numbers[:5])
            assert end(channel) == {"done": False}
    header, chunks = announce(pair[1], 0, 6)
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        send(channel, chunks, answer(channel, header, len(chunks)))
        assert end(channel) == {"done": True}
    assert pair[1].wrong() == []


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"epoch": EPOCH, "source": [0], "step": 1, "digests": [], "items": {}},
        {"epoch": EPOCH, "source": 0, "step": -1, "digests": [], "items": {}},
        {"epoch": EPOCH, "source": 0, "step": True, "digests": [], "items": {}},
        {"epoch": [1], "source": 0, "step": 1, "digests": [], "items": {}},
        {"epoch": EPOCH, "source": 0, "step": 1, "digests": [3], "items": {}},
        {"epoch": EPOCH, "source": 0, "step": 1, "digests": [], "items": []},
    ],
)
def test_malformed_pushes_end_their_connection_only(
    pair: list[Host], header: dict
) -> None:
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        channel.send(header, timeout_s=5)
        with pytest.raises(ConnectionError):
            channel.receive(5)
    assert pair[1].holder.holdings() == ({}, [])


@pytest.mark.parametrize(
    ("frame", "size"),
    [
        ({"chunks": None}, 0),
        ({"chunks": [0]}, CHUNK - 1),
        ({"chunks": [0]}, CHUNK + 1),
        ({"chunks": [0, 0]}, 2 * CHUNK),
        ({"chunks": [-1]}, CHUNK),
        ({"chunks": [10**9]}, CHUNK),
        ({"chunks": [True]}, CHUNK),
        ({"chunks": [0.0]}, CHUNK),
        ({"end": True}, 1),
        ({}, CHUNK),
        ({"chunks": list(range(2000))}, 0),
    ],
)
def test_frames_with_other_chunks_end_their_connection_only(
    pair: list[Host], frame: dict, size: int
) -> None:
    header, chunks = announce(pair[1], 0, 5)
    with connect(pair[1].address, JOB, {"op": "push"}, 5) as channel:
        answer(channel, header, len(chunks))
        channel.send(frame, [bytes(size)], timeout_s=5)
        with pytest.raises(ConnectionError):
            channel.receive(5)
    wait_until(lambda: not pair[1].holder._hosting.receiving)
    assert pair[1].holder.holdings() == ({}, [])


def test_a_copy_that_rots_is_not_the_base_of_the_next(pair: list[Host]) -> None:
    """A flipped bit in a shared chunk is found in every step that has it."""
    pair[0].stage(1)
    pushed(pair, 1)
    stage(pair[0].holder, 2, lambda key, size: content(1, key, size))
    assert pushed(pair, 2) == 0
    big = next(p for p in pair[0].holder.own_slices if p.path == "big")
    write(pair[1].holder.find(1, [big.key])[0], b"??", 500)
    assert pair[1].holder.holdings()[1] == [
        f"step {step}: {big.key}" for step in (1, 2)
    ]
