"""A process attaches to an agent: over the real socket, against the real listener."""

import json
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.managers import agent_link as attaching
from dtft.checkpoint.managers.agent_link import (
    AgentLink,
    Attached,
    LinkClosed,
    NoAgent,
    attach,
    find,
    listen_for_links,
    packed,
    seen_here,
    serve_links,
)
from dtft.elastic.host.trainers import Trainers
from dtft.elastic.seat_policy import Admission, Terms
from dtft.elastic.store.api import StoreUnavailable

TERMS = {
    "processes": 2,
    "directory": "/d",
    "storage_interval_steps": 10,
    "max_to_keep": 3,
    "chunk_bytes": 4096,
    "storage_timeout_s": 30.0,
}


def listening(
    path: Path, processes: int | None, agree: Callable[[Terms], Terms]
) -> Trainers:
    admission = Admission(job="j", host="h", processes=processes, agree=agree)
    return Trainers(
        path, job="j", host="h", deadline_s=5.0, objection=admission.objection
    )


class Host:
    """An agent's listener, and what the agent would hear."""

    def __init__(self, directory: Path, processes: int | None = None) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.in_force: Terms | None = None
        self.store_is_away = False
        self.socket = directory / "agent.sock"
        self.pool = listening(self.socket, processes, self._agree)
        self.pool.bind(lambda *event: self.events.put(event))
        self._ends: list[Attached] = []

    def close(self) -> None:
        for end in self._ends:
            end.link.close()
        self.pool.close()

    def _agree(self, terms: Terms) -> Terms:
        if self.store_is_away:
            raise StoreUnavailable("no answer")
        self.in_force = self.in_force or terms
        return self.in_force

    def attach(self, process: int = 0, **changes: Any) -> Attached:
        terms = {"process": process, "terms": {**TERMS, **changes}}
        attached = attach(str(self.socket), terms)
        self._ends.append(attached)
        return attached

    def hears(self, kind: str) -> tuple[Any, ...]:
        while True:
            event = self.events.get(timeout=10)
            if event[0] == kind:
                return event

    def taken(self) -> Attached:
        """A process that is in a formation and was told what to restore."""
        attached = self.attach()
        self.pool.start({"world": {"number": 1, "index": 0}})
        self.pool.formed(source="init", step=0)
        assert attached.link.receive(5)["op"] == "formed"
        return attached


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def test_a_process_attaches_and_its_end_is_noticed(host: Host) -> None:
    attached = host.attach(process=1)
    assert (attached.job, attached.host, attached.deadline_s) == ("j", "h", 5.0)
    host.hears("attachment")
    index, ident = host.pool.attachment
    assert index == 1 and ident > 0 and host.pool.waiting == ident
    attached.link.close()
    assert host.hears("trainer_exit")[1] == ident
    assert not host.pool.exited(ident)  # it had no part in a formation yet
    assert host.pool.attachment == (-1, 0)
    assert host.attach(process=0).host == "h"


def test_a_taken_agent_refuses_in_one_line(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "TAKEN_S", 0.05)
    first = host.attach()
    with pytest.raises(NoAgent, match=f"taken by process {os.getpid()}, index 0") as it:
        host.attach(process=1)
    assert "\n" not in str(it.value)
    first.link.send("staged", step=1)  # nothing has happened to the first
    assert host.hears("trainer")[2]["op"] == "staged"


@pytest.mark.parametrize(
    "kept", ['{"processes": 2}', json.dumps({**TERMS, "new": 1, "processes": 2}), "["]
)
def test_terms_of_another_version_are_refused_with_what_to_do(
    tmp_path: Path, kept: str
) -> None:
    pool = listening(tmp_path / "a.sock", None, lambda terms: Terms.from_json(kept))
    try:
        with pytest.raises(NoAgent, match="Use one version of dtft on all hosts"):
            attach(str(tmp_path / "a.sock"), {"process": 0, "terms": TERMS})
    finally:
        pool.close()


def test_terms_that_differ_are_named(host: Host) -> None:
    host.attach().link.close()
    host.pool.exited(host.hears("trainer_exit")[1])
    with pytest.raises(NoAgent, match="processes=3 instead of 2"):
        host.attach(processes=3)
    with pytest.raises(NoAgent, match="directory='/e' instead of '/d'"):
        host.attach(directory="/e")
    with pytest.raises(NoAgent, match="another version"):
        host.attach(unknown=1)
    with pytest.raises(NoAgent, match="process 2 of 2"):
        host.attach(process=2)
    host.store_is_away = True
    with pytest.raises(NoAgent, match="the store does not answer"):
        host.attach()


@pytest.mark.parametrize(
    "changes",
    [{name: [value]} for name, value in TERMS.items()]
    + [{"processes": "2"}, {"directory": 1}, {"storage_timeout_s": "30"}],
)
def test_terms_of_a_wrong_type_are_those_of_another_version(
    changes: dict[str, Any],
) -> None:
    admission = Admission(job="j", host="h", processes=None, agree=lambda terms: terms)
    message = {"process": 0, "pid": 1, "terms": TERMS}
    assert admission.objection(message) is None
    objection = admission.objection({**message, "terms": {**TERMS, **changes}})
    assert objection is not None and "another version of dtft" in objection


@pytest.mark.parametrize("name", ["process", "pid"])
def test_an_index_of_a_wrong_type_is_that_of_another_version(name: str) -> None:
    admission = Admission(job="j", host="h", processes=None, agree=lambda terms: terms)
    message = {"process": 0, "pid": 1, "terms": TERMS, name: "1"}
    objection = admission.objection(message)
    assert objection is not None and "another version of dtft" in objection


