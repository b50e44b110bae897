"""Unpacks archives of test data."""

import tarfile
from pathlib import Path
from typing import Any


def unpack(archive: Path, directory: Path) -> None:
    """Extracts a tar file; refuses members outside of the directory.

    Python before 3.11.4 has no filters: there the archive must be trusted.
    """
    safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as file:
        file.extractall(directory, **safe)
