"""A host's directory in shared memory: its name, lock and board, and its removal.

Job and host names become a directory name and keys in the store; names with characters
that would change the path or key are refused. An agent locks (flock) the file `owner`
in its directory. The lock is free once the agent has removed the directory or once the
agent's process has ended, also by SIGKILL. So a directory whose lock is free belongs to
a dead agent, in whichever PID namespace the agent ran. The next agent that this user
starts on the machine removes the directory.

Agents that start, and sweeps (removals of dead agents' directories), may run at the
same time: a new directory is locked before it is renamed to its final name, and a sweep
locks a directory that has a lock file before it renames and removes the directory.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dtft.checkpoint.managers import ProgressBoard

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]+")
OWNER = "owner"
"""File in a memory directory that the directory's agent keeps locked."""
_PREFIX = "dtft-"
_FRESH, _SWEPT = ".dtft-new-", ".dtft-swept-"
"""Name prefixes of directories that are being made, and of directories that are being
removed."""
TAKE_S = 2.0
"""Seconds for which a starting agent tries again if a directory of its name exists. The
name is soon free if another process is removing a dead agent's directory, because that
process renames the directory first."""
ROOM_S = 0.2
"""Seconds between two attempts of a starting agent to make its board, while the file
system is full."""
UNMARKED_S = 60.0
"""Seconds without a change after which a sweep may remove a directory that has no lock
file, or whose creation or removal was interrupted."""
_held: dict[Path, int] = {}
"""File descriptors of the lock files that this process has locked, by memory directory.
Closing a descriptor frees the lock."""
_holding = threading.Lock()


