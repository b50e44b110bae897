"""The steps that one process keeps in its own memory, with digests and a commit log.

A new step is written beside the kept steps and then committed. If memory then has more
steps than the limit, the steps written first are dropped. An unchanged leaf shares the
buffer of the step written before. The memory has no name in any directory, so the
system frees it however the process ends.

The exporter is a second process, which writes steps from this memory to storage.
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

MAX_BUFFERS = ABSENT - 1


class Extent:
    """Shared memory with room for every leaf of the state once.

    The exporter (the process that writes steps to storage) opens the memory by `path`.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserves `nbytes` bytes.

        Raises:
            OSError: too little memory; the message has the bytes needed and available.
        """
        name = f"dtft-{os.getpid()}-{secrets.token_hex(4)}"
        self.arena = Arena.create(name, max(nbytes, 1))
        try:
            self._descriptor = os.open(self.arena.path, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            self.arena.unlink()
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Frees the memory."""
        self.arena.close()
        os.close(self._descriptor)


class LeafMemory:
    """Memory for several steps whose leaves have the same shapes. Not thread-safe.

    Every leaf has several buffers, one in each extent (an area of memory with room for
    every leaf once): buffer p of a leaf lies in extent p, at the same offset in every
    extent. An extent is reserved when a step first needs it. Steps in which a leaf is
    equal refer to one buffer of the leaf, so an unchanged leaf takes memory once.
    `BufferRefCounts` counts these references.

    In the example, each of the first two steps reserves an extent, so `paths` has two
    entries. When the first step has released buffer 0, the third step takes this buffer
    again. A view has the 4 bytes of the leaf.

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
        """Reserves no memory yet; each of `slices` is a whole leaf."""
        self.slices = slices
        self._offsets, self._nbytes = offsets_of(slices)
        self.ref_counts = BufferRefCounts(len(slices), MAX_BUFFERS)
        self._extents: dict[int, Extent] = {}

    def acquire(self) -> np.ndarray:
        """Takes the lowest free buffer of each leaf, with a reference count of 1.

        Returns:
            [leaves] uint8: the buffer of each leaf.

        Raises:
            OSError: too little memory; the message has the bytes needed and available.
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
        """Returns the memory of the leaf at `index`, in its buffer number `buffer`."""
        arena = self._extents[buffer].arena
        return arena.view(self._offsets[index], self.slices[index].nbytes)

    @property
    def paths(self) -> dict[int, str]:
        """Maps each buffer number to a path by which another process opens the memory.

        The memory at the path of number p has buffer p of every leaf.
        """
        return {buffer: extent.path for buffer, extent in self._extents.items()}

    def trim(self) -> bool:
        """Frees each extent (an area with room for every leaf once) that no step uses.

        Returns:
            Whether no extent is left.
        """
        free = self.ref_counts.free_buffers
        for buffer in [buffer for buffer in self._extents if free[buffer]]:
            self._extents.pop(buffer).close()
        return not self._extents

    def close(self) -> None:
        """Frees all memory; no step may use it any more."""
        for extent in self._extents.values():
            extent.close()
        self._extents.clear()


class Corrupt(ValueError):
    """A step in memory does not match its digests; the step was dropped."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Version:
    """One step in this process's memory: where its leaves are, and their digests."""

    step: int
    record: Record
    memory: LeafMemory
    buffers: np.ndarray
    """[leaves] uint8: the number of each leaf's buffer in `memory`."""
    kept: np.ndarray
    """[leaves] bool: whether the leaf equals that of the step written before and shares
    its buffer. All False if that step's buffers cannot be used (first step, other
    shapes, or after `Versions.distrust`)."""
    digests: tuple[bytes, ...]
    """Digests of each leaf, 16 bytes per chunk."""
    shardings: tuple[Any, ...]
    """The sharding of each leaf that is a jax array; None for other leaves."""

    def views(self) -> list[memoryview]:
        """Returns the memory of each leaf, in the order of `record.leaves`."""
        return [
            self.memory.view(buffer, index)
            for index, buffer in enumerate(self.buffers.tolist())
        ]

    @property
    def exported(self) -> list[str]:
        """For each leaf, the path by which another process opens the leaf's memory."""
        paths = self.memory.paths
        return [paths[buffer] for buffer in self.buffers.tolist()]


