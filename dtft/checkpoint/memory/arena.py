"""Shared memory that outlives processes, and where the chunks of each slice lie in it.

`Arena` reserves one file in memory, all of it at once, and hands out views. `ArenaMap`
divides it among a host's slices and its peers'. `AlignedAllocator` hands out memory of
a process's own, in huge pages, for arrays that are restored.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtft.checkpoint.replication import CopyPlacement, Push
from dtft.checkpoint.state import Chunks, Layout, offsets_of

# Shared memory that outlives processes.
#
# Reserves one file in memory, all of it at once, and hands out views.


DEFAULT_DIRECTORY = Path("/dev/shm")
"""Where arenas go unless told otherwise: memory, as large as the host allows."""

_LOWEST = 19
"""Niceness of the thread that maps pages."""
_PIECE = 1 << 20
"""Mapped at a time, so that `close` need not wait for all of it."""


class Arena:
    """One shared-memory file: created by the agent, attached by the trainer.

    Views keep the memory alive: after `close`, and even after `unlink`, a view taken
    before stays readable until it is dropped.
    """

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        """Wraps a mapped file; use `create` or `attach`."""
        self.path, self.size = path, len(memory)
        self._memory: mmap.mmap | None = memory

    @classmethod
    def create(cls, path: Path | str, size: int) -> "Arena":
        """Reserves `size` bytes; a relative path is taken from /dev/shm.

        Raises:
            ValueError: `size` is not positive.
            FileExistsError: there is a file at `path`.
            OSError: the memory is not there; names bytes needed and available.
        """
        path = DEFAULT_DIRECTORY / path
        if size < 1:
            raise ValueError(
                f"size={size} is not positive. Allowed: 1 or more bytes. "
                f"Set the size of the arena {path}."
            )
        _refuse_if_too_small(path, size)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError as error:
            raise FileExistsError(
                errno.EEXIST,
                f"path={path} exists already: another agent uses it or left it behind."
                " Remove it if no agent runs here, or choose another path",
            ) from error
        try:
            os.posix_fallocate(descriptor, 0, size)
            return cls(path, mmap.mmap(descriptor, size))
        except OSError as error:
            os.unlink(path)
            if error.errno == errno.ENOSPC:  # someone was faster than our check
                raise _too_small(path, size) from error
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def reserve(cls, path: Path, size: int, before: "Arena | None") -> "Arena":
        """Takes over an arena that is large enough, or replaces it by a new one.

        Raises:
            OSError: the memory is not there; names bytes needed and available.
        """
        if before is not None and before.size >= size:
            return before
        if before is not None:
            before.close()
            before.unlink()
        arena = cls.create(path, size)
        arena.prefault()
        return arena

    @classmethod
    def attach(cls, path: Path | str) -> "Arena":
        """Maps an arena that another process created.

        Raises:
            FileNotFoundError: nothing is there.
        """
        path = DEFAULT_DIRECTORY / path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(path, mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of part of the arena.

        Raises:
            ValueError: the part is not inside the arena, or the arena is closed.
        """
        if self._memory is None:
            raise ValueError(f"arena {self.path} is closed: take views before `close`.")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise ValueError(
                f"offset={offset}, nbytes={nbytes} is not inside arena {self.path}. "
                f"Allowed: 0 to {self.size}. Ask for less, or create it larger."
            )
        return memoryview(self._memory)[offset : offset + nbytes]

    def prefault(self) -> threading.Thread:
        """Maps every page into this process, while nothing else wants the cores.

        Memory that is reserved is still mapped page by page when it is first used,
        which makes a first copy several times slower than later ones.

        Returns:
            The thread that does it.
        """
        thread = threading.Thread(target=self._map_pages, daemon=True)
        thread.start()
        return thread

    def _map_pages(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        for offset in range(0, self.size, _PIECE):
            try:
                view = self.view(offset, min(_PIECE, self.size - offset))
            except ValueError:
                return  # closed meanwhile
            # Reads, for madvise(MADV_POPULATE_WRITE) holds the lock of the process's
            # address space: at this priority, threads that start would wait for it.
            np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE].max()

    def close(self) -> None:
        """Gives up this process's hold on the memory; the file stays."""
        memory, self._memory = self._memory, None
        try:
            if memory is not None:
                memory.close()
        except BufferError:
            pass  # views are still in use; the last one to go unmaps the memory

    def unlink(self) -> None:
        """Removes the file; the memory is free once no process maps it."""
        self.path.unlink(missing_ok=True)


