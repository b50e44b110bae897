"""Reads one host's chunks again, one by one, and remembers which are wrong.

A chunk that never changes is kept by reference and never written or sent again, so
nothing else would find a bit that rots in it before the copy is needed. What is found
wrong is given to nobody any more; the next step writes it anew, and a peer is asked to
send it again.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from dtft.checkpoint.memory.chunk_pool import ChunkPool, Copy
from dtft.checkpoint.memory.incoming import Hosting
from dtft.checkpoint.memory.own_copies import Owning
from dtft.checkpoint.state import ABSENT, DIGEST_BYTES, chunk_digests

Kept = dict[tuple[int, bytes], list[int]]
"""(buffer, right digest) of one chunk to the steps that have it there."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What came of reading one chunk wherever it is kept."""

    nbytes: int
    """Bytes read."""
    wrong: tuple[str, ...]
    """A description of each copy that was found wrong just now."""


class Scrub:
    """All chunks of one replica store, numbered from 0. Thread-safe.

    Takes no lock while it reads: only what seems wrong is read again under it.
    """

    def __init__(self, own: Owning, hosting: Hosting, lock: threading.RLock) -> None:
        """Has read nothing; `lock` is the store's."""
        self._own, self._hosting, self._lock = own, hosting, lock
        self._pools: list[tuple[int | None, ChunkPool]] = [
            (None, own.pool),
            *hosting.pools.items(),
        ]

    @property
    def num_chunks(self) -> int:
        """How many chunks there are, in whatever buffers."""
        return sum(pool.chunks.num_chunks for _, pool in self._pools)

    def known(self) -> list[str]:
        """What was found wrong and is still there, as "step 12: KEY"."""
        with self._lock:
            found = {
                (step, pool.chunks.slices[index].key)
                for source, pool in self._pools
                if pool.rotten
                for step, copy in self._copies(source)
                for index in pool.chunks.owners_of(pool.rotten_in(copy))
            }
        return [f"step {step}: {key}" for step, key in sorted(found)]

    def look(self, number: int) -> Look:
        """Reads a chunk in every buffer in which some copy has it.

        Raises:
            IndexError: there are not so many chunks.
            ValueError: the memory was given up.
        """
        for source, pool in self._pools:
            if number < pool.chunks.num_chunks:
                return self._look(source, pool, number)
            number -= pool.chunks.num_chunks
        raise IndexError("there are not so many chunks")

    def _look(self, source: int | None, pool: ChunkPool, number: int) -> Look:
        with self._lock:
            kept = self._kept(source, pool, number)
        wrong = []
        for buffer, good in kept:
            if not _is_right(pool, buffer, number, good):
                wrong += self._confirmed(source, pool, number, (buffer, good))
        nbytes = len(kept) * int(pool.chunks.sizes[number])
        return Look(nbytes=nbytes, wrong=tuple(wrong))

    def _confirmed(
        self, source: int | None, pool: ChunkPool, number: int, at: tuple[int, bytes]
    ) -> list[str]:
        """Marks what is wrong, unless the buffer was given to others meanwhile."""
        with self._lock:
            steps = self._kept(source, pool, number).get(at)
            if steps is None or _is_right(pool, at[0], number, at[1]):
                return []
            pool.rotten.add((at[0], number))
        (index,) = pool.chunks.owners_of([number])
        whose = "own copy" if source is None else f"copy for slot {source}"
        names = ", ".join(map(str, sorted(set(steps))))
        return [f"{whose}, step {names}: {pool.chunks.slices[index].key}"]

    def _kept(self, source: int | None, pool: ChunkPool, number: int) -> Kept:
        """Where a chunk lies that is not known to be wrong, and what it should be."""
        (index,) = pool.chunks.owners_of([number])
        start = (number - int(pool.chunks.first[index])) * DIGEST_BYTES
        kept: Kept = {}
        for step, copy in self._copies(source):
            buffer = int(copy.buffers[number])
            good = copy.digests[index][start : start + DIGEST_BYTES]
            if good and buffer != ABSENT and (buffer, number) not in pool.rotten:
                kept.setdefault((buffer, good), []).append(step)
        return kept

    def _copies(self, source: int | None) -> Iterator[tuple[int, Copy]]:
        if source is None:
            yield from self._own.copies.items()
            yield from self._own.pins.values()
            return
        for step, copies in self._hosting.copies.items():
            if source in copies:
                yield step, copies[source]


def _is_right(pool: ChunkPool, buffer: int, number: int, good: bytes) -> bool:
    memory = pool.at(buffer, number)
    return chunk_digests(memory, pool.chunks.chunk_bytes) == good
