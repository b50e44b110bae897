"""Slots of ended trainers go to spares whose processes are in the world already."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.replication.copy_placement import Spread
from dtft.checkpoint.state.slices import Leaf
from dtft.elastic.anti_affinity import known_domains
from dtft.elastic.assignment import HostRecord, SizeLimits
from dtft.elastic.leader.leader import CAUSE_S
from dtft.elastic.leader.rendezvous import START_S
from dtft.elastic.leader.rendezvous_plan import (
    FETCH_BYTES_PER_S,
    Round,
    fill_with_ready,
)
from dtft.elastic.seat_policy import LAUNCHED, Seating
from tests.support.commits import HOSTS, assignment, holdings_of, layout
from tests.support.obedient_desk import ObedientDesk

STATE = layout(1, 4)
HELD = holdings_of(STATE, copies=2, step=7)
SPARES = ("s1", "s2")
LIVE = (*HOSTS, *SPARES)


def record(host: str, racks: dict[str, str] | None = None) -> HostRecord:
    """A host; spares joined first, so their order is that of their names."""
    return HostRecord(
        host=host,
        address="",
        incarnation=host,
        joined_ns=LIVE.index(host) if host in HOSTS else -1,
        pid=1,
        domain=f"rack={racks[host]}" if racks else "",
    )


def seating(
    hosts: tuple[str, ...] = LIVE, racks: dict[str, str] | None = None
) -> Seating:
    records = [record(host, racks) for host in hosts]
    domains, _ = known_domains(records)
    spread = Spread(copies=2)
    if racks:
        names = tuple(racks[host] for host in HOSTS)
        spread = Spread(copies=2, level="rack", domains=names)
    return Seating(
        usable=records,
        replies={host: {"holdings": HELD.get(host, {})} for host in hosts},
        num_slots=4,
        choose_size=lambda available, layout: 4,
        previous=assignment(spread),
        layout=STATE,
        limits=SizeLimits(),
        domains=domains,
    )


def seats(
    given: Seating, ready: set[str], start_s: float = 1.0, server: str = ""
) -> tuple[str, ...]:
    filled = fill_with_ready(
        *(given, LAUNCHED.fill),
        ready=ready,
        server=server,
        step=7,
        start_s=start_s,
    )
    return tuple(record.host if record else "" for record in filled)


def test_the_slot_of_an_ended_trainer_goes_to_a_spare_in_the_world() -> None:
    ready = {*LIVE} - {"h1"}
    assert seats(seating(), ready) == ("h0", "s1", "h2", "h3")
    assert seats(seating(), ready - {"s1"}) == ("h0", "s2", "h2", "h3")


def test_without_such_a_spare_the_host_keeps_its_slot() -> None:
    assert seats(seating(), {"h0", "h2", "h3"}) == HOSTS
    assert seats(seating(HOSTS), {"h0", "h2", "h3"}) == HOSTS
    assert seats(seating(), set()) == HOSTS  # all trainers restart


def test_one_start_is_as_slow_as_two() -> None:
    """The second host must start a process, and all others wait for it."""
    assert seats(seating(), {"h0", "h3", "s1"}) == HOSTS
    assert seats(seating(), {"h0", "h3", *SPARES}) == ("h0", "s1", "s2", "h3")


def test_a_lost_hosts_slot_goes_to_the_spare_that_need_not_start() -> None:
    left = ("h0", "h2", "h3", *SPARES)
    assert seats(seating(left), {*left} - {"s1"}) == ("h0", "s2", "h2", "h3")


def test_bytes_that_take_longer_than_a_start_stay_where_they_are() -> None:
    rows = 8 << 30
    seconds = rows * 4 / FETCH_BYTES_PER_S  # a quarter of the rows, of 16 bytes each
    big = Leaf(path="w", shape=(rows, 4), dtype="float32", spec=(("fsdp",),))
    state = replace(STATE, leaves=(big,))
    held = holdings_of(state, copies=2, step=7)
    replies = {host: {"holdings": held.get(host, {})} for host in LIVE}
    given = replace(seating(), layout=state, replies=replies)
    ready = {*LIVE} - {"h1"}
    assert seats(given, ready, 0.9 * seconds) == HOSTS
    assert seats(given, ready, 1.1 * seconds) == ("h0", "s1", "h2", "h3")
    half = {"holdings": {}, "prefetched": {1: rows * 2}}
    given = replace(given, replies={**replies, "s2": half})
    assert seats(given, ready, 0.6 * seconds) == ("h0", "s2", "h2", "h3")
    lost = {"holdings": {}}  # the agent of h1 has started anew
    given = replace(given, replies={**replies, "h1": lost})
    assert seats(given, ready, 0.1 * seconds) == ("h0", "s1", "h2", "h3")


def test_copies_stay_in_as_many_failure_domains() -> None:
    ready = {*LIVE} - {"h1"}
    racks = {"h0": "r1", "h1": "r2", "h2": "r1", "h3": "r2", "s1": "r1", "s2": "r1"}
    assert seats(seating(racks=racks), ready) == HOSTS
    assert seats(seating(racks={**racks, "s2": "r2"}), ready)[1] == "s2"


def test_one_slice_that_is_not_separated_leaves_the_others_apart() -> None:
    """h0 and h1 are neighbours in one rack, as if the job had begun so."""
    ready = {*LIVE} - {"h3"}
    racks = {"h0": "r1", "h1": "r1", "h2": "r1", "h3": "r2", "s1": "r1", "s2": "r1"}
    assert seats(seating(racks=racks), ready) == HOSTS


def test_the_server_of_all_processes_keeps_its_slot() -> None:
    ready = {*LIVE} - {"h1"}
    assert seats(seating(), ready, server="h1") == HOSTS
    assert seats(seating(), ready, server="h0") == ("h0", "s1", "h2", "h3")
    assert seats(seating(), ready, server="s2") == ("h0", "s1", "h2", "h3")


@given(there=st.sets(st.sampled_from(LIVE)), ready=st.sets(st.sampled_from(LIVE)))
def test_hosts_in_the_world_keep_their_slots(there: set[str], ready: set[str]) -> None:
    given = seating(tuple(host for host in LIVE if host in there))
    found = seats(given, ready & there)
    kept = [host for host in found if host]
    assert len(set(kept)) == len(kept) == min(4, len(there))
    assert set(kept) <= there
    for slot, host in enumerate(HOSTS):
        if host in ready & there:
            assert found[slot] == host
    if len(ready & there) >= 4:
        assert set(kept) <= ready


class Joined(ObedientDesk):
    """All hosts but those in `starting` have a process in the world.

    A host without a slot frees its copies when it is told to, and then has memory for
    any slot.
    """

    starting: frozenset[str] = frozenset()
    just_ended = ""
    """The host whose trainer has just ended; its next process is in no world yet."""

    def ordered(self, host: str, op: str, **fields: Any) -> None:
        """A host obeys."""
        super().ordered(host, op, **fields)
        if op == "expect" and fields["committed"]:
            self.members.discard(host)

    def report(self, host: str, message: dict[str, Any]) -> None:
        """A host that has left its slot says that its process is in the world."""
        world = self.leader._rendezvous.world
        is_member = host in world.indices and host != self.just_ended
        if message["op"] == "holdings" and is_member:
            message |= {"world": world.number, "place": world.indices[host]}
            message["joined"] = host not in self.starting
            message["reserved"] = host not in self.members
        super().report(host, message)

    def break_collective(self, host: str) -> None:
        """The collective of a trainer fails because a peer has gone."""
        old = self.leader._rendezvous.current
        assert old is not None
        told = {"op": "failed", "ballot": old.ballot, "slot": self.slot_of[host]}
        told |= {"step": 8, "phase": "step", "traceback": "", "log": ""}
        told["error"] = "JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: closed"
        self.report(host, told)

    @property
    def slot_of(self) -> Mapping[str, int]:
        """Host to slot."""
        return self.leader._rendezvous.slot_of

    def end_trainer(self, host: str) -> None:
        """A trainer is killed; its host has another process, which is in no world."""
        rendezvous = self.leader._rendezvous
        old = rendezvous.current
        assert old is not None
        self.starting |= {host}
        self.just_ended = host
        self.report(host, {"op": "trainer_exit", "ballot": old.ballot, "code": -9})
        self.until(lambda: rendezvous.current is not old)
        self.settle(2)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Joined]:
    """Each process has a coordination service of its own, as on CPU."""
    made = Joined(tmp_path, hosts=3, hot_swap=True, cpu_devices=1)
    made.commit(8)
    assert not made.leader._rendezvous.world.server
    yield made
    made.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Joined]:
    made = Joined(tmp_path, hosts=3, hot_swap=True)
    made.commit(8)
    yield made
    made.close()


def test_the_host_of_an_ended_trainer_becomes_a_spare(desk: Joined) -> None:
    desk.end_trainer("h1")
    assert desk.assignment is not None
    assert desk.assignment.slots == ("h0", "h2") and desk.assignment.rung == 0
    (recovery,) = [it for it in desk.events() if it["event"] == "recovery"][-1:]
    assert recovery["survivors_restarted"] == 0 and recovery["survivors"] == 1
    assert "h2 has slot 1 of h1" in recovery["fault"]
    assert "h1" in [host for host, _ in desk.take("join")]
    desk.commit(9)
    desk.end_trainer("h2")  # the process of h1 has not joined yet
    assert desk.assignment.slots == ("h0", "h2")
    desk.starting = frozenset()
    desk.commit(10)
    desk.members.add("h1")  # it has not freed the memory of its former slot yet
    desk.end_trainer("h2")
    assert desk.assignment.slots == ("h0", "h2")
    desk.commit(11)
    desk.starting = frozenset()
    desk.end_trainer("h2")
    assert desk.assignment.slots == ("h0", "h1")


def test_spares_free_copies_of_former_slots_at_the_first_commit(desk: Joined) -> None:
    told = [(host, it["committed"]) for host, it in desk.take("expect")]
    assert told == [("h2", False), ("h2", True)]
    desk.commit(9)
    assert not desk.take("expect")
    desk.end_trainer("h1")
    desk.commit(10)
    told = [(host, it["committed"]) for host, it in desk.take("expect")]
    assert told == [("h1", False), ("h1", True)]


def lost_in_a_restore(desk: Joined) -> Round:
    """h2 fetches the slices of slot 1 from h1, which is lost; the round of that."""
    desk.silent = {"h2"}  # it still restores
    with pytest.raises(AssertionError, match="not so"):
        desk.end_trainer("h1")
    current = desk.leader._rendezvous.current
    assert current is not None and current.decision is not None
    assert "h1" in current.decision.sent
    desk.lose("h1")
    return current


def test_a_sender_that_is_lost_in_a_restore_is_the_cause_of_its_failure(
    desk: Joined,
) -> None:
    """Otherwise a sound commit would be blamed, and no longer be restored."""
    old = lost_in_a_restore(desk)
    assert desk.leader._rendezvous.current is old
    told = {"op": "prepare_failed", "error": "h1 has gone", "corrupt": []}
    desk.report("h2", told | {"ballot": old.ballot})
    desk.until(lambda: desk.phase == "pausing")
    budget = desk.leader._rendezvous.failures._budget
    assert budget.fruitless == 2 and not budget.restores


def test_nobody_waits_for_a_sender_that_is_lost(alone: Joined) -> None:
    old = lost_in_a_restore(alone)
    assert alone.leader._rendezvous.current is not old


def test_a_sender_that_has_sent_everything_is_not_missed(alone: Joined) -> None:
    alone.end_trainer("h1")
    old = alone.leader._rendezvous.current
    alone.lose("h1")
    assert alone.leader._rendezvous.current is old


def test_with_services_of_their_own_others_leave_at_once(alone: Joined) -> None:
    old = alone.leader._rendezvous.current
    alone.break_collective("h0")
    alone.until(lambda: alone.leader._rendezvous.current is not old, CAUSE_S / 10)


def test_only_a_start_that_is_like_the_next_is_measured(desk: Joined) -> None:
    rendezvous = desk.leader._rendezvous
    assert rendezvous._start_s == START_S  # all trainers have started: not measured
    desk.end_trainer("h1")
    assert rendezvous._start_s == START_S  # h2 has kept its process
    desk.loop.turn(5)
    rendezvous.announced("h0")
    assert rendezvous._start_s == START_S
    desk.commit(9)
    desk.end_trainer("h2")  # and keeps its slot, as the process of h1 has not joined
    current = rendezvous.current
    assert current is not None and current.prepared["h2"]["peers"] > 0
    rendezvous.announced("h2")
    assert rendezvous._start_s == START_S  # it has fetched
    current.prepared["h2"]["peers"] = 0
    desk.loop.turn(5)
    rendezvous.announced("h2")
    assert rendezvous._start_s >= 5


def test_the_process_that_has_ended_is_declared_lost_not_one_that_missed_it(
    desk: Joined,
) -> None:
    """One service serves all processes, and the survivor's report comes first."""
    assert desk.leader._rendezvous.world.server == "h0"
    old = desk.leader._rendezvous.current
    desk.break_collective("h0")
    desk.turn(0.1)
    assert desk.leader._rendezvous.current is old
    desk.end_trainer("h1")
    assert desk.assignment is not None
    assert desk.assignment.slots == ("h0", "h2") and desk.assignment.rung == 0
    assert [fields["places"] for _, fields in desk.take("give_up")] == [[2]]
    new = desk.leader._rendezvous.current
    desk.turn(2 * CAUSE_S)
    assert desk.leader._rendezvous.current is new


def test_a_broken_collective_without_a_cause_forms_the_job_anew(desk: Joined) -> None:
    old = desk.leader._rendezvous.current
    desk.break_collective("h0")
    desk.until(lambda: desk.leader._rendezvous.current is not old, 2 * CAUSE_S)
    desk.settle(2)
    (recovery,) = [it for it in desk.events() if it["event"] == "recovery"][-1:]
    assert "Gloo all-reduce failed" in recovery["fault"]
