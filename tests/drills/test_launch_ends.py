"""`launch` when its store, its trainers or itself are struck: nothing lost unsaid."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dtft.checkpoint.storage.step_directories import storage_steps
from tests.drills.test_launch import SMALL, commits, left_behind, start, until
from tests.support.harness import dtft, memory

pytestmark = [pytest.mark.drill, pytest.mark.drill_all, pytest.mark.timeout(200)]


def arguments(run: Path, *more: str) -> tuple[str, ...]:
    return ("launch", *SMALL, "--hosts", "2", "--run-dir", str(run), *memory(), *more)


def running(run: Path, *words: str) -> list[int]:
    """Processes of a run whose command line or environment names all words."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_text()
            where = line + (path / "environ").read_text()
        except OSError:
            continue
        if str(run) in where and all(word in line for word in words):
            found.append(int(path.name))
    return found


def signal_all(pids: list[int], number: int) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, number)


def test_a_third_ctrl_c_exports_what_memory_holds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # On a busy machine step 1 takes so long to store that another one is due.
    only_first = ("--checkpoint.storage_interval", "100000")
    limits = ("--timeouts.stop", "100", "--stop.steps", "100000")
    options = arguments(run, *only_first, *limits)
    process = start(*options)
    until(lambda: len(commits(run)) > 20 and storage_steps(run / "checkpoints"))
    signal_all(running(run, "dtft.train.worker"), signal.SIGSTOP)  # for ever
    time.sleep(0.5)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
    output, _ = process.communicate(timeout=30)
    last = commits(run)[-1]
    assert process.returncode == 1, output
    assert "stopping; waiting for host-" in output, output
    assert "Storage has step 1, memory has step" in output, output
    stored = max(storage_steps(run / "checkpoints"))
    assert stored >= last  # also what was staged everywhere and not recorded yet
    assert f"exported: storage has step {stored}" in output, output
    assert not left_behind(str(run))
    process = start(*options)  # what was exported is whole
    until(lambda: max(commits(run), default=0) > stored)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert f"continues at step {stored}" in output, output


def test_a_forced_end_exports_without_store_and_leader(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*arguments(run, "--timeouts.stop", "4", "--stop.steps", "100000"))
    until(lambda: len(commits(run)) > 20)
    signal_all(running(run, "etcdbin/etcd"), signal.SIGSTOP)
    last = commits(run)[-1]
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 1, output
    stored = max(storage_steps(run / "checkpoints"))
    assert stored >= last, output
    assert f"exported: storage has step {stored}" in output, output
    assert "not stopped within 4 s" in output
    assert not left_behind(str(run))


def test_a_killed_store_is_restarted_and_the_run_is_stored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        process = start(*arguments(run, "--stop.steps", "120"))
    finally:
        signal.signal(signal.SIGHUP, before)
    until(lambda: len(commits(run)) > 20)
    process.send_signal(signal.SIGHUP)
    signal_all(running(run, "etcdbin/etcd"), signal.SIGKILL)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert "it is started again" in output and "serves again" in output, output
    assert f"done at step 120, which is in {run}/checkpoints" in output, output
    assert max(storage_steps(run / "checkpoints")) == 120
    assert json.loads((run / "summary.json").read_text())["step"] == 120


def test_a_killed_launch_leaves_only_memory_and_the_next_one_sweeps_it(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    process = start(*arguments(run, "--stop.steps", "100000"))
    until(lambda: len(commits(run)) > 20)
    process.kill()
    process.communicate(timeout=10)
    until(lambda: not left_behind(str(run)) and not running(run), 10.0)
    directory = Path(os.environ["DTFT_TEST_MEMORY"])
    assert len(list(directory.iterdir())) == 2
    done = dtft(*arguments(run, "--stop.steps", "1"), timeout=100)
    assert "bytes of dead agents" in done.stdout, done.stdout + done.stderr
    assert not list(directory.iterdir())


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "etcd").write_text("in the way of the store's directory")
    done: subprocess.CompletedProcess[str] = dtft(*arguments(run))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "dtft: error:" in done.stderr and "Traceback" not in done.stderr
    assert not left_behind(str(run)) and not (run / "job.secret").exists()
