"""Digests of slices: 16 bytes (xxh3-128) for every chunk.

Computes and compares digests of memory, so that a corrupt copy is found and named by
chunk. They detect accidents, not forgery. Must not know slices, arenas or peers.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

Buffer = bytes | bytearray | memoryview

DIGEST_BYTES = 16
"""Size of the digest of one chunk."""
_BLOCK_BYTES = 256 << 10
"""Copied, then digested while the second-level cache has it: a chunk is too large."""


def chunk_digests(buffer: Buffer, chunk_bytes: int) -> bytes:
    """The digests of all chunks, one after the other.

    An empty buffer has one chunk, which is empty.

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


def copy_and_digest(
    source: Buffer, destination: bytearray | memoryview, chunk_bytes: int
) -> bytes:
    """Copies a buffer and digests the copy, block by block while it is in cache.

    Returns:
        The same as `chunk_digests(destination, chunk_bytes)` afterwards.

    Raises:
        ValueError: the two differ in size.
    """
    target = _flat(destination)
    if len(_flat(source)) != len(target):
        raise ValueError(
            f"destination has {len(target)} bytes, but source has "
            f"{len(_flat(source))}. Give a destination of the source's size."
        )
    # numpy copies without holding the interpreter lock, slice assignment holds it.
    from_array = np.frombuffer(_flat(source), np.uint8)
    to_array = np.frombuffer(target, np.uint8)
    digests = []
    for start, stop in _chunks(len(target), chunk_bytes):
        state = xxhash.xxh3_128()
        for low in range(start, stop, _BLOCK_BYTES):
            high = min(low + _BLOCK_BYTES, stop)
            np.copyto(to_array[low:high], from_array[low:high])
            state.update(target[low:high])
        digests.append(state.digest())
    return b"".join(digests)


def verify(buffer: Buffer, digests: bytes, chunk_bytes: int) -> tuple[int, ...]:
    """The numbers of the chunks that do not match; empty if all is well.

    A wrong number of digests makes every chunk bad, so a cut or longer buffer never
    passes.

    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> verify(b"abcdef", good, chunk_bytes=2), verify(b"abXdef", good, chunk_bytes=2)
    ((), (1,))
    """
    actual = chunk_digests(buffer, chunk_bytes)
    if len(actual) != len(digests):
        return tuple(range(len(actual) // DIGEST_BYTES))
    return tuple(
        start // DIGEST_BYTES
        for start in range(0, len(actual), DIGEST_BYTES)
        if actual[start : start + DIGEST_BYTES] != digests[start : start + DIGEST_BYTES]
    )


def check_copies(
    copies: Iterable[tuple[str, Buffer, bytes]], chunk_bytes: int
) -> tuple[dict[str, bytes], list[str]]:
    """Reads copies, given as (key, bytes, digests that they should have).

    Returns:
        Key to digests of each good copy, and the keys of bad ones.

    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> found = check_copies([("a", b"abcdef", good), ("b", b"abXdef", good)], 2)
    >>> list(found[0]), found[1]
    (['a'], ['b'])
    """
    good: dict[str, bytes] = {}
    bad: list[str] = []
    for key, content, expected in copies:
        if verify(content, expected, chunk_bytes):
            bad.append(key)
        else:
            good[key] = expected
    return good, bad


def digest_root(entries: Iterable[tuple[str, bytes]]) -> str:
    """One hex digest over the digests of many slices, whatever their order.

    >>> entries = [("a", b"1"), ("b", b"2")]
    >>> digest_root(entries) == digest_root(reversed(entries))
    True
    """
    root = xxhash.xxh3_128()
    for key, digests in sorted(entries):
        # Lengths first: without them ("a", b"bc") and ("ab", b"c") would agree.
        name = key.encode()
        root.update(b"%d,%d:" % (len(name), len(digests)))
        root.update(name)
        root.update(digests)
    return root.hexdigest()


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
