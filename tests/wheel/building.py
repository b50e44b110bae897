"""Builds sdist and wheel of a tree without the network, and reads what is in them."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.archives import unpack

REPOSITORY = Path(__file__).parents[2]


def build(target: str, directory: Path, root: Path = REPOSITORY) -> Path:
    """One distribution of a tree, made by the build backend of this Python.

    Args:
        target: `sdist` or `wheel`.
        directory: where it is put, and nothing else; nothing is written in the tree.
        root: the tree.
    """
    command = [sys.executable, "-m", "hatchling", "build", "-t", target]
    done = subprocess.run(
        [*command, "-d", str(directory)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = directory.iterdir()
    return made


def unpacked(sdist: Path, directory: Path) -> Path:
    """The tree of an sdist."""
    unpack(sdist, directory)
    (root,) = directory.iterdir()
    return root


def hashes(wheel: Path) -> dict[str, str]:
    """Name to SHA-256 of every file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
        }
