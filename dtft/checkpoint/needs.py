"""What every host needs of a new layout: what it has itself, and what it lacks.

Decides which pieces of committed slices make up the slices of the new layout, and who
could send each. Must not know who will send it, nor how loads are shared.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.inventory import Inventory
from dtft.checkpoint.overlap import Bundle, overlap
from dtft.checkpoint.partition import (
    Partition,
    Spec,
    nbytes_of,
    normal_spec,
    partition_of,
)
from dtft.checkpoint.routes import Needs
from dtft.checkpoint.slices import Layout, Slice

MAX_NAMED = 8
"""Lost slices that are named one by one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Wanted:
    """Cells that targets want, one row for each target and cell."""

    target: np.ndarray
    """[rows] int64: position in the plan's hosts."""
    bundle: np.ndarray
    """[rows] int64: position in the plan's bundles."""
    cell: np.ndarray
    """[rows] int64: position in the bundle's cells."""
    nbytes: np.ndarray
    """[rows] int64: bytes of the cell, all leaves of the bundle."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Why no plan exists: needed slices that no live host holds."""

    slices: tuple[Slice, ...]
    """The first of them."""
    num_slices: int
    nbytes: int

    @property
    def reason(self) -> str:
        """For messages."""
        named = ", ".join(piece.key for piece in self.slices)
        more = "" if self.num_slices == len(self.slices) else ", ..."
        return (
            f"{self.num_slices} needed slices ({self.nbytes} bytes) have no verified "
            f"copy on a live host: {named}{more}"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """Everything that is needed."""

    bundles: tuple[Bundle, ...]
    own: Wanted
    absent: Wanted
    needs: Needs
    """Row by row as `absent`."""


def find_needs(
    holdings: Inventory,
    new_layout: Layout,
    hosts: Sequence[str],
    slots: Sequence[str | None],
    alive: Collection[str],
) -> Found | Lost:
    """Compares what is needed with what is held.

    Args:
        holdings: verified holders, in the layout of the commit.
        new_layout: what is needed.
        hosts: all hosts, ascending; positions in the result refer to them.
        slots: the host of each slot of the new layout, None where nothing is needed.
        alive: hosts that can send.

    Raises:
        ValueError: a leaf of the new layout is not one of the commit's.
    """
    at = {host: index for index, host in enumerate(hosts)}
    number = np.array([at[host] for host in holdings.hosts], np.int64)
    living = np.array([host in alive for host in holdings.hosts], bool)
    seat = np.array([-1 if host is None else at[host] for host in slots], np.int64)
    bundles, holders = _bundles(holdings, new_layout)
    parts, senders = [], _Senders()
    lost: list[tuple[Bundle, np.ndarray]] = []
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
    """Distinct sets of hosts."""

    def __init__(self) -> None:
        self.sets: list[np.ndarray] = []
        self._known: dict[bytes, int] = {}

    def add(self, hosts: np.ndarray) -> int:
        found = self._known.setdefault(hosts.tobytes(), len(self.sets))
        if found == len(self.sets):
            self.sets.append(hosts)
        return found


def _found(
    bundles: tuple[Bundle, ...], parts: Sequence[tuple], senders: _Senders
) -> Found:
    empty = (np.zeros(0, np.int64),) * 4
    columns = [np.concatenate(column) for column in zip(empty, *parts, strict=True)]
    target, bundle, cell, choice = columns
    nbytes = np.zeros(len(cell), np.int64)
    for index, one in enumerate(bundles):
        mine = bundle == index
        nbytes[mine] = one.nbytes[cell[mine]]

    def rows(mask: np.ndarray) -> Wanted:
        return Wanted(
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
    return Found(bundles=bundles, own=own, absent=absent, needs=needs)


def _lost(found: Sequence[tuple[Bundle, np.ndarray]]) -> Lost:
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
) -> tuple[tuple[Bundle, ...], list[tuple[tuple[int, ...], ...]]]:
    """Leaves that are divided alike, before and after, and held alike; the holders."""
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
                Bundle(
                    leaves=tuple(old_leaves[leaf] for leaf in leaves),
                    old=pair[0],
                    new=pair[1],
                    cells=cells[table.spec, spec],
                )
            )
            holders.append(table.holders)
    return tuple(bundles), holders


def new_specs(old_layout: Layout, new_layout: Layout) -> dict[int, Spec]:
    """For each needed leaf, as a position in the old layout, how it is now divided.

    Raises:
        ValueError: a leaf was not committed, or has another shape or dtype now.
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
    """([pairs] part, [pairs] holder), by part, then holder."""
    lengths = [len(found) for found in held]
    holder = np.fromiter((h for found in held for h in found), np.int64, sum(lengths))
    return np.repeat(np.arange(len(held)), lengths), holder


def _cells_of(bundle: Bundle, seat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([rows] target, [rows] cell): the cells of the parts of slots with a host."""
    part, slot = bundle.new.owned
    part, slot = part[seat[slot] >= 0], slot[seat[slot] >= 0]
    by_part = np.argsort(bundle.cells.new, kind="stable")
    ordered = bundle.cells.new[by_part]
    first, last = np.searchsorted(ordered, [part, part + 1])
    lengths = last - first
    ends = np.cumsum(lengths)
    within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
    return seat[np.repeat(slot, lengths)], by_part[np.repeat(first, lengths) + within]
