"""By what copies are kept apart, how far apart they are, and which spare keeps them so.

Decides from a placement and the failure domain of each slot's host. Pure; must not know
hosts, slices' names or who is alive.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from dtft.checkpoint.partition import partition_of
from dtft.checkpoint.placement import Placement, place
from dtft.checkpoint.slices import Layout

Groups = tuple[tuple[int, ...], ...]
"""Sets of slots that keep copies of the same slices, each set once."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How many copies are asked for, and what they are kept apart by."""

    copies: int = 2
    """Copies of every slice that were asked for."""
    level: str = "host"
    """Level of the failure domains: "power", "rack" or "host"."""
    domains: tuple[str, ...] = ()
    """Per slot the domain by which copies are placed; empty: each slot is one."""

    def place(self, layout: Layout) -> Placement:
        """Where the copies of a state go.

        Raises:
            ValueError: the layout has another number of slots.
        """
        return _placed(layout, self.copies, self.domains)


@functools.lru_cache(maxsize=4)
def _placed(layout: Layout, copies: int, domains: tuple[str, ...]) -> Placement:
    """As `place`: a leader asks several times for every formation."""
    return place(layout, copies, domains or None)


def copy_groups(placement: Placement) -> Groups:
    """The slots that keep copies together, owners among them."""
    mesh = placement.layout.mesh
    found: dict[tuple[int, ...], None] = {}
    for table in placement.tables:
        owners = partition_of(mesh, table.spec).owners
        for mine, targets in zip(owners, table.targets, strict=True):
            found[tuple(sorted({*mine, *targets}))] = None
    return tuple(found)


def domains_reached(groups: Groups, domains: Sequence[str]) -> int:
    """Failure domains that every slice is in, at least.

    Args:
        groups: of a placement.
        domains: per slot the domain of its host.

    >>> domains_reached(((0, 1), (2, 3)), ["a", "b", "c", "c"])
    1
    """
    return min((len({domains[slot] for slot in group}) for group in groups), default=0)


def choose_spares(
    groups: Groups,
    seats: Sequence[str | None],
    spares: Sequence[str],
    wanted: int,
) -> tuple[int | None, ...]:
    """Which spare takes which empty slot, so that copies stay apart.

    For one slot after the other the spare that brings most of its slices into one more
    domain that they still need; the first of those that do so equally well.

    Args:
        groups: of the placement; none if nothing is placed yet.
        seats: per slot the domain of its host, None where it is empty.
        spares: the domain of each spare, in the order in which they are to be taken.
        wanted: domains that every slice shall be in.

    Returns:
        Per slot the position of its spare, None where it has a host or none is left.

    >>> choose_spares(((0, 1),), ["a", None], ["a", "b"], 2)
    (None, 1)
    """
    taken: list[int | None] = [None] * len(seats)
    filled, left = list(seats), list(range(len(spares)))
    empty = {slot for slot, domain in enumerate(seats) if domain is None}
    groups_of: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        for slot in empty.intersection(group):
            groups_of.setdefault(slot, []).append(group)
    for slot, domain in enumerate(seats):
        if domain is not None or not left:
            continue
        needy = [
            found
            for group in groups_of.get(slot, ())
            if len(found := _domains(group, filled)) < wanted
        ]
        best = left[0]  # where all do equally well
        if needy:
            gain = {it: sum(it not in found for found in needy) for it in {*spares}}
            best = max(left, key=lambda at: gain[spares[at]])
        taken[slot], filled[slot] = best, spares[best]
        left.remove(best)
    return tuple(taken)


def _domains(group: tuple[int, ...], filled: Sequence[str | None]) -> set[str]:
    return {domain for slot in group if (domain := filled[slot]) is not None}
