"""Where in a host's arena the places of each slice's chunks lie.

The host's own slices come first, with all their places; then, peer by peer, what each
pushes. Pure: knows the layout and the placement; must not know memory, steps, or which
version is in which place.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtft.checkpoint.chunks import Chunks
from dtft.checkpoint.placement import Placement, Push
from dtft.checkpoint.slices import Layout, offsets_of

OWN_PLACES = 4
"""Last commit, replicated but not yet committed, being staged, being exported."""
HOSTED_PLACES = 3
"""As above, without the export: storage gets every slice from an owner."""


def arena_bytes(layout: Layout, slot: int, placement: Placement) -> int:
    """Bytes of the whole arena of one slot's host; cuts nothing into chunks."""
    incoming = [p.slices for p in placement.pushes if p.target == slot]
    hosted = sum(offsets_of(slices)[1] for slices in incoming)
    return OWN_PLACES * offsets_of(layout.slices(slot))[1] + HOSTED_PLACES * hosted


@dataclass(frozen=True, kw_only=True)
class ArenaMap:
    """Chunks, offsets and sizes; sizes and offsets are in bytes."""

    own: Chunks
    """The host's own slices; their places begin with the arena."""
    incoming: Mapping[int, Push]
    """By the slot that sends: what peers push to this host."""
    hosted: Mapping[int, Chunks]
    """By the slot that sends: the chunks of its push, in the push's order."""
    hosted_starts: Mapping[int, int]
    """By the slot that sends: where the places of its push begin."""
    size: int
    """Bytes of the whole arena."""

    @classmethod
    def of(
        cls, layout: Layout, slot: int, placement: Placement, chunk_bytes: int
    ) -> "ArenaMap":
        """The map of one slot's host."""
        own = Chunks.of(layout.slices(slot), chunk_bytes)
        incoming = {p.source: p for p in placement.pushes if p.target == slot}
        hosted = {s: Chunks.of(p.slices, chunk_bytes) for s, p in incoming.items()}
        starts, size = {}, OWN_PLACES * own.nbytes
        for source, chunks in hosted.items():
            starts[source] = size
            size += HOSTED_PLACES * chunks.nbytes
        return cls(
            own=own, incoming=incoming, hosted=hosted, hosted_starts=starts, size=size
        )
