"""One process at a time writes to a storage directory, where its file system can tell.

Two writers of one step would share Orbax's temporary directory, and the files of both
could end in one step.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_S = 0.05
"""Between two attempts to get the lock."""


class StorageBusy(OSError):
    """Another process has been writing to the directory all the while."""


@contextmanager
def alone_in(directory: Path, limit_s: float) -> Iterator[None]:
    """Holds the directory's lock; a process that dies lets go of it.

    The lock leaves no file. Some network file systems have none: there the body runs
    all the same, and what is there afterwards has to be looked at.

    Args:
        directory: exists.
        limit_s: how long another writer is waited for.

    Raises:
        StorageBusy: the other one did not end in time.
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
        except OSError:  # no locks there
            return None
        time.sleep(_LOOK_S)
