"""Slices cut into chunks, and a digest of 16 bytes (xxh3-128) for every chunk.

A slice is a piece of an array of the training state, and a chunk is a contiguous part
of the slice's bytes. `Chunks` holds the offsets and sizes of chunks; `Parts` is memory
in several pieces that is read and written as one. Digests detect accidental corruption
and name the corrupt chunk; they do not detect forgery.
"""

import bisect
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from dtft.checkpoint.state.slices import Slice, offsets_of

_EMPTY = memoryview(bytearray())


class Parts:
    """Memory in several pieces that is addressed like one contiguous piece.

    >>> parts = Parts([memoryview(b"abc"), memoryview(b"defg")])
    >>> [bytes(piece) for piece in parts.cut(2, 5)], bytes(parts), len(parts)
    ([b'c', b'de'], b'abcdefg', 7)
    """

    __slots__ = ("_starts", "nbytes", "views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        """Stores the views of the pieces, in order; copies no bytes."""
        self.views = [view.cast("B") if view.nbytes else _EMPTY for view in views]
        self._starts = [0]
        for view in self.views:
            self._starts.append(self._starts[-1] + view.nbytes)
        self.nbytes = self._starts.pop()

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self.views)

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """Returns views of the bytes from `start` to before `stop`.

        There is one view for each piece in the range, or one empty view for an empty
        range.
        """
        if start >= stop:
            return [_EMPTY]
        found = []
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            begin, view = self._starts[index], self.views[index]
            end = min(stop, begin + view.nbytes)
            if end > start:
                found.append(view[start - begin : end - begin])
                start = end
            index += 1
        return found

    def fill(self, source: "Parts | memoryview") -> None:
        """Overwrites all pieces with the bytes of a source of the same size."""
        given = source if isinstance(source, Parts) else Parts([source])
        begun = 0
        for view in self.views:
            cut = given.cut(begun, begun + view.nbytes)
            view[:] = cut[0] if len(cut) == 1 else b"".join(cut)
            begun += view.nbytes

    def whole(self) -> memoryview:
        """Returns a view of the memory if it is one piece; else a view of a copy."""
        return self.views[0] if len(self.views) == 1 else memoryview(bytes(self))


ABSENT = 255
"""Value in place of a buffer number (see `Chunks`) if a chunk is not in memory."""
MAX_CHUNK_BYTES = 256 << 20
"""Largest chunk that a host can fetch from a peer, in bytes: an answer has at least one
whole chunk and at most this many bytes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Chunks:
    """The chunks of some slices, numbered slice by slice, and their offsets in memory.

    A chunk is a contiguous part of a slice's bytes that has its own digest. It never
    crosses slices, and a slice of at most `chunk_bytes` bytes is one chunk.

    The memory is divided into areas of equal size, and every area has room for every
    chunk. The room for a chunk in area p is called buffer p of the chunk. A step uses
    one buffer of each chunk: an unchanged chunk stays in its old buffer, and a changed
    chunk gets a free buffer. So the chunks of a step may lie in different areas.
    Neighbouring chunks of a slice are contiguous if they are in the same area.
    """

    slices: tuple[Slice, ...]
    chunk_bytes: int
    nbytes: int
    """Size of one area in bytes. Slices begin at the offsets that `offsets_of` gives.
    """
    first: np.ndarray
    """[slices + 1] int64: number of each slice's first chunk, then the total number."""
    starts: np.ndarray
    """[chunks] int64: offset of each chunk in an area, in bytes."""
    sizes: np.ndarray
    """[chunks] int64: bytes of each chunk."""

    @classmethod
    def of(cls, slices: Sequence[Slice], chunk_bytes: int) -> "Chunks":
        """Cuts slices into chunks of `chunk_bytes` bytes.

        The last chunk of a slice may be smaller. An empty slice has one empty chunk.
        In the example, `first` has the number of each slice's first chunk and then the
        number of all chunks, and `sizes` has the bytes of each chunk.

        >>> one = Slice(path="w", start=(0,), stop=(10,), dtype="uint8")
        >>> empty = Slice(path="e", start=(0,), stop=(0,), dtype="uint8")
        >>> chunks = Chunks.of([one, empty, one], 4)
        >>> chunks.first.tolist(), chunks.sizes.tolist()
        ([0, 3, 4, 7], [4, 4, 2, 0, 4, 4, 2])

        Raises:
            ValueError: `chunk_bytes` is below 1.
        """
        if chunk_bytes < 1:
            raise ValueError(
                f"chunk_bytes={chunk_bytes} is not a size. Allowed: 1 or more bytes; "
                "4 to 16 MiB suit. Set chunk_bytes."
            )
        offsets, nbytes = offsets_of(slices)
        sizes = np.array([piece.nbytes for piece in slices], np.int64)
        counts = np.maximum(-(-sizes // chunk_bytes), 1)
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        before = np.arange(first[-1]) - np.repeat(first[:-1], counts)
        before *= chunk_bytes
        return cls(
            slices=tuple(slices),
            chunk_bytes=chunk_bytes,
            nbytes=nbytes,
            first=first,
            starts=np.repeat(np.array(offsets, np.int64), counts) + before,
            sizes=np.minimum(np.repeat(sizes, counts) - before, chunk_bytes),
        )

    @property
    def num_chunks(self) -> int:
        """The number of chunks of all slices."""
        return len(self.sizes)

    def numbers(self, index: int) -> slice:
        """Returns the chunk numbers of the slice at `index`, as a Python slice."""
        return slice(int(self.first[index]), int(self.first[index + 1]))

    def numbers_of(self, indices: Sequence[int]) -> np.ndarray:
        """Returns the chunk numbers of the slices at `indices`, slice by slice."""
        found = [np.arange(self.first[i], self.first[i + 1]) for i in indices]
        return np.concatenate([np.arange(0), *found])

    def mask(self, indices: Sequence[int]) -> np.ndarray:
        """Returns [chunks] bool: True for the chunks of the slices at `indices`."""
        chosen = np.zeros(len(self.slices), bool)
        chosen[list(indices)] = True
        return np.repeat(chosen, np.diff(self.first))

    def owners_of(self, numbers: Sequence[int]) -> set[int]:
        """Returns the indices of the slices that the chunks `numbers` belong to."""
        return set((np.searchsorted(self.first, numbers, side="right") - 1).tolist())

    def chunk(self, memory: memoryview, buffer: int, number: int) -> memoryview:
        """Returns a view of chunk `number` in its buffer `buffer`.

        `memory` has buffer 0 of every chunk, then buffer 1 of every chunk, and so on.
        """
        start = buffer * self.nbytes + int(self.starts[number])
        return memory[start : start + int(self.sizes[number])]

    def parts(self, memory: memoryview, buffers: np.ndarray, index: int) -> Parts:
        """Returns the memory of one slice at one step, in as few pieces as possible.

        Args:
            memory: buffer 0 of every chunk, then buffer 1 of every chunk, and so on.
            buffers: [chunks] uint8, the number of each chunk's buffer at this step.
            index: index of the slice; all its chunks must be in memory, so none may
                have 255 (`ABSENT`) for its buffer.
        """
        numbers = self.numbers(index)
        mine = buffers[numbers]
        ends = [*(np.flatnonzero(np.diff(mine)) + 1).tolist(), len(mine)]
        views, begun = [], 0
        for end in ends:
            start = int(mine[begun]) * self.nbytes
            low, high = numbers.start + begun, numbers.start + end - 1
            stop = start + int(self.starts[high] + self.sizes[high])
            views.append(memory[start + int(self.starts[low]) : stop])
            begun = end
        return Parts(views)


def pack_flags(flags: np.ndarray) -> bytes:
    """Packs booleans into bytes, eight to a byte, for a message.

    >>> unpack_flags(pack_flags(np.array([True, False, True])), 3).tolist()
    [True, False, True]
    """
    return np.packbits(flags).tobytes()


def unpack_flags(packed: bytes, count: int) -> np.ndarray:
    """Unpacks `count` flags that `pack_flags` packed; returns [count] bool.

    Returns False for all flags if `packed` is empty.

    Raises:
        ValueError: `packed` is not empty, and its size is not that of `count` flags.
    """
    if not packed:
        return np.zeros(count, bool)
    if len(packed) != -(-count // 8):
        raise ValueError(
            f"packed has {len(packed)} bytes, but {count} flags need "
            f"{-(-count // 8)}. Send the bits of exactly the flags that there are."
        )
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(bool)


Buffer = bytes | bytearray | memoryview

DIGEST_BYTES = 16
"""Size of the digest of one chunk, in bytes."""
_BLOCK_BYTES = 1 << 20
"""Size of the blocks that `copy_chunk` copies one by one, and digests while they are in
cache. A whole chunk may be larger than the cache; smaller blocks are copied slower."""


BRIEF_BYTES = 64 << 10
"""Chunks of at most this size in bytes are copied while holding the interpreter lock.
Such a copy takes microseconds, less than making numpy arrays of source and target."""


def chunk_digests(buffer: Buffer, chunk_bytes: int) -> bytes:
    """Computes the digests of all chunks of a buffer, concatenated.

    Every chunk has `chunk_bytes` bytes; the last chunk may have fewer. Each digest has
    16 bytes (xxh3-128). An empty buffer has one empty chunk.

    >>> len(chunk_digests(b"four chunks", chunk_bytes=3))
    64
    >>> len(chunk_digests(b"", chunk_bytes=3))
    16
    """
    view = _flat(buffer)
    return b"".join(
        xxhash.xxh3_128_digest(view[start:stop])
        for start, stop in _chunks(len(view), chunk_bytes)
    )


def is_same(buffer: Buffer, digests: bytes, chunk_bytes: int) -> bool:
    """Whether the chunks of a buffer have the digests `digests`, 16 bytes per chunk.

    Stops at the first chunk with another digest. False if `digests` has more or fewer
    digests than the buffer has chunks.

    >>> digests = chunk_digests(b"abcdef", chunk_bytes=4)
    >>> is_same(b"abcdef", digests, 4), is_same(b"Abcdef", digests, 4)
    (True, False)
    """
    view = _flat(buffer)
    chunks = list(_chunks(len(view), chunk_bytes))
    return len(digests) == DIGEST_BYTES * len(chunks) and all(
        xxhash.xxh3_128_digest(view[start:stop])
        == digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        for number, (start, stop) in enumerate(chunks)
    )


def copy_and_digest(
    source: Buffer, destination: bytearray | memoryview, chunk_bytes: int
) -> bytes:
    """Copies a buffer in blocks, and digests each copied block while it is in cache.

    Returns:
        The digests of the copy's chunks, as from `chunk_digests`.

    Raises:
        ValueError: `source` and `destination` differ in size.
    """
    given, target = _flat(source), _flat(destination)
    if len(given) != len(target):
        raise ValueError(
            f"destination has {len(target)} bytes, but source has {len(given)}. Give a "
            "destination of the source's size."
        )
    return b"".join(
        copy_chunk(given[start:stop], target[start:stop])
        for start, stop in _chunks(len(target), chunk_bytes)
    )


def copy_chunk(source: memoryview, target: memoryview) -> bytes:
    """Copies one chunk and returns the digest of the copy, in one pass over the source.

    `source` and `target` are one-dimensional views of bytes, of the same size.
    """
    if len(target) <= BRIEF_BYTES:
        if len(target):
            target[:] = source
        return xxhash.xxh3_128_digest(target)
    # numpy copies without holding the interpreter lock; slice assignment holds it.
    from_array = np.frombuffer(source, np.uint8)
    to_array = np.frombuffer(target, np.uint8)
    if len(target) <= _BLOCK_BYTES:
        np.copyto(to_array, from_array)
        return xxhash.xxh3_128_digest(target)
    state = xxhash.xxh3_128()
    for low in range(0, len(target), _BLOCK_BYTES):
        high = low + _BLOCK_BYTES
        np.copyto(to_array[low:high], from_array[low:high])
        state.update(target[low:high])
    return state.digest()


THREADS = 4
"""Largest number of threads that copy slices into or out of an arena."""
THREAD_BYTES = 16 << 20
"""Bytes per thread: a copy of fewer bytes is not worth one more thread."""


def copying_threads(nbytes: int) -> int:
    """Returns the number of threads for copying `nbytes` bytes: one per 16 MiB.

    The result is at least 1, and at most 4 (`THREADS`) and the number of cores that
    this process may use. Several threads pay because one core cannot use the whole
    bandwidth of the memory. The 16 MiB are `THREAD_BYTES`. The number of slices has no
    effect: copies of small slices hold the interpreter lock, so they do not run in
    parallel.

    >>> copying_threads(1000)
    1
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(THREADS, cores, nbytes // THREAD_BYTES))


def verify_digests(buffer: Buffer, digests: bytes, chunk_bytes: int) -> tuple[int, ...]:
    """Returns the numbers of the chunks that do not match their digests.

    Returns all chunk numbers if `digests` has more or fewer digests than the buffer has
    chunks.

    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> [verify_digests(it, good, chunk_bytes=2) for it in (b"abcdef", b"abXdef")]
    [(), (1,)]
    """
    return differing(chunk_digests(buffer, chunk_bytes), digests)


def differing(actual: bytes, digests: bytes) -> tuple[int, ...]:
    """Returns the numbers of the chunks whose actual digests differ from `digests`.

    If `actual` and `digests` differ in length, all chunks of `actual` are returned.

    >>> differing(b"a" * 16 + b"b" * 16, b"a" * 16 + b"c" * 16)
    (1,)
    """
    if len(actual) != len(digests):
        return tuple(range(len(actual) // DIGEST_BYTES))
    return tuple(
        start // DIGEST_BYTES
        for start in range(0, len(actual), DIGEST_BYTES)
        if actual[start : start + DIGEST_BYTES] != digests[start : start + DIGEST_BYTES]
    )


def is_digest_right(parts: Parts, digests: bytes, chunk_bytes: int) -> bool:
    """Whether the bytes of `parts` match the digests of all their chunks.

    All pieces but the last must consist of whole chunks.

    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> parts = Parts([memoryview(b"abcd"), memoryview(b"ef")])
    >>> is_digest_right(parts, good, chunk_bytes=2)
    True
    """
    return digests_of_parts(parts.views, chunk_bytes) == digests


def digests_of_parts(views: Iterable[memoryview], chunk_bytes: int) -> bytes:
    """Computes the chunk digests of memory that is given in pieces, concatenated.

    All pieces but the last must consist of whole chunks.
    """
    return b"".join(chunk_digests(view, chunk_bytes) for view in views)


def equal_chunks(one: bytes, other: bytes) -> np.ndarray:
    """Compares two strings of chunk digests; returns [chunks] bool, True where equal.

    Both strings must have the same length.

    >>> equal_chunks(b"a" * 16 + b"b" * 16, b"a" * 16 + b"c" * 16).tolist()
    [True, False]
    """
    pairs = [np.frombuffer(text, np.uint64).reshape(-1, 2) for text in (one, other)]
    return (pairs[0] == pairs[1]).all(axis=1)


def check_copies(
    copies: Iterable[tuple[str, Parts, bytes]], chunk_bytes: int
) -> tuple[dict[str, bytes], list[str]]:
    """Reads copies of slices and compares their digests with the expected digests.

    Args:
        copies: (slice key, bytes, expected digests) of each copy.
        chunk_bytes: size of a chunk in bytes; every chunk has its own digest.

    Returns:
        A map from the key of each good copy to its digests, and the keys of the corrupt
        copies.

    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> a, b = Parts([memoryview(b"abcdef")]), Parts([memoryview(b"abXdef")])
    >>> found = check_copies([("a", a, good), ("b", b, good)], 2)
    >>> list(found[0]), found[1]
    (['a'], ['b'])
    """
    good: dict[str, bytes] = {}
    bad: list[str] = []
    for key, content, expected in copies:
        if is_digest_right(content, expected, chunk_bytes):
            good[key] = expected
        else:
            bad.append(key)
    return good, bad


def digest_root(entries: Iterable[tuple[str, bytes]]) -> str:
    """Computes one hex digest over the digests of many slices.

    An entry is a slice's key with the slice's digests. The order of entries has no
    effect.

    >>> entries = [("a", b"1"), ("b", b"2")]
    >>> digest_root(entries) == digest_root(reversed(entries))
    True
    """
    parts = list[bytes]()
    for key, digests in sorted(entries):
        # Lengths first: without lengths ("a", b"bc") and ("ab", b"c") would be equal.
        name = key.encode()
        parts += (b"%d,%d:" % (len(name), len(digests)), name, digests)
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


def _chunks(num_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    if chunk_bytes < 1:
        raise ValueError(
            f"chunk_bytes={chunk_bytes} is not a size. Allowed: 1 or more bytes; "
            "4 to 16 MiB suit. Set chunk_bytes."
        )
    for start in range(0, max(num_bytes, 1), chunk_bytes):
        yield start, min(start + chunk_bytes, num_bytes)


def _flat(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    return view.cast("B")
