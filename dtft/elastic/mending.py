"""What a recovered job still lacks until every slice has its copies again. Pure.

After a restore from memory the slices that a lost host kept for others have a copy less
than asked for. Says who must push what again, and when the job may call itself healthy.
Where copies go is the placement's decision, for the arenas have room for nothing else.
Must not know connections, the store or the clock.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dtft.checkpoint.replication import CopyPlacement, Push, check_copy
from dtft.checkpoint.tables import size_text

Holders = Mapping[str, Collection[str]]
"""Slice key to the hosts that were found to hold a verified copy."""


@dataclass(kw_only=True)
class Mending:
    """The copies of one restored step, from the restore until all are there."""

    step: int
    pushes: tuple[Push, ...]
    """What must be sent again."""
    copies: int
    """Failure domains that every slice is in before that, at least."""
    begun: float
    """When the state was restored, in seconds of any clock."""
    digests: Mapping[str, bytes] = field(default_factory=dict)
    """Slice key to the digest that it was restored with."""
    _held: set[tuple[int, int]] = field(default_factory=set)

    @functools.cached_property
    def _by_pair(self) -> dict[tuple[int, int], Push]:
        """Source and target to what must be sent; one push at most."""
        return {(push.source, push.target): push for push in self.pushes}

    @property
    def nbytes(self) -> int:
        """Bytes that are sent again."""
        return sum(piece.nbytes for push in self.pushes for piece in push.slices)

    @property
    def whole(self) -> bool:
        """All copies are there."""
        return self._by_pair.keys() <= self._held

    def held(self, step: int, source: int, target: int, root: str) -> None:
        """A host has received a push and has verified it.

        Raises:
            Mislabelled: what it holds is not what was restored; see `push_root`.
        """
        if step != self.step:
            return
        if (push := self._by_pair.get((source, target))) is not None:
            check_copy(push, step, self.digests, root)
        self._held.add((source, target))

    def targets(self, source: int) -> list[int]:
        """The slots to which a slot sends its copies again."""
        return [push.target for push in self.pushes if push.source == source]

    def degraded_line(self, wanted: int) -> str:
        """For people, while copies are missing."""
        targets = {push.target for push in self.pushes}
        return (
            f"degraded: slices of step {self.step} have {self.copies} of {wanted} "
            f"copies; {size_text(self.nbytes)} are pushed again to {len(targets)} "
            f"host{'s' * (len(targets) != 1)}"
        )

    def healthy_line(self, wanted: int, committed: int, now: float) -> str:
        """For people, once there are enough; `committed`: by that step, 0 for none."""
        copies = f"{wanted} cop{'ies' if wanted != 1 else 'y'}"
        seconds = f"{now - self.begun:.2f} s"
        if committed:
            return (
                f"healthy again: step {committed} was committed with {copies} of every "
                f"slice, {seconds} after the restore"
            )
        return (
            f"healthy again: every slice has {copies}, {size_text(self.nbytes)} "
            f"re-replicated in {seconds}"
        )


def mending_of(
    step: int,
    placement: CopyPlacement,
    slots: Sequence[str],
    holders: Holders,
    domains: Mapping[str, str],
    now: float,
    digests: Mapping[str, bytes],
) -> Mending:
    """What is missing when every slot has its own slices again.

    Args:
        step: the step restored.
        placement: where copies go.
        slots: the host of each slot.
        holders: what was found, verified, before the restore.
        domains: host to its failure domain; hosts not named are each their own.
        now: the time.
        digests: slice key to the digest that was restored, as far as it is known.
    """
    found = {
        piece.key: {*holders.get(piece.key, ()), *(slots[slot] for slot in owners)}
        for piece, owners in placement.layout.owners.items()
    }
    alive = set(slots)
    # A host without a domain is one of its own, whose name no domain can have.
    reached = [
        len({domains.get(host, f"\0{host}") for host in hosts & alive})
        for hosts in found.values()
    ]
    pushes = tuple(
        push
        for push in placement.pushes
        if any(slots[push.target] not in found[piece.key] for piece in push.slices)
    )
    return Mending(
        step=step,
        pushes=pushes,
        copies=min(reached, default=placement.effective_copies),
        begun=now,
        digests=digests,
    )
