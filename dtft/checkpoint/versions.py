"""The steps that one process keeps in its own memory, with digests and a commit log.

Stages a step beside those it has, commits it, drops the oldest; reads a step back only
if every byte is right. The memory has no name in any directory, so nothing is left
behind however the process ends. Must not know Orbax, storage or other processes.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dtft.checkpoint import digest, placing
from dtft.checkpoint.arena import Arena
from dtft.checkpoint.commit import Commit, MemoryCommitLog
from dtft.checkpoint.record import Record
from dtft.checkpoint.slices import Slice, offsets_of


class Corrupt(ValueError):
    """A copy in memory does not match its digests; it was dropped."""


class Extent:
    """Memory for one step, shared with the exporter by `path`."""

    def __init__(self, nbytes: int) -> None:
        """Reserves it.

        Raises:
            OSError: the memory is not there; names the bytes needed and available.
        """
        self.nbytes, self.users = nbytes, 0
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


@dataclass(frozen=True, kw_only=True)
class Version:
    """One step in memory."""

    step: int
    record: Record
    extent: Extent
    offsets: tuple[int, ...]
    """Of each leaf in the extent."""
    digests: tuple[bytes, ...]
    """Of each leaf, 16 bytes per chunk."""
    shardings: tuple[Any, ...]
    """Of each leaf that was a jax array, else None."""

    def views(self) -> list[memoryview]:
        """The bytes of each leaf."""
        return [
            self.extent.arena.view(offset, piece.nbytes)
            for piece, offset in zip(_slices(self.record), self.offsets, strict=True)
        ]


class Versions:
    """The `keep` steps that were committed last, and the newest. Not thread-safe."""

    def __init__(self, *, keep: int, chunk_bytes: int) -> None:
        """Reserves nothing before the first step shows how much is needed."""
        self._keep, self.chunk_bytes = keep, chunk_bytes
        self._log = MemoryCommitLog()
        self._versions: dict[int, Version] = {}
        self._free: list[Extent] = []

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
        offsets, nbytes = offsets_of(_slices(record))
        extent = self._acquire(nbytes)
        try:
            version = self._stage(step, record, values, extent, offsets)
            self._log.append(_commit(version))
        except BaseException:
            self._release(extent)
            raise
        self._versions[step] = version
        for old in list(self._versions)[: -self._keep]:
            if old != self.steps[-1]:  # the one to go on from
                self.drop(old)
        return version

    def _stage(
        self,
        step: int,
        record: Record,
        values: Sequence[Any],
        extent: Extent,
        offsets: tuple[int, ...],
    ) -> Version:
        digests = []
        pieces = zip(_slices(record), offsets, record.leaves, values, strict=True)
        for piece, offset, leaf, value in pieces:
            view = extent.arena.view(offset, piece.nbytes)
            digests.append(placing.copy_out(value, leaf, view, self.chunk_bytes))
        return Version(
            step=step,
            record=record,
            extent=extent,
            offsets=offsets,
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
            if digest.verify(view, expected, self.chunk_bytes)
        ]
        committed = {commit.step: commit.root for commit in self._log.commits()}
        if bad or committed.get(step) != _root(version):
            self.drop(step)
            raise Corrupt(
                f"step {step} in memory is corrupt and was not loaded: "
                f"{', '.join(bad[:8]) or 'its digests'} do not match the commit."
            )
        leaves = zip(views, version.record.leaves, strict=True)
        return version, [placing.as_array(view, leaf) for view, leaf in leaves]

    def drop(self, step: int) -> None:
        """Forgets a step; its memory is used again unless it is pinned."""
        self._log.forget(step)
        self._release(self._versions.pop(step).extent)

    def pin(self, version: Version) -> None:
        """Keeps the bytes of a step as they are until `unpin`."""
        version.extent.users += 1

    def unpin(self, version: Version) -> None:
        """Ends one `pin`."""
        self._release(version.extent)

    def close(self) -> None:
        """Gives all memory back; nothing may be pinned."""
        for step in self.steps:
            self.drop(step)
        for extent in self._free:
            extent.close()
        self._free.clear()

    def _acquire(self, nbytes: int) -> Extent:
        fitting = [extent for extent in self._free if extent.nbytes == nbytes]
        for extent in set(self._free) - set(fitting):
            extent.close()  # the state has changed its shape
        self._free = fitting
        extent = self._free.pop() if self._free else Extent(nbytes)
        extent.users += 1
        return extent

    def _release(self, extent: Extent) -> None:
        extent.users -= 1
        if extent.users == 0:
            self._free.append(extent)


def _slices(record: Record) -> tuple[Slice, ...]:
    return record.layout.slices(0)


def _root(version: Version) -> str:
    pieces = zip(_slices(version.record), version.digests, strict=True)
    return digest.digest_root((piece.key, digests) for piece, digests in pieces)


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
