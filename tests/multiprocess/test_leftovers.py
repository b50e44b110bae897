"""What is found of a job that should have left nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtft.drills import leftovers
from dtft.drills.compare import expected_status
from dtft.elastic.faults.injector import InjectedFault
from dtft.elastic.faults.schedule import parse_fault
from tests.support.harness import dtft


def test_processes_and_memory_of_a_job_are_named(tmp_path):
    arenas, run = tmp_path / "arenas", tmp_path / "run"
    (arenas / "dtft-job-7-host-1").mkdir(parents=True)
    (arenas / "dtft-other-host-1").mkdir()
    command = [sys.executable, "-c", "print('ready', flush=True); input()"]
    process = subprocess.Popen(
        command,
        env={**os.environ, leftovers.MARK: "job-7"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    found = leftovers.of_job("job-7", arenas, run)
    process.communicate("\n", timeout=10)
    assert len(found) == 2
    assert found[0].startswith(f"process {process.pid}: {sys.executable} -c")
    assert found[1] == f"memory: {arenas / 'dtft-job-7-host-1'}"
    assert leftovers.of_job("job-8", arenas, run) == []


def test_only_a_step_that_fails_every_time_may_end_the_job():
    injected = [
        InjectedFault(fault=parse_fault(it, 3)) for it in ("fail:1@3", "cut:1@5")
    ]
    assert expected_status(injected) == "done"
    injected.append(InjectedFault(fault=parse_fault("fail:1@3:always", 3)))
    assert expected_status(injected) == "error"


@pytest.mark.parametrize(
    "options, hint",
    [
        (["--host-memory", "host-3"], "is not HOST=MIB, for example host-3=4"),
        (["--host-memory", "host-3=0"], "is not HOST=MIB"),
        (["--fault", "fail:0+1@3"], "Give one `fail` with one slot"),
        (["--fault", "stop-agent:1@3000:2"], "the run ends at step"),
    ],
)
def test_a_drill_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, options: list[str], hint: str
):
    done = dtft("drill", "digits_cnn", "--run-dir", str(tmp_path / "run"), *options)
    assert done.returncode == 2 and hint in done.stderr
    assert not (tmp_path / "run").exists()
