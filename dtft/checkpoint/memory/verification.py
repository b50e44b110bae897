"""Reads one host's copies again, chunk by chunk, and records corrupt chunks.

An unchanged chunk stays in its buffer, and is not written or sent again. If a bit in
the buffer flips, only a read finds this: a load, a fetch, an export or a verification.
A later step does not share a buffer in which a verification found the chunk corrupt:
the chunk is written or sent again.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.memory.chunk_pool import ChunkPool, Copy
from dtft.checkpoint.memory.incoming import Hosting
from dtft.checkpoint.memory.own_copies import Owning
from dtft.checkpoint.state import ABSENT, DIGEST_BYTES, chunk_digests

Kept = dict[tuple[int, bytes], list[int]]
"""For one chunk: (buffer number, right digest) to the steps whose copies have the chunk
in this buffer with this digest."""


@dataclass(frozen=True, kw_only=True)
class ChunkRead:
    """Result of reading one chunk in every buffer in which a copy has the chunk.

    A chunk is a part of a slice's bytes. Copies of several steps share a buffer if the
    chunk did not change, else they have the chunk in different buffers. A buffer in
    which the chunk is known to be corrupt is not read.
    """

    nbytes: int
    """Bytes read."""
    corrupt: tuple[tuple[int, str], ...]
    """(step, slice key) of each copy that this read found corrupt."""


@dataclass(frozen=True, kw_only=True)
class VerifiedCopies:
    """Result of reading all copies of slices on one host.

    Copies that are kept only for an export (pinned) are read, too. They are neither
    counted in `copies` nor listed in `held` or `unread`, but corrupt ones are in
    `corrupt`.
    """

    copies: int
    """The number of slices in all copies, summed over the steps. A slice whose memory
    several steps share counts once for each of them."""
    nbytes: int
    """Bytes read; a buffer that steps share is read once."""
    held: Mapping[int, Mapping[str, bytes]]
    """Step to slice key to digests of the copies that were not found corrupt."""
    corrupt: tuple[str, ...]
    """Corrupt copies, as "step 12: KEY" with the key of the slice."""
    unread: tuple[int, ...]
    """Steps of which a copy was dropped or replaced before the verification ended.
    Chunks of these copies may not have been read."""


class CopyVerifier:
    """Reads and checks all copies of slices on one host. Thread-safe.

    The slices' chunks (parts of their bytes) are numbered from 0. They are read without
    holding the lock that guards the copies. Only a chunk that seems corrupt is read
    again with the lock held.
    """

    def __init__(self, own: Owning, hosting: Hosting, lock: threading.RLock) -> None:
        """Reads no chunk yet.

        Args:
            own: the copies of the host's own slices.
            hosting: the copies of its peers' slices.
            lock: the lock that guards `own` and `hosting`.
        """
        self._own, self._hosting, self._lock = own, hosting, lock
        self._pools: list[tuple[int | None, ChunkPool]] = [
            (None, own.pool),
            *hosting.pools.items(),
        ]

    @property
    def num_chunks(self) -> int:
        """The number of chunks of all slices, however many copies a chunk has."""
        return sum(pool.chunks.num_chunks for _, pool in self._pools)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies; a buffer that several steps share counts once."""
        total = 0
        with self._lock:
            for source, pool in self._pools:
                sizes = pool.chunks.sizes
                in_use = np.zeros((pool.ref_counts.num_buffers, len(sizes)), bool)
                for _, copy in self._copies(source):
                    numbers = np.flatnonzero(copy.buffers != ABSENT)
                    in_use[copy.buffers[numbers], numbers] = True
                total += int((in_use * sizes).sum())
        return total

    def known(self) -> list[str]:
        """Lists the slices found corrupt and not dropped since, as "step 12: KEY".

        KEY is the key of the slice, such as "params/w[0:4]:float32".
        """
        return _told(self._known())

    def _known(self) -> set[tuple[int, str]]:
        with self._lock:
            return {
                (step, pool.chunks.slices[index].key)
                for source, pool in self._pools
                if pool.rotten
                for step, copy in self._copies(source)
                for index in pool.chunks.owners_of(pool.rotten_in(copy))
            }

    def verify(self, after: Callable[[int], None] = lambda _: None) -> VerifiedCopies:
        """Reads every copy once, while training continues.

        A buffer that several copies share is read once. Buffers in which a chunk is
        known to be corrupt are not read.

        Args:
            after: called after each chunk with the number of bytes read. The function
                may wait; an exception from it ends the verification.

        Raises:
            ValueError: the arena was closed.
        """
        with self._lock:
            before = self._by_step()
            copies = [copy for listed in before.values() for _, copy in listed]
            count = sum(sum(map(bool, copy.digests)) for copy in copies)
        corrupt: set[tuple[int, str]] = set()
        nbytes = 0
        for number in range(self.num_chunks):
            one = self.read(number)
            nbytes += one.nbytes
            corrupt.update(one.corrupt)
            after(one.nbytes)
        with self._lock:
            now = {id(copy) for it in self._by_step().values() for _, copy in it}
            held = {
                step: {
                    piece.key: digests
                    for pool, copy in listed
                    for piece, _, digests in pool.held(copy)
                }
                for step, listed in before.items()
            }
            corrupt |= self._known()
        return VerifiedCopies(
            copies=count,
            nbytes=nbytes,
            held=held,
            corrupt=tuple(_told(corrupt)),
            unread=tuple(
                step
                for step, listed in before.items()
                if not now.issuperset(id(copy) for _, copy in listed)
            ),
        )

    def read(self, number: int) -> ChunkRead:
        """Reads and checks one chunk in every buffer in which a copy has the chunk.

        Copies that share the chunk's memory (buffer) are read once. Buffers in which
        the chunk is known to be corrupt are not read.

        Args:
            number: the chunk's number, from 0 to `num_chunks` - 1.

        Raises:
            IndexError: `number` is not below `num_chunks`.
            ValueError: the arena was closed.
        """
        for source, pool in self._pools:
            if number < pool.chunks.num_chunks:
                return self._read(source, pool, number)
            number -= pool.chunks.num_chunks
        raise IndexError("there are not so many chunks")

    def _read(self, source: int | None, pool: ChunkPool, number: int) -> ChunkRead:
        with self._lock:
            kept = self._kept(source, pool, number)
        corrupt = []
        for buffer, good in kept:
            if not _is_right(pool, buffer, number, good):
                corrupt += self._confirmed(source, pool, number, (buffer, good))
        nbytes = len(kept) * int(pool.chunks.sizes[number])
        return ChunkRead(nbytes=nbytes, corrupt=tuple(corrupt))

    def _confirmed(
        self, source: int | None, pool: ChunkPool, number: int, at: tuple[int, bytes]
    ) -> list[tuple[int, str]]:
        """Reads a chunk again with the lock held, and marks it if it is corrupt.

        Args:
            source: the slot that sent the copies; None for own copies.
            pool: the pool of these copies.
            number: number of the chunk in the pool.
            at: the number of the chunk's buffer, and the right digest. The chunk is not
                marked if no copy has it in this buffer with this digest any more.

        Returns:
            (step, slice key) of each copy that uses the corrupt chunk.
        """
        with self._lock:
            steps = self._kept(source, pool, number).get(at)
            if steps is None or _is_right(pool, at[0], number, at[1]):
                return []
            pool.rotten.add((at[0], number))
        (index,) = pool.chunks.owners_of([number])
        key = pool.chunks.slices[index].key
        return [(step, key) for step in sorted(set(steps))]

    def _kept(self, source: int | None, pool: ChunkPool, number: int) -> Kept:
        """Finds the buffers that hold one chunk in the copies of all steps.

        Args:
            source: the slot that sent the copies; None for this host's own slices.
            pool: the pool of these copies.
            number: number of the chunk in the pool.

        Returns:
            Maps (buffer number, recorded digest) to the steps whose copies have the
            chunk there. Buffers in which the chunk is known to be corrupt are left out.
        """
        (index,) = pool.chunks.owners_of([number])
        start = (number - int(pool.chunks.first[index])) * DIGEST_BYTES
        kept: Kept = {}
        for step, copy in self._copies(source):
            buffer = int(copy.buffers[number])
            good = copy.digests[index][start : start + DIGEST_BYTES]
            if good and buffer != ABSENT and (buffer, number) not in pool.rotten:
                kept.setdefault((buffer, good), []).append(step)
        return kept

    def _by_step(self) -> dict[int, list[tuple[ChunkPool, Copy]]]:
        """Maps each step to its copies, each copy with its pool.

        Leaves out copies that are kept only for an export (pinned), and steps whose
        copies have no slice.
        """
        found: dict[int, list[tuple[ChunkPool, Copy]]] = {}
        for step, copy in self._own.copies.items():
            found.setdefault(step, []).append((self._own.pool, copy))
        for step, copies in self._hosting.copies.items():
            for source, copy in copies.items():
                pool = self._hosting.pools[source]
                found.setdefault(step, []).append((pool, copy))
        return {
            step: listed
            for step, listed in found.items()
            if any(any(copy.digests) for _, copy in listed)
        }

    def _copies(self, source: int | None) -> Iterator[tuple[int, Copy]]:
        if source is None:
            yield from self._own.copies.items()
            yield from self._own.pins.values()
            return
        for step, copies in self._hosting.copies.items():
            if source in copies:
                yield step, copies[source]


def _told(copies: Collection[tuple[int, str]]) -> list[str]:
    return [f"step {step}: {key}" for step, key in sorted(copies)]


def _is_right(pool: ChunkPool, buffer: int, number: int, good: bytes) -> bool:
    memory = pool.at(buffer, number)
    return chunk_digests(memory, pool.chunks.chunk_bytes) == good
