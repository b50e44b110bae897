"""Whole agents in one process: they meet over TLS, and look into a job needs none."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.transport.protocol import Credentials, Tls
from dtft.checkpoint.transport.server import connect
from dtft.cli.checkpoint import job_record
from dtft.elastic.admission import JobMismatch
from dtft.elastic.host.agent import Agent
from dtft.elastic.inspect_job import Observer
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.events import read_events
from dtft.elastic.store.memory import MemoryStore
from tests.support.hosts import wait_until
from tests.unit.checkpoint.test_stream import certificate

SECRET = b"0123456789abcdef"


def config(folder: Path, host: str, **changes: Any) -> AgentConfig:
    return AgentConfig(
        job="j",
        host=host,
        store="s:1",
        secret=SECRET,
        num_slots=3,
        trainer_command=(sys.executable, "-c", "import time; time.sleep(60)"),
        run_directory=folder / "run",
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
    events = read_events(folder / "run")
    return {event["host"] for event in events if event["event"] == "host_joined"}


def test_agents_meet_over_tls_and_only_over_tls(tmp_path: Path) -> None:
    store = MemoryStore()
    tls = [certificate(tmp_path, name) for name in ("a", "b")]
    pair = [
        config(tmp_path, "a", tls=tls[0], domain="rack=1"),
        config(tmp_path, "b", tls=tls[1], domain="rack=2"),
    ]
    with agents(store, *pair):
        wait_until(lambda: joined(tmp_path) == {"a", "b"}, 20)
        record = job_record(Observer(store, "s:1", "j", SECRET).look())
        seen = {host["host"]: host for host in record["hosts"]}
        assert {name: it["domain"] for name, it in seen.items()} == {
            "a": "rack=1",
            "b": "rack=2",
        }
        assert not any(host["error"] for host in seen.values())
        plain = Credentials(job="j", secret=SECRET)
        with pytest.raises(OSError):  # a plain client gets nothing
            connect(seen["a"]["address"], plain, {"op": "inspect"}, 5.0)
        other = Credentials(job="j", secret=b"another secret..", tls=Tls())
        with pytest.raises(OSError):
            connect(seen["a"]["address"], other, {"op": "inspect"}, 5.0)
        for changes, text in [
            ({}, "--tls-cert and --tls-key on all"),
            ({"tls": tls[0]}, "Name the same levels"),
        ]:
            late = Agent(config(tmp_path, "c", **changes), store)
            with pytest.raises(JobMismatch, match=text):
                late.run()


def test_without_nixl_an_agent_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)  # as where it is not installed
    with agents(MemoryStore(), config(tmp_path, "a", nixl=True)):
        wait_until(lambda: joined(tmp_path) == {"a"}, 20)
    lines = [r.getMessage() for r in caplog.records if "NIXL" in r.getMessage()]
    assert len(lines) == 1 and "fetches then go over TCP" in lines[0]
