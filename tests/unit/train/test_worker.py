"""A trainer's last words: what its agent is told of a failure, and how soon."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.managers.agent_link import AgentLink, listen_for_links
from dtft.checkpoint.memory import CorruptCopy
from dtft.config import load_experiment
from dtft.elastic.stack_dump import dump_stack
from dtft.train import worker
from dtft.train.drill_failure import DrillFailure

REPOSITORY = Path(__file__).parents[3]


def test_what_is_told_is_bounded_and_ends_with_the_cause() -> None:
    def deep(depth: int) -> None:
        if depth:
            return deep(depth - 1)
        raise NameError("momentun" * 1000)

    with pytest.raises(NameError) as caught:
        deep(500)
    told = worker.failure(caught.value, ("step", 20))
    assert (told["step"], told["phase"]) == (20, "step")
    assert told["error"].startswith("NameError: momentun")
    assert len(told["error"]) <= worker.ERROR_CHARACTERS
    assert len(told["traceback"]) <= worker.TRACEBACK_CHARACTERS


def test_an_error_of_the_users_program_has_its_traceback() -> None:
    error = ValueError("shapes (3,) and (4,)")
    assert "traceback" in worker._evidence(error, ("compile", 1))
    assert "traceback" not in worker._evidence(error, ("start", 0))
    nan = worker.NonFinite("step 3: loss is nan")
    assert "traceback" not in worker._evidence(nan, ("step", 3))


def test_an_agent_that_does_not_read_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "LAST_WORDS_S", 0.3)
    here, there = socket.socketpair()
    link = AgentLink(here)
    trainer = worker.TrainerProcess(
        load_experiment("digits_cnn", [], prog=""), link, ()
    )
    trainer._dialogue.start(trainer._take)
    begun = time.monotonic()
    trainer.last_words("failed", traceback="x" * (8 << 20))
    assert 0.3 <= time.monotonic() - begun < 10
    there.close()
    monkeypatch.setattr(worker, "LAST_WORDS_S", 20)
    begun = time.monotonic()
    trainer.last_words("failed", traceback="x")  # it has gone: no wait at all
    assert time.monotonic() - begun < 10
    link.close()


def test_a_drill_fails_its_step_once_or_always(tmp_path: Path) -> None:
    once = DrillFailure.parse(f"1:20:once:{tmp_path / 'failed'}")
    once.strike(0, 20)
    once.strike(1, 19)
    with pytest.raises(RuntimeError, match="^drill: fail at step 20$"):
        once.strike(1, 20)
    once.strike(1, 20)
    always = DrillFailure.parse("1:20:always:")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            always.strike(1, 20)


@pytest.mark.parametrize("text", ["1:20", "a:20:once:/x", "1:20:twice:/x", "1:2:once:"])
def test_a_wrong_drill_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="DTFT_FAIL_AT"):
        DrillFailure.parse(text)


ARRIVES_S = 120
"""A trainer imports its modules at low priority, beside the tests of other workers."""


class Agent:
    """The agent's end of a real trainer's link."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "trainer.log"
        self._listener = listen_for_links(folder / "agent.sock")
        with open(self.log, "ab") as log:
            command = [sys.executable, "-m", "dtft.train.worker", "digits_cnn"]
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, "DTFT_AGENT_SOCKET": str(folder / "agent.sock")},
                stderr=log,
            )
        self._listener.settimeout(ARRIVES_S)
        self.link = AgentLink(self._listener.accept()[0])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.link.close()
        self._listener.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(2 * ARRIVES_S)
def test_a_trainer_says_why_it_fails_and_waits_to_be_ended(
    agent: Agent, tmp_path: Path
) -> None:
    assert agent.link.receive(ARRIVES_S)["pid"] == agent.process.pid
    agent.link.send("attached")
    agent.process.send_signal(signal.SIGINT)  # of a Ctrl-C in the agent's terminal
    assert "the stacks of" in dump_stack(agent.process.pid, agent.log, deadline_s=10.0)
    until(lambda: "dtft/train/worker.py" in agent.log.read_text())
    start: dict[str, Any] = {
        **{"slot": 0, "num_slots": 1, "hosts": ["a"], "generation": 1, "attempt": 1},
        **{"run_directory": str(tmp_path), "board": str(tmp_path / "no-board")},
        "indices": [1],
    }
    agent.link.send("start", **start)
    assert agent.link.receive(ARRIVES_S) == {"op": "ending"}
    told = agent.link.receive(ARRIVES_S)
    assert told["op"] == "failed" and told["log"] == str(agent.log)
    assert told["error"].startswith("FileNotFoundError: ")
    assert (told["phase"], told["step"]) == ("start", 0)
    assert "in __init__" in told["traceback"]
    assert agent.process.poll() is None  # its agent ends it
    agent.link.close()
    until(lambda: agent.process.poll() is not None)
    assert agent.process.returncode == 1


