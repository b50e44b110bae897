"""Trainers that an agent starts: real processes that die, hang or do not read."""

import logging
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtft.checkpoint.managers.agent_link import AGENT_SOCKET, NoAgent, ask, attach
from dtft.checkpoint.memory.own_copies import Room
from dtft.elastic.host import trainers as module
from dtft.elastic.host.follower import MOST_WARM_S, ROOM_AGAIN_S, WARM_S, Follower
from dtft.elastic.host.trainers import AttachedTrainer, Command, Trainers
from dtft.elastic.processes import ended_with, process_alive
from tests.support.desks import agent_config
from tests.support.hosts import JOB, wait_until
from tests.support.virtual_loop import VirtualLoop

Events = queue.Queue[tuple[Any, ...]]
TRAINER = """
import os, sys, time
from pathlib import Path
from dtft.checkpoint.managers.agent_link import AgentLink, hello
link = AgentLink.connect(Path(os.environ["DTFT_AGENT_SOCKET"]), 5.0)
hello(link, {})
while True:
    message = link.receive()
    if message["op"] == "start":
        link.send("running", slot=message["slot"])
        for op in message.get("says", ()):
            link.send(op, slot=message["slot"])
        if not message.get("obeys"):
            time.sleep(60)
    elif message["op"] == "join":
        link.send("joined", world=message["world"]["number"])
    elif message["op"] == "leave":
        link.send("left_slot", number=message["number"])
    elif message["op"] == "keys":
        link.send("found", keys=message["keys"])
"""


@pytest.fixture
def events() -> Events:
    return queue.Queue()


@pytest.fixture
def trainers(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Trainers]:
    """Those of one host, which tell that they have their slot and then sleep."""
    monkeypatch.setattr(module, "SEND_S", 1)
    command = {"trainer_command": (sys.executable, "-c", TRAINER)}
    config = agent_config(tmp_path, "a", arena_directory=tmp_path, **command)
    config.memory_directory.mkdir()
    made = Trainers(
        config.memory_directory / AGENT_SOCKET,
        job="j",
        host="a",
        deadline_s=5.0,
        command=Command.of(config),
    )
    made.bind(lambda *event: events.put(event))
    yield made
    made.close()


def started(trainers: Trainers, slot: int, **more: Any) -> AttachedTrainer:
    trainers.start({"slot": slot, "world": {"number": 1, "index": 1}, **more})
    assert trainers._trainer is not None
    return trainers._trainer


@pytest.mark.parametrize(
    "given, made",
    [
        ("", "glibc.cpu.x86_non_temporal_threshold=2097152"),
        ("a.b=1", "a.b=1:glibc.cpu.x86_non_temporal_threshold=2097152"),
        *[("glibc.cpu.x86_non_temporal_threshold=9000000",) * 2],
    ],
)
def test_trainers_copy_past_the_caches_from_a_size_that_the_user_can_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, made: str
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    config = agent_config(tmp_path, "a", trainer_command=("true",))
    assert Command.of(config).environment["GLIBC_TUNABLES"] == made


def test_a_standby_that_was_started_before_has_the_slot(
    trainers: Trainers, events: Events
) -> None:
    trainers.ensure_standby()
    ident = trainers.waiting
    wait_until(lambda: trainers._known[ident].outbox is not None)
    assert started(trainers, 3).ident == ident
    said = events.get(timeout=20)
    assert said == ("trainer", ident, {"op": "running", "slot": 3})
    assert trainers.is_active(ident) and not trainers.waiting
    trainers.let_go()
    assert events.get(timeout=20) == ("trainer_exit", ident, -9)
    assert not trainers.exited(ident)  # nobody's any more


@pytest.mark.parametrize("killed_by", ["itself", "the agent"])
def test_a_standby_that_ends_by_itself_is_told_of(
    trainers: Trainers, events: Events, killed_by: str
) -> None:
    trainers.ensure_standby()
    ident = trainers.waiting
    if killed_by == "itself":
        process = trainers._known[ident].process
        assert process is not None
        process.kill()
    else:
        trainers.let_go("the job's state is bad", waiting=True)
    assert events.get(timeout=20) == ("trainer_exit", ident, -9)
    if killed_by == "itself":
        assert events.get(timeout=20) == ("standby_exit", -9)
    time.sleep(0.1)
    assert events.empty() and not trainers.waiting


