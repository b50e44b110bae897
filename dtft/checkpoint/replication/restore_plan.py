"""Plans the transfers that give every host its slices, on any mesh and sharding.

`plan_restore` plans restores from memory, after a loss or onto another mesh, and the
fetches for an export. A slice is identified by leaf path, global index range and dtype.
`Inventory` has the verified holders of every slice. `find_needs` computes which
overlaps of old and new slices each host needs. Leaves with the same partition specs are
planned together, so a plan takes a second or two at 10,000 hosts.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtft.checkpoint.replication.sender_assignment import Needs, Routes, route
from dtft.checkpoint.state import (
    Layout,
    LeafBundle,
    Partition,
    Region,
    Slice,
    Spec,
    leaves_by_spec,
    nbytes_of,
    normal_spec,
    overlap,
    partition_of,
)

Holders = tuple[tuple[int, ...], ...]
"""For each part of a partition (one slice per leaf), the hosts that hold this part, as
ascending positions in `Inventory.hosts`."""


@dataclass(frozen=True, kw_only=True)
class HeldLeaves:
    """Leaves with the same partition spec, and the hosts that hold each part of them.

    A leaf's parts are its equal pieces; each part of a leaf is one slice.
    """

    leaves: tuple[int, ...]
    """Positions of the leaves in the layout of the commit."""
    spec: Spec
    """Mesh axes that divide each dimension of the leaves."""
    holders: Holders


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The hosts with a verified copy of each slice of a commit.

    To save memory, leaves with the same partition spec and the same holders share a
    table.
    """

    layout: Layout = field(repr=False)
    """The layout in which the state was committed."""
    hosts: tuple[str, ...]
    """All hosts that hold a slice, ascending."""
    tables: tuple[HeldLeaves, ...] = field(repr=False)
    """The leaves and their holders; every leaf is in one table."""


def inventory_of(layout: Layout, holders: Mapping[str, Collection[str]]) -> Inventory:
    """Makes an inventory from the holders of each slice, e.g. `Located.holders`.

    Args:
        layout: the layout in which the state was committed.
        holders: slice key, such as "w[0:2]:int8", to the hosts with a verified copy; a
            slice without an entry has no copy.

    In the example, the first part of `w` is held by the hosts at positions 0 and 1 of
    `hosts`, and the second part by no host.

    >>> from dtft.checkpoint.state.slices import Leaf, MeshLayout
    >>> mesh = MeshLayout(axis_names=("fsdp",), axis_sizes=(2,), slots=(0, 1))
    >>> leaf = Leaf(path="w", shape=(4,), dtype="int8", spec=(("fsdp",),))
    >>> layout = Layout(mesh=mesh, leaves=(leaf,))
    >>> found = inventory_of(layout, {"w[0:2]:int8": {"b", "a"}})
    >>> found.hosts, found.tables[0].holders
    (('a', 'b'), ((0, 1), ()))
    """
    hosts = tuple(sorted({host for found in holders.values() for host in found}))
    at = {host: index for index, host in enumerate(hosts)}
    grouped: dict[tuple[Spec, Holders], list[int]] = {}
    for spec, leaves in leaves_by_spec(layout).items():
        partition = partition_of(layout.mesh, spec)
        for leaf in leaves:
            found = tuple(
                tuple(sorted(at[host] for host in set(holders.get(key, ()))))
                for key in _keys(layout, leaf, partition)
            )
            grouped.setdefault((spec, found), []).append(leaf)
    tables = tuple(
        HeldLeaves(leaves=tuple(leaves), spec=spec, holders=found)
        for (spec, found), leaves in grouped.items()
    )
    return Inventory(layout=layout, hosts=hosts, tables=tables)


