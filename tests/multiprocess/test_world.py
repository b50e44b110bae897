"""A world of JAX processes that outlives its formations: joining, leaving, meeting."""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dtft.elastic.processes import free_port
from dtft.elastic.stack_dump import process_state

WORKER = "tests.support.in_world"
SIZE = 8


class Process:
    """One process of a world, which takes commands and says what it does."""

    def __init__(
        self, index: int, everyone: dict[int, "Process"], address: str
    ) -> None:
        self.index, self._everyone = index, everyone
        self.said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._telling = threading.Lock()  # each process' thread tells the others keys
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(index), str(SIZE), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if said["op"] != "keys":
                self.said.put(said)
                continue
            for other in list(self._everyone.values()):
                if other is not self:
                    with contextlib.suppress(BrokenPipeError):
                        other.tell(**said)

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with self._telling:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def hear(self, limit_s: float = 60.0) -> dict[str, Any]:
        return self.said.get(timeout=limit_s)


def processor_s(process: Process) -> float:
    state = process_state(process.process.pid)
    assert state is not None
    return state.cpu_s


@contextlib.contextmanager
def processes(address: str, first: Sequence[int] = ()) -> Iterator[dict[int, Process]]:
    """Processes by index; `first` start together, any other when it is asked for."""
    made: list[Process] = []

    class Grows(dict[int, Process]):
        def __missing__(self, index: int) -> Process:
            self[index] = Process(index, self, address)
            made.append(self[index])
            assert self[index].hear()["op"] == "joined"
            return self[index]

    found = Grows()
    for index in first:
        found[index] = Process(index, found, address)
        made.append(found[index])
    try:
        for one in made:
            assert one.hear()["op"] == "joined"
        yield found
    finally:
        for one in made:
            one.process.kill()
            one.process.communicate()


class Four(NamedTuple):
    """Processes 1 to 4 of a world, and the directory of JAX's compilation cache."""

    world: dict[int, Process]
    cache: Path


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Four]:
    """For tests that end no process: starting one takes seconds. A test leaves the
    cache empty, and takes keys and devices that no other test takes."""
    cache = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        world = stack.enter_context(processes("", range(1, 5)))
        patch.undo()  # read when a process starts
        yield Four(world, cache)


@pytest.fixture
def world() -> Iterator[dict[int, Process]]:
    """Processes that each have a coordination service of their own."""
    with processes("") as found:
        yield found


