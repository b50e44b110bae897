"""A host is to leave a live job: what the leader does, and what it answers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtft.cli.jobs import drained_line
from dtft.elastic.job_changes import ChangeRefused, drain
from tests.support.desks import ASSIGNMENT, LeaderDesk, record_of
from tests.support.obedient_desk import ObedientDesk, record_number

Make = Callable[..., ObedientDesk]


@pytest.fixture
def desk_of(tmp_path: Path) -> Iterator[Make]:
    made: list[ObedientDesk] = []

    def make(hosts: int, min_replicas: int = 0) -> ObedientDesk:
        made.append(ObedientDesk(tmp_path, hosts, min_replicas))
        return made[0]

    yield make
    for desk in made:
        desk.close()


def wanted(desk: ObedientDesk, host: str) -> None:
    desk.leader.draining_wanted(host, desk.answers.append)


def slots(desk: ObedientDesk) -> tuple[str, ...]:
    found = desk.leader._rendezvous.assignment
    return found.slots if found is not None else ()


def test_a_spare_takes_the_slot_at_the_next_commit_and_the_host_ends_after_one_more(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h1")
    assert not desk.answers and slots(desk) == ("h0", "h1")
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))
    desk.settle(2)
    assert not desk.answers and not desk.take("drained")  # its copies may be needed
    desk.commit(9)
    (answer,) = desk.answers
    assert (answer["host"], answer["slot"], answer["step"]) == ("h1", 1, 8)
    assert answer["bytes_from_storage"] == 0
    assert answer["successor"] == "h2"
    assert "h1 leaves job j; h2 has slot 1 now: went on" in drained_line("j", answer)
    assert [host for host, _ in desk.take("drained")] == ["h1"]
    (recovery,) = [it for it in desk.events() if it["event"] == "recovery"][-1:]
    assert recovery["steps_lost"] == 0 and recovery["survivors"] == 1
    desk.commit(10)
    assert slots(desk) == ("h0", "h2") and not desk.take("drained")


def test_a_drained_host_gets_no_slot_again(desk_of: Make) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h2")  # a spare
    assert desk.answers == [{"host": "h2", "slot": -1}]
    assert [host for host, _ in desk.take("drained")] == ["h2"]
    desk.lose("h1")
    desk.until(lambda: desk.leader._rendezvous.phase == "waiting")


def test_a_host_that_nobody_can_replace_stays(desk_of: Make) -> None:
    desk = desk_of(hosts=2)
    wanted(desk, "h1")
    assert "no host is left for the slot of h1" in desk.answers.pop()["error"]
    wanted(desk, "h7")
    refused = desk.answers.pop()
    assert refused["code"] == 2 and "it has h0, h1" in refused["error"]
    desk.commit(8)
    assert slots(desk) == ("h0", "h1") and not desk.take("drained")


def test_with_fewer_replicas_allowed_the_job_shrinks(desk_of: Make) -> None:
    desk = desk_of(hosts=2, min_replicas=1)
    wanted(desk, "h1")
    desk.commit(8)
    desk.settle(1)
    desk.commit(9)
    (answer,) = desk.answers
    assert slots(desk) == ("h0",) and answer["slot"] == 1
    assert answer["successor"] is None
    assert "fewer hosts, without slot 1: went on" in drained_line("j", answer)
    assert [host for host, _ in desk.take("drained")] == ["h1"]


def test_a_leader_that_leaves_lets_another_host_lead_the_formation(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h0")
    wanted(desk, "h0")
    assert not desk.resigned
    desk.commit(8)
    desk.until(lambda: bool(desk.resigned))
    desk.leader.close()
    assert all(answer["again"] for answer in desk.answers) and len(desk.answers) == 2
    desk.answers.clear()
    desk.config = replace(desk.config, host="h2")
    desk.register(replace(record_number(0), leaving=True))
    desk.lead()
    assert slots(desk) == ("h2", "h1")
    wanted(desk, "h0")  # those who asked repeat it
    assert not desk.answers
    desk.commit(9)
    assert [host for host, _ in desk.take("drained")] == ["h0"]
    assert (desk.answers[0]["slot"], desk.answers[0]["step"]) == (0, 8)
    recoveries = [it for it in desk.events() if it["event"] == "recovery"]
    assert "h0 (slot 0) leaves the job" in recoveries[-1]["fault"]
    desk.lose("h0")
    wanted(desk, "h0")  # it has gone
    assert desk.answers[1] == desk.answers[0]
    assert len(desk.resigned) == 1


def test_on_accelerators_the_next_leader_frees_the_others_of_a_leader_that_leaves(
    tmp_path: Path,
) -> None:
    desk = LeaderDesk(tmp_path, record_of("c"), hot_swap=True)
    # Slots of a and b; the agent of a serves the processes of both.
    served = replace(
        ASSIGNMENT,
        world=(5, 11, 0),
        places=(1, 2),
        service=("a", "a:7"),
    )
    for record in (record_of("a"), record_of("b", leaving=True), record_of("c")):
        desk.register(record)
    desk.put("m/assignment", served.to_json())
    desk.begin()  # c leads from now on
    try:
        assert [(to, it["places"]) for to, it in desk.take("give_up")] == [("a", [2])]
        kept = {to: it["keep"] for to, it in desk.take("reform")}
        assert kept == {"a": 5, "b": 0, "c": 5}
    finally:
        desk.close()


def test_two_may_ask_for_the_same_host(desk_of: Make) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h1")
    wanted(desk, "h1")
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))
    desk.settle(2)
    desk.commit(9)
    assert [it["host"] for it in desk.answers] == ["h1", "h1"]
    assert [host for host, _ in desk.take("drained")] == ["h1"]


def test_a_leader_without_a_slot_that_leaves_lets_another_host_lead(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=3)
    desk.leader.close()
    desk.config = replace(desk.config, host="h2")
    desk.lead()
    wanted(desk, "h2")
    assert not desk.answers and not desk.take("drained")
    desk.commit(8)
    desk.until(lambda: bool(desk.resigned))


def test_a_request_is_undone_if_the_spare_is_lost_before_the_commit(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h1")
    desk.lose("h2")
    desk.commit(8)
    (answer,) = desk.answers
    assert "no host is left for the slot of h1" in answer["error"]
    assert slots(desk) == ("h0", "h1")
    desk.commit(9)
    assert slots(desk) == ("h0", "h1") and not desk.take("drained")


def test_a_host_whose_heir_is_lost_before_the_next_commit_stays(desk_of: Make) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h1")
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))
    desk.settle(2)
    desk.lose("h2")
    desk.until(lambda: slots(desk) == ("h0", "h1"))
    desk.settle(2)
    (answer,) = desk.answers
    assert "no host is left for the slot of h1" in answer["error"]
    desk.commit(9)
    assert slots(desk) == ("h0", "h1") and not desk.take("drained")


def test_no_more_drained_hosts_stay_than_the_job_lacks(desk_of: Make) -> None:
    desk = desk_of(hosts=4)
    desk.leader.close()
    desk.config = replace(desk.config, host="h3")
    desk.lead()
    wanted(desk, "h0")
    wanted(desk, "h1")
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h2", "h3"))
    desk.settle(2)
    desk.lose("h2")
    desk.until(lambda: slots(desk) == ("h0", "h3"))
    desk.settle(2)
    (answer,) = desk.answers
    assert "no host is left for the slot of h0" in answer["error"]
    desk.commit(9)
    assert [host for host, _ in desk.take("drained")] == ["h1"]


def test_a_job_that_is_stopped_takes_no_drained_host_back(desk_of: Make) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h1")
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))
    desk.settle(2)
    desk.put("m/stop", "1")
    desk.lose("h2")
    desk.until(lambda: desk.phase == "waiting")
    desk.turn()
    assert not desk.answers and desk.phase == "waiting"


def test_a_host_that_is_started_anew_before_it_has_left_stays(desk_of: Make) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h1")
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))
    desk.settle(2)
    desk.lose("h1")
    anew = replace(record_number(1), incarnation="anew.1", joined_ns=9)
    desk.register(anew)
    desk.leader.connected(anew)
    desk.commit(9)
    (answer,) = desk.answers
    assert "started anew" in answer["error"] and not desk.take("drained")
    desk.lose("h2")
    desk.until(lambda: slots(desk) == ("h0", "h1"))


CUT = "its connection ended: reset"


def test_a_host_whose_link_is_cut_is_told_to_end_when_it_is_back(desk_of: Make) -> None:
    desk = desk_of(hosts=4)
    wanted(desk, "h1")
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))
    desk.settle(2)
    for number in (1, 3):
        desk.leader.disconnected(record_number(number), CUT)
    wanted(desk, "h3")  # a spare, which cannot be told now
    desk.commit(9)
    assert not desk.answers and not desk.take("drained")
    for number in (1, 3):
        desk.leader.connected(record_number(number))
    desk.commit(10)
    assert sorted(it["host"] for it in desk.answers) == ["h1", "h3"]
    assert sorted(host for host, _ in desk.take("drained")) == ["h1", "h3"]


def test_a_host_that_may_not_have_heard_that_it_is_to_end_is_told_again(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h2")
    assert len(desk.take("drained")) == 1
    desk.leader.disconnected(record_number(2), CUT)  # the order may be lost
    desk.leader.connected(record_number(2))
    assert [host for host, _ in desk.take("drained")] == ["h2"]
    desk.lose("h2")  # its lease is over, and it registers under the next number
    again = replace(record_number(2), incarnation="h2.2")
    desk.leader.connected(again)
    assert [host for host, _ in desk.take("drained")] == ["h2"]
    assert "h2" not in {it.host for it in desk.leader._registry.usable()}
    desk.leader.connected(replace(again, incarnation="anew.1"))
    assert not desk.take("drained") and len(desk.answers) == 1
    assert "h2" in {it.host for it in desk.leader._registry.usable()}


def leaving(desk: ObedientDesk, number: int) -> str:
    """A host's agent was told to end, and says so."""
    record = replace(record_number(number), leaving=True)
    desk.leader.connected(record)
    return record.host


