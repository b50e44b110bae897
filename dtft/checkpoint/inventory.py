"""Which hosts hold which slices of a commit, verified.

The compact form of what hosts report slice by slice: leaves whose parts have the same
holders share one table. Pure values.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dtft.checkpoint.partition import Partition, Spec, leaves_by_spec, partition_of
from dtft.checkpoint.slices import Layout

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
    tables = tuple(
        HeldLeaves(leaves=tuple(leaves), spec=spec, holders=found)
        for (spec, found), leaves in grouped.items()
    )
    return Inventory(layout=layout, hosts=hosts, tables=tables)


def check_slots(layout: Layout, slots: Sequence[str | None]) -> None:
    """Checks that each slot has one host, or None.

    Raises:
        ValueError: there are too few or too many, or a host has two slots.
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
