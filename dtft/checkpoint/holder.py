"""What one host holds: its own slices and its peers', by step, in one arena.

Keeps the last commit until the next is complete, and answers which verified copies
are here. Is told what was staged, received and committed; must not know who is alive,
where peers are, or how bytes travel. Thread-safe.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtft.checkpoint import digest
from dtft.checkpoint.arena import Arena, ExtentPool
from dtft.checkpoint.arena_map import HOSTED_VERSIONS, OWN_VERSIONS, ArenaMap
from dtft.checkpoint.placement import Placement, Push
from dtft.checkpoint.slices import Layout, Slice


@dataclass(kw_only=True)
class _Version:
    """The copies of one step. Extents are numbers in the pools."""

    own: int | None = None
    own_digests: list[bytes] | None = None
    hosted: int | None = None
    hosted_digests: dict[int, list[bytes]] = field(default_factory=dict)
    items: dict[str, Any] = field(default_factory=dict)


class Holder:
    """All copies on one host for one layout and slot."""

    def __init__(
        self,
        layout: Layout,
        slot: int,
        placement: Placement,
        *,
        path: Path,
        chunk_bytes: int,
        reserved: Arena | None = None,
    ) -> None:
        """Reserves the arena at `path`, or takes over one that is large enough.

        Raises:
            OSError: the memory is not there; names the bytes needed and available.
        """
        self.layout, self.slot, self.placement = layout, slot, placement
        self.chunk_bytes = chunk_bytes
        self.own_slices = layout.slices(slot)
        self.outgoing = tuple(p for p in placement.pushes if p.source == slot)
        self.map = ArenaMap.of(layout, slot, placement)
        self.arena = _arena(path, max(self.map.size, 1), reserved)
        self.path = self.arena.path
        self._own_pool = ExtentPool(OWN_VERSIONS, self.map.own_bytes)
        self._hosted_pool = ExtentPool(HOSTED_VERSIONS, self.map.hosted_bytes)
        self._versions: dict[int, _Version] = {}
        self._receiving: dict[tuple[int, int], int] = {}  # to the extent
        self._lock = threading.RLock()

    # ------------------------------------------------------------- own slices

    def begin_stage(self, step: int) -> int:
        """Reserves an extent for this host's own slices of `step`.

        Returns:
            Its offset in the arena, in bytes.

        Raises:
            RuntimeError: every extent is in use, so a commit or export is stuck.
        """
        with self._lock:
            version = self._versions.setdefault(step, _Version())
            if version.own is None:
                version.own = self._own_pool.acquire()
            if version.own is None:
                raise RuntimeError(
                    f"no free extent for step {step}: all {OWN_VERSIONS} hold steps "
                    f"{sorted(self._versions)} that are still needed."
                )
            return self.map.own_start(version.own)

    def staged(self, step: int, digests: Sequence[bytes], items: dict) -> None:
        """Records that the trainer has written all own slices of `step`."""
        with self._lock:
            version = self._versions[step]
            version.own_digests, version.items = list(digests), items

    def own_views(self, step: int, push: Push) -> list[memoryview]:
        """The bytes of the slices that `push` sends, in its order."""
        with self._lock:
            return [self._own_view(step, piece) for piece in push.slices]

    def own_digests(self, step: int, slices: Sequence[Slice]) -> list[bytes]:
        """Digests of some of the own slices of a staged step."""
        with self._lock:
            known = self._versions[step].own_digests
            assert known is not None
            table = dict(zip(self.own_slices, known, strict=True))
            return [table[piece] for piece in slices]

    def own_offset(self, step: int) -> int:
        """Arena offset of the own extent of `step`."""
        with self._lock:
            return self.map.own_start(self._own_extent(step))

    def all_own_digests(self, step: int) -> list[bytes]:
        """Digests of all own slices of a staged or restored step."""
        return self.own_digests(step, self.own_slices)

    def items(self, step: int) -> dict[str, Any]:
        """The items (data position and so on) that were staged with `step`."""
        with self._lock:
            return self._versions[step].items

    def _own_extent(self, step: int) -> int:
        extent = self._versions[step].own
        assert extent is not None
        return extent

    def _own_view(self, step: int, piece: Slice) -> memoryview:
        return self.arena.view(*self.map.own_range(self._own_extent(step), piece))

    # ---------------------------------------------------------- hosted slices

    def hosted_view(self, step: int, source: int) -> memoryview:
        """Where the bytes of a push from slot `source` go: side by side, unpadded.

        Raises:
            RuntimeError: every extent is in use.
        """
        with self._lock:
            version = self._versions.get(step) or _Version()
            if version.hosted is None:
                version.hosted = self._hosted_pool.acquire()
            if version.hosted is None:
                raise RuntimeError(
                    f"no free extent to host step {step} of slot {source}: all "
                    f"{HOSTED_VERSIONS} are in use by {sorted(self._versions)}."
                )
            self._versions[step] = version
            return self.arena.view(*self.map.hosted_range(version.hosted, source))

    def has_received(self, step: int, source: int, digests: Sequence[bytes]) -> bool:
        """Whether the very bytes of a push are here already, verified."""
        with self._lock:
            version = self._versions.get(step)
            known = version.hosted_digests.get(source) if version else None
            return known is not None and known == list(digests)

    def begin_receive(self, step: int, source: int) -> memoryview | None:
        """Where one push may write, and nothing else until `end_receive`.

        Returns:
            The memory; None if a verified copy is there (nothing overwrites one),
            another push of the same is under way, or no extent is free.
        """
        with self._lock:
            known = self._versions.get(step)
            if known is not None and source in known.hosted_digests:
                return None
            if (step, source) in self._receiving:
                return None
            try:
                view = self.hosted_view(step, source)
            except RuntimeError:
                return None
            version = self._versions[step]
            assert version.hosted is not None
            self._hosted_pool.retain(version.hosted)  # though the step be dropped
            self._receiving[step, source] = version.hosted
            return view

    def end_receive(self, step: int, source: int) -> None:
        """The push has ended, well or not, and writes no more."""
        with self._lock:
            self._hosted_pool.release(self._receiving.pop((step, source)))

    def received(
        self, step: int, source: int, digests: Sequence[bytes], items: dict
    ) -> bool:
        """Checks what was written to `hosted_view`; keeps it if every byte is right."""
        with self._lock:
            version = self._versions.get(step)
            if version is None or version.hosted is None:
                return False  # dropped while it was received
            view = self.hosted_view(step, source)
        pieces = self.map.incoming[source].slices
        if len(pieces) != len(digests):
            return False
        copies = ((p.key, v, d) for p, v, d in _side_by_side(view, pieces, digests))
        if digest.check_copies(copies, self.chunk_bytes)[1]:
            return False
        with self._lock:
            if self._versions.get(step) is not version:
                return False
            version.hosted_digests[source] = list(digests)
            version.items = items
            return True

    # -------------------------------------------------------------- retention

    def keep_only(self, steps: set[int]) -> None:
        """Drops every version except those of `steps`."""
        with self._lock:
            for step in set(self._versions) - steps:
                version = self._versions.pop(step)
                if version.own is not None:
                    self._own_pool.release(version.own)
                if version.hosted is not None:
                    self._hosted_pool.release(version.hosted)

    def drop_before(self, step: int, keep: set[int]) -> None:
        """Drops versions older than `step`, except those of `keep`."""
        with self._lock:
            self.keep_only({s for s in self._versions if s >= step or s in keep})

    def pin(self, step: int) -> int:
        """Keeps the own extent of `step` until `unpin`; returns its number.

        Raises:
            KeyError: the step is not held here any more.
        """
        with self._lock:
            extent = self._versions[step].own
            if extent is None:
                raise KeyError(step)
            self._own_pool.retain(extent)
            return extent

    def unpin(self, extent: int) -> None:
        """Ends one `pin`."""
        with self._lock:
            self._own_pool.release(extent)

    # --------------------------------------------------------------- verified

    def holdings(self) -> tuple[dict[int, dict[str, bytes]], list[str]]:
        """Every slice held, read again and checked now.

        A copy for a peer that is wrong is forgotten, so that it can be sent again.

        Returns:
            step -> slice key -> digest of each good copy, and a description of each
            bad one ("step 12: params/w[0:4]:float32").
        """
        good: dict[int, dict[str, bytes]] = {}
        bad: list[str] = []
        with self._lock:
            for step in self._versions:
                found = digest.check_copies(self.copies(step), self.chunk_bytes)
                if found[0]:
                    good[step] = found[0]
                bad += [f"step {step}: {key}" for key in found[1]]
                self._forget_hosted(step, set(found[1]))
        return good, bad

    def _forget_hosted(self, step: int, bad: set[str]) -> None:
        hosted = self._versions[step].hosted_digests
        for source in list(hosted):
            if not bad.isdisjoint(p.key for p in self.map.incoming[source].slices):
                del hosted[source]

    def steps(self) -> tuple[int, ...]:
        """The steps of which something is held, ascending."""
        with self._lock:
            return tuple(sorted(self._versions))

    def copies(self, step: int) -> list[tuple[str, memoryview, bytes]]:
        """Slice key, bytes and recorded digest of every copy of `step`, not read."""
        with self._lock:
            return [(piece.key, view, d) for piece, view, d in self._copies(step)]

    def find(self, step: int, keys: Sequence[str]) -> list[memoryview]:
        """Views of the named slices of `step`, from own or hosted copies.

        Raises:
            KeyError: a slice is not held here for that step.
        """
        with self._lock:
            here = {key: view for key, view, _ in self.copies(step)}
            return [here[key] for key in keys]

    def _copies(self, step: int) -> Iterator[tuple[Slice, memoryview, bytes]]:
        version = self._versions.get(step)
        if version is None:
            return
        if version.own is not None and version.own_digests is not None:
            yield from self._own_copies(step, version.own_digests)
        for source, digests in version.hosted_digests.items():
            pieces = self.map.incoming[source].slices
            yield from _side_by_side(self.hosted_view(step, source), pieces, digests)

    def _own_copies(
        self, step: int, digests: Sequence[bytes]
    ) -> Iterator[tuple[Slice, memoryview, bytes]]:
        for piece, expected in zip(self.own_slices, digests, strict=True):
            yield piece, self._own_view(step, piece), expected

    # ---------------------------------------------------------------- restore

    def begin_restore(
        self, step: int, digests: Mapping[str, bytes], items: dict
    ) -> list[Slice]:
        """Makes `step` the only version; own slices that are right stay.

        Args:
            step: the step to restore.
            digests: slice key to digest, for every own slice.
            items: the items of the commit.

        Returns:
            The own slices that must be fetched (absent, or not matching).
        """
        with self._lock:
            self.keep_only({step})
            self.begin_stage(step)
            expected = [digests[piece.key] for piece in self.own_slices]
            self._copy_from_hosted(step, digests)
            self.staged(step, expected, items)
            return [
                piece
                for piece, view, good in self._own_copies(step, expected)
                if digest.verify(view, good, self.chunk_bytes)
            ]

    def _copy_from_hosted(self, step: int, digests: Mapping[str, bytes]) -> None:
        """A spare that hosted a slice before may own it now."""
        for piece, view, known in list(self._copies(step)):
            if piece in self.map.own and known == digests[piece.key]:
                target = self._own_view(step, piece)
                if digest.verify(target, known, self.chunk_bytes):
                    target[:] = view

    def own_slice_view(self, step: int, piece: Slice) -> memoryview:
        """Where one own slice of `step` is, to be filled by a fetch."""
        with self._lock:
            return self._own_view(step, piece)

    def close(self) -> None:
        """Frees the arena's memory."""
        self.arena.close()
        self.arena.unlink()


def _arena(path: Path, nbytes: int, reserved: Arena | None) -> Arena:
    if reserved is not None and reserved.size >= nbytes:
        return reserved
    if reserved is not None:
        reserved.close()
        reserved.unlink()
    arena = Arena.create(path, nbytes)
    arena.prefault()
    return arena


def _side_by_side(
    view: memoryview, pieces: Sequence[Slice], digests: Sequence[bytes]
) -> Iterator[tuple[Slice, memoryview, bytes]]:
    offset = 0
    for piece, expected in zip(pieces, digests, strict=True):
        yield piece, view[offset : offset + piece.nbytes], expected
        offset += piece.nbytes
