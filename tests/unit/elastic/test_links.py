"""Links between agents: who is followed, what silence means, and what a pause does."""

from collections.abc import Callable
from typing import Any

import pytest

from dtft.elastic.assignment import HostRecord
from dtft.elastic.links import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PROOF_PAUSE_S,
    PROOF_TRIES,
    FollowerLinks,
    LeaderLink,
    described,
)
from tests.support.desks import record_of
from tests.support.virtual_loop import VirtualLoop
from tests.support.virtual_world import VirtualChannel, VirtualNetwork

LEASE_S = 5.0
TICK_S = 0.1


class Node:
    """One agent's links, with all that they tell written down."""

    def __init__(self, wires: VirtualNetwork, host: str) -> None:
        self.wires, self.loop, self.record = wires, wires.loop, record_of(host)
        self.orders: list[Any] = []
        self.dead_leaders: list[str] = []
        self.connected: list[HostRecord] = []
        self.reports: list[tuple[str, Any]] = []
        self.lost: list[tuple[str, str]] = []
        self.dead: list[str] = []
        self.moved: list[tuple[int, str]] = []
        self.up = LeaderLink(
            *(lambda: self.record, wires, self.loop, LEASE_S),
            on_order=self.orders.append,
            on_dead=lambda record: self.dead_leaders.append(record.host),
            on_moved=lambda term, record: self.moved.append((term, record.host)),
        )
        self.down = FollowerLinks(
            *(wires, self.loop, LEASE_S),
            on_connected=self.connected.append,
            on_report=lambda host, message: self.reports.append((host, message)),
            on_lost=lambda record, why: self.lost.append((record.host, why)),
            on_dead=lambda record: self.dead.append(record.host),
            on_moved=lambda term, record: self.moved.append((term, record.host)),
        )
        self.listen()
        self.ticks, self._ticked_at = True, 0.0
        self._tick()

    def listen(self) -> None:
        self.wires.ports[self.record.address] = self.down.accept

    def _tick(self) -> None:
        """As an agent does; one that is stopped does not."""
        now = self.loop.now()
        late_s = now - self._ticked_at - TICK_S
        if self.ticks:
            paused_s = late_s if late_s > LEASE_S / 5 else 0.0
            self._ticked_at = now
            self.up.tick(paused_s)
            self.down.tick(paused_s)
        self.loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Its process stands still."""
        self.ticks = False
        self.wires.stop(self.record.host)

    def resume(self) -> None:
        """Its process goes on."""
        self.ticks = True
        self.wires.resume(self.record.host)

    def follow(self, term: int, leader: "Node") -> None:
        self.up.follow(term, leader.record)

    def die(self) -> None:
        """The process ends: its sockets are closed and its port refuses."""
        self.ticks = False
        del self.wires.ports[self.record.address]
        self.up.close()
        self.down.close()


@pytest.fixture
def wires() -> VirtualNetwork:
    return VirtualNetwork(VirtualLoop())


@pytest.fixture
def node(wires: VirtualNetwork) -> Callable[[str], Node]:
    return lambda host: Node(wires, host)


Make = Callable[[str], Node]


def joined(node: Make, *hosts: str) -> list[Node]:
    """Nodes of which all follow the first."""
    nodes = [node(host) for host in hosts]
    for follower in nodes[1:]:
        follower.follow(1, nodes[0])
    nodes[0].loop.turn(0.1)
    return nodes


def hosts(node: Node) -> set[str]:
    return {record.host for record in node.down.records}


def test_orders_and_reports_travel_and_signs_of_life_are_not_passed_on(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b, c = joined(node, "a", "b", "c")
    assert hosts(a) == {"b", "c"} and [it.host for it in a.connected] == ["b", "c"]
    b.up.send({"op": "held", "step": 3})
    a.down.send("c", {"op": "reform"})
    a.down.send("nobody", {"op": "reform"})
    wires.loop.turn(10 * LEASE_S)
    assert a.reports == [("b", {"op": "held", "step": 3})]
    assert c.orders == [{"op": "reform"}] and not b.orders
    assert not a.lost and b.up.hears and len(wires.dialed) == 2


def test_a_host_follows_the_newest_leader_and_tells_the_former(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b, c = joined(node, "a", "b", "c")
    b.follow(2, c)
    wires.loop.turn(0.1)
    assert a.moved == [(2, "c")] and hosts(a) == {"c"} and hosts(c) == {"b"}
    a.down.send("b", {"op": "reform"})  # of the former leader
    c.down.send("b", {"op": "release"})
    wires.loop.turn(0.1)
    assert b.orders == [{"op": "release"}] and b.up.term == 2
    assert not a.dead  # its port does not refuse


def test_a_renewed_term_of_the_same_leader_keeps_the_link(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    b.follow(2, a)
    b.up.follow(3, record_of("a", incarnation="a.2"))  # the same process
    wires.loop.turn(1)
    assert len(wires.dialed) == 1 and b.up.term == 3 and not a.moved


def test_another_process_of_the_leaders_name_is_another_leader(
    wires: VirtualNetwork, node: Make
) -> None:
    _, b = joined(node, "a", "b")
    b.up.follow(2, record_of("a", incarnation="new.1"))
    wires.loop.turn(1)
    assert len(wires.dialed) == 2


def test_a_leader_that_steps_down_closes_its_links(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    a.down.close()
    wires.loop.turn(0.05)
    assert not a.lost  # it does not care any more
    wires.loop.turn(1)
    assert b.up.hears and hosts(a) == {"b"}  # it calls anew while it knows no other


def test_a_cut_is_noticed_in_both_directions_within_a_lease_and_heals(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b, _ = joined(node, "a", "b", "c")
    wires.loop.turn(3)
    cut_at = wires.loop.now()
    wires.cut.add("b")
    wires.loop.turn_until(lambda: a.lost, 2 * LEASE_S)
    assert a.lost == [("b", "silent for 5 s")]
    assert wires.loop.now() - cut_at < LEASE_S + 1
    wires.loop.turn(2)
    assert not b.up.hears and not a.dead and not b.dead_leaders
    assert hosts(a) == {"c"}
    wires.cut.clear()
    wires.loop.turn(LONGEST_PAUSE_S + 1)
    assert b.up.hears and hosts(a) == {"b", "c"}


def test_a_stopped_follower_is_given_up_and_calls_again_when_it_goes_on(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b, c = joined(node, "a", "b", "c")
    b.stop()
    wires.loop.turn(LEASE_S + 1)
    assert a.lost == [("b", "silent for 5 s")] and hosts(a) == {"c"}
    assert not a.dead
    b.resume()
    wires.loop.turn(1)
    assert b.up.hears and hosts(a) == {"b", "c"}


def test_a_short_stop_costs_no_link(wires: VirtualNetwork, node: Make) -> None:
    a, b, _ = joined(node, "a", "b", "c")
    for stopped in (a, b):
        stopped.stop()
        wires.loop.turn(LEASE_S / 2)
        stopped.resume()
        wires.loop.turn(2 * LEASE_S)
    assert not a.lost and len(wires.dialed) == 2


def test_a_leader_that_stood_still_gives_nobody_up_at_once(
    wires: VirtualNetwork, node: Make
) -> None:
    a, *_ = joined(node, "a", "b", "c")
    wires.loop.pause(2 * LEASE_S)  # of the machine: nobody did anything
    wires.loop.turn(0.5)
    assert not a.lost and hosts(a) == {"b", "c"}
    wires.loop.turn(3 * LEASE_S)
    assert not a.lost and len(wires.dialed) == 2


def test_a_stopped_leader_is_called_anew_and_not_said_to_be_dead(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    a.stop()
    wires.loop.turn(LEASE_S + 1)
    assert not b.up.hears
    wires.loop.turn(LEASE_S)
    assert len(wires.dialed) > 1 and not b.dead_leaders
    a.resume()
    wires.loop.turn(LONGEST_PAUSE_S + 1)
    assert b.up.hears and hosts(a) == {"b"}


def test_a_link_that_breaks_is_made_again_at_once(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    a.down.drop("b")
    wires.loop.turn(0.2)
    assert b.up.hears and hosts(a) == {"b"}


def test_a_dead_host_is_proved_dead_by_its_port(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b, _ = joined(node, "a", "b", "c")
    b.die()
    wires.loop.turn(0.1)
    assert a.dead == ["b"] and hosts(a) == {"c"}
    ((host, why),) = a.lost
    assert host == "b" and why.startswith("its connection ended")


def test_a_port_that_refuses_a_little_later_is_proof_as_well(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    b.ticks = False
    b.up.close()  # a dying process closes one socket after another
    wires.loop.turn(PROOF_TRIES * PROOF_PAUSE_S / 2)
    assert not a.dead
    del wires.ports[b.record.address]
    wires.loop.turn(PROOF_TRIES * PROOF_PAUSE_S)
    assert a.dead == ["b"]


def test_a_host_that_lives_is_not_called_dead(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    b.ticks = False
    b.up.close()
    wires.loop.turn(10 * LEASE_S)
    assert a.lost and not a.dead


def test_a_leader_whose_port_refuses_is_dead(wires: VirtualNetwork, node: Make) -> None:
    a, b = joined(node, "a", "b")
    a.die()
    wires.loop.turn(1)
    assert b.dead_leaders and set(b.dead_leaders) == {"a"}
    # It is tried less and less often.
    tries = len(wires.dialed)
    wires.loop.turn(10 * LONGEST_PAUSE_S)
    assert 8 <= len(wires.dialed) - tries <= 10 + LONGEST_PAUSE_S / FIRST_PAUSE_S


def test_a_link_that_the_same_process_makes_anew_was_lost_before(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    b.stop()
    b.wires.stopped.pop("b")
    again = node("b")  # calls before the leader has heard of its first link's end
    again.follow(1, a)
    wires.loop.turn(0.05)
    assert hosts(a) == {"b"} and [it.host for it in a.connected] == ["b", "b"]
    assert a.lost == [("b", "it has made another connection")] and not a.dead


def test_a_second_link_of_a_host_takes_the_place_of_the_first(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    b.stop()
    b.wires.stopped.pop("b")  # it was started anew; the old process is stopped still
    again = node("b")
    again.record = record_of("b", incarnation="new.1")
    again.follow(1, a)
    b.up.close()
    wires.loop.turn(0.05)
    assert [record.incarnation for record in a.down.records] == ["new.1"]
    assert not a.lost and not a.dead


def test_two_processes_of_one_name_do_not_call_without_a_pause(
    wires: VirtualNetwork, node: Make
) -> None:
    a, _ = joined(node, "a", "b")
    again = node("b")
    again.record = record_of("b", incarnation="new.1")
    again.follow(1, a)
    wires.loop.turn(10 * LONGEST_PAUSE_S)
    assert len(wires.dialed) < 40


def test_what_a_host_says_anew_of_itself_is_known(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    b.up.send(described(record_of("b", incarnation="b.2", process=4)))
    b.up.send(described(record_of("c")))  # nobody speaks for another
    b.up.send({"op": "described", "record": "no record"})
    b.up.send({"op": "moved", "term": True, "leader": record_of("c").to_json()})
    b.up.send({"op": "moved", "leader": 7})
    wires.loop.turn(0.1)
    assert [(it.incarnation, it.process) for it in a.down.records] == [("b.2", 4)]
    assert a.connected[-1].incarnation == "b.2" and len(a.connected) == 2
    assert not a.reports and not a.moved


@pytest.mark.parametrize(
    "changes",
    [{"record": "x"}, {"host": "c"}, {"incarnation": "b.9"}, {"record": None}],
)
def test_a_hello_that_is_none_is_refused(
    wires: VirtualNetwork, node: Make, changes: dict[str, Any]
) -> None:
    a, record = node("a"), record_of("b")
    hello = {"op": "control", "host": "b", "incarnation": "b.1", "term": 1}
    hello |= {"record": record.to_json()} | changes
    channel = VirtualChannel(wires, "a", "b:1")
    assert a.down.accept(hello, channel) is None and not a.connected


def test_an_order_that_is_none_ends_the_link_for_a_while(
    wires: VirtualNetwork, node: Make
) -> None:
    a, b = joined(node, "a", "b")
    b.up.refuse("reform: no ballot")
    assert not b.up.hears
    wires.loop.turn(LONGEST_PAUSE_S - 0.5)
    assert len(wires.dialed) == 1
    wires.loop.turn(1)
    assert b.up.hears and hosts(a) == {"b"}


def test_who_was_dialed_in_vain_is_left_for_the_newest(
    wires: VirtualNetwork, node: Make
) -> None:
    """A leader changes while the connection to it is being made."""
    a, b, c = (node(host) for host in "abc")
    b.follow(1, a)
    b.follow(2, c)
    wires.loop.turn(0.2)
    assert hosts(a) == set() and hosts(c) == {"b"}
