"""Stacks of hung processes, real ones: in their log, or the reason why not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtft.elastic.stack_dump import dump_stack, process_state

Start = Callable[[str], subprocess.Popen[bytes]]
HANGS = """
import threading, time
{first}
def waits_for_rows():
    time.sleep(60)
threading.Thread(target=waits_for_rows, daemon=True).start()
def turns_round():
    print("ready", flush=True)
    while True:
        {inner}
turns_round()
"""
ACCEPTS = "from dtft.elastic.stack_dump import accept_requests; accept_requests()"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "a.trainer.log"


@pytest.fixture
def start(log: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> subprocess.Popen[bytes]:
        with open(log, "ab") as stderr:
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("inner", ["time.sleep(0.1)", "pass"])
def test_all_threads_of_a_running_process(start: Start, log: Path, inner: str) -> None:
    process = start(HANGS.format(first=ACCEPTS, inner=inner))
    told = dump_stack(process.pid, log, deadline_s=5.0)
    assert told == f"the stacks of process {process.pid} are in {log}"
    last = "in turns_round", "in waits_for_rows"
    _until(lambda: all(name in log.read_text() for name in last))
    assert process.poll() is None  # it goes on


def test_a_stopped_process_is_said_to_be_stopped(start: Start, log: Path) -> None:
    process = start(HANGS.format(first=ACCEPTS, inner="pass"))
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # all its threads have
    begun = time.monotonic()
    told = dump_stack(process.pid, log, deadline_s=20)
    assert time.monotonic() - begun < 10
    assert "is stopped (state T)" in told and str(log) in told
    text = log.read_text()
    assert f"  {process.pid} " in text and text.count("state T") >= 3
    process.send_signal(signal.SIGCONT)
    told = dump_stack(process.pid, log, deadline_s=5.0)
    assert "the stacks of" in told


def test_a_process_that_would_die_of_the_signal_is_not_sent_it(
    start: Start, log: Path
) -> None:
    process = start(HANGS.format(first="", inner="time.sleep(0.1)"))
    told = dump_stack(process.pid, log)
    assert "catches no SIGUSR1" in told and process.poll() is None


def test_a_process_that_has_ended(start: Start, log: Path) -> None:
    process = start("print()")
    process.wait()
    assert dump_stack(process.pid, log) == f"process {process.pid} has ended"
    assert process_state(process.pid) is None


def test_a_log_that_hangs_does_not_hold_up_longer_than_the_deadline(
    start: Start, tmp_path: Path
) -> None:
    process = start(HANGS.format(first="", inner="time.sleep(0.1)"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it waits for a reader, as a disk that hangs
    begun = time.monotonic()
    assert "could not be written in 0.3 s" in dump_stack(process.pid, pipe, 0.3)
    assert time.monotonic() - begun < 10
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))


def test_processor_time_grows_while_a_process_computes(start: Start) -> None:
    process = start(HANGS.format(first="", inner="pass"))
    before = process_state(process.pid)
    assert before is not None

    def grown() -> bool:
        now = process_state(process.pid)
        return now is not None and now.cpu_s > before.cpu_s

    _until(grown)


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
