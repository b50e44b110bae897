"""Shared memory that outlives processes, and the offsets of slices' chunks in it.

A slice is a piece of an array of the state, and a chunk is a part of a slice's bytes.
A slot is a numbered position in the job that one host fills; a push is the set of
slices of one slot that are sent to a peer, which keeps a copy.

`Arena` reserves one file in memory, all of it at once, and returns views. `ArenaMap`
divides an arena among a host's own slices and its peers' slices. `AlignedAllocator`
allocates private memory in huge pages for restored arrays.
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

from dtft._priority import lower_priority
from dtft.checkpoint.replication import CopyPlacement, Push
from dtft.checkpoint.state import Chunks, Layout, offsets_of

DEFAULT_DIRECTORY = Path("/dev/shm")
"""Default directory of arenas: a file system in memory, whose size the host limits."""

_LOWEST = 19
"""Niceness of the thread that maps pages."""
_PIECE = 1 << 20
"""Bytes reserved at a time. A call that a signal interrupts may have to begin anew, so
a call is short enough to end between two signals of a timer."""
_MAPPED = 4 << 20
"""Bytes mapped at a time. They have so many pages (above 500) that NumPy releases the
GIL while it reads one element of each; else the thread, at its low priority, could wait
for a processor with the GIL. The thread stops at the next piece after `close`."""


class Arena:
    """One file in shared memory, which several processes can map.

    An agent creates an arena, and its trainer attaches to the arena. A process without
    an agent creates arenas for itself.

    Views keep the memory alive: a view taken before `close` or `unlink` stays readable
    until the view is dropped.
    """

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        """Wraps a mapped file; callers use `create` or `attach`."""
        self.path, self.size = path, len(memory)
        self._memory: mmap.mmap | None = memory

    @classmethod
    def create(cls, path: Path | str, size: int) -> "Arena":
        """Creates an arena of `size` bytes; a relative path is relative to /dev/shm.

        Raises:
            ValueError: `size` is not positive.
            FileExistsError: a file exists at `path`.
            OSError: the file cannot be created, or there is too little memory; the
                message then has the bytes needed and available.
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
            for offset in range(0, size, _PIECE):
                os.posix_fallocate(descriptor, offset, min(_PIECE, size - offset))
            return cls(path, mmap.mmap(descriptor, size))
        except BaseException as error:  # also what the handler of a signal raises
            os.unlink(path)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                # Another process has taken the memory since the check.
                raise _too_small(path, size) from error
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def reserve(cls, path: Path, size: int, before: "Arena | None") -> "Arena":
        """Returns `before` if it is large enough, else removes it and creates an arena.

        `before` is an arena of this process, or None. The new arena has `size` bytes at
        `path`. A background thread maps all its pages (`prefault`).

        Raises:
            OSError: too little memory (the message has the bytes needed and available),
                or a file exists at `path`.
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

        A relative path is relative to /dev/shm.

        Raises:
            FileNotFoundError: no file exists at `path`.
        """
        path = DEFAULT_DIRECTORY / path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(path, mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns a writable view of `nbytes` bytes of the arena from `offset`.

        Raises:
            ValueError: the bytes are not inside the arena, or the arena is closed.
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
        """Maps every page into this process, on a background thread of lowest priority.

        Reserved memory is otherwise mapped page by page at its first use, which makes
        the first copy several times slower than later copies.

        Returns:
            The thread that maps the pages.
        """
        thread = threading.Thread(target=self._map_pages, daemon=True)
        thread.start()
        return thread

    def _map_pages(self) -> None:
        lower_priority(_LOWEST)
        for offset in range(0, self.size, _MAPPED):
            try:
                view = self.view(offset, min(_MAPPED, self.size - offset))
            except ValueError:
                return  # closed meanwhile
            # Reads the pages, because madvise(MADV_POPULATE_WRITE) holds the lock of
            # the process's address space. At this low priority, starting threads would
            # wait for that lock.
            np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE].max()

    def close(self) -> None:
        """Unmaps the arena in this process; the file remains."""
        memory, self._memory = self._memory, None
        try:
            if memory is not None:
                memory.close()
        except BufferError:
            pass  # views are still in use; dropping the last view unmaps the memory

    def unlink(self) -> None:
        """Removes the file; its memory is freed once no process maps the file."""
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


