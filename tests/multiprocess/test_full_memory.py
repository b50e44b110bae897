"""Hosts that start while shared memory is full: a real tmpfs, and a real agent."""

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dtft.checkpoint.managers.progress import ProgressBoard
from dtft.elastic.faults.full_disks import memory_full, small_memory
from dtft.elastic.host.agent import Agent
from dtft.elastic.host.memory_directory import (
    OWNER,
    check_arena_room,
    make_host_memory,
    make_memory_directory,
    remove_memory_directory,
    sweep_memory,
)
from dtft.elastic.store.memory import MemoryStore
from tests.support.agents import config, joined
from tests.support.hosts import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with small_memory(tmp_path / "memory", 4) as directory:
        yield directory


@pytest.fixture
def end_fault(memory: Path) -> Callable[[], None]:
    return memory_full(memory)


def test_a_board_is_refused_and_ends_no_process(
    memory: Path, end_fault: Callable[[], None]
) -> None:
    with pytest.raises(OSError) as caught:
        ProgressBoard(memory / "board", create=True)
    assert caught.value.errno == errno.ENOSPC
    end_fault()
    board = ProgressBoard(memory / "board", create=True)
    memory_full(memory)
    board.set("computing", 7)
    assert board.get("computing") == 7
    board.close()


@pytest.mark.usefixtures("end_fault")
def test_a_directory_and_its_lock_need_no_memory(memory: Path) -> None:
    make_memory_directory(memory / "dtft-j-a")
    assert sweep_memory(memory) == []
    remove_memory_directory(memory / "dtft-j-a")
    assert [path.name for path in memory.iterdir()] == ["ballast"]


@pytest.mark.usefixtures("end_fault")
def test_a_host_gives_up_at_its_limit_and_leaves_nothing(memory: Path) -> None:
    path = memory / "dtft-j-a"
    with pytest.raises(ValueError, match=f"host memory {path} was full for 0.3 s"):
        make_host_memory(path, 0.3)
    assert [path.name for path in memory.iterdir()] == ["ballast"]


def test_a_local_cluster_does_not_start(
    memory: Path, end_fault: Callable[[], None], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"arena_directory={memory}: .* is full"):
        check_arena_room(memory)
    command = [sys.executable, "-m", "dtft.cli", "launch", "digits_cnn", "--hosts", "2"]
    command += ["--run-dir", str(tmp_path / "run")]
    command += ["--checkpoint.arena_directory", str(memory)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert f"dtft: error: arena_directory={memory}: " in found.stderr
    end_fault()
    check_arena_room(memory)


def test_an_agent_joins_its_job_once_there_is_room(
    memory: Path,
    end_fault: Callable[[], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "dtft.elastic.host.memory_directory")
    settings = replace(config(tmp_path, "a"), arena_directory=memory)
    made: list[Agent] = []

    def run() -> None:
        made.append(Agent(settings, MemoryStore()))
        made[0].run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: "is full: this host joins its job" in caplog.text, 20)
        assert not made and joined(tmp_path) == set()
        end_fault()
        wait_until(lambda: joined(tmp_path) == {"a"}, 20)
    finally:
        end_fault()
        wait_until(lambda: bool(made), 20)
        made[0].leave()
        thread.join(20)
    assert not thread.is_alive()
    assert caplog.text.count("is full") == 1
    assert not (memory / "dtft-j-a" / OWNER).exists()