class Service:
    """One coordination service for all processes, as on accelerators."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dtft.elastic.host.coordination_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.write(f"{self.address} {SIZE} 10.0 1")
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n"

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@pytest.fixture
def service() -> Iterator[Service]:
    """A service that ends after the test."""
    made = Service()
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.fixture
def served(service: Service) -> Iterator[dict[int, Process]]:
    """Processes that are connected to one service."""
    with processes(service.address) as found:
        yield found


def test_survivors_go_on_in_a_world_that_one_process_serves(
    service: Service, served: dict[int, Process]
) -> None:
    first = [served[index] for index in (2, 5)]
    for one in first:
        one.tell(op="sum", indices=[2, 5], turn=0, times=1)
    assert [one.hear()["sum"] for one in first] == [7.0] * 2
    first[1].process.kill()
    service.write("5")
    spare = served[7]  # joins late, at a place that nobody had
    for one in (first[0], spare):
        one.tell(op="sum", indices=[2, 7], turn=1, times=1)
    assert [one.hear()["sum"] for one in (first[0], spare)] == [9.0] * 2
    del served[5]
    again = served[5]
    for one in (again, spare):
        one.tell(op="sum", indices=[5, 7], turn=2, times=1)
    assert [one.hear()["sum"] for one in (again, spare)] == [12.0] * 2


def test_a_process_that_is_given_up_ends(
    service: Service, served: dict[int, Process]
) -> None:
    given_up, other = served[1], served[3]
    service.write("1")
    assert given_up.process.wait(30) != 0
    other.tell(op="sum", indices=[3], turn=0, times=1)
    assert other.hear()["sum"] == 3.0
    assert service.process.poll() is None


def test_survivors_of_a_killed_process_leave_at_once_and_go_on_with_a_newcomer(
    world: dict[int, Process],
) -> None:
    first = [world[index] for index in (1, 2, 4)]
    for one in first:
        one.tell(op="sum", indices=[1, 2, 4], turn=0, times=1)
    assert [one.hear()["sum"] for one in first] == [7.0] * 3
    for one in first:  # they stay in a collective that never ends
        one.tell(op="sum", indices=[1, 2, 4], turn=0, times=10**9)
    first[1].process.kill()
    survivors = [first[0], first[2]]
    for one in survivors:
        one.tell(op="leave")
    for one in survivors:
        said = one.hear(10)
        assert said["op"] == "broken" and "Gloo" in said["error"]
    spare = world[7]  # joins late, at a place that nobody had
    for one in [*survivors, spare]:
        one.tell(op="sum", indices=[1, 7, 4], turn=1, times=1)
    assert [one.hear()["sum"] for one in [*survivors, spare]] == [12.0] * 3
    del world[2]
    again = world[2]  # takes the place of the process that was killed
    for one in (survivors[0], again):
        one.tell(op="sum", indices=[2, 1], turn=2, times=1)
    assert [one.hear()["sum"] for one in (survivors[0], again)] == [3.0] * 2


def test_a_survivor_rests_when_data_arrives_for_a_collective_that_has_failed(
    world: dict[int, Process],
) -> None:
    order: dict[str, Any] = {"indices": [1, 2, 3, 4], "times": 1, "size": 2**18}
    everyone = [world[index] for index in order["indices"]]
    for one in everyone:
        one.tell(op="sum", turn=0, **order)
    assert [one.hear()["sum"] for one in everyone] == [10.0] * 4
    first, killed, third, fourth = everyone
    killed.process.kill()
    killed.process.wait(10)
    for one in (first, fourth):
        one.tell(op="sum", turn=0, **order)
    time.sleep(1.0)  # the fourth is ready to send to the third
    third.tell(op="sum", turn=0, **order)  # its own send to the second fails
    time.sleep(0.5)
    survivors = [first, third, fourth]
    for one in survivors:
        one.tell(op="leave")
        assert one.hear(10)["op"] == "broken"
        one.tell(op="left")
        assert one.hear(10)["op"] == "left"
    before = [processor_s(one) for one in survivors]
    time.sleep(1.0)
    after = [processor_s(one) for one in survivors]
    assert max(end - begin for begin, end in zip(before, after, strict=True)) < 0.5
    for one in survivors:
        one.tell(op="sum", indices=[1, 3, 4], turn=1, times=1)
    assert [one.hear()["sum"] for one in survivors] == [8.0] * 3


def test_a_meeting_ends_when_all_are_there(four: Four) -> None:
    early, late = four.world[3], four.world[1]
    early.tell(op="meet", indices=[1, 3], name="dtft/m", limit_s=50.0)
    with pytest.raises(queue.Empty):
        early.hear(0.5)
    late.tell(op="meet", indices=[1, 3], name="dtft/m", limit_s=50.0)
    assert {early.hear()["op"], late.hear()["op"]} == {"met"}
    for index, one in ((1, late), (3, early)):
        one.tell(op="meet", indices=[index, 5], name=f"dtft/never {index}", limit_s=1.0)
        said = one.hear()
        assert said["op"] == "broken" and "never" in said["error"]


def test_all_get_the_text_of_one_process(four: Four) -> None:
    both = [four.world[1], four.world[3]]
    for teller in (1, 3):
        for one in both:
            one.tell(op="broadcast", teller=teller, key=f"dtft/text {teller}")
        assert [one.hear()["text"] for one in both] == [f"of {teller}"] * 2


def add_up(world: dict[int, Process], indices: list[int], turn: int) -> list[int]:
    """Adds the indices; returns how many programs each process has loaded so far."""
    members = [world[index] for index in indices]  # all are there before one has keys
    for one in members:
        one.tell(op="sum", indices=indices, turn=turn, times=1)
    said = [one.hear() for one in members]
    assert [it["sum"] for it in said] == [sum(indices)] * len(indices)
    return [it["loaded"] for it in said]


def test_the_process_that_is_told_to_writes_the_compilation_cache(four: Four) -> None:
    world, cache = four
    add_up(world, [4, 3], 0)
    assert not list(cache.iterdir())
    world[1].tell(op="cache", writes=True)
    add_up(world, [1, 2], 0)
    (entry,) = cache.iterdir()
    assert entry.name.endswith("-cache")
    entry.unlink()
    world[1].tell(op="cache", writes=False)
    add_up(world, [2, 1], 1)
    assert not list(cache.iterdir())


def test_a_program_of_one_formation_is_loaded_by_all_others(four: Four) -> None:
    world, cache = four
    loaded = [add_up(world, [index], 3)[0] for index in range(1, 5)]
    world[1].tell(op="cache", writes=True)
    first = add_up(world, [1, 2, 3], 0)
    assert first[0] == loaded[0]
    (entry,) = cache.iterdir()
    made = entry.stat().st_mtime_ns
    second = add_up(world, [4, 2, 3], 1)  # a spare has taken the place of a lost host
    assert second == [loaded[3] + 1, first[1] + 1, first[2] + 1]
    third = add_up(world, [3, 4, 1], 2)  # in another order
    assert third == [second[2] + 1, second[0] + 1, first[0] + 1]
    (entry,) = cache.iterdir()
    assert entry.stat().st_mtime_ns == made
    entry.unlink()
    world[1].tell(op="cache", writes=False)
