"""Copies are kept apart by failure domains, and spares chosen so that they stay so."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.replication.copy_placement import (
    Spread,
    choose_spares,
    copy_groups,
    domains_reached,
)
from dtft.checkpoint.replication.failure_domains import (
    parse_domain_file,
    separate_copies,
)
from tests.support.failure_domains import FILE
from tests.support.restores import hosts, layout_of

FSDP = {"w": (("fsdp",),)}


@pytest.mark.parametrize(
    ("axes", "specs", "groups"),
    [
        ({"fsdp": 4}, FSDP, ((0, 1), (2, 3))),
        ({"replica": 2, "fsdp": 2}, FSDP, ((0, 2), (1, 3))),
        ({"replica": 3}, {"w": ()}, ((0, 1, 2),)),
        ({"fsdp": 3}, FSDP, ((0, 1), (0, 2), (1, 2))),
    ],
)
def test_who_keeps_copies_together(axes: dict, specs: dict, groups: tuple) -> None:
    found = copy_groups(Spread(copies=2).place(layout_of(axes, specs)))
    assert sorted(found) == list(groups)
    slots = [str(slot) for slot in range(max(max(group) for group in groups) + 1)]
    assert domains_reached(found, slots) == min(len(group) for group in groups)
    assert domains_reached(found, ["one"] * len(slots)) == 1


def test_racks_are_crossed_and_a_spare_of_the_lost_rack_is_taken() -> None:
    found = separate_copies(parse_domain_file(FILE), hosts(4), 2)
    spread = Spread(copies=2, level=found.level, domains=found.domains)
    assert spread.domains == ("a", "a", "b", "b")
    groups = copy_groups(spread.place(layout_of({"fsdp": 4}, FSDP)))
    assert domains_reached(groups, spread.domains) == 2
    seats = ["a", None, "b", "b"]
    assert choose_spares(groups, seats, ["b", "a"], 2) == (None, 1, None, None)
    assert choose_spares(groups, seats, ["b", "c"], 2) == (None, 1, None, None)
    assert choose_spares(groups, seats, ["b"], 2) == (None, 0, None, None)
    assert choose_spares(groups, seats, [], 2) == (None,) * 4


def test_spares_are_taken_in_order_where_it_does_not_matter() -> None:
    assert choose_spares((), [None, "x", None], ["a", "b"], 2) == (0, None, 1)
    assert choose_spares(((0, 1, 2),), ["a", "b", None], ["a", "c"], 2)[2] == 0


@given(
    seats=st.lists(st.sampled_from(["a", "b", "c", None]), min_size=2, max_size=8),
    spares=st.lists(st.sampled_from("abcd"), max_size=4),
    wanted=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_chosen_spare_is_as_good_as_any_for_one_slot(
    seats: list[str | None], spares: list[str], wanted: int, data: st.DataObject
) -> None:
    slots = range(len(seats))
    group = st.sets(st.sampled_from(slots), min_size=2).map(lambda s: tuple(sorted(s)))
    groups = tuple(data.draw(st.lists(group, max_size=5)))
    chosen = choose_spares(groups, seats, spares, wanted)
    taken = [at for at in chosen if at is not None]
    empty = sum(seat is None for seat in seats)
    assert len(set(taken)) == len(taken) == min(empty, len(spares))
    assert all(at is None or seats[slot] is None for slot, at in enumerate(chosen))
    if empty == 1 and spares:
        slot = seats.index(None)

        def gained(domain: str) -> int:
            groups_of = [
                [seats[o] for o in g if o != slot] for g in groups if slot in g
            ]
            return sum(len(set(o)) < wanted and domain not in o for o in groups_of)

        best = max(gained(domain) for domain in spares)
        at = chosen[slot]
        assert at is not None and gained(spares[at]) == best
        assert at == min(i for i, d in enumerate(spares) if gained(d) == best)
