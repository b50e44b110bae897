"""What one host holds: staging, hosting, retention, verification, restore."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from dtft.checkpoint.memory import chunk_pool, incoming, own_copies, verification
from dtft.checkpoint.memory.arena import OWN_BUFFERS
from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state import digests as state_digests
from dtft.checkpoint.state.digests import chunk_digests, pack_flags
from dtft.checkpoint.state.slices import Layout
from tests.support.commits import layout
from tests.support.hosts import hand_over, write
from tests.support.hosts import stage as write_step

CHUNK = 16


def set_digests(monkeypatch, digests_of) -> None:
    """Sets what the modules of a holder digest memory with."""
    for module in (state_digests, chunk_pool, incoming, own_copies, verification):
        monkeypatch.setattr(module, "chunk_digests", digests_of)


def holder(tmp_path: Path, state: Layout, slot: int) -> ReplicaStore:
    path = tmp_path / f"arena-{slot}"
    return ReplicaStore(
        state, slot, place_copies(state, 2), path=path, chunk_bytes=CHUNK
    )


def content(step: int, key: str, size: int) -> bytes:
    return bytes((step * 31 + len(key) * 7 + i) % 256 for i in range(size))


def stage(held: ReplicaStore, step: int) -> None:
    write_step(held, step, lambda key, size: content(step, key, size))


def missing(held: ReplicaStore, step: int, digests, read: bool = True):
    """What a restore that brings nothing finds to be missing."""
    with held.begin_restore(step, digests, {"step": step}, read) as restoring:
        return restoring.missing


def push(
    source: ReplicaStore, target: ReplicaStore, step: int, flip: bool = False
) -> bool:
    (one,) = source.outgoing
    return hand_over(source, target, one, step, flip)


@pytest.fixture
def pair(tmp_path: Path):
    state = layout(1, 2)
    held = holder(tmp_path, state, 0), holder(tmp_path, state, 1)
    yield held
    for one in held:
        one.close()


def test_everything_held_is_found_and_verified(pair):
    a, b = pair
    stage(a, 1)
    assert push(a, b, 1)
    good, bad = b.holdings()
    assert bad == []
    assert set(good[1]) == {piece.key for piece in a.outgoing[0].slices}
    (view,) = b.find(1, [a.outgoing[0].slices[0].key])
    piece = a.outgoing[0].slices[0]
    assert bytes(view) == content(1, piece.key, piece.nbytes)
    assert b.items(1) == {"step": 1}


def test_a_push_with_one_flipped_bit_is_not_kept(pair):
    a, b = pair
    stage(a, 1)
    assert not push(a, b, 1, flip=True)
    assert b.holdings() == ({}, [])


def test_a_flipped_bit_at_rest_is_reported_and_not_offered(pair):
    a, _ = pair
    stage(a, 1)
    a.own_parts(1, a.own_slices[0]).views[0][0] ^= 1
    good, bad = a.holdings()
    assert bad == [f"step 1: {a.own_slices[0].key}"]
    assert a.own_slices[0].key not in good[1]


def test_the_last_commit_stays_until_the_next_is_safe(pair):
    a, _ = pair
    for step in (1, 2, 3):
        stage(a, step)
    a.drop_before(3, keep={1})
    assert sorted(a.holdings()[0]) == [1, 3]
    a.drop_before(3, keep=set())
    assert sorted(a.holdings()[0]) == [3]


def test_a_pinned_step_keeps_its_bytes_while_others_come_and_go(pair):
    a, _ = pair
    stage(a, 1)
    pin, memory = a.pin(1), [a.own_parts(1, piece) for piece in a.own_slices]
    before = [bytes(parts) for parts in memory]
    for step in range(2, 12):
        stage(a, step)
        a.drop_before(step, keep=set())
    assert [bytes(parts) for parts in memory] == before
    a.unpin(pin)
    with pytest.raises(KeyError):
        a.pin(1)


def test_no_room_says_which_steps_are_in_the_way(pair):
    a, _ = pair
    for step in range(1, OWN_BUFFERS + 1):
        stage(a, step)
    with pytest.raises(RuntimeError, match="step 5.*1, 2, 3, 4"):
        a.begin_stage(OWN_BUFFERS + 1)


def test_restore_keeps_what_is_right_and_asks_for_the_rest(pair):
    a, b = pair
    stage(a, 1)
    push(a, b, 1)
    digests = dict(
        zip((p.key for p in a.own_slices), a.all_own_digests(1), strict=True)
    )
    assert missing(a, 1, digests) == ()
    a.own_parts(1, a.own_slices[0]).views[0][0] ^= 1
    with a.begin_restore(1, digests, {"step": 1}) as restoring:
        assert restoring.missing == (a.own_slices[0],)
        assert a.own_slices[0].key not in a.holdings()[0][1]
        for piece in restoring.missing:
            write(restoring.parts(piece), bytes(b.find(1, [piece.key])[0]))
        restoring.restored({piece.key: digests[piece.key] for piece in a.own_slices})
    assert missing(a, 1, digests) == ()


def test_a_restore_without_free_memory_is_refused_until_others_end(pair):
    a, _ = pair
    stage(a, 1)
    digests = dict(
        zip((p.key for p in a.own_slices), a.all_own_digests(1), strict=True)
    )
    with contextlib.ExitStack() as given_up:
        for _ in range(OWN_BUFFERS):
            a.keep_only(set())
            given_up.enter_context(a.begin_restore(1, digests, {}))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no free buffer to restore step 1"):
                a.begin_restore(1, digests, {})
        assert a.holdings() == ({}, [])
        with pytest.raises(RuntimeError, match="no free buffer for step 2.*given up"):
            a.begin_stage(2)
    assert missing(a, 1, digests) == a.own_slices
    a.keep_only(set())
    assert a._own.pool.ref_counts.free_buffers.all()


def test_what_was_verified_when_it_came_is_offered_without_being_read(pair):
    a, b = pair
    stage(a, 1)
    push(a, b, 1)
    before = [host.holdings() for host in (a, b)]
    a.own_parts(1, a.own_slices[0]).views[0][0] ^= 1
    assert [host.holdings(read=False) for host in (a, b)] == before
    digests = before[0][0][1]
    assert missing(a, 1, digests, read=False) == ()
    changed = digests | {a.own_slices[0].key: bytes(len(a.all_own_digests(1)[0]))}
    assert missing(a, 1, changed, read=False) == (a.own_slices[0],)


def test_a_new_host_reads_nothing_before_it_fetches(pair, monkeypatch):
    a, b = pair
    stage(a, 1)
    digests = dict(
        zip((p.key for p in a.own_slices), a.all_own_digests(1), strict=True)
    )
    a.keep_only(set())
    read = []
    set_digests(monkeypatch, lambda *_: read.append(1) or b"")
    assert missing(a, 1, digests) == a.own_slices
    assert read == [] and a.holdings() == ({}, [])


def test_steps_share_what_did_not_change_and_it_is_read_once(pair, monkeypatch):
    a, _ = pair
    stage(a, 1)
    room = a.begin_stage(2)
    assert room.base == 1
    count = a.map.own.num_chunks
    kept = pack_flags(np.ones(count, bool))
    a.staged(2, a.all_own_digests(1), {"step": 2}, kept)
    assert a.own_buffers(1) == a.own_buffers(2) != room.buffers
    read = []
    set_digests(monkeypatch, lambda *given: read.append(1) or chunk_digests(*given))
    good, bad = a.holdings()
    assert good[1] == good[2] and not bad and len(read) == count
    a.own_parts(2, a.own_slices[0]).views[0][0] ^= 1
    name = a.own_slices[0].key
    assert a.holdings()[1] == [f"step 1: {name}", f"step 2: {name}"]


def test_too_little_memory_is_refused_before_anything_is_taken(tmp_path, monkeypatch):
    state = layout(1, 2)
    monkeypatch.setattr("dtft.checkpoint.memory.arena._available", lambda path: 100)
    with pytest.raises(OSError, match="100"):
        holder(tmp_path, state, 0)
    assert not (tmp_path / "arena-0").exists()
