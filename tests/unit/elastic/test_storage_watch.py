"""Storage that hangs or fails: its last answer counts until it answers again."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtft.elastic.leader.storage import PATIENCE_S, StorageWatch
from tests.support.commits import commit_of, holdings_of, layout
from tests.support.desks import Desk
from tests.support.virtual_loop import VirtualLoop


def test_the_last_answer_counts_while_storage_hangs(tmp_path: Path) -> None:
    loop, asked = VirtualLoop(), []

    def listed(directory: Path) -> list[int]:
        asked.append(directory)
        return [int(path.name) for path in directory.iterdir()]

    (tmp_path / "20").mkdir()
    watch = StorageWatch(tmp_path, loop, list_steps=listed)
    assert not watch.settled and not watch.silent
    loop.turn()
    assert watch.settled and watch.steps == (20,) and watch.news() is None
    loop.hold("aside")  # as a dead mount does
    (tmp_path / "40").mkdir()
    watch.look()
    assert not watch.settled
    loop.turn(PATIENCE_S)
    assert watch.steps == (20,) and watch.silent and watch.settled
    line = watch.news()
    assert line is not None and "does not answer" in line and "step 20" in line
    for _ in range(10):  # one question is open, not one for every look
        watch.look()
        assert watch.newest == 20 and watch.news() is None
    watch.wrote(60)
    assert watch.steps == (20, 60)
    loop.let_go("aside")
    loop.turn()
    assert not watch.silent and asked == [tmp_path] * 2
    assert watch.news() == f"storage {tmp_path} answers again"
    # The late answer counts, and what was written meanwhile; then it is asked anew.
    assert watch.steps == (20, 40, 60)
    watch.look()
    loop.turn()
    assert watch.steps == (20, 40) and len(asked) == 3


def test_a_step_that_was_written_counts_while_the_next_listing_hangs(
    tmp_path: Path,
) -> None:
    loop = VirtualLoop()
    watch = StorageWatch(
        tmp_path, loop, list_steps=lambda path: [int(it.name) for it in path.iterdir()]
    )
    loop.turn()
    (tmp_path / "40").mkdir()
    watch.wrote(40)
    loop.hold("aside")
    watch.look()
    loop.turn(PATIENCE_S)
    assert watch.silent and watch.steps == (40,)
    loop.let_go("aside")
    loop.turn()
    (tmp_path / "40").rmdir()
    watch.look()
    loop.turn()
    assert watch.steps == ()


def test_a_directory_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    loop = VirtualLoop()
    watch = StorageWatch(tmp_path / "none", loop)
    loop.turn()
    assert watch.steps == () and watch.newest == 0 and not watch.silent


class Stored:
    """Lists these steps; fails with `error` while that is set."""

    def __init__(self, *steps: int, error: OSError | None = None) -> None:
        self.steps, self.error = steps, error

    def __call__(self, directory: Path) -> tuple[int, ...]:
        if self.error is not None:
            raise self.error
        return self.steps


STALE = OSError(errno.ESTALE, "Stale file handle", "/nfs/run")


def test_the_last_answer_counts_while_storage_cannot_be_listed(tmp_path: Path) -> None:
    loop, stored = VirtualLoop(), Stored(20)
    watch = StorageWatch(tmp_path, loop, list_steps=stored)
    loop.turn()
    assert watch.steps == (20,) and watch.trouble == ""
    watch.wrote(40)
    stored.error = STALE
    watch.look()
    loop.turn()
    assert watch.steps == (20, 40) and watch.settled and not watch.silent
    line = watch.news()
    assert line is not None and "cannot be listed (OSError: [Errno 116]" in line
    assert "step 20 was the newest seen" in line and watch.news() is None
    stored.steps, stored.error = (), None
    watch.look()
    loop.turn()
    assert watch.steps == () and watch.news() == f"storage {tmp_path} answers again"


STATE = layout(2, 1)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A leader of two slots whose storage hangs and would show step 5."""
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    made = Desk(tmp_path)
    made.loop.hold("aside")
    made.join("b")
    yield made
    made.close()


def answer(desk: Desk, held: dict) -> None:
    for host in ("a", "b"):
        known = {"layouts": [STATE.to_json()], "finished": 7}
        desk.answer(host, holdings=held.get(host, {}), **known)


def test_a_generation_is_formed_from_memory_while_storage_hangs(desk: Desk) -> None:
    desk.leader._records.learn([commit_of(STATE, 7)])
    found = holdings_of(STATE, 2, 7)
    answer(desk, {"a": found["h0"], "b": found["h1"]})
    desk.turn(PATIENCE_S + 0.2)
    assert desk.assignment is not None
    assert (desk.assignment.source, desk.assignment.step) == ("memory", 7)
    assert "does not answer within 1 s; training goes on" in desk.said


def test_storage_that_is_needed_is_waited_for(desk: Desk) -> None:
    answer(desk, {})
    desk.turn(PATIENCE_S + 0.2)
    assert desk.phase == "storage" and desk.assignment is None
    assert "does not answer within 1 s: the job waits for it" in desk.said
    desk.loop.let_go("aside")
    desk.turn(10)
    assert desk.assignment is not None
    assert (desk.assignment.source, desk.assignment.step) == ("storage", 5)
    assert "answers again" in desk.said


def test_a_job_does_not_begin_anew_while_storage_cannot_be_listed(
    tmp_path: Path,
) -> None:
    stored = Stored(5, error=STALE)
    with contextlib.closing(Desk(tmp_path, list_steps=stored)) as desk:
        desk.join("b")
        answer(desk, {})
        desk.turn(20)
        assert desk.phase == "storage" and desk.assignment is None
        line = "cannot be listed (OSError: [Errno 116] Stale file handle: '/nfs/run')"
        assert desk.said.count(f"checkpoints {line}: the job waits for it.") == 1
        stored.error = None
        desk.turn(10)
        assert desk.assignment is not None
        assert (desk.assignment.source, desk.assignment.step) == ("storage", 5)


def test_a_job_that_waits_for_storage_can_be_stopped(tmp_path: Path) -> None:
    stored = Stored(error=PermissionError(errno.EACCES, "Permission denied"))
    with contextlib.closing(Desk(tmp_path, list_steps=stored)) as desk:
        desk.join("b")
        answer(desk, {})
        desk.turn(20)
        desk.put("m/stop", "1")
        desk.look()
        desk.turn()
        last = desk.events()[-1]
        assert (last["event"], last["status"]) == ("end", "stopped")


def test_a_generation_is_formed_from_memory_while_storage_cannot_be_listed(
    tmp_path: Path,
) -> None:
    with contextlib.closing(Desk(tmp_path, list_steps=Stored(error=STALE))) as desk:
        desk.join("b")
        desk.leader._records.learn([commit_of(STATE, 7)])
        found = holdings_of(STATE, 2, 7)
        answer(desk, {"a": found["h0"], "b": found["h1"]})
        desk.turn()
        assert desk.assignment is not None
        assert (desk.assignment.source, desk.assignment.step) == ("memory", 7)
        assert "training goes on" in desk.said
