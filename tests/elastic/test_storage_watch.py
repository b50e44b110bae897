"""Storage that hangs holds nobody up: its last answer counts until it answers again."""

import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.elastic.journal import read_events
from dtft.elastic.storage_watch import StorageWatch
from tests.checkpoint.hosts import wait_until
from tests.elastic.test_leader import Desk
from tests.elastic.test_recovery import commit_of, holdings_of, layout

PATIENCE_S = 30.0
"""For storage that is well: a busy machine may take longer than a moment."""


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
    watch = StorageWatch(tmp_path, list_steps=nfs, wait_s=PATIENCE_S)
    (tmp_path / "20").mkdir()
    assert watch.steps() == (20,) and watch.news() is None
    nfs.up.clear()
    (tmp_path / "40").mkdir()
    watch._wait_s = 0.2
    assert watch.steps() == (20,) and watch.silent
    line = watch.news()
    assert line is not None and "does not answer" in line and "step 20" in line
    watch._wait_s = PATIENCE_S
    for _ in range(10):  # it is waited for once, not at every question
        assert watch.newest == 20 and watch.news() is None
    wait_until(lambda: nfs.asked == 2)  # the question may be late as well
    watch.wrote(60)
    assert watch.steps() == (20, 60)
    nfs.up.set()
    wait_until(lambda: not watch.silent)
    assert watch.news() == f"storage {tmp_path} answers again"
    # The late answer counts, and what was written meanwhile; then it is asked anew.
    assert watch.steps() == (20, 40, 60) and nfs.asked == 2
    assert watch.steps() == (20, 40) and nfs.asked == 3


def test_a_directory_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    watch = StorageWatch(tmp_path / "none")
    assert watch.steps() == () and watch.newest == 0 and not watch.silent


STATE = layout(2, 1)


@pytest.fixture
def desk(tmp_path: Path, nfs: Nfs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A leader of two slots whose storage is down."""
    hanging = functools.partial(StorageWatch, list_steps=nfs, wait_s=0.2)
    monkeypatch.setattr("dtft.elastic.storage_desk.StorageWatch", hanging)
    monkeypatch.setattr("dtft.elastic.rounds.STORAGE_PAUSE_S", 0.0)
    nfs.up.clear()
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    desk = Desk(tmp_path)
    desk.register("b")
    desk.leader.connected("b")
    yield desk
    desk.leader.close()


def said(directory: Path) -> str:
    events = read_events(directory)
    return "\n".join(e["text"] for e in events if e["event"] == "message")


def answer(desk: Desk, held: dict) -> None:
    ballot = desk.orders[-1][2]["ballot"]
    for host in ("a", "b"):
        known = [STATE.to_json()]
        reply = {"layouts": known, "corrupt": [], "finished": 7, "items": {}}
        report = {"op": "holdings", "ballot": ballot, "holdings": held.get(host, {})}
        desk.leader.hears(host, report | reply)


def test_a_generation_is_formed_from_memory_while_storage_hangs(desk: Desk) -> None:
    commit = commit_of(STATE, 7)
    desk.leader._records.commits = [commit]
    found = holdings_of(STATE, 2, 7)
    answer(desk, {"a": found["h0"], "b": found["h1"]})
    round_ = desk.leader._rounds.current
    assert desk.leader._rounds.phase == "assigning"
    assert round_ is not None and round_.assignment is not None
    assert (round_.assignment.source, round_.assignment.step) == ("memory", 7)
    assert "does not answer within 0.2 s; training goes on" in said(desk.directory)


def test_storage_that_is_needed_is_waited_for(desk: Desk, nfs: Nfs) -> None:
    answer(desk, {})
    desk.leader.tick()
    assert desk.leader._rounds.phase == "storage"
    assert "is silent: the job waits for it" in said(desk.directory)
    watch = desk.leader._storage.watch
    nfs.up.set()
    watch._wait_s = PATIENCE_S
    wait_until(lambda: not watch.silent)
    desk.leader.tick()
    round_ = desk.leader._rounds.current
    assert desk.leader._rounds.phase == "assigning"
    assert round_ is not None and round_.assignment is not None
    assert (round_.assignment.source, round_.assignment.step) == ("storage", 5)
    assert "answers again" in said(desk.directory)
