"""Copies a step's slices from devices into an arena, and back with verification.

Runs in the trainer, at a step boundary: every array must be ready, and the next step
(which donates the buffers) must not have been dispatched. A chunk (a part of a slice's
bytes) is not written if it is the same as in the last two snapshots.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import xxhash

from dtft._priority import lower_priority
from dtft.checkpoint.memory.arena import AlignedAllocator
from dtft.checkpoint.state import (
    ABSENT,
    BRIEF_BYTES,
    DIGEST_BYTES,
    Chunks,
    Layout,
    Part,
    Parts,
    Range,
    Slice,
    copy_and_digest,
    copy_chunk,
    copying_threads,
    equal_chunks,
    host_bytes,
    on_accelerator,
    split_ranges,
    unpack_flags,
)

NICENESS = 5
"""Niceness of the threads that copy slices out of shared memory."""
RANGE_BYTES = 16 << 20
"""Bytes copied at a time by one thread; a larger chunk is copied whole."""
_AHEAD_BYTES = 64 << 20
"""Approximate limit of the bytes of accelerators' arrays whose copies to the host are
started in advance."""

HostOrDevice = jax.Array | np.ndarray
_Shard = tuple[HostOrDevice, bool]
"""An array on one device or a numpy array, and whether it is in the memory of an
accelerator."""


def copied_out(
    sources: Sequence[Parts], digests: Sequence[bytes], chunk_bytes: int
) -> tuple[list[np.ndarray], list[int]]:
    """Copies slices into new memory and verifies them.

    Many bytes are copied by several threads (`copying_threads`). Each copy is digested
    while it is in cache, so the verified bytes are those of the copy. In the example,
    the second slice (index 1) has a wrong byte.

    Args:
        sources: of each slice, its bytes in pieces of whole chunks.
        digests: of each slice, 16 bytes per chunk.
        chunk_bytes: size of a chunk in bytes.

    Returns:
        [bytes] uint8 per slice, aligned for XLA; and the ascending indices of the
        slices whose copies do not match their digests and must not be used.

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
    threads = copying_threads(sum(sizes))
    if threads < 2:
        return copies, sorted(bad.union(*map(load, ranges)))
    with ThreadPoolExecutor(threads, initializer=_give_way) as pool:
        return copies, sorted(bad.union(*pool.map(load, ranges)))


def _give_way() -> None:
    """Lowers the priority of the calling thread below that of this host's agent.

    The agent may still be sending slices to other hosts, which wait for them.
    """
    lower_priority(NICENESS)


def _is_loaded(
    part: Part, source: Parts, target: np.ndarray, digests: bytes, chunk_bytes: int
) -> bool:
    """Copies a byte range of a slice to `target`, and checks the digests of the copy.

    Args:
        part: the range, which consists of whole chunks.
        source: the bytes of the slice.
        target: [bytes] uint8, memory for the whole slice.
        digests: of the whole slice, 16 bytes per chunk.
        chunk_bytes: size of a chunk in bytes.

    Returns:
        Whether the copied chunks match their digests.
    """
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
    """The digests of a step's slices, and the chunks unchanged since the last snapshot.

    A chunk is a part of a slice's bytes; each chunk has its own digest. The trainer
    keeps this object until the next snapshot, which compares the digests of its chunks
    with the digests here.
    """

    step: int
    digests: tuple[bytes, ...]
    """Digests of each slice, 16 bytes per chunk; empty for a slice not copied."""
    kept: np.ndarray
    """[chunks] bool: whether the chunk equals that of the snapshot before, and is kept
    in the same buffer."""


_Written = bytes | memoryview
"""The digest of a chunk; or the chunk's copy, if the copy is not digested yet."""


class CopiedStep:
    """A step whose slices are in shared memory, and whose digests may be missing.

    The shared memory must not change until `snapshot` has returned.
    """

    def __init__(
        self,
        written: Sequence[Sequence[_Written]],
        digested: Callable[[Iterator[bytes]], Snapshot],
    ) -> None:
        """Digests nothing yet.

        Args:
            written: of each range of chunks, what each chunk has: its digest, or the
                copy to digest.
            digested: makes the snapshot from the digests of all chunks, in order.
        """
        self._written, self._digested = written, digested
        self._left = sum(
            it.nbytes for one in written for it in one if isinstance(it, memoryview)
        )

    @property
    def has_digests(self) -> bool:
        """Whether all chunks are digested, so that `snapshot` takes no time."""
        return not self._left

    def snapshot(self) -> Snapshot:
        """Digests the copies that are not digested yet, if possible on several threads.

        Returns:
            The digests, and which chunks are unchanged since the last snapshot.
        """
        threads, found = copying_threads(self._left), map(digests_of, self._written)
        if threads > 1:
            # No thread can be started while the program ends; one is enough then.
            with (
                contextlib.suppress(RuntimeError),
                ThreadPoolExecutor(threads) as pool,
            ):
                found = list(pool.map(digests_of, self._written))
        return self._digested(itertools.chain.from_iterable(found))


