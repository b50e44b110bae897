"""Files that commands write and read: refused by their flag, before any work is lost.

This module handles paths only.
"""

from collections.abc import Mapping
from pathlib import Path


def check_writable(flag: str, path: str | None) -> None:
    """Refuses a path that no file can be written to.

    Args:
        flag: what gave it, such as `--json`.
        path: None or '' where nothing is to be written.

    Raises:
        ValueError: its folder does not exist, or it is a folder.
    """
    if path and (not Path(path).absolute().parent.is_dir() or Path(path).is_dir()):
        raise ValueError(
            f"{flag} {path}: no file can be written there. Allowed: the path of a file "
            "in a folder that exists. Make the folder first, or name another."
        )


def check_apart(paths: Mapping[str, str | None]) -> None:
    """Refuses two flags with one file, of which one would destroy the other.

    Args:
        paths: flag to its path; None or '' where there is none.

    Raises:
        ValueError: names both flags.
    """
    seen: dict[Path, str] = {}
    for flag, path in paths.items():
        if not path:
            continue
        other = seen.setdefault(Path(path).resolve(), flag)
        if other != flag:
            raise ValueError(
                f"{flag} {path} is the file of {other}, too, and would be written over "
                f"it. Name another for {flag}."
            )


def read_text(flag: str, path: str, allowed: str) -> str:
    """The text of a file, without the mark that some programs begin it with.

    Args:
        flag: what gave it.
        path: of the file.
        allowed: what it should be, in words.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"{flag} {path} cannot be read ({why}). Allowed: {allowed}."
        ) from None
