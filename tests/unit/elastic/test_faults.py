"""How faults are written, and how the drill judges what was left."""

import json
import os
import queue
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.checkpoint.managers import ProgressBoard
from dtft.drills.compare import samples_exactly_once, surviving_segments
from dtft.elastic.faults import injector as injector_module
from dtft.elastic.faults.injector import (
    LEADER_S,
    FaultInjector,
    InjectedFault,
    NoLeader,
)
from dtft.elastic.faults.interruptions import Interruption
from dtft.elastic.faults.schedule import (
    KINDS,
    PHASES,
    REACHES,
    ROLES,
    RULES,
    Fault,
    check_together,
    parse_fault,
)
from dtft.elastic.local_cluster import ClusterOptions, LocalCluster

SECONDS = st.integers(1, 10**6).map(float) | st.sampled_from([0.5, 2.25])


@st.composite
def faults(draw) -> Fault:
    """Any fault that its kind's rule allows."""
    kind = draw(st.sampled_from(KINDS))
    rule = RULES[kind]
    either = rule.whom == "slots or role"
    role = draw(st.none() | st.sampled_from(ROLES)) if either else None
    slots = tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1))))
    is_pair = role == "follower" or (not role and len(slots) == 2)
    reaches = [it for it in REACHES if it != "pair" or is_pair]
    seconds = {"no": st.none(), "optional": st.none() | SECONDS, "required": SECONDS}
    return Fault(
        kind=kind,
        slots=slots if rule.whom.startswith("slots") and not role else (),
        step=draw(st.integers(0, 10**6)),
        phase=draw(st.none() | st.sampled_from(PHASES)) if rule.phase else None,
        role=role,
        seconds=draw(seconds[rule.seconds]),
        reach=draw(st.sampled_from(reaches)) if rule.reach else "all",
        always=rule.always and draw(st.booleans()),
        replicas=slots[0] + 1 if kind == "scale" else 0,
    )


@given(faults())
def test_text_round_trips(fault):
    assert parse_fault(str(fault), num_slots=4) == fault


@pytest.mark.parametrize(
    "text, hint",
    [
        ("kill-host:1", "KIND"),
        ("kill-hots:1@3", "known: kill-host"),
        ("kill-host:1@3:lunch", "kill-host takes after its step: a phase .compute"),
        ("kill-host@3", "needs a slot"),
        ("kill-leader:1@3", "takes no slot"),
        ("kill-host:4@3", "slots 0 to 3"),
        ("scale@3", "one number of replicas"),
        ("scale:0@3", "1 or more"),
        ("scale:2+3@3", "one number of replicas"),
        ("scale:2@3:commit", "no phase"),
        ("kill-host:1@3:10", "kill-host takes no seconds"),
        (
            "kill-host:leader@3",
            "takes a slot .of the leader: kill-leader., not 'leader'",
        ),
        ("stop-trainer:leader@3", "takes a slot, not 'leader'"),
        ("stop-agent:boss@3", "takes a slot, leader or follower, not 'boss'"),
        ("stop-agent@3", "needs a slot, leader or follower"),
        ("stop-agent:1@3:0", "above 0"),
        ("stop-agent:1@3:4:5", "seconds is given twice"),
        ("stop-agent:1@3:store", "takes no reach; after its step: a phase"),
        ("stop-host:4@3:2", "slots 0 to 3"),
        ("cut:1@3:some", "'some'; cut takes after its step: .* all or store"),
        ("cut:1@3:always", "cut takes no always"),
        ("cut:1@3:pair", "two slots, or follower, for example cut:0.1@30:pair"),
        ("cut:leader@3:pair", "needs two slots"),
        ("pause-store@3", "needs seconds, for example pause-store@30:20"),
        ("pause-store:1@3:2", "takes no slot"),
        ("empty-store@3:2", "empty-store takes no seconds"),
        ("fail:1@3:10", "fail takes no seconds"),
        ("fail@3", "needs a slot"),
    ],
)
def test_wrong_faults_say_what_is_allowed(text, hint):
    with pytest.raises(ValueError, match=hint):
        parse_fault(text, num_slots=4)