def check_slots(layout: Layout, slots: Sequence[str | None]) -> None:
    """Checks that `slots` has one entry per slot, each a distinct host or None.

    Raises:
        ValueError: the number of entries is wrong, or a host has two slots.
    """
    hosts = [host for host in slots if host is not None]
    if len(slots) != layout.mesh.num_slots or len(set(hosts)) != len(hosts):
        raise ValueError(
            f"slots names {len(slots)} hosts, {len(set(hosts))} of them distinct, but "
            f"the layout has {layout.mesh.num_slots} slots: give each its own host."
        )


def _keys(layout: Layout, leaf: int, partition: Partition) -> list[str]:
    return [
        partition.slice_of(layout.leaves[leaf], part).key
        for part in range(partition.num_parts)
    ]


MAX_NAMED = 8
"""Largest number of lost slices that `Lost` names."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WantedCells:
    """Cells (overlaps of an old and a new slice) that restoring hosts need.

    The arrays have one entry (a row here) for each pair of a target (a restoring host)
    and a cell that the target needs. A bundle is a group of leaves with the same old
    and the same new partition (`LeafBundle`). One cell of a bundle stands for the same
    overlap in each leaf of the bundle.
    """

    target: np.ndarray
    """[rows] int64: the host that needs the cell, a position in `RestorePlan.hosts`."""
    bundle: np.ndarray
    """[rows] int64: position in `RestorePlan.bundles`."""
    cell: np.ndarray
    """[rows] int64: position in the bundle's `LeafBundle.cells`."""
    nbytes: np.ndarray
    """[rows] int64: bytes of the cell in all leaves of the bundle."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Needed slices that no live host holds; returned in place of a plan.

    `num_slices` and `nbytes` are the number and the bytes of all lost slices.
    """

    slices: tuple[Slice, ...]
    """The first lost slices, at most 8 (`MAX_NAMED`)."""
    num_slices: int
    nbytes: int

    @property
    def reason(self) -> str:
        """Text for messages: number, bytes and names of the lost slices."""
        named = ", ".join(piece.key for piece in self.slices)
        more = "" if self.num_slices == len(self.slices) else ", ..."
        return (
            f"{self.num_slices} needed slices ({self.nbytes} bytes) have no verified "
            f"copy on a live host: {named}{more}"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class FoundCells:
    """The cells (overlaps of an old and a new slice) that restoring hosts need.

    Attributes:
        bundles: groups of leaves with the same old and the same new partition
            (`LeafBundle`), to which the cells belong.
        own: cells that the host that needs them has in its own memory.
        absent: cells that the host that needs them must fetch.
    """

    bundles: tuple[LeafBundle, ...]
    own: WantedCells
    absent: WantedCells
    needs: Needs
    """Rows of `absent` with the hosts that can send each cell."""


def find_needs(
    holdings: Inventory,
    new_layout: Layout,
    hosts: Sequence[str],
    slots: Sequence[str | None],
    alive: Collection[str],
) -> FoundCells | Lost:
    """Computes which bytes each restoring host needs, and which hosts can send them.

    The bytes are given as cells, the overlaps of an old and a new slice.

    Args:
        holdings: the hosts with a verified copy of each slice, in the commit's layout.
        new_layout: the layout to restore.
        hosts: all holders and all hosts in `slots`, ascending; positions in the result
            refer to `hosts`.
        slots: the host of each slot of the new layout; None if the slot needs no
            slices.
        alive: hosts whose copies can be used, by themselves and by other hosts.

    Returns:
        The cells, or the needed slices that no host in `alive` holds.

    Raises:
        ValueError: a leaf of `new_layout` was not committed, its shape or dtype
            differs, or its spec has an unknown axis or does not divide its shape.
    """
    at = {host: index for index, host in enumerate(hosts)}
    number = np.array([at[host] for host in holdings.hosts], np.int64)
    living = np.array([host in alive for host in holdings.hosts], bool)
    seat = np.array([-1 if host is None else at[host] for host in slots], np.int64)
    bundles, holders = _bundles(holdings, new_layout)
    parts, senders = [], _Senders()
    lost: list[tuple[LeafBundle, np.ndarray]] = []
    for index, (bundle, held) in enumerate(zip(bundles, holders, strict=True)):
        part, holder = _flat(held)
        part, holder = part[living[holder]], number[holder[living[holder]]]
        target, cell = _cells_of(bundle, seat)
        old = bundle.cells.old[cell]
        mine = np.isin(old * len(hosts) + target, part * len(hosts) + holder)
        lacking = np.zeros(bundle.old.num_parts, bool)
        lacking[old[~mine]] = True
        wanted = np.flatnonzero(lacking)
        ends = np.searchsorted(part, [wanted, wanted + 1])
        gone = wanted[ends[0] == ends[1]]
        if len(gone):
            lost.append((bundle, gone))
            continue
        sets = [senders.add(holder[a:b]) for a, b in ends.T]
        choice = np.full(len(old), -1)
        choice[~mine] = np.array(sets, np.int64)[np.searchsorted(wanted, old[~mine])]
        parts.append((target, np.full(len(cell), index), cell, choice))
    if lost:
        return _lost(lost)
    return _found(bundles, parts, senders)


class _Senders:
    """The distinct sets of hosts that can send a part of a leaf, numbered from 0.

    `add` returns the number of a set; equal sets have the same number. `sets` has the
    set of each number.
    """

    def __init__(self) -> None:
        self.sets: list[np.ndarray] = []
        self._known: dict[bytes, int] = {}

    def add(self, hosts: np.ndarray) -> int:
        found = self._known.setdefault(hosts.tobytes(), len(self.sets))
        if found == len(self.sets):
            self.sets.append(hosts)
        return found


def _found(
    bundles: tuple[LeafBundle, ...], parts: Sequence[tuple], senders: _Senders
) -> FoundCells:
    empty = (np.zeros(0, np.int64),) * 4
    columns = [np.concatenate(column) for column in zip(empty, *parts, strict=True)]
    target, bundle, cell, choice = columns
    nbytes = np.zeros(len(cell), np.int64)
    for index, one in enumerate(bundles):
        mine = bundle == index
        nbytes[mine] = one.nbytes[cell[mine]]

    def rows(mask: np.ndarray) -> WantedCells:
        return WantedCells(
            target=target[mask],
            bundle=bundle[mask],
            cell=cell[mask],
            nbytes=nbytes[mask],
        )

    own, absent = rows(choice < 0), rows(choice >= 0)
    needs = Needs(
        target=absent.target,
        nbytes=absent.nbytes,
        candidates=choice[choice >= 0],
        senders=senders.sets,
    )
    return FoundCells(bundles=bundles, own=own, absent=absent, needs=needs)


def _lost(found: Sequence[tuple[LeafBundle, np.ndarray]]) -> Lost:
    named = tuple(
        bundle.old.slice_of(leaf, int(part))
        for bundle, parts in found
        for leaf in bundle.leaves[:MAX_NAMED]
        for part in parts[:MAX_NAMED]
    )
    sizes = [
        (len(parts), bundle.old.num_parts, bundle.leaves) for bundle, parts in found
    ]
    return Lost(
        slices=named[:MAX_NAMED],
        num_slices=sum(count * len(leaves) for count, _, leaves in sizes),
        nbytes=sum(
            count * sum(nbytes_of(leaf) // of for leaf in leaves)
            for count, of, leaves in sizes
        ),
    )


def _bundles(
    holdings: Inventory, new_layout: Layout
) -> tuple[tuple[LeafBundle, ...], list[tuple[tuple[int, ...], ...]]]:
    """Groups leaves that have the same old partition, new partition and holders.

    A partition is how a leaf is cut into parts over a mesh. Leaves without elements are
    left out.

    Returns:
        A `LeafBundle` per group; and for each group the holders of every part of the
        old partition, as positions in `holdings.hosts`.
    """
    old_leaves = holdings.layout.leaves
    specs = new_specs(holdings.layout, new_layout)
    old_mesh, new_mesh = holdings.layout.mesh, new_layout.mesh
    new = {spec: partition_of(new_mesh, spec) for spec in set(specs.values())}
    old: dict[Spec, Partition] = {}
    bundles, holders, cells = [], [], {}
    for table in holdings.tables:
        if table.spec not in old:
            old[table.spec] = partition_of(old_mesh, table.spec)
        grouped: dict[Spec, list[int]] = {}
        for leaf in table.leaves:
            if leaf in specs and nbytes_of(old_leaves[leaf]):
                grouped.setdefault(specs[leaf], []).append(leaf)
        for spec, leaves in grouped.items():
            pair = old[table.spec], new[spec]
            if (table.spec, spec) not in cells:
                cells[table.spec, spec] = overlap(*pair)
            bundles.append(
                LeafBundle(
                    leaves=tuple(old_leaves[leaf] for leaf in leaves),
                    old=pair[0],
                    new=pair[1],
                    cells=cells[table.spec, spec],
                )
            )
            holders.append(table.holders)
    return tuple(bundles), holders


def new_specs(old_layout: Layout, new_layout: Layout) -> dict[int, Spec]:
    """Returns the mesh axes that divide each leaf of `new_layout`.

    Returns:
        Maps the leaf's position in `old_layout.leaves` to its partition spec, without
        the axes that divide nothing (`normal_spec`).

    Raises:
        ValueError: a leaf was not committed, its shape or dtype differs, or its new
            spec has an unknown axis or does not divide its shape.
    """
    known: Mapping[str, int] = {
        leaf.path: index for index, leaf in enumerate(old_layout.leaves)
    }
    specs = {}
    for leaf in new_layout.leaves:
        if leaf.path not in known:
            raise ValueError(
                f"new_layout has leaf {leaf.path!r}, which was not committed. Restore "
                "the leaves that were, and make the others anew."
            )
        old = old_layout.leaves[known[leaf.path]]
        if (old.shape, old.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"leaf {leaf.path!r} is {leaf.dtype}{list(leaf.shape)} in new_layout, "
                f"but {old.dtype}{list(old.shape)} was committed. Only how a leaf is "
                "divided may change: convert it after the restore."
            )
        specs[known[leaf.path]] = normal_spec(new_layout.mesh, leaf)
    return specs


def _flat(held: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Flattens the holders of each part of a leaf to pairs of part and holder.

    `held` has the holders of each part, as positions of hosts. Returns two arrays,
    [pairs] part and [pairs] holder, sorted by part, then holder.
    """
    lengths = [len(found) for found in held]
    holder = np.fromiter((h for found in held for h in found), np.int64, sum(lengths))
    return np.repeat(np.arange(len(held)), lengths), holder


def _cells_of(bundle: LeafBundle, seat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lists the cells (overlaps of an old and a new part) that each host needs.

    Args:
        bundle: the leaves; all have the same cells.
        seat: [slots] number of each slot's host; -1 for a slot without a host.

    Returns:
        Two arrays with an entry for each pair of a host and a cell that it needs:
        [pairs] number of the host, [pairs] position of the cell in `bundle.cells`.
    """
    part, slot = bundle.new.owned
    part, slot = part[seat[slot] >= 0], slot[seat[slot] >= 0]
    by_part = np.argsort(bundle.cells.new, kind="stable")
    ordered = bundle.cells.new[by_part]
    first, last = np.searchsorted(ordered, [part, part + 1])
    lengths = last - first
    ends = np.cumsum(lengths)
    within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
    return seat[np.repeat(slot, lengths)], by_part[np.repeat(first, lengths) + within]


WHOLE_BYTES = 64 << 20
"""Size in bytes up to which a piece of a slice is restored from one sender. If a piece
is cut between senders, each sends whole chunks, 4 MiB by default, so cuts of small
pieces would cost many extra bytes."""
GRAINS = 64
"""Pieces of at most 1/64 (1 / `GRAINS`) of the mean bytes per sender are restored from
one sender, too, because the loads of senders are nearly even without cutting them."""


@dataclass(frozen=True, kw_only=True)
class SliceTransfer:
    """The parts of slices (regions) that one host fetches from another host."""

    source: str
    target: str
    regions: tuple[Region, ...]
    """The regions, sorted by the key of the moved slice."""

    @property
    def nbytes(self) -> int:
        """Bytes of all regions; a transfer of whole chunks can have more bytes."""
        return sum(region.moved.nbytes for region in self.regions)


@dataclass(frozen=True, eq=False, kw_only=True)
class RestorePlan:
    """The source of each byte that a host needs: the host's own memory or one peer.

    The plan is stored as arrays; the parts of slices (regions) that a host takes are
    computed on demand. `bundles` are groups of leaves with the same old and the same
    new partition. Leaves without elements are not part of the plan. The methods raise
    ValueError for a host that is not in `hosts`.
    """

    hosts: tuple[str, ...]
    """All hosts that hold a slice of the commit or need slices, ascending."""
    bundles: tuple[LeafBundle, ...]
    own_cells: WantedCells
    """Cells (overlaps of an old and a new slice) that a target has in its memory."""
    absent_cells: WantedCells
    """Cells that a target must fetch from other hosts."""
    routes: Routes
    """Byte ranges of the absent cells and their senders; sorted by target, then source.
    """

    def own(self, host: str) -> tuple[Region, ...]:
        """Returns the regions (parts of slices) that a host needs and has in memory."""
        wanted, rows = self.own_cells, self._own_rows(host)
        return _ordered(
            region
            for bundle, cell in zip(wanted.bundle[rows], wanted.cell[rows], strict=True)
            for region in self.bundles[bundle].regions(
                cell, 0, int(self.bundles[bundle].nbytes[cell])
            )
        )

    def read_by(self, host: str) -> list[str]:
        """Returns the keys, sorted, of the committed slices that a host needs bytes of.

        Includes the committed slices in the host's own memory.
        """
        fetched = (it for one in self.transfers_to(host) for it in one.regions)
        return sorted({region.old.key for region in (*self.own(host), *fetched)})

    def moves_whole(self, host: str) -> bool:
        """Whether each slice that a host needs equals a committed slice of one source.

        The source is the host's own memory or one sender. False if a slice must be put
        together from several slices or senders, or cut out of a larger one.
        """
        own = np.unique(self.own_cells.bundle[self._own_rows(host)])
        fetched = (it for one in self.transfers_to(host) for it in one.regions)
        return all(self.bundles[index].unchanged for index in own) and all(
            region.whole for region in fetched
        )

    def transfers_to(self, host: str) -> tuple[SliceTransfer, ...]:
        """Returns the transfers to a host, sorted by source; () if it needs none."""
        at = self._at(host)
        first, last = np.searchsorted(self._targets, [at, at + 1])
        found: dict[int, list[Region]] = {}
        for index in range(first, last):
            found.setdefault(int(self.routes.source[index]), []).extend(
                self._regions(index)
            )
        return tuple(
            SliceTransfer(
                source=self.hosts[source], target=host, regions=_ordered(regions)
            )
            for source, regions in sorted(found.items())
        )

    @property
    def transfers(self) -> tuple[SliceTransfer, ...]:
        """All transfers, by target, then source; at most one for each pair of hosts."""
        targets = [self.hosts[at] for at in np.unique(self._targets)]
        return tuple(found for host in targets for found in self.transfers_to(host))

    @functools.cached_property
    def sent(self) -> Mapping[str, int]:
        """Maps each sending host to the bytes that the host sends."""
        sent = np.zeros(len(self.hosts), np.int64)
        np.add.at(sent, self.routes.source, self.routes.stop - self.routes.start)
        return {self.hosts[at]: int(sent[at]) for at in np.flatnonzero(sent)}

    def receivers(self, source: str) -> frozenset[str]:
        """Returns the hosts that fetch bytes from the host `source`."""
        rows = self.routes.source == self._at(source)
        return frozenset(self.hosts[at] for at in np.unique(self._targets[rows]))

    def _own_rows(self, host: str) -> np.ndarray:
        at = self._at(host)
        order, targets = self._own_order
        return order[slice(*np.searchsorted(targets, [at, at + 1]))]

    @functools.cached_property
    def _own_order(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.own_cells.target, kind="stable")
        return order, self.own_cells.target[order]

    @functools.cached_property
    def _targets(self) -> np.ndarray:
        return self.absent_cells.target[self.routes.need]

    def _at(self, host: str) -> int:
        if host not in self._index:
            raise ValueError(
                f"host={host!r} is not in this plan. Allowed: {self.hosts[:4]} ..."
            )
        return self._index[host]

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {host: index for index, host in enumerate(self.hosts)}

    def _regions(self, index: int) -> Iterator[Region]:
        need = self.routes.need[index]
        return self.bundles[self.absent_cells.bundle[need]].regions(
            int(self.absent_cells.cell[need]),
            int(self.routes.start[index]),
            int(self.routes.stop[index]),
        )


def plan_restore(
    holdings: Inventory,
    new_layout: Layout,
    *,
    slots: Sequence[str | None],
    alive: Collection[str],
    domains: Mapping[str, str] | None = None,
    whole_bytes: int = WHOLE_BYTES,
) -> RestorePlan | Lost:
    """Plans all transfers of a restore, onto any mesh and sharding.

    A host uses its own memory first. The bytes that hosts lack are divided over the
    hosts that hold them, as evenly as possible. A large piece of a slice may have
    several senders. Senders in the target's failure domain are preferred as long as no
    host sends more than 1.2 times (`sender_assignment.MAX_UNEVEN`) the most that a host
    sends without this preference.

    Args:
        holdings: the hosts with a verified copy of each slice, in the commit's layout.
        new_layout: the layout to restore; its leaves are all or some leaves of the
            commit.
        slots: the host of each slot of the new layout; None if the slot needs no
            slices.
        alive: hosts that can send; all hosts in `slots` count as alive.
        domains: host to its failure domain, "power/rack"; a host without an entry is
            near to no other host.
        whole_bytes: size in bytes up to which a piece of a slice has a single sender.

    Returns:
        The plan, or the needed slices that no live host holds.

    Raises:
        ValueError: `slots` does not have one distinct host or None per slot; or a leaf
            of `new_layout` was not committed, its shape or dtype differs, or its spec
            has an unknown axis or does not divide its shape.
    """
    check_slots(new_layout, slots)
    targets = {host for host in slots if host is not None}
    hosts = tuple(sorted({*holdings.hosts, *targets}))
    found = find_needs(holdings, new_layout, hosts, slots, {*alive, *targets})
    if isinstance(found, Lost):
        return found
    grain = whole_bytes
    if len(found.needs.target):
        senders = len(np.unique(np.concatenate(found.needs.senders)))
        grain = max(grain, int(found.needs.nbytes.sum()) // (senders * GRAINS))
        routes = route(found.needs, _numbered(hosts, domains or {}))
    else:
        nothing = np.zeros(0, np.int64)
        routes = Routes(need=nothing, source=nothing, start=nothing, stop=nothing)
    return RestorePlan(
        hosts=hosts,
        bundles=found.bundles,
        own_cells=found.own,
        absent_cells=found.absent,
        routes=_settled(routes, found.absent, found.bundles, grain),
    )


def _settled(
    routes: Routes, absent: WantedCells, bundles: Sequence[LeafBundle], grain: int
) -> Routes:
    """Changes routes so that they begin and end only where cells can be cut.

    A route is a byte range of a cell with its sender. A cell is the overlap of an old
    and a new slice, for all leaves of a bundle. A cell can be cut only at some offsets;
    a piece is the bytes between two neighbouring offsets. If the given routes divide a
    piece among several senders, one of these senders sends the whole piece instead.

    These pieces are assigned one by one, the largest first. Each goes to that one of
    its senders with the largest deficit: the bytes that the given routes let the sender
    send of this piece and the pieces before, minus the bytes of the pieces that it got.

    Args:
        routes: the byte ranges of all cells in `absent`.
        absent: the cells that hosts must fetch.
        bundles: the groups of leaves to which the cells belong.
        grain: size in bytes up to which a leaf's part of a cell is not cut.

    Returns:
        The changed routes, sorted by target, then source.
    """
    need, names = routes.need, routes.source.tolist()
    right = np.flatnonzero(routes.start)  # rows that continue the need of the row above
    low, high = _cuts(right, routes, absent, bundles, grain)
    pieces: dict[tuple[int, int, int], list[int]] = {}
    piece_of = zip(need[right].tolist(), low.tolist(), high.tolist(), strict=True)
    for index, piece in enumerate(piece_of):
        pieces.setdefault(piece, []).append(index)
    behind = dict.fromkeys(names, 0)  # bytes
    sizes, ends = (high - low).tolist(), low.copy()
    for found in sorted(pieces.values(), key=lambda them: -sizes[them[0]]):
        first = found[0]
        rows = range(int(right[first]) - 1, int(right[found[-1]]) + 1)
        inside = np.minimum(routes.stop[rows], high[first])
        inside -= np.maximum(routes.start[rows], low[first])
        for row, share in zip(rows, inside.tolist(), strict=True):
            behind[names[row]] += share
        best = max(rows, key=lambda row: behind[names[row]])
        behind[names[best]] -= sizes[first]
        for index in found:
            ends[index] = (high if right[index] > best else low)[index]
    start, stop = routes.start.copy(), routes.stop.copy()
    start[right] = stop[right - 1] = ends
    order = np.lexsort((need, routes.source, absent.target[need]))
    order = order[start[order] < stop[order]]
    return Routes(
        need=need[order],
        source=routes.source[order],
        start=start[order],
        stop=stop[order],
    )


def _cuts(
    rows: np.ndarray,
    routes: Routes,
    absent: WantedCells,
    bundles: Sequence[LeafBundle],
    grain: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the offsets, nearest to starts of routes, at which cells can be cut.

    Args:
        rows: [n] positions of some routes in `routes`, whose starts are used.
        routes: byte ranges of cells, with a sender each.
        absent: the cells (overlaps of an old and a new slice) of the routes.
        bundles: the groups of leaves to which the cells belong.
        grain: size in bytes up to which a leaf's part of a cell is not cut.

    Returns:
        [n] offsets at or before the start of each route, and [n] at or after it, in
        bytes of the cell; both equal the start if the cell can be cut there.
    """
    need, offset = routes.need[rows], routes.start[rows]
    low, high = offset.copy(), offset.copy()
    for index in np.unique(absent.bundle[need]):
        at = np.flatnonzero(absent.bundle[need] == index)
        cells = absent.cell[need[at]]
        low[at], high[at] = bundles[index].cuts(cells, offset[at], grain)
    return low, high


def _numbered(hosts: Sequence[str], domains: Mapping[str, str]) -> np.ndarray:
    """Numbers the failure domain of each host at each level: [hosts, levels] int64.

    Equal numbers mean the same domain. The widest level is first. A host that is not in
    `domains` has domains of its own. Without domains there are no levels.
    """
    # A host without a domain gets a unique name that no domain can have.
    names = [domains.get(host, f"\0{host}").split("/") for host in hosts]
    num_levels = max(len(name) for name in names) if domains else 0
    numbers = np.zeros((len(hosts), num_levels), np.int64)
    for level in range(num_levels):
        known: dict[tuple[str, ...], int] = {}
        for row, name in zip(numbers, names, strict=True):
            row[level] = known.setdefault(tuple(name[: level + 1]), len(known))
    return numbers


def _ordered(regions: Iterator[Region] | list[Region]) -> tuple[Region, ...]:
    return tuple(sorted(regions, key=lambda region: region.moved.key))
