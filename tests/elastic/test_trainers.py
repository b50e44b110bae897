"""Trainer processes that die at the worst moment, and what is heard of them."""

import queue
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.link import Link
from dtft.elastic.trainers import TrainerPool
from tests.elastic.desks import agent_config

Events = queue.Queue[tuple[Any, ...]]


@pytest.fixture
def events() -> Events:
    return queue.Queue()


@pytest.fixture
def pool(tmp_path: Path, events: Events) -> Iterator[TrainerPool]:
    """One whose trainers only wait."""
    command = {"trainer_command": ("sleep", "60"), "arena_directory": tmp_path}
    config = agent_config(tmp_path, "a", **command)
    config.memory_directory.mkdir()
    made = TrainerPool(config, lambda *event: events.put(event))
    yield made
    made.close()


@pytest.mark.parametrize("linked_first", [True, False])
def test_one_that_dies_as_it_is_given_its_slot_is_found_by_its_exit(
    pool: TrainerPool, events: Events, linked_first: bool
) -> None:
    pool.ensure_standby()
    assert pool._standby is not None
    process = pool._standby.process
    ours, theirs = socket.socketpair()
    theirs.close()  # as the kernel does first
    with ours:
        if linked_first:
            pool.linked(process.pid, Link(ours))
            pool.start({"slot": 0})
        else:
            pool.start({"slot": 0})
            pool.linked(process.pid, Link(ours))
        pool.send("release", step=1)
    process.kill()
    assert events.get(timeout=20)[:2] == ("trainer_exit", process.pid)
    assert pool.exited(process.pid) == "active"
