"""One host's slices of a step in another division, in memory of their own.

For a process that wants a step on other shardings than it was saved with: it reads
them there and is done, so nothing else is kept there. Must not know the leader, the
process, nor why.
"""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtft.checkpoint import digest
from dtft.checkpoint.arena import Arena
from dtft.checkpoint.chunks import Chunks
from dtft.checkpoint.slices import Layout, Slice

Bring = Callable[[Mapping[Slice, memoryview]], int]


class SideArena:
    """At most one arena beside those of a host's copies."""

    def __init__(self, directory: Path) -> None:
        """Reserves nothing yet; arenas will lie in `directory`."""
        self._paths = (directory / f"side-{number}" for number in itertools.count())
        self._arena: Arena | None = None

    def fill(
        self, layout: Layout, slot: int, chunk_bytes: int, bring: Bring
    ) -> dict[str, Any]:
        """Has the slices of a slot brought into new memory.

        Args:
            layout: how the step is wanted.
            slot: of this host.
            chunk_bytes: bytes under one digest.
            bring: fills the memory of each slice, checked; see `assembling.bring`.

        Returns:
            `arena` (its path) and `digests` (per slice), for the process.

        Raises:
            OSError: the memory is not there; names bytes needed and available.
        """
        self.free()
        chunks = Chunks.of(layout.slices(slot), chunk_bytes)
        self._arena = arena = Arena.create(next(self._paths), max(chunks.nbytes, 1))
        memory = arena.view(0, arena.size)
        new = {
            piece: memory[start : start + piece.nbytes]
            for piece, start in zip(
                chunks.slices, chunks.starts[chunks.first[:-1]].tolist(), strict=True
            )
        }
        bring(new)
        digests = [digest.chunk_digests(view, chunk_bytes) for view in new.values()]
        return {"arena": str(arena.path), "digests": digests}

    def free(self, path: str = "") -> None:
        """Gives the memory back; whoever reads it now may finish.

        Args:
            path: of the arena that is meant; by default whichever there is.
        """
        arena = self._arena
        if arena is not None and path in ("", str(arena.path)):
            self._arena = None
            arena.close()
            arena.unlink()
