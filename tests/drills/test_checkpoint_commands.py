"""`dtft checkpoint` on a live job: one short launch, asked everything."""

import json
import re
import time
from pathlib import Path

import pytest

from dtft.checkpoint.storage.step_directories import storage_steps
from dtft.elastic.leader.events import read_events
from tests.support.harness import dtft, launched

pytestmark = [pytest.mark.drill, pytest.mark.timeout(400)]


def store_and_job(run: Path) -> list[str]:
    """How a live job is named, from the command lines of its agents."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "agent" in words and str(run) in words:
            wanted = ("--store", "--job", "--secret-file")
            return [w for name in wanted for w in (name, words[words.index(name) + 1])]
    raise AssertionError("no agent runs")


def test_a_live_job_is_looked_at_and_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(run, "--checkpoint.storage_interval", "100000") as job:
        end = time.monotonic() + 240
        while not storage_steps(run / "checkpoints"):
            assert time.monotonic() < end and job.runs
            time.sleep(0.1)
        ask(run, tmp_path)


def ask(run: Path, tmp_path: Path) -> None:
    job = store_and_job(run)

    def checkpoint(action: str, *more: str, code: int = 0) -> str:
        done = dtft("checkpoint", action, *job, *more, timeout=100)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    found = json.loads(checkpoint("ls", "--json"))
    commit = found["commits"][0]
    assert commit["health"] == "healthy" and commit["copies"] == [2, 2]
    assert commit["slices_on"] == {
        "host-0": commit["slices"],
        "host-1": commit["slices"],
    }
    assert {host["slot"] for host in found["hosts"]} == {0, 1}
    assert found["storage"]["steps"]
    assert re.search(r"healthy", checkpoint("ls"))
    assert "host-0, host-1" in checkpoint("show")
    assert "good copies or more of each" in checkpoint("verify")

    before = storage_steps(run / "checkpoints")
    assert "was written to" in checkpoint("export")
    (step,) = set(storage_steps(run / "checkpoints")) - set(before)
    assert step in [e["step"] for e in read_events(run) if e["event"] == "commit"]

    (tmp_path / "other").write_text("0123456789abcdef0123456789abcdef")
    for change, hint in (
        (("--secret-file", str(tmp_path / "other")), "is not that of job"),
        (("--job", "nobody"), f"has no such job. It has: {job[3]}."),
    ):
        done = dtft("checkpoint", "ls", *job, *change, timeout=100)
        assert done.returncode == 2 and hint in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