def check_name(flag: str, name: str) -> None:
    """Refuses a name that cannot be part of a path and of a store key.

    `flag` is the command-line flag that gave the name, for the error text.

    >>> check_name("--job", "resnet-50_v1.2")
    >>> check_name("--job", "a/b c")
    Traceback (most recent call last):
    ValueError: --job 'a/b c' has '/', ' '. Allowed: letters, digits, ".", "_" and "-" \
of ASCII, one or more of them. Give another name.

    Raises:
        ValueError: the name is empty or has a character that is not allowed.
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
    """Refuses an arena directory that does not exist.

    Does not create the directory, because it would then be on a disk, not in memory.

    Raises:
        ValueError: the directory does not exist.
    """
    if not directory.is_dir():
        raise ValueError(
            f"arena_directory={directory}: there is no such directory. Allowed: a "
            "memory file system that is mounted (/dev/shm, a tmpfs), which is not "
            "made here. Mount it, or give --arena_directory (with a CONFIG "
            "--checkpoint.arena_directory) another one."
        )


def check_arena_room(directory: Path) -> None:
    """Refuses an arena directory whose file system is full.

    Raises:
        ValueError: not one block of the file system is free.
    """
    if not os.statvfs(directory).f_bavail:
        raise ValueError(
            f"arena_directory={directory}: its file system is full. Allowed: one with "
            "room for the copies of each host's state. Remove what fills it, or give "
            "--checkpoint.arena_directory another one."
        )


def make_host_memory(directory: Path, limit_s: float) -> None:
    """Makes a host's memory directory, with the host's progress board in it.

    The board needs one page of memory. While the file system is full, the board is
    tried again: a host that comes back may find memory that other programs occupy for a
    time. The log says so once.

    Args:
        directory: the host's memory directory.
        limit_s: longest wait for the page, in seconds.

    Raises:
        ValueError: as of `make_memory_directory`; or the file system was full for
            `limit_s` seconds.
    """
    make_memory_directory(directory)
    try:
        _make_board(directory / "board", limit_s)
    except BaseException:
        remove_memory_directory(directory)
        raise


def _make_board(path: Path, limit_s: float) -> None:
    """Makes the board; waits for at most `limit_s` seconds while there is no memory.

    Raises:
        ValueError: the file system was full for `limit_s` seconds.
    """
    begin, full = time.monotonic(), False
    while True:
        try:
            ProgressBoard(path, create=True).close()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if time.monotonic() - begin > limit_s:
                raise ValueError(
                    f"the file system of host memory {path.parent} was full for "
                    f"{limit_s:g} s. Allowed: room for the copies of this host's "
                    "state. Remove what fills it, and start the agent again."
                ) from error
            if not full:
                logger.warning(
                    "the file system of host memory %s is full: this host joins its "
                    "job once there is room, within %g s",
                    path.parent,
                    limit_s,
                )
            full = True
            time.sleep(ROOM_S)
        else:
            if full:
                logger.info("there is room for host memory %s", path.parent)
            return


def make_memory_directory(directory: Path) -> None:
    """Makes a memory directory, empty but for its lock file, and locks it.

    The lock is held until the directory is removed or this process ends. First removes
    dead agents' directories, which may occupy the needed memory, and prints their
    names. Then removes the directory that this process made at this path earlier, if
    there is one. Needs no free memory.

    Raises:
        ValueError: the arena directory does not exist, or a live agent or another user
            has the directory.
    """
    check_arena_directory(directory.parent)
    if line := swept_line(directory.parent, sweep_memory(directory.parent)):
        with contextlib.suppress(OSError):
            print(line, flush=True)
    remove_memory_directory(directory)
    fresh = directory.parent / f"{_FRESH}{secrets.token_hex(8)}"
    fresh.mkdir(mode=0o700)
    lock = os.open(fresh / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _put_in_place(fresh, directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(lock)
        raise
    with _holding:
        _held[directory] = lock


def _put_in_place(fresh: Path, directory: Path) -> None:
    """Renames a new directory, `fresh`, to `directory`.

    First removes `directory` if it belongs to a dead agent.

    Raises:
        ValueError: `directory` belongs to a live agent or to another user.
    """
    end = time.monotonic() + TAKE_S
    while True:
        try:
            fresh.rename(directory)
            return
        except OSError as error:
            if (user := _other_user(directory)) is not None:
                raise ValueError(
                    f"host memory {directory} belongs to another user (uid {user}). "
                    "Allowed: a name that no other user's host has on this machine. "
                    "Give another --host-name or --job, or have that user remove it."
                ) from error
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if (directory / OWNER).exists():
            _remove_dead(directory)
        else:  # made by a version without locks; the store has no live host so named
            _remove(directory)
        if time.monotonic() > end and directory.exists():
            raise ValueError(
                f"host memory {directory} belongs to a live agent (its file {OWNER} is "
                "locked). Allowed: a name that no agent of this machine has. Give "
                "another --host-name or --job, or end that agent."
            )
        time.sleep(0.02)


def _other_user(path: Path) -> int | None:
    """Returns the user id of the path's owner if that is another user, else None.

    Also returns None if this user is root, and for a path that does not exist.
    """
    try:
        owner = path.lstat().st_uid
    except FileNotFoundError:
        return None
    return None if os.geteuid() in (0, owner) else owner


def remove_memory_directory(directory: Path) -> None:
    """Removes a host's memory directory that this process has locked; frees the lock.

    Does nothing if this process does not hold the lock, as after an earlier removal:
    the path may then be that of the next agent of the same name.
    """
    with _holding:
        lock = _held.pop(directory, None)
    if lock is None:
        return
    with contextlib.suppress(OSError):
        if _is_owner(lock, directory):
            shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def _is_owner(lock: int, directory: Path) -> bool:
    """Whether an open lock file is the one that is in the directory now.

    `lock` is the file descriptor of the open lock file.

    Raises:
        FileNotFoundError: the directory has no lock file.
    """
    mine, now = os.fstat(lock), os.stat(directory / OWNER, follow_symlinks=False)
    return (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino)


# ------------------------------------------------------------------------- sweeping


@dataclass(frozen=True, kw_only=True)
class Swept:
    """One removed directory of a dead agent: its name, and the bytes freed."""

    name: str
    num_bytes: int


def sweep_memory(arena_directory: Path) -> list[Swept]:
    """Removes the memory directories of this user's dead agents, not of live agents.

    Args:
        arena_directory: the directory that contains memory directories.

    Returns:
        The removed directories. A directory that cannot be removed is skipped silently.
    """
    found = []
    for path in _ours(arena_directory):
        with contextlib.suppress(OSError):
            if path.name.startswith(_PREFIX):
                num_bytes = _remove_dead(path)
            else:
                num_bytes = _remove_unfinished(path)
            if num_bytes is not None:
                found.append(Swept(name=path.name, num_bytes=num_bytes))
    return found


def swept_line(arena_directory: Path, swept: list[Swept]) -> str:
    """Formats the message about a sweep, for users; "" if nothing was removed.

    >>> swept_line(Path("/dev/shm"), [Swept(name="dtft-j-a", num_bytes=4096)])
    'dtft: removed 4,096 bytes of dead agents from /dev/shm: dtft-j-a'
    """
    if not swept:
        return ""
    total = sum(it.num_bytes for it in swept)
    names = ", ".join(it.name for it in swept[:8])
    more = f" and {len(swept) - 8} more" if len(swept) > 8 else ""
    return (
        f"dtft: removed {total:,} bytes of dead agents from {arena_directory}: "
        f"{names}{more}"
    )


def _ours(arena_directory: Path) -> Iterator[Path]:
    """Yields this user's memory directories, also those half made or half removed."""
    with contextlib.suppress(OSError):
        for path in sorted(arena_directory.iterdir()):
            if not path.name.startswith((_PREFIX, _FRESH, _SWEPT)):
                continue
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                    yield path


