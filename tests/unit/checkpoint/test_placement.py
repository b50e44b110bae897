"""Every slice is in enough failure domains, whatever the mesh; loads are even."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.replication.copy_placement import CopyPlacement, place_copies
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout


def layout_of(replicas: int, shards: int, num_leaves: int = 2) -> Layout:
    """One slot per device; leaves are divided over `fsdp`, the last is not divided."""
    mesh = MeshLayout(
        axis_names=("replica", "fsdp"),
        axis_sizes=(replicas, shards),
        slots=tuple(range(replicas * shards)),
    )
    leaves = [
        Leaf(path=f"{i}", shape=(4 * shards,), dtype="int8", spec=(("fsdp",),))
        for i in range(num_leaves)
    ]
    leaves.append(Leaf(path="whole", shape=(3,), dtype="int8"))
    return Layout(mesh=mesh, leaves=tuple(leaves))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, int, list[str]]:
    layout = layout_of(draw(st.integers(1, 3)), draw(st.integers(1, 7)))
    num_slots = layout.mesh.num_slots
    domains = draw(
        st.just([str(i) for i in range(num_slots)])
        | st.lists(st.sampled_from("abcd"), min_size=num_slots, max_size=num_slots)
    )
    return layout, draw(st.integers(1, 4)), domains


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_slice_is_in_enough_domains(case: tuple[Layout, int, list[str]]) -> None:
    layout, copies, domains = case
    placement = place_copies(layout, copies, domains)
    wanted = min(copies, len(set(domains)))
    assert placement.effective_copies == wanted
    assert list(placement.holders) == list(layout.owners)
    for piece, slots in placement.holders.items():
        owners = layout.owners[piece]
        assert slots[: len(owners)] == owners
        assert len(set(slots)) == len(slots)
        natural = {domains[slot] for slot in owners}
        assert len({domains[slot] for slot in slots}) == max(wanted, len(natural))
        assert len(slots) - len(owners) == max(0, wanted - len(natural))


@given(cases())
@settings(max_examples=100, deadline=None)
def test_pushes_say_the_same_as_holders(case: tuple[Layout, int, list[str]]) -> None:
    layout, copies, domains = case
    placement = place_copies(layout, copies, domains)
    pairs = [(push.source, push.target) for push in placement.pushes]
    assert pairs == sorted(set(pairs))
    pushed = [
        (piece, push.target) for push in placement.pushes for piece in push.slices
    ]
    assert len(pushed) == len(set(pushed))
    assert set(pushed) == {
        (piece, slot)
        for piece, slots in placement.holders.items()
        for slot in slots
        if slot not in layout.owners[piece]
    }
    for push in placement.pushes:
        order = [layout.slices(push.source).index(piece) for piece in push.slices]
        assert order == sorted(order)
    for slot in range(layout.mesh.num_slots):
        assert list(placement.hosted(slot)) == [p for p, at in pushed if at == slot]


@given(cases())
@settings(max_examples=30, deadline=None)
def test_every_host_computes_the_same(case: tuple[Layout, int, list[str]]) -> None:
    layout, copies, domains = case
    again = Layout.from_json(layout.to_json())
    assert place_copies(again, copies, domains) == place_copies(layout, copies, domains)


def hosted_bytes(placement: CopyPlacement, num_slots: int) -> list[int]:
    return [sum(p.nbytes for p in placement.hosted(i)) for i in range(num_slots)]


@given(st.integers(2, 12), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_sharded_state_is_hosted_evenly(num_slots: int, copies: int) -> None:
    layout = layout_of(1, num_slots)
    extra = min(copies, num_slots) - 1
    whole = Leaf(path="whole", shape=(3,), dtype="int8")
    layout = Layout(
        mesh=layout.mesh, leaves=tuple(leaf for leaf in layout.leaves if leaf != whole)
    )
    loads = hosted_bytes(place_copies(layout, copies), num_slots)
    assert loads == [8 * extra] * num_slots


def test_replicated_state_moves_nothing() -> None:
    assert place_copies(layout_of(2, 4), 2).pushes == ()


def test_owners_take_turns_as_sources() -> None:
    layout = layout_of(2, 2, num_leaves=8)
    placement = place_copies(layout, 3)
    sent = {slot: 0 for slot in range(4)}
    for push in placement.pushes:
        sent[push.source] += sum(piece.nbytes for piece in push.slices)
    assert max(sent.values()) - min(sent.values()) <= 4


@pytest.mark.parametrize(
    ("num_slots", "copies", "pairs"),
    [
        (4, 2, [(0, 1), (1, 0), (2, 3), (3, 2)]),
        (3, 2, [(0, 1), (1, 2), (2, 0)]),
        (5, 2, [(0, 1), (1, 0), (2, 3), (3, 4), (4, 2)]),
    ],
)
def test_groups_and_a_ring_for_the_rest(
    num_slots: int, copies: int, pairs: list[tuple[int, int]]
) -> None:
    placement = place_copies(layout_of(1, num_slots, num_leaves=1), copies)
    found = [(push.source, push.target) for push in placement.pushes]
    assert found == pairs


def test_racks_are_told_apart() -> None:
    placement = place_copies(
        layout_of(1, 4), 2, ["rack-a", "rack-a", "rack-b", "rack-b"]
    )
    found = [(push.source, push.target) for push in placement.pushes]
    assert found == [(0, 2), (1, 3), (2, 0), (3, 1)]


def test_thousands_of_slots_take_seconds_at_most() -> None:
    layout = layout_of(1, 1500, num_leaves=2)
    mesh = MeshLayout(axis_names=("fsdp",), axis_sizes=(8,), slots=tuple(range(8)))
    wide = Layout(
        mesh=mesh,
        leaves=tuple(
            Leaf(path=f"{i}", shape=(8,), dtype="int8", spec=(("fsdp",),))
            for i in range(2000)
        ),
    )
    for case in (layout, wide):
        assert case.owners
        begun = time.thread_time()  # what others do meanwhile is not counted
        placement = place_copies(case, 2)
        assert time.thread_time() - begun < 5
        assert placement.effective_copies == 2


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"copies=0 is below 1. Allowed: 1 .* to 2"):
        place_copies(layout_of(1, 2), 0)
    with pytest.raises(ValueError, match="domains has 1 entries"):
        place_copies(layout_of(1, 2), 2, ["a"])
