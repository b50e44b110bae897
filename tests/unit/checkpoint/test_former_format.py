"""Steps that the code of commit 3d5ab71 stored are read: a job's and a manager's."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint import ReplicatedCheckpointManager
from dtft.checkpoint.storage.directory import StorageTier, load_numpy
from dtft.checkpoint.storage.inspect import copy_step, describe_step, verify_step
from dtft.checkpoint.storage.stored_steps import CheckpointUnreadable
from tests.support.archives import unpack
from tests.support.states import same_bits, state

ARCHIVE = Path(__file__).parent / "data" / "steps_of_3d5ab71.tar.xz"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """`job`: step 5 with the leaves of `state()` on two devices; `manager`: step 3."""
    unpack(ARCHIVE, tmp_path)
    return tmp_path / "steps_of_3d5ab71"


@pytest.mark.usefixtures("default_flags")  # the archive has the NaN of `state()`
def test_every_bit_of_a_jobs_step_is_read_onto_another_mesh(stored: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    specs = {"params/w": PartitionSpec("fsdp")}
    wanted = {
        path: jax.ShapeDtypeStruct(
            value.shape,
            value.dtype,
            sharding=NamedSharding(mesh, specs.get(path, PartitionSpec())),
        )
        for path, value in state().items()
    }
    tier = StorageTier(stored / "job", read_only=True)
    arrays, items = tier.restore(5, wanted)
    assert items == {"position": 5, "note": ["a", None], "config": "{}"}
    assert tier.items(5) == items
    loaded = load_numpy(stored / "job", 5)
    assert loaded.keys() == state().keys()
    for path, value in state().items():
        assert same_bits(arrays[path], value), path
        assert arrays[path].sharding == wanted[path].sharding, path
        assert same_bits(loaded[path], value), path


def test_a_jobs_step_is_followed_by_one_in_todays_format(stored: Path) -> None:
    tier = StorageTier(stored / "job", max_to_keep=2)
    arrays = {path: jax.numpy.asarray(value) for path, value in state().items()}
    tier.save(6, arrays, {"position": 6})
    tier.wait_until_finished()
    assert tier.all_steps() == (5, 6)
    assert (tier.items(5)["position"], tier.items(6)["position"]) == (5, 6)
    tier.save(5, arrays, {"position": 7})  # in place of the former one
    tier.close()
    assert tier.items(5)["position"] == 7
    assert same_bits(load_numpy(stored / "job", 5)["params/w"], state()["params/w"])


def test_people_see_a_jobs_step_as_before(stored: Path, tmp_path: Path) -> None:
    directory = stored / "job"
    leaves, items = describe_step(directory, 5)
    assert [leaf.path for leaf in leaves] == sorted(state())
    assert items["position"] == 5 and verify_step(directory, [5]) == {5: ""}
    (tmp_path / "copy" / "5.orbax-checkpoint-tmp").mkdir(parents=True)  # interrupted
    assert copy_step(directory, 5, tmp_path / "copy") > 200
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["5"]
    assert verify_step(tmp_path / "copy", [5]) == {5: ""}


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d"])
def test_damage_in_a_jobs_step_is_told(stored: Path, name: str) -> None:
    path = stored / "job" / "5" / "state" / name
    file = next(path.iterdir()) if path.is_dir() else path
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    assert "exists but cannot be read" in verify_step(stored / "job", [5])[5]
    with pytest.raises(CheckpointUnreadable, match="job/5 exists but cannot be read"):
        load_numpy(stored / "job", 5)


def test_a_jobs_step_is_read_by_the_public_manager(stored: Path) -> None:
    with ReplicatedCheckpointManager(stored / "job") as manager:
        found: Any = manager.restore(5)
    assert found["items"]["position"] == 5
    assert same_bits(found["state"]["opt"]["0"]["nan"], state()["opt/0/nan"])


def test_a_managers_step_comes_back_as_it_was_saved(stored: Path) -> None:
    one = np.arange(6.0, dtype=np.float32)
    target = {"empty": one[:0], "n": 0, "half": np.float16(0), "wide": np.zeros(3, int)}
    args = ocp.args.Composite(
        model=ocp.args.StandardRestore(),
        other=ocp.args.StandardRestore(target),
        data=ocp.args.JsonRestore(),
    )
    with ReplicatedCheckpointManager(stored / "manager") as manager:
        found: Any = manager.restore(3, args=args)
        assert manager.metrics(3) == {"loss": 0.5}
        assert manager.metadata(3).custom_metadata == {"note": 1}
    assert found["data"] == {"position": 41}
    model, other = found["model"], found["other"]
    assert same_bits(model["w"], one) and same_bits(model["layers"][1][0], one)
    assert model["layers"][1][1] is None
    assert jax.random.key_data(model["key"]).tolist() == [0, 3]
    assert other["empty"].shape == (0,) and other["n"] == 1
    assert type(other["half"]) is np.float16 and other["half"] == 0.5
    assert other["wide"].tolist() == [0, 1, 2] and other["wide"].dtype == np.int64
