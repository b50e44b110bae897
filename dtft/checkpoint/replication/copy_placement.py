"""Placement of copies: assigns the copies of every slice to slots in several domains.

`place_copies` places copies in different failure domains. `Spread` has the number of
copies and the level of the domains. `choose_spares` assigns spares to lost slots so
that copies stay in different domains. If several slots have a slice on their devices,
`Shares` lets them take turns in copying it to host memory, from snapshot to snapshot.
All decisions are pure and deterministic, so every host computes the same result.
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


@dataclass(frozen=True, kw_only=True)
class Push:
    """Slices that one slot sends to another slot at every snapshot."""

    source: int
    """The slot that has the slices on its devices."""
    target: int
    """The slot that keeps copies of the slices."""
    slices: tuple[Slice, ...]
    """The slices, in the order of the source's own slices."""


@dataclass(frozen=True, kw_only=True)
class PlacedLeaves:
    """Leaves with the same partition spec, and the sender and targets of each part.

    A leaf's parts are its equal pieces, numbered from 0; each part of a leaf is one
    slice.
    """

    leaves: tuple[int, ...]
    """Positions of the leaves in the layout."""
    spec: Spec
    """Mesh axes that divide each dimension of the leaves."""
    sources: tuple[int, ...]
    """For each part, the slot that sends it to other slots: one of its owners (the
    slots with the part on their devices). -1 if the owners are already in enough
    failure domains."""
    targets: tuple[tuple[int, ...], ...]
    """For each part, the slots to which the part is sent."""