def _available(path: Path) -> int:
    stats = os.statvfs(path.parent)
    return stats.f_bavail * stats.f_frsize


def _refuse_if_too_small(path: Path, size: int) -> None:
    if size > _available(path):
        raise _too_small(path, size)


def _too_small(path: Path, size: int) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"arena {path} needs {size} bytes ({size / 2**30:.2f} GiB), but {path.parent} "
        f"has {_available(path)} bytes ({_available(path) / 2**30:.2f} GiB) available."
        " Enlarge it (mount -o remount,size=...; Docker: --shm-size; Kubernetes: an "
        "emptyDir with medium Memory), lower the number of copies, or use more hosts",
    )


# Where in a host's arena the buffers of each slice's chunks lie.
#
# The host's own slices come first, with all their buffers; then, peer by peer, what
# each pushes. Pure: knows the layout and the placement.


OWN_BUFFERS = 4
"""Last commit, replicated but not yet committed, being staged, being exported."""
HOSTED_BUFFERS = 3
"""As above, without the export: storage gets every slice from an owner."""


def arena_bytes(layout: Layout, slot: int, placement: CopyPlacement) -> int:
    """Bytes of the whole arena of one slot's host; cuts nothing into chunks."""
    incoming = [p.slices for p in placement.pushes if p.target == slot]
    hosted = sum(offsets_of(slices)[1] for slices in incoming)
    return OWN_BUFFERS * offsets_of(layout.slices(slot))[1] + HOSTED_BUFFERS * hosted


@dataclass(frozen=True, kw_only=True)
class ArenaMap:
    """Chunks, offsets and sizes; sizes and offsets are in bytes."""

    own: Chunks
    """The host's own slices; their buffers begin with the arena."""
    incoming: Mapping[int, Push]
    """By the slot that sends: what peers push to this host."""
    hosted: Mapping[int, Chunks]
    """By the slot that sends: the chunks of its push, in the push's order."""
    hosted_starts: Mapping[int, int]
    """By the slot that sends: where the buffers of its push begin."""
    size: int
    """Bytes of the whole arena."""

    @classmethod
    def of(
        cls, layout: Layout, slot: int, placement: CopyPlacement, chunk_bytes: int
    ) -> "ArenaMap":
        """The map of one slot's host."""
        own = Chunks.of(layout.slices(slot), chunk_bytes)
        incoming = {p.source: p for p in placement.pushes if p.target == slot}
        hosted = {s: Chunks.of(p.slices, chunk_bytes) for s, p in incoming.items()}
        starts, size = {}, OWN_BUFFERS * own.nbytes
        for source, chunks in hosted.items():
            starts[source] = size
            size += HOSTED_BUFFERS * chunks.nbytes
        return cls(
            own=own, incoming=incoming, hosted=hosted, hosted_starts=starts, size=size
        )


# New memory for arrays that are restored, in huge pages where the system has them.
#
# The first write to new memory maps it page by page, while the training waits; huge
# pages are 512 times fewer. Leaves share slabs, so that small ones have huge pages
# too, and slabs are small enough that one leaf which stays does not keep a whole state.


ALIGNMENT = 64
"""Of XLA's CPU arrays, in bytes: memory so aligned is taken over and not copied."""
SLAB_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20


class AlignedAllocator:
    """Hands out memory; a slab is freed with the last array that was cut from it."""

    def __init__(self, total: int) -> None:
        """Takes nothing yet; `total` is how many bytes will be asked for."""
        self._left = total
        self._slab = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """[nbytes] uint8, aligned for XLA, with unspecified contents.

        >>> allocator = AlignedAllocator(total=300)
        >>> taken = [allocator.take(100), allocator.take(200)]
        >>> [len(one) for one in taken], [one.ctypes.data % 64 for one in taken]
        ([100, 200], [0, 0])
        """
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if room > len(self._slab):
            self._slab = _new_slab(max(room, min(self._left, SLAB_BYTES)))
        found, self._slab = self._slab[:nbytes], self._slab[room:]
        self._left = max(0, self._left - nbytes)
        return found


def _new_slab(nbytes: int) -> np.ndarray:
    """At least `nbytes`; from a huge page on, it begins with one."""
    step = _HUGE_PAGE if nbytes >= _HUGE_PAGE else ALIGNMENT
    size = -(-nbytes // step) * step
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + step, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = np.frombuffer(memory, np.uint8)
    start = -slab.ctypes.data % step
    return slab[start : start + size]
