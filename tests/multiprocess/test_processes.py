"""A command that cleans up after itself is asked to end, never left or killed first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtft.elastic import processes
from dtft.elastic.processes import process_alive, run_to_end

TIDY = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("tidied")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
time.sleep(60)
"""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
RUNS = (
    "import sys; from dtft.elastic.processes import run_to_end; "
    "run_to_end([sys.executable, '-c', *sys.argv[1:]], 60, sys.stdout)"
)


def test_the_return_code_and_the_output_are_those_of_the_command(
    tmp_path: Path,
) -> None:
    with open(tmp_path / "log", "wb") as log:
        code = run_to_end([sys.executable, "-c", "print('x'); exit(7)"], 60.0, log)
    assert code == 7 and (tmp_path / "log").read_text() == "x\n"


def test_a_command_may_clean_up_after_its_limit(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    begun = time.monotonic()
    command = [sys.executable, "-c", TIDY, str(mark)]
    assert run_to_end(command, 4.0, subprocess.DEVNULL) is None
    assert mark.read_text() == "tidied" and time.monotonic() - begun < 30


def test_a_command_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CLEANUP_S", 0.2)
    begun = time.monotonic()
    command = [sys.executable, "-c", STUBBORN]
    assert run_to_end(command, 1.0, subprocess.DEVNULL) is None
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_may_clean_up_when_the_caller_dies(
    tmp_path: Path, number: signal.Signals
) -> None:
    mark = tmp_path / "mark"
    caller = subprocess.Popen(
        [sys.executable, "-c", RUNS, TIDY, str(mark)], stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None and caller.stdout.readline() == "begun\n"
    os.kill(caller.pid, number)
    assert caller.wait(30) == -number
    until = time.monotonic() + 30
    while not mark.exists() or mark.read_text() != "tidied":
        assert time.monotonic() < until
        time.sleep(0.01)
    caller.stdout.close()
    assert not process_alive(caller.pid)
