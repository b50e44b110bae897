"""The disk that a run's logs lie on, which may become full or read-only meanwhile.

Logs are for people: losing lines is told once and ends nothing. What training needs is
written otherwise.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

ROOM_BYTES = 1 << 20
"""Less free space than this counts as full."""


class Disk:
    """Writes that may fail."""

    def __init__(self, directory: Path) -> None:
        """`directory` is on the disk, and named in the warning."""
        self._directory, self._failing = directory, False

    def attempt(self, write: Callable[[], object]) -> None:
        """Runs one write; an OSError is told, unless the last write failed as well."""
        try:
            write()
        except OSError as error:
            self._tell(error.strerror)
        else:
            self._failing = False

    def opened(self, path: Path) -> TextIO | None:
        """A file to append to, or None."""
        try:
            path.parent.mkdir(exist_ok=True)
            return open(path, "a")
        except OSError as error:
            self._tell(error.strerror)
            return None

    def has_room(self) -> bool:
        """Whether about a MiB can be written now; told if not."""
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
