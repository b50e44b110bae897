"""`launch` and `agent` as a user runs them: stop, resume, by hand, refused."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtft.checkpoint.storage.step_directories import storage_steps
from dtft.elastic.leader.events import read_events
from tests.support.harness import REPOSITORY, dtft, memory

pytestmark = [pytest.mark.drill, pytest.mark.timeout(200)]
SMALL = ("digits_cnn", "--log.tensorboard", "False")
PATIENT = ("--timeouts.stop", "50")
"""A busy machine may take longer to start what writes the last step."""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dtft.cli", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(ready: Callable[[], object], limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


def commits(run: Path) -> list[int]:
    return [event["step"] for event in read_events(run) if event["event"] == "commit"]


def left_behind(marker: str) -> list[str]:
    """Processes whose command line names a run directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if marker in line and int(path.parent.name) != os.getpid():
            found.append(line)
    return found


def stopped(process: subprocess.Popen[str], number: int, run: Path) -> str:
    """Ends a job with a signal, with everything kept; its output."""
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    *_, end = [event for event in read_events(run) if event["event"] == "end"]
    assert end["status"] == "stopped"
    storage = run.parent / "storage"
    assert max(storage_steps(storage)) == end["step"] == commits(run)[-1]
    assert f"--run-dir {run}" in output
    assert f"stopped at step {end['step']}, which is in {storage}" in output
    assert not left_behind(str(run))
    assert not list(Path(os.environ["DTFT_TEST_MEMORY"]).iterdir())
    return output


def test_stop_exports_and_the_resume_command_continues(tmp_path):
    run = tmp_path / "run"
    arguments = ("launch", *SMALL, "--hosts", "2", "--run-dir", str(run), *memory())
    arguments += (*PATIENT, "--checkpoint.storage_directory", str(tmp_path / "storage"))
    process = start(*arguments, "--stop.steps", "100000")
    until(lambda: len(commits(run)) > 20)
    stopped(process, signal.SIGINT, run)
    first = commits(run)[-1]
    process = start(*arguments, "--stop.steps", "100000")
    until(lambda: max(commits(run), default=0) > first + 5)
    output = stopped(process, signal.SIGHUP, run)
    assert f"continues at step {first}" in output, output


@pytest.mark.drill_all
def test_a_stopped_job_is_resumed_to_its_end(tmp_path):
    run = tmp_path / "run"
    arguments = ("launch", *SMALL, "--hosts", "2", "--run-dir", str(run), *memory())
    arguments += (*PATIENT, "--checkpoint.storage_directory", str(tmp_path / "storage"))
    process = start(*arguments, "--stop.steps", "100000")
    until(lambda: len(commits(run)) > 20)
    stopped(process, signal.SIGTERM, run)
    goal = commits(run)[-1] + 5
    done = dtft(*arguments, "--stop.steps", str(goal), timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run / "summary.json").read_text())["step"] == goal


@pytest.mark.drill_all
def test_stop_while_a_host_is_missing_keeps_the_last_commit(tmp_path):
    run = tmp_path / "run"
    arguments = ("launch", *SMALL, "--hosts", "2", "--run-dir", str(run), *memory())
    arguments += PATIENT
    process = start(*arguments, "--stop.steps", "100000")
    until(lambda: len(commits(run)) > 20)
    leader = read_events(run)[-1]["by"]
    (agent,) = [p for p in Path("/proc").glob("[0-9]*") if _is_agent(p, run, leader)]
    os.killpg(int(agent.name), signal.SIGKILL)
    until(lambda: "waiting_for_host" in (run / "events.jsonl").read_text())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    (end,) = [event for event in read_events(run) if event["event"] == "end"]
    stored = max(storage_steps(run / "checkpoints"))
    assert (end["status"], end["step"]) == ("stopped", stored), output
    # The killed leader may have recorded one commit that it had not yet logged.
    assert stored - commits(run)[-1] in (0, 1), output


def _is_agent(process: Path, run: Path, host: str) -> bool:
    try:
        line = (process / "cmdline").read_text()
    except OSError:
        return False
    return all(part in line for part in (str(run), "\0agent\0", f"\0{host}\0"))


