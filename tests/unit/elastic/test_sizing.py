"""Sizes: whole replica groups, the batch divided evenly, and who keeps which slot."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.elastic.assignment import (
    ReplicaGroups,
    SizeLimits,
    WantedSize,
    choose_slots,
    resized,
    seat,
    size_for,
)
from dtft.elastic.leader.recovery import layout_on
from tests.support.commits import layout
from tests.support.numbered_hosts import entries, record

BATCH = SizeLimits(global_batch=96, batch_axes=("replica", "fsdp"))


def groups_of(replicas: int, fsdp: int) -> ReplicaGroups:
    return ReplicaGroups(replicas=replicas, slots=replicas * fsdp, parts=fsdp)


@given(
    replicas=st.integers(1, 6),
    fsdp=st.integers(1, 3),
    wanted=st.integers(1, 6),
    least=st.integers(0, 6),
    available=st.integers(0, 20),
    unfit=st.sets(st.integers(1, 18), max_size=3),
)
def test_a_formation_is_whole_groups_and_as_large_as_it_may_be(
    replicas, fsdp, wanted, least, available, unfit
):
    groups = groups_of(replicas, fsdp)
    limits = replace(BATCH, min_replicas=least)

    def choose(hosts: int) -> int:
        return choose_slots(
            wanted=groups.slots_of(wanted),
            committed=groups.slots,
            available=hosts,
            groups=groups,
            limits=limits,
            unfit=unfit,
        )

    chosen = choose(available)
    number = groups.replicas_on(chosen)
    assert groups.slots_of(number) == chosen
    assert choose(available + fsdp) >= min(chosen, available + fsdp) or unfit
    if chosen not in (groups.slots, groups.slots_of(wanted)):
        assert least and least <= number < wanted and groups.fits(number, limits)
    if available >= groups.slots_of(wanted) and groups.slots_of(wanted) not in unfit:
        assert number == wanted
    if available >= groups.slots and groups.slots not in unfit:
        assert chosen <= available  # what ran before always can go on


@given(st.integers(1, 8), st.integers(0, 12))
def test_without_a_least_number_a_job_waits_for_its_hosts(slots, available):
    chosen = choose_slots(
        wanted=slots,
        committed=slots,
        available=available,
        groups=ReplicaGroups(replicas=slots, slots=slots, parts=1),
        limits=SizeLimits(),
    )
    assert chosen == slots


def test_growing_that_lost_its_host_goes_back_to_what_ran():
    asked = {"wanted": 3, "committed": 2, "groups": None, "limits": SizeLimits()}
    assert choose_slots(available=3, **asked) == 3
    assert choose_slots(available=2, **asked) == 2
    assert choose_slots(available=1, **asked) == 2  # and waits for that
    assert choose_slots(available=3, unfit={3}, **asked) == 2


@given(
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    group=st.integers(1, 3),
    spares=st.integers(0, 3),
    dead=st.sets(st.integers(0, 14)),
    lapsed=st.sets(st.integers(0, 14)),
)
def test_hosts_keep_their_slots_and_sit_once(
    before, after, group, spares, dead, lapsed
):
    everyone = [record(n) for n in range(before * group + spares)]
    seated = everyone
    everyone = [  # a lease ran out, and the process has registered again
        replace(r, incarnation=f"{r.incarnation}.2") if n in lapsed else r
        for n, r in enumerate(seated)
    ]
    live = [r for n, r in enumerate(everyone) if n not in dead]
    previous = entries(seated[: before * group])
    filled = seat(previous, live, after * group, group)
    assert len(filled) == after * group
    for slot in range(min(before, after) * group):
        if slot not in dead:
            assert filled[slot] == everyone[slot]
    used = [r.host for r in filled if r is not None]
    assert len(used) == len(set(used)) == min(after * group, len(live))


def test_a_host_of_a_dissolved_group_takes_the_same_position_of_another():
    hosts = [record(n) for n in range(6)]  # groups 0+1, 2+3, 4+5; 2 dies
    live = [r for r in hosts if r != hosts[2]]
    filled = seat(entries(hosts), [record(9), *live], 4, group_slots=2)
    assert filled == (hosts[0], hosts[1], hosts[4], hosts[3])
    live[-2] = replace(hosts[4], incarnation=f"{hosts[4].incarnation}.2")
    filled = seat(entries(hosts), [record(9), *live], 4, group_slots=2)
    assert filled == (hosts[0], hosts[1], live[-2], hosts[3])


def test_an_allowed_size():
    assert size_for(3, layout(2, 2), BATCH) == WantedSize(replicas=3, slots=6)
    size = size_for(1, layout(2, 2), BATCH)
    assert WantedSize.from_json(size.to_json()) == size


def test_microbatches_divide_the_rows_of_a_replica_too():
    limits = replace(BATCH, row_parts=12)  # 96 rows, 2 x 12 parts each
    assert size_for(4, layout(2, 2), limits).slots == 8
    with pytest.raises(ValueError, match=r"have 24 parts.*allowed: 2 or 4"):
        size_for(3, layout(2, 2), limits)


def with_leaf(leaf: Leaf) -> Layout:
    return replace(layout(2, 1), leaves=(leaf,))


TWO_PER_HOST = Layout(
    mesh=MeshLayout(axis_names=("replica",), axis_sizes=(4,), slots=(0, 0, 1, 1)),
    leaves=(),
)
CROSSED = replace(layout(2, 1), mesh=replace(layout(2, 1).mesh, slots=(1, 0)))
ROWS = Leaf(path="mu", shape=(2, 5), dtype="float32", spec=(("replica",),))
ODD = Leaf(path="nu", shape=(8, 5), dtype="float32", spec=(("replica",),))


@pytest.mark.parametrize(
    "state, replicas, least, hint",
    [
        (layout(2, 1), 5, 0, "96 rows evenly.*Nearest allowed: 4 or 6"),
        (layout(2, 2), 96, 0, "Nearest allowed: 48"),
        (layout(2, 1), 1, 2, "below 2"),
        (layout(2, 1), 0, 0, "below 1"),
        (TWO_PER_HOST, 3, 0, "each has 2 replicas. Nearest allowed: 2 or 4"),
        (CROSSED, 3, 0, "in the order of the slots"),
        (with_leaf(ROWS), 3, 0, "'mu' is float32.*committed"),
        (with_leaf(ODD), 3, 0, "'nu': dim 0 of size 8 cannot be divided"),
    ],
)
def test_a_size_that_cannot_be_is_refused(state, replicas, least, hint):
    limits = replace(BATCH, min_replicas=least)
    with pytest.raises(ValueError, match=hint):
        size_for(replicas, state, limits)


def test_axes_that_divide_nothing_may_lie_before_the_replicas():
    mesh = MeshLayout(
        axis_names=("fsdp", "replica", "tensor"), axis_sizes=(1, 3, 1), slots=(0, 1, 2)
    )
    one = resized(Layout(mesh=mesh, leaves=()), 1)
    assert (one.mesh.axis_sizes, one.mesh.slots) == ((1, 1, 1), (0,))
    two = layout_on(Layout(mesh=mesh, leaves=()), 2)
    assert (two.mesh.axis_sizes, two.mesh.slots) == ((1, 2, 1), (0, 1))
    inner = replace(mesh, axis_sizes=(3, 1, 1))
    with pytest.raises(ValueError, match="'fsdp': 3, .*first axis that divides"):
        resized(Layout(mesh=inner, leaves=()), 2)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_other_replicas_and_back_is_the_same_layout(replicas, fsdp, others):
    state = replace(layout(replicas, fsdp), config="{}")
    try:
        there = resized(state, others)
    except ValueError:
        assert 8 % fsdp
        return
    assert there.mesh.num_slots == others * fsdp
    assert resized(there, replicas).digest == state.digest
    group = ReplicaGroups.of(there, BATCH)
    assert (group.replicas, group.slots, group.parts) == (others, others * fsdp, fsdp)
