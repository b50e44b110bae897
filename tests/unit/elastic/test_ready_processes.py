"""Slots of ended trainers go to spares whose processes are in the world already."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.replication import FailureDomains
from dtft.checkpoint.replication.copy_placement import Spread
from dtft.checkpoint.state.slices import Leaf
from dtft.elastic.anti_affinity import known_domains
from dtft.elastic.assignment import HostRecord, SizeLimits
from dtft.elastic.leader.leader import CAUSE_S
from dtft.elastic.leader.recovery import decide
from dtft.elastic.leader.rendezvous import START_S
from dtft.elastic.leader.rendezvous_plan import (
    FETCH_BYTES_PER_S,
    FETCH_PART,
    Round,
    RoundReason,
    assign,
    fill_with_ready,
    redundant_holders,
    with_moves_undone,
)
from dtft.elastic.leader.world_plan import new_world
from dtft.elastic.seat_policy import LAUNCHED, Seating
from tests.support.commits import HOSTS, assignment, commit_of, holdings_of, layout
from tests.support.obedient_desk import ObedientDesk, record_number

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
    given: Seating,
    ready: set[str],
    start_s: float = 1.0,
    server: str = "",
    restore_s: float = 1e9,
) -> tuple[str, ...]:
    filled = fill_with_ready(
        *(given, LAUNCHED.fill),
        ready=ready,
        server=server,
        step=7,
        start_s=start_s,
        restore_s=restore_s,
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
    part = seconds / FETCH_PART
    assert seats(given, ready, 9 * seconds, restore_s=0.9 * part) == HOSTS
    assert seats(given, ready, 9 * seconds, restore_s=1.1 * part)[1] == "s1"
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


COMMIT = commit_of(STATE, 7)


def moved(
    *gone: str, whole: bool = False, slots: tuple[str, ...] = ("h0", "s1", "h2", "h3")
) -> Seating:
    """The slot of h1 went to s1 after step 7 was committed; then `gone` were lost."""
    given = seating(tuple(host for host in LIVE if host not in gone))
    held = {"s1": HELD["h1"]} if whole else {}
    replies = {host: {"holdings": it} for host, it in held.items()}
    previous = given.previous
    assert previous is not None
    return replace(
        given,
        replies={**given.replies, **replies},
        previous=replace(previous, generation=2, slots=slots, incarnations=slots),
    )


def filled(given: Seating, server: str = "") -> tuple[str, ...]:
    """The host of each slot after moves were undone, if need be."""
    found, has_moved = with_moves_undone(given, LAUNCHED.fill, COMMIT, server)
    assert has_moved
    return tuple(it.host if it else "" for it in LAUNCHED.fill(found))


def test_a_slot_goes_back_if_its_new_host_could_not_fetch() -> None:
    assert filled(moved()) == HOSTS
    assert filled(moved("s1")) == HOSTS
    assert filled(moved("h3")) == ("h0", "h1", "h2", "s1")


def test_a_new_host_that_has_every_slice_keeps_the_slot() -> None:
    assert filled(moved(whole=True)) == ("h0", "s1", "h2", "h3")
    assert filled(moved("h3", whole=True)) == ("h0", "s1", "h2", "s2")


def test_a_former_host_that_is_needed_gets_its_own_slot() -> None:
    """It has no memory for another one beside its copies."""
    assert filled(moved("h3", "s2", whole=True)) == ("h0", "h1", "h2", "s1")
    at = ("h0", "s1", "h2", "h1")
    assert filled(moved("h3", "s2", slots=at, whole=True)) == ("h0", "h1", "h2", "s1")
    assert filled(moved("h3", slots=at, whole=True)) == ("h0", "s1", "h2", "s2")


@pytest.mark.parametrize(
    ("slots", "spares", "server"),
    [
        (("h1", "h0", "h2", "h3"), (), ""),
        (("h1", "h0", "h2", "h3"), SPARES, ""),
        (("h1", "h0", "h2", "h3"), SPARES, "h1"),
        (("s1", "h0", "h2", "h3"), ("s1",), ""),
        (("s1", "h0", "h2", "h3"), SPARES, ""),
    ],
)
def test_a_host_that_has_another_slot_with_all_its_slices_keeps_it(
    slots: tuple[str, ...], spares: tuple[str, ...], server: str
) -> None:
    """Hosts that ended and came back have taken each other's slots."""
    given = seating((*HOSTS, *spares))
    assert given.previous is not None
    replies = {
        host: {"holdings": HELD.get(host, {}), "complete": {7: [slot]}}
        for slot, host in enumerate(slots)
    }
    given = replace(
        given,
        replies={**given.replies, **replies},
        previous=replace(given.previous, slots=slots, incarnations=slots),
    )
    found, _ = with_moves_undone(given, LAUNCHED.fill, COMMIT, server)
    hosts = tuple(it.host for it in LAUNCHED.fill(found) if it)
    assert hosts == slots


def test_a_former_host_that_is_unusable_stops_further_moves() -> None:
    given = moved(whole=True)
    usable = [it for it in given.usable if it.host != "h1"]
    asked = replace(given, usable=usable)
    assert with_moves_undone(asked, LAUNCHED.fill, COMMIT, "") == (asked, True)