def test_a_host_that_wants_to_leave_is_replaced_or_ends_at_once(desk_of: Make) -> None:
    desk = desk_of(hosts=3)
    host = leaving(desk, 1)
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))
    desk.settle(2)
    desk.commit(9)
    assert [it for it, _ in desk.take("drained")] == [host]
    assert leaving(desk, 2) == "h2"  # nobody is left for its slot
    assert [it for it, _ in desk.take("drained")] == ["h2"]
    assert "h2 leaves at once: no host is left for the slot of h2" in desk.said


def test_a_host_that_wants_to_leave_is_not_kept_for_a_job_that_waits(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=3)
    leaving(desk, 1)
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))
    desk.settle(2)
    desk.lose("h2")
    desk.until(lambda: desk.phase == "waiting")
    desk.turn()
    assert desk.phase == "waiting"


def test_a_commit_that_is_recorded_during_a_recovery_lets_nobody_end(
    desk_of: Make,
) -> None:
    """The host that is to leave has copies of this very step."""
    desk = desk_of(hosts=4)
    host = leaving(desk, 1)
    coordinator = desk.leader._rendezvous.coordinator
    assert coordinator is not None
    desk.lose("h0")
    assert desk.phase == "gathering" and desk.leader._rendezvous.assignment is None
    committed = replace(desk.leader._records.commits[0], step=8)
    desk.leader._recorded(committed, coordinator)
    assert not desk.take("drained")
    desk.until(lambda: desk.phase == "running", 20.0)
    desk.commit(9)
    assert [it for it, _ in desk.take("drained")] == [host]


