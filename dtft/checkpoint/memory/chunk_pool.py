"""A pool of chunk buffers: each chunk has several, so that a copy can be staged beside
the last commit.

`ChunkPool` holds copies of some slices; a `Copy` says in which buffer each of its
chunks is, and equal chunks are shared. `BufferRefCounts` counts the references to each
buffer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.state import (
    ABSENT,
    DIGEST_BYTES,
    Chunks,
    Parts,
    Slice,
    chunk_digests,
    equal_chunks,
)

# Which buffers of which chunks are in use, by reference count.
#
# Every chunk has the same number of buffers. A version refers to one buffer of each of
# its chunks; versions that share a chunk refer to the same buffer, which is free again
# when the last of them has gone. Vectorised: a version of 10^5 chunks costs little. Not
# thread-safe.


class BufferRefCounts:
    """Reference counts of buffers.

    >>> ref_counts = BufferRefCounts(num_chunks=2, num_buffers=2)
    >>> first = ref_counts.acquire(np.array([0, 1]))
    >>> second = ref_counts.acquire(np.array([1]))
    >>> first.tolist(), second.tolist(), ref_counts.acquire(np.array([1]))
    ([0, 0], [255, 1], None)
    >>> ref_counts.release(first)
    >>> ref_counts.free_buffers.tolist()
    [True, False]
    """

    def __init__(self, num_chunks: int, num_buffers: int) -> None:
        """Starts with every buffer free."""
        if num_chunks < 0 or not 1 <= num_buffers < ABSENT:
            raise ValueError(
                f"num_chunks={num_chunks}, num_buffers={num_buffers}. Allowed: 0 or "
                f"more chunks with 1 to {ABSENT - 1} buffers. Change the one that is "
                "not."
            )
        self.num_buffers = num_buffers
        self._counts = np.zeros((num_buffers, num_chunks), np.uint16)

    @property
    def free_buffers(self) -> np.ndarray:
        """[buffers] bool: whether no chunk is there."""
        return (self._counts == 0).all(axis=1)

    def acquire(self, numbers: np.ndarray) -> np.ndarray | None:
        """A free buffer of each of some chunks, now referred to once.

        Args:
            numbers: the numbers of the chunks, each at most once.

        Returns:
            [chunks] uint8, absent for the other chunks; None, and nothing is taken, if
            one of them has no free buffer.
        """
        free = self._counts[:, numbers] == 0
        if not free.any(axis=0).all():
            return None
        buffers = self.absent()
        buffers[numbers] = free.argmax(axis=0)
        self._counts[buffers[numbers], numbers] = 1
        return buffers

    def absent(self) -> np.ndarray:
        """[chunks] uint8: a version that has no chunk."""
        return np.full(self._counts.shape[1], ABSENT, np.uint8)

    def retain(self, buffers: np.ndarray) -> None:
        """One more reference to the buffer of each chunk that is not absent."""
        self._counts[self._in_use(buffers)] += 1

    def release(self, buffers: np.ndarray) -> None:
        """One reference less; a buffer that nobody refers to is free."""
        self._counts[self._in_use(buffers)] -= 1

    def _in_use(self, buffers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.flatnonzero(buffers != ABSENT)
        at = buffers[numbers], numbers
        if numbers.size and not self._counts[at].all():
            wrong = int(numbers[self._counts[at] == 0][0])
            raise ValueError(
                f"buffers has buffer {buffers[wrong]} for chunk {wrong}, which is "
                "free. Acquire it first, and release it once per acquire or retain."
            )
        return at


# Memory for some slices with several buffers for every chunk, and copies in it.
#
# A copy says in which buffer each of its chunks is; copies share the chunks that are
# equal.


Read = dict[tuple[int, int], bytes]
"""(buffer, chunk) to the digest of the bytes there, read just now."""


@dataclass(kw_only=True)
class Copy:
    """What one version has of a pool's slices. Holds a reference to its buffers."""

    buffers: np.ndarray
    """[chunks] uint8: the buffer of each chunk."""
    digests: list[bytes]
    """Per slice 16 bytes for each chunk; empty if this version has not got it."""


