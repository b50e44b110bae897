"""Memory for restored arrays: aligned, apart, freed with the last array of a slab."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.memory.arena import ALIGNMENT, SLAB_BYTES, AlignedAllocator

SIZES = st.lists(st.integers(0, 3 << 20), max_size=12)


@given(sizes=SIZES, share=st.floats(0, 1))
def test_pieces_are_aligned_writable_and_apart(sizes, share):
    allocator = AlignedAllocator(
        int(sum(sizes) * share)
    )  # a wrong total costs time only
    taken = [allocator.take(size) for size in sizes]
    for number, piece in enumerate(taken):
        piece[:] = number
    for number, (size, piece) in enumerate(zip(sizes, taken, strict=True)):
        assert piece.dtype == np.uint8 and len(piece) == size
        assert not size or piece.ctypes.data % ALIGNMENT == 0
        assert (piece == number).all()


def test_small_pieces_share_a_slab_and_large_ones_do_not():
    allocator = AlignedAllocator(SLAB_BYTES + 300)
    small, other = allocator.take(100), allocator.take(200)
    large = allocator.take(SLAB_BYTES)
    begins = [one.ctypes.data for one in (small, other, large)]
    assert begins[1] - begins[0] == 128
    assert not begins[0] <= begins[2] < begins[0] + SLAB_BYTES
    assert large.base is not None and len(large) == SLAB_BYTES