OWN_BUFFERS = 4
"""Number of buffers of each chunk (a part of a slice's bytes) of a host's own slices.
There is one each for the last commit, a step that is replicated but not yet committed,
a step being written by the trainer, and a step being exported to storage. A restore
that was given up keeps the buffers that it writes until it has ended. If a chunk has no
free buffer meanwhile, the next restore fails and is tried again."""
HOSTED_BUFFERS = 3
"""Number of buffers of each chunk (a part of a slice's bytes) of a peer's slice. It is
one fewer than `OWN_BUFFERS`, because a host exports only its own slices."""


def arena_bytes(layout: Layout, slot: int, placement: CopyPlacement) -> int:
    """Computes the bytes of shared memory that the host in `slot` needs for copies.

    The host keeps copies of its own slices, and of the peers' slices that `placement`
    assigns to it. `layout` (mesh and leaves) decides the slices of every slot. The
    computation does not cut slices into chunks, so it is quick even for a huge state.
    """
    incoming = [p.slices for p in placement.pushes if p.target == slot]
    hosted = sum(offsets_of(slices)[1] for slices in incoming)
    return OWN_BUFFERS * offsets_of(layout.slices(slot))[1] + HOSTED_BUFFERS * hosted


@dataclass(frozen=True, kw_only=True)
class ArenaMap:
    """Where a host's copies are in its arena; offsets and sizes are in bytes.

    Every chunk (a part of a slice's bytes) has several buffers in the arena, so that
    the arena holds copies of several steps. The buffers of the host's own slices come
    first. Then come, peer by peer, the buffers of the slices that the host keeps for
    its peers.
    """

    own: Chunks
    """Chunks of the host's own slices; their buffers start at offset 0."""
    incoming: Mapping[int, Push]
    """Maps a sending slot to its push, whose slices this host keeps a copy of."""
    hosted: Mapping[int, Chunks]
    """Maps a sending slot to the chunks of its push, in the push's order."""
    hosted_starts: Mapping[int, int]
    """Maps a sending slot to the offset of the buffers of its push."""
    size: int
    """Bytes of the whole arena."""

    @classmethod
    def of(
        cls, layout: Layout, slot: int, placement: CopyPlacement, chunk_bytes: int
    ) -> "ArenaMap":
        """Computes where the copies of the host in `slot` are in its arena.

        Args:
            layout: mesh and leaves, which decide the slices of every slot.
            slot: the slot (position in the job) of the host.
            placement: which slots' slices are copied to the hosts of which other slots.
            chunk_bytes: size of a chunk in bytes.
        """
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


ALIGNMENT = 64
"""Alignment of XLA's CPU arrays in bytes; XLA uses aligned memory without a copy."""
SLAB_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20


class AlignedAllocator:
    """An allocator of memory for restored arrays, in huge pages if the system has them.

    The first write to new memory maps it page by page while training waits; with huge
    pages (2 MiB), far fewer pages are mapped. Arrays are cut from slabs (larger areas
    of memory), each allocated at once, so small arrays use huge pages, too. A slab is
    freed with the last array cut from it. Slabs are small, so that one surviving array
    does not keep the memory of a whole state.
    """

    def __init__(self, total: int) -> None:
        """Allocates nothing yet.

        `total` is the expected sum of the bytes that the calls of `take` request. It
        only limits the size of the slabs; `take` may request more.
        """
        self._left = total
        self._slab = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """Allocates [nbytes] uint8 with unspecified contents.

        The memory is aligned to 64 bytes, so that XLA uses it without a copy.

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
    """Allocates a slab of at least `nbytes` bytes.

    A slab of a huge page (2 MiB) or more is aligned to huge pages, a smaller slab to
    `ALIGNMENT` (64 bytes).

    Returns:
        [bytes] uint8.
    """
    step = _HUGE_PAGE if nbytes >= _HUGE_PAGE else ALIGNMENT
    size = -(-nbytes // step) * step
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + step, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = np.frombuffer(memory, np.uint8)
    start = -slab.ctypes.data % step
    return slab[start : start + size]
