"""A live job is asked for another size: what the leader does, and what it answers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.timeouts import Timeouts
from dtft.cli.jobs import line
from dtft.elastic.assignment import resized
from dtft.elastic.inspect_job import NotThere, Observer
from dtft.elastic.job_changes import ChangeRefused, scale
from dtft.elastic.leader.records import ASSIGNMENT_PATIENCE_S
from tests.support.obedient_desk import STATE, ObedientDesk, record_number


@pytest.fixture
def desk_of(tmp_path: Path):
    made: list[ObedientDesk] = []

    def make(hosts: int, **options: Any) -> ObedientDesk:
        made.append(ObedientDesk(tmp_path, hosts, **options))
        return made[0]

    yield make
    for desk in made:
        desk.close()


def test_a_job_grows_at_the_next_commit_and_says_when_it_trains(desk_of) -> None:
    desk = desk_of(hosts=3)
    desk.ask(2)
    assert desk.answers.pop() == {"replicas": 2, "before": 2, "hosts": 2}
    desk.ask(5)
    refused = desk.answers.pop()
    assert refused["code"] == 2 and "Nearest allowed: 4 or 6" in refused["error"]
    desk.ask(4)
    assert "2 replicas" not in desk.answers[0]["error"]
    assert "4 replicas need 4 hosts, but 3 are here" in desk.answers.pop()["error"]
    desk.ask(3)
    desk.until(lambda: desk.leader.view.wanted)
    assert not desk.answers and desk.leader._rendezvous.phase == "running"
    desk.commit(8)
    desk.settle(3)
    desk.until(lambda: desk.answers)
    (answer,) = desk.answers
    assert (answer["replicas"], answer["before"], answer["step"]) == (3, 2, 8)
    assert answer["bytes_from_storage"] == 0
    (proof,) = [e for e in desk.events() if e["event"] == "resized"]
    assert proof["committed_root"] == proof["restored_root"] and not proof["differing"]
    prepared = [order for host, order in desk.take("prepare") if host == "h2"][-1]
    assert prepared["layout"] == resized(STATE, 3).to_json()
    assert len(prepared["addresses"]) == 3 and prepared["transfers"]


def test_a_new_leader_goes_on_with_the_wish(desk_of) -> None:
    desk = desk_of(hosts=3)
    desk.ask(1)
    desk.until(lambda: desk.leader.view.wanted)
    desk.leader.close()
    (told,) = desk.answers
    assert told["again"]
    desk.lead()
    desk.settle(1)
    desk.answers.clear()
    desk.ask(1)
    assert desk.answers == [{"replicas": 1, "before": 1, "hosts": 1}]


def test_a_store_that_has_lost_the_wish_is_told_of_it_by_the_hosts(desk_of) -> None:
    desk = desk_of(hosts=3)
    desk.ask(1)
    desk.until(lambda: desk.leader.view.wanted)
    desk.leader.close()
    desk.lead()
    desk.settle(1)
    desk.obeyed = desk.leader._rendezvous.assignment
    desk.leader.close()
    for name in ("m/size", "m/assignment"):
        desk.delete(name)
    for forms_again in range(2):  # the second leader reads what the first has written
        desk.lead()
        assert not desk.leader.view.wanted
        desk.settle(1)
        assert desk.leader._sizes.wanted == 1, forms_again
        desk.leader.close()


def test_the_last_request_counts_though_an_earlier_one_waits_for_the_store(
    desk_of,
) -> None:
    desk = desk_of(hosts=3)
    desk.loop.hold("records")
    desk.ask(3)
    desk.ask(2)
    overruled, reply = desk.answers
    assert "3 replicas was overruled by a later request for 2" in overruled["error"]
    assert reply == {"replicas": 2, "before": 2, "hosts": 2}
    desk.loop.let_go("records")
    desk.commit(8)
    assert desk.phase == "running"
    desk.until(lambda: desk.leader.view.wanted)
    assert desk.leader.view.wanted.slots == 2
    desk.commit(9)
    assert desk.phase == "running"


def test_a_request_for_another_size_is_answered_when_a_later_one_is_made(
    desk_of,
) -> None:
    desk = desk_of(hosts=3)
    desk.ask(3)
    desk.ask(1)
    (overruled,) = desk.answers
    assert "overruled by a later request for 1" in overruled["error"]
    desk.ask(1)
    desk.commit(8)
    desk.settle(1)
    assert [it["replicas"] for it in desk.answers[1:]] == [1, 1]


def rehearsing(desk_of: Callable[..., ObedientDesk]) -> ObedientDesk:
    """A job of two hosts that is to grow to three, of processes that compile ahead."""
    timeouts = replace(Timeouts(), start=20.0, restore=10.0)
    desk = desk_of(hosts=3, hot_swap=True, cpu_devices=1, timeouts=timeouts)
    desk.commit(8)  # the newcomer is in the world
    desk.take("rehearse")
    desk.ask(3)
    desk.until(lambda: desk.leader.view.wanted)
    desk.commit(9)
    assert desk.phase == "running"
    return desk


def test_a_job_grows_when_its_processes_have_compiled_for_the_size(desk_of) -> None:
    desk = rehearsing(desk_of)
    ordered = desk.take("rehearse")
    assert [host for host, _ in ordered] == ["h0", "h1", "h2"]
    assert {len(order["formations"][0]) for _, order in ordered} == {3}
    for step, host in enumerate(("h0", "h1", "h2"), 10):
        order = dict(ordered)[host]
        told = {name: order[name] for name in ("world", "turn", "formations")}
        earlier = told | {"turn": order["turn"] - 1}
        desk.report(host, {"op": "rehearsed", "ballot": order["ballot"], **earlier})
        desk.commit(step)
        assert desk.phase == "running" and not desk.take("rehearse")
        desk.report(host, {"op": "rehearsed", "ballot": order["ballot"], **told})
        desk.turn()
    desk.commit(13)
    desk.settle(3)
    assert desk.answers.pop()["replicas"] == 3


def test_a_process_that_does_not_compile_holds_a_size_back_for_a_while(desk_of) -> None:
    desk = rehearsing(desk_of)
    begun, step = desk.loop.now(), 10
    while len(desk.leader._rendezvous.slot_of) == 2:
        desk.commit(step := step + 1)
        desk.turn(1.0)
    waited_s = desk.loop.now() - begun
    assert abs(waited_s - desk.config.timeouts.start) < 3
    desk.settle(3)


def test_a_host_that_comes_while_others_compile_is_awaited(desk_of) -> None:
    desk = rehearsing(desk_of)
    orders = dict(desk.take("rehearse"))
    names = ("world", "turn", "formations")
    told = {name: orders["h0"][name] for name in names}
    rehearsed = {"op": "rehearsed", "ballot": orders["h0"]["ballot"], **told}
    for host in ("h0", "h1"):
        desk.report(host, rehearsed)
    desk.lose("h2")
    desk.commit(10)
    desk.register(record_number(3))
    desk.look()
    desk.leader.connected(record_number(3))
    joined = {"op": "joined", "ballot": rehearsed["ballot"], "world": told["world"]}
    desk.report("h3", joined)
    desk.commit(11)
    assert desk.phase == "running" and "h3" in dict(desk.take("rehearse"))
    desk.report("h3", rehearsed)
    desk.report("h3", joined)  # another process, which has compiled nothing yet
    desk.turn()
    desk.commit(12)
    assert desk.phase == "running" and len(desk.leader._rendezvous.slot_of) == 2
    desk.report("h3", rehearsed)
    desk.turn()
    desk.commit(13)
    desk.settle(3)


def growing(desk_of: Callable[..., ObedientDesk]) -> ObedientDesk:
    """A job of two hosts that grows to three, of which the new one does not answer."""
    desk = desk_of(hosts=3)
    desk.ask(3)
    desk.until(lambda: desk.leader.view.wanted)
    desk.silent = {"h2"}
    desk.commit(8)
    desk.until(lambda: desk.leader._rendezvous.phase == "preparing")
    return desk


def test_a_host_lost_while_the_job_grows_leads_back(desk_of) -> None:
    desk = growing(desk_of)
    desk.lose("h2")
    desk.settle(2)
    (answer,) = desk.answers
    assert "trains on 2 hosts, not on 3: a host was lost" in answer["error"]
    desk.silent.clear()
    desk.register(record_number(3))
    desk.leader.connected(record_number(3))
    desk.look()
    desk.commit(9)
    desk.settle(3)


def test_a_size_that_trainers_refuse_is_given_up(desk_of) -> None:
    desk = growing(desk_of)
    round_ = desk.leader._rendezvous.current
    assert round_ is not None
    fatal = {"op": "fatal", "ballot": round_.ballot, "message": "no memory for it"}
    desk.silent.clear()
    desk.leader.handle_report("h2", dict(fatal))
    desk.leader.handle_report("h1", dict(fatal))  # of the same round: it is over
    desk.settle(2)
    assert "no memory for it" in desk.answers.pop()["error"]
    assert "cannot train on 3 hosts" in desk.said
    desk.commit(9)
    assert desk.leader._rendezvous.phase == "running"  # not tried again unasked


def test_an_error_that_would_come_again_ends_the_job_with_its_last_step_stored(
    desk_of,
) -> None:
    desk = desk_of(hosts=2)
    desk.commit(8)
    round_ = desk.leader._rendezvous.current
    assert round_ is not None
    fatal = {"op": "fatal", "ballot": round_.ballot, "message": "no label", "code": 2}
    desk.leader.handle_report("h1", fatal)
    desk.exports.clear()
    desk.until(lambda: desk.phase == "ending")
    assert {step for _, step, _ in desk.exports} == {8} and "end" not in desk.kinds()
    current = desk.leader._rendezvous.current
    assert current is not None
    for host, step, _ in desk.exports:
        told = {"op": "exported", "step": step, "ok": True, "error": ""}
        desk.leader.handle_report(host, told | {"ballot": current.ballot})
    (last,) = [event for event in desk.events() if event["event"] == "end"]
    assert (last["status"], last["code"], last["step"]) == ("error", 2, 8)
    assert last["message"] == "no label"


def test_a_stop_after_growing_failed_still_stores_the_last_step(desk_of) -> None:
    desk = growing(desk_of)
    desk.lose("h2")
    desk.lose("h1")
    desk.until(lambda: desk.leader._rendezvous.phase == "waiting")
    desk.put("m/stop", "1")
    desk.look()
    desk.turn()
    assert desk.exports[-1] == ("h0", 8, 0)


def test_with_a_least_number_a_lost_host_is_not_waited_for(desk_of) -> None:
    desk = desk_of(hosts=2, min_replicas=1)
    desk.lose("h1")
    desk.settle(1)
    assert "waiting_for_host" not in desk.kinds()


@pytest.mark.parametrize("least", [0, 2])
def test_without_one_the_job_waits(desk_of, least) -> None:
    desk = desk_of(hosts=2, min_replicas=least)
    desk.lose("h1")
    desk.until(lambda: desk.leader._rendezvous.phase == "waiting")
    assert "no spare is left for slot 1" in desk.said
    assert "goes on when one comes back or another joins" in desk.said


def test_a_loss_while_the_store_is_away_is_named_with_what_it_waits_for(
    desk_of,
) -> None:
    desk = desk_of(hosts=3)
    desk.loop.hold("records")
    desk.lose("h1")
    desk.until(lambda: desk.phase == "assigning")
    desk.turn(ASSIGNMENT_PATIENCE_S)
    line = "h1 (slot 1) was lost: no step is trained until the store "
    assert line in desk.said
    desk.loop.let_go("records")
    desk.settle(2)
    assert desk.said.count(line) == 1


class Told(Observer):
    """An observer whose leader gives these answers, one after the other."""

    def __init__(self, *replies: dict[str, Any] | str, ended: str = "") -> None:
        self.replies, self.ended = list(replies), ended
        self.is_served = False

    def result(self) -> str | None:
        return self.ended or None

    def ask_leader(self, op: str, request: dict[str, Any], limit_s: float) -> dict:
        reply = self.replies.pop(0)
        if isinstance(reply, str):
            raise NotThere(reply)
        return reply


def test_who_asks_asks_the_next_leader_too(monkeypatch) -> None:
    monkeypatch.setattr("dtft.elastic.job_changes.PAUSE_S", 0.0)
    good = {"replicas": 3, "before": 2, "hosts": 3}
    gone = {"error": "this host does not lead any more", "again": True}
    found = scale(Told("refused", gone, good), 3, limit_s=9.0)
    assert found == good | {"asked_again": True}
    assert (
        line("j", found)
        == "job j trains with 3 replicas (3 hosts); its leader changed meanwhile"
    )
    assert scale(Told(good), 3, limit_s=9.0) == good | {"asked_again": False}
    with pytest.raises(ChangeRefused, match="nearest"):
        scale(Told({"error": "nearest 4", "code": 2}), 3, limit_s=9.0)
    with pytest.raises(RuntimeError, match="start 1 more"):
        scale(Told({"error": "start 1 more"}), 3, limit_s=9.0)
    with pytest.raises(RuntimeError, match=r"has ended \(done\)"):
        scale(Told(ended="done"), 3, limit_s=9.0)
    with pytest.raises(RuntimeError, match="after 0 s"):
        scale(Told(), 3, limit_s=0.0)


def test_what_is_printed() -> None:
    found = {"replicas": 3, "before": 2, "hosts": 3, "step": 20, "seconds": 2.0}
    found |= {"bytes_from_peers": 2048, "bytes_from_storage": 0}
    assert line("j", found) == (
        "job j trains with 3 replicas (3 hosts) instead of 2: went on from step 20, "
        "2.0 KiB from peers' memory and 0 B from storage, 2.00 s after it was asked for"
    )
    assert json.dumps(found)