@pytest.mark.drill_all
def test_a_killed_coordination_service_costs_no_host(tmp_path):
    run = tmp_path / "run"
    arguments = ("launch", *SMALL, "--hosts", "2", "--run-dir", str(run), *memory())
    # As on accelerators, where one service is for all trainers.
    process = start(*arguments, "--stop.steps", "300", "--cluster.hot_swap", "False")
    until(lambda: len(commits(run)) > 20)
    killed = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            ours = str(run) in (path / "environ").read_text()
            if ours and "coordination_process" in (path / "cmdline").read_text():
                os.kill(int(path.name), signal.SIGKILL)
                killed.append(path.name)
        except OSError:
            continue
    assert killed
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    found = [event for event in read_events(run) if event["event"] == "recovery"]
    assert [event["rung"] for event in found] == [1], output


def agent_arguments(tmp_path: Path, store: str, secret: str) -> list[str]:
    (tmp_path / "secret").write_text("0123456789abcdef" + secret)
    return [
        *("agent", *SMALL, "--hosts", "3", "--stop.steps", "30"),
        *("--store", store, "--job", "by-hand", "--run-dir", str(tmp_path / "run")),
        *("--checkpoint.storage_directory", str(tmp_path / "storage")),
        *("--secret-file", str(tmp_path / "secret"), *memory()),
    ]


@pytest.mark.drill_all
def test_agents_started_by_hand_do_the_same_as_launch(tmp_path, etcd):
    arguments = agent_arguments(tmp_path, etcd.address, "")
    agents = [start(*arguments, "--host-name", f"h{n}") for n in range(4)]
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * 4, outputs
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 30
    assert max(storage_steps(tmp_path / "storage")) == 30
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.drill_all
def test_the_name_of_a_live_host_and_another_secret_are_refused(tmp_path, etcd):
    arguments = [*agent_arguments(tmp_path, etcd.address, ""), "--host-name", "a"]
    first = start(*arguments)
    try:
        until(lambda: (tmp_path / "run" / "events.jsonl").exists())
        done = dtft(*arguments)
        assert done.returncode == 2 and "--host-name a is taken" in done.stderr
        wrong = agent_arguments(tmp_path, etcd.address, "other")
        done = dtft(*wrong, "--host-name", "b")
        assert done.returncode == 2 and "the secret of --secret-file" in done.stderr
        assert first.poll() is None
    finally:
        first.terminate()
        first.communicate(timeout=60)


def test_an_address_that_is_not_here_is_refused(tmp_path, etcd):
    arguments = agent_arguments(tmp_path, etcd.address, "")
    done = dtft(*arguments, "--bind", "203.0.113.9:7001")  # TEST-NET-3: never local
    assert done.returncode == 2 and "--bind 203.0.113.9:7001" in done.stderr
    assert "Traceback" not in done.stderr


def test_memory_too_small_is_refused_with_the_numbers(tmp_path):
    small = tmp_path / "memory"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "x", small])
    if mounted.returncode:
        pytest.skip("needs to mount a small tmpfs")
    try:
        done = dtft(
            *("launch", *SMALL, "--hosts", "2", "--run-dir", str(tmp_path / "run")),
            *("--checkpoint.arena_directory", str(small)),
            timeout=100,
        )
    finally:
        subprocess.run(["umount", small], check=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "bytes" in done.stderr and str(small) in done.stderr


def test_a_store_that_does_not_answer_is_named(tmp_path, free_port):
    done = dtft(*agent_arguments(tmp_path, f"127.0.0.1:{free_port}", ""))
    assert done.returncode == 2 and f"127.0.0.1:{free_port}" in done.stderr


def test_checkpoints_of_another_config_are_not_touched(tmp_path):
    run = tmp_path / "run"
    first = dtft("train", *SMALL, "--stop.steps", "5", "--log.run_dir", str(run))
    assert first.returncode == 0, first.stderr
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    other = ("--seed", "7")
    done = dtft("launch", *SMALL, *other, "--hosts", "2", "--run-dir", str(run))
    assert done.returncode == 2 and "seed: 0 -> 7" in done.stderr, done.stderr
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
