"""One host's part in exports, with a real exporter process."""

import dataclasses
import os
import queue
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.managers.progress import ProgressBoard
from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.storage import exporter_client
from dtft.checkpoint.storage.directory import StorageTier
from dtft.checkpoint.storage.exporter_client import ExporterProcess
from dtft.elastic.host.export import HostExports
from dtft.elastic.job import AgentConfig
from tests.support.hosts import JOB, stage, wait_until

LAYOUT = Layout(
    mesh=MeshLayout(axis_names=("replica",), axis_sizes=(1,), slots=(0,)),
    leaves=(Leaf(path="w", shape=(64,), dtype="float32", spec=()),),
)


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return AgentConfig(
        job="j",
        host="h0",
        store="s:1",
        secret=b"x" * 16,
        num_slots=1,
        trainer_command=(),
        run_directory=tmp_path / "run",  # without its folder for logs
        storage_directory=tmp_path / "run" / "checkpoints",
        config_digest="",
    )


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    made = ReplicaStore(
        LAYOUT, 0, place_copies(LAYOUT, 1), path=tmp_path / "arena", chunk_bytes=4096
    )
    for step in (1, 2):
        stage(made, step, lambda key, size, step=step: bytes([step]) * size)
    yield made
    made.close()


class Host:
    """The event loop of an agent, as far as exports need one."""

    def __init__(self, config: AgentConfig, tmp_path: Path) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.told: list[tuple[int, bool, str]] = []
        tmp_path.mkdir(exist_ok=True)
        self.desk = HostExports(
            config,
            JOB,
            ProgressBoard(tmp_path / "board", create=True),
            lambda *event: self.events.put(event),
            lambda *outcome: self.told.append(outcome),
        )

    def order(self, holder: ReplicaStore, step: int, failures: int = 0) -> None:
        fields = {"slot": 0, "rank": 0, "world": 1, "coordinator": ""}
        fields |= {"transfers": [], "digests": {}, "epoch": (1, 1)}
        self.desk.begin(holder, {"step": step, "failures": failures, **fields})

    def until_told(self, count: int) -> None:
        end = time.monotonic() + 150
        while len(self.told) < count:
            _, exporter, message = self.events.get(timeout=end - time.monotonic())
            self.desk.answer(exporter, message)

    def write(self, holder: ReplicaStore, step: int) -> None:
        """One export, to its success."""
        self.order(holder, step)
        self.until_told(len(self.told) + 1)
        assert self.told[-1] == (step, True, "")

    def until_ended(self) -> None:
        while not self.events.get(timeout=20)[2].get("ended"):
            pass


@pytest.mark.timeout(170)
def test_an_export_that_hangs_is_given_up_for_the_next_order(
    tmp_path: Path, config: AgentConfig, holder: ReplicaStore
) -> None:
    host = Host(config, tmp_path)
    try:
        host.write(holder, 1)
        hung = _exporters()
        assert hung
        for pid in hung:
            os.kill(pid, signal.SIGSTOP)
        host.order(holder, 2)
        host.order(holder, 2, failures=1)  # as the leader does when a host has failed
        host.until_told(2)
        assert host.told[1:] == [(2, True, "")]
        wait_until(lambda: not set(hung) & set(_exporters()))
    finally:
        host.desk.close()
    host.until_ended()
    tier = StorageTier(config.storage_directory, read_only=True)
    assert [(s, tier.items(s)["step"]) for s in tier.all_steps()] == [(1, 1), (2, 2)]
    tier.close()


@pytest.mark.timeout(170)
def test_an_exporter_alone_is_kept_for_the_next_slot_unless_it_writes(
    tmp_path: Path, config: AgentConfig, holder: ReplicaStore
) -> None:
    host = Host(config, tmp_path)
    try:
        host.write(holder, 1)
        first = _exporters()
        # It frees the agent's memory, which may be replaced before the next order.
        wait_until(lambda: str(holder.path) not in _text(f"/proc/{first[0]}/maps"))
        host.desk.stand_down()  # a formation later
        host.desk.keep_only(0)
        host.write(holder, 2)
        assert _exporters() == first
        os.kill(first[0], signal.SIGSTOP)
        host.order(holder, 2)
        host.desk.stand_down()  # while it writes
        wait_until(lambda: not _exporters())
        assert len(host.told) == 2
    finally:
        host.desk.close()


@pytest.mark.timeout(170)
def test_an_exporter_that_was_kept_counts_the_steps_of_another_host(
    tmp_path: Path, config: AgentConfig, holder: ReplicaStore
) -> None:
    stage(holder, 3, lambda key, size: bytes([3]) * size)
    config = dataclasses.replace(config, storage_keep=2)
    hosts = [Host(config, tmp_path / name) for name in ("a", "b")]
    try:
        for step, host in ((1, hosts[0]), (2, hosts[1]), (3, hosts[0])):
            host.write(holder, step)
            host.desk.stand_down()
        hosts[0].desk.keep_only(1)  # another slot
        hosts[1].desk.close()
        wait_until(lambda: not _exporters())
    finally:
        for host in hosts:
            host.desk.close()
    tier = StorageTier(config.storage_directory, read_only=True)
    assert tier.all_steps() == (2, 3)
    tier.close()


def _exporters() -> list[int]:
    """Exporter processes of this test that have not ended."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    found = [int(pid) for task in children for pid in _text(task).split()]
    return [pid for pid in found if "storage.exporter" in _text(f"/proc/{pid}/cmdline")]


def _text(path: Path | str) -> str:
    """What a file of a thread or a process says; nothing once that has ended."""
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_step_that_was_dropped_is_told(
    tmp_path: Path, config: AgentConfig, holder: ReplicaStore
) -> None:
    host = Host(config, tmp_path)
    host.order(holder, 9)
    assert host.told == [(9, False, "h0 has dropped step 9")]


@pytest.mark.parametrize("freed", [False, True])
def test_a_lent_step_is_freed_also_where_the_copies_are_gone(
    tmp_path: Path, config: AgentConfig, holder: ReplicaStore, freed: bool
) -> None:
    host = Host(config, tmp_path)
    host.desk.lend(holder, 1)
    (piece,) = holder.own_slices
    memory = holder.own_parts(1, piece)
    if freed:
        host.desk.lend(None, 3)
    for step in range(3, 12):
        stage(holder, step, lambda key, size, step=step: bytes([step]) * size)
        holder.drop_before(step, keep=set())
    assert (bytes(memory) != bytes([1]) * piece.nbytes) == freed


def test_an_exporter_that_closes_its_output_and_goes_on_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho $$ >&2; exec >&-; exec sleep 300\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(exporter_client, "END_S", 0.2)
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    log = tmp_path / "log"
    exporter = ExporterProcess(
        {}, lambda _, answer: answers.put(answer), open_log=lambda: log.open("wb")
    )
    answer = answers.get(timeout=20)
    assert answer["ended"] and not answer["ok"]
    pid = int(log.read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    exporter.close()


def test_an_exporter_gives_way_to_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho $$ >&2; exec sleep 300\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    log = tmp_path / "log"
    exporter = ExporterProcess({}, lambda *_: None, open_log=lambda: log.open("wb"))
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    pid = int(log.read_text())
    wanted = max(exporter_client.NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == wanted)
    exporter.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
