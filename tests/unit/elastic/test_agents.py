"""Whole agents in one process: they meet over TLS, and look into a job needs none."""

import sys
from pathlib import Path

import pytest

from dtft.checkpoint.transport.protocol import Credentials, Tls
from dtft.checkpoint.transport.server import connect
from dtft.cli.checkpoint import job_record
from dtft.elastic.admission import JobMismatch
from dtft.elastic.host.agent import Agent
from dtft.elastic.inspect_job import Observer
from dtft.elastic.store.memory import MemoryStore
from tests.support.agents import SECRET, agents, config, joined
from tests.support.certificates import certificate
from tests.support.hosts import wait_until


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
