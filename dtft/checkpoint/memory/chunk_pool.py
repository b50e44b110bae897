"""A pool of chunk buffers, with several buffers for each chunk.

With several buffers, a new step can be written while the copy of the last commit is
kept. `ChunkPool` holds the buffers. A `Copy` is one version (the chunks of one step):
it lists the buffer number of each chunk. Copies with equal chunks share the buffers of
these chunks. `BufferRefCounts` counts the references to each buffer.
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


class BufferRefCounts:
    """Counts how many versions use each buffer of each chunk. Not thread-safe.

    A chunk is a part of a slice's bytes. Every chunk has the same number of buffers,
    numbered from 0. A version (the chunks of one step) refers to one buffer of each of
    its chunks, and versions that share a chunk refer to the same buffer. A buffer is
    free when no version refers to it. All operations are vectorised over the chunks,
    because a version may have 10^5 chunks.

    In the example, 255 (`ABSENT`) means that the version `second` does not have chunk
    0. The third `acquire` returns None, because both buffers of chunk 1 are in use. In
    the end, buffer 0 of both chunks is free, and buffer 1 of chunk 1 is in use.

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
        """Starts with every buffer free.

        Raises:
            ValueError: `num_chunks` is negative, or `num_buffers` is not in 1 to 254.
        """
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
        """[buffers] bool: whether all chunks' buffers with this number are free."""
        return (self._counts == 0).all(axis=1)

    def acquire(self, numbers: np.ndarray) -> np.ndarray | None:
        """Takes a free buffer for each of some chunks, with a reference count of 1.

        Args:
            numbers: [n] the numbers of the chunks, each at most once.

        Returns:
            [chunks] uint8: the buffer of each chunk, `ABSENT` for the other chunks.
            None if one of the chunks has no free buffer; then no buffer is taken.
        """
        free = self._counts[:, numbers] == 0
        if not free.any(axis=0).all():
            return None
        buffers = self.absent()
        buffers[numbers] = free.argmax(axis=0)
        self._counts[buffers[numbers], numbers] = 1
        return buffers

    def absent(self) -> np.ndarray:
        """Returns the buffer numbers of a version (step) that has none of the chunks.

        This is [chunks] uint8, all 255 (`ABSENT`).
        """
        return np.full(self._counts.shape[1], ABSENT, np.uint8)

    def retain(self, buffers: np.ndarray) -> None:
        """Adds a reference to one buffer of each chunk.

        Args:
            buffers: [chunks] uint8: the number of each chunk's buffer, 255 (`ABSENT`)
                for a chunk to skip.

        Raises:
            ValueError: one of the buffers is free.
        """
        at, counts = self._in_use(buffers)
        self._counts[at] = counts + 1

    def release(self, buffers: np.ndarray) -> None:
        """Removes a reference to one buffer of each chunk.

        A buffer without references is free.

        Args:
            buffers: [chunks] uint8: the number of each chunk's buffer, 255 (`ABSENT`)
                for a chunk to skip.

        Raises:
            ValueError: one of the buffers is free already.
        """
        at, counts = self._in_use(buffers)
        self._counts[at] = counts - 1

    def _in_use(
        self, buffers: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Looks up the reference counts of one buffer of each chunk.

        Args:
            buffers: [chunks] uint8: the number of each chunk's buffer, 255 (`ABSENT`)
                for a chunk to skip.

        Returns:
            The buffer numbers and the chunk numbers of these buffers, as a pair of
            index arrays; and their reference counts.

        Raises:
            ValueError: one of the buffers is free.
        """
        numbers = (buffers != ABSENT).nonzero()[0]
        at = buffers[numbers], numbers
        counts = self._counts[at]
        if not counts.all():
            wrong = int(numbers[counts == 0][0])
            raise ValueError(
                f"buffers has buffer {buffers[wrong]} for chunk {wrong}, which is "
                "free. Acquire it first, and release it once per acquire or retain."
            )
        return at, counts


Read = dict[tuple[int, int], bytes]
"""Maps (buffer number, chunk number) to the digest of the bytes read from there."""


@dataclass(kw_only=True)
class Copy:
    """The slices of one `ChunkPool` at one step: where their bytes are, and digests.

    A copy holds a reference to each of its buffers. Copies of several steps share the
    buffers of equal chunks.
    """

    buffers: np.ndarray
    """[chunks] uint8: number of each chunk's buffer, `ABSENT` for a missing chunk."""
    digests: list[bytes]
    """Per slice 16 bytes for each chunk; empty if the copy lacks the slice."""


class ChunkPool:
    """Memory for copies of some slices at several steps. Not thread-safe.

    Every chunk (a part of a slice's bytes) has several buffers, so that a new step can
    be written while an older copy is kept. Also remembers in which buffers a chunk was
    found corrupt (`rotten`).
    """

    def __init__(
        self, chunks: Chunks, num_buffers: int, memory: Callable[[], memoryview]
    ) -> None:
        """Starts with every buffer free.

        Args:
            chunks: the chunks of the slices.
            num_buffers: buffers of each chunk.
            memory: returns the pool's memory, `num_buffers` times `chunks.nbytes`
                bytes; every call returns the same memory.
        """
        self.chunks, self._memory = chunks, memory
        self.ref_counts = BufferRefCounts(chunks.num_chunks, num_buffers)
        self.index = {piece: at for at, piece in enumerate(chunks.slices)}
        self.rotten: set[tuple[int, int]] = set()
        """(buffer number, chunk number) of each chunk found corrupt; an entry stays
        until the next `acquire` of that buffer."""

    def acquire(self, numbers: np.ndarray) -> np.ndarray | None:
        """Takes a free buffer for each of some chunks, which the caller then writes.

        The chunks no longer count as corrupt in these buffers.

        Args:
            numbers: [n] the numbers of the chunks, each at most once.

        Returns:
            [chunks] uint8: the buffer of each chunk, 255 (`ABSENT`) for the other
            chunks. None if one of the chunks has no free buffer; then no buffer is
            taken.
        """
        found = self.ref_counts.acquire(numbers)
        if found is not None and self.rotten:
            self.rotten -= {(int(found[number]), int(number)) for number in numbers}
        return found

    def rotten_in(self, copy: Copy) -> list[int]:
        """Returns the numbers of a copy's chunks that were found corrupt."""
        return [
            number for buffer, number in self.rotten if copy.buffers[number] == buffer
        ]

    def parts(self, copy: Copy, index: int) -> Parts:
        """Returns the memory of a copy's slice `index` in as few pieces as possible."""
        return self.chunks.parts(self._memory(), copy.buffers, index)

    def chunk(self, buffers: np.ndarray, number: int) -> memoryview:
        """Returns the memory of chunk `number` in a copy.

        `buffers` is [chunks] uint8: the number of each chunk's buffer in the copy.
        """
        return self.at(int(buffers[number]), number)

    def at(self, buffer: int, number: int) -> memoryview:
        """Returns the memory of chunk `number` in its buffer `buffer`."""
        return self.chunks.chunk(self._memory(), buffer, number)

    def held(self, copy: Copy) -> Iterator[tuple[Slice, Parts, bytes]]:
        """Yields each slice that a copy has, with its memory and digests.

        Reads no bytes. A slice with a chunk that was found corrupt is left out.
        """
        wrong = self.chunks.owners_of(self.rotten_in(copy)) if self.rotten else ()
        for index, digests in enumerate(copy.digests):
            if digests and index not in wrong:
                yield self.chunks.slices[index], self.parts(copy, index), digests

    def right(self, copy: Copy, index: int, read: Read) -> bool:
        """Whether the bytes of a slice match its digests.

        Args:
            copy: the copy.
            index: index of the slice. If the copy lacks the slice, the result is False.
            read: maps (buffer number, chunk number) to the digest of the bytes there.
                A chunk in `read` is not read again; the digests of all other chunks of
                the slice are computed and added.
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
        """Whether `digests` has 16 bytes per chunk for each of the pool's slices."""
        counts = np.diff(self.chunks.first) * DIGEST_BYTES
        return [len(one) for one in digests] == counts.tolist()

    def unchanged(self, copy: Copy, digests: list[bytes]) -> np.ndarray:
        """[chunks] bool: whether the digest of a copy's chunk equals that in `digests`.

        `digests` has for each slice 16 bytes per chunk. A chunk that the copy lacks or
        that was found corrupt counts as changed.

        Equal digests (xxh3-128) are taken for equal bytes. A changed chunk has the
        digest of the old chunk by accident with a probability of 2^-128.
        """
        missing = [b"\0" * len(one) for one in digests]
        known = [one or none for one, none in zip(copy.digests, missing, strict=True)]
        equal = equal_chunks(b"".join(known), b"".join(digests))
        if self.rotten:
            equal[self.rotten_in(copy)] = False
        return equal & (copy.buffers != ABSENT)

    def release(self, copy: Copy) -> None:
        """Releases the buffers of a copy; buffers without other references are free."""
        self.ref_counts.release(copy.buffers)