@pytest.mark.parametrize(
    "text, fields",
    [
        ("stop-agent:leader@20:10", {"role": "leader", "slots": (), "seconds": 10.0}),
        ("stop-host:follower@20", {"role": "follower", "slots": ()}),
        ("stop-host:0+2@20", {"slots": (0, 2), "seconds": None}),
        ("stop-trainer:1@20:0.5", {"seconds": 0.5}),
        ("stop-agent:1@20:commit:10", {"phase": "commit", "seconds": 10.0}),
        ("cut:1@20", {"reach": "all", "seconds": None}),
        ("cut:1@20:15", {"reach": "all", "seconds": 15.0}),
        ("cut:leader@20:15:store", {"reach": "store", "role": "leader"}),
        ("cut:1@20:out:15", {"reach": "out", "seconds": 15.0}),
        ("cut:0+1@20:pair", {"reach": "pair", "slots": (0, 1)}),
        ("pause-store@30:20", {"seconds": 20.0}),
        ("empty-store@30", {"slots": ()}),
        ("fail:1@30", {"always": False}),
        ("fail:1@30:always", {"always": True}),
    ],
)
def test_what_a_text_means(text, fields):
    fault = parse_fault(text, num_slots=3)
    assert {name: getattr(fault, name) for name in fields} == fields


def test_a_trainer_is_told_of_one_failure():
    check_together([parse_fault(text, 3) for text in ("fail:1@3", "kill-host:1@9")])
    for texts in (["fail:0@3", "fail:1@9"], ["fail:0+1@3"]):
        with pytest.raises(ValueError, match="Give one `fail` with one slot"):
            check_together([parse_fault(text, 3) for text in texts])


@pytest.mark.parametrize(
    "texts",
    [
        ["corrupt:1@20"],
        ["corrupt:1@20", "pause-store@30:5"],
        ["kill-host:0@10", "corrupt:1@20"],
    ],
)
def test_a_corruption_without_a_kill_after_it_is_refused(texts: list[str]):
    with pytest.raises(ValueError, match=r"corrupt:1@20 takes effect just before"):
        check_together([parse_fault(text, 3) for text in texts])
    together = [*texts[:-1], "corrupt:1@20", "corrupt:2@20", "kill-trainer:0@40"]
    check_together([parse_fault(text, 3) for text in together])


def assignment(generation: int, attempt: int, step: int) -> dict:
    return {
        "event": "assignment",
        "generation": generation,
        "attempt": attempt,
        "step": step,
    }


def test_an_attempt_that_never_ran_leaves_no_segment():
    events = [assignment(1, 1, 0), assignment(2, 1, 5), assignment(2, 2, 5)]
    assert surviving_segments(events, 8) == [((1, 1), 0, 5), ((2, 2), 5, 8)]


def write_samples(folder, entries) -> None:
    (folder / "samples").mkdir(parents=True)
    lines = [
        json.dumps(
            {
                "generation": g,
                "attempt": 1,
                "step": s,
                "slot": 0,
                "rows": rows,
                "ids": [r % 3 for r in rows],
            }
        )
        for g, s, rows in entries
    ]
    (folder / "samples" / "slot0.jsonl").write_text("\n".join(lines) + "\n{torn")


@pytest.mark.parametrize(
    "entries, right",
    [
        ([(1, 1, [0, 1]), (1, 2, [2, 3]), (2, 2, [2, 3])], True),  # redone, used once
        ([(1, 1, [0, 1]), (2, 2, [3, 4])], False),  # skipped
        ([(1, 1, [0, 1]), (1, 2, [2, 3])], False),  # step 2 did not survive
    ],
)
def test_samples_of_the_surviving_history(tmp_path, entries, right):
    write_samples(tmp_path / "control", [(1, 1, [0, 1]), (1, 2, [2, 3])])
    write_samples(tmp_path / "faulted", entries)
    events = [assignment(1, 1, 0), assignment(2, 1, 1)]
    control, faulted = tmp_path / "control", tmp_path / "faulted"
    assert samples_exactly_once(faulted, control, 2, 2, events) is right


