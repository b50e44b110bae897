"""A host is to leave a live job: what the leader does, and what it answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtft.cli.jobs import drained_line
from dtft.elastic.job_changes import ChangeRefused, drain
from tests.support.obedient_desk import ObedientDesk

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
    assert "another host has slot 1" in drained_line("j", answer)
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
    assert slots(desk) == ("h0",) and desk.answers[0]["slot"] == 1
    assert [host for host, _ in desk.take("drained")] == ["h1"]


def test_the_leader_itself_can_leave_and_two_may_ask(desk_of: Make) -> None:
    desk = desk_of(hosts=4)
    wanted(desk, "h0")
    wanted(desk, "h0")
    wanted(desk, "h1")
    desk.commit(8)
    desk.until(lambda: set(slots(desk)) == {"h2", "h3"})
    desk.settle(2)
    desk.commit(9)
    assert sorted(it["host"] for it in desk.answers) == ["h0", "h0", "h1"]
    assert {host for host, _ in desk.take("drained")} == {"h0", "h1"}


def test_a_host_that_asks_itself_is_told_to_end_in_any_case(desk_of: Make) -> None:
    desk = desk_of(hosts=2)
    round_ = desk.leader._rendezvous.current
    assert round_ is not None
    ballot = round_.ballot
    desk.leader.handle_report("h1", {"op": "leaving", "ballot": ballot})
    assert [host for host, _ in desk.take("drained")] == ["h1"]


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
