"""Memory for some slices with several places for every chunk, and copies in it.

A copy says in which place each of its chunks is; copies share the chunks that are
equal. Must not know steps, peers, or why a copy is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint import digest
from dtft.checkpoint.chunks import ABSENT, Chunks
from dtft.checkpoint.digest import DIGEST_BYTES
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.pool import PlacePool
from dtft.checkpoint.slices import Slice

Read = dict[tuple[int, int], bytes]
"""(place, chunk) to the digest of the bytes there, read just now."""


@dataclass(kw_only=True)
class Copy:
    """What one version has of a shelf's slices. Holds a reference to its places."""

    places: np.ndarray
    """[chunks] uint8: the place of each chunk."""
    digests: list[bytes]
    """Per slice 16 bytes for each chunk; empty if this version has not got it."""


class Shelf:
    """The places of some slices' chunks. Not thread-safe."""

    def __init__(
        self, chunks: Chunks, num_places: int, memory: Callable[[], memoryview]
    ) -> None:
        """`memory` gives `num_places` times `chunks.nbytes` bytes, always the same."""
        self.chunks, self._memory = chunks, memory
        self.pool = PlacePool(chunks.num_chunks, num_places)
        self.index = {piece: at for at, piece in enumerate(chunks.slices)}
        self.rotten: set[tuple[int, int]] = set()
        """(place, chunk) whose bytes were found wrong, until they are written anew."""

    def acquire(self, numbers: np.ndarray) -> np.ndarray | None:
        """Free places of some chunks, to be written; see `PlacePool.acquire`."""
        found = self.pool.acquire(numbers)
        if found is not None and self.rotten:
            self.rotten -= {(int(found[number]), int(number)) for number in numbers}
        return found

    def rotten_in(self, copy: Copy) -> list[int]:
        """The chunks of a copy that were found wrong."""
        return [number for place, number in self.rotten if copy.places[number] == place]

    def parts(self, copy: Copy, index: int) -> Parts:
        """The bytes of one slice, in as few pieces as there are."""
        return self.chunks.parts(self._memory(), copy.places, index)

    def chunk(self, places: np.ndarray, number: int) -> memoryview:
        """The bytes of one chunk."""
        return self.at(int(places[number]), number)

    def at(self, place: int, number: int) -> memoryview:
        """The bytes of one chunk at one of its places."""
        return self.chunks.chunk(self._memory(), place, number)

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
            at = int(copy.places[number]), number
            if at not in read:
                read[at] = digest.chunk_digests(
                    self.chunk(copy.places, number), self.chunks.chunk_bytes
                )
        found = [
            read[int(copy.places[number]), number]
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
        equal = digest.equal_chunks(b"".join(known), b"".join(digests))
        if self.rotten:
            equal[self.rotten_in(copy)] = False
        return equal & (copy.places != ABSENT)

    def release(self, copy: Copy) -> None:
        """Gives up a copy; chunks that no other copy has are free."""
        self.pool.release(copy.places)
