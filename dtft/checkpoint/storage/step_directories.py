"""Lists the complete steps of a storage directory; imports neither JAX nor Orbax."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etils import epath


UNFINISHED = ".orbax-checkpoint-tmp"
"""Suffix that Orbax gives to the name of a step's directory until the step is complete.
"""
DELETED = f"deleted{UNFINISHED}"
"""Directory into which a deleted step is moved before its files are removed. Because
of the directory's suffix, Orbax removes it when a writer opens the storage
directory."""
COMMIT_FILE = "commit_success.txt"
"""File that marks a complete step where directories cannot be renamed (gs://)."""

_ABSENT = FileNotFoundError, NotADirectoryError
"""Errors of the operating system that show that a path does not exist."""


def storage_steps(directory: "Path | epath.Path") -> tuple[int, ...]:
    """Lists the complete steps in a storage directory, ascending.

    A complete step is a directory whose name is the step's number; on gs:// it must
    also have Orbax's file "commit_success.txt". Orbax gives a directory this name once
    the step is complete. The result is empty if the storage directory does not exist.

    Raises:
        OSError: the directory, or a step in it, exists but cannot be read.
    """
    needs_file = str(directory).startswith("gs://")
    if _is_remote(directory) and not directory.is_dir():
        return ()
    try:
        found = [path for path in directory.iterdir() if path.name.isdecimal()]
    except _ABSENT:
        return ()
    return tuple(
        sorted(
            int(path.name)
            for path in found
            if _is_directory(path) and (not needs_file or (path / COMMIT_FILE).exists())
        )
    )


def _is_remote(path: "Path | epath.Path") -> bool:
    """Whether a path is in an object store, such as gs://, and not in a file system."""
    return "://" in str(path)


def _is_directory(path: "Path | epath.Path") -> bool:
    """Whether a path is a directory.

    Raises:
        OSError: the path is in a file system, not in a bucket, and exists, but cannot
            be read. For it `is_dir` of Python 3.14 and of `epath` would return False.
    """
    if _is_remote(path):
        return path.is_dir()
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except _ABSENT:
        return False