class Ordered:
    """A `TrainerProcess` that serves on a thread, and its agent's end of the link."""

    def __init__(self, train: Callable[[worker.TrainerProcess, Any], None]) -> None:
        here, there = socket.socketpair()
        self.agent, self._link = AgentLink(there), AgentLink(here)
        experiment = load_experiment("digits_cnn", [], prog="")
        self.trainer = worker.TrainerProcess(experiment, self._link, ())
        self.trainer.train = lambda start: train(self.trainer, start)
        self.ended: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.trainer.serve()
        except Exception as error:
            self.ended.append(error)

    def start(self, slot: int) -> None:
        self.agent.send("start", slot=slot, generation=1)

    def takes(self, slot: int) -> None:
        """Starts, and waits until training has begun."""
        self.start(slot)
        assert self.agent.receive(20) == {"op": "running", "step": slot}

    def close(self) -> None:
        self.agent.close()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._link.close()


@pytest.fixture
def ordered() -> Iterator[Callable[..., Ordered]]:
    made: list[Ordered] = []

    def make(train: Callable[[worker.TrainerProcess, Any], None]) -> Ordered:
        made.append(Ordered(train))
        return made[-1]

    yield make
    for one in made:
        one.close()


def waits(trainer: worker.TrainerProcess, order: Any) -> None:
    """Trains until the order to leave comes."""
    trainer._dialogue.send("running", step=order["slot"])
    trainer._dialogue.wait(lambda: False, "the order to leave", 20.0)


def test_a_trainer_that_leaves_its_slot_takes_another_one(
    ordered: Callable[..., Ordered],
) -> None:
    one = ordered(waits)
    for number in (1, 2):
        one.start(number)
        assert one.agent.receive(20) == {"op": "running", "step": number}
        one.start(99)  # void: the order to leave is newer
        one.agent.send("leave", number=number)
        assert one.agent.receive(20) == {"op": "left_slot", "number": number}
    assert not one.ended


@pytest.mark.parametrize(
    "error",
    [
        ValueError("[gloo/transport] Gloo all-reduce failed: connection closed"),
        CorruptCopy("slice params/w[0:4]:float32 does not match its digest"),
    ],
)
def test_an_error_that_the_next_formation_repairs_is_told_and_ends_no_process(
    ordered: Callable[..., Ordered], error: Exception
) -> None:
    def fails(trainer: worker.TrainerProcess, order: Any) -> None:
        del trainer, order
        raise error

    one = ordered(fails)
    one.start(0)
    told = one.agent.receive(20)
    assert told["op"] == "failed" and str(error) in told["error"]
    one.agent.send("leave", number=7)
    assert one.agent.receive(20) == {"op": "left_slot", "number": 7}
    assert not one.ended


def test_an_error_of_the_users_program_ends_the_trainer(
    ordered: Callable[..., Ordered],
) -> None:
    def fails(trainer: worker.TrainerProcess, order: Any) -> None:
        del trainer, order
        raise ValueError("shapes (3,) and (4,)")

    one = ordered(fails)
    one.start(0)
    until(lambda: bool(one.ended))
    assert str(one.ended[0]) == "shapes (3,) and (4,)"


@dataclass
class Computes:
    """What a `TrainerProcess` asks of the runtime of a slot whose thread computes."""

    at: tuple[str, int]
    may_be_left_behind: bool = True

    def close(self) -> None:
        pass