class Standbys:
    """In place of trainers: counts the standbys that are started."""

    def __init__(self) -> None:
        self.started, self.can_start = 0, True
        self.emit: Any = None

    def bind(self, emit: Any) -> None:
        self.emit = emit

    def ensure_standby(self) -> None:
        if not self.can_start:
            raise OSError("no memory")
        self.started += 1


@pytest.mark.parametrize("can_start", [True, False])
def test_a_standby_that_fails_is_started_again_after_longer_and_longer_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, can_start: bool
) -> None:
    loop, standbys = VirtualLoop(), Standbys()
    parts: Any = SimpleNamespace(
        trainers=standbys, board=None, copies=None, exports=None, resharding=None
    )
    made: list[Follower] = []
    made.append(
        Follower(
            agent_config(tmp_path, "a"),
            JOB,
            parts,
            loop,
            lambda *event: made[0].happened(*event),
            lambda op, **fields: None,
        )
    )
    (follower,) = made
    standbys.can_start = can_start

    def release_until_a_start() -> float:
        """Seconds of releases, one every 0.5 s, until a standby is started."""
        began, before = loop.now(), standbys.started
        while standbys.started == before:
            follower.warm()
            loop.turn(0.5)
            if not can_start and loop.now() > began + 200:
                return 0.0
        standbys.emit("standby_exit", 1)
        return loop.now() - began - 0.5

    if can_start:
        pauses = [release_until_a_start() for _ in range(7)]
        assert pauses == [0, 5, 10, 20, 40, 60, 60]
    else:
        release_until_a_start()
    assert caplog.text.count("the next one is started after 5 s") == 1
    said = "ended with code 1" if can_start else "can be started (no memory)"
    assert said in caplog.text
    standbys.can_start = True
    loop.turn(2 * MOST_WARM_S)
    assert release_until_a_start() == 0.0
    assert release_until_a_start() == WARM_S
    assert caplog.text.count("the next one is started after 5 s") == 2


def test_a_trainer_gets_buffers_for_a_step_once_some_are_free(tmp_path: Path) -> None:
    loop, sent = VirtualLoop(), list[tuple[str, dict[str, Any]]]()
    room, stuck = Room(base=-1, buffers=b"\x01"), [True]

    def begin_stage(step: int) -> Room:
        if stuck[0]:
            raise RuntimeError(f"no free buffer for step {step}")
        return room

    parts: Any = SimpleNamespace(
        trainers=SimpleNamespace(
            bind=lambda emit: None,
            is_active=lambda ident: True,
            send=lambda op, **fields: sent.append((op, fields)),
        ),
        board=None,
        copies=SimpleNamespace(
            holder=SimpleNamespace(begin_stage=begin_stage), share=lambda turn: b"\x01"
        ),
        exports=None,
        resharding=None,
    )
    told: list[str] = []
    follower = Follower(
        agent_config(tmp_path, "a"),
        JOB,
        parts,
        loop,
        lambda *event: None,
        lambda op, **fields: told.append(op),
    )
    task: Any = SimpleNamespace(turn=0, wanted=None)
    follower._task = task
    follower.happened("trainer", 1, {"op": "stage", "step": 7})
    loop.turn(5.0)
    assert sent == told == []
    stuck[0] = False
    loop.turn(ROOM_AGAIN_S)
    answer = {"step": 7, "copied": b"\x01", "base": -1, "buffers": b"\x01"}
    assert sent == [("room", answer)]
    stuck[0] = True
    follower.happened("trainer", 1, {"op": "stage", "step": 8})
    follower._task, stuck[0] = None, False  # the slot is given up
    loop.turn(5.0)
    assert len(sent) == 1 and told == []


@pytest.mark.parametrize("linked_first", [True, False])
def test_one_that_dies_as_it_is_given_its_slot_is_found_by_its_exit(
    trainers: Trainers, events: Events, linked_first: bool
) -> None:
    trainers.ensure_standby()
    ident = trainers.waiting
    if linked_first:
        wait_until(lambda: trainers._known[ident].outbox is not None)
    trainer = trainers._known[ident]
    assert trainer.process is not None
    with trainers._lock:  # no event can come
        trainer.process.kill()
        trainers.start({"slot": 0, "world": {"number": 1, "index": 1}})
        trainers.send("release", step=1)
    assert events.get(timeout=20)[:2] == ("trainer_exit", ident)
    assert trainers.exited(ident)


