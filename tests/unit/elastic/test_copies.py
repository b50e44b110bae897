"""Memory reserved ahead of time is used once there is a slot, and never left behind."""

import mmap
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.memory.replica_store import ReplicaStore
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.elastic.job import AgentConfig
from dtft.elastic.transfer.copies import Copies


def layout(size: int) -> Layout:
    return Layout(
        mesh=MeshLayout(axis_names=("replica",), axis_sizes=(2,), slots=(0, 1)),
        leaves=(Leaf(path="w", shape=(size,), dtype="uint8", spec=()),),
    )


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    config = AgentConfig(
        job="j",
        host="h0",
        store="s:1",
        secret=b"x" * 16,
        num_slots=2,
        trainer_command=(),
        run_directory=tmp_path,
        storage_directory=tmp_path / "checkpoints",
        config_digest="",
        arena_directory=tmp_path,
    )
    config.memory_directory.mkdir()
    made = Copies(config)
    yield made
    made.close()
    assert not list(config.memory_directory.iterdir())


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "dtft-j-h0").iterdir())


def test_what_was_reserved_is_the_arena(copies: Copies, tmp_path: Path) -> None:
    copies.expect(layout(5000))
    copies.expect(layout(5000))
    holder = copies.hold(layout(5000), 1)
    assert holder.path.name == "reserve" and files(tmp_path) == ["reserve"]
    assert len(holder.begin_stage(1).buffers) == holder.map.own.num_chunks
    copies.expect(layout(5000))  # it has its memory
    assert files(tmp_path) == ["reserve"]


def test_a_slot_that_needs_more_gets_it(copies: Copies, tmp_path: Path) -> None:
    copies.expect(layout(10))
    holder = copies.hold(layout(5000), 1)
    assert holder.path.name == "arena" and files(tmp_path) == ["arena"]


def test_a_reserve_that_is_too_small_is_replaced(
    copies: Copies, tmp_path: Path
) -> None:
    copies.expect(layout(10))
    copies.expect(layout(5000))
    copies.expect(layout(10))
    assert files(tmp_path) == ["reserve"]
    assert copies.hold(layout(5000), 1).path.name == "reserve"


def test_a_restore_of_a_slot_that_was_lost_takes_no_memory(
    copies: Copies, tmp_path: Path
) -> None:
    copies.epoch, copies.has_slot = (2, 1), True
    copies.hold(layout(5000), 1, epoch=(2, 1))
    copies.has_slot = False
    copies.free((2, 1))
    with pytest.raises(OSError, match="not the newest"):
        copies.hold(layout(5000), 1, epoch=(2, 1))
    assert files(tmp_path) == [] and copies.is_over((2, 1))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for one arena."""
    if os.geteuid():
        pytest.skip("mounting a file system needs root")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "dtft-test", str(tmp_path)],
        check=True,
    )
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_copies_that_others_have_are_freed_for_another_slot(
    small: Path, copies: Copies
) -> None:
    state = layout(100_000)  # an arena has four buffers of it
    former = copies.hold(state, 1)
    stage(copies, 7, b"x" * 16)
    with pytest.raises(OSError, match="needs .* bytes"):
        copies.hold(state, 0, keep=7)
    assert copies.former == (former,) and former.steps() == (7,)
    holder = copies.hold(state, 0, keep=7, may_free=True)
    assert copies.holders() == [holder] and files(small) == [holder.path.name]


def test_memory_that_was_freed_is_awaited(small: Path, copies: Copies) -> None:
    """A trainer that was killed maps the arena until it has ended."""
    state = layout(100_000)
    former = copies.hold(state, 1)
    stage(copies, 7, b"x" * 16)
    with open(former.path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    threading.Timer(0.3, mapped.close).start()
    assert copies.hold(state, 0, keep=7, may_free=True) is copies.holder
    assert mapped.closed and len(files(small)) == 1


def test_copies_of_a_slot_that_was_lost_meanwhile_are_not_freed(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies that made them dispensable may be lost, too."""
    copies.epoch, copies.has_slot = (2, 1), True
    former = copies.hold(layout(5000), 1)
    stage(copies, 7, b"x" * 16)

    def make(*given: object) -> ReplicaStore:
        copies.has_slot = False  # the leader forms the job anew
        raise OSError("no memory")

    monkeypatch.setattr(copies, "_make", make)
    with pytest.raises(OSError, match="no memory"):
        copies.hold(layout(5000), 0, keep=7, epoch=(2, 1), may_free=True)
    assert copies.former == (former,) and former.steps() == (7,)