def test_of_two_equal_faults_the_second_is_pending_after_the_first(
    tmp_path: Path,
) -> None:
    cluster = LocalCluster(
        ClusterOptions(
            agent_arguments=(),
            job="j",
            hosts=2,
            spares=0,
            run_directory=tmp_path,
            storage_directory=tmp_path,
        )
    )
    texts = ["corrupt:1@40", "kill-trainer:1@40", "kill-trainer:1@40"]
    faults = [parse_fault(text, 2) for text in texts]
    injector = FaultInjector(cluster, faults, seed=0, rejoin_s=None)
    for left in (2, 1, 0):
        assert injector.not_over == ["kill-trainer:1@40"] * left
        injector.injected.append(InjectedFault(fault=faults[-1], hosts=("a",)))


def test_a_drain_of_two_hosts_is_one_fault_and_ends_with_its_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def drained(observer: object, host: str, limit_s: float) -> dict[str, Any]:
        asked.append(host)
        return {"host": host}

    monkeypatch.setattr(injector_module, "drain", drained)
    store = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(injector_module, "EtcdStore", lambda address: store)
    monkeypatch.setattr(injector_module, "Observer", lambda *given: None)
    (tmp_path / "events.jsonl").write_text(
        '{"event": "assignment", "slots": ["a", "b"]}\n'
    )
    cluster = SimpleNamespace(
        agents={"a": None, "b": None},
        memory_directory=lambda host: tmp_path,
        options=SimpleNamespace(run_directory=tmp_path, job="j"),
        store_address="localhost:1",
        secret=b"",
    )
    fault = parse_fault("drain:0+1@0", 2)
    injector = FaultInjector(
        cast(LocalCluster, cluster), [fault], seed=0, rejoin_s=None
    )
    injector._look()
    assert injector._try(fault, []) and injector.not_over == []
    end = time.monotonic() + 20
    while not injector.done:
        assert time.monotonic() < end
    (strike,) = injector.injected
    assert (asked, strike.hosts, strike.reply) == (
        ["a", "b"],
        ("a", "b"),
        {"host": "b"},
    )


def of_one_host(folder: Path, text: str, **cluster: Any) -> tuple[FaultInjector, Fault]:
    """An injector whose cluster has one host, which has slot 0, and its one fault."""
    (folder / "events.jsonl").write_text('{"event": "assignment", "slots": ["a"]}\n')
    parts: dict[str, Any] = {"signal_host": lambda host, number: None}
    made = SimpleNamespace(
        agents={"a": None},
        memory_directory=lambda host: folder,
        options=SimpleNamespace(run_directory=folder, job="j"),
        **(parts | cluster),
    )
    fault = parse_fault(text, 1)
    injector = FaultInjector(cast(LocalCluster, made), [fault], seed=0, rejoin_s=None)
    injector._look()
    return injector, fault


def test_a_fault_waits_for_the_slots_of_its_corruptions(tmp_path: Path) -> None:
    injector, fault = of_one_host(tmp_path, "kill-host:0@0")
    corrupting = [parse_fault("corrupt:1@0", 2)]
    assert injector._reached(fault) and not injector._reached(fault, corrupting)
    (tmp_path / "events.jsonl").write_text(
        '{"event": "assignment", "slots": ["a"]}\n'
        '{"event": "assignment", "slots": ["a", "b"]}\n'
    )
    time.sleep(0.03)  # the log is read every 20 ms
    injector._look()
    assert injector._reached(fault, corrupting)