def test_the_size_that_the_agents_were_told_counts(tmp_path: Path) -> None:
    host = Host(tmp_path, processes=3)
    with pytest.raises(NoAgent, match="--hosts 3, but this job has 2 processes"):
        host.attach()
    host.close()


def test_a_process_that_was_told_its_step_is_let_go_with_the_reason(host: Host) -> None:
    attached = host.taken()
    ident = host.pool.attachment[1]
    assert host.pool.is_active(ident)
    host.pool.let_go("b (slot 1) was lost.")
    message = attached.link.receive(5)
    assert message["op"] == "detached"
    assert "b (slot 1) was lost. What was committed" in message["reason"]
    with pytest.raises(LinkClosed):
        attached.link.receive(5)
    assert host.pool.attachment == (-1, 0) and not host.pool.is_active(ident)
    host.attach()  # the agent is free at once


def test_a_process_that_waits_is_taken_into_the_next_formation(host: Host) -> None:
    attached = host.attach()
    ident = host.pool.waiting
    host.pool.start({"world": {"number": 1, "index": 0}})
    host.pool.let_go("a restore failed")
    assert host.pool.waiting == ident
    host.pool.note("process 1 of 2 to attach")
    assert attached.link.receive(5)["text"] == "process 1 of 2 to attach"
    host.pool.let_go("no memory", waiting=True)
    assert "no memory" in attached.link.receive(5)["reason"]
    assert host.pool.waiting == 0


def test_nobody_to_start_is_as_one_that_ended(host: Host) -> None:
    host.pool.start({"world": {"number": 1, "index": 0}})
    assert host.pool.exited(host.hears("trainer_exit")[1])


def test_a_goodbye_is_no_death(host: Host) -> None:
    attached = host.taken()
    attached.link.send("left", step=3)
    attached.link.close()
    assert host.hears("trainer")[2] == {"op": "left", "step": 3}
    _, ident, left = host.hears("trainer_exit")
    assert left and host.pool.exited(ident)


def test_an_agent_is_free_as_soon_as_its_process_has_gone(host: Host) -> None:
    for _ in range(20):  # nobody has heard of the end of the one before
        host.attach().link.close()


def test_an_agent_that_ends_lets_go(tmp_path: Path) -> None:
    host = Host(tmp_path)
    attached = host.attach()
    host.pool.close()
    assert "the agent ends" in attached.link.receive(5)["reason"]
    host.close()


def test_events_before_the_agent_takes_part_are_not_lost(tmp_path: Path) -> None:
    heard: list[tuple[Any, ...]] = []
    pool = listening(tmp_path / "agent.sock", None, lambda terms: terms)
    terms = {"process": 0, "terms": TERMS}
    attached = attach(str(tmp_path / "agent.sock"), terms)
    pool.bind(lambda *event: heard.append(event))
    assert heard == [("attachment",)]
    attached.link.close()
    pool.close()


def test_the_only_free_agent_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "DEFAULT_DIRECTORY", tmp_path)
    with pytest.raises(NoAgent, match="no agent of this user.*DTFT_AGENT_SOCKET"):
        find(None, {})
    hosts = []
    for name in ("a", "b"):
        (tmp_path / f"dtft-j-{name}").mkdir()
        hosts.append(Host(tmp_path / f"dtft-j-{name}"))
    with pytest.raises(NoAgent, match="2 agents on this machine are free"):
        find(None, {})
    assert find(None, {attaching.AGENT_SOCKET_VARIABLE: "/x"}) == Path("/x")
    assert find("/y", {attaching.AGENT_SOCKET_VARIABLE: "/x"}) == Path("/y")
    hosts[0].attach()
    assert [bool(seen.taken_by) for seen in seen_here(tmp_path)] == [True, False]
    assert find(None, {}) == hosts[1].socket
    hosts[1].attach(process=1)
    with pytest.raises(NoAgent, match="no agent on this machine is free"):
        find(None, {})
    for host in hosts:
        host.close()


@pytest.mark.parametrize(
    "answer",
    [
        packed("refused", {"error": "the process belongs to another user"}),
        packed("agent", {"job": "j", "host": "h"}),
        b"\x01\0\0\0\xc0",  # nil
        b"\x01\0\0\0\xc1",  # not msgpack
    ],
    ids=["refused", "without taken_by", "nil", "not msgpack"],
)
def test_an_answer_without_a_description_is_none(tmp_path: Path, answer: bytes) -> None:
    def hear(link: AgentLink) -> None:
        assert link.receive(10) == {"op": "who"}
        link.send_packed(answer)
        link.close()

    folders = [tmp_path / f"dtft-j-{name}" for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    listener, host = listen_for_links(folders[0] / "agent.sock"), Host(folders[1])
    serve_links(listener, hear)
    try:
        assert [seen.path for seen in seen_here(tmp_path)] == [host.socket]
    finally:
        host.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_an_agent_that_is_not_there_is_named(tmp_path: Path) -> None:
    terms = {"process": 0, "terms": TERMS}
    with pytest.raises(NoAgent, match="no agent listens at .*No such file"):
        attach(str(tmp_path / "agent.sock"), terms)
    Host(tmp_path).close()
    with pytest.raises(NoAgent, match="Connection refused.*--serve-only"):
        attach(str(tmp_path / "agent.sock"), terms)


def test_a_message_is_waited_for_no_longer_than_told(host: Host) -> None:
    attached = host.attach()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        attached.link.receive(0.05)
    assert time.monotonic() - begun < 10
