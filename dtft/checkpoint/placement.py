"""Which slots hold copies of which slices.

Decides, from the layout and the failure domains alone, who sends which slices to whom
so that every slice is in enough domains. Pure and deterministic, so that every host
computes the same. Must not know hosts, who is alive, or how bytes travel.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtft.checkpoint.slices import Layout, Slice


@dataclass(frozen=True, kw_only=True)
class Push:
    """Slices that one slot sends to another at every step."""

    source: int
    """The slot that owns the slices."""
    target: int
    """The slot that keeps copies of them."""
    slices: tuple[Slice, ...]
    """In the order in which the source owns them."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where every copy of the state is."""

    effective_copies: int
    """Failure domains that every slice is in, at least."""
    pushes: tuple[Push, ...]
    """By source, then target; at most one for each pair."""
    holders: Mapping[Slice, tuple[int, ...]]
    """For every slice the slots that have it: its owners, then those it is sent to."""

    @functools.cached_property
    def _hosted(self) -> dict[int, tuple[Slice, ...]]:
        hosted: dict[int, tuple[Slice, ...]] = {}
        for push in self.pushes:
            hosted[push.target] = hosted.get(push.target, ()) + push.slices
        return hosted

    def hosted(self, target: int) -> tuple[Slice, ...]:
        """The slices that a slot keeps for others: by source, then as in the push."""
        return self._hosted.get(target, ())


def place(
    layout: Layout, copies: int, domains: Sequence[str] | None = None
) -> Placement:
    """Chooses the slots that keep copies.

    Data-parallel owners count as copies. What is missing goes to the other slots of
    the owner's group, or along a ring where groups do not come out even.

    Args:
        layout: mesh and leaves.
        copies: domains that every slice shall be in, its owners included.
        domains: per slot the name of what fails together (host, rack); by default
            every slot is a domain of its own.

    Raises:
        ValueError: `copies` is below 1, or `domains` does not fit the layout.
    """
    num_slots = layout.mesh.num_slots
    if copies < 1:
        raise ValueError(
            f"copies={copies} is below 1. Allowed: 1 (owners only) to {num_slots}. "
            "Set copies; 2 survives the loss of any one host."
        )
    if domains is None:
        domains = [str(slot) for slot in range(num_slots)]
    if len(domains) != num_slots:
        raise ValueError(
            f"domains has {len(domains)} entries, but the layout has {num_slots} "
            "slots: give one domain per slot."
        )
    wanted = min(copies, len(set(domains)))
    extra = _extra_holders(layout, _Neighbours(domains, wanted), domains, wanted)
    sent: dict[tuple[int, int], list[Slice]] = {}
    for piece, (source, targets) in extra.items():
        for target in targets:
            sent.setdefault((source, target), []).append(piece)
    return Placement(
        effective_copies=wanted,
        pushes=tuple(
            Push(source=source, target=target, slices=tuple(sent[source, target]))
            for source, target in sorted(sent)
        ),
        holders={
            piece: owners + (extra[piece][1] if piece in extra else ())
            for piece, owners in layout.owners.items()
        },
    )


def _extra_holders(
    layout: Layout, neighbours: "_Neighbours", domains: Sequence[str], wanted: int
) -> dict[Slice, tuple[int, tuple[int, ...]]]:
    """For slices in too few domains: the owner that sends, and the slots that get."""
    extra: dict[Slice, tuple[int, tuple[int, ...]]] = {}
    choices: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    sent_bytes = [0] * len(domains)
    for piece, owners in layout.owners.items():
        if len({domains[slot] for slot in owners}) >= wanted:
            continue
        source = min(owners, key=lambda slot: (sent_bytes[slot], slot))
        sent_bytes[source] += piece.nbytes
        if (source, owners) not in choices:
            choices[source, owners] = _choose(
                neighbours.of(source), owners, domains, wanted
            )
        extra[piece] = (source, choices[source, owners])
    return extra


def _choose(
    candidates: Iterator[int],
    owners: tuple[int, ...],
    domains: Sequence[str],
    wanted: int,
) -> tuple[int, ...]:
    """The first candidates that bring the slice into `wanted` domains."""
    used = {domains[slot] for slot in owners}
    chosen: list[int] = []
    while len(used) < wanted:
        slot = next(candidates)
        if domains[slot] not in used:
            used.add(domains[slot])
            chosen.append(slot)
    return tuple(chosen)


class _Neighbours:
    """For every slot the others, nearest first: its group or ring, then the rest.

    Groups make the loss of several hosts less likely to take all copies of a slice
    than a ring would; the ring takes up the slots that do not fill a group.
    """

    def __init__(self, domains: Sequence[str], group_size: int) -> None:
        self._order = _interleaved(domains)
        self._at = {slot: index for index, slot in enumerate(self._order)}
        self._size = group_size
        num_slots = len(self._order)
        num_groups, rest = divmod(num_slots, group_size)
        # The ring is one group larger than the rest, which alone might be too small.
        self._ring_start = (num_groups - 1) * group_size if rest else num_slots

    def of(self, slot: int) -> Iterator[int]:
        at = self._at[slot]
        if at < self._ring_start:
            first = at - at % self._size
            home = range(first, first + self._size)
        else:
            home = range(self._ring_start, len(self._order))
        for near in (home, range(len(self._order))):
            turn = at - near.start + 1
            yield from (self._order[i] for i in near[turn:])
            yield from (self._order[i] for i in near[:turn])


def _interleaved(domains: Sequence[str]) -> list[int]:
    """Slots in an order in which neighbours are of different domains.

    >>> _interleaved(["a", "a", "b", "b"])
    [0, 2, 1, 3]
    """
    members: dict[str, list[int]] = {}
    for slot, domain in enumerate(domains):
        members.setdefault(domain, []).append(slot)
    rounds = itertools.zip_longest(*members.values())
    return [slot for taken in rounds for slot in taken if slot is not None]
