"""Slices cut into chunks, and where the chunks of one version lie.

A chunk never crosses a slice, and a slice that is smaller than a chunk is one chunk.
Every chunk has the same few places in memory: place p of a chunk is where it lies in
the p-th of several versions laid out one after the other. So what changes at every step
stays in one piece, and what does not change stays where it is. Pure: must not know who
uses which place, nor steps, hosts or digests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.parts import Parts
from dtft.checkpoint.slices import Slice, offsets_of

ABSENT = 255
"""In place of a place: this version does not have the chunk."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunks:
    """The chunks of some slices, numbered slice by slice."""

    slices: tuple[Slice, ...]
    chunk_bytes: int
    nbytes: int
    """Size of a version: the slices where `offsets_of` puts them."""
    first: np.ndarray
    """[slices + 1] int64: number of the first chunk of each slice, then of all."""
    starts: np.ndarray
    """[chunks] int64: where in a version each chunk begins."""
    sizes: np.ndarray
    """[chunks] int64: bytes of each chunk."""

    @classmethod
    def of(cls, slices: Sequence[Slice], chunk_bytes: int) -> "Chunks":
        """Cuts slices.

        >>> one = Slice(path="w", start=(0,), stop=(10,), dtype="uint8")
        >>> empty = Slice(path="e", start=(0,), stop=(0,), dtype="uint8")
        >>> chunks = Chunks.of([one, empty, one], 4)
        >>> chunks.first.tolist(), chunks.sizes.tolist()
        ([0, 3, 4, 7], [4, 4, 2, 0, 4, 4, 2])

        Raises:
            ValueError: `chunk_bytes` is not a size.
        """
        if chunk_bytes < 1:
            raise ValueError(
                f"chunk_bytes={chunk_bytes} is not a size. Allowed: 1 or more bytes; "
                "4 to 16 MiB suit. Set chunk_bytes."
            )
        offsets, nbytes = offsets_of(slices)
        sizes = np.array([piece.nbytes for piece in slices], np.int64)
        counts = np.maximum(-(-sizes // chunk_bytes), 1)
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        before = np.arange(first[-1]) - np.repeat(first[:-1], counts)
        before *= chunk_bytes
        return cls(
            slices=tuple(slices),
            chunk_bytes=chunk_bytes,
            nbytes=nbytes,
            first=first,
            starts=np.repeat(np.array(offsets, np.int64), counts) + before,
            sizes=np.minimum(np.repeat(sizes, counts) - before, chunk_bytes),
        )

    @property
    def num_chunks(self) -> int:
        """Number of chunks of all slices."""
        return len(self.sizes)

    def numbers(self, index: int) -> slice:
        """The numbers of the chunks of one slice."""
        return slice(int(self.first[index]), int(self.first[index + 1]))

    def numbers_of(self, indices: Sequence[int]) -> np.ndarray:
        """[chunks of these slices] int64: their numbers, slice by slice."""
        found = [np.arange(self.first[i], self.first[i + 1]) for i in indices]
        return np.concatenate([np.arange(0), *found])

    def mask(self, indices: Sequence[int]) -> np.ndarray:
        """[chunks] bool: whether a chunk is of one of these slices."""
        chosen = np.zeros(len(self.slices), bool)
        chosen[list(indices)] = True
        return np.repeat(chosen, np.diff(self.first))

    def owners_of(self, numbers: Sequence[int]) -> set[int]:
        """Which of the slices some chunks are of."""
        return set((np.searchsorted(self.first, numbers, side="right") - 1).tolist())

    def chunk(self, memory: memoryview, place: int, number: int) -> memoryview:
        """One chunk at one of its places."""
        start = place * self.nbytes + int(self.starts[number])
        return memory[start : start + int(self.sizes[number])]

    def parts(self, memory: memoryview, places: np.ndarray, index: int) -> Parts:
        """Where one slice of a version lies: in as few pieces as there are.

        Args:
            memory: all places, version after version.
            places: [chunks] uint8, the place of each chunk in this version.
            index: which of the slices; none of its chunks may be absent.
        """
        numbers = self.numbers(index)
        mine = places[numbers]
        ends = [*(np.flatnonzero(np.diff(mine)) + 1).tolist(), len(mine)]
        views, begun = [], 0
        for end in ends:
            start = int(mine[begun]) * self.nbytes
            low, high = numbers.start + begun, numbers.start + end - 1
            stop = start + int(self.starts[high] + self.sizes[high])
            views.append(memory[start + int(self.starts[low]) : stop])
            begun = end
        return Parts(views)


def pack_flags(flags: np.ndarray) -> bytes:
    """Booleans as bits, for a message.

    >>> unpack_flags(pack_flags(np.array([True, False, True])), 3).tolist()
    [True, False, True]
    """
    return np.packbits(flags).tobytes()


def unpack_flags(packed: bytes, count: int) -> np.ndarray:
    """[count] bool from `pack_flags`; no bytes at all mean that none is set.

    Raises:
        ValueError: there are too few or too many bytes.
    """
    if not packed:
        return np.zeros(count, bool)
    if len(packed) != -(-count // 8):
        raise ValueError(
            f"packed has {len(packed)} bytes, but {count} flags need "
            f"{-(-count // 8)}. Send the bits of exactly the flags that there are."
        )
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(bool)
