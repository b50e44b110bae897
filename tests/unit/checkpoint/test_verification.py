"""Copies that are read again: a flipped bit is found, and the copy used no more."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.elastic.transfer.replication import Pusher
from tests.support.hosts import (
    CHUNK,
    EPOCH,
    JOB,
    Host,
    content,
    divided,
    hand_over,
    hosts,
    recorded_pushes,
    stage,
    wait_until,
)

BIG = "big"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts that hold step 7, each its own slices and the other's."""
    with hosts(tmp_path, divided(2)) as found:
        for host in found:
            host.stage(7)
        for host, other in (found, found[::-1]):
            (push,) = host.holder.outgoing
            assert hand_over(host.holder, other.holder, push, 7)
        yield found


def wrong(holder: ReplicaStore) -> list[str]:
    """What is found now, without what was found before."""
    verifier = holder.verifier
    reads = [verifier.read(number) for number in range(verifier.num_chunks)]
    return [f"step {step}: {key}" for one in reads for step, key in one.corrupt]


def rot(holder: ReplicaStore, step: int, slot: int) -> str:
    """Flips a bit in the middle of a slot's largest slice; returns its key."""
    pieces = holder.layout.slices(slot)
    (key,) = (piece.key for piece in pieces if piece.path == BIG)
    (parts,) = holder.find(step, [key])
    (byte,) = parts.cut(5_000, 5_001)
    byte[0] ^= 4
    return key


def frozen(key: str, size: int) -> bytes:
    """What does not change after step 7."""
    return content(7, key, size)


def content_of_8(key: str, size: int) -> bytes:
    """Other bytes than those of step 7."""
    return content(8, key, size)


def test_a_pass_reads_every_byte_that_is_kept_once(pair: list[Host]) -> None:
    holder = pair[0].holder
    stage(holder, 8, frozen)  # another version in other buffers
    read: list[int] = []
    found = holder.verifier.verify(read.append)
    own = sum(piece.nbytes for piece in holder.own_slices)
    assert found.nbytes == sum(read) == 3 * own  # 7, 8 and the peer's 7
    assert holder.verifier.num_bytes == found.nbytes
    assert found.copies == 4 + 4 + 3  # a slice without bytes is not pushed
    assert found.corrupt == found.unread == ()
    assert found.held == holder.holdings()[0]
    with pytest.raises(IndexError):
        holder.verifier.read(holder.verifier.num_chunks)


def test_a_copy_that_was_dropped_or_replaced_counts_as_unread(
    pair: list[Host],
) -> None:
    holder = pair[0].holder
    stage(holder, 8, frozen)
    stage(holder, 9, frozen)
    changes = [lambda: holder.keep_only({8, 9}), lambda: stage(holder, 9, frozen)]

    def after(nbytes: int) -> None:
        if changes:
            changes.pop()()

    found = holder.verifier.verify(after)
    assert found.unread == (7, 9) and found.corrupt == ()
    assert set(found.held) == {7, 8, 9}  # as it was when the reading began


def test_a_verification_names_step_and_slice_and_ends_when_told(
    pair: list[Host],
) -> None:
    holder = pair[0].holder
    key = rot(holder, 7, pair[0].slot)
    found = holder.verifier.verify()
    assert found.corrupt == (f"step 7: {key}",) and key not in found.held[7]
    assert holder.verifier.verify().corrupt == found.corrupt  # said until it has gone

    def stop(nbytes: int) -> None:
        raise ConnectionError("who asked has gone")

    with pytest.raises(ConnectionError, match="has gone"):
        holder.verifier.verify(stop)


