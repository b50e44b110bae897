"""Splits slices that are to be fetched into ranges, one for each request.

A range consists of whole chunks (see `digests`) of one or several slices. The module
also finds the chunks of a received range that do not match their digests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtft.checkpoint.state import digests
from dtft.checkpoint.state.digests import DIGEST_BYTES, Parts

MAX_PARTS = 1024
"""Most parts (byte ranges of a slice) that one request of a fetch names."""


@dataclass(frozen=True, kw_only=True)
class WantedSlice:
    """One slice to be fetched: key, memory to write to, and expected digests."""

    key: str
    memory: Parts
    """Memory that the fetch writes to; it has the slice's size, in pieces of whole
    chunks. Its contents are undefined until the fetch has succeeded."""
    digests: bytes
    """Expected digests of the slice, 16 bytes per chunk."""


@dataclass(frozen=True)
class Part:
    """A byte range of one slice in a list of slices; it consists of whole chunks."""

    index: int
    """Position of the slice in the list, such as the list of slices to be fetched."""
    start: int
    """Offset of the first byte in the slice."""
    stop: int
    """One past the offset of the last byte in the slice."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


Range = tuple[Part, ...]
"""Parts (byte ranges of slices) that one request names and one answer contains."""


def split_ranges(
    sizes: Sequence[int], chunk_bytes: int, range_bytes: int
) -> list[Range]:
    """Splits slices, given by their sizes, into ranges, each for one request.

    Every byte of every slice is in one range. A range has at most `range_bytes` bytes,
    unless it is one larger chunk, and at most `MAX_PARTS` (1024) parts.

    Args:
        sizes: size of each slice in bytes.
        chunk_bytes: bytes of a chunk; a range consists of whole chunks.
        range_bytes: largest number of bytes of a range.

    The example prints each range as a list of parts: the index of the slice, the first
    byte of the part, and the byte after its last.

    >>> for one in split_ranges([10, 0, 3], chunk_bytes=4, range_bytes=8):
    ...     print([(part.index, part.start, part.stop) for part in one])
    [(0, 0, 8)]
    [(0, 8, 10), (1, 0, 0), (2, 0, 3)]
    """
    ranges: list[Range] = []
    open_parts: list[Part] = []
    room = range_bytes
    for part in _pieces(sizes, max(range_bytes // chunk_bytes, 1) * chunk_bytes):
        if open_parts and (part.nbytes > room or len(open_parts) == MAX_PARTS):
            ranges.append(tuple(open_parts))
            open_parts, room = [], range_bytes
        open_parts.append(part)
        room -= part.nbytes
    return [*ranges, tuple(open_parts)] if open_parts else ranges


def _pieces(sizes: Sequence[int], step: int) -> Iterator[Part]:
    for index, size in enumerate(sizes):
        for start in range(0, max(size, 1), step):
            yield Part(index, start, min(start + step, size))


def range_memory(range_: Range, wanted: Sequence[WantedSlice]) -> list[memoryview]:
    """Returns views of the memory that the bytes of a range are to be written to.

    The views are in the order of the bytes.

    Args:
        range_: byte ranges of `wanted` slices that one request fetches.
        wanted: all slices of the fetch; `Part.index` is a position here.
    """
    return [
        piece
        for part in range_
        for piece in wanted[part.index].memory.cut(part.start, part.stop)
    ]


def not_right(range_: Range, wanted: Sequence[WantedSlice], chunk_bytes: int) -> Range:
    """Returns the chunks of a range whose bytes in memory do not match their digests.

    Each is one `Part`; the result is () if all chunks match.

    Args:
        range_: byte ranges of `wanted` slices, whose bytes were received.
        wanted: all slices of the fetch; `Part.index` is a position here.
        chunk_bytes: size of a chunk in bytes; every chunk has its own digest.

    >>> memory = bytearray(b"abcdef")
    >>> good = digests.chunk_digests(memory, 2)
    >>> parts = Parts([memoryview(memory)])
    >>> slices = [WantedSlice(key="w", memory=parts, digests=good)]
    >>> memory[2] ^= 1
    >>> not_right((Part(0, 0, 6),), slices, chunk_bytes=2)
    (Part(index=0, start=2, stop=4),)
    """
    bad: list[Part] = []
    for part in range_:
        one = wanted[part.index]
        first = part.start // chunk_bytes
        last = max(-(-part.stop // chunk_bytes), first + 1)
        expected = one.digests[first * DIGEST_BYTES : last * DIGEST_BYTES]
        actual = digests.digests_of_parts(
            one.memory.cut(part.start, part.stop), chunk_bytes
        )
        for chunk in digests.differing(actual, expected):
            start = part.start + chunk * chunk_bytes
            bad.append(Part(part.index, start, min(start + chunk_bytes, part.stop)))
    return tuple(bad)


def cut_lent(pieces: Sequence[tuple[int, int]], part: Part) -> list[tuple[int, int]]:
    """Returns the pieces of a peer's memory that hold one part of a slice.

    The peer has registered (lent) this memory, so that it can be read by RDMA.
    `pieces` is the peer's memory of the whole slice. `pieces` and the result are lists
    of (address, size in bytes). In the example the part is bytes 4 to 11 of the slice:
    the last 4 bytes of the first piece and the first 4 bytes of the second.

    >>> cut_lent([(100, 8), (300, 8)], Part(0, 4, 12))
    [(104, 4), (300, 4)]
    """
    found, begin = [], 0
    for address, size in pieces:
        low, high = max(part.start, begin), min(part.stop, begin + size)
        if low < high:
            found.append((address + low - begin, high - low))
        begin += size
    return found
