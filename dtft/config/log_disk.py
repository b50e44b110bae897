"""Writes log files to a disk that may become full or read-only during a run.

If a write fails, a warning is printed and training continues. Other modules write the
data that training needs.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

ROOM_BYTES = 1 << 20
"""Free bytes below which `Disk.has_room` counts a disk as full."""


class Disk:
    """The directory of a run's log files.

    A failed write prints a warning instead of raising.
    """

    def __init__(self, directory: Path) -> None:
        """Stores the directory of the logs, which is named in the warning."""
        self._directory, self._failing = directory, False

    def attempt(self, write: Callable[[], object]) -> None:
        """Calls `write`. An OSError is caught, and printed as a warning.

        No warning is printed if this object has printed one since the last successful
        `attempt`.
        """
        try:
            write()
        except OSError as error:
            self._tell(error.strerror)
        else:
            self._failing = False

    def opened(self, path: Path) -> TextIO | None:
        """Opens a file for appending; makes its folder. Returns None if this fails.

        A failure is printed as a warning, as in `attempt`.
        """
        try:
            path.parent.mkdir(exist_ok=True)
            return open(path, "a")
        except OSError as error:
            self._tell(error.strerror)
            return None

    def has_room(self) -> bool:
        """Whether the directory's disk is writable and has 1 MiB free (`ROOM_BYTES`).

        If not, a warning is printed, as in `attempt`.
        """
        try:
            found = os.statvfs(self._directory)
        except OSError as error:
            self._tell(error.strerror)
            return False
        if found.f_flag & os.ST_RDONLY or found.f_bavail * found.f_frsize < ROOM_BYTES:
            self._tell("full or read-only")
            return False
        return True

    def _tell(self, reason: str | None) -> None:
        if not self._failing:
            self._failing = True
            text = (
                f"dtft: logs cannot be written to {self._directory} ({reason}); "
                "training goes on without them. Free space there, or mount it for "
                "writing."
            )
            with contextlib.suppress(OSError):  # stdout may lie on the same disk
                print(text, flush=True)
