"""What a drill stops and lets go on again, and what it reports of that."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtft.checkpoint.managers import ProgressBoard
from dtft.drills import compare
from dtft.elastic.faults import injector
from dtft.elastic.faults.injector import FaultInjector, InjectedFault
from dtft.elastic.faults.interruptions import Interruption, begin
from dtft.elastic.faults.schedule import parse_fault
from dtft.elastic.local_cluster import LocalCluster
from dtft.elastic.processes import session

HOST = (
    "import subprocess, sys, time\n"
    "code = 'import time; time.sleep(60)'\n"
    "subprocess.Popen([sys.executable, '-c', code], process_group=0)\n"
    "print('ready', flush=True); time.sleep(60)"
)


@pytest.fixture
def host() -> Iterator[subprocess.Popen[str]]:
    """An agent and another process of its host, as far as signals go.

    The other process is a trainer in some tests, but leads a group like an exporter.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", HOST],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    for pid in session(process.pid):
        with contextlib.suppress(ProcessLookupError):  # a test has killed it already
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=10)


def stopped(process: subprocess.Popen[str], expected: list[bool]) -> list[bool]:
    """Whether the agent and its trainer are stopped, as soon as that is as expected."""
    end = time.monotonic() + 10
    while True:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in session(process.pid)]
        found = [text.rpartition(")")[2].split()[0] == "T" for text in stats]
        if found == expected or time.monotonic() > end:
            return found
        time.sleep(0.01)


def gone(begun: Interruption) -> bool:
    end = time.monotonic() + 10
    while not begun.gone and time.monotonic() < end:
        time.sleep(0.01)
    return begun.gone


@pytest.mark.parametrize(
    "text, expected",
    [
        ("stop-agent:0@1", [True, False]),
        ("stop-trainer:0@1", [False, True]),
        ("stop-host:0@1", [True, True]),
    ],
)
def test_who_is_stopped_and_goes_on(host, text, expected):
    cluster = cast(LocalCluster, SimpleNamespace(agents={"host-0": host}))
    trainer = session(host.pid)[1]
    begun = begin(parse_fault(text, 1), ["host-0"], cluster, None, [trainer])
    assert stopped(host, expected) == expected and not begun.gone
    begun.end()
    assert stopped(host, [False, False]) == [False, False]


def test_a_signal_to_a_host_reaches_a_process_with_a_group_of_its_own(host):
    cluster = cast(LocalCluster, SimpleNamespace(agents={"host-0": host}))
    LocalCluster.signal_host(cluster, "host-0", signal.SIGSTOP)
    assert stopped(host, [True, True]) == [True, True]
    LocalCluster.signal_host(cluster, "host-0", signal.SIGCONT)
    assert stopped(host, [False, False]) == [False, False]
    LocalCluster.signal_host(cluster, "host-0", signal.SIGKILL)
    host.wait(timeout=10)
    LocalCluster.signal_host(cluster, "host-0", signal.SIGKILL)  # of a dead one


def test_a_stopped_trainer_that_was_killed_is_gone(host):
    cluster = cast(LocalCluster, SimpleNamespace(agents={"host-0": host}))
    trainer = session(host.pid)[1]
    fault = parse_fault("stop-trainer:0@1", 1)
    begun = begin(fault, ["host-0"], cluster, None, [trainer])
    os.kill(trainer, signal.SIGKILL)
    assert gone(begun)
    begun.end()  # of a dead one: no error


def record(**fields: Any) -> dict[str, Any]:
    return {"faults": [], "agents": {}, "left_behind": [], **fields}


def test_what_lasted_is_reported_with_its_host():
    fault = parse_fault("stop-agent:1@20:10", 3)
    strike = InjectedFault(fault=fault, hosts=("host-1",), at=100.0, until=110.0)
    entry = compare.fault_fields(strike)
    assert entry == {"until": 110.0, "stopped_s": 10.0}
    entry |= {"fault": str(fault), "hosts": ["host-1"]}
    lines = compare.interruption_lines(
        record(faults=[entry], left_behind=["process 7"])
    )
    assert lines == [
        "dtft: stop-agent:1@20:10: host-1 for 10.0 s",
        "dtft: LEFT BEHIND: process 7",
    ]


def test_a_call_during_which_its_agent_was_stopped_is_not_long(tmp_path):
    fault = parse_fault("stop-host:1@20:10", 3)
    strike = InjectedFault(fault=fault, hosts=("host-1",), at=100.0, until=110.0)
    for host in ("host-0", "host-1"):
        (tmp_path / f"loop-{host}.json").write_text(
            f'{{"host": "{host}", "longest_call_s": 10.25, "what": "tick", "calls": ['
            '{"what": "tick", "seconds": 10.25, "at": 99.875},'
            '{"what": "view", "seconds": 0.5, "at": 50.0}]}'
        )
    assert compare.agents(tmp_path, [strike]) == {
        "host-0": {"longest_call_s": 10.25, "what": "tick"},
        "host-1": {"longest_call_s": 0.5, "what": "view"},
    }


def test_a_trainer_that_waited_in_vain_for_an_export_goes_on(
    host, tmp_path, monkeypatch
):
    monkeypatch.setattr(injector, "FIRST_EXPORT_S", 2.0)
    seen, stops = threading.Event(), injector.stopped

    def waits(pids: Sequence[int]) -> Interruption:
        begun = stops(pids)
        assert seen.wait(20)
        return begun

    monkeypatch.setattr(injector, "stopped", waits)
    (tmp_path / "events.jsonl").write_text('{"event": "assignment", "slots": ["a"]}\n')
    board = ProgressBoard(tmp_path / "board", create=True)
    board.set("trainer_pid", session(host.pid)[1])
    cluster = SimpleNamespace(
        agents={"a": host},
        memory_directory=lambda name: tmp_path,
        options=SimpleNamespace(run_directory=tmp_path),
    )
    faults = [parse_fault("kill-host:0@0:stored", 1)]
    made = FaultInjector(cast(LocalCluster, cluster), faults, seed=0, rejoin_s=None)
    made.start()
    assert stopped(host, [False, True]) == [False, True]
    seen.set()
    made.join(20.0)
    assert made.error == "TimeoutError: nothing was exported in 2.0 s"
    assert stopped(host, [False, False]) == [False, False]