@dataclass
class Stuck:
    """A training thread that does not hear the order to leave in some slots."""

    slots: tuple[int, ...] = (1,)
    at: tuple[str, int] = ("step", 3)
    may_be_left_behind: bool = True
    goes_on: threading.Event = field(default_factory=threading.Event)
    refused: list[type[Exception]] = field(default_factory=list)

    def __call__(self, trainer: worker.TrainerProcess, order: Any) -> None:
        if order["slot"] not in self.slots:
            return waits(trainer, order)
        runtime: Any = Computes(self.at, self.may_be_left_behind)
        trainer._runtime = runtime
        trainer._dialogue.send("running", step=order["slot"])
        assert self.goes_on.wait(20)
        for says in (trainer._dialogue.send, trainer._dialogue.queue):
            try:
                says("failed", step=1)
            except worker.LeaveOrdered as error:
                self.refused.append(type(error))


def test_a_thread_that_computes_for_ever_is_left_behind_and_is_silent_for_ever(
    ordered: Callable[..., Ordered],
) -> None:
    one = ordered(stuck := Stuck())
    one.takes(1)
    one.agent.send("leave", number=7)
    assert one.agent.receive(20) == {"op": "left_slot", "number": 7}
    one.takes(2)
    stuck.goes_on.set()
    until(lambda: len(stuck.refused) == 2)
    one.agent.send("leave", number=8)
    assert one.agent.receive(20) == {"op": "left_slot", "number": 8}
    assert not one.ended


@pytest.mark.parametrize(
    "more",
    [
        {"at": ("save", 3)},  # it may be writing to the host's memory
        {"at": ("start", 0)},
        {"may_be_left_behind": False},  # the next formation would wait for it
    ],
)
def test_another_thread_that_goes_on_is_waited_for(
    ordered: Callable[..., Ordered], more: dict[str, Any]
) -> None:
    one = ordered(stuck := Stuck(**more))
    one.takes(1)
    one.agent.send("leave", number=7)
    with pytest.raises(TimeoutError):
        one.agent.receive(3 * worker.PATIENCE_S)
    stuck.goes_on.set()
    assert one.agent.receive(20) == {"op": "left_slot", "number": 7}
    assert len(stuck.refused) == 2 and not one.ended


@pytest.mark.parametrize("is_stuck", [True, False])
def test_a_slot_that_was_given_up_holds_no_arrays(
    ordered: Callable[..., Ordered], is_stuck: bool
) -> None:
    stuck = Stuck(slots=(1,) if is_stuck else ())
    arrays: list[weakref.ref[Computes]] = []

    def trains(trainer: worker.TrainerProcess, order: Any) -> None:
        held = Computes(("step", 3))
        arrays.append(weakref.ref(held))
        stuck(trainer, order)
        trainer._dialogue.check()
        assert held is None, "the order to leave comes first"

    one = ordered(trains)
    one.takes(1)
    one.agent.send("leave", number=7)
    assert one.agent.receive(20) == {"op": "left_slot", "number": 7}
    if is_stuck:
        assert arrays[0]() is not None
    else:
        until(lambda: arrays[0]() is None)
    stuck.goes_on.set()
    until(lambda: gc.collect() >= 0 and arrays[0]() is None)


def test_only_one_thread_at_a_time_is_left_behind(
    ordered: Callable[..., Ordered],
) -> None:
    one = ordered(stuck := Stuck(slots=(1, 2)))
    one.takes(1)
    one.agent.send("leave", number=7)
    assert one.agent.receive(20) == {"op": "left_slot", "number": 7}
    one.takes(2)
    one.agent.send("leave", number=8)
    with pytest.raises(TimeoutError):
        one.agent.receive(3 * worker.PATIENCE_S)
    stuck.goes_on.set()
    assert one.agent.receive(20) == {"op": "left_slot", "number": 8}


def test_a_trainer_whose_agent_has_gone_does_not_wait_for_its_thread(
    ordered: Callable[..., Ordered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LAST_WORDS_S", 0.3)
    one = ordered(stuck := Stuck())
    one.takes(1)
    one.agent.close()
    until(lambda: bool(one.ended))
    assert isinstance(one.ended[0], worker.AgentGone)
    stuck.goes_on.set()


def test_a_trainer_without_a_slot_leaves_at_once_and_ends_with_its_agent(
    ordered: Callable[..., Ordered],
) -> None:
    one = ordered(waits)
    one.agent.send("leave", number=3)
    assert one.agent.receive(20) == {"op": "left_slot", "number": 3}
    one.agent.close()
    until(lambda: bool(one.ended))
    assert isinstance(one.ended[0], worker.AgentGone)
