"""Real agents of one job in this process, on a store in memory."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtft.elastic.host.agent import Agent
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.events import read_events
from dtft.elastic.store.memory import MemoryStore

SECRET = b"0123456789abcdef"


def config(folder: Path, host: str, **changes: Any) -> AgentConfig:
    """Settings of one host of a job of three slots; its trainer only sleeps."""
    return AgentConfig(
        job="j",
        host=host,
        store="s:1",
        secret=SECRET,
        num_slots=3,
        trainer_command=(sys.executable, "-c", "import time; time.sleep(60)"),
        run_directory=folder / "run",
        storage_directory=folder / "run" / "checkpoints",
        config_digest="",
        arena_directory=folder,
        **changes,
    )


@contextlib.contextmanager
def agents(store: MemoryStore, *configs: AgentConfig) -> Iterator[list[Agent]]:
    """Agents that run on threads of their own."""
    made = [Agent(one, store) for one in configs]
    threads = [threading.Thread(target=agent.run, daemon=True) for agent in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for agent in made:
            agent.leave()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)


def joined(folder: Path) -> set[str]:
    """The hosts that the leader has recorded as joined."""
    events = read_events(folder / "run")
    return {event["host"] for event in events if event["event"] == "host_joined"}
