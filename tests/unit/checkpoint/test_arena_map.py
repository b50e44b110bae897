"""Where chunks lie: no two buffers overlap, and all lie inside the arena."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.memory.arena import (
    HOSTED_BUFFERS,
    OWN_BUFFERS,
    ArenaMap,
    arena_bytes,
)
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.digests import Chunks, Parts, pack_flags, unpack_flags
from dtft.checkpoint.state.slices import ALIGNMENT, Slice
from tests.support.states import layout


def ranges(chunks: Chunks, start: int, num_buffers: int) -> list[tuple[int, int]]:
    return [
        (start + buffer * chunks.nbytes + begin, size)
        for buffer in range(num_buffers)
        for begin, size in zip(
            chunks.starts.tolist(), chunks.sizes.tolist(), strict=True
        )
    ]


@given(st.integers(0, 3), st.integers(1, 4), st.sampled_from([1, 7, 64, 1000]))
@settings(deadline=None)
def test_places_lie_apart(slot: int, copies: int, chunk_bytes: int) -> None:
    whole = layout()
    found = ArenaMap.of(whole, slot, place_copies(whole, copies, "abcd"), chunk_bytes)
    held = ranges(found.own, 0, OWN_BUFFERS)
    for source, chunks in found.hosted.items():
        assert chunks.slices == found.incoming[source].slices
        held += ranges(chunks, found.hosted_starts[source], HOSTED_BUFFERS)
    held.sort()
    for (start, size), (after, _) in pairwise(held):
        assert start + size <= after
    assert held[0][0] == 0 and sum(held[-1]) <= found.size
    assert found.own.slices == whole.slices(slot)
    assert found.size == arena_bytes(whole, slot, place_copies(whole, copies, "abcd"))


def test_who_pushes_nothing_has_no_memory() -> None:
    whole = layout()
    found = ArenaMap.of(whole, 0, place_copies(whole, 1, "abcd"), 64)
    assert not found.incoming and found.size == OWN_BUFFERS * found.own.nbytes


sizes = st.lists(st.integers(0, 200), min_size=1, max_size=6)


@given(sizes, st.integers(1, 90), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_slice_is_found_wherever_its_chunks_are(sizes, chunk_bytes, random) -> None:
    slices = [
        Slice(path=f"p{i}", start=(0,), stop=(size,), dtype="uint8")
        for i, size in enumerate(sizes)
    ]
    chunks = Chunks.of(slices, chunk_bytes)
    memory = memoryview(bytearray(3 * chunks.nbytes))
    buffers = np.array(
        [random.randrange(3) for _ in range(chunks.num_chunks)], np.uint8
    )
    for index, size in enumerate(sizes):
        numbers = chunks.numbers(index)
        assert chunks.starts[numbers.start] % ALIGNMENT == 0
        data = random.randbytes(size)
        for number in range(numbers.start, numbers.stop):
            at = (number - numbers.start) * chunk_bytes
            view = chunks.chunk(memory, int(buffers[number]), number)
            view[:] = data[at : at + chunk_bytes]
        parts = chunks.parts(memory, buffers, index)
        assert bytes(parts) == bytes(parts.whole()) == data
        assert len(parts.views) == 1 + np.count_nonzero(np.diff(buffers[numbers]))
        low, high = sorted(random.randrange(size + 1) for _ in range(2))
        assert b"".join(parts.cut(low, high)) == data[low:high]


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 45), st.integers(0, 45))
def test_parts_are_cut_like_one_piece(sizes, start, stop) -> None:
    data = bytes(range(sum(sizes)))
    pieces, at = [], 0
    for size in sizes:
        pieces.append(memoryview(data)[at : at + size])
        at += size
    start, stop = sorted((min(start, len(data)), min(stop, len(data))))
    assert b"".join(Parts(pieces).cut(start, stop)) == data[start:stop]


@given(st.lists(st.booleans()))
def test_flags_survive_a_message(flags: list[bool]) -> None:
    packed = pack_flags(np.array(flags, bool))
    assert unpack_flags(packed, len(flags)).tolist() == flags
