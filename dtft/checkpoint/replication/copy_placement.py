"""Which slots hold copies of which slices, how far apart, and which copy at which
commit.

`place_copies` spreads copies over failure domains. `Spread` says how far apart they
are; `choose_spares` picks the spares that keep them so. `Shares` divides the copying of
slices that several slots own, in turn from commit to commit.
"""

import functools
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtft.checkpoint.state import (
    Layout,
    Partition,
    Slice,
    Spec,
    leaves_by_spec,
    nbytes_of,
    partition_of,
)

# Which slots hold copies of which slices.
#
# Decides, from the layout and the failure domains alone, who sends which slices to whom
# so that every slice is in enough domains. Pure and deterministic, so that every host
# computes the same. Decided per way of being divided (`state.partition`); slices appear
# only when they are asked for.


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
class PlacedLeaves:
    """Leaves that are divided alike and whose copies go the same ways."""

    leaves: tuple[int, ...]
    """Positions in `layout.leaves`."""
    spec: Spec
    """How they are divided."""
    sources: tuple[int, ...]
    """Per part the owner that sends it, -1 where the owners suffice."""
    targets: tuple[tuple[int, ...], ...]
    """Per part the slots that it is sent to."""


@dataclass(frozen=True, kw_only=True)
class CopyPlacement:
    """Where every copy of the state is."""

    effective_copies: int
    """Failure domains that every slice is in, at least."""
    layout: Layout = field(repr=False)
    """What was placed."""
    tables: tuple[PlacedLeaves, ...] = field(repr=False)
    """Every leaf in one table."""

    @functools.cached_property
    def _routes(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """(source, target) -> (table, part), sorted by source, then target."""
        routes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for at, table in enumerate(self.tables):
            for part, targets in enumerate(table.targets):
                for target in targets:
                    route = (table.sources[part], target)
                    routes.setdefault(route, []).append((at, part))
        return {route: routes[route] for route in sorted(routes)}

    @functools.cached_property
    def _partitions(self) -> tuple[Partition, ...]:
        mesh = self.layout.mesh
        return tuple(partition_of(mesh, table.spec) for table in self.tables)

    def _push(self, source: int, target: int) -> Push:
        sent = {
            self._partitions[at].slice_of(self.layout.leaves[leaf], part)
            for at, part in self._routes[source, target]
            for leaf in self.tables[at].leaves
        }
        ordered = tuple(p for p in self.layout.slices(source) if p in sent)
        return Push(source=source, target=target, slices=ordered)

    @functools.cached_property
    def pushes(self) -> tuple[Push, ...]:
        """All pushes by source, then target; at most one for each pair."""
        return tuple(self._push(*route) for route in self._routes)

    def pushes_of(self, source: int) -> tuple[Push, ...]:
        """The pushes of one slot."""
        return self._by_source.get(source, ())

    @functools.cached_property
    def _by_source(self) -> dict[int, tuple[Push, ...]]:
        grouped = itertools.groupby(self.pushes, lambda push: push.source)
        return {source: tuple(pushes) for source, pushes in grouped}

    @functools.cached_property
    def holders(self) -> Mapping[Slice, tuple[int, ...]]:
        """For every slice the slots that have it: owners, then those it is sent to."""
        targets = {
            partition.slice_of(self.layout.leaves[leaf], part): slots
            for table, partition in zip(self.tables, self._partitions, strict=True)
            for part, slots in enumerate(table.targets)
            for leaf in table.leaves
        }
        owners = self.layout.owners.items()
        return {piece: slots + targets[piece] for piece, slots in owners}

    def hosted(self, target: int) -> tuple[Slice, ...]:
        """The slices that a slot keeps for others: by source, then as in the push."""
        routes = [route for route in self._routes if route[1] == target]
        return tuple(piece for route in routes for piece in self._push(*route).slices)


def place_copies(
    layout: Layout, copies: int, domains: Sequence[str] | None = None
) -> CopyPlacement:
    """Chooses the slots that keep copies.

    Data-parallel owners count as copies. What is missing goes to the other slots of
    the owner's group, or along a ring where groups do not come out even.

    Args:
        layout: mesh and leaves.
        copies: domains that every slice shall be in, its owners included.
        domains: per slot the name of what fails together (host, rack); by default
            every slot is a domain of its own. Names may be nested, "power/rack": the
            whole name is the domain, and neighbours are of different power first.

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
    chooser = _Chooser(domains, wanted)
    loads: dict[int, list[int]] = {}
    tables = []
    for spec, leaves in leaves_by_spec(layout).items():
        partition = partition_of(layout.mesh, spec)
        short = [chooser.short(owners) for owners in partition.owners]
        turns = max(
            (len(o) for o, few in zip(partition.owners, short, strict=True) if few),
            default=1,
        )
        sizes = [
            nbytes_of(layout.leaves[leaf]) // partition.num_parts for leaf in leaves
        ]
        taken = _take_turns(sizes, loads.setdefault(turns, [0] * turns))
        for turn in sorted(set(taken)):
            mine = [leaf for leaf, t in zip(leaves, taken, strict=True) if t == turn]
            tables.append(_place_alike(mine, spec, partition, short, turn, chooser))
    return CopyPlacement(effective_copies=wanted, layout=layout, tables=tuple(tables))


def _place_alike(
    leaves: list[int],
    spec: Spec,
    partition: Partition,
    short: Sequence[bool],
    turn: int,
    chooser: "_Chooser",
) -> PlacedLeaves:
    """Places leaves that are divided alike; `turn` says which owner sends."""
    sources, targets = [], []
    for part, (owners, few) in enumerate(zip(partition.owners, short, strict=True)):
        source = owners[(turn + part) % len(owners)] if few else -1
        sources.append(source)
        targets.append(chooser.targets(source, owners) if few else ())
    return PlacedLeaves(
        leaves=tuple(leaves), spec=spec, sources=tuple(sources), targets=tuple(targets)
    )


def _take_turns(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """For each size whose turn it is: who has least so far. Adds to `loads`."""
    heap = [(load, turn) for turn, load in enumerate(loads)]
    heapq.heapify(heap)
    taken = []
    for size in sizes:
        load, turn = heap[0]
        heapq.heapreplace(heap, (load + size, turn))
        loads[turn] = load + size
        taken.append(turn)
    return taken


class _Chooser:
    """The slots that get copies, for any owner and its fellow owners."""

    def __init__(self, domains: Sequence[str], wanted: int) -> None:
        self._domains, self._wanted = domains, wanted
        self._neighbours = _Neighbours(domains, wanted)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def short(self, owners: tuple[int, ...]) -> bool:
        """The owners alone are in too few domains."""
        return len({self._domains[slot] for slot in owners}) < self._wanted

    def targets(self, source: int, owners: tuple[int, ...]) -> tuple[int, ...]:
        """The slots that bring a slice into enough domains."""
        if (source, owners) not in self._known:
            self._known[source, owners] = _choose(
                self._neighbours.of(source), owners, self._domains, self._wanted
            )
        return self._known[source, owners]


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
        self._order = interleaved(domains)
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


def interleaved(domains: Sequence[str]) -> list[int]:
    """Slots in an order in which neighbours are of different domains.

    Nested names ("power/rack") are told apart at the widest level first.

    >>> interleaved(["a", "a", "b", "b"])
    [0, 2, 1, 3]
    >>> interleaved(["p/a", "p/b", "q/c", "q/c"])
    [0, 2, 1, 3]
    """
    names = [domain.split("/") for domain in domains]
    return _woven(list(range(len(domains))), names, 0)


def _woven(slots: list[int], names: list[list[str]], level: int) -> list[int]:
    members: dict[str, list[int]] = {}
    for slot in slots:
        if level == len(names[slot]):
            return slots
        members.setdefault(names[slot][level], []).append(slot)
    parts = [_woven(found, names, level + 1) for found in members.values()]
    rounds = itertools.zip_longest(*parts)
    return [slot for taken in rounds for slot in taken if slot is not None]


# By what copies are kept apart, how far apart they are, and which spare keeps them so.
#
# Decides from a placement and the failure domain of each slot's host.


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

    def place(self, layout: Layout) -> CopyPlacement:
        """Where the copies of a state go.

        Raises:
            ValueError: the layout has another number of slots.
        """
        return _placed(layout, self.copies, self.domains)


@functools.lru_cache(maxsize=4)
def _placed(layout: Layout, copies: int, domains: tuple[str, ...]) -> CopyPlacement:
    """As `place_copies`: a leader asks several times for every formation."""
    return place_copies(layout, copies, domains or None)


def copy_groups(placement: CopyPlacement) -> Groups:
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


# Which slots copy which of their slices at a commit, when the work is divided.
#
# A slice that d slots own needs only `copies` of them to copy it. Who does rotates from
# commit to commit, so that each of them does copies/d of the work, and the bytes of all
# are compared within ceil(d / copies) commits. Slices with too few owners are copied by
# all of them, and pushed, as ever. Pure and deterministic, so that every host computes
# the same.


class Shares:
    """The shares of every slot of a layout, turn by turn.

    >>> from dtft.checkpoint.state.slices import Leaf, MeshLayout
    >>> mesh = MeshLayout(axis_names=("replica",), axis_sizes=(3,), slots=(0, 1, 2))
    >>> layout = Layout(mesh=mesh, leaves=(Leaf(path="w", shape=(4,), dtype="int8"),))
    >>> shares = Shares(layout, copies=2)
    >>> [[bool(shares.of(slot, turn)[0]) for slot in range(3)] for turn in range(3)]
    [[True, True, False], [True, False, True], [False, True, True]]
    """

    def __init__(
        self, layout: Layout, copies: int, domains: Sequence[str] | None = None
    ) -> None:
        """Decides in which order the owners of each slice take turns.

        Args:
            layout: mesh and leaves.
            copies: failure domains that every slice shall be in.
            domains: per slot the name of what fails together, as in `place_copies`.

        Raises:
            ValueError: `domains` does not fit the layout.
        """
        num_slots = layout.mesh.num_slots
        self._domains = [str(slot) for slot in range(num_slots)]
        if domains is not None:
            self._domains = list(domains)
        if len(self._domains) != num_slots:
            raise ValueError(
                f"domains has {len(self._domains)} entries, but the layout has "
                f"{num_slots} slots: give one domain per slot."
            )
        self.layout, self._copies = layout, copies
        self._wanted = min(copies, len(set(self._domains)))
        self._rank = {slot: at for at, slot in enumerate(interleaved(self._domains))}
        self._begins = _begins(layout)

    def of(self, slot: int, turn: int) -> np.ndarray:
        """[slices of the slot] bool: whether it copies each of them at this turn.

        A slice without bytes costs nothing and is copied by all.
        """
        slices, turns = self.layout.slices(slot), self._turns(slot)
        return np.array(
            [
                not piece.nbytes
                or slot
                in self._copiers(owners, (begin + turn * self._copies) % len(owners))
                for piece, (owners, begin) in zip(slices, turns, strict=True)
            ],
            bool,
        )

    @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as the host's layout)
    def _turns(self, slot: int) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For every slice of a slot its owners, in turn, and who of them begins."""
        found = {}
        for spec, leaves in leaves_by_spec(self.layout).items():
            partition = partition_of(self.layout.mesh, spec)
            parts, slots = partition.owned
            for part in parts[slots == slot].tolist():
                owners = tuple(
                    sorted(partition.owners[part], key=self._rank.__getitem__)
                )
                for leaf in leaves:
                    piece = partition.slice_of(self.layout.leaves[leaf], part)
                    found[piece] = owners, self._begins[leaf] + part
        return tuple(found[piece] for piece in self.layout.slices(slot))

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def _copiers(self, owners: tuple[int, ...], begin: int) -> frozenset[int]:
        """The first owners from `begin` on, round and round, in enough domains."""
        chosen: list[int] = []
        domains: set[str] = set()
        for slot in owners[begin:] + owners[:begin]:
            if len(chosen) >= self._copies and len(domains) >= self._wanted:
                break
            chosen.append(slot)
            domains.add(self._domains[slot])
        return frozenset(chosen)


def _begins(layout: Layout) -> list[int]:
    """Per leaf a number that says who begins: as many bytes begin with each owner."""
    begins = [0] * len(layout.leaves)
    loads: dict[int, list[int]] = {}
    for spec, leaves in leaves_by_spec(layout).items():
        partition = partition_of(layout.mesh, spec)
        count = max(map(len, partition.owners))
        load = loads.setdefault(count, [0] * count)
        sizes = {leaf: nbytes_of(layout.leaves[leaf]) for leaf in leaves}
        for leaf in sorted(leaves, key=lambda leaf: -sizes[leaf]):
            begins[leaf] = load.index(min(load))
            load[begins[leaf]] += sizes[leaf] // partition.num_parts
    return begins