@dataclass(frozen=True, kw_only=True)
class CopyPlacement:
    """Which slots keep the copies of each slice of a state.

    To save memory, `tables` has an entry per group of leaves with the same partition
    spec and senders, not per slice. Slices and pushes are computed from `tables` on
    demand.
    """

    effective_copies: int
    """Number of failure domains in which every slice has at least one copy."""
    layout: Layout = field(repr=False)
    """The layout whose slices were placed."""
    tables: tuple[PlacedLeaves, ...] = field(repr=False)
    """The placed leaves; every leaf is in one table."""

    @functools.cached_property
    def _routes(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Maps (source slot, target slot) to the parts of leaves that are sent.

        The parts are pairs: the position of a table in `tables`, and the number of a
        part. A pair stands for the part with this number of every leaf of the table.
        The keys are sorted by source, then target.
        """
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
        """All pushes (slices that one slot sends to another), by source, then target.

        There is at most one push for each pair of source and target.
        """
        return tuple(self._push(*route) for route in self._routes)

    def pushes_of(self, source: int) -> tuple[Push, ...]:
        """Returns the pushes from one slot; () if the slot pushes nothing."""
        return self._by_source.get(source, ())

    @functools.cached_property
    def _by_source(self) -> dict[int, tuple[Push, ...]]:
        grouped = itertools.groupby(self.pushes, lambda push: push.source)
        return {source: tuple(pushes) for source, pushes in grouped}

    @functools.cached_property
    def holders(self) -> Mapping[Slice, tuple[int, ...]]:
        """Maps each slice to the slots with a copy.

        First are the slots that have the slice on their devices, then those to which it
        is pushed.
        """
        targets = {
            partition.slice_of(self.layout.leaves[leaf], part): slots
            for table, partition in zip(self.tables, self._partitions, strict=True)
            for part, slots in enumerate(table.targets)
            for leaf in table.leaves
        }
        owners = self.layout.owners.items()
        return {piece: slots + targets[piece] for piece, slots in owners}

    def hosted(self, target: int) -> tuple[Slice, ...]:
        """Returns the slices that other slots push to slot `target`.

        The slices are sorted by source slot, then in the order of `Push.slices`.
        """
        routes = [route for route in self._routes if route[1] == target]
        return tuple(piece for route in routes for piece in self._push(*route).slices)


def place_copies(
    layout: Layout, copies: int, domains: Sequence[str] | None = None
) -> CopyPlacement:
    """Chooses the slots that keep copies of each slice.

    Each owner of a slice (a slot with the slice on its devices) has a copy. If the
    owners are in fewer than `copies` failure domains, one of them sends copies to slots
    in other domains. Slots are divided into groups of `copies` slots. The sender
    prefers slots of its own group to other slots. If the number of slots is no multiple
    of `copies`, the last whole group and the remaining slots form a ring, in which a
    sender prefers the slots that follow it.

    Args:
        layout: mesh and leaves.
        copies: number of domains in which every slice should have a copy, its owners
            included; lowered to the number of distinct domains if there are fewer.
        domains: the failure domain (host, rack) of each slot; by default every slot is
            a domain of its own. Names may be nested, "power/rack": the whole name is
            the domain, and slots in different power domains are preferred.

    Raises:
        ValueError: `copies` is below 1, or `domains` does not have one entry per slot.
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
    """Chooses senders and targets of the copies of leaves with the same partition spec.

    Args:
        leaves: positions of the leaves in the layout.
        spec: partition spec of the leaves.
        partition: how the leaves are cut into parts, and the owners of each part (the
            slots with the part on their devices).
        short: for each part, whether its owners are in too few failure domains.
        turn: position of the sender of part 0 among the owners of part 0. For each
            following part the position is one higher, modulo the number of owners.
        chooser: chooses the targets.
    """
    sources, targets = [], []
    for part, (owners, few) in enumerate(zip(partition.owners, short, strict=True)):
        source = owners[(turn + part) % len(owners)] if few else -1
        sources.append(source)
        targets.append(chooser.targets(source, owners) if few else ())
    return PlacedLeaves(
        leaves=tuple(leaves), spec=spec, sources=tuple(sources), targets=tuple(targets)
    )


def _take_turns(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Chooses each leaf's first sender, so that owners send about equally many bytes.

    The owners of a part of a leaf are the slots with this part on their devices. The
    turn of a leaf is the position of the sender among the owners of its first part. The
    owner at the next position sends the next part, and so on, cyclically. Each leaf
    gets the turn to which the fewest bytes were assigned so far.

    Args:
        sizes: bytes of one part of each leaf.
        loads: bytes assigned to each turn so far; `sizes` are added in place.

    Returns:
        The turn of each leaf.
    """
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
    """Chooses the slots to which a slot sends copies of its slices; caches the choices.

    The argument `wanted` is the number of failure domains in which the copies of a
    slice should be; `domains` has the domain of each slot.
    """

    def __init__(self, domains: Sequence[str], wanted: int) -> None:
        self._domains, self._wanted = domains, wanted
        self._neighbours = _Neighbours(domains, wanted)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def short(self, owners: tuple[int, ...]) -> bool:
        """Whether the owners of a slice are in too few failure domains.

        The owners are the slots with the slice on their devices. Too few is fewer than
        the number `wanted` that the chooser was made with.
        """
        return len({self._domains[slot] for slot in owners}) < self._wanted

    def targets(self, source: int, owners: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the slots to which `source` sends copies of a slice.

        `owners` are the slots with the slice on their devices, `source` among them.
        Owners and returned slots together are in at least as many failure domains as
        wanted. The result is () if the owners alone are in so many domains.
        """
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
    """Returns the first candidates that are in failure domains without a copy.

    Args:
        candidates: slots, in order of preference.
        owners: the slots with the slice on their devices; each has a copy.
        domains: the failure domain of each slot.
        wanted: number of domains that owners and returned slots together must reach. At
            most one candidate per domain is taken; none if the owners reach it.
    """
    used = {domains[slot] for slot in owners}
    chosen: list[int] = []
    while len(used) < wanted:
        slot = next(candidates)
        if domains[slot] not in used:
            used.add(domains[slot])
            chosen.append(slot)
    return tuple(chosen)


class _Neighbours:
    """For each slot, the order in which slots are tried as targets of its copies.

    Slots are ordered so that neighbours are in different domains (`interleaved`). Each
    `group_size` slots in this order form a group. The slots that do not fill a group
    form a ring with the last whole group. Slots of the same group or ring are tried
    first, then all slots. Both begin with the slot after the sender, and continue from
    the last slot to the first. With groups, the loss of several hosts is less likely to
    take all copies of a slice than with one ring of all slots.
    """

    def __init__(self, domains: Sequence[str], group_size: int) -> None:
        self._order = interleaved(domains)
        self._at = {slot: index for index, slot in enumerate(self._order)}
        self._size = group_size
        num_slots = len(self._order)
        num_groups, rest = divmod(num_slots, group_size)
        # The ring includes one whole group, because the rest is smaller than a group.
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
    """Orders slots by taking a slot of each domain in turn.

    So most neighbours are in different domains. With nested names ("power/rack"), takes
    a slot of each power domain in turn, and inside a power domain one of each rack.

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


Groups = tuple[tuple[int, ...], ...]
"""Distinct sets of slots, each ascending; the slots of a set keep copies of the same
slices."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The requested number of copies, and the failure domains that separate copies."""

    copies: int = 2
    """Requested number of copies of every slice."""
    level: str = "host"
    """Level of the failure domains: "power", "rack" or "host"."""
    domains: tuple[str, ...] = ()
    """Failure domain of each slot; empty if each slot is a domain of its own."""

    def place(self, layout: Layout) -> CopyPlacement:
        """Places the copies of a layout's slices with `place_copies`.

        Raises:
            ValueError: the layout has another number of slots than `domains`, or
                `copies` is below 1.
        """
        return _placed(layout, self.copies, self.domains)


@functools.lru_cache(maxsize=4)
def _placed(layout: Layout, copies: int, domains: tuple[str, ...]) -> CopyPlacement:
    """Returns the result of `place_copies`; caches the last 4 results.

    `domains` has the failure domain of each slot; empty if each slot is a domain of its
    own.
    """
    return place_copies(layout, copies, domains or None)


def copy_groups(placement: CopyPlacement) -> Groups:
    """Returns the distinct sets of slots that keep copies of the same slices.

    The slots that have the slices on their devices are included.
    """
    mesh = placement.layout.mesh
    found: dict[tuple[int, ...], None] = {}
    for table in placement.tables:
        owners = partition_of(mesh, table.spec).owners
        for mine, targets in zip(owners, table.targets, strict=True):
            found[tuple(sorted({*mine, *targets}))] = None
    return tuple(found)


def domains_reached(groups: Groups, domains: Sequence[str]) -> int:
    """Computes the smallest number of failure domains that any slice has copies in.

    Returns 0 without groups.

    Args:
        groups: the sets of slots that keep copies of the same slices (`copy_groups`).
        domains: the failure domain of each slot's host.

    >>> domains_reached(((0, 1), (2, 3)), ["a", "b", "c", "c"])
    1
    """
    return min((len({domains[slot] for slot in group}) for group in groups), default=0)


def choose_spares(
    groups: Groups,
    seats: Sequence[str | None],
    spares: Sequence[str],
    wanted: int,
    prefetched: Sequence[Mapping[int, int]] = (),
) -> tuple[int | None, ...]:
    """Assigns spares to empty slots so that copies stay in different domains.

    Fills one slot after the other. The slot gets the spare that adds a domain to the
    most of the slot's groups. A spare adds a domain to a group if the group's hosts are
    in fewer than `wanted` domains and none of them is in the spare's domain. Among
    equal spares, the slot gets the one that already holds the most bytes of the slot's
    slices; among these, the first.

    Args:
        groups: the sets of slots that keep copies of the same slices (`copy_groups`);
            empty if no copies are placed yet.
        seats: the failure domain of each slot's host; None for an empty slot.
        spares: the failure domain of each spare, in order of preference.
        wanted: number of domains in which every slice should have a copy.
        prefetched: for each spare, a mapping from slot to the number of bytes of the
            slot's slices that the spare already holds; empty if no spare holds any.

    Returns:
        For each slot, the position of its spare in `spares`; None if the slot has a
        host or no spare is left.

    In both examples slot 1 is empty and gets the spare at position 1: in the first
    because the other spare is in slot 0's domain "a", in the second because the spare
    holds 9 bytes of slot 1's slices.

    >>> choose_spares(((0, 1),), ["a", None], ["a", "b"], 2)
    (None, 1)
    >>> choose_spares((), ["a", None], ["b", "c"], 2, [{0: 9}, {1: 9}])
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
        gain = {it: sum(it not in found for found in needy) for it in {*spares}}
        bytes_of = {at: one.get(slot, 0) for at, one in enumerate(prefetched)}
        # `max` takes the first, if all are equal.
        best = max(left, key=lambda at: (gain[spares[at]], bytes_of.get(at, 0)))
        taken[slot], filled[slot] = best, spares[best]
        left.remove(best)
    return tuple(taken)


def _domains(group: tuple[int, ...], filled: Sequence[str | None]) -> set[str]:
    return {domain for slot in group if (domain := filled[slot]) is not None}


class Shares:
    """Chooses which owners of a replicated slice copy it to host memory at a snapshot.

    The owners of a slice are the slots with the slice on their devices. A slice with d
    owners is copied by only `copies` of them at each snapshot, or by more if needed for
    enough failure domains. The copying owners rotate from snapshot to snapshot. So each
    owner copies the slice at about copies/d of the snapshots. If `copies` is 2 or more,
    the leader compares the digests of the owners that copy at the same snapshot. Every
    owner is compared within ceil(d / copies) snapshots. If all owners together are in
    too few failure domains, all owners copy the slice, and the slice is also pushed to
    other slots.

    In the example, each row is a snapshot: two of the three owners copy the slice.

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
        """Chooses the order in which the owners of each slice copy it.

        Args:
            layout: mesh and leaves.
            copies: number of owners that copy each slice at a snapshot, and number of
                failure domains in which these owners should be.
            domains: the failure domain of each slot; by default every slot is a domain
                of its own.

        Raises:
            ValueError: `domains` does not have one entry per slot.
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
        """Returns which of its slices a slot copies to host memory at a snapshot.

        Args:
            slot: the slot.
            turn: number of the snapshot; all slots must give the same number.

        Returns:
            [slices] bool, in the order of the slot's slices. A slice without bytes is
            copied by all its owners.
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
        """Returns, for each slice of a slot, its owners and which of them copies first.

        The owners of a slice are the slots with the slice on their devices. They are
        ordered so that neighbours are in different domains (`interleaved`). At each
        snapshot some consecutive owners, in this order and cyclically, copy the slice.

        Returns:
            Pairs (owners, offset). The first of the owners that copy at snapshot 0 is
            at position `offset` modulo the number of owners.
        """
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
        """Chooses the slots that copy a slice at one snapshot.

        Takes owners (slots with the slice on their devices) in order from position
        `begin`, cyclically. Stops when it has taken the requested number of owners and
        they are in as many failure domains, or when it has taken all. If all slots
        together are in fewer domains, that many domains suffice.
        """
        chosen: list[int] = []
        domains: set[str] = set()
        for slot in owners[begin:] + owners[:begin]:
            if len(chosen) >= self._copies and len(domains) >= self._wanted:
                break
            chosen.append(slot)
            domains.add(self._domains[slot])
        return frozenset(chosen)


def _begins(layout: Layout) -> list[int]:
    """Chooses for each leaf which slot copies its first slice at snapshot 0.

    Returns, for each leaf, the position of this slot among those with the slice on
    their devices, in the order of `interleaved`. The positions are chosen so that all
    slots copy about equally many bytes.
    """
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
