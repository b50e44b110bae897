"""A lock on a storage directory, so that one process at a time writes to it.

Two writers of one step would share Orbax's temporary directory, and the step could mix
the files of both. On file systems without locks nothing keeps two writers apart.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_S = 0.05
"""Seconds between two attempts to take the lock."""


class StorageBusy(OSError):
    """Another process held the directory's lock for the whole time limit."""


@contextmanager
def alone_in(directory: Path, limit_s: float) -> Iterator[None]:
    """Holds an exclusive lock on the directory while the context lasts.

    The kernel releases the lock when this process dies, and the lock creates no file.
    On a file system without locks the body runs unlocked, and the caller must check the
    written step.

    Args:
        directory: an existing directory.
        limit_s: longest wait for another writer, in seconds.

    Raises:
        StorageBusy: another writer held the lock for `limit_s`.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle, directory, limit_s)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, directory: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StorageBusy(
                    f"another process has been writing to {directory} for "
                    f"{limit_s:.0f} s. Give each job a directory of its own."
                ) from error
        except OSError:  # the file system has no locks
            return None
        time.sleep(_LOOK_S)
