"""Which hosts hold which slices of a commit, verified.

The compact form of holdings: leaves whose parts have the same holders share one table.
Made from what hosts report slice by slice, or from a placement and the hosts of its
slots. Pure values; must not know who is alive, steps, digests or addresses.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dtft.checkpoint.partition import Partition, Spec, leaves_by_spec, partition_of
from dtft.checkpoint.placement import Placement
from dtft.checkpoint.slices import Layout, Slice

Holders = tuple[tuple[int, ...], ...]
"""Per part the hosts that hold it: positions in `Inventory.hosts`, ascending."""


@dataclass(frozen=True, kw_only=True)
class HeldLeaves:
    """Leaves that are divided alike and whose parts have the same holders."""

    leaves: tuple[int, ...]
    """Positions in `layout.leaves`."""
    spec: Spec
    """How they are divided."""
    holders: Holders


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Verified holders of every slice of a commit."""

    layout: Layout = field(repr=False)
    """The layout in which the state was committed."""
    hosts: tuple[str, ...]
    """Everyone who holds something, ascending."""
    tables: tuple[HeldLeaves, ...] = field(repr=False)
    """Every leaf in one table."""


def inventory_of(layout: Layout, holders: Mapping[str, Collection[str]]) -> Inventory:
    """From what was reported slice by slice, e.g. `Located.holders`.

    Args:
        layout: in which the state was committed.
        holders: slice key to the hosts with a verified copy; absent means none.

    >>> from dtft.checkpoint.slices import Leaf, MeshLayout
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
    return _inventory(layout, hosts, grouped)


def inventory_at(
    placement: Placement,
    slots: Sequence[str],
    unverified: Mapping[str, Collection[Slice]] | None = None,
) -> Inventory:
    """From where a placement puts the copies.

    Args:
        placement: with which the state was committed.
        slots: the host of each slot then, e.g. `Commit.holders`.
        unverified: host to the slices that it should hold but whose copy never arrived
            or failed its check. They do not count.

    Raises:
        ValueError: `slots` does not name one host per slot.
    """
    layout = placement.layout
    check_slots(layout, slots)
    hosts = tuple(sorted(slots))
    at = {host: index for index, host in enumerate(hosts)}
    seat = [at[host] for host in slots]
    partitions = {t.spec: partition_of(layout.mesh, t.spec) for t in placement.tables}
    absent = _absent(layout, at, unverified or {})
    grouped: dict[tuple[Spec, Holders], list[int]] = {}
    for table in placement.tables:
        partition = partitions[table.spec]
        found = tuple(
            tuple(sorted(seat[slot] for slot in owners + targets))
            for owners, targets in zip(partition.owners, table.targets, strict=True)
        )
        # One look-up for all whole leaves: hashing thousands of holders is not free.
        whole = [leaf for leaf in table.leaves if leaf not in absent]
        if whole:
            grouped.setdefault((table.spec, found), []).extend(whole)
        for leaf in sorted(absent.keys() & set(table.leaves)):
            held = _without(layout, leaf, partition, found, absent[leaf])
            grouped.setdefault((table.spec, held), []).append(leaf)
    return _inventory(layout, hosts, grouped)


def check_slots(layout: Layout, slots: Sequence[str]) -> None:
    """Checks that there is one host for each slot.

    Raises:
        ValueError: there are too few or too many, or a host has two slots.
    """
    if len(slots) != layout.mesh.num_slots or len(set(slots)) != len(slots):
        raise ValueError(
            f"slots names {len(slots)} hosts, {len(set(slots))} of them distinct, but "
            f"the layout has {layout.mesh.num_slots} slots: give each its own host."
        )


def _keys(layout: Layout, leaf: int, partition: Partition) -> list[str]:
    return [
        partition.slice_of(layout.leaves[leaf], part).key
        for part in range(partition.num_parts)
    ]


def _absent(
    layout: Layout, at: Mapping[str, int], unverified: Mapping[str, Collection[Slice]]
) -> dict[int, set[tuple[Slice, int]]]:
    """Leaf -> (slice, host) pairs that do not count."""
    leaf_of = {leaf.path: index for index, leaf in enumerate(layout.leaves)}
    absent: dict[int, set[tuple[Slice, int]]] = {}
    for host, pieces in unverified.items():
        for piece in pieces:
            if host in at and piece.path in leaf_of:
                absent.setdefault(leaf_of[piece.path], set()).add((piece, at[host]))
    return absent


def _without(
    layout: Layout,
    leaf: int,
    partition: Partition,
    held: Holders,
    absent: Collection[tuple[Slice, int]],
) -> Holders:
    whole = layout.leaves[leaf]
    return tuple(
        tuple(h for h in hosts if (partition.slice_of(whole, part), h) not in absent)
        for part, hosts in enumerate(held)
    )


def _inventory(
    layout: Layout,
    hosts: tuple[str, ...],
    grouped: Mapping[tuple[Spec, Holders], list[int]],
) -> Inventory:
    tables = tuple(
        HeldLeaves(leaves=tuple(leaves), spec=spec, holders=holders)
        for (spec, holders), leaves in grouped.items()
    )
    return Inventory(layout=layout, hosts=hosts, tables=tables)