class Versions:
    """The steps that one process keeps in memory. Not thread-safe.

    These are the last `keep` committed steps, and the step with the largest number.
    """

    def __init__(self, *, keep: int, chunk_bytes: int) -> None:
        """Reserves no memory yet; `write` reserves memory when a step needs it.

        Args:
            keep: the number of steps that stay in memory.
            chunk_bytes: size of a chunk in bytes; every chunk has its own digest.

        Raises:
            ValueError: `keep` is above 252 (`MAX_BUFFERS` - 2).
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
        """One memory for each group of steps with equal leaf paths, shapes and dtypes.
        The last one is that of the step written last."""
        self._trusted = True

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be read, ascending."""
        return tuple(sorted(self._versions))

    def get(self, step: int) -> Version:
        """Returns where a step's leaves are in memory, with their digests.

        The bytes are not checked.

        Raises:
            KeyError: the step is not in memory.
        """
        return self._versions[step]

    def write(self, step: int, record: Record, values: Sequence[Any]) -> Version:
        """Copies a new step into memory and commits it.

        Then drops the steps written first until `keep` steps are left, but never the
        step of the largest number. The values may be deleted or donated afterwards. If
        an error is raised, the steps committed before stay readable.

        Args:
            step: the step; not in memory yet.
            record: describes the save: its items and leaves.
            values: the values of the leaves, in the order of `record.leaves`.

        Returns:
            Where the leaves are in memory, and their digests.

        Raises:
            OSError: too little memory; the message has the bytes needed and available.
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
            if old != self.steps[-1]:  # training resumes from the newest step
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
        """Makes the `Version` of a new step; copies the leaves that may have changed.

        The previous step is the one written before. A leaf that had changed in the
        previous step is copied to `buffers` and digested. Any other leaf is first
        compared with its saved value, and copied only if it differs. All
        leaves are copied if the previous step is not in `memory`, or after `distrust`.
        If a leaf has the digests of the previous step, the result refers to the
        previous step's buffer of this leaf, even if the leaf was copied.

        Args:
            step: the step.
            record: describes the save: its items and leaves.
            values: the values of the leaves, in the order of `record.leaves`.
            memory: the memory for steps with these leaves.
            buffers: [leaves] uint8, the number of a free buffer of each leaf.
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
        """Reads a step and checks every byte against the digests and the commit.

        Returns:
            The step's `Version` (its record, buffers and digests), and for each leaf an
            array that is a view of the memory.

        Raises:
            KeyError: the step is not in memory.
            Corrupt: a byte is wrong; the message names the leaves. The step was
                dropped.
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
        """Makes the next `write` copy every leaf, because leaves may be corrupt.

        Without this call, `write` shares the buffers of unchanged leaves.
        """
        self._trusted = False

    def drop(self, step: int) -> None:
        """Drops a step; its buffers become free unless a pin or another step uses them.

        Raises:
            KeyError: the step is not in memory.
        """
        self._log.forget(step)
        self.unpin(self._versions.pop(step))

    def pin(self, version: Version) -> None:
        """Prevents the buffers of a step from being overwritten until `unpin`."""
        version.memory.ref_counts.retain(version.buffers)

    def unpin(self, version: Version) -> None:
        """Ends one `pin` of a step; its buffers are free if nothing else uses them."""
        version.memory.ref_counts.release(version.buffers)
        self._trim()

    def close(self) -> None:
        """Drops all steps and frees all memory; no step may be pinned."""
        for step in self.steps:
            self.drop(step)
        for memory in self._memories:
            memory.close()
        self._memories.clear()

    def _memory_for(self, slices: tuple[Slice, ...]) -> LeafMemory:
        if not self._memories or self._memories[-1].slices != slices:
            self._memories.append(LeafMemory(slices))  # the leaves have other shapes
            self._trim()
        return self._memories[-1]

    def _trim(self) -> None:
        """Frees the unused memory for leaf shapes other than those of the last `write`.

        The memory for the shapes of the last `write` stays reserved, because the next
        steps use it.
        """
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