@pytest.mark.parametrize("known", ["to the kernel", "to a thread", "to an event"])
def test_an_end_that_nobody_asked_about_is_told_by_letting_go(
    known: str, trainers: Trainers, events: Events
) -> None:
    trainer = started(trainers, 0)
    process = trainer.process
    assert process is not None and events.get(timeout=20)[0] == "trainer"
    if known == "to an event":
        process.kill()
        assert events.get(timeout=20) == ("trainer_exit", trainer.ident, -9)
        assert trainers.let_go() == -9
    else:
        with trainers._lock:  # no event can come
            process.kill()
            if known == "to the kernel":
                wait_until(lambda: ended_with(process) is not None)
            else:
                assert trainer.ended.wait(20)
            assert trainers.let_go() == -9
        assert events.get(timeout=20)[0] == "trainer_exit"
    assert not trainers.exited(trainer.ident) and trainers.let_go() is None


def test_letting_go_of_a_trainer_that_runs_tells_no_end(trainers: Trainers) -> None:
    assert trainers.let_go() is None
    trainer = started(trainers, 0)
    assert trainers.let_go() is None and trainer.ended.wait(20)
    trainer = started(trainers, 0)
    assert trainer.process is not None
    trainer.process.kill()
    assert trainer.ended.wait(20) and trainers.exited(trainer.ident)
    assert trainers.let_go() is None


def test_a_process_that_does_not_die_is_given_up_by_name_and_replaced(
    trainers: Trainers,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "KILL_S", 3.0)
    first = started(trainers, 0)
    assert events.get(timeout=20)[0] == "trainer"
    assert first.process is not None
    monkeypatch.setattr(first.process, "kill", lambda: None)  # as in state D
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        trainers.let_go()
        second = started(trainers, 1)
        assert events.empty()  # it was not waited for: the event loop goes on
        assert events.get(timeout=20)[:2] == ("trainer_exit", first.ident)
    assert time.monotonic() - begun >= 3.0
    assert f"process {first.pid} of a still runs 3 s after SIGKILL" in caplog.text
    assert not trainers.exited(first.ident) and trainers.is_active(second.ident)
    assert events.get(timeout=20)[1:] == (second.ident, {"op": "running", "slot": 1})
    assert process_alive(first.pid)
    monkeypatch.undo()
    first.process.kill()
    assert first.ended.wait(10)
    trainers.let_go()
    # The end of the one that was given up is not told twice.
    assert events.get(timeout=20)[:2] == ("trainer_exit", second.ident)
    assert events.empty()


def test_a_slot_is_told_only_when_the_trainer_before_has_gone(
    trainers: Trainers, events: Events
) -> None:
    for slot in range(3):
        trainer = started(trainers, slot)
        trainers.ensure_standby()
        assert events.get(timeout=20)[1:] == (
            trainer.ident,
            {"op": "running", "slot": slot},
        )
        trainers.let_go()
        assert events.get(timeout=20)[:2] == ("trainer_exit", trainer.ident)


def test_a_trainer_that_does_not_read_is_killed_and_nobody_waits_for_it(
    trainers: Trainers, events: Events
) -> None:
    trainer = started(trainers, 0)
    assert events.get(timeout=20)[0] == "trainer"
    trainers.send("restore", buffers=bytes(32 << 20))
    trainers.send("release", step=1)
    assert events.empty()  # it has still SEND_S to read
    assert events.get(timeout=20) == ("trainer_exit", trainer.ident, -9)
    assert trainers.exited(trainer.ident)


def test_a_trainer_that_leaves_its_slot_is_taken_into_the_next_formation(
    trainers: Trainers, events: Events
) -> None:
    first = started(trainers, 0, obeys=True)
    assert events.get(timeout=20)[0] == "trainer"
    trainers.ensure_standby()
    assert trainers.leave(5, world=1) and not trainers.is_active(first.ident)
    assert events.get(timeout=20) == ("left_slot", 5, None)
    assert trainers.membership == (1, 1, True) and trainers.waiting != first.ident
    assert started(trainers, 3, obeys=True) is first
    said = events.get(timeout=20)
    assert said == ("trainer", first.ident, {"op": "running", "slot": 3})
    assert not trainers.leave(6, world=2)  # it is in another world
    assert trainers.leave(7, world=1)
    assert events.get(timeout=20) == ("left_slot", 7, None)
    trainers.start(
        {"slot": 1, "world": {"number": 2, "index": 1}}
    )  # a new world, a new process
    told = [events.get(timeout=20) for _ in range(2)]
    assert ("trainer_exit", first.ident, -9) in told
    assert trainers.waiting == 0 and trainers.pid != first.pid


