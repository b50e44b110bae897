"""What one host holds: staging, hosting, retention, verification, restore."""

from pathlib import Path

import pytest

from dtft.checkpoint.arena_map import OWN_VERSIONS
from dtft.checkpoint.digest import chunk_digests
from dtft.checkpoint.holder import Holder
from dtft.checkpoint.placement import place
from dtft.checkpoint.slices import Layout
from tests.elastic.test_recovery import layout

CHUNK = 16


def holder(tmp_path: Path, state: Layout, slot: int) -> Holder:
    path = tmp_path / f"arena-{slot}"
    return Holder(state, slot, place(state, 2), path=path, chunk_bytes=CHUNK)


def content(step: int, key: str, size: int) -> bytes:
    return bytes((step * 31 + len(key) * 7 + i) % 256 for i in range(size))


def stage(held: Holder, step: int) -> None:
    start, digests = held.begin_stage(step), []
    for piece, offset in held.map.own.items():
        data = content(step, piece.key, piece.nbytes)
        held.arena.view(start + offset, piece.nbytes)[:] = data
        digests.append(chunk_digests(data, CHUNK))
    held.staged(step, digests, {"step": step})


def push(source: Holder, target: Holder, step: int) -> bool:
    for one in source.outgoing:
        view = target.hosted_view(step, source.slot)
        view[:] = b"".join(bytes(v) for v in source.own_views(step, one))
        digests = source.own_digests(step, one.slices)
        return target.received(step, source.slot, digests, source.items(step))
    raise AssertionError("nothing to push")


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
    one = a.outgoing[0]
    view = b.hosted_view(1, 0)
    view[:] = b"".join(bytes(v) for v in a.own_views(1, one))
    view[3] ^= 1
    assert not b.received(1, 0, a.own_digests(1, one.slices), {})
    assert b.holdings() == ({}, [])


def test_a_flipped_bit_at_rest_is_reported_and_not_offered(pair):
    a, _ = pair
    stage(a, 1)
    start = a.own_offset(1)
    a.arena.view(start, 1)[0] ^= 1
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
    extent, before = a.pin(1), bytes(a.arena.view(a.own_offset(1), a.map.own_bytes))
    start = a.own_offset(1)
    for step in range(2, 12):
        stage(a, step)
        a.drop_before(step, keep=set())
    assert bytes(a.arena.view(start, a.map.own_bytes)) == before
    a.unpin(extent)
    with pytest.raises(KeyError):
        a.pin(1)


def test_no_room_says_which_steps_are_in_the_way(pair):
    a, _ = pair
    for step in range(1, OWN_VERSIONS + 1):
        stage(a, step)
    with pytest.raises(RuntimeError, match="step 5.*1, 2, 3, 4"):
        a.begin_stage(OWN_VERSIONS + 1)


def test_restore_keeps_what_is_right_and_asks_for_the_rest(pair):
    a, b = pair
    stage(a, 1)
    push(a, b, 1)
    digests = dict(
        zip((p.key for p in a.own_slices), a.all_own_digests(1), strict=True)
    )
    assert a.begin_restore(1, digests, {"step": 1}) == []
    a.arena.view(a.own_offset(1), 1)[0] ^= 1
    missing = a.begin_restore(1, digests, {"step": 1})
    assert [piece.key for piece in missing] == [a.own_slices[0].key]
    for piece in missing:
        a.own_slice_view(1, piece)[:] = b.find(1, [piece.key])[0]
    assert a.begin_restore(1, digests, {"step": 1}) == []


def test_too_little_memory_is_refused_before_anything_is_taken(tmp_path, monkeypatch):
    state = layout(1, 2)
    monkeypatch.setattr("dtft.checkpoint.arena._available", lambda path: 100)
    with pytest.raises(OSError, match="100"):
        holder(tmp_path, state, 0)
    assert not (tmp_path / "arena-0").exists()
