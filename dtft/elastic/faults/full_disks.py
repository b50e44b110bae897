"""Faults of a job's directories: full or read-only storage, full shared memory.

Each fault mounts a file system, or writes a file that takes all free space, so the job
gets the errors of a real file system. Mounts need root.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LARGEST_MEMORY = 1 << 30
"""Bytes of the largest file system that `memory_full` fills."""
_ROOM = "64k"
"""Size of the tmpfs that `storage_full` mounts and fills."""
_COMMAND_S = 20.0
_AGAIN_S = 0.02
"""Seconds between two tries to make a directory read-only."""


def check_mounts() -> None:
    """Checks that this process can mount file systems.

    Raises:
        ValueError: this process is not root, or the command `mount` is missing.
    """
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise ValueError(
            "faults of storage and of shared memory mount file systems: run this as "
            "root, with `mount` (util-linux), or leave them out."
        )


def storage_full(directory: Path) -> Callable[[], None]:
    """Mounts a full file system over a directory: writes to it fail with ENOSPC.

    The directory's files stay readable. Files that are deleted during the fault exist
    again after the fault. Returns the function that ends the fault.
    """
    directory.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix="dtft-full-"))
    with contextlib.ExitStack() as undone:  # also if the second mount fails
        undone.callback(_remove, room)
        _run("mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "dtft", room)
        undone.callback(_unmount, room)
        upper, work = room / "upper", room / "work"
        upper.mkdir()
        work.mkdir()
        options = f"lowerdir={directory},upperdir={upper},workdir={work}"
        _run("mount", "-t", "overlay", "-o", options, "dtft", directory)
        undone.callback(_unmount, directory)
        _fill(room / "ballast")
        return undone.pop_all().close


def storage_read_only(directory: Path) -> Callable[[], None]:
    """Makes a directory read-only (EROFS); returns the function that ends the fault."""
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undone:  # also if the second mount fails
        _run("mount", "--bind", directory, directory)
        undone.callback(_unmount, directory)
        end = time.monotonic() + _COMMAND_S
        while True:
            try:
                _run("mount", "-o", "remount,bind,ro", directory)
                return undone.pop_all().close
            except RuntimeError as error:  # a file in it is open for writing
                if "busy" not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(_AGAIN_S)


def memory_full(directory: Path) -> Callable[[], None]:
    """Fills the file system of a directory, so that writes to it fail with ENOSPC.

    Writes one file with the name "ballast", which takes all free space. Returns the
    function that ends the fault.

    Raises:
        ValueError: the file system is larger than 1 GiB, so other programs may need its
            free space.
    """
    found = os.statvfs(directory)
    if found.f_blocks * found.f_frsize > LARGEST_MEMORY:
        raise ValueError(
            f"checkpoint.arena_directory={directory} is in a file system of "
            f"{found.f_blocks * found.f_frsize >> 20} MiB, which full-memory does not "
            f"fill. Allowed: {LARGEST_MEMORY >> 20} MiB. Mount a tmpfs of its own, and "
            "give --checkpoint.arena_directory."
        )
    ballast = directory / "ballast"
    _fill(ballast)
    return lambda: ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_memory(directory: Path, mib: int) -> Iterator[Path]:
    """Mounts a tmpfs of `mib` MiB on a directory while the context is open.

    First unmounts all file systems on the directory or below it, and makes the
    directory if it does not exist. Yields the directory; unmounts the tmpfs at the end.
    """
    unmount_below(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "dtft", directory)
    try:
        yield directory
    finally:
        _unmount(directory)


def unmount_below(directory: Path) -> None:
    """Unmounts all file systems that are mounted on a directory or below it.

    A drill that was interrupted can leave such mounts.
    """
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    below = [Path(line.split()[1].encode().decode("unicode_escape")) for line in mounts]
    for path in reversed(below):
        if path.is_relative_to(directory):
            _unmount(path)


def _fill(path: Path) -> None:
    block = bytes(1 << 20)
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while len(block):
            try:
                file.write(block)
            except OSError:  # a smaller piece may still fit
                block = block[: len(block) // 2]


def _remove(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _unmount(directory: Path) -> None:
    _run("umount", "-l", directory)


def _run(*words: object) -> None:
    """Runs a command; `words` are its name and its arguments.

    Raises:
        RuntimeError: the command failed; the message contains the command's stderr.
    """
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
