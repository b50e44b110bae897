"""New memory for arrays that are restored, in huge pages where the system has them.

The first write to new memory maps it page by page, while the training waits; huge pages
are 512 times fewer. Leaves share slabs, so that small ones
have huge pages too, and slabs are small enough that one leaf which stays does not keep
a whole state. Must not know slices, digests or devices.
"""

import contextlib
import mmap

import numpy as np

ALIGNMENT = 64
"""Of XLA's CPU arrays, in bytes: memory so aligned is taken over and not copied."""
SLAB_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20


class Slabs:
    """Hands out memory; a slab is freed with the last array that was cut from it."""

    def __init__(self, total: int) -> None:
        """Takes nothing yet; `total` is how many bytes will be asked for."""
        self._left = total
        self._slab = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """[nbytes] uint8, aligned for XLA, with unspecified contents.

        >>> slabs = Slabs(total=300)
        >>> taken = [slabs.take(100), slabs.take(200)]
        >>> [len(one) for one in taken], [one.ctypes.data % 64 for one in taken]
        ([100, 200], [0, 0])
        """
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if room > len(self._slab):
            self._slab = _new_slab(max(room, min(self._left, SLAB_BYTES)))
        found, self._slab = self._slab[:nbytes], self._slab[room:]
        self._left = max(0, self._left - nbytes)
        return found


def _new_slab(nbytes: int) -> np.ndarray:
    """At least `nbytes`; from a huge page on, it begins with one."""
    step = _HUGE_PAGE if nbytes >= _HUGE_PAGE else ALIGNMENT
    size = -(-nbytes // step) * step
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + step, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = np.frombuffer(memory, np.uint8)
    start = -slab.ctypes.data % step
    return slab[start : start + size]
