"""Storage that hangs holds nobody up: its last answer counts until it answers again."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.elastic.storage_watch import StorageWatch
from tests.checkpoint.hosts import wait_until


class Nfs:
    """Lists a real directory, and hangs on demand, as a dead mount does."""

    def __init__(self) -> None:
        self.up = threading.Event()
        self.up.set()
        self.asked = 0

    def __call__(self, directory: Path) -> list[int]:
        self.asked += 1
        assert self.up.wait(30)
        return [int(path.name) for path in directory.iterdir()]


@pytest.fixture
def nfs() -> Iterator[Nfs]:
    made = Nfs()
    yield made
    made.up.set()


def test_the_last_answer_counts_while_storage_hangs(tmp_path: Path, nfs: Nfs) -> None:
    watch = StorageWatch(tmp_path, list_steps=nfs, wait_s=0.2)
    (tmp_path / "20").mkdir()
    assert watch.steps() == (20,) and watch.news() is None
    nfs.up.clear()
    (tmp_path / "40").mkdir()
    assert watch.steps() == (20,) and watch.silent
    line = watch.news()
    assert line is not None and "does not answer" in line and "step 20" in line
    begun = time.monotonic()
    for _ in range(1000):  # it is waited for once, not at every question
        assert watch.newest == 20 and watch.news() is None
    assert time.monotonic() - begun < 30 and nfs.asked == 2
    watch.wrote(60)
    assert watch.steps() == (20, 60)
    nfs.up.set()
    wait_until(lambda: not watch.silent)
    assert watch.news() == f"storage {tmp_path} answers again"
    # What was listed is older than what was written meanwhile: neither is lost.
    assert watch.wrote(60) is None and 60 in watch._known
    assert watch.steps() == (20, 40)


def test_a_directory_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    watch = StorageWatch(tmp_path / "none")
    assert watch.steps() == () and watch.newest == 0 and not watch.silent
