"""The steps that one process keeps in its own memory, with digests and a commit log.

A step is staged beside those that are there, then committed; the oldest is dropped. A
leaf that did not change stays where the step before has it. The memory has no name in
any directory, so nothing is left behind however the process ends.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dtft.checkpoint.memory.arena import Arena
from dtft.checkpoint.memory.chunk_pool import BufferRefCounts
from dtft.checkpoint.replication import Commit, MemoryCommitLog
from dtft.checkpoint.state import (
    ABSENT,
    Record,
    Slice,
    as_array,
    copy_leaf,
    digest_root,
    is_leaf_unchanged,
    offsets_of,
    verify_digests,
)

# This process's memory for leaves: several buffers for each, taken when needed.
#
# Place p of a leaf is where it lies in the p-th of several extents that are laid out
# alike. Steps that have a leaf in common refer to one buffer (`BufferRefCounts` counts
# them), so a leaf that does not change needs no more memory than one.


MAX_BUFFERS = ABSENT - 1


class Extent:
    """Memory for every leaf once, shared with the exporter by `path`."""

    def __init__(self, nbytes: int) -> None:
        """Reserves it.

        Raises:
            OSError: the memory is not there; names the bytes needed and available.
        """
        name = f"dtft-{os.getpid()}-{secrets.token_hex(4)}"
        self.arena = Arena.create(name, max(nbytes, 1))
        try:
            self._descriptor = os.open(self.arena.path, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            self.arena.unlink()
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Gives the memory back."""
        self.arena.close()
        os.close(self._descriptor)


class LeafMemory:
    """The buffers of the leaves of one layout. Not thread-safe.

    >>> leaf = Slice(path="w", start=(0,), stop=(4,), dtype="uint8")
    >>> memory = LeafMemory((leaf,))
    >>> one, other = memory.acquire(), memory.acquire()
    >>> one.tolist(), other.tolist(), len(memory.paths)
    ([0], [1], 2)
    >>> memory.ref_counts.release(one)
    >>> memory.acquire().tolist(), len(memory.view(0, 0))
    ([0], 4)
    >>> memory.close()
    """

    def __init__(self, slices: tuple[Slice, ...]) -> None:
        """Reserves nothing yet; each of `slices` is a whole leaf."""
        self.slices = slices
        self._offsets, self._nbytes = offsets_of(slices)
        self.ref_counts = BufferRefCounts(len(slices), MAX_BUFFERS)
        self._extents: dict[int, Extent] = {}

    def acquire(self) -> np.ndarray:
        """[leaves] uint8: a free buffer of each leaf, the lowest, referred to once.

        Raises:
            OSError: the memory is not there; names the bytes needed and available.
            RuntimeError: all buffers of a leaf are in use.
        """
        buffers = self.ref_counts.acquire(np.arange(len(self.slices)))
        if buffers is None:
            raise RuntimeError(f"all {MAX_BUFFERS} buffers of a leaf are in use")
        try:
            for buffer in sorted({0, *buffers.tolist()} - set(self._extents)):
                self._extents[buffer] = Extent(self._nbytes)
        except BaseException:
            self.ref_counts.release(buffers)
            raise
        return buffers

    def view(self, buffer: int, index: int) -> memoryview:
        """The bytes of one leaf at one of its buffers."""
        arena = self._extents[buffer].arena
        return arena.view(self._offsets[index], self.slices[index].nbytes)

    @property
    def paths(self) -> dict[int, str]:
        """Of each extent in use its path, which the exporter opens."""
        return {buffer: extent.path for buffer, extent in self._extents.items()}

    def trim(self) -> bool:
        """Gives back what nobody refers to; whether that is all of it."""
        free = self.ref_counts.free_buffers
        for buffer in [buffer for buffer in self._extents if free[buffer]]:
            self._extents.pop(buffer).close()
        return not self._extents

    def close(self) -> None:
        """Gives all of it back."""
        for extent in self._extents.values():
            extent.close()
        self._extents.clear()


