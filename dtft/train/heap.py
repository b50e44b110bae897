"""Keeps memory that was freed for the next step, instead of giving it back to Linux.

XLA's CPU backend asks for a step's temporaries anew at each step. Large ones are mapped
by the C library and unmapped afterwards, so that every step begins with page faults: a
third of a step of tens of megabytes per device. Must not know JAX.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # malloc.h
_PAD_BYTES = 64 * 2**20


def keep_freed(large: bool = False) -> bool:
    """For the rest of this process; its size stays that of its largest moment.

    Args:
        large: also what a thread has of more than 64 MiB at a time: the arenas that the
            C library makes for threads cannot keep that. So all share the process's
            own, for whose one lock the threads that compile wait. Call it before JAX
            makes its devices; threads that are there keep their arenas.

    Returns:
        Whether the C library can (glibc); if not, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = {
        _MMAP_MAX: 0,
        _TRIM_THRESHOLD: 2**31 - 1,
        _TOP_PAD: _PAD_BYTES,
    }
    if large:
        settings[_ARENA_MAX] = 1
    return all(library.mallopt(name, value) for name, value in settings.items())