def test_a_former_host_is_not_taken_before_other_spares() -> None:
    """Spares are taken in the order in which they joined; it joined long ago."""
    given = moved("h3", whole=True)
    first = [
        replace(it, joined_ns=-2) if it.host == "h1" else it for it in given.usable
    ]
    assert filled(replace(given, usable=first)) == ("h0", "s1", "h2", "s2")


def test_a_former_host_may_hold_a_part_of_its_slices() -> None:
    """Hosts that divide their snapshots copy some of their slices each."""
    given = moved()
    part = {7: dict(list(HELD["h1"][7].items())[:1])}
    assert set(part[7]) & {piece.key for piece in STATE.slices(1)}
    replies = {**given.replies, "h1": {"holdings": part}}
    assert filled(replace(given, replies=replies)) == HOSTS


def test_the_slot_of_the_server_of_all_processes_is_not_given_back() -> None:
    """Without a slot it could end without the job being formed anew."""
    given = moved()
    assert with_moves_undone(given, LAUNCHED.fill, COMMIT, "s1") == (given, True)
    assert with_moves_undone(given, LAUNCHED.fill, COMMIT, "h1") == (given, True)
    assert filled(given, server="h0") == HOSTS


def test_without_a_former_host_that_has_the_slices_nothing_is_undone() -> None:
    fill = LAUNCHED.fill
    for asked in (
        moved("h1"),
        replace(moved(), replies={host: {"holdings": {}} for host in LIVE}),
        replace(moved(), layout=None),
        replace(moved(), previous=None),
        seating(),
    ):
        assert with_moves_undone(asked, fill, COMMIT, "") == (asked, False)
    others = (
        replace(COMMIT, layout="another"),
        replace(COMMIT, holders=HOSTS[:3]),
        replace(COMMIT, holders=("h0", "s1", "h2", "h3")),
        None,
    )
    asked = moved()
    for commit in others:
        assert with_moves_undone(asked, fill, commit, "") == (asked, False)


@given(gone=st.sets(st.sampled_from(LIVE), max_size=2), whole=st.booleans())
def test_whoever_may_have_a_slot_fills_as_many_after_a_move_was_undone(
    gone: set[str], whole: bool
) -> None:
    given = moved(*gone, whole=whole)
    found, _ = with_moves_undone(given, LAUNCHED.fill, COMMIT, "")
    hosts = [it.host for it in LAUNCHED.fill(found) if it]
    assert len(set(hosts)) == len(hosts) == 4 and not gone & set(hosts)
    if "h1" in hosts:
        assert hosts[1] == "h1"


def copies_elsewhere(held: dict[str, Any], slots: tuple[str, ...]) -> set[str]:
    """The hosts that may free what they hold in the restore of step 7."""
    decision = decide(
        commits=[COMMIT], layout=STATE, holdings=held, slots=slots, storage_steps=()
    )
    assert decision.source == "memory"
    complete = {"h0": {7: [0]}, "s1": {7: [1]}}  # the slots of their arenas
    replies = {host: {"holdings": it} for host, it in held.items()}
    told = {host: {"holdings": {}} for host in LIVE} | replies
    for host, found in complete.items():
        told[host] = {**told[host], "complete": found}
    return redundant_holders(decision, slots, told)


def test_a_host_in_another_slot_may_free_copies_that_others_keep() -> None:
    held = {**HELD, "s1": HELD["h1"]}
    assert copies_elsewhere(held, ("h0", "h1", "h2", "s1")) == {"s1"}
    assert copies_elsewhere(held, ("h0", "s1", "h2", "h3")) == set()  # it has memory
    assert copies_elsewhere(held, ("h0", "s1", "h2", "h1")) == {"h1"}  # s1 keeps them
    assert copies_elsewhere(held, HOSTS) == set()
    assert copies_elsewhere(HELD, ("h0", "h1", "h2", "s1")) == set()  # it has none


def test_of_two_hosts_that_have_a_slice_alone_none_may_free_it() -> None:
    one = holdings_of(STATE, copies=1, step=7)
    held = {**one, "s1": one["h1"]}
    assert copies_elsewhere(held, ("h0", "s2", "s1", "h1")) == set()
    alone = {host: it for host, it in held.items() if host != "h1"}
    assert copies_elsewhere(alone, ("h0", "s2", "h2", "s1")) == set()


def restored(held: dict[str, Any], slots: tuple[str, ...], aside: str = ""):
    """The decision of a round in which `aside` is not reached by some host."""
    told = {"layouts": [STATE.to_json()], "corrupt": [], "finished": 7, "items": {}}
    replies = {host: {"holdings": held.get(host, {}), **told} for host in LIVE}
    round_ = Round(ballot=(1, 2), reasons=[RoundReason("")], detected=0.0)
    round_.replies.update(replies)
    _, decision = assign(
        round_,
        [record(host) for host in slots],
        previous=assignment(Spread(copies=2)),
        commits=[COMMIT],
        storage_steps=[3],
        quarantined=(),
        domains=FailureDomains(levels=(), names={}),
        copies=2,
        aside={aside} - {""},
        world=new_world(1, slots, lasts=True),
    )
    assert decision.located is not None, decision.passed_over
    relied = {host for hosts in decision.located.holders.values() for host in hosts}
    return decision.step, relied