def digests_of(written: Sequence[_Written]) -> list[bytes]:
    """Returns the digest of each chunk; computes those that are missing."""
    return [
        xxhash.xxh3_128_digest(it) if isinstance(it, memoryview) else it
        for it in written
    ]


class CorruptCopy(RuntimeError):
    """A copy in this host's memory does not match its digests and was not loaded."""


class SnapshotPlan:
    """A plan for copying the slices of a slot between devices and shared memory.

    The shared memory (arena) belongs to this host's agent. The offsets of the slices
    are computed once per layout. `write` then only copies and digests. A large state is
    copied by several threads (see `copying_threads`), because one core cannot use the
    whole bandwidth of the memory.
    """

    def __init__(self, layout: Layout, slot: int, chunk_bytes: int) -> None:
        """Computes the slices of `slot`, their chunks and the chunks' offsets.

        Args:
            layout: mesh and leaves, which decide the slices of every slot.
            slot: the slot (position in the job) of this host.
            chunk_bytes: size of a chunk in bytes; every chunk has its own digest.
        """
        self.slices: tuple[Slice, ...] = layout.slices(slot)
        self.chunks = Chunks.of(self.slices, chunk_bytes)
        sizes = [piece.nbytes for piece in self.slices]
        self._ranges = split_ranges(sizes, chunk_bytes, RANGE_BYTES)
        self._first: list[int] = self.chunks.first.tolist()
        self._shards: dict[int, tuple[jax.sharding.Sharding, int, bool]] = {}
        """Index of a slice to the sharding of its leaf at the last snapshot, the number
        of its shard among those of this process, and whether the shard is in the memory
        of an accelerator."""

    def write(
        self,
        step: int,
        arrays: Mapping[str, jax.Array | np.ndarray],
        memory: memoryview,
        buffers: np.ndarray,
        base: Snapshot | None = None,
        copied: np.ndarray | None = None,
    ) -> CopiedStep:
        """Copies every slice to shared memory, except chunks that stay unchanged.

        A chunk (a part of a slice's bytes) that did not change at the last snapshot is
        first only digested, and copied if its digest differs from that of the last
        snapshot. Every other chunk is copied. If its digest equals that of the last
        snapshot, the chunk counts as unchanged and keeps its old buffer.

        Training waits for this call. So if several threads copy (`copying_threads`),
        `CopiedStep.snapshot` makes the digests of chunks above 64 KiB (`BRIEF_BYTES`)
        later. One thread copies and digests in one pass.

        Equal digests (xxh3-128) are taken for equal bytes: a change is missed by
        accident with a probability of 2^-128. The buffer of an unchanged chunk is not
        verified here; every reader of the arena verifies the bytes.

        Args:
            step: number of the step.
            arrays: leaf path to a global array that is already computed, or to a numpy
                array that every process has whole.
            memory: the whole shared memory (arena) of this host's agent.
            buffers: [chunks] uint8, the number of a free buffer for each chunk.
            base: the last snapshot, if the shared memory still holds it. Without it,
                all chunks are copied.
            copied: [slices] bool, which slices to copy; by default all.

        Returns:
            The copied step; the arrays may be donated or deleted.

        Raises:
            ValueError: a slice is not on this host's devices.
        """
        # Lists, because a state may have many small leaves.
        where = (buffers * np.int64(self.chunks.nbytes) + self.chunks.starts).tolist()
        calm = base.kept.tolist() if base is not None else [False] * len(where)
        skipped = set() if copied is None else set(np.flatnonzero(~copied).tolist())
        ranges = self._ranges
        if skipped:
            left = [[it for it in one if it.index not in skipped] for one in ranges]
            ranges = [tuple(one) for one in left if one]
        threads = copying_threads(sum(part.nbytes for one in ranges for part in one))

        def write(parts: Range, views: Sequence[memoryview]) -> list[_Written]:
            made: list[_Written] = []
            for part, view in zip(parts, views, strict=True):
                known = base.digests[part.index] if base is not None else b""
                ahead = part.start // self.chunks.chunk_bytes
                first = self._first[part.index] + ahead
                last = first + max(1, -(-part.nbytes // self.chunks.chunk_bytes))
                made += self._write_part(
                    *(view, memory, where[first:last]),
                    *(known[ahead * DIGEST_BYTES :], calm[first:last]),
                    digest_later=threads > 1,
                )
            return made

        views = self._views(ranges, arrays)
        if threads < 2:
            made = list(map(write, ranges, views))
        else:
            with ThreadPoolExecutor(threads) as pool:
                made = list(pool.map(write, ranges, views))

        def digested(found: Iterator[bytes]) -> Snapshot:
            digests = [
                b"" if index in skipped else b"".join(itertools.islice(found, count))
                for index, count in enumerate(np.diff(self._first).tolist())
            ]
            kept = self._equal(digests, base.digests if base is not None else ())
            return Snapshot(step=step, digests=tuple(digests), kept=kept)

        return CopiedStep(made, digested)

    def _views(
        self, ranges: Iterable[Range], arrays: Mapping[str, HostOrDevice]
    ) -> Iterator[list[memoryview]]:
        """Yields, for each range, a list with one view for each of its parts.

        A range is a tuple of parts that one thread copies at a time. A part is a byte
        range of one slice.

        Args:
            ranges: cover slices of this slot; the parts of a slice follow each other.
            arrays: leaf path to array, as for `write`.

        Raises:
            ValueError: a slice is not on this host's devices.
        """
        wanted = dict.fromkeys(part.index for one in ranges for part in one)
        shards = _fetched(
            self._shard_of(arrays[self.slices[index].path], index) for index in wanted
        )
        index, raw = -1, memoryview(b"")
        for one in ranges:
            views: list[memoryview] = []
            for part in one:
                if part.index != index:
                    index, raw = part.index, _bytes_of(*next(shards))
                views.append(raw[part.start : part.stop])
            yield views

    def _shard_of(self, array: HostOrDevice, index: int) -> _Shard:
        """Returns the shard of an array that is slice `index`.

        Also returns whether the shard is in the memory of an accelerator. A numpy array
        has no shards and is returned whole.

        Raises:
            ValueError: the slice is not on this host's devices.
        """
        if isinstance(array, np.ndarray):
            return array, False
        sharding = array.sharding
        known, number, is_remote = self._shards.get(index, (None, 0, False))
        if known is not sharding:
            number = _number_of_shard(array, self.slices[index])
            is_remote = on_accelerator(array.addressable_data(number))
            self._shards[index] = sharding, number, is_remote
        return array.addressable_data(number), is_remote

    def _write_part(
        self,
        raw: memoryview,
        memory: memoryview,
        where: Sequence[int],
        known: bytes,
        calm: Sequence[bool],
        *,
        digest_later: bool,
    ) -> list[_Written]:
        """Copies chunks of a slice to shared memory, except those that stay unchanged.

        A calm chunk (one that was unchanged in the last snapshot) is digested first,
        and copied only if its digest changed. The other chunks are always copied.

        Args:
            raw: the bytes of the chunks.
            memory: the shared memory, from its start.
            where: the offset in `memory` of the buffer of each chunk.
            known: digests of the chunks in the last snapshot, 16 bytes each; more bytes
                are ignored. b"" without a last snapshot, or if it lacks the slice.
            calm: whether each chunk is calm.
            digest_later: whether copies of large chunks are not digested yet.

        Returns:
            The digest of each chunk, or its copy if it is digested later.
        """
        size = self.chunks.chunk_bytes
        found: list[_Written] = []
        for at, start in enumerate(where):
            part = raw if len(where) == 1 else raw[at * size : (at + 1) * size]
            if calm[at]:
                before = known[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
                if xxhash.xxh3_128_digest(part) == before:
                    found.append(before)
                    continue
            copy = memory[start : start + len(part)]
            if digest_later and len(part) > BRIEF_BYTES:
                np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(part, np.uint8))
                found.append(copy)
            else:
                found.append(copy_chunk(part, copy))
        return found

    def _equal(self, digests: Sequence[bytes], before: Sequence[bytes]) -> np.ndarray:
        """[chunks] bool: whether a chunk has the same digest in `digests` and `before`.

        Both arguments have for each slice 16 bytes per chunk, or b"" if the slice was
        not copied. False for chunks of slices that were not copied, and if `before` is
        empty.
        """
        if not before:
            return np.zeros(self.chunks.num_chunks, bool)
        if all(digests) and all(before):
            return equal_chunks(b"".join(digests), b"".join(before))
        here = self.chunks.mask([i for i, one in enumerate(digests) if one])
        both = zip(digests, before, np.diff(self._first).tolist(), strict=True)
        pairs = [
            (one or bytes(DIGEST_BYTES * n), old or bytes(DIGEST_BYTES * n))
            for one, old, n in both
        ]
        new, last = (b"".join(side) for side in zip(*pairs, strict=True))
        return here & equal_chunks(new, last)

    def copied(self, packed: bytes) -> np.ndarray | None:
        """Unpacks the agent's flags: which own slices this host copies at a step.

        If several hosts own equal slices, each may copy only some of them.

        Returns:
            [slices] bool. None if `packed`, a result of `pack_flags`, is b"": then
            all slices are copied.
        """
        return unpack_flags(packed, len(self.slices)) if packed else None

    def recalled(self, step: int, digests: Sequence[bytes]) -> Snapshot:
        """Makes the `Snapshot` of a restored step from the digests of its slices.

        `digests` has for each slice 16 bytes per chunk. Every chunk counts as changed,
        so the next snapshot copies all chunks.
        """
        kept = np.zeros(self.chunks.num_chunks, bool)
        return Snapshot(step=step, digests=tuple(digests), kept=kept)

    def read(
        self,
        memory: memoryview,
        buffers: np.ndarray,
        digests: Sequence[bytes],
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, Any]:
        """Builds the global arrays from shared memory, and verifies every digest.

        Args:
            memory: the whole shared memory (arena) with the copies.
            buffers: [chunks] uint8, the number of each chunk's buffer there.
            digests: of every slice, 16 bytes per chunk.
            abstract: leaf path to shape, dtype and sharding. A leaf without a sharding
                becomes a numpy array.

        Returns:
            Leaf path to array.

        Raises:
            CorruptCopy: a slice does not match its digests; the message names the first
                such slice.
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
        return _global_arrays(abstract, copies)


def _bounds(
    index: tuple[slice, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(r[0] for r in ranges), tuple(r[1] for r in ranges)


def _fetched(shards: Iterable[_Shard]) -> Iterator[_Shard]:
    """Yields the shards in order; starts copies from accelerators in advance.

    Before a shard is yielded, copies of later shards to the host are started, so many
    small arrays are not copied one by one. At most about 64 MiB (`_AHEAD_BYTES`) are
    copied in advance.
    """
    ahead, num_bytes = deque[_Shard](), 0
    for shard in shards:
        array, is_remote = shard
        if not is_remote and not ahead:
            yield shard
            continue
        if is_remote:
            assert isinstance(array, jax.Array)
            array.copy_to_host_async()
        ahead.append(shard)
        num_bytes += array.nbytes
        while num_bytes > _AHEAD_BYTES:
            num_bytes -= ahead[0][0].nbytes
            yield ahead.popleft()
    yield from ahead


def _bytes_of(array: HostOrDevice, is_remote: bool) -> memoryview:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return host_bytes(array, is_remote=is_remote)


def _number_of_shard(array: jax.Array, piece: Slice) -> int:
    for number, shard in enumerate(array.addressable_shards):
        if _bounds(shard.index, array.shape) == (piece.start, piece.stop):
            return number
    raise ValueError(
        f"slice {piece.key} is not on this host's devices: the state's sharding "
        f"{array.sharding} differs from the layout that was announced."
    )


def _global_arrays(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    copies: Mapping[str, Mapping[tuple, np.ndarray]],
) -> dict[str, jax.Array | np.ndarray]:
    """Builds the global array of each leaf from copies of the leaf's slices.

    A leaf without a sharding becomes a numpy array.

    Args:
        abstract: leaf path to shape, dtype and sharding.
        copies: leaf path to (start, stop) of a slice to the slice's values.
    """
    found: dict[str, jax.Array | np.ndarray] = {}
    values, devices, counts = list[np.ndarray](), list[Any](), dict[str, int]()
    for path, struct in abstract.items():
        if struct.sharding is None:
            (found[path],) = copies[path].values()
            continue
        indices = struct.sharding.addressable_devices_indices_map(struct.shape)
        own = [(it, index) for it, index in indices.items() if index is not None]
        values += [copies[path][_bounds(index, struct.shape)] for _, index in own]
        devices += [device for device, _ in own]
        counts[path] = len(own)
    # One call for all, because each call costs more than the copy of a small slice.
    parts = iter(jax.device_put(values, devices))
    for path, count in counts.items():
        found[path] = jax.make_array_from_single_device_arrays(
            *(abstract[path].shape, abstract[path].sharding),
            list(itertools.islice(parts, count)),
        )
    return {path: found[path] for path in abstract}
