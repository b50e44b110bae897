"""Where in a host's arena each slice of each version lies.

Own versions come first, each with the host's slices where `offsets_of` puts them; then
hosted versions, each with what every peer pushes, side by side. Pure: knows the layout
and the placement; must not know memory, steps, or which version is in which extent.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtft.checkpoint.placement import Placement, Push
from dtft.checkpoint.slices import Layout, Slice, offsets_of

OWN_VERSIONS = 4
"""Last commit, replicated but not yet committed, being staged, being exported."""
HOSTED_VERSIONS = 3
"""As above, without the export: storage gets every slice from an owner."""


@dataclass(frozen=True, kw_only=True)
class ArenaMap:
    """Offsets and sizes in bytes; extents are numbers of versions."""

    own: Mapping[Slice, int]
    """Own slices in order, with the offset of each in an own extent."""
    own_bytes: int
    """Size of an own extent."""
    incoming: Mapping[int, Push]
    """By the slot that sends: what peers push to this host."""
    hosted: Mapping[int, int]
    """By the slot that sends: the offset of its push in a hosted extent."""
    hosted_bytes: int
    """Size of a hosted extent."""

    @classmethod
    def of(cls, layout: Layout, slot: int, placement: Placement) -> "ArenaMap":
        """The map of one slot's host."""
        slices = layout.slices(slot)
        offsets, own_bytes = offsets_of(slices)
        incoming = {p.source: p for p in placement.pushes if p.target == slot}
        hosted, hosted_bytes = {}, 0
        for source, push in incoming.items():
            hosted[source] = hosted_bytes
            hosted_bytes += offsets_of(push.slices)[1]
        return cls(
            own=dict(zip(slices, offsets, strict=True)),
            own_bytes=own_bytes,
            incoming=incoming,
            hosted=hosted,
            hosted_bytes=hosted_bytes,
        )

    @property
    def size(self) -> int:
        """Bytes of the whole arena."""
        return OWN_VERSIONS * self.own_bytes + HOSTED_VERSIONS * self.hosted_bytes

    def own_start(self, extent: int) -> int:
        """Where an own extent begins."""
        return extent * self.own_bytes

    def own_range(self, extent: int, piece: Slice) -> tuple[int, int]:
        """Start and size of one own slice."""
        return self.own_start(extent) + self.own[piece], piece.nbytes

    def hosted_range(self, extent: int, source: int) -> tuple[int, int]:
        """Start and size of what one peer pushes, unpadded.

        Raises:
            KeyError: that slot pushes nothing to this host.
        """
        begin = OWN_VERSIONS * self.own_bytes + extent * self.hosted_bytes
        size = sum(piece.nbytes for piece in self.incoming[source].slices)
        return begin + self.hosted[source], size
