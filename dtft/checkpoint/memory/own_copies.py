"""A host's copies of its own slices (those of its slot in the job), by step.

A chunk is a part of a slice's bytes, and a buffer is memory for one chunk. To stage a
step is to give it buffers, which the trainer then writes. A step shares the buffers of
its unchanged chunks with the step before. A pin prevents that the memory of a copy is
reused while an export to storage reads it, or a restore writes it. Only `Restoring` is
thread-safe.
"""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.checkpoint.memory.chunk_pool import ChunkPool, Copy, Read
from dtft.checkpoint.state import ABSENT, Parts, Slice, chunk_digests, unpack_flags


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory that the agent assigns to the trainer for a step to be saved.

    Every chunk of the step has a free buffer. A chunk that is the same in the step
    `base` may share the buffer of that step instead.
    """

    base: int
    """The step whose buffers the new step may share for unchanged chunks (parts of a
    slice's bytes); -1 if every chunk must be written."""
    buffers: bytes
    """The number of each chunk's free buffer (memory for one chunk), one byte per
    chunk."""


@dataclass(kw_only=True)
class _Staging:
    """A step that the trainer is writing into `buffers`.

    `base` is the newest copy, whose unchanged chunks the step may share. If there is no
    copy, or the newest has a corrupt chunk, `base` is a copy without chunks. Until the
    step is recorded, its buffers and those of `base` are not reused.
    """

    base: Copy
    buffers: np.ndarray


class Owning:
    """A host's copies of its own slices (those of its slot), by step.

    All copies are in the memory of one `ChunkPool`.
    """

    def __init__(self, pool: ChunkPool) -> None:
        """Starts without copies; `pool` has the memory for them."""
        self.pool = pool
        self.copies: dict[int, Copy] = {}
        self.items: dict[int, dict[str, Any]] = {}
        self._staging: dict[int, _Staging] = {}
        self.pins: dict[int, tuple[int, Copy]] = {}
        """Pin number to the pinned step and its copy."""
        self._pin_numbers = itertools.count()

    # ---------------------------------------------------------------- staging

    def begin_stage(self, step: int) -> Room:
        """Takes memory for every chunk of a step that the trainer will write.

        A step that was begun before and not recorded by `staged` is cancelled.

        Returns:
            The buffer of each chunk, and the step whose buffers may be shared.

        Raises:
            RuntimeError: all buffers of a chunk are in use, because a commit or an
                export does not end, or a restore that was given up still writes.
        """
        for asked in list(self._staging):
            self._cancel(asked)  # the only trainer writes one step at a time
        ref_counts = self.pool.ref_counts
        buffers = self.pool.acquire(np.arange(self.pool.chunks.num_chunks))
        if buffers is None:
            raise RuntimeError(
                f"no free buffer for step {step}: all {ref_counts.num_buffers} buffers "
                "of a chunk hold steps that are still needed, or are written by "
                "restores that were given up; held are "
                f"{sorted(self.copies)}."
            )
        newest = max(self.copies, default=-1)
        if newest in self.copies and self.pool.rotten_in(self.copies[newest]):
            newest = -1  # no base: every chunk is written
        base = self.copies.get(newest) or self._nothing()
        ref_counts.retain(base.buffers)
        self._staging[step] = _Staging(base=base, buffers=buffers)
        return Room(base=newest, buffers=buffers.tobytes())

    def staged(
        self, step: int, digests: Sequence[bytes], items: dict, kept: bytes
    ) -> None:
        """Records a step that the trainer has written.

        Args:
            step: the step, after its `begin_stage`.
            digests: for each own slice 16 bytes per chunk; b"" for a slice that was not
                copied.
            items: the JSON values of the step, such as the data position.
            kept: a bit per chunk, from `pack_flags`: whether the chunk equals that of
                the base step, which `begin_stage` returned (`Room.base`), and shares
                its buffer. b"" if every chunk was written.
        """
        staging, chunks = self._staging.pop(step), self.pool.chunks
        is_kept = unpack_flags(kept, chunks.num_chunks)
        base, ref_counts = staging.base.buffers, self.pool.ref_counts
        # The copy takes over one reference of each chunk, and the other is released.
        buffers = np.where(is_kept, base, staging.buffers)
        ref_counts.release(np.where(is_kept, staging.buffers, base))
        if not all(digests):
            copied = chunks.mask([i for i, one in enumerate(digests) if one])
            ref_counts.release(np.where(copied, ABSENT, buffers).astype(np.uint8))
            buffers = np.where(copied, buffers, ABSENT).astype(np.uint8)
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
        """Drops copies and unfinished steps for which `needed(step)` is False."""
        for step in [step for step in self._staging if not needed(step)]:
            self._cancel(step)
        for step in [step for step in self.copies if not needed(step)]:
            self._drop(step)

    def _drop(self, step: int) -> None:
        if (copy := self.copies.pop(step, None)) is not None:
            self.pool.release(copy)
            self.items.pop(step)

    def pin(self, step: int) -> int:
        """Keeps the bytes of a step's copy until `unpin`, even if the step is dropped.

        Returns:
            A number that identifies this pin.

        Raises:
            KeyError: there is no copy of the step.
        """
        copy = self.copies[step]
        self.pool.ref_counts.retain(copy.buffers)
        number = next(self._pin_numbers)
        kept = Copy(buffers=copy.buffers.copy(), digests=list(copy.digests))
        self.pins[number] = step, kept
        return number

    def complete(self, pin: int) -> tuple[dict[Slice, Parts], int]:
        """Takes memory for the slices that a pinned copy lacks.

        `pin` is a number from the method `pin`, which keeps the copy's bytes for an
        export.

        Returns:
            The memory of each missing slice, and the number of a second pin, which
            keeps the memory even if `pin` ends. The caller writes the memory and then
            ends the second pin.

        Raises:
            RuntimeError: a chunk has no free buffer.
            KeyError: the pin has ended.
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
        """Records that slices which a pinned copy lacked were fetched and verified.

        Args:
            pin: a number from the method `pin`, which keeps the copy's bytes.
            digests: slice key to digests (16 bytes per chunk) of each fetched slice.

        Raises:
            KeyError: the pin has ended.
        """
        copy = self.pins[pin][1]
        for index, piece in enumerate(self.pool.chunks.slices):
            copy.digests[index] = copy.digests[index] or digests.get(piece.key, b"")

    def pinned(self, pin: int) -> tuple[bytes, list[bytes]]:
        """Returns where a pinned copy is in memory, and its digests.

        Returns:
            The number of each chunk's buffer, a byte per chunk; and for each slice its
            digests, 16 bytes per chunk.

        Raises:
            KeyError: the pin has ended.
        """
        copy = self.pins[pin][1]
        return copy.buffers.tobytes(), list(copy.digests)

    def unpin(self, pin: int) -> None:
        """Ends the pin with the number `pin`; its memory may then be reused.

        Raises:
            KeyError: the pin has ended.
        """
        self.pool.release(self.pins.pop(pin)[1])

    # ---------------------------------------------------------------- restore

    def begin_restore(
        self, step: int, expected: Sequence[bytes | None], items: dict, read: bool
    ) -> list[int]:
        """Makes a copy of a step from those slices in memory that match the commit.

        Args:
            step: the step to restore.
            expected: the commit's digests of every slice; None for a slice that is not
                in the commit and will be assembled from other slices.
            items: the JSON values saved beside the arrays of the step.
            read: whether the bytes of a slice whose recorded digests are the expected
                ones are also read and hashed; otherwise its recorded digests count.

        Returns:
            The indices of the slices that are missing or do not match, and so must be
            fetched or assembled. Each has memory that no other copy uses. The caller
            then writes this memory through a `Restoring`.

        Raises:
            RuntimeError: a chunk has no free buffer. The copy then lacks the slices
                that do not match.
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
        copy = Copy(
            buffers=np.where(mask, ABSENT, old.buffers).astype(np.uint8),
            digests=list(old.digests),
        )
        for index in lacking:
            copy.digests[index] = b""
        self.copies[step], self.items[step] = copy, items
        fresh = self.pool.acquire(np.flatnonzero(mask))
        if fresh is None:
            raise RuntimeError(
                f"no free buffer to restore step {step}: restores and exports that "
                f"were given up still use all {ref_counts.num_buffers} buffers of a "
                "chunk. Restore the step again once they have ended."
            )
        copy.buffers = np.where(mask, fresh, copy.buffers)
        for index in lacking:
            # A slice without bytes is never sent, and is held by every host.
            empty = not self.pool.chunks.slices[index].nbytes
            nothing = chunk_digests(b"", 1) if empty else b""
            good = expected[index] in (None, nothing)
            copy.digests[index] = nothing if good else b""
        return [index for index in lacking if not copy.digests[index]]

    def fill(self, step: int, index: int, source: Parts, digests: bytes) -> None:
        """Copies `source` into the memory of the slice at `index` of a step's copy.

        Records `digests` as the slice's digests without a check.
        """
        copy = self.copies[step]
        self.pool.parts(copy, index).fill(source)
        copy.digests[index] = digests

    def guard(self, step: int, slices: Sequence[Slice]) -> int:
        """Keeps the memory of some slices of a step's copy until `unpin`.

        No other step gets this memory, even if the copy is dropped or replaced.

        Returns:
            The number of the pin, for `unpin`. The pinned copy has the memory of these
            slices, but no digests.
        """
        mask = self.pool.chunks.mask([self.pool.index[piece] for piece in slices])
        kept = self._nothing()
        kept.buffers = np.where(mask, self.copies[step].buffers, ABSENT)
        kept.buffers = kept.buffers.astype(np.uint8)
        self.pool.ref_counts.retain(kept.buffers)
        number = next(self._pin_numbers)
        self.pins[number] = step, kept
        return number


class Restoring:
    """A restore in progress, which writes slices into one copy of a step. Thread-safe.

    The slices are those that the copy lacked when the restore began. A newer restore
    may drop this copy, or put another in its place. This object then goes on writing
    into the old copy, and never into the new one: `restored` records digests in the old
    copy only. Until the `with` block ends, no other step gets the memory of the slices
    to be written.
    """

    def __init__(
        self,
        own: Owning,
        lock: threading.RLock,
        step: int,
        missing: Sequence[Slice],
    ) -> None:
        """Pins the memory of the missing slices; the caller must hold the lock.

        Args:
            own: this host's copies of its own slices.
            lock: the lock that guards `own`.
            step: the step that is restored; `Owning.begin_restore` has made its copy.
            missing: the slices that the caller fetches or assembles.
        """
        self.missing = tuple(missing)
        """This host's own slices that the caller must fetch or assemble."""
        self.chunk_bytes = own.pool.chunks.chunk_bytes
        """Size of a chunk in bytes; every chunk has its own digest."""
        self._own, self._lock = own, lock
        self._copy = own.copies[step]
        self._guard: int | None = own.guard(step, self.missing)

    def __enter__(self) -> "Restoring":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._guard is not None:
                self._own.unpin(self._guard)

    def parts(self, piece: Slice) -> Parts:
        """Returns the memory of `piece`, an own slice, in the copy.

        Only the memory of the missing slices may be written.
        """
        with self._lock:
            return self._own.pool.parts(self._copy, self._own.pool.index[piece])

    def restored(self, digests: Mapping[str, bytes]) -> None:
        """Records the digests of missing slices that were just written to the copy.

        `digests` maps slice key to digests, which are recorded without a check.
        """
        with self._lock:
            for index, piece in enumerate(self._own.pool.chunks.slices):
                if piece.key in digests:
                    self._copy.digests[index] = digests[piece.key]

    def keep_memory(self) -> None:
        """Keeps the memory of the missing slices for good, so no other step gets it.

        Called before the `with` block ends, if a write to this memory may still happen
        afterwards. The memory is then not reused until the whole arena is unmapped.
        """
        self._guard = None
