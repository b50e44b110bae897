"""Layouts, holdings and checks for restores onto another layout."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.replication.restore_plan import (
    Inventory,
    RestorePlan,
    inventory_of,
    plan_restore,
)
from dtft.checkpoint.state.partition import partition_of
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout, Slice

SMALL = 64 * 1024
"""Bytes that are not cut between senders: the leaves here are small, too."""

Specs = Mapping[str, tuple[tuple[str, ...], ...]]

SPECS = [
    (),
    (("fsdp",),),
    (("replica", "fsdp"),),
    (("fsdp", "replica"), ("tensor",)),
    ((), ("tensor",)),
    (("tensor",), ("fsdp",)),
]
"""How leaves of `layouts` may be divided."""

EXTRA = (
    Leaf(path="scalar", shape=(), dtype="int32"),
    Leaf(path="empty", shape=(0, 12), dtype="int8", spec=(("fsdp",), ("tensor",))),
    # Large enough to be cut between senders.
    Leaf(path="large", shape=(1536, 24), dtype="float32", spec=((), ("fsdp",))),
)
"""Leaves that every one of `layouts` has."""


def layout_of(
    axes: Mapping[str, int],
    specs: Specs,
    *,
    shape: tuple[int, ...] = (24, 12),
    per_host: int = 1,
    order: Sequence[int] | None = None,
) -> Layout:
    """A layout: axis sizes, and for each leaf its spec; `order` permutes the slots."""
    num_slots = math.prod(axes.values()) // per_host
    order = order or range(num_slots)
    mesh = MeshLayout(
        axis_names=tuple(axes),
        axis_sizes=tuple(axes.values()),
        slots=tuple(order[i // per_host] for i in range(num_slots * per_host)),
    )
    return Layout(
        mesh=mesh,
        leaves=tuple(
            Leaf(path=path, shape=shape, dtype="float32", spec=spec)
            for path, spec in specs.items()
        ),
    )


def hosts(num: int, first: int = 0) -> list[str]:
    return [f"h{i:02}" for i in range(first, first + num)]


def held_at(
    layout: Layout,
    slots: Sequence[str],
    copies: int = 1,
    without: Collection[tuple[str, Slice]] = (),
) -> Inventory:
    """What the hosts of these slots hold, but for some (host, slice)."""
    placed = place_copies(layout, copies).holders.items()
    holders = {
        piece.key: {slots[at] for at in found if (slots[at], piece) not in without}
        for piece, found in placed
    }
    return inventory_of(layout, holders)


def restore(
    old: Layout,
    old_slots: Sequence[str],
    new: Layout,
    new_slots: Sequence[str],
    *,
    copies: int = 1,
    dead: Sequence[str] = (),
    domains: Mapping[str, str] | None = None,
    whole_bytes: int = SMALL,
) -> RestorePlan:
    """A checked plan."""
    holdings = held_at(old, old_slots, copies)
    alive = set(old_slots) - set(dead)
    plan = plan_restore(
        holdings,
        new,
        slots=new_slots,
        alive=alive,
        domains=domains,
        whole_bytes=whole_bytes,
    )
    assert isinstance(plan, RestorePlan), plan.reason
    check(plan, holdings, new, new_slots, alive)
    return plan


def check(
    plan: RestorePlan,
    holdings: Inventory,
    new: Layout,
    slots: Sequence[str],
    alive: set[str],
) -> None:
    """Every needed element exactly once, from a live host that holds it."""
    held = holders_of(holdings)
    for slot, host in enumerate(slots):
        counts = {
            piece: np.zeros(piece.shape, np.int8)
            for piece in new.slices(slot)
            if piece.nbytes
        }
        fetched = plan.transfers_to(host)
        assert [t.source for t in fetched] == sorted({t.source for t in fetched})
        sources = [(host, plan.own(host)), *((t.source, t.regions) for t in fetched)]
        for source, regions in sources:
            for region in regions:
                assert source in held[region.old]
                assert source == host or source in alive
                assert source == host or host not in held[region.old]
                counts[region.new][within(region.moved, region.new)] += 1
                assert within(region.moved, region.old) is not None
        assert all((count == 1).all() for count in counts.values())


def within(inner: Slice, outer: Slice) -> tuple[slice, ...]:
    """The index of a slice in a larger one of the same leaf."""
    assert (inner.path, inner.dtype) == (outer.path, outer.dtype)
    assert all(a >= b for a, b in zip(inner.start, outer.start, strict=True))
    assert all(a <= b for a, b in zip(inner.stop, outer.stop, strict=True))
    ranges = zip(inner.start, inner.stop, outer.start, strict=True)
    return tuple(slice(a - base, b - base) for a, b, base in ranges)


def holders_of(holdings: Inventory) -> dict[Slice, set[str]]:

    return {
        partition_of(holdings.layout.mesh, table.spec).slice_of(
            holdings.layout.leaves[leaf], part
        ): {holdings.hosts[h] for h in found}
        for table in holdings.tables
        for leaf in table.leaves
        for part, found in enumerate(table.holders)
    }


def routes_of(plan: RestorePlan) -> set[tuple[str, str]]:
    """(source, target) pairs."""
    return {(t.source, t.target) for t in plan.transfers}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of six leaves; hosts have one device or more, in any order."""
    axes = {
        "replica": draw(st.sampled_from([1, 2, 3])),
        "fsdp": draw(st.sampled_from([1, 2, 3, 4])),
        "tensor": draw(st.sampled_from([1, 2])),
    }
    num_devices = axes["replica"] * axes["fsdp"] * axes["tensor"]
    per_host = draw(st.sampled_from([n for n in (1, 2, 4) if num_devices % n == 0]))
    order = draw(st.permutations(range(num_devices // per_host)))
    specs = {f"w{i}": draw(st.sampled_from(SPECS)) for i in range(3)}
    layout = layout_of(axes, specs, shape=(72, 24), per_host=per_host, order=order)
    return dataclasses.replace(layout, leaves=(*layout.leaves, *EXTRA))
