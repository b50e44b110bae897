"""Memory reserved ahead of time is used once there is a slot, and never left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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
