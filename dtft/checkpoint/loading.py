"""Slices out of shared memory into memory of their own, verified, on several threads.

A copy is digested while a cache has it, so what is handed out is what was checked. One
thread copies no faster than one core reads; memory is faster than that. Must not know
arenas, devices or steps.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dtft.checkpoint import digest
from dtft.checkpoint.digest import DIGEST_BYTES
from dtft.checkpoint.parts import Parts
from dtft.checkpoint.ranges import Part, split
from dtft.checkpoint.slabs import Slabs

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

    >>> good = digest.chunk_digests(b"abcdef", chunk_bytes=2)
    >>> right, wrong = Parts([memoryview(b"abcdef")]), Parts([memoryview(b"abXdef")])
    >>> copies, bad = copied_out([right, wrong], [good, good], chunk_bytes=2)
    >>> copies[0].tobytes(), bad
    (b'abcdef', [1])
    """
    sizes = [source.nbytes for source in sources]
    slabs = Slabs(sum(sizes))
    copies = [slabs.take(size) for size in sizes]
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

    ranges = split(sizes, chunk_bytes, RANGE_BYTES)
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
        found.append(digest.copy_and_digest(view, copy, chunk_bytes))
        begun += view.nbytes
    first = part.start // chunk_bytes * DIGEST_BYTES
    actual = b"".join(found)
    return actual == digests[first : first + len(actual)]
