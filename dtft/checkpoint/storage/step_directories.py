"""Which steps a storage directory holds. Imports neither JAX nor Orbax."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etils import epath


UNFINISHED = ".orbax-checkpoint-tmp"
"""What Orbax adds to the name of a step's directory until the step is complete."""
COMMIT_FILE = "commit_success.txt"
"""What Orbax puts into a complete step where directories cannot be renamed (gs://)."""


def storage_steps(directory: "Path | epath.Path") -> tuple[int, ...]:
    """The complete steps in a storage directory, ascending; () if there is none.

    A step is a directory whose name is its number: Orbax gives it that name once it is
    complete.

    Raises:
        OSError: the directory is there, but cannot be listed.
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