class ChunkPool:
    """The buffers of some slices' chunks. Not thread-safe."""

    def __init__(
        self, chunks: Chunks, num_buffers: int, memory: Callable[[], memoryview]
    ) -> None:
        """`memory` gives `num_buffers` times `chunks.nbytes` bytes, always the same."""
        self.chunks, self._memory = chunks, memory
        self.ref_counts = BufferRefCounts(chunks.num_chunks, num_buffers)
        self.index = {piece: at for at, piece in enumerate(chunks.slices)}
        self.rotten: set[tuple[int, int]] = set()
        """(buffer, chunk) whose bytes were found wrong, until they are written anew."""

    def acquire(self, numbers: np.ndarray) -> np.ndarray | None:
        """Free buffers of some chunks, to be written; see `BufferRefCounts.acquire`."""
        found = self.ref_counts.acquire(numbers)
        if found is not None and self.rotten:
            self.rotten -= {(int(found[number]), int(number)) for number in numbers}
        return found

    def rotten_in(self, copy: Copy) -> list[int]:
        """The chunks of a copy that were found wrong."""
        return [
            number for buffer, number in self.rotten if copy.buffers[number] == buffer
        ]

    def parts(self, copy: Copy, index: int) -> Parts:
        """The bytes of one slice, in as few pieces as there are."""
        return self.chunks.parts(self._memory(), copy.buffers, index)

    def chunk(self, buffers: np.ndarray, number: int) -> memoryview:
        """The bytes of one chunk."""
        return self.at(int(buffers[number]), number)

    def at(self, buffer: int, number: int) -> memoryview:
        """The bytes of one chunk at one of its buffers."""
        return self.chunks.chunk(self._memory(), buffer, number)

    def held(self, copy: Copy) -> Iterator[tuple[Slice, Parts, bytes]]:
        """Every slice that a copy has, with its bytes and digests; reads nothing.

        One with a chunk that was found wrong does not count.
        """
        wrong = self.chunks.owners_of(self.rotten_in(copy)) if self.rotten else ()
        for index, digests in enumerate(copy.digests):
            if digests and index not in wrong:
                yield self.chunks.slices[index], self.parts(copy, index), digests

    def right(self, copy: Copy, index: int, read: Read) -> bool:
        """Whether every byte of a slice is what its digests say.

        Args:
            copy: the copy.
            index: which of the slices; a slice that the copy lacks is not right.
            read: what was read just now; not read again, and added to.
        """
        if not copy.digests[index]:
            return False
        numbers = self.chunks.numbers(index)
        for number in range(numbers.start, numbers.stop):
            at = int(copy.buffers[number]), number
            if at not in read:
                read[at] = chunk_digests(
                    self.chunk(copy.buffers, number), self.chunks.chunk_bytes
                )
        found = [
            read[int(copy.buffers[number]), number]
            for number in range(numbers.start, numbers.stop)
        ]
        return b"".join(found) == copy.digests[index]

    def fits(self, digests: list[bytes]) -> bool:
        """Whether there are as many digests as there are chunks, slice by slice."""
        counts = np.diff(self.chunks.first) * DIGEST_BYTES
        return [len(one) for one in digests] == counts.tolist()

    def unchanged(self, copy: Copy, digests: list[bytes]) -> np.ndarray:
        """[chunks] bool: where a copy has the bytes that other digests describe.

        Bytes are taken to be equal because their digests (xxh3-128) are: a changed
        chunk is mistaken for the old one by accident with a chance of 2^-128.
        """
        missing = [b"\0" * len(one) for one in digests]
        known = [one or none for one, none in zip(copy.digests, missing, strict=True)]
        equal = equal_chunks(b"".join(known), b"".join(digests))
        if self.rotten:
            equal[self.rotten_in(copy)] = False
        return equal & (copy.buffers != ABSENT)

    def release(self, copy: Copy) -> None:
        """Gives up a copy; chunks that no other copy has are free."""
        self.ref_counts.release(copy.buffers)
