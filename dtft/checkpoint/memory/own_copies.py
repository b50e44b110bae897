"""A host's copies of its own slices, by step: staged, pinned, restored, dropped.

A step shares with the one before it the chunks that did not change. Not thread-safe.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.checkpoint.memory.chunk_pool import ChunkPool, Copy, Read
from dtft.checkpoint.state import ABSENT, Parts, Slice, chunk_digests, unpack_flags


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where the trainer may write a step; plain values, for its link."""

    base: int
    """The step whose chunks may be kept where they did not change; -1 for none."""
    buffers: bytes
    """A free buffer for each chunk, one byte each."""


@dataclass(kw_only=True)
class _Staging:
    """A step that is being written; refers to its buffers and to those of its base."""

    base: Copy
    buffers: np.ndarray


class Owning:
    """A host's copies of its own slices, by step, in one chunk pool."""

    def __init__(self, pool: ChunkPool) -> None:
        """Has no copy yet."""
        self.pool = pool
        self.copies: dict[int, Copy] = {}
        self.items: dict[int, dict[str, Any]] = {}
        self._staging: dict[int, _Staging] = {}
        self.pins: dict[int, tuple[int, Copy]] = {}
        """Number of the pin to the step and the copy that it keeps."""
        self._pin_numbers = itertools.count()

    # ---------------------------------------------------------------- staging

    def begin_stage(self, step: int) -> Room:
        """Reserves a buffer for every chunk.

        Raises:
            RuntimeError: a chunk has no free buffer, so a commit or export is stuck.
        """
        for asked in list(self._staging):
            self._cancel(asked)  # there is one trainer, and it writes one step
        ref_counts = self.pool.ref_counts
        buffers = self.pool.acquire(np.arange(self.pool.chunks.num_chunks))
        if buffers is None:
            raise RuntimeError(
                f"no free buffer for step {step}: all {ref_counts.num_buffers} buffers "
                f"of a chunk hold steps that are still needed; held are "
                f"{sorted(self.copies)}."
            )
        newest = max(self.copies, default=-1)
        if newest in self.copies and self.pool.rotten_in(self.copies[newest]):
            newest = -1  # every chunk is written anew
        base = self.copies.get(newest) or self._nothing()
        ref_counts.retain(base.buffers)
        self._staging[step] = _Staging(base=base, buffers=buffers)
        return Room(base=newest, buffers=buffers.tobytes())

    def staged(
        self, step: int, digests: Sequence[bytes], items: dict, kept: bytes
    ) -> None:
        """The step has been written; see `ReplicaStore.staged`."""
        staging, chunks = self._staging.pop(step), self.pool.chunks
        is_kept = unpack_flags(kept, chunks.num_chunks)
        copied = chunks.mask([i for i, one in enumerate(digests) if one])
        buffers = np.where(is_kept, staging.base.buffers, staging.buffers)
        buffers = np.where(copied, buffers, ABSENT).astype(np.uint8)
        self.pool.ref_counts.retain(buffers)
        self._let_go(staging)
        self._drop(step)
        self.copies[step] = Copy(buffers=buffers, digests=list(digests))
        self.items[step] = items

    def _let_go(self, staging: _Staging) -> None:
        self.pool.ref_counts.release(staging.buffers)
        self.pool.release(staging.base)

    def _cancel(self, step: int) -> None:
        if (staging := self._staging.pop(step, None)) is not None:
            self._let_go(staging)

    def _nothing(self) -> Copy:
        digests = [b""] * len(self.pool.chunks.slices)
        return Copy(buffers=self.pool.ref_counts.absent(), digests=digests)

    # -------------------------------------------------------------- retention

    def drop(self, needed: Callable[[int], bool]) -> None:
        """Drops what is of steps that are not needed."""
        for step in [step for step in self._staging if not needed(step)]:
            self._cancel(step)
        for step in [step for step in self.copies if not needed(step)]:
            self._drop(step)

    def _drop(self, step: int) -> None:
        if (copy := self.copies.pop(step, None)) is not None:
            self.pool.release(copy)
            self.items.pop(step)

    def pin(self, step: int) -> int:
        """Keeps a copy's bytes until `unpin`, though the step be dropped."""
        copy = self.copies[step]
        self.pool.ref_counts.retain(copy.buffers)
        number = next(self._pin_numbers)
        kept = Copy(buffers=copy.buffers.copy(), digests=list(copy.digests))
        self.pins[number] = step, kept
        return number

    def complete(self, pin: int) -> tuple[dict[Slice, Parts], int]:
        """Places for the slices that a pinned copy lacks, and where they are.

        Returns:
            The memory, and one more pin, which whoever writes there ends afterwards.

        Raises:
            RuntimeError: a chunk has no free buffer.
        """
        step, copy = self.pins[pin]
        lacking = [index for index, known in enumerate(copy.digests) if not known]
        mask = self.pool.chunks.mask(lacking) & (copy.buffers == ABSENT)
        fresh = self.pool.acquire(np.flatnonzero(mask))
        if fresh is None:
            raise RuntimeError("no free buffer for slices that are to be exported")
        copy.buffers = np.where(mask, fresh, copy.buffers)
        self.pool.ref_counts.retain(copy.buffers)
        guard = next(self._pin_numbers)
        self.pins[guard] = step, copy
        slices = self.pool.chunks.slices
        memory = {slices[index]: self.pool.parts(copy, index) for index in lacking}
        return memory, guard

    def completed(self, pin: int, digests: Mapping[str, bytes]) -> None:
        """Slices (key to digests) that a pinned copy lacked are there, verified."""
        copy = self.pins[pin][1]
        for index, piece in enumerate(self.pool.chunks.slices):
            copy.digests[index] = copy.digests[index] or digests.get(piece.key, b"")

    def pinned(self, pin: int) -> tuple[bytes, list[bytes]]:
        """The buffer of each chunk of a pinned copy, one byte each, and its digests."""
        copy = self.pins[pin][1]
        return copy.buffers.tobytes(), list(copy.digests)

    def unpin(self, pin: int) -> None:
        """Ends one `pin`."""
        self.pool.release(self.pins.pop(pin)[1])

    # ---------------------------------------------------------------- restore

    def begin_restore(
        self, step: int, expected: Sequence[bytes | None], items: dict, read: bool
    ) -> list[int]:
        """Makes a copy in which every slice that is right has its buffer already.

        Args:
            step: the step.
            expected: the digests of every slice; None for one that is to be made of
                others, which nobody has yet.
            items: the items of the step.
            read: whether what is recorded to be right is read and checked now.

        Returns:
            The slices that are absent or not right. They have buffers of their own now,
            to which nobody else refers, and count as held once `restored` was called.
        """
        old = self.copies.get(step) or self._nothing()
        known: Read = {}
        rotten = self.pool.chunks.owners_of(self.pool.rotten_in(old))
        lacking = [
            index
            for index, good in enumerate(expected)
            if old.digests[index] != good
            or index in rotten
            or (read and not self.pool.right(old, index, known))
        ]
        mask, ref_counts = self.pool.chunks.mask(lacking), self.pool.ref_counts
        ref_counts.release(np.where(mask, old.buffers, ABSENT).astype(np.uint8))
        fresh = self.pool.acquire(np.flatnonzero(mask))
        assert fresh is not None, "one version is kept, and exports have ended"
        copy = Copy(
            buffers=np.where(mask, fresh, old.buffers), digests=list(old.digests)
        )
        for index in lacking:
            # Nobody sends what has no bytes: every host has it.
            empty = not self.pool.chunks.slices[index].nbytes
            nothing = chunk_digests(b"", 1) if empty else b""
            good = expected[index] in (None, nothing)
            copy.digests[index] = nothing if good else b""
        self.copies[step], self.items[step] = copy, items
        return [index for index in lacking if not copy.digests[index]]

    def fill(self, step: int, index: int, source: Parts, digests: bytes) -> None:
        """Copies a slice from elsewhere in this host's memory; it is held then."""
        copy = self.copies[step]
        self.pool.parts(copy, index).fill(source)
        copy.digests[index] = digests

    def restored(self, step: int, digests: Mapping[str, bytes]) -> None:
        """Slices (key to digests) were fetched and verified: they are held now."""
        for index, piece in enumerate(self.pool.chunks.slices):
            if piece.key in digests:
                self.copies[step].digests[index] = digests[piece.key]
