"""The storage tier: exact bits, stock Orbax, and errors that say what to change."""

import os
import shutil
import subprocess
import sys
from functools import reduce
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.state.tree import to_paths
from dtft.checkpoint.storage.directory import StorageTier, load_numpy
from dtft.checkpoint.storage.inspect import list_steps
from dtft.checkpoint.storage.step_directories import DELETED
from dtft.checkpoint.storage.stored_steps import CheckpointUnreadable, StoredSteps
from dtft.elastic.processes import free_port
from tests.support.states import same_bits, state

ROOT = Path(__file__).parents[3]


def sharding(path: str = "", devices: int = 1) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    specs = {"params/w": PartitionSpec("fsdp")} if devices > 1 else {}
    return NamedSharding(mesh, specs.get(path, PartitionSpec()))


def arrays(devices: int = 1) -> dict[str, jax.Array]:
    values = state().items()
    return {p: jax.device_put(v, sharding(p, devices)) for p, v in values}


def abstract(devices: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        path: jax.ShapeDtypeStruct(
            value.shape, value.dtype, sharding=sharding(path, devices)
        )
        for path, value in state().items()
    }


def save(directory: Path, *steps: int, devices: int = 1, keep: int = 3) -> None:
    tier = StorageTier(directory, max_to_keep=keep)
    for step in steps:
        tier.save(step, arrays(devices), {"position": step, "note": ["a", None]})
        tier.wait_until_finished()
    tier.close()


def test_every_bit_comes_back_on_another_mesh(tmp_path: Path) -> None:
    save(tmp_path, 5, devices=2)
    tier = StorageTier(tmp_path, read_only=True)
    restored, items = tier.restore(5, abstract(devices=8))
    assert items == {"position": 5, "note": ["a", None]} == tier.items(5)
    for path, value in state().items():
        assert same_bits(restored[path], value), path
        assert restored[path].sharding == sharding(path, 8)
    tier.close()


def test_load_numpy_has_every_leaf(tmp_path: Path) -> None:
    save(tmp_path, 5, devices=2)
    loaded = load_numpy(tmp_path, 5)
    assert loaded.keys() == state().keys()
    assert all(same_bits(loaded[path], value) for path, value in state().items())


def test_stock_orbax_reads_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with ocp.CheckpointManager(tmp_path) as manager:
        target = {"params": {}, "opt": {"0": {}}, "rng": {}}
        for path, leaf in abstract().items():
            *parents, name = path.split("/")
            reduce(dict.__getitem__, parents, target)[name] = (
                leaf if leaf.size else None
            )
        restored = manager.restore(
            manager.latest_step(),
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target),
                items=ocp.args.JsonRestore(),
            ),
        )
    for path, leaf in to_paths(restored["state"]).items():
        assert same_bits(leaf, state()[path]), path
    assert restored["items"]["position"] == 5


def test_steps_are_listed_and_old_ones_dropped(tmp_path: Path) -> None:
    tier = StorageTier(tmp_path / "new")
    assert tier.all_steps() == () and tier.latest_step() is None
    assert not (tmp_path / "new").exists()
    save(tmp_path, 2, 4, 10, keep=2)
    (tmp_path / "12.orbax-checkpoint-tmp").mkdir()
    tier = StorageTier(tmp_path, read_only=True)
    assert tier.all_steps() == (4, 10) and tier.latest_step() == 10


class Killed(BaseException):
    """Stands for the end of the process, which no code of it survives."""


@pytest.mark.parametrize("how", ["kept", "replaced", "deleted", "deleted by a user"])
def test_a_step_that_was_deleted_in_part_is_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    save(tmp_path, 1, 2)

    def killed(path: os.PathLike[str], *_: object, **__: object) -> None:
        for file in Path(path).rglob("dtft/metadata"):
            file.unlink()
        if Path(path).exists():
            raise Killed

    tier = StorageTier(tmp_path, max_to_keep=1 if how == "kept" else 3)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", killed)
        if how == "deleted":
            tier.delete([1])
        elif how == "deleted by a user":
            StoredSteps(tier.directory).delete(1)
        else:
            tier.save(3 if how == "kept" else 1, arrays(), {})
            tier.wait_until_finished()
    steps = StorageTier(tmp_path, read_only=True).all_steps()
    assert steps == ((3,) if how == "kept" else (2,))
    assert set(ocp.utils.checkpoint_steps(tmp_path)) == set(steps)
    for step in steps:
        assert load_numpy(tmp_path, step).keys() == state().keys()
    assert list_steps(tmp_path)[1] == [] and (tmp_path / DELETED).exists()
    save(tmp_path, 4, 5, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_an_existing_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 4)
    tier = StorageTier(tmp_path)
    changed = arrays() | {
        "rng/key": jax.device_put(np.array([5, 5], np.uint32), sharding())
    }
    tier.save(4, changed, {})
    tier.close()
    assert load_numpy(tmp_path, 4)["rng/key"].tolist() == [5, 5]


