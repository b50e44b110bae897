"""Where a host's memory lies, and what the job and the host may be called for that.

Names become a directory in memory and keys in the store: what would be another path or
key there is refused. Must not know what is kept in the directory.
"""

import re
import shutil
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def check_name(flag: str, name: str) -> None:
    """Refuses a name that could not be part of a path and of a key.

    >>> check_name("--job", "resnet-50_v1.2")
    >>> check_name("--job", "a/b c")
    Traceback (most recent call last):
    ValueError: --job 'a/b c' has '/', ' '. Allowed: letters, digits, ".", "_" and "-" \
of ASCII, one or more of them. Give another name.

    Raises:
        ValueError: it has something else in it, or nothing.
    """
    if _NAME.fullmatch(name):
        return
    wrong = dict.fromkeys(letter for letter in name if not _NAME.fullmatch(letter))
    found = f"has {', '.join(map(repr, wrong))}" if wrong else "is empty"
    raise ValueError(
        f'{flag} {name!r} {found}. Allowed: letters, digits, ".", "_" and "-" of '
        "ASCII, one or more of them. Give another name."
    )


def check_arena_directory(directory: Path) -> None:
    """Refuses a directory that is not there: one made anew would be on a disk.

    Raises:
        ValueError: there is none.
    """
    if not directory.is_dir():
        raise ValueError(
            f"arena_directory={directory}: there is no such directory. Allowed: a "
            "memory file system that is mounted (/dev/shm, a tmpfs), which is not "
            "made here. Mount it, or give --arena_directory (with a CONFIG "
            "--checkpoint.arena_directory) another one."
        )


def make_memory_directory(directory: Path) -> None:
    """Makes a host's own directory anew, in an arena directory that is there.

    Raises:
        ValueError: the arena directory is not there.
    """
    check_arena_directory(directory.parent)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
