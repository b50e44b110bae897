"""Digests of slices: 16 bytes (xxh3-128) for every chunk.

Computes and compares digests of memory, so that a corrupt copy is found and named by
chunk. They detect accidents, not forgery. Must not know slices, arenas or peers.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from dtft.checkpoint.parts import Parts

Buffer = bytes | bytearray | memoryview

DIGEST_BYTES = 16
"""Size of the digest of one chunk."""
_BLOCK_BYTES = 1 << 20
"""Copied, then digested while a cache has it: a chunk may be too large for that, and
smaller copies are slower."""


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


def is_same(buffer: Buffer, digests: bytes, chunk_bytes: int) -> bool:
    """Whether a buffer has these digests; reads as far as the first that differs.

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
    from_array = np.frombuffer(_flat(source), np.uint8)
    return b"".join(
        copy_chunk(from_array[start:stop], target[start:stop])
        for start, stop in _chunks(len(target), chunk_bytes)
    )


def copy_chunk(source: np.ndarray, target: memoryview) -> bytes:
    """Copies one chunk and returns the digest of the copy; one pass over the source.

    Args:
        source: [bytes] uint8.
        target: as many bytes.
    """
    # numpy copies without holding the interpreter lock, slice assignment holds it.
    to_array = np.frombuffer(target, np.uint8)
    if len(target) <= _BLOCK_BYTES:
        np.copyto(to_array, source)
        return xxhash.xxh3_128_digest(target)
    state = xxhash.xxh3_128()
    for low in range(0, len(target), _BLOCK_BYTES):
        high = low + _BLOCK_BYTES
        np.copyto(to_array[low:high], source[low:high])
        state.update(target[low:high])
    return state.digest()


def verify(buffer: Buffer, digests: bytes, chunk_bytes: int) -> tuple[int, ...]:
    """The numbers of the chunks that do not match; empty if all is well.

    A wrong number of digests makes every chunk bad, so a cut or longer buffer never
    passes.

    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> verify(b"abcdef", good, chunk_bytes=2), verify(b"abXdef", good, chunk_bytes=2)
    ((), (1,))
    """
    return differing(chunk_digests(buffer, chunk_bytes), digests)


def differing(actual: bytes, digests: bytes) -> tuple[int, ...]:
    """The numbers of the chunks whose digests are not as they should be; see `verify`.

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


def is_right(parts: Parts, digests: bytes, chunk_bytes: int) -> bool:
    """Whether memory in pieces of whole chunks is what its digests say.

    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> is_right(Parts([memoryview(b"abcd"), memoryview(b"ef")]), good, chunk_bytes=2)
    True
    """
    return digests_of_parts(parts.views, chunk_bytes) == digests


def digests_of_parts(views: Iterable[memoryview], chunk_bytes: int) -> bytes:
    """The digests of memory in pieces, each of whole chunks but for the last."""
    return b"".join(chunk_digests(view, chunk_bytes) for view in views)


def equal_chunks(one: bytes, other: bytes) -> np.ndarray:
    """[chunks] bool: where two strings of as many digests agree.

    >>> equal_chunks(b"a" * 16 + b"b" * 16, b"a" * 16 + b"c" * 16).tolist()
    [True, False]
    """
    pairs = [np.frombuffer(text, np.uint64).reshape(-1, 2) for text in (one, other)]
    return (pairs[0] == pairs[1]).all(axis=1)


def check_copies(
    copies: Iterable[tuple[str, Parts, bytes]], chunk_bytes: int
) -> tuple[dict[str, bytes], list[str]]:
    """Reads copies, given as (key, bytes, digests that they should have).

    Returns:
        Key to digests of each good copy, and the keys of bad ones.

    >>> good = chunk_digests(b"abcdef", chunk_bytes=2)
    >>> a, b = Parts([memoryview(b"abcdef")]), Parts([memoryview(b"abXdef")])
    >>> found = check_copies([("a", a, good), ("b", b, good)], 2)
    >>> list(found[0]), found[1]
    (['a'], ['b'])
    """
    good: dict[str, bytes] = {}
    bad: list[str] = []
    for key, content, expected in copies:
        if is_right(content, expected, chunk_bytes):
            good[key] = expected
        else:
            bad.append(key)
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