def test_a_fault_of_the_leader_waits_until_one_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has just lost its data, and hosts elect a leader."""
    key = [None, None, SimpleNamespace(value=b"a")]
    store = SimpleNamespace(get=lambda name: key.pop(0), close=lambda: None)
    monkeypatch.setattr(injector_module, "EtcdStore", lambda address: store)
    injector, fault = of_one_host(tmp_path, "kill-leader@0", store_address="here:1")
    assert injector._victims_now(fault) is injector._victims_now(fault) is None
    assert injector._victims_now(fault) == ("a",)
    key += [None, None]
    assert not injector._try(fault, []) and injector._leaderless_since is not None
    injector._leaderless_since -= LEADER_S
    with pytest.raises(NoLeader, match="no host has the leader key"):
        injector._try(fault, [])


def test_a_fault_that_fails_leaves_no_host_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    injector, fault = of_one_host(
        tmp_path,
        "kill-host:0@0",
        signal_host=lambda host, number: signals.append(number),
    )

    def broken(memory: Path) -> int:
        raise OSError(f"{memory}: no memory is left")

    monkeypatch.setattr(injector_module, "corrupt_copies", broken)
    with pytest.raises(
        OSError, match=f"^{re.escape(str(tmp_path))}: no memory is left"
    ):
        injector._try(fault, [parse_fault("corrupt:0@0", 1)])
    assert signals == [signal.SIGSTOP, signal.SIGCONT]
    assert injector.not_over == ["kill-host:0@0"]


def test_trainers_that_were_held_until_storage_had_a_step_go_on_without_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    injector, fault = of_one_host(
        tmp_path,
        "cut:0@0:stored",
        signal_host=lambda host, number: signals.append(number),
    )

    def broken(*_: object) -> None:
        raise OSError("no network namespace")

    with open(tmp_path / "events.jsonl", "a") as log:
        log.write('{"event": "export", "ok": true}\n')
    monkeypatch.setattr(injector_module, "begin", broken)
    with pytest.raises(OSError, match="no network namespace"):
        injector._try(fault, [])
    assert signals == [signal.SIGCONT] and injector.injected == []


def test_killed_hosts_are_due_until_they_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: queue.Queue[Callable[[], object]] = queue.Queue()
    started: list[str | None] = []
    injector, fault = of_one_host(
        tmp_path,
        "kill-host:0@0",
        call_soon=asked.put,
        kill_host=lambda host: seen.append(injector.restarts_due),
        start_host=started.append,
    )
    seen: list[int] = []
    monkeypatch.setattr(injector, "_rejoin_s", 0.01)
    assert injector.restarts_due == 0 and injector._try(fault, [])
    assert seen == [1] and injector.restarts_due == 1
    asked.get(timeout=20)()
    assert started == ["a"] and injector.restarts_due == 0


def test_mounts_are_undone_although_one_of_them_cannot_be(tmp_path: Path) -> None:
    undone: list[str] = []

    def busy() -> None:
        raise RuntimeError("umount: busy")

    injector, _ = of_one_host(tmp_path, "kill-host:0@0")
    ends = {
        "full-storage": lambda: undone.append("full-storage"),
        "readonly-storage": busy,
        "full-memory": lambda: undone.append("full-memory"),
        "stop-host:0": lambda: undone.append("stop-host"),  # ends with the cluster
    }
    for kind, end in ends.items():
        strike = InjectedFault(fault=parse_fault(f"{kind}@0:5", 1))
        injector._open.append((strike, Interruption(pids=(), end=end)))
    injector.stop()
    with pytest.raises(RuntimeError, match="busy"):
        injector.undo_mounts()  # the thread was never started
    assert sorted(undone) == ["full-memory", "full-storage"]


@pytest.mark.parametrize("text", ["kill-trainer:0@0", "stop-trainer:0@0"])
def test_a_fault_of_a_trainer_waits_until_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    board = ProgressBoard(tmp_path / "board", create=True)
    injector, fault = of_one_host(tmp_path, text)
    assert injector._reached(fault) and not injector._try(fault, [])
    assert signalled == [] and injector.not_over == [text]
    board.set("trainer_pid", 12345)
    assert injector._try(fault, [])
    assert signalled == [12345] and len(injector.injected) == 1


@pytest.mark.parametrize("kind", ["kill-store", "crash-store", "empty-store"])
def test_a_fault_of_the_store_waits_for_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    struck: list[str] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: struck.append("crash-store"))
    monkeypatch.setattr(injector_module, "STORE_AWAY_S", 0.0)
    etcd = SimpleNamespace(pid=12345, start=None, kill=lambda: struck.append(kind))
    later = SimpleNamespace(etcd=etcd, call_soon=lambda function: None)
    text = f"{kind}@0:stored"
    injector, fault = of_one_host(tmp_path, text, **vars(later))
    monkeypatch.setattr(injector_module, "FIRST_EXPORT_S", 0.1)
    with pytest.raises(TimeoutError, match="nothing was exported"):
        injector._try(fault, [])
    injector.stop()
    assert not injector._try(fault, []) and struck == [] and injector.not_over == [text]
    again, fault = of_one_host(tmp_path, text, **vars(later))
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "export", "ok": true}\n')
    assert again._try(fault, []) and struck == [kind] and again.not_over == []