def test_keys_reach_a_trainer_after_its_slot_even_before_it_has_attached(
    trainers: Trainers, events: Events
) -> None:
    trainers.share({"k": "lost"})  # no trainer has a slot
    trainer = started(trainers, 0, obeys=True)
    trainers.share({"k": "01"})
    said = [events.get(timeout=20)[2] for _ in range(2)]
    assert said == [{"op": "running", "slot": 0}, {"op": "found", "keys": {"k": "01"}}]
    assert trainers.leave(5, world=1)
    trainers.share({"k": "02"})  # it has no slot any more
    assert events.get(timeout=20) == ("left_slot", 5, None)
    assert trainer.orders == [] and events.empty()


def test_a_trainer_that_does_not_leave_is_killed(
    trainers: Trainers, events: Events
) -> None:
    trainer = started(trainers, 0)
    assert events.get(timeout=20)[0] == "trainer"
    assert trainers.leave(5, world=1)
    trainers.end_leaving(4)  # an earlier order
    assert trainers.leaving_pid(4) == 0
    assert trainers.leaving_pid(5) == trainer.pid
    assert events.empty()
    trainers.end_leaving(5)
    assert events.get(timeout=20) == ("left_slot", 5, None)
    assert events.get(timeout=20) == ("trainer_exit", trainer.ident, -9)
    assert trainers.membership == (0, 0, False) and not trainers.exited(trainer.ident)


def test_a_trainer_that_still_leaves_is_killed_when_the_next_is_to_leave(
    trainers: Trainers, events: Events
) -> None:
    first = started(trainers, 0)
    assert events.get(timeout=20)[0] == "trainer"
    assert trainers.leave(5, world=1)  # which it does not do
    second = started(trainers, 1)
    assert events.get(timeout=20)[:2] == ("trainer", second.ident)
    assert trainers.leave(6, world=1)
    assert events.get(timeout=20) == ("trainer_exit", first.ident, -9)
    assert trainers.leaving_pid(5) == 0 and trainers.leaving_pid(6) == second.pid


def test_a_trainer_that_an_exception_ends_is_not_waited_for(
    trainers: Trainers, events: Events
) -> None:
    trainer = started(trainers, 0, says=["ending", "failed"])
    said = [events.get(timeout=20)[2]["op"] for _ in range(2)]
    assert said == ["running", "failed"]
    assert not trainers.leave(5, world=1)
    assert trainers.let_go() is None
    assert events.get(timeout=20) == ("trainer_exit", trainer.ident, -9)
    assert not trainers.exited(trainer.ident)


def test_a_trainer_whose_collective_has_broken_leaves_its_slot_and_stays(
    trainers: Trainers, events: Events
) -> None:
    trainer = started(trainers, 0, says=["failed"], obeys=True)
    said = [events.get(timeout=20)[2]["op"] for _ in range(2)]
    assert said == ["running", "failed"]
    assert trainers.leave(5, world=1)
    assert events.get(timeout=20) == ("left_slot", 5, None)
    assert trainer.process is not None and trainer.process.poll() is None


def test_a_spare_joins_a_world_and_is_taken_from_it(
    trainers: Trainers, events: Events
) -> None:
    for number in (1, 1, 2):  # a second order is none; a new world has a new process
        trainers.join({"number": number, "index": 1})
        assert trainers.membership[:2] == (number, 1)
    told = [events.get(timeout=20) for _ in range(2)]
    assert ("joined", 2) in told or events.get(timeout=20) == ("joined", 2)
    assert trainers.membership == (2, 1, True) and not trainers.waiting
    trainers.start({"slot": 0, "world": {"number": 2, "index": 1}, "obeys": True})
    assert trainers.membership == (0, 0, False)
    wait_until(lambda: any(event[0] == "trainer" for event in list(events.queue)))


def test_a_process_of_others_is_not_taken(trainers: Trainers) -> None:
    path = trainers.path
    assert ask(path) is None
    with pytest.raises(NoAgent, match="does not take processes of others"):
        attach(str(path), {"process": 0, "terms": {}})


def test_what_was_started_ends_with_its_agent(
    trainers: Trainers, events: Events
) -> None:
    trainers.ensure_standby()
    active = started(trainers, 0)
    trainers.ensure_standby()
    known = [trainer.pid for trainer in trainers._known.values()]
    assert active.pid in known and len(known) == 2
    trainers.close()
    assert not any(process_alive(pid) for pid in known)
