"""Only verified copies on live hosts count; what is missing is pushed again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.inventory import inventory_at
from dtft.checkpoint.placement import place
from dtft.checkpoint.repair import re_replication
from tests.checkpoint.restores import committed, holders_of, hosts, layout_of

SPECS = {"w": (("fsdp",),), "opt": (("replica", "fsdp"),), "b": ()}


def test_nothing_is_pushed_while_all_live() -> None:
    layout = layout_of({"replica": 2, "fsdp": 2}, SPECS)
    _, holdings = committed(layout, hosts(4), copies=2)
    repair = re_replication(holdings, alive=hosts(4), copies=2)
    assert repair.healthy and repair.pushes == () and repair.effective_copies == 2


def test_natural_copies_do_not_count_before_they_are_verified() -> None:
    layout = layout_of({"replica": 2}, {"w": ()})
    bad = layout.slices(1)
    holdings = inventory_at(place(layout, 2), hosts(2), {"h01": bad})
    repair = re_replication(holdings, alive=hosts(2), copies=2)
    assert repair.effective_copies == 1 and not repair.healthy
    assert [(p.source, p.target, p.slices) for p in repair.pushes] == [
        ("h00", "h01", bad)
    ]


def test_a_lost_host_is_made_up_for_on_the_spare() -> None:
    layout = layout_of({"fsdp": 4}, {"w": (("fsdp",),)})
    _, holdings = committed(layout, hosts(4), copies=2)
    repair = re_replication(holdings, alive=[*hosts(3), "spare"], copies=2)
    assert repair.slices_with == {1: 2, 2: 2} and repair.effective_copies == 1
    # Host 2 kept the copy of host 3; both slices of their group are there only.
    assert {p.source for p in repair.pushes} == {"h02"}
    assert "spare" in {p.target for p in repair.pushes}


def test_fewer_domains_than_copies_are_shown_as_such() -> None:
    layout = layout_of({"fsdp": 3}, {"w": (("fsdp",),)})
    _, holdings = committed(layout, hosts(3), copies=3)
    repair = re_replication(holdings, alive=["h00", "h01"], copies=3)
    assert (repair.wanted, repair.effective_copies) == (2, 2)
    racks = {"h00": "a", "h01": "a"}
    repair = re_replication(holdings, alive=hosts(2), copies=2, domains=racks)
    assert (repair.wanted, repair.effective_copies) == (1, 1)


def test_what_is_lost_is_counted() -> None:
    layout = layout_of({"fsdp": 4}, SPECS | {"opt": (("fsdp",),)})
    _, holdings = committed(layout, hosts(4), copies=2)
    repair = re_replication(holdings, alive=["h00", "h01"], copies=2)
    assert (repair.lost, repair.effective_copies) == (4, 0)
    assert repair.pushes == ()


def test_copies_below_one_are_refused() -> None:
    layout = layout_of({"fsdp": 2}, SPECS | {"opt": ()})
    _, holdings = committed(layout, hosts(2))
    with pytest.raises(ValueError, match="copies=0 is below 1"):
        re_replication(holdings, alive=hosts(2), copies=0)


@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sets(st.integers(0, 11), max_size=4),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_after_the_pushes_every_slice_has_its_copies(
    replicas: int, shards: int, copies: int, dead: set[int], racks: int
) -> None:
    layout = layout_of({"replica": replicas, "fsdp": shards}, SPECS)
    num = replicas * shards
    _, holdings = committed(layout, hosts(num), copies)
    alive = [h for i, h in enumerate(hosts(num + 2)) if i not in dead]
    domains = {host: f"rack-{i % racks}" for i, host in enumerate(hosts(num + 2))}
    repair = re_replication(holdings, alive=alive, copies=copies, domains=domains)
    held = {piece: found & set(alive) for piece, found in holders_of(holdings).items()}
    assert repair.lost == sum(not found for found in held.values())
    before = {piece: set(found) for piece, found in held.items()}
    for push in repair.pushes:
        for piece in push.slices:
            assert push.source in before[piece]
            assert push.target in alive and push.target not in held[piece]
            held[piece].add(push.target)
    wanted = min(copies, len({domains[host] for host in alive}))
    for piece, found in held.items():
        natural = {domains[host] for host in before[piece]}
        reached = {domains[host] for host in found}
        if natural:
            assert len(reached) == max(wanted, len(natural))
            # Not a byte more than is needed.
            added = len(found) - len(before[piece])
            assert added == max(0, wanted - len(natural))
    again = re_replication(holdings, alive=alive[::-1], copies=copies, domains=domains)
    assert again.pushes == repair.pushes
