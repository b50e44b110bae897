"""When the leader begins to form: the order in which it hears of hosts is open."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.elastic.leader.host_registry import FIRST_ASK_S, NOBODY_S
from dtft.elastic.store.api import StoreUnavailable
from tests.support.desks import LEASE_S, Desk, record_of


@pytest.fixture
def desk_of(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(**changes: Any) -> Desk:
        made.append(Desk(tmp_path, **changes))
        return made[0]

    yield make
    for desk in made:
        desk.close()


@pytest.fixture
def desk(desk_of: Callable[..., Desk]) -> Desk:
    return desk_of()


@pytest.mark.parametrize("order", list(itertools.permutations(["tell", "call"])))
def test_a_host_counts_once_it_is_connected(desk: Desk, order: tuple[str, ...]) -> None:
    connected = False
    for act in order:
        if act == "tell":
            desk.register(record_of("b"))
            desk.look()
        else:
            desk.leader.connected(record_of("b"))
            connected = True
        assert ("forming" in desk.kinds()) == connected
    assert {host for host, op, _ in desk.orders if op == "reform"} == {"a", "b"}
    desk.answer("a")
    desk.answer("b")
    desk.turn()
    assert "waiting_for_host" not in desk.kinds()
    assert desk.assignment is not None and desk.assignment.slots == ("a", "b")


@pytest.mark.parametrize("era", [1, 7, 8, 16, 1000])
def test_the_worlds_of_every_era_have_valid_numbers(desk: Desk, era: int) -> None:
    desk.put("m/era", json.dumps({"era": era, "id": "x"}))
    numbers: set[int] = set()
    for _ in range(2):
        desk.begin()
        desk.join("b")
        desk.answer("a")
        desk.answer("b")
        desk.turn()
        orders = desk.take("prepare")
        assert [host for host, _ in orders] == ["a", "b"]
        numbers |= {fields["world"]["number"] for _, fields in orders}
    assert len(numbers) == 2 and all(0 < it < 1 << 63 for it in numbers)


def test_a_registered_host_that_does_not_connect_is_waited_for_some_time(
    desk: Desk,
) -> None:
    desk.register(record_of("c"))
    desk.join("b")
    desk.answer("a")
    desk.answer("b")
    desk.turn(desk.config.timeouts.connect - 1)
    assert desk.phase == "gathering"
    desk.turn(2)
    assert desk.assignment is not None and desk.assignment.slots == ("a", "b")


def test_waiting_ends_when_a_host_connects(desk: Desk) -> None:
    desk.join("b")
    desk.leader.lost("b", "test")
    desk.answer("a")
    desk.delete("m/hosts/b")
    desk.look()
    desk.turn()
    assert desk.kinds().count("waiting_for_host") == 1
    assert desk.kinds().count("forming") == 1
    desk.leader.connected(record_of("c"))
    assert desk.kinds().count("forming") == 2


def test_a_host_that_is_away_for_less_than_a_lease_is_not_lost(desk: Desk) -> None:
    desk.join("b")
    desk.take("reform")
    desk.leader.disconnected(record_of("b"), "its connection ended: reset")
    desk.turn(LEASE_S - 1)
    desk.leader.connected(record_of("b"))
    assert desk.take("reform")[0][0] == "b"  # what was sent meanwhile is lost
    desk.turn(2)
    assert "host_lost" not in desk.kinds()
    desk.leader.disconnected(record_of("b"), "its connection ended: reset")
    desk.turn(desk.config.timeouts.lease + 1)
    assert desk.kinds().count("host_lost") == 1


def test_a_lost_host_that_calls_again_is_taken_again(desk: Desk) -> None:
    desk.join("b")
    desk.answer("a")
    desk.leader.lost("b", "silent for 5 s")
    desk.turn()
    assert desk.phase == "waiting"
    desk.leader.connected(record_of("b", incarnation="b.2"))
    for host in "ab":
        desk.answer(host)
    desk.turn()
    assert desk.assignment is not None and desk.assignment.slots == ("a", "b")


def test_a_host_that_does_not_answer_is_left_out_until_it_does(desk: Desk) -> None:
    desk.join("b")
    desk.answer("a")
    desk.turn(desk.config.timeouts.restore + 1)
    assert desk.phase == "waiting"
    assert "b did not say in" in desk.said
    assert "b cannot be used: it does not answer" in desk.said
    desk.answer("b")
    desk.turn()
    assert desk.assignment is not None and desk.assignment.slots == ("a", "b")


def test_an_unfit_host_is_named_and_another_takes_its_slot(desk: Desk) -> None:
    desk.join("b")
    for host in "ab":
        desk.answer(host)
    desk.turn()
    desk.join("c")
    assert desk.assignment is not None
    ballot = desk.orders[-1][2]["ballot"]
    told = {"op": "unfit", "ballot": ballot, "why": "no room in /dev/shm"}
    desk.leader.handle_report("b", told)
    assert "b cannot be used: no room in /dev/shm" in desk.said
    for host in "abc":
        desk.answer(host)
    desk.turn()
    assert desk.assignment.slots == ("a", "c")


def test_a_job_ends_when_nobody_can_have_a_slot_for_a_while(desk: Desk) -> None:
    desk.join("b")
    for host in "ab":
        desk.answer(host)
    desk.turn()
    for host in "ab":
        ballot = desk.orders[-1][2]["ballot"]
        told = {"op": "unfit", "ballot": ballot, "why": f"no memory on {host}"}
        desk.leader.handle_report(host, told)
    desk.turn(NOBODY_S - 0.5)
    assert "end" not in desk.kinds()
    desk.turn(1)
    last = desk.events()[-1]
    assert (last["event"], last["status"]) == ("end", "error")
    assert "a: no memory on a; b: no memory on b" in last["message"]


def test_a_host_that_comes_meanwhile_can_have_the_slot(desk: Desk) -> None:
    told = {"op": "unfit", "ballot": (1, 1), "why": "no memory"}
    desk.leader.handle_report("a", told)
    desk.turn(NOBODY_S - 0.5)
    desk.join("b")
    desk.turn(NOBODY_S)
    desk.join("c")
    for host in "abc":
        desk.answer(host)
    desk.turn()
    assert "end" not in desk.kinds()
    assert desk.assignment is not None and desk.assignment.slots == ("b", "c")


LAYOUT = Layout(
    mesh=MeshLayout(axis_names=("replica",), axis_sizes=(2,), slots=(0, 1)),
    leaves=(Leaf(path="w", shape=(4,), dtype="float32"),),
)


def test_hosts_are_asked_for_memory_that_another_host_lacks(desk: Desk) -> None:
    desk.join("b")
    for host in "ab":
        desk.answer(host)
    desk.turn()
    ballot, layout = desk.orders[-1][2]["ballot"], LAYOUT.to_json()
    desk.orders.clear()
    told = {"op": "unfit", "ballot": ballot, "why": "no memory", "layout": layout}
    desk.leader.handle_report("a", told)
    fields = {"layout": layout, "domains": [], "committed": False}
    assert desk.take("expect") == [("b", fields)]
    for host in "ab":
        desk.answer(host)
    desk.turn()
    assert desk.phase == "waiting"
    desk.turn(FIRST_ASK_S + 1)
    assert desk.take("expect") == [("a", fields)]
    assert desk.phase == "waiting", "no round begins until it has the memory"


def test_a_spare_is_told_what_a_slot_holds(desk: Desk) -> None:
    desk.join("b")
    desk.answer("a")
    desk.answer("b")
    desk.turn()
    ballot = desk.take("prepare")[0][1]["ballot"]
    desk.join("c")
    said = {"op": "layout", "ballot": ballot, "layout": LAYOUT.to_json()}
    desk.leader.handle_report("a", dict(said))
    desk.join("d")
    fields = {"layout": said["layout"], "domains": [], "committed": False}
    ahead = desk.take("prefetch")
    assert desk.take("expect") == [("c", fields), ("d", fields)]
    assert [(host, it["slot"]) for host, it in ahead] == [("c", 0), ("c", 0), ("d", 1)]
    of_c, again, of_d = (it for _, it in ahead)
    assert of_c == again  # a new spare changes nothing for the one before it
    hosts, slots = desk.view().hosts, desk.view().assignment
    assert slots is not None
    for slot, order in enumerate((of_c, of_d)):
        assert order["address"] == hosts[slots.slots[slot]].address
        assert tuple(order["epoch"]) == slots.epoch
        assert order["layout"] == said["layout"]


def test_a_stop_before_anything_is_trained_ends_at_once(desk: Desk) -> None:
    desk.join("b")
    desk.turn()
    assert "forming" in desk.kinds()
    desk.put("m/stop", "1")
    desk.look()
    desk.turn()
    last = desk.events()[-1]
    assert (last["event"], last["status"], last["step"]) == ("end", "stopped", 0)
    assert desk.view().result is not None


@pytest.mark.parametrize(("is_lost", "leases"), [(False, 2), (True, 12)])
def test_a_result_waits_longer_for_the_store_while_a_host_is_lost(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_lost: bool, leases: int
) -> None:
    desk.join("b")
    if is_lost:  # it may come back, and would learn the result from the store only
        desk.leader.lost("b", "silent for 5 s")
    desk.put("m/stop", "1")
    view = desk.view()

    def away(*_: Any) -> bool:
        raise StoreUnavailable("it hangs")

    monkeypatch.setattr(desk.member, "fenced", away)
    desk.leader.see(view)
    desk.turn(leases * desk.config.timeouts.lease - 1)
    assert "end" in desk.kinds() and not desk.ended
    desk.turn(3)
    (result,) = set(desk.ended)
    assert '"status": "stopped"' in result


def test_storage_that_vanished_is_waited_for(desk: Desk) -> None:
    desk.put("m/stored", "40")
    desk.join("b")
    desk.answer("a")
    desk.answer("b")
    desk.turn(20)
    (line,) = [text for text in desk.said.splitlines() if "shows no step now" in text]
    assert f"{desk.directory}/checkpoints had step 40" in line
    assert "assignment" not in desk.kinds()
    (desk.directory / "checkpoints" / "40").mkdir(parents=True)
    desk.turn(20)
    assert desk.assignment is not None
    assert (desk.assignment.source, desk.assignment.step) == ("storage", 40)
