"""Which place of the world each host's process has, over losses and joins."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.elastic.assignment import SlotAssignment
from dtft.elastic.job import TURNS
from dtft.elastic.leader.world_plan import (
    SPARE_PLACES,
    WorldPlan,
    admitted,
    given_up,
    new_world,
    recorded,
    swapped,
    why_restarted,
)

HOSTS = [f"h{i}" for i in range(12)]
hosts = st.lists(st.sampled_from(HOSTS), unique=True, min_size=1, max_size=6)


def is_sound(world: WorldPlan) -> bool:
    """No two hosts have one place, and nobody has place 0 or one that is not there."""
    places = list(world.indices.values())
    return len(set(places)) == len(places) and all(0 < it < world.size for it in places)


@given(hosts, hosts, st.sets(st.sampled_from(HOSTS)))
def test_a_process_that_stays_keeps_its_place(
    first: list[str], second: list[str], members: set[str]
) -> None:
    world = new_world(7, first, lasts=True)
    for host in sorted(members):
        world = admitted(world, host, set(HOSTS)) or world
    members &= world.indices.keys()
    found = swapped(world, second, members)
    if isinstance(found, str):
        no_room = len(set(second) | members) > world.size - 1
        assert no_room or not members & set(second)
        return
    assert is_sound(found) and found.turn == world.turn + 1
    assert set(second) <= found.indices.keys() <= set(second) | members
    for host in members:
        assert found.indices[host] == world.indices[host]


@given(st.lists(st.tuples(st.sampled_from(HOSTS), st.booleans()), max_size=40))
def test_hosts_that_come_and_go_have_places_while_there_is_room(
    moves: list[tuple[str, bool]],
) -> None:
    world, there = new_world(7, HOSTS[:2], lasts=True), set(HOSTS[:2])
    for host, comes in moves:
        if not comes:
            there -= {host}
            continue
        there |= {host}
        found = admitted(world, host, there)
        if found is None:
            assert len(there & world.indices.keys()) == 2 + SPARE_PLACES
        else:
            world = found
            assert is_sound(world) and host in world.indices


def test_the_last_turn_of_a_world_is_followed_by_a_new_world() -> None:
    world, turns = new_world(7, ("a", "b"), lasts=True), 0
    while isinstance(found := swapped(world, ("a", "b"), {"a", "b"}), WorldPlan):
        world, turns = found, turns + 1
    assert turns == TURNS - 1 and "formations" in found


def test_a_world_without_hot_swaps_has_no_place_but_those_of_its_slots() -> None:
    world = new_world(7, ("a", "b"), lasts=False, served=True)
    assert (world.size, world.indices) == (2, {"a": 0, "b": 1})
    assert world.seat("b") == {"number": 7, "address": "", "size": 2, "index": 1}
    assert world.server == "a"


def test_a_served_world_has_as_many_turns_as_it_needs() -> None:
    world = new_world(7, ("a", "b"), lasts=True, served=True)
    for turn in range(3 * TURNS):
        assert world.turn == turn
        found = swapped(world, ("a", "b"), {"a", "b"}, {"a", "b"})
        assert isinstance(found, WorldPlan)
        world = found
    assert world.server == "a"


def test_a_served_world_ends_with_its_server() -> None:
    world = new_world(7, ("a", "b"), lasts=True, served=True)
    found = swapped(world, ("b", "c"), {"b"}, {"b", "c"})
    assert found == "a, which served the trainers' processes, is gone"


def test_only_a_served_world_gives_up_processes() -> None:
    served = new_world(7, ("a", "b", "c"), lasts=True, served=True)
    assert given_up(served, {"c", "a", "elsewhere"}) == [1, 3]
    assert given_up(new_world(7, ("a", "b"), lasts=True), {"a"}) == []


@pytest.mark.parametrize(
    ("named", "lost", "because"),
    [
        ({"b"}, {"b"}, ""),
        ({"a"}, set(), ""),  # its trainer has died, and the service has not
        ({"a", "b"}, {"a"}, "a, which served the trainers' processes, was lost"),
        (set(), set(), "no process is lost"),
        ({"spare without a place"}, set(), "no process is lost"),
    ],
)
def test_processes_stay_in_a_served_world_if_one_can_be_given_up(
    named: set[str], lost: set[str], because: str
) -> None:
    world = new_world(7, ("a", "b"), lasts=True, served=True)

    def why(is_training: bool) -> str:
        return why_restarted(
            *(world, 0),
            lasts=True,
            fatal=False,
            named=named,
            lost=lost,
            is_training=is_training,
        )

    found = why(is_training=True)
    assert because in found and bool(found) == bool(because)
    # If none is in a collective, only the service's loss matters.
    assert bool(why(is_training=False)) == bool(lost & {"a"})


@given(hosts, st.booleans(), st.integers(0, 9))
def test_a_new_leader_reads_the_world_from_the_assignment(
    slots: list[str], served: bool, turn: int
) -> None:
    world = replace(new_world(7, slots, lasts=True, served=served), turn=turn)
    world = replace(world, address="h:1" if served else "")
    assignment = SlotAssignment(
        generation=1,
        attempt=1,
        slots=tuple(slots),
        incarnations=tuple(slots),
        source="memory",
        step=1,
        rung=0,
        reason="",
        world=world.record,
        places=tuple(world.indices[host] for host in slots),
        service=(world.server, world.address),
    )
    assert recorded(SlotAssignment.from_json(assignment.to_json())) == world
    older = json.loads(assignment.to_json())
    del older["places"], older["service"]
    found = recorded(SlotAssignment.from_json(json.dumps(older)))
    assert (found.record, found.indices, found.server) == (world.record, {}, "")
