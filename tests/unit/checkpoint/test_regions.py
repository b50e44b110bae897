"""Slices of any layout made of whole, checked chunks of the slices of any other."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from dtft.checkpoint.replication.restore_plan import RestorePlan, plan_restore
from dtft.checkpoint.state.digests import chunk_digests, verify_digests
from dtft.checkpoint.state.partition import Region, digests_in, move_regions, span_of
from dtft.checkpoint.state.slices import Layout, Leaf, Slice
from tests.support.restores import SMALL, held_at, hosts, layouts

CHUNK = 96


def content(leaf: Leaf, piece: Slice) -> bytearray:
    """The bytes of a slice, each number its place in the leaf."""
    count = int(np.prod(leaf.shape, dtype=np.int64))
    size = np.dtype(leaf.dtype).itemsize
    numbers = np.arange(count, dtype=np.uint64).view(np.uint8).reshape(count, 8)
    raw = np.ascontiguousarray(np.resize(numbers, (count, size)))
    whole = raw.reshape(-1).view(np.dtype((np.void, size))).reshape(leaf.shape)
    ranges = zip(piece.start, piece.stop, strict=True)
    return bytearray(whole[tuple(slice(a, b) for a, b in ranges)].tobytes())


def read_span(leaf: Leaf, regions: list[Region]) -> memoryview:
    """An old slice of which only the span was fetched and checked."""
    old = regions[0].old
    whole = content(leaf, old)
    span = span_of(regions, CHUNK)
    assert span[0] % CHUNK == 0
    assert span[1] % CHUNK == 0 or span[1] == old.nbytes
    expected = digests_in(chunk_digests(whole, CHUNK), span, CHUNK)
    assert verify_digests(whole[slice(*span)], expected, CHUNK) == ()
    seen = bytearray(b"?" * old.nbytes)
    seen[slice(*span)] = whole[slice(*span)]
    return memoryview(seen)


@settings(max_examples=12, deadline=None)
@given(layouts(), layouts())
def test_every_slice_of_a_new_layout_is_assembled(old: Layout, new: Layout) -> None:
    # Three leaves divided in some way, and the one that is cut between senders.
    new, old = (
        dataclasses.replace(it, leaves=(*it.leaves[:3], it.leaves[-1]))
        for it in (new, old)
    )
    slots = hosts(old.mesh.num_slots)
    targets = hosts(new.mesh.num_slots)
    holdings = held_at(old, slots)
    plan = plan_restore(holdings, new, slots=targets, alive=slots, whole_bytes=SMALL)
    assert isinstance(plan, RestorePlan)
    leaves = {leaf.path: leaf for leaf in new.leaves}
    for slot, host in enumerate(targets):
        made = {piece: bytearray(b"!" * piece.nbytes) for piece in new.slices(slot)}
        sources = [plan.own(host), *(t.regions for t in plan.transfers_to(host))]
        for regions in sources:
            by_old: dict[Slice, list[Region]] = {}
            for region in regions:
                by_old.setdefault(region.old, []).append(region)
            for parts in by_old.values():
                seen = read_span(leaves[parts[0].old.path], parts)
                for region in parts:
                    move_regions(region, seen, memoryview(made[region.new]))
        for piece, found in made.items():
            assert found == content(leaves[piece.path], piece), piece.key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "float64"])
def test_not_a_bit_changes_whatever_the_numbers_mean(dtype: str) -> None:
    size = np.dtype(dtype).itemsize
    old = Slice(path="w", start=(0, 0), stop=(16, 4), dtype=dtype)
    new = Slice(path="w", start=(4, 0), stop=(12, 4), dtype=dtype)
    noise = np.random.default_rng(0).bytes(old.nbytes)  # NaNs with payloads, -0.0
    target = bytearray(new.nbytes)
    move_regions(
        Region(old=old, new=new, moved=new), memoryview(noise), memoryview(target)
    )
    assert target == noise[4 * 4 * size : 12 * 4 * size]
