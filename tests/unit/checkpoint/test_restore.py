"""Any layout onto any other: exactly once, never from the dead, evenly, repeatably."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.replication.restore_plan import (
    WHOLE_BYTES,
    Lost,
    RestorePlan,
    inventory_of,
    plan_restore,
)
from dtft.checkpoint.replication.sender_assignment import Demand, share_out
from dtft.checkpoint.state.slices import Layout, Leaf
from tests.support.restores import (
    SMALL,
    check,
    held_at,
    hosts,
    layout_of,
    layouts,
    restore,
)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Layout, list[str], Layout, list[str], set[str]]:
    """Old layout and hosts, new layout and hosts, and who is dead."""
    old, new = draw(layouts()), draw(layouts())
    before = hosts(old.mesh.num_slots)
    dead = draw(st.sets(st.sampled_from(before), max_size=2))
    pool = [h for h in hosts(2 * 24) if h not in dead][: new.mesh.num_slots + 3]
    after = draw(st.permutations(pool))[: new.mesh.num_slots]
    return old, before, new, after, dead


@given(moves(), st.integers(1, 3), st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_byte_exactly_once_from_live_holders(
    move: tuple[Layout, list[str], Layout, list[str], set[str]],
    copies: int,
    racks: bool,
) -> None:
    old, before, new, after, dead = move
    holdings = held_at(old, before, copies)
    alive = set(before) - dead
    domains = {h: f"r{i % 3}" for i, h in enumerate(before)} if racks else None

    def plan() -> RestorePlan | Lost:
        return plan_restore(
            holdings,
            new,
            slots=after,
            alive=alive,
            domains=domains,
            whole_bytes=SMALL,
        )

    found = plan()
    if isinstance(found, Lost):
        assert found.slices and len(dead) >= place_copies(old, copies).effective_copies
        return
    check(found, holdings, new, after, alive)
    again = plan()
    assert isinstance(again, RestorePlan) and again.transfers == found.transfers
    total = sum(t.nbytes for t in found.transfers)
    assert total == sum(found.sent.values())
    for host in found.hosts:
        targets = {t.target for t in found.transfers if t.source == host}
        assert found.receivers(host) == targets


@given(st.integers(2, 8), st.integers(1, 8), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_load_is_within_a_fifth_of_even(holders: int, new: int, leaves: int) -> None:
    specs = {f"w{i}": () for i in range(leaves)}
    shape = (4096, 1024)
    old = layout_of({"replica": holders}, specs, shape=shape)
    wide = layout_of({"replica": new}, specs, shape=shape)
    holdings = held_at(old, hosts(holders))
    plan = plan_restore(
        holdings,
        wide,
        slots=hosts(new, 50),
        alive=hosts(holders),
        whole_bytes=SMALL,
    )
    assert isinstance(plan, RestorePlan)
    even = leaves * new * 4096 * 1024 * 4 / holders
    assert len(plan.sent) == holders
    assert max(plan.sent.values()) <= 1.2 * even


@st.composite
def losses(draw: st.DrawFn) -> tuple[Layout, dict[str, list[str]], list[str]]:
    """A layout, who holds each slice, and the hosts that have its slots now."""
    layout = draw(layouts())
    before = hosts(layout.mesh.num_slots)
    new = draw(st.sets(st.sampled_from(range(len(before)))))
    slots = [f"new{i}" if i in new else host for i, host in enumerate(before)]
    some = st.lists(st.sampled_from(before), min_size=1, max_size=3, unique=True)
    return layout, {piece.key: draw(some) for piece in layout.owners}, slots


@given(losses())
@settings(max_examples=25, deadline=None)
def test_slices_that_stay_what_they_are_move_whole_and_once(
    loss: tuple[Layout, dict[str, list[str]], list[str]],
) -> None:
    layout, holders, slots = loss
    holdings = inventory_of(layout, holders)
    alive = set(holdings.hosts)
    plan = plan_restore(holdings, layout, slots=slots, alive=alive)
    assert isinstance(plan, RestorePlan)
    check(plan, holdings, layout, slots, alive)
    for host in slots:
        assert plan.moves_whole(host)
        assert all(it.whole for t in plan.transfers_to(host) for it in t.regions)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_whole_slices_are_shared_evenly(sizes: list[int], holders: int) -> None:
    leaves = tuple(
        Leaf(path=f"p{i:02}", shape=(size,), dtype="int8")
        for i, size in enumerate(sizes)
    )
    layout = dataclasses.replace(layout_of({"replica": 5}, {}), leaves=leaves)
    able = hosts(holders)
    holdings = inventory_of(layout, {piece.key: able for piece in layout.owners})
    slots: list[str | None] = [None, None, "spare", None, None]
    plan = plan_restore(holdings, layout, slots=slots, alive=able)
    assert isinstance(plan, RestorePlan) and {t.target for t in plan.transfers} == {
        "spare"
    }
    assert sum(plan.sent.values()) == sum(sizes)
    assert max(plan.sent.values()) <= sum(sizes) / holders + max(sizes)


def test_a_slice_too_large_for_one_sender_is_cut() -> None:
    layout = layout_of({"replica": 3}, {"w": ()}, shape=(1 << 16, 1 << 10))
    plan = restore(
        layout,
        hosts(3),
        layout,
        ["spare", *hosts(2, 1)],
        dead=["h00"],
        whole_bytes=WHOLE_BYTES,
    )
    assert plan.sent == {"h01": 1 << 27, "h02": 1 << 27}
    assert not plan.moves_whole("spare") and plan.moves_whole("h01")
    assert plan.read_by("spare") == [layout.slices(0)[0].key]


@given(st.integers(2, 4), st.integers(2, 4), st.integers(2, 6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_load_is_even_over_groups_and_racks(
    replicas: int, shards: int, racks: int, domains: bool
) -> None:
    specs = {f"w{i}": (("fsdp",),) for i in range(4)}
    shape = (1200, 1024)
    old = layout_of({"replica": replicas, "fsdp": shards}, specs, shape=shape)
    holdings = held_at(old, hosts(replicas * shards))
    after = hosts(replicas * shards, 50)
    names = [*hosts(replicas * shards), *after]
    plan = plan_restore(
        holdings,
        old,
        slots=after,
        alive=hosts(replicas * shards),
        domains={h: f"r{i % racks}" for i, h in enumerate(names)} if domains else None,
        whole_bytes=SMALL,
    )
    assert isinstance(plan, RestorePlan)
    assert max(plan.sent.values()) <= 1.2 * 4 * 1200 * 1024 * 4 / shards


def test_unverified_slices_are_fetched_and_never_sent() -> None:
    layout = layout_of({"replica": 3, "fsdp": 2}, {"w": (("fsdp",),), "b": ()})
    bad = layout.slices(0)[0]
    holdings = held_at(layout, hosts(6), without=[("h00", bad)])
    assert len(holdings.tables) == 2
    plan = plan_restore(holdings, layout, slots=hosts(6), alive=hosts(6))
    assert isinstance(plan, RestorePlan)
    check(plan, holdings, layout, hosts(6), set(hosts(6)))
    assert {t.target for t in plan.transfers} == {"h00"}
    assert {r.moved for t in plan.transfers for r in t.regions} == {bad}


def test_a_lone_target_does_not_ask_everybody() -> None:
    layout = layout_of({"replica": 64}, {"w": ()}, shape=(4096, 1024))
    slots = ["spare", *hosts(63, 1)]
    plan = restore(layout, hosts(64), layout, slots, dead=["h00"])
    assert len(plan.sent) == 16
    assert max(plan.sent.values()) <= 1.2 * 4096 * 1024 * 4 / 16


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_shares_are_exact_and_level(data: st.DataObject) -> None:
    num_senders = data.draw(st.integers(1, 24))
    senders = st.lists(st.integers(0, num_senders - 1), min_size=1, unique=True).map(
        lambda found: np.array(sorted(found))
    )
    demands = data.draw(
        st.lists(
            st.builds(
                lambda n, c: Demand(nbytes=n, candidates=c),
                st.integers(1, 10**15),
                senders,
            ),
            min_size=1,
            max_size=5,
        )
    )
    shares = share_out(demands, num_senders, slack=0.0)
    load = np.zeros(num_senders)
    for demand, share in zip(demands, shares, strict=True):
        assert share.sum() == demand.nbytes and (share >= 0).all()
        load[demand.candidates] += share
    for demand, share in zip(demands, shares, strict=True):
        # Who sends could not hand anything to a candidate with much less load.
        used = load[demand.candidates[share > 0.01 * load.max()]]
        least = load[demand.candidates].min()
        assert (used - least <= 0.05 * load.max() + len(demands)).all()
