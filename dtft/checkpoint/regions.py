"""Pieces of old slices that become pieces of new ones, as bytes in memory.

A region is cut out of a slice that was committed with a digest for every chunk. So what
is read of the old slice are always whole chunks, checked against the commit before a
byte of them is used; digests that a sender made on the way would only prove that the
bytes arrived as they were sent. Bytes are moved as they are, whatever the dtype. Must
not know steps, peers or arenas.
"""

from collections.abc import Sequence

import numpy as np

from dtft.checkpoint.digest import DIGEST_BYTES
from dtft.checkpoint.overlap import Region
from dtft.checkpoint.slices import Slice

Span = tuple[int, int]
"""First byte of a slice, and one past the last."""


def span_of(regions: Sequence[Region], chunk_bytes: int) -> Span:
    """The whole chunks of one old slice that hold all of these regions.

    Args:
        regions: not empty, all cut from the same old slice.
        chunk_bytes: bytes under one digest.

    >>> old = Slice(path="w", start=(0,), stop=(100,), dtype="int8")
    >>> moved = Slice(path="w", start=(30,), stop=(50,), dtype="int8")
    >>> span_of([Region(old=old, new=moved, moved=moved)], chunk_bytes=16)
    (16, 64)
    """
    old = regions[0].old
    size = np.dtype(old.dtype).itemsize
    first, last = old.nbytes, 0
    for region in regions:
        begin = _within(region.moved.start, old)
        end = _within([stop - 1 for stop in region.moved.stop], old)
        first = min(first, _flat(begin, old.shape) * size)
        last = max(last, (_flat(end, old.shape) + 1) * size)
    return (
        first // chunk_bytes * chunk_bytes,
        min(-(-last // chunk_bytes) * chunk_bytes, old.nbytes),
    )


def digests_in(digests: bytes, span: Span, chunk_bytes: int) -> bytes:
    """Of a slice's digests those of the chunks in a span that `span_of` made."""
    first, last = span[0] // chunk_bytes, -(-span[1] // chunk_bytes)
    return digests[first * DIGEST_BYTES : last * DIGEST_BYTES]


def move(region: Region, old: memoryview, new: memoryview) -> None:
    """Copies a region.

    Args:
        region: what is moved.
        old: the bytes of the old slice; only those of the region are read.
        new: the bytes of the new slice; only those of the region are written.
    """
    source = _array(old, region.old)[_index(region.moved, region.old)]
    _array(new, region.new)[_index(region.moved, region.new)] = source


def _array(memory: memoryview, piece: Slice) -> np.ndarray:
    # Uninterpreted items: copying floats as floats may change the payload of a NaN.
    raw = np.dtype((np.void, np.dtype(piece.dtype).itemsize))
    return np.frombuffer(memory, raw).reshape(piece.shape)


def _index(inner: Slice, outer: Slice) -> tuple[slice, ...]:
    begin, end = _within(inner.start, outer), _within(inner.stop, outer)
    return tuple(slice(a, b) for a, b in zip(begin, end, strict=True))


def _within(place: Sequence[int], outer: Slice) -> tuple[int, ...]:
    return tuple(a - base for a, base in zip(place, outer.start, strict=True))


def _flat(place: Sequence[int], shape: Sequence[int]) -> int:
    """The position of an element in row-major order."""
    at = 0
    for index, extent in zip(place, shape, strict=True):
        at = at * extent + index
    return at
