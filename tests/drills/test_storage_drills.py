"""Live jobs whose storage becomes full, read-only, slow or vanishes, and is well again.

However it fails: training and commits go on, people are told, every step that was
offered before can be read all the while, and no half step is ever offered.
"""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtft.checkpoint.storage.directory import StorageTier, load_numpy
from dtft.elastic.faults.injector import corrupt_copies
from dtft.elastic.leader.events import read_events
from tests.support.harness import launched

pytestmark = [
    pytest.mark.drill,
    pytest.mark.drill_all,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount"),
]

MIB = 1 << 20
GROUP = Path("/sys/fs/cgroup/blkio") / f"dtft-drill-{os.getpid()}"
SLOW_BYTES_PER_S = 4096


def command(*words: object) -> str:
    return subprocess.run(
        [str(word) for word in words],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()


def until(ready: Callable[[], object], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


class Trouble:
    """A file system of its own for the checkpoints, and what happens to it."""

    told = ""
    """What the job says of it."""
    export_s = 90
    """Limit of one export: what a busy machine may take to start an exporter."""
    readable = True
    """Whether the older steps can be read meanwhile."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        command("mount", "-t", "tmpfs", "-o", "size=32m", "dtft-test", directory)

    def admit(self, pid: int) -> None:
        """The job has started."""

    def begin(self) -> None:
        """The trouble begins."""

    def end(self) -> None:
        """Storage is well again."""

    def clear(self) -> None:
        while os.path.ismount(self.directory):
            command("umount", "-l", self.directory)


class Full(Trouble):
    told = "No space left"

    def begin(self) -> None:
        path = self.directory / "ballast"
        with open(path, "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(bytes(1 << 16)):
                pass

    def end(self) -> None:
        (self.directory / "ballast").unlink()


class ReadOnly(Trouble):
    told = "Read-only file system"

    def _remount(self, mode: str) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):  # a step is written
            command("mount", "-o", f"remount,{mode}", self.directory)
            return True
        return False

    def begin(self) -> None:
        until(lambda: self._remount("ro"))

    def end(self) -> None:
        until(lambda: self._remount("rw"))


class Gone(Trouble):
    told = "mount the file system again, or put the directory back"
    readable = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.away = directory.with_name("away")
        self.away.mkdir()
        command("mount", "--bind", directory, self.away)  # keeps it

    def begin(self) -> None:
        command("umount", "-l", self.directory)
        until(self._replaced)

    def _replaced(self) -> bool:
        """Puts a file there, which nobody makes a directory of; an export may be."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.directory.write_text("not a directory")
        return self.directory.is_file()

    def end(self) -> None:
        self.directory.unlink()
        self.directory.mkdir()
        command("mount", "--bind", self.away, self.directory)

    def clear(self) -> None:
        super().clear()
        command("umount", "-l", self.away)


class Slow(Trouble):
    told = "TimeoutError"
    export_s = 20

    def __init__(self, directory: Path) -> None:
        if not (GROUP.parent / "blkio.throttle.write_bps_device").exists():
            pytest.skip("needs the blkio controller of cgroup v1 to slow a disk down")
        self.directory, image = directory, directory.with_name("image")
        with image.open("wb") as file:
            file.truncate(32 * MIB)
        command("mkfs.ext2", "-q", image)
        self.loop = command("losetup", "--find", "--show", image)
        number = os.stat(self.loop).st_rdev
        self.number = f"{os.major(number)}:{os.minor(number)}"
        command("mount", "-o", "sync", self.loop, directory)
        GROUP.mkdir()

    def admit(self, pid: int) -> None:
        (GROUP / "cgroup.procs").write_text(str(pid))  # its children come with it

    def _limit(self, bytes_per_s: int) -> None:
        rule = GROUP / "blkio.throttle.write_bps_device"
        rule.write_text(f"{self.number} {bytes_per_s}")

    def begin(self) -> None:
        self._limit(SLOW_BYTES_PER_S)

    def end(self) -> None:
        self._limit(0)

    def clear(self) -> None:
        super().clear()
        command("losetup", "--detach", self.loop)
        until(lambda: not (GROUP / "cgroup.procs").read_text())
        GROUP.rmdir()


@pytest.fixture(params=[Full, ReadOnly, Gone, Slow])
def trouble(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trouble]:
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    made: Trouble = request.param(directory)
    yield made
    made.clear()


def steps_in(directory: Path) -> tuple[int, ...]:
    if not directory.is_dir():
        return ()
    return StorageTier(directory, read_only=True).all_steps()


def test_training_goes_on_while_storage_does_not(trouble: Trouble) -> None:
    run = trouble.directory.parent

    def events(kind: str) -> list[dict]:
        return [event for event in read_events(run) if event["event"] == kind]

    def failures() -> int:
        return sum(not event["ok"] for event in events("export"))

    options = ("--checkpoint.storage_interval", "5")
    options += ("--timeouts.export", str(trouble.export_s))
    with launched(run, *options) as job:
        trouble.admit(job.process.pid)
        until(lambda: steps_in(trouble.directory), 240)
        trouble.begin()
        before, failed = steps_in(trouble.directory), failures()
        until(lambda: failures() >= failed + 2, 180)
        committed = len(events("commit"))
        until(lambda: len(events("commit")) > committed + 20)
        kept = steps_in(trouble.directory)
        if trouble.readable:
            assert set(before) <= set(kept) and kept
            for step in kept:  # whatever is offered is whole
                assert load_numpy(trouble.directory, step)
        trouble.end()
        last = max(event["step"] for event in events("commit"))
        until(lambda: max(steps_in(trouble.directory), default=0) > last, 240)
    output = job.output
    assert not events("recovery"), output
    told = re.findall(r"storage: step \d+ was not written to .* by host-", output)
    assert 1 <= len(told) <= 1 + failures().bit_length()
    assert trouble.told in output
    assert "Training goes on and older steps stay" in output
    assert "is well again" in output
    assert not list(trouble.directory.glob("*orbax-checkpoint-tmp*"))
    for step in steps_in(trouble.directory):
        assert load_numpy(trouble.directory, step)


@pytest.mark.parametrize(
    ("share", "slot", "error"),
    [("full", 0, "in this host's memory"), ("divided", 1, "corrupt slices")],
    ids=["own-copy", "lent-slices"],
)
def test_a_last_step_that_is_corrupt_in_memory_is_stored_from_a_peers_copy(
    tmp_path: Path, share: str, slot: int, error: str
) -> None:
    last = 600
    options = (
        *("--hosts", "3", "--stop.steps", str(last)),
        *("--checkpoint.share", share, "--checkpoint.storage_interval", "1000"),
    )
    with launched(tmp_path / "well", *options) as well:
        well.process.wait(240)
    run = tmp_path / "run"
    directory = run / "checkpoints"
    directory.mkdir(parents=True)
    storage = Full(directory)

    def exports(step: int) -> list[dict]:
        found = [it for it in read_events(run) if it["event"] == "export"]
        return [it for it in found if it["step"] == step]

    try:
        with launched(run, *options) as job:
            until(lambda: exports(1))
            storage.begin()
            until(lambda: exports(last))
            slots = slots_of(run)
            (memory,) = Path(os.environ["DTFT_TEST_MEMORY"]).glob(
                f"dtft-*-{slots[slot]}"
            )
            assert corrupt_copies(memory)
            storage.end()
            job.process.wait(240)
        assert [it["ok"] for it in exports(last)][-2:] == [False, True], job.output
        refused = f"{slots[0]} cannot export the last step: .*{error}"
        assert re.search(refused, job.output), job.output
        stored, expected = (
            load_numpy(it / "checkpoints", last) for it in (run, tmp_path / "well")
        )
        assert {name: value.tobytes() for name, value in stored.items()} == {
            name: value.tobytes() for name, value in expected.items()
        }
    finally:
        storage.clear()


def slots_of(run: Path) -> list[str]:
    """The host of each slot; that of slot 0 exports the state of a replica mesh."""
    assigned = [it for it in read_events(run) if it["event"] == "assignment"]
    return assigned[-1]["slots"]