def test_copies_that_others_keep_are_not_relied_on() -> None:
    """Their hosts may free them; hosts that are set aside are used only if need be."""
    slots = ("h0", "s1", "h2", "h3")
    held = {**HELD, "s1": HELD["h1"]}
    assert restored(held, slots) == (7, {*HOSTS})
    assert restored(held, slots, aside="h1") == (7, {"h0", "h2", "h3"})
    one = holdings_of(STATE, copies=1, step=7)
    held = {**one, "s1": one["h1"]}
    assert restored(held, ("h0", "s1", "h2", "s2"), aside="h3") == (7, {*HOSTS})


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


def test_a_sender_that_is_lost_after_the_restore_broke_is_its_cause(
    desk: Joined,
) -> None:
    """The report of the broken fetch may come before the loss is noticed."""
    desk.silent = {"h2"}  # it still restores
    with pytest.raises(AssertionError, match="not so"):
        desk.end_trainer("h1")
    rendezvous = desk.leader._rendezvous
    assert rendezvous.current is not None
    told = {"op": "prepare_failed", "error": "h1 has gone", "corrupt": []}
    old = rendezvous.current
    desk.leader.handle_report("h2", told | {"ballot": old.ballot})
    assert desk.phase == "gathering" and rendezvous.current is not old
    desk.lose("h1")  # before anybody has reported its copies
    desk.until(lambda: desk.phase == "pausing")
    budget = rendezvous.failures._budget
    assert budget.fruitless == 2 and not budget.restores


def test_a_host_that_is_lost_before_hosts_train_again_is_no_failure(
    desk: Joined,
) -> None:
    """It joins a job that waits, and ends, again and again."""
    desk.lose("h1")
    desk.lose("h2")
    desk.until(lambda: desk.phase == "waiting")
    budget = desk.leader._rendezvous.failures._budget
    assert budget.fruitless == 1
    for number in range(12):
        joined = replace(record_number(1), incarnation=f"h1.{number + 7}")
        desk.register(joined)
        desk.leader.connected(joined)
        assert desk.phase == "gathering"
        desk.lose("h1")
        desk.until(lambda: desk.phase == "waiting")
    assert desk.leader._rendezvous.failures._budget == budget


def test_a_slot_goes_back_after_its_new_host_could_not_restore(desk: Joined) -> None:
    """The second failure would quarantine the commit, which h1 holds."""
    desk.silent = {"h2"}
    with pytest.raises(AssertionError, match="not so"):
        desk.end_trainer("h1")
    current = desk.leader._rendezvous.current
    assert current is not None
    desk.members.discard("h2")  # it has no copy
    told = {"op": "prepare_failed", "error": "the link is slow", "corrupt": []}
    desk.report("h2", told | {"ballot": current.ballot})
    desk.until(lambda: desk.phase == "running", 3.0)
    assert desk.assignment is not None
    assert desk.assignment.slots == ("h0", "h1") and desk.assignment.step == 8
    assert not desk.leader._rendezvous.failures.quarantined


def test_a_host_that_is_lost_after_a_commit_is_no_failed_attempt(desk: Joined) -> None:
    """The job was formed anew for another reason, such as a drain."""
    desk.end_trainer("h1")
    rendezvous = desk.leader._rendezvous
    assert rendezvous._attempted
    desk.commit(9)
    rendezvous.form("h2 leaves the job")
    assert not rendezvous.has_failed("h2")


def test_a_lost_sender_is_not_blamed_for_a_later_failure(desk: Joined) -> None:
    """The restore had what it needed; the next failure has a cause of its own."""
    lost_in_a_restore(desk)
    failures = desk.leader._rendezvous.failures
    assert [it.kind for it in failures._failures] == ["lost"]
    failures.trained()
    assert not failures._failures


def test_a_host_that_lost_its_slot_is_needed_until_the_next_commit(
    desk: Joined,
) -> None:
    """With one copy of each slice, its copies are the only ones."""
    desk.end_trainer("h1")
    answers: list[dict[str, Any]] = []
    desk.leader.draining_wanted("h1", answers.append)
    assert not answers and not desk.take("drained")
    desk.commit(9)
    assert answers == [{"host": "h1", "slot": -1}]
    assert [host for host, _ in desk.take("drained")] == ["h1"]


def test_such_a_host_whose_agent_is_to_end_stays_until_the_next_commit(
    desk: Joined,
) -> None:
    desk.end_trainer("h1")
    desk.register(replace(record_number(1), leaving=True))
    desk.leader.connected(replace(record_number(1), leaving=True))
    desk.turn(1.0)
    assert not desk.take("drained")
    desk.commit(9)
    assert [host for host, _ in desk.take("drained")] == ["h1"]


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
