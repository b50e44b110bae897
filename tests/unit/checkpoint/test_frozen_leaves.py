"""In one process: a leaf that does not change is neither copied nor takes memory."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dtft.checkpoint import Corrupt, StorageFailed
from dtft.checkpoint.memory import local_store
from dtft.checkpoint.memory.local_store import Versions
from dtft.checkpoint.state.record import record_of
from tests.support.managers import Save, forget, memory_only
from tests.support.states import bits

KINDS = ("divided", "whole", "numpy", "key", "number", "complex", "empty")


def leaf(kind: str, value: int) -> Any:
    """A leaf of one kind; another value gives other bytes."""
    over = NamedSharding(jax.make_mesh((4, 2), ("x", "y")), PartitionSpec("y", "x"))
    grid = np.arange(64, dtype=np.float32).reshape(8, 8) + np.float32(value)
    made = {
        "divided": lambda: jax.device_put(grid, over),
        "whole": lambda: jnp.asarray(grid),
        "numpy": lambda: grid,
        "key": lambda: jax.random.key(value),
        "number": lambda: value,
        "complex": lambda: np.full(8, complex(0.0, value)),
        "empty": lambda: np.zeros((0, 3)),
    }
    return made[kind]()


@pytest.fixture(name="copied")
def what_is_copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the leaves that were copied."""
    found: list[str] = []
    copy_leaf = local_store.copy_leaf

    def recording(value: Any, record: Any, *rest: Any) -> bytes:
        found.append(record.path.rpartition("/")[2])
        return copy_leaf(value, record, *rest)

    monkeypatch.setattr(local_store, "copy_leaf", recording)
    return found


def test_only_what_changes_is_copied(copied: list[str], tmp_path: Path) -> None:
    manager = memory_only(tmp_path, memory_to_keep=2)
    states = []
    for step in range(1, 6):
        states.append({kind: leaf(kind, 7) for kind in KINDS} | {"w": jnp.ones(9)})
        states[-1]["w"] *= step
        copied.clear()
        manager.save(step, args=Save(states[-1]))
        # That it does not change is seen at the second save.
        assert copied == (["w"] if step > 2 else sorted([*KINDS, "w"]))
        for kept in manager.all_steps():
            assert bits(manager.restore(kept)) == bits(states[kept - 1])
    changed = states[-1] | {"divided": leaf("divided", 8), "numpy": leaf("numpy", 8)}
    copied.clear()
    manager.save(6, args=Save(changed))
    assert copied == ["divided", "numpy", "w"]  # w is calm from now on
    assert bits(manager.restore(6)) == bits(changed)
    assert bits(manager.restore(5)) == bits(states[-1])
    forget(manager)


def test_bytes_decide_and_not_values() -> None:
    """-0.0 equals 0.0, and a NaN nothing; a divided leaf is compared as bytes."""
    over = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    versions = Versions(keep=1, chunk_bytes=16)
    zero, nan = np.zeros(8, np.float32), np.full(8, np.nan, np.float32)
    for step, value in enumerate([zero, zero, zero, -zero, nan, nan, nan]):
        record, values = record_of(Save({"w": jax.device_put(value, over)}))
        version = versions.write(step, record, values)
        assert version.kept.tolist() == [step in (1, 2, 5, 6)]
        assert versions.read(step)[1][0].tobytes() == value.tobytes()
    versions.close()


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=3, max_size=3), st.integers(0, 3)
        ),
        max_size=12,
    )
)
def test_every_step_reads_right_and_memory_does_not_grow(
    saves: list[tuple[list[int], int]],
) -> None:
    """Whatever changes and is pinned: at most one extent per step that is needed."""
    versions = Versions(keep=2, chunk_bytes=8)
    pinned: list[Any] = []
    expected: dict[int, list[int]] = {}
    for step, (values, act) in enumerate(saves):
        args = Save({str(i): np.full(5, value) for i, value in enumerate(values)})
        version = versions.write(step, *record_of(args))
        expected[step] = values
        if act == 1 and not pinned:
            versions.pin(version)
            pinned.append(version)
        elif act == 2 and pinned:
            versions.unpin(pinned.pop())
        elif act == 3:
            versions.drop(step)
        for kept in versions.steps:
            found = [array.tolist() for array in versions.read(kept)[1]]
            assert found == [[value] * 5 for value in expected[kept]]
        for held in pinned:
            found = [np.frombuffer(view, np.int64)[0] for view in held.views()]
            assert found == expected[held.step]
        assert len(version.memory.paths) <= 4  # two kept, one written, one pinned
    for held in pinned:
        versions.unpin(held)
    versions.close()


def test_a_bit_that_rots_in_a_shared_leaf_is_found_at_every_step() -> None:
    versions = Versions(keep=2, chunk_bytes=8)
    for step in range(4):
        versions.write(step, *record_of(Save({"a": np.arange(9), "b": step})))
    versions.get(3).views()[0][3] ^= 1
    for step in (3, 2):
        with pytest.raises(Corrupt, match="default/a"):
            versions.read(step)
    versions.write(4, *record_of(Save({"a": np.arange(9), "b": 4})))
    assert versions.read(4)[1][0].tolist() == list(range(9))
    versions.close()


def test_after_a_step_that_storage_refused_nothing_is_shared(tmp_path: Path) -> None:
    manager = memory_only(tmp_path)
    for step in range(1, 4):
        manager.save(step, args=Save({"a": jnp.arange(9), "step": step}))
    manager._work._versions.get(3).views()[0][3] ^= 1
    manager._work._storing.write_newest()
    with pytest.raises(StorageFailed, match="step 3 is corrupt.*default/a"):
        manager.wait_until_finished()
    manager.save(4, args=Save({"a": jnp.arange(9), "step": 4}))
    manager.close()
    with ocp.CheckpointManager(tmp_path / "storage") as stock:
        assert stock.restore(4)["a"].tolist() == list(range(9))


def test_a_state_of_another_shape_gives_the_former_memory_back() -> None:
    versions = Versions(keep=1, chunk_bytes=8)
    for size in (4, 400):
        for step in range(3):
            args = Save({"w": np.full(size, step)})
            versions.write(size + step, *record_of(args))
    assert len(versions._memories) == 1
    assert len(versions._memories[0].paths) == 2
    versions.close()


def test_storage_gets_leaves_from_where_they_are(tmp_path: Path) -> None:
    manager = memory_only(tmp_path)
    for step in range(1, 5):
        args = Save({"frozen": jnp.arange(1000), "w": jnp.full(1000, step)})
        manager.save(step, args=args)
    assert len(set(manager._work._versions.get(4).buffers.tolist())) == 2
    manager.close()
    with ocp.CheckpointManager(tmp_path / "storage") as stock:
        back = stock.restore(4)
    assert back["frozen"].tolist() == list(range(1000)) and back["w"][0] == 4
