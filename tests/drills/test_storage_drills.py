"""A live job whose storage becomes full, and is well again."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtft.elastic.journal import read_events, storage_steps
from tests.drills.harness import launched

pytestmark = [
    pytest.mark.drill,
    pytest.mark.drill_all,
    pytest.mark.timeout(280),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount"),
]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose checkpoints lie on a file system of 32 MiB."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "dtft-test", str(checkpoints)]
    subprocess.run(mount, check=True)
    yield tmp_path / "run"
    subprocess.run(["umount", "-l", str(checkpoints)], check=True)


def until(ready: Callable[[], object], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while ballast.write(bytes(1 << 16)):
            pass


def test_training_goes_on_while_storage_is_full(run: Path) -> None:
    checkpoints = run / "checkpoints"

    def events(kind: str) -> list[dict]:
        return [event for event in read_events(run) if event["event"] == kind]

    def failures() -> int:
        return sum(not event["ok"] for event in events("export"))

    with launched(run, "--checkpoint.storage_interval", "5") as job:
        until(lambda: storage_steps(checkpoints))
        fill(checkpoints / "ballast")
        until(lambda: failures() >= 2)
        kept, committed = storage_steps(checkpoints), len(events("commit"))
        assert kept
        until(lambda: len(events("commit")) > committed + 20)
        (checkpoints / "ballast").unlink()
        until(lambda: max(storage_steps(checkpoints)) > max(kept))
    output = job.output
    assert not events("recovery"), output
    told = re.findall(r"storage: step \d+ was not written to .* by host-", output)
    assert 1 <= len(told) <= 1 + failures().bit_length()
    assert "No space left" in output and "free space there" in output
    assert "is well again" in output
    assert not list(checkpoints.glob("*orbax-checkpoint-tmp*"))
