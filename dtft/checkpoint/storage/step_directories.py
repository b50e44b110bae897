"""Lists the complete steps of a storage directory; imports neither JAX nor Orbax."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etils import epath


UNFINISHED = ".orbax-checkpoint-tmp"
"""Suffix that Orbax gives to the name of a step's directory until the step is complete.
"""
COMMIT_FILE = "commit_success.txt"
"""File that marks a complete step where directories cannot be renamed (gs://)."""


def storage_steps(directory: "Path | epath.Path") -> tuple[int, ...]:
    """Lists the complete steps in a storage directory, ascending.

    A complete step is a directory whose name is the step's number; on gs:// it must
    also have Orbax's file "commit_success.txt". Orbax gives a directory this name once
    the step is complete. The result is empty if the storage directory does not exist.

    Raises:
        OSError: the directory exists but cannot be listed.
    """
    if not directory.is_dir():
        return ()
    needs_file = str(directory).startswith("gs://")
    return tuple(
        sorted(
            int(path.name)
            for path in directory.iterdir()
            if path.name.isdecimal()
            and path.is_dir()
            and (not needs_file or (path / COMMIT_FILE).exists())
        )
    )
