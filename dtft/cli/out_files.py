"""Checks of the files that commands read and write, before any work is done.

Errors name the flag of the file.
"""

from collections.abc import Mapping
from pathlib import Path


def check_writable(
    flag: str, path: str | None, *, folder_is_made: bool = False
) -> None:
    """Checks that a path is in an existing folder and is no folder itself.

    Args:
        flag: the flag with the path, such as `--json`.
        path: path of the file; None or "" if no file is written.
        folder_is_made: whether the command makes the file's folder if there is none.

    Raises:
        ValueError: the path is a folder, or is in a folder that does not exist and is
            not made.
    """
    if not path:
        return
    folder = Path(path).absolute().parent
    while folder_is_made and not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or Path(path).is_dir():
        raise ValueError(
            f"{flag} {path}: no file can be written there. Allowed: the path of a file "
            "in a folder that exists. Make the folder first, or name another."
        )


def check_apart(paths: Mapping[str, str | None]) -> None:
    """Checks that no two flags name the same file.

    Args:
        paths: map from a flag to its path; None or "" if the flag is not given.

    Raises:
        ValueError: two flags name one file; the message names both flags.
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
    """Reads a UTF-8 text file; drops a byte order mark at its start.

    Args:
        flag: the flag with the path, for the error message.
        path: path of the file.
        allowed: description of allowed files, for the error message.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"{flag} {path} cannot be read ({why}). Allowed: {allowed}."
        ) from None