def test_misfit_lists_expected_and_found(tmp_path: Path) -> None:
    save(tmp_path, 5)
    tier = StorageTier(tmp_path, read_only=True)
    wanted = abstract()
    wanted["params/new"] = wanted.pop("rng/key")
    wanted["params/w"] = jax.ShapeDtypeStruct((8, 7), np.float32, sharding=sharding())
    wanted["opt/0/empty"] = jax.ShapeDtypeStruct((0, 3), np.int32, sharding=sharding())
    with pytest.raises(ValueError) as error:
        tier.restore(5, wanted)
    for text in (
        "4 leaves differ",
        "params/w: expected float32[8, 7], found float32[8, 6]",
        "opt/0/empty: expected int32[0, 3], found float32[0, 3]",
        "params/new: expected uint32[2], found nothing",
        "rng/key: expected nothing, found uint32[2]",
    ):
        assert text in str(error.value)
    tier.close()


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(FileNotFoundError, match=r"step=6 is not in .*It has: 5\."):
        load_numpy(tmp_path, 6)


@pytest.mark.parametrize(
    "damage", ["state/manifest.ocdbt", "items/metadata", "dtft/metadata"]
)
def test_an_unreadable_step_is_an_error_with_its_path(
    tmp_path: Path, damage: str
) -> None:
    save(tmp_path, 5)
    (tmp_path / "5" / damage).write_bytes(b"")
    tier = StorageTier(tmp_path, read_only=True)
    with pytest.raises(CheckpointUnreadable, match=f"{tmp_path}/5 exists but cannot"):
        tier.restore(5, abstract())
    tier.close()


def test_a_flipped_bit_is_never_restored(tmp_path: Path) -> None:
    value = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    tier = StorageTier(tmp_path)
    tier.save(1, {"w": jax.device_put(value, sharding())}, {})
    tier.close()
    largest = max((f for f in tmp_path.rglob("*") if f.is_file()), key=_size)
    good = largest.read_bytes()
    wanted = {"w": jax.ShapeDtypeStruct((50_000,), np.float32, sharding=sharding())}
    for place in range(100, len(good), len(good) // 4):
        largest.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        tier = StorageTier(tmp_path, read_only=True)
        with pytest.raises(CheckpointUnreadable, match=f"{tmp_path}/1 exists but"):
            tier.restore(1, wanted)
        with pytest.raises(CheckpointUnreadable):
            tier.load_numpy(1)
        tier.close()


def _size(file: Path) -> int:
    return file.stat().st_size


def test_what_orbax_would_confuse_or_lose_is_refused(tmp_path: Path) -> None:
    tier = StorageTier(tmp_path)
    one = arrays()["rng/key"]
    with pytest.raises(ValueError, match="'a/b' and 'a.b' have one name"):
        tier.save(1, {"a/b": one, "a.b": one}, {})
    with pytest.raises(ValueError, match="no leaf with a value"):
        tier.save(1, {"e": arrays()["opt/0/empty"]}, {})
    with pytest.raises(ValueError, match="read_only=True"):
        StorageTier(tmp_path, read_only=True).save(1, {"a": one}, {})
    with pytest.raises(ValueError, match="max_to_keep=0"):
        StorageTier(tmp_path, max_to_keep=0)


@pytest.mark.timeout(180)  # two processes that import JAX
def test_two_gloo_processes_restore_together(tmp_path: Path) -> None:
    save(tmp_path, 5, devices=2)
    module = "tests.support.restore_in_world"
    address = f"localhost:{free_port()}"
    command = [sys.executable, "-m", module, str(tmp_path), address]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [output.split()[-1] for output in outputs] == ["same", "same"]
