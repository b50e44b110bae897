"""Logs on a disk that is full: told once, and nothing ends."""

import os
import subprocess
from pathlib import Path

import pytest

from dtft.config.log_disk import Disk
from dtft.elastic.leader.events import Journal, read_events


@pytest.fixture
def small(tmp_path: Path):
    """A file system of 256 KiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "dtft-test", directory]
    if os.geteuid() or subprocess.run(command).returncode:
        pytest.skip("needs root to mount a small tmpfs")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


def test_events_wait_for_room(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(small, "h0")
    journal.event("first")
    (small / "ballast").write_bytes(b"x" * (256 - 8) * 1024)
    filler = "y" * 5000
    for number in range(20):
        journal.event("more", number=number, filler=filler)
    journal.say("still here")
    journal.close(5.0)
    out = capsys.readouterr().out
    assert out.count("cannot be written") == 1 and "still here" in out
    (small / "ballast").unlink()
    journal.event("last")
    journal.close(5.0)
    found = read_events(small)
    numbers = [event["number"] for event in found if event["event"] == "more"]
    assert sorted(set(numbers)) == list(range(20))
    assert found[0]["event"] == "first" and found[-1]["event"] == "last"


def test_lost_log_lines_are_told_once(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(small)
    file = disk.opened(small / "logs" / "metrics.jsonl")
    assert file is not None and not disk.has_room()  # below the margin
    capsys.readouterr()
    disk = Disk(small)
    with open(small / "ballast", "wb", buffering=0) as ballast:
        while ballast.write(b"x" * 4096) == 4096:
            if not os.statvfs(small).f_bavail:
                break
    for _ in range(3):
        disk.attempt(lambda: (small / "summary.json").write_text("z" * 9000))
    assert capsys.readouterr().out.count("logs cannot be written") == 1
    (small / "ballast").unlink()
    disk.attempt(lambda: (small / "summary.json").write_text("z" * 9000))
    assert (small / "summary.json").stat().st_size == 9000
    file.close()