class Corrupt(ValueError):
    """A copy in memory does not match its digests; it was dropped."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Version:
    """One step in memory."""

    step: int
    record: Record
    memory: LeafMemory
    buffers: np.ndarray
    """[leaves] uint8: where in `memory` each leaf is."""
    kept: np.ndarray
    """[leaves] bool: it is where the step before has it, for it did not change."""
    digests: tuple[bytes, ...]
    """Of each leaf, 16 bytes per chunk."""
    shardings: tuple[Any, ...]
    """Of each leaf that was a jax array, else None."""

    def views(self) -> list[memoryview]:
        """The bytes of each leaf."""
        return [
            self.memory.view(buffer, index)
            for index, buffer in enumerate(self.buffers.tolist())
        ]

    @property
    def exported(self) -> list[str]:
        """Of each leaf the path of the extent that it is in, for the exporter."""
        paths = self.memory.paths
        return [paths[buffer] for buffer in self.buffers.tolist()]


class Versions:
    """The `keep` steps that were committed last, and the newest. Not thread-safe."""

    def __init__(self, *, keep: int, chunk_bytes: int) -> None:
        """Reserves nothing before the first step shows how much is needed.

        Raises:
            ValueError: `keep` is more than there are buffers.
        """
        if keep > MAX_BUFFERS - 2:
            raise ValueError(
                f"memory_to_keep={keep} is too large. Allowed: up to "
                f"{MAX_BUFFERS - 2}. Set ReplicatedOptions(memory_to_keep=...)."
            )
        self._keep, self.chunk_bytes = keep, chunk_bytes
        self._log = MemoryCommitLog()
        self._versions: dict[int, Version] = {}
        self._memories: list[LeafMemory] = []
        """The last is that of the newest step; before it those of another shape."""
        self._trusted = True

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be read, ascending."""
        return tuple(sorted(self._versions))

    def get(self, step: int) -> Version:
        """A step, unchecked."""
        return self._versions[step]

    def write(self, step: int, record: Record, values: Sequence[Any]) -> Version:
        """Copies a new step into memory and commits it; the values may go afterwards.

        Whatever goes wrong, the steps that were there stay.

        Raises:
            OSError: the memory is not there.
        """
        jax.block_until_ready([v for v in values if isinstance(v, jax.Array)])
        memory = self._memory_for(_slices(record))
        buffers = memory.acquire()
        try:
            version = self._stage(step, record, values, memory, buffers)
            self._log.append(_commit(version))
            memory.ref_counts.retain(version.buffers)
        finally:
            memory.ref_counts.release(buffers)
        self._versions[step], self._trusted = version, True
        for old in list(self._versions)[: -self._keep]:
            if old != self.steps[-1]:  # the one to go on from
                self.drop(old)
        return version

    def _stage(
        self,
        step: int,
        record: Record,
        values: Sequence[Any],
        memory: LeafMemory,
        buffers: np.ndarray,
    ) -> Version:
        """Writes to `buffers` what may have changed since the step written last.

        A leaf that changed last time is copied and digested in one pass; one that did
        not is only digested, as in `snapshot`.
        """
        base = next(reversed(self._versions.values()), None)
        if base is None or base.memory is not memory or not self._trusted:
            known, calm, old = [b""] * len(values), [False] * len(values), buffers
        else:
            known, calm, old = base.digests, base.kept.tolist(), base.buffers
        digests = []
        for index, (leaf, value) in enumerate(zip(record.leaves, values, strict=True)):
            before = memory.view(int(old[index]), index)
            if calm[index] and is_leaf_unchanged(
                value, leaf, before, known[index], self.chunk_bytes
            ):
                digests.append(known[index])
            else:
                view = memory.view(int(buffers[index]), index)
                digests.append(copy_leaf(value, leaf, view, self.chunk_bytes))
        pairs = zip(digests, known, strict=True)
        kept = np.array([new == before for new, before in pairs], bool)
        return Version(
            step=step,
            record=record,
            memory=memory,
            buffers=np.where(kept, old, buffers).astype(np.uint8),
            kept=kept,
            digests=tuple(digests),
            shardings=tuple(
                value.sharding if isinstance(value, jax.Array) else None
                for value in values
            ),
        )

    def read(self, step: int) -> tuple[Version, list[np.ndarray]]:
        """A step and views of its leaves, every byte checked just now.

        Raises:
            KeyError: the step is not here.
            Corrupt: a byte is wrong; names the leaves. The step is not here any more.
        """
        version = self._versions[step]
        views = version.views()
        bad = [
            leaf.path
            for leaf, view, expected in zip(
                version.record.leaves, views, version.digests, strict=True
            )
            if verify_digests(view, expected, self.chunk_bytes)
        ]
        committed = {commit.step: commit.root for commit in self._log.commits()}
        if bad or committed.get(step) != _root(version):
            self.drop(step)
            self.distrust()
            raise Corrupt(
                f"step {step} in memory is corrupt and was not loaded: "
                f"{', '.join(bad[:8]) or 'its digests'} do not match the commit."
            )
        leaves = zip(views, version.record.leaves, strict=True)
        return version, [as_array(view, leaf) for view, leaf in leaves]

    def distrust(self) -> None:
        """The next step is written whole: what it would keep may be damaged."""
        self._trusted = False

    def drop(self, step: int) -> None:
        """Forgets a step; its memory is used again unless it is pinned."""
        self._log.forget(step)
        self.unpin(self._versions.pop(step))

    def pin(self, version: Version) -> None:
        """Keeps the bytes of a step as they are until `unpin`."""
        version.memory.ref_counts.retain(version.buffers)

    def unpin(self, version: Version) -> None:
        """Ends one `pin`."""
        version.memory.ref_counts.release(version.buffers)
        self._trim()

    def close(self) -> None:
        """Gives all memory back; nothing may be pinned."""
        for step in self.steps:
            self.drop(step)
        for memory in self._memories:
            memory.close()
        self._memories.clear()

    def _memory_for(self, slices: tuple[Slice, ...]) -> LeafMemory:
        if not self._memories or self._memories[-1].slices != slices:
            self._memories.append(LeafMemory(slices))  # the state has another shape
            self._trim()
        return self._memories[-1]

    def _trim(self) -> None:
        """Gives back what only states of another shape needed."""
        former = [memory for memory in self._memories[:-1] if not memory.trim()]
        self._memories[:-1] = former


def _slices(record: Record) -> tuple[Slice, ...]:
    return record.layout.slices(0)


def _root(version: Version) -> str:
    pieces = zip(_slices(version.record), version.digests, strict=True)
    return digest_root((piece.key, digests) for piece, digests in pieces)


def _commit(version: Version) -> Commit:
    return Commit(
        step=version.step,
        generation=0,
        attempt=0,
        root=_root(version),
        layout=version.record.layout.digest,
        holders=("this process",),
        copies=1,
    )
