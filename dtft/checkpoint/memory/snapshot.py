"""Copies a step's slices from devices into an arena, and back, verified.

Runs in the trainer, at a step boundary: every array must be ready, and the next step
(which donates the buffers) must not have been dispatched. What did not change since the
last snapshot is not written.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import xxhash

from dtft.checkpoint.memory.arena import AlignedAllocator
from dtft.checkpoint.state import (
    ABSENT,
    DIGEST_BYTES,
    Chunks,
    Layout,
    Part,
    Parts,
    Slice,
    copy_and_digest,
    copy_chunk,
    equal_chunks,
    host_bytes,
    split_ranges,
    unpack_flags,
)

# Slices out of shared memory into memory of their own, verified, on several threads.
#
# A copy is digested while a cache has it, so what is handed out is what was checked.
# One thread copies no faster than one core reads; memory is faster than that.


THREADS = 4
"""At most; more than cores are of no use."""
NICENESS = 5
"""Of these threads."""
RANGE_BYTES = 16 << 20
"""Copied at a time by one thread, unless a chunk is larger."""


def copied_out(
    sources: Sequence[Parts], digests: Sequence[bytes], chunk_bytes: int
) -> tuple[list[np.ndarray], list[int]]:
    """Copies slices and checks the copies.

    Args:
        sources: of each slice, its bytes in pieces of whole chunks.
        digests: of each slice, 16 bytes per chunk.
        chunk_bytes: bytes under one digest.

    Returns:
        [bytes] uint8 per slice, aligned for XLA; and the slices that do not match
        their digests, ascending, whose copies are of no use.

    >>> from dtft.checkpoint.state import chunk_digests
    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> right, wrong = Parts([memoryview(b"abcdef")]), Parts([memoryview(b"abXdef")])
    >>> copies, bad = copied_out([right, wrong], [good, good], chunk_bytes=2)
    >>> copies[0].tobytes(), bad
    (b'abcdef', [1])
    """
    sizes = [source.nbytes for source in sources]
    allocator = AlignedAllocator(sum(sizes))
    copies = [allocator.take(size) for size in sizes]
    bad = {
        index
        for index, size in enumerate(sizes)
        if len(digests[index]) != DIGEST_BYTES * max(1, -(-size // chunk_bytes))
    }

    def load(range_: Sequence[Part]) -> list[int]:
        return [
            part.index
            for part in range_
            if not _is_loaded(
                *(part, sources[part.index], copies[part.index]),
                *(digests[part.index], chunk_bytes),
            )
        ]

    ranges = split_ranges(sizes, chunk_bytes, RANGE_BYTES)
    if len(ranges) < 2:
        found = map(load, ranges)
        return copies, sorted(bad.union(*found))
    threads = min(THREADS, os.cpu_count() or 1, len(ranges))
    with ThreadPoolExecutor(threads, initializer=_give_way) as pool:
        return copies, sorted(bad.union(*pool.map(load, ranges)))


def _give_way() -> None:
    """This host's agent may be sending to one that still fetches: that goes first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _is_loaded(
    part: Part, source: Parts, target: np.ndarray, digests: bytes, chunk_bytes: int
) -> bool:
    """Copies whole chunks of one slice; whether the copy is right."""
    found, begun = [], part.start
    for view in source.cut(part.start, part.stop):
        copy = target[begun : begun + view.nbytes].data
        found.append(copy_and_digest(view, copy, chunk_bytes))
        begun += view.nbytes
    first = part.start // chunk_bytes * DIGEST_BYTES
    actual = b"".join(found)
    return actual == digests[first : first + len(actual)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """A step in the arena, as the trainer remembers it until the next one."""

    step: int
    digests: tuple[bytes, ...]
    """One string per slice, 16 bytes per chunk; empty for one that is not there."""
    kept: np.ndarray
    """[chunks] bool: the bytes are those of the snapshot before, in its place."""


class CorruptCopy(RuntimeError):
    """A copy in this host's memory does not match its digest; it was not loaded."""


class SnapshotPlan:
    """Where each slice of a slot is on the devices and in the arena.

    Built once per layout; `write` then only copies and digests.
    """

    def __init__(self, layout: Layout, slot: int, chunk_bytes: int) -> None:
        """Lays the slices of `slot` side by side, in the layout's order."""
        self.slices: tuple[Slice, ...] = layout.slices(slot)
        self.chunks = Chunks.of(self.slices, chunk_bytes)
        self._first: list[int] = self.chunks.first.tolist()

    def write(
        self,
        step: int,
        arrays: Mapping[str, jax.Array | np.ndarray],
        memory: memoryview,
        buffers: np.ndarray,
        base: Snapshot | None = None,
        copied: np.ndarray | None = None,
    ) -> Snapshot:
        """Copies every slice, but for the chunks that are as they were.

        A chunk that changed last time is copied and digested in one pass, and taken for
        unchanged afterwards if the digests agree; one that did not is only digested.
        Equal digests (xxh3-128) stand for equal bytes: a change goes unnoticed by
        accident with a chance of 2^-128. What an unchanged chunk's buffer holds is
        checked by whoever reads it, as every byte in the arena is.

        Args:
            step: number of the step.
            arrays: leaf path to global array, all ready; or to a numpy array of which
                every process has all.
            memory: the arena, from its start.
            buffers: [chunks] uint8, a free buffer for each chunk.
            base: the last snapshot, if it still is in the arena.
            copied: [slices] bool, which slices to copy; by default all.
        """
        # Lists, for a state may have many leaves that are small.
        where = (buffers * np.int64(self.chunks.nbytes) + self.chunks.starts).tolist()
        calm = base.kept.tolist() if base is not None else [False] * len(where)
        digests = []
        for index, piece in enumerate(self.slices):
            if copied is not None and not copied[index]:
                digests.append(b"")
                continue
            raw = _bytes_of(arrays[piece.path], piece)
            mine = slice(self._first[index], self._first[index + 1])
            known = base.digests[index] if base is not None else b""
            found = self._write_slice(raw, memory, where[mine], known, calm[mine])
            digests.append(b"".join(found))
        kept = self._equal(digests, base.digests if base is not None else ())
        return Snapshot(step=step, digests=tuple(digests), kept=kept)

    def _write_slice(
        self,
        raw: memoryview,
        memory: memoryview,
        where: Sequence[int],
        known: bytes,
        calm: Sequence[bool],
    ) -> list[bytes]:
        """The digests of a slice's chunks, after writing those that may be new.

        Args:
            raw: the slice's bytes.
            memory: the arena.
            where: of each chunk, where in `memory` it may be written.
            known: the digests of the last snapshot; empty if that has not got it.
            calm: of each chunk, whether it did not change last time.
        """
        source, size = np.frombuffer(raw, np.uint8), self.chunks.chunk_bytes
        found: list[bytes] = []
        for at, start in enumerate(where):
            part = source[at * size : (at + 1) * size]
            before = known[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            if calm[at] and xxhash.xxh3_128_digest(part.data) == before:
                found.append(before)
            else:
                target = memory[start : start + len(part)]
                found.append(copy_chunk(part, target))
        return found

    def _equal(self, digests: Sequence[bytes], before: Sequence[bytes]) -> np.ndarray:
        """[chunks] bool: where both snapshots have the same bytes."""
        if not before:
            return np.zeros(self.chunks.num_chunks, bool)
        here = self.chunks.mask([i for i, one in enumerate(digests) if one])
        both = zip(digests, before, np.diff(self._first).tolist(), strict=True)
        pairs = [
            (one or bytes(DIGEST_BYTES * n), old or bytes(DIGEST_BYTES * n))
            for one, old, n in both
        ]
        new, last = (b"".join(side) for side in zip(*pairs, strict=True))
        return here & equal_chunks(new, last)

    def copied(self, packed: bytes) -> np.ndarray | None:
        """[slices] bool from what the agent says is to be copied; None for all."""
        return unpack_flags(packed, len(self.slices)) if packed else None

    def recalled(self, step: int, digests: Sequence[bytes]) -> Snapshot:
        """A restored step: what of it changes from step to step is not known yet."""
        kept = np.zeros(self.chunks.num_chunks, bool)
        return Snapshot(step=step, digests=tuple(digests), kept=kept)

    def read(
        self,
        memory: memoryview,
        buffers: np.ndarray,
        digests: Sequence[bytes],
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, Any]:
        """Builds the global arrays from an arena, checking every digest.

        Args:
            memory: the arena, from its start.
            buffers: [chunks] uint8, the buffer of each chunk.
            digests: of every slice.
            abstract: leaf path to shape, dtype and sharding.

        A leaf whose struct has no sharding becomes a numpy array.

        Raises:
            CorruptCopy: names the first slice whose bytes do not match.
        """
        assert not (buffers == ABSENT).any(), "a restore brings every own slice"
        sources = [
            self.chunks.parts(memory, buffers, index)
            for index in range(len(self.slices))
        ]
        loaded, bad = copied_out(sources, digests, self.chunks.chunk_bytes)
        if bad:
            raise CorruptCopy(
                f"slice {self.slices[bad[0]].key} does not match its digest: the copy "
                "in this host's memory is corrupt and was not loaded."
            )
        copies: dict[str, dict[tuple, np.ndarray]] = {}
        for piece, copy in zip(self.slices, loaded, strict=True):
            value = copy.view(np.dtype(piece.dtype)).reshape(piece.shape)
            copies.setdefault(piece.path, {})[(piece.start, piece.stop)] = value
        return {
            path: _global_array(struct, copies[path])
            for path, struct in abstract.items()
        }


def _bounds(
    index: tuple[slice, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(r[0] for r in ranges), tuple(r[1] for r in ranges)


def _bytes_of(array: jax.Array | np.ndarray, piece: Slice) -> memoryview:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return host_bytes(_shard_of(array, piece))


def _shard_of(array: jax.Array, piece: Slice) -> jax.Array:
    for shard in array.addressable_shards:
        if _bounds(shard.index, array.shape) == (piece.start, piece.stop):
            return shard.data
    raise ValueError(
        f"slice {piece.key} is not on this host's devices: the state's sharding "
        f"{array.sharding} differs from the layout that was announced."
    )


def _global_array(
    struct: jax.ShapeDtypeStruct, copies: Mapping[tuple, np.ndarray]
) -> jax.Array | np.ndarray:
    sharding = struct.sharding
    if sharding is None:
        (whole,) = copies.values()
        return whole
    indices = sharding.addressable_devices_indices_map(struct.shape)
    parts = [
        jax.device_put(copies[_bounds(index, struct.shape)], device)
        for device, index in indices.items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(struct.shape, sharding, parts)