def test_a_host_that_wants_to_leave_a_job_that_waits_ends_at_once(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=3)
    desk.report("h2", {"op": "unfit", "ballot": (0, 0), "why": "no memory"})
    desk.lose("h1")
    desk.until(lambda: desk.phase == "waiting")
    host = leaving(desk, 2)
    assert [it for it, _ in desk.take("drained")] == [host]


def test_a_host_that_wants_to_leave_gets_no_slot_in_the_formation_that_is_decided(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=4)
    desk.lose("h1")
    assert desk.phase == "gathering"
    host = leaving(desk, 2)
    desk.settle(2)
    assert slots(desk) == ("h0", "h3")
    desk.commit(8)
    assert [it for it, _ in desk.take("drained")] == [host]


def test_a_leader_that_ends_sends_requesters_to_the_next(desk_of: Make) -> None:
    desk = desk_of(hosts=3)
    wanted(desk, "h1")
    desk.leader.close()
    assert desk.answers.pop()["again"]
    desk.lead()
    wanted(desk, "h1")
    desk.commit(8)
    desk.until(lambda: slots(desk) == ("h0", "h2"))


class Served:
    is_served, job = True, "j"


def test_a_job_of_the_users_processes_is_refused() -> None:
    with pytest.raises(ChangeRefused, match="whoever starts them decides"):
        drain(Served(), "h1", 5.0)  # pyright: ignore[reportArgumentType]
