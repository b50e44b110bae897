"""A job comes to its end: the last evaluation, the last export, a stop."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtft.elastic.leader.commit_coordinator import GRACE_S
from dtft.elastic.leader.shutdown import EXPORT_FAILURES
from dtft.elastic.leader.storage import LONGEST_PAUSE_S
from tests.support.desks import LEASE_S
from tests.support.obedient_desk import ObedientDesk, record_number

Make = Callable[..., ObedientDesk]


@pytest.fixture
def desk_of(tmp_path: Path) -> Iterator[Make]:
    made: list[ObedientDesk] = []

    def make(**options: Any) -> ObedientDesk:
        made.append(ObedientDesk(tmp_path, **options))
        return made[0]

    yield make
    for desk in made:
        desk.close()


def ballot(desk: ObedientDesk) -> tuple[int, int]:
    round_ = desk.leader._rendezvous.current
    assert round_ is not None
    return round_.ballot


def say(desk: ObedientDesk, host: str, op: str, **fields: Any) -> None:
    desk.leader.handle_report(host, {"op": op, "ballot": ballot(desk), **fields})


def evaluates(desk: ObedientDesk, host: str, phase: str = "evaluate") -> None:
    told = {"computing": 8, "finished": 8, "phase": phase, "for_s": 1.0}
    told |= {"limit_s": 60.0, "timeout": "evaluate", "state": "R", "busy": 1.0}
    say(desk, host, "progress", slot=int(host[1:]), **told)


def test_a_job_formed_anew_at_its_last_step_may_evaluate_for_long(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=2)
    desk.silent = {"h0", "h1"}  # they are to say `running` after the evaluation
    say(desk, "h1", "trainer_exit", code=1)
    desk.until(lambda: desk.phase == "preparing")
    formed, start_s = ballot(desk), desk.config.timeouts.start
    for _ in range(2 * int(start_s) // 10):
        desk.turn(10.0)
        for host in ("h0", "h1"):
            evaluates(desk, host)
    assert desk.phase == "preparing" and ballot(desk) == formed
    for _ in range(int(start_s) // 10 + 1):  # what comes before it has the one limit
        desk.turn(10.0)
        evaluates(desk, "h0", "compile")
        evaluates(desk, "h1", "compile")
    assert ballot(desk) != formed
    (*_, why) = [it["reason"] for it in desk.events() if it["event"] == "forming"]
    assert why == "h0, h1 did not start training in time"


def finish(desk: ObedientDesk, step: int) -> None:
    desk.commit(step)
    for slot, host in enumerate(("h0", "h1")):
        say(desk, host, "finished", slot=slot, step=step, summary={})


def test_the_last_export_may_take_as_long_as_any_other(desk_of: Make) -> None:
    desk = desk_of(hosts=2)
    finish(desk, 8)
    formed, limit_s = ballot(desk), desk.config.timeouts.export
    tries = [(host, step) for host, step, _ in desk.exports]
    assert tries == [("h0", 8)]
    desk.turn(limit_s + 5.0)
    assert ballot(desk) == formed and "end" not in desk.kinds()
    say(desk, "h0", "exported", step=8, ok=True, error="", attempt=0)
    desk.turn()
    (end,) = [it for it in desk.events() if it["event"] == "end"]
    assert (end["status"], end["step"]) == ("done", 8)


@pytest.mark.parametrize("failed_before", [0, 9])
def test_the_last_export_is_tried_three_times_with_pauses(
    desk_of: Make, failed_before: int
) -> None:
    desk = desk_of(hosts=2)
    health = desk.leader._storage.health
    for step in range(failed_before):
        health.failed(step, "h0", "OSError: [Errno 28]", desk.loop.now())
    finish(desk, 8)
    formed = ballot(desk)
    longest_s = desk.config.timeouts.export + GRACE_S + LONGEST_PAUSE_S
    desk.turn((EXPORT_FAILURES + 1) * longest_s)
    assert ballot(desk) == formed
    assert [step for _, step, _ in desk.exports] == [8] * EXPORT_FAILURES
    (end,) = [it for it in desk.events() if it["event"] == "end"]
    assert end["message"] == "step 8 could not be written to storage"


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: step 8 is corrupt in this host's memory, so nothing",
        "FetchFailed: from h1: 1 corrupt slices",
    ],
)
def test_a_last_step_that_is_corrupt_in_memory_is_restored_from_a_peer_and_exported(
    desk_of: Make, error: str
) -> None:
    desk = desk_of(hosts=2)
    finish(desk, 8)
    formed = ballot(desk)
    said = {"step": 8, "ok": False, "error": error, "attempt": 0}
    say(desk, "h0", "exported", **said)
    round_ = desk.leader._rendezvous.current
    assert round_ is not None and round_.ballot != formed
    assert round_.read  # the corrupt copy must be found before slots are assigned
    desk.until(lambda: desk.phase == "running")
    for slot, host in enumerate(("h0", "h1")):
        say(desk, host, "finished", slot=slot, step=8, summary={})
    desk.turn(LONGEST_PAUSE_S)
    say(desk, "h0", "exported", step=8, ok=True, error="", attempt=0)
    (end,) = [it for it in desk.events() if it["event"] == "end"]
    assert (end["status"], end["step"]) == ("done", 8)


def test_a_corrupt_step_before_the_last_does_not_disturb_training(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=2)
    desk.commit(8)
    coordinator = desk.leader._rendezvous.coordinator
    assert coordinator is not None
    coordinator.export(8)
    formed, error = ballot(desk), "step 8 is corrupt in this host's memory, so nothing"
    say(desk, "h0", "exported", step=8, ok=False, error=error, attempt=0)
    assert ballot(desk) == formed and desk.phase == "running"


def test_a_stop_while_a_host_with_a_label_is_missing_stores_the_last_step(
    desk_of: Make,
) -> None:
    desk = desk_of(hosts=2)
    desk.leader.close()
    for number in range(2):
        label = f"rack=r{number}"
        desk.register(replace(record_number(number), domain=label))
    desk.lead()
    desk.commit(8)
    desk.lose("h1")
    desk.leader.close()
    desk.begin()  # this leader has no record of h1
    desk.until(lambda: desk.phase == "waiting", limit_s=LEASE_S)
    desk.exports.clear()
    desk.put("m/stop", "1")
    desk.look()
    desk.turn()
    assert desk.exports == [("h0", 8, 0)]
    say(desk, "h0", "exported", step=8, ok=True, error="", attempt=0)
    (end,) = [it for it in desk.events() if it["event"] == "end"]
    assert (end["status"], end["step"]) == ("stopped", 8)