def test_memory_that_comes_after_the_slot_was_lost_is_freed(
    copies: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies.epoch, copies.has_slot = (2, 1), True
    make = copies._make

    def late(*given: Any) -> ReplicaStore:
        copies.has_slot = False
        copies.free((2, 1))  # finds nothing
        return make(*given)

    monkeypatch.setattr(copies, "_make", late)
    with pytest.raises(OSError, match="was lost"):
        copies.hold(layout(5000), 1, epoch=(2, 1))
    assert copies.holders() == [] and files(tmp_path) == []


def test_copies_of_a_former_slot_become_memory_for_any_slot(
    copies: Copies, tmp_path: Path
) -> None:
    copies.expect(layout(5000))
    copies.epoch = 2, 1
    former = copies.hold(layout(5000), 1)
    stage(copies, 7, b"x" * 16)
    copies.expect(layout(5000))
    assert former.steps() == (7,)
    copies.free((1, 1))  # a newer order has given it a slot
    assert copies.holder is former and former.steps() == (7,)
    copies.free((2, 1))
    assert copies.holders() == [] and files(tmp_path) == []
    copies.expect(layout(5000))
    assert copies.report(read=True)["holdings"] == {}
    assert copies.hold(layout(5000), 0).path.name == "reserve"


def test_what_was_never_used_is_freed(copies: Copies) -> None:
    copies.expect(layout(5000))


def test_memory_that_cannot_be_reserved_is_asked_for_again(copies: Copies) -> None:
    with pytest.raises(OSError, match="needs .* bytes"):
        copies.expect(layout(1 << 50))
    assert copies.hold(layout(5000), 0).path.name == "arena"


def stage(copies: Copies, step: int, digest: bytes) -> None:
    holder = copies.holder
    assert holder is not None
    holder.begin_stage(step)
    holder.staged(step, [digest] * len(holder.own_slices), {"step": step})


def resized(copies: Copies) -> tuple[ReplicaStore, ReplicaStore]:
    """The holder of a former layout, which has step 7, and that of the new layout."""
    former = copies.hold(layout(5000), 1)
    stage(copies, 7, b"x" * 16)
    return former, copies.hold(layout(4000), 1, keep=7)


def test_a_holder_that_is_kept_serves_while_others_are_closed(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, kept = resized(copies)
    seen, closing = [], former.close

    def close() -> None:
        seen.append(copies.holder)
        closing()

    monkeypatch.setattr(former, "close", close)
    assert copies.hold(layout(4000), 1) is kept
    assert seen == [kept]


def test_what_goes_while_it_is_reported_is_left_out(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore of another step, and a new assignment, come during the report."""
    former, newest = resized(copies)
    stage(copies, 8, b"y" * 16)
    listed = newest.holdings

    def holdings(read: bool) -> tuple[dict[int, dict[str, bytes]], list[str]]:
        found = listed(read)
        newest.keep_only(set())
        copies.committed()
        return found

    monkeypatch.setattr(newest, "holdings", holdings)
    told = copies.report(read=False)
    assert told["holdings"] == told["items"] == told["complete"] == {}
    assert told["corrupt"] == [] and copies.former == ()
    with pytest.raises(ValueError, match="closed"):
        former.holdings(read=False)


def test_a_step_that_was_not_committed_is_not_kept_for_another_formation(
    copies: Copies,
) -> None:
    """The next formation makes it again, on another mesh and so with other bits."""
    before = copies.hold(layout(5000), 1)
    for step in (29, 30):
        stage(copies, step, b"x" * 16)
    after = copies.hold(layout(4000), 1, keep=29)
    assert copies.former == (before,) and before.steps() == (29,)
    assert after.steps() == () and copies.holding(30) is after
