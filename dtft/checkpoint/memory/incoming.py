"""Pushes on their way into this host: which chunks are here, and what they may write.

A push says the digests of all its chunks before it sends any. Chunks that the last
version from the same peer has are kept, not sent; a push that was cut goes on with what
had been verified. Several connections may bring one push: each chunk is written by one
of them at a time, only into a buffer that no copy refers to.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dtft.checkpoint.memory.chunk_pool import ChunkPool, Copy
from dtft.checkpoint.state import ABSENT, DIGEST_BYTES, chunk_digests, digest_root

_LACKING, _ARRIVING, _HERE = 0, 1, 2


class Receiving:
    """One push of one step from one peer, until it is complete or given up."""

    def __init__(
        self, pool: ChunkPool, digests: list[bytes], lock: threading.RLock
    ) -> None:
        """Has nothing yet; `lock` is the one that guards the pool."""
        self.pool, self.digests, self._lock = pool, digests, lock
        self.buffers = pool.ref_counts.absent()
        self.states = np.full(len(self.buffers), _LACKING, np.uint8)
        self.users = 0
        """Connections that bring it."""
        self.given_up = False
        """The step was dropped: what arrives is of no use."""
        self._expected = b"".join(digests)

    def keep(self, copy: Copy) -> None:
        """Takes over the chunks that another version has already."""
        same = self.pool.unchanged(copy, self.digests)
        self.buffers[same], self.states[same] = copy.buffers[same], _HERE
        self.pool.ref_counts.retain(self.buffers)

    def reserve(self) -> bool:
        """Takes a free buffer for every chunk without one; False if one is missing."""
        found = self.pool.acquire(np.flatnonzero(self.buffers == ABSENT))
        if found is None:
            return False
        self.buffers = np.where(found == ABSENT, self.buffers, found)
        return True

    def lacks(self) -> np.ndarray:
        """[chunks] bool: what is neither here nor arriving."""
        with self._lock:
            return self.states == _LACKING

    @property
    def root(self) -> str:
        """One digest over all slices, as `commit.push_root` has it."""
        pairs = zip(self.pool.chunks.slices, self.digests, strict=True)
        return digest_root((piece.key, told) for piece, told in pairs)

    @property
    def complete(self) -> bool:
        """Every chunk is here and verified."""
        return bool((self.states == _HERE).all())

    def claim(self, numbers: Sequence[int]) -> list[memoryview] | None:
        """Where some chunks go; None if another connection was faster with one.

        Whoever is given memory calls `arrived` or `failed` with the same numbers.
        """
        at = np.array(numbers, np.int64)
        with self._lock:
            if self.given_up or (self.states[at] != _LACKING).any():
                return None
            self.states[at] = _ARRIVING
            return [self.pool.chunk(self.buffers, number) for number in numbers]

    def arrived(self, numbers: Sequence[int]) -> None:
        """Chunks were written whole; those with wrong bytes are lacking again."""
        for number in numbers:
            start = number * DIGEST_BYTES
            good = self._expected[start : start + DIGEST_BYTES]
            memory = self.pool.chunk(self.buffers, number)
            found = chunk_digests(memory, self.pool.chunks.chunk_bytes)
            self.states[number] = _HERE if found == good else _LACKING

    def failed(self, numbers: Sequence[int]) -> None:
        """Chunks were written in part, or not at all."""
        self.states[np.array(numbers, np.int64)] = _LACKING

    def release(self, *, unverified_only: bool) -> None:
        """Gives up buffers; nobody may be writing."""
        going = self.states != _HERE if unverified_only else self.buffers != ABSENT
        self.pool.ref_counts.release(
            np.where(going, self.buffers, ABSENT).astype(np.uint8)
        )
        self.buffers[going], self.states[going] = ABSENT, _LACKING

    @property
    def nothing_here(self) -> bool:
        """Not one chunk would be lost by giving it up."""
        return not (self.states == _HERE).any()


class Hosting:
    """The copies that this host keeps for its peers, by step and sending slot."""

    def __init__(self, pools: Mapping[int, ChunkPool], lock: threading.RLock) -> None:
        """One pool for each slot that sends; `lock` is the store's."""
        self.pools, self._lock = pools, lock
        self.copies: dict[int, dict[int, Copy]] = {}
        """step -> slot that sent -> the copy, complete and verified."""
        self.items: dict[int, dict] = {}
        self.receiving: dict[tuple[int, int], Receiving] = {}

    def has(self, step: int, source: int, digests: Sequence[bytes]) -> bool:
        """Whether the very bytes of a push are here already, verified."""
        copy = self.copies.get(step, {}).get(source)
        return copy is not None and copy.digests == list(digests)

    def begin(self, step: int, source: int, digests: list[bytes]) -> Receiving | None:
        """Lets one connection bring a push; each `begin` needs one `end`.

        Returns:
            None if the push is not one that comes here, if other bytes of the same step
            are here or on their way (nothing overwrites them), or if no buffer is free.
        """
        pool = self.pools.get(source)
        if pool is None or not pool.fits(digests):
            return None
        if source in self.copies.get(step, {}):
            return None
        found = self.receiving.get((step, source))
        if found is not None and found.digests != digests:
            if found.users:
                return None
            self._give_up(step, source)
            found = None
        if found is None:
            found = self._begun(pool, source, digests)
        if not self._reserved(found, source):
            if not found.users and (step, source) not in self.receiving:
                found.release(unverified_only=False)
            return None
        self.receiving[step, source] = found
        found.users += 1
        return found

    def _begun(self, pool: ChunkPool, source: int, digests: list[bytes]) -> Receiving:
        found = Receiving(pool, digests, self._lock)
        before = [step for step, copies in self.copies.items() if source in copies]
        if before:
            found.keep(self.copies[max(before)][source])
        return found

    def _reserved(self, wanted: Receiving, source: int) -> bool:
        """Places for all that is lacking; unfinished pushes of other steps give way."""
        if wanted.reserve():
            return True
        for step, other in list(self.receiving):
            idle = self.receiving[step, other]
            if other == source and idle is not wanted and not idle.users:
                self._give_up(step, other)
        return wanted.reserve()

    def conclude(self, step: int, source: int, found: Receiving, items: dict) -> bool:
        """Makes a push that is complete a copy; True for the first who asks."""
        if self.receiving.get((step, source)) is not found or not found.complete:
            return False
        del self.receiving[step, source]
        copy = Copy(buffers=found.buffers, digests=found.digests)
        self.copies.setdefault(step, {})[source] = copy
        self.items[step] = items
        return True

    def end(self, step: int, source: int, found: Receiving) -> None:
        """One connection brings no more; what it had verified waits for the next."""
        found.users -= 1
        if found.users:
            return
        if found.given_up:
            found.release(unverified_only=False)
        elif self.receiving.get((step, source)) is found:
            found.release(unverified_only=True)
            if found.nothing_here:
                del self.receiving[step, source]

    def _give_up(self, step: int, source: int) -> None:
        found = self.receiving.pop((step, source))
        found.given_up = True
        if not found.users:  # else the last of them lets go of the buffers
            found.release(unverified_only=False)

    def forget_rotten(self) -> None:
        """Drops copies that are known to have a wrong byte; see `ChunkPool.rotten`."""
        for copies in self.copies.values():
            for source, copy in list(copies.items()):
                if self.pools[source].rotten_in(copy):
                    self.pools[source].release(copies.pop(source))

    def forget(self, step: int, keys: Sequence[str]) -> None:
        """Drops copies that have a wrong byte, so that they can be sent again."""
        for source in list(self.copies.get(step, {})):
            pool = self.pools[source]
            if not {piece.key for piece in pool.chunks.slices}.isdisjoint(keys):
                pool.release(self.copies[step].pop(source))

    def drop(self, needed: Callable[[int], bool]) -> None:
        """Drops what is of steps that are not needed."""
        for step, source in list(self.receiving):
            if not needed(step):
                self._give_up(step, source)
        for step in [step for step in self.copies if not needed(step)]:
            for source, copy in self.copies.pop(step).items():
                self.pools[source].release(copy)
            del self.items[step]