def _remove_dead(path: Path) -> int | None:
    """Removes a dead agent's directory; returns the number of bytes freed.

    Returns None if the agent may be alive, or if another process removed or replaced
    the directory.
    """
    try:
        lock = os.open(path / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _remove(path) if _unused_without_lock(path) else None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another sweeper may have renamed the directory, and an agent reused the name.
        return _remove(path) if _is_owner(lock, path) else None
    except (BlockingIOError, FileNotFoundError):
        return None
    finally:
        os.close(lock)


def _remove_unfinished(path: Path) -> int | None:
    """Removes a directory whose creation or removal was interrupted.

    Returns the number of bytes freed; None if the creation or removal may still go on.
    """
    if not _old(path):
        return None  # perhaps not locked yet, or being removed now
    if path.name.startswith(_FRESH) and (path / OWNER).exists():
        return _remove_dead(path)
    return _remove(path)


def _remove(path: Path) -> int:
    """Removes a directory, which is first renamed in one atomic step.

    Returns the number of bytes freed; 0 if the directory does not exist any more.
    """
    away = path
    if not path.name.startswith(_SWEPT):
        away = path.with_name(f"{_SWEPT}{secrets.token_hex(8)}")
        try:
            path.rename(away)
        except FileNotFoundError:
            return 0
    num_bytes = sum(_size(file) for file in away.rglob("*"))
    shutil.rmtree(away, ignore_errors=True)
    return num_bytes


def _size(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _old(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > UNMARKED_S


def _unused_without_lock(path: Path) -> bool:
    """Whether the agent of a directory without a lock file is dead.

    Only agents of old versions made no lock file. An agent is dead if no process has a
    file in its directory open, and none listens on a socket there. False for an empty
    directory, and until 60 s (`UNMARKED_S`) after the directory last changed.
    """
    try:
        entries = list(path.iterdir())
        if not entries or not _old(path):
            return False
        return all(_file_unused(entry) for entry in entries)
    except FileNotFoundError:
        return False


def _file_unused(path: Path) -> bool:
    mode = path.lstat().st_mode
    if stat.S_ISSOCK(mode):
        return _refuses(path)
    return stat.S_ISREG(mode) and _lease_granted(path)


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def _lease_granted(path: Path) -> bool:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        # If another process opens the file meanwhile, the kernel signals this process:
        # with SIGURG instead of SIGIO, whose default action ends a process.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
