"""Receives pushes from peers, and records which of their chunks have arrived.

A push sends slices of one slot at one step to this host. Before a chunk is sent, the
sender announces the digests of all chunks of the push. A chunk is not sent if the
newest copy from the same slot has an equal chunk, whose buffer the push then shares.
After an interruption, chunks that were verified before are not sent again. Several
connections may carry one push: each chunk is written by one connection at a time, and
only into a buffer that no copy refers to.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dtft.checkpoint.memory.chunk_pool import ChunkPool, Copy
from dtft.checkpoint.state import ABSENT, DIGEST_BYTES, chunk_digests, digest_root

_LACKING, _ARRIVING, _HERE = 0, 1, 2


class Receiving:
    """A push in progress: slices of a step that a peer's slot sends to this host.

    A push is given up if its step is dropped, if a push with other digests for the same
    step and slot replaces it, or if another push needs its memory. Chunks that still
    arrive are then discarded.
    """

    def __init__(
        self, pool: ChunkPool, digests: list[bytes], lock: threading.RLock
    ) -> None:
        """Starts without chunks.

        Args:
            pool: this host's memory for copies of the sending slot's slices.
            digests: the digests of each slice of the push, 16 bytes per chunk.
            lock: the lock that guards the pool.
        """
        self.pool, self.digests, self._lock = pool, digests, lock
        self.buffers = pool.ref_counts.absent()
        self.states = np.full(len(self.buffers), _LACKING, np.uint8)
        self.users = 0
        """The number of connections that carry this push."""
        self.given_up = False
        """Whether the push was given up; chunks that still arrive are discarded."""
        self._expected = b"".join(digests)

    def keep(self, copy: Copy) -> None:
        """Shares an older copy's buffers for the chunks that did not change since.

        A chunk did not change if its digest in `copy` equals that in the push. Such
        chunks count as received, so the peer does not send them.
        """
        same = self.pool.unchanged(copy, self.digests)
        self.buffers[same], self.states[same] = copy.buffers[same], _HERE
        self.pool.ref_counts.retain(self.buffers)

    def reserve(self) -> bool:
        """Takes free memory (a buffer) for every chunk of the push that has none yet.

        Returns:
            Whether every chunk has a buffer now. If one of the chunks has no free
            buffer, the result is False and no buffer is taken.
        """
        found = self.pool.acquire(np.flatnonzero(self.buffers == ABSENT))
        if found is None:
            return False
        self.buffers = np.where(found == ABSENT, self.buffers, found)
        return True

    def lacks(self) -> np.ndarray:
        """[chunks] bool: whether a chunk was not received and is not being received."""
        with self._lock:
            return self.states == _LACKING

    @property
    def root(self) -> str:
        """Hex digest over the digests of all slices of the push.

        It equals the result of `push_root` in `dtft.checkpoint.replication.commit`.
        """
        pairs = zip(self.pool.chunks.slices, self.digests, strict=True)
        return digest_root((piece.key, told) for piece, told in pairs)

    @property
    def complete(self) -> bool:
        """Whether every chunk was received and verified."""
        return bool((self.states == _HERE).all())

    def claim(self, numbers: Sequence[int]) -> list[memoryview] | None:
        """Claims the chunks with these numbers for one connection to write.

        The chunks of all slices of the push are numbered consecutively. Once the caller
        has written the chunks whole, it calls `arrived` with the same numbers,
        otherwise `failed`.

        Returns:
            The memory of each chunk. None if the push was given up, or if another
            connection has claimed or written one of the chunks.
        """
        at = np.array(numbers, np.int64)
        with self._lock:
            if self.given_up or (self.states[at] != _LACKING).any():
                return None
            self.states[at] = _ARRIVING
            return [self.pool.chunk(self.buffers, number) for number in numbers]

    def arrived(self, numbers: Sequence[int]) -> None:
        """Verifies claimed chunks, given by their numbers, that were written whole.

        A chunk that matches its digest is marked as received, any other chunk as
        lacking.
        """
        for number in numbers:
            start = number * DIGEST_BYTES
            good = self._expected[start : start + DIGEST_BYTES]
            memory = self.pool.chunk(self.buffers, number)
            found = chunk_digests(memory, self.pool.chunks.chunk_bytes)
            self.states[number] = _HERE if found == good else _LACKING

    def failed(self, numbers: Sequence[int]) -> None:
        """Marks claimed chunks that were not written whole as lacking again.

        `numbers` are those given to `claim`.
        """
        self.states[np.array(numbers, np.int64)] = _LACKING

    def release(self, *, unverified_only: bool) -> None:
        """Releases the buffers of the push; no connection may be writing to them.

        Args:
            unverified_only: whether verified chunks keep their buffers.
        """
        going = self.states != _HERE if unverified_only else self.buffers != ABSENT
        self.pool.ref_counts.release(
            np.where(going, self.buffers, ABSENT).astype(np.uint8)
        )
        self.buffers[going], self.states[going] = ABSENT, _LACKING

    @property
    def nothing_here(self) -> bool:
        """Whether no chunk is received and verified."""
        return not (self.states == _HERE).any()


class Hosting:
    """The copies that this host keeps for its peers, by step and sending slot."""

    def __init__(self, pools: Mapping[int, ChunkPool], lock: threading.RLock) -> None:
        """Starts without copies.

        Args:
            pools: sending slot to the memory for copies of its slices.
            lock: the lock that guards all copies of this host.
        """
        self.pools, self._lock = pools, lock
        self.copies: dict[int, dict[int, Copy]] = {}
        """step -> sending slot -> the complete and verified copy."""
        self.items: dict[int, dict] = {}
        self.receiving: dict[tuple[int, int], Receiving] = {}

    def has(self, step: int, source: int, digests: Sequence[bytes]) -> bool:
        """Whether there is a verified copy of slot `source`'s slices at `step`.

        False if the copy has other digests than `digests`, which has 16 bytes per chunk
        for each slice of the push.
        """
        copy = self.copies.get(step, {}).get(source)
        return copy is not None and copy.digests == list(digests)

    def begin(self, step: int, source: int, digests: list[bytes]) -> Receiving | None:
        """Admits one connection that carries a push: the slices of a slot at a step.

        If the connection is admitted, the caller must call `end` once.

        Args:
            step: the step.
            source: the sending slot.
            digests: of each slice of the push, 16 bytes per chunk.

        Returns:
            The state of the push, which all its connections share. None if the
            connection is refused, which has one of these reasons:

            * This host is not to keep copies for `source`.
            * The number of digests is wrong.
            * A copy of the same step and slot is complete; it is never overwritten.
            * Another connection carries other digests for this step and slot. (An
              unfinished push with other digests that no connection carries is given up
              instead.)
            * There is no free memory (buffer) for a chunk.
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
        """Takes memory for every chunk of `wanted`; returns whether this succeeded.

        `wanted` is a push from the slot `source`. If a chunk has no free buffer, gives
        up the other unfinished pushes from this slot that no connection carries, and
        tries again.
        """
        if wanted.reserve():
            return True
        for step, other in list(self.receiving):
            idle = self.receiving[step, other]
            if other == source and idle is not wanted and not idle.users:
                self._give_up(step, other)
        return wanted.reserve()

    def conclude(self, step: int, source: int, found: Receiving, items: dict) -> bool:
        """Turns a push into a copy if all its chunks were received and verified.

        Args:
            step: the step of the push.
            source: the sending slot.
            found: the push, from `begin`.
            items: the JSON values saved beside the arrays of the step.

        Returns:
            Whether this call made the copy. False if a chunk is missing, if the push
            was given up, or if an earlier call made the copy.
        """
        if self.receiving.get((step, source)) is not found or not found.complete:
            return False
        del self.receiving[step, source]
        copy = Copy(buffers=found.buffers, digests=found.digests)
        self.copies.setdefault(step, {})[source] = copy
        self.items[step] = items
        return True

    def end(self, step: int, source: int, found: Receiving) -> None:
        """Removes one connection, admitted by `begin`, from the push `found`.

        `step` and `source` are the step and the sending slot of the push. If the last
        connection is removed before the push is complete, only the verified chunks
        stay, for the next connection. A push that was given up keeps no chunk.
        """
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
        if not found.users:  # else the last connection releases the buffers in `end`
            found.release(unverified_only=False)

    def forget_rotten(self) -> None:
        """Drops the copies from peers in which a chunk was found corrupt."""
        for step, copies in list(self.copies.items()):
            for source, copy in list(copies.items()):
                if self.pools[source].rotten_in(copy):
                    self.pools[source].release(copies.pop(source))
            if not copies:
                del self.copies[step], self.items[step]

    def drop(self, needed: Callable[[int], bool]) -> None:
        """Drops copies and unfinished pushes for which `needed(step)` is False."""
        for step, source in list(self.receiving):
            if not needed(step):
                self._give_up(step, source)
        for step in [step for step in self.copies if not needed(step)]:
            for source, copy in self.copies.pop(step).items():
                self.pools[source].release(copy)
            del self.items[step]