def test_a_peers_copy_that_rots_is_given_to_nobody_and_sent_again(
    pair: list[Host],
) -> None:
    source, target = pair
    key = rot(target.holder, 7, source.slot)
    assert wrong(target.holder) == [f"step 7: {key}"]
    assert wrong(target.holder) == []  # it is said once
    assert target.holder.verifier.known() == [f"step 7: {key}"]
    with pytest.raises(KeyError):
        target.holder.find(7, [key])
    assert key not in [told for told, *_ in target.holder.copies(7)]
    stage(source.holder, 8, frozen)
    (push,) = source.holder.outgoing
    pusher = Pusher(source.holder, push, target.address, JOB, EPOCH, 10.0)
    with recorded_pushes() as sent:
        pusher.offer(8)
        wait_until(lambda: target.held == [(8, source.slot)] and bool(sent))
        pusher.close()
    assert [one.nbytes for one in sent] == [CHUNK]  # of all chunks just the one
    assert bytes(target.holder.find(8, [key])[0]) == frozen(key, 12_000)
    target.holder.drop_before(8, keep=set())
    assert target.holder.holdings()[1] == [] and wrong(target.holder) == []
    assert target.holder.verifier.known() == []


def test_a_step_whose_only_copy_rots_is_not_listed(pair: list[Host]) -> None:
    source, target = pair
    stage(source.holder, 8, content_of_8)
    (push,) = source.holder.outgoing
    assert hand_over(source.holder, target.holder, push, 8)
    assert target.holder.steps() == (7, 8)
    pieces = [piece for piece in source.holder.own_slices if piece.nbytes]
    for piece in pieces:
        (parts,) = target.holder.find(8, [piece.key])
        next(iter(parts.cut(0, 1)))[0] ^= 1
    assert 8 not in target.holder.holdings()[0]
    assert target.holder.steps() == (7,)
    with pytest.raises(KeyError):
        target.holder.items(8)
    assert hand_over(source.holder, target.holder, push, 8)  # and comes again
    assert target.holder.steps() == (7, 8) and 8 in target.holder.holdings()[0]


def test_an_own_copy_that_rots_is_written_anew(pair: list[Host]) -> None:
    holder = pair[0].holder
    key = rot(holder, 7, pair[0].slot)
    assert wrong(holder) == [f"step 7: {key}"]
    assert key not in holder.here(7)
    assert holder.begin_stage(8).base == -1  # so the trainer keeps nothing
    stage(holder, 8, frozen)
    assert key in holder.here(8) and holder.begin_stage(9).base == 8
    holder.drop_before(8, keep=set())
    for step in (9, 10, 11, 12):  # its buffer is used again, and is right then
        stage(holder, step, frozen)
        holder.drop_before(step, keep=set())
        assert key in holder.here(step) and wrong(holder) == []


@pytest.mark.parametrize("read", [True, False])
def test_a_restore_takes_what_has_rotted_from_the_peer(
    pair: list[Host], read: bool
) -> None:
    holder = pair[0].holder
    key = rot(holder, 7, pair[0].slot)
    wrong(holder)
    keys = [piece.key for piece in holder.own_slices]
    digests = dict(zip(keys, holder.all_own_digests(7), strict=True))
    with holder.begin_restore(7, digests, {}, read) as restoring:
        (missing,) = restoring.missing
        assert missing.key == key
        (good,) = pair[1].holder.find(7, [key])
        restoring.parts(missing).fill(good)
        restoring.restored({key: digests[key]})
    assert key in holder.here(7) and wrong(holder) == []


def test_what_is_replaced_while_it_is_read_is_not_taken_for_wrong(
    pair: list[Host],
) -> None:
    (source, target), done, found = pair, threading.Event(), []

    def read() -> None:
        while not done.is_set():
            found.extend(wrong(source.holder) + wrong(target.holder))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    (push,) = source.holder.outgoing
    for step in range(8, 40):
        source.stage(step)
        assert hand_over(source.holder, target.holder, push, step)
        for host in pair:
            host.holder.drop_before(step, keep=set())
    done.set()
    reader.join(20)
    assert not reader.is_alive() and found == []


def test_what_is_known_to_be_wrong_is_reported_without_being_read(
    pair: list[Host],
) -> None:
    source, target = pair
    key = rot(target.holder, 7, source.slot)
    wrong(target.holder)
    good, bad = target.holder.holdings(read=False)
    assert bad == [f"step 7: {key}"] and key not in good[7]
    (push,) = source.holder.outgoing  # the copy was forgotten: it can be sent again
    assert hand_over(source.holder, target.holder, push, 7)
    good, bad = target.holder.holdings(read=False)
    assert bad == [] and good == target.holder.holdings()[0]
    assert key in good[7]
