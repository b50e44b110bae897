"""The public manager alone in one process: exact bits, refusals, storage for stock."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint import Corrupt, ReplicatedCheckpointManager, ReplicatedOptions
from dtft.checkpoint import StorageFailed as Failed
from dtft.checkpoint.storage import StoredSteps
from dtft.checkpoint.storage.stored_steps import CheckpointUnreadable
from tests.support.managers import NEVER, Restore, Save, forget, memory_only
from tests.support.states import NANS, bits


class Moments(NamedTuple):
    count: Any
    mean: Any


def meshes() -> tuple[Mesh, Mesh]:
    devices = np.array(jax.devices())
    return (
        Mesh(devices.reshape(2, 4), ("replica", "fsdp")),
        Mesh(devices[:4].reshape(2, 2), ("tensor", "stage")),
    )


def odd_state() -> dict[str, Any]:
    """Every kind of leaf, in every kind of container."""
    first, _ = meshes()
    grid = np.arange(64, dtype=np.float32).reshape(8, 8) - 31.5
    grid[0, :3] = [-0.0, np.nan, np.inf]
    with jax.numpy_dtype_promotion("standard"):
        adam = optax.adam(1e-3).init({"w": jnp.ones(3)})
    return {
        "rows": jax.device_put(grid, NamedSharding(first, PartitionSpec("fsdp"))),
        "both": jax.device_put(
            grid.astype(jnp.bfloat16),
            NamedSharding(first, PartitionSpec("replica", "fsdp")),
        ),
        "columns": jax.device_put(
            grid, NamedSharding(first, PartitionSpec(None, ("replica", "fsdp")))
        ),
        "same": jax.device_put(
            np.array(NANS).view(np.float32), NamedSharding(first, PartitionSpec())
        ),
        "optax": adam,
        "deep": [
            Moments(jnp.int32(7), (np.array(-3, np.int8), None)),
            {},
            (),
            {"a/b": True},
        ],
        "zero": np.full((2, 3), -0.0, ml_dtypes.bfloat16),
        "wide": np.array([2**62 + 1, -1]),
        "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
        "int4": jnp.array([1, -2, 7], jnp.int4),
        "fp8": jnp.array([1.5, -0.0], jnp.float8_e4m3fn),
        "complex": np.array([1 - 0j, -0.0j]),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(5, impl="rbg"), 4),
        "raw key": jax.random.PRNGKey(7),
        "int": -(2**40),
        "float": -0.0,
        "scalar": np.float64(0.1),
    }


def empties() -> dict[str, Any]:
    """Leaves without a byte, which Orbax refuses."""
    return {
        "nothing": np.zeros((0, 2)),
        "no keys": jax.random.split(jax.random.key(1), 0),
    }


def like(tree: Any) -> Any:
    """The tree with every jax array as a struct on its sharding."""

    def struct(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(struct, tree)


def onto(tree: Any, sharding: Any) -> Any:
    def struct(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(struct, tree)


@pytest.fixture
def manager(tmp_path: Path):
    """Keeps two steps in memory; nothing is due for storage, so nothing starts."""
    one = memory_only(tmp_path, memory_to_keep=2)
    yield one
    forget(one)


# ------------------------------------------------------------------- memory alone


def test_every_bit_comes_back_from_memory(manager: Any) -> None:
    state = odd_state() | {"empty": jnp.zeros((0, 3)), "none": None}
    assert manager.save(1, args=Save(state))
    back = manager.restore(1, args=Restore(like(state)))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert bits(back) == bits(state)
    for name in ("rows", "both", "columns", "same"):
        assert back[name].sharding == state[name].sharding
    plain = manager.restore(1)
    assert plain["deep"] == [{"count": 7, "mean": [-3, None]}, {}, (), {"a/b": True}]
    assert plain["rows"].sharding == state["rows"].sharding
    again = manager.restore(1, args=Restore(manager.item_metadata(1)))
    assert bits(again["both"]) == bits(state["both"])


def test_an_array_that_nobody_put_on_a_device_comes_back_so(manager: Any) -> None:
    """As a counter that an optimizer made: jax.jit takes it beside divided arrays."""
    rows = odd_state()["rows"]
    state = {"rows": rows, "count": jnp.float32(3), "key": jax.random.key(1)}
    manager.save(1, args=Save(state))
    back = manager.restore(1, args=Restore(state))
    assert not back["count"].committed and not back["key"].committed
    assert back["rows"].committed and bits(back) == bits(state)
    jax.jit(lambda state: state["rows"] * state["count"])(back)


def test_memory_restores_onto_another_mesh(manager: Any) -> None:
    state = {name: odd_state()[name] for name in ("rows", "both", "columns")}
    manager.save(1, args=Save(state))
    for spec in (("stage",), (None, "tensor"), ("tensor", "stage"), ()):
        sharding = NamedSharding(meshes()[1], PartitionSpec(*spec))
        back = manager.restore(1, args=Restore(onto(state, sharding)))
        assert bits(back) == bits(state)
        assert all(leaf.sharding == sharding for leaf in back.values())


def test_a_step_that_donates_may_follow_at_once(manager: Any) -> None:
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    x = jax.block_until_ready(jnp.arange(1 << 16, dtype=jnp.float32))
    for number in (1, 2):
        manager.save(number, args=Save({"x": x}))
        before, pointer = x, x.unsafe_buffer_pointer()
        x = jax.block_until_ready(step(x))
        assert before.is_deleted() and x.unsafe_buffer_pointer() == pointer
    back = manager.restore(2)["x"]
    jax.block_until_ready(step(back))  # what was restored is not the memory itself
    for number, factor in ((1, 1), (2, 2)):
        expected = np.arange(1 << 16, dtype=np.float32) * np.float32(factor)
        assert np.array_equal(manager.restore(number)["x"], expected)


def flip(manager: Any, step: int, leaf: int = 0) -> None:
    manager._work._versions.get(step).views()[leaf][5] ^= 16


def test_a_corrupt_copy_is_refused_and_the_step_before_it_used(manager: Any) -> None:
    for step in (1, 2):
        manager.save(step, args=Save({"w": jnp.full(8, step)}))
    flip(manager, 2)
    assert manager.latest_step() == 2
    assert manager.restore()["w"].tolist() == [1] * 8
    assert manager.all_steps() == [1]
    flip(manager, 1)
    with pytest.raises(Corrupt, match="step 1 in memory is corrupt.*default/w"):
        manager.restore(1)
    with pytest.raises(FileNotFoundError, match="neither in memory"):
        manager.restore()


def test_a_save_that_fails_loses_nothing(manager: Any) -> None:
    good = {"w": jnp.arange(3.0)}
    for step in (1, 2):
        manager.save(step, args=Save(good))
    huge = np.broadcast_to(np.float32(0), (1 << 50,))
    gone = jnp.ones(3)
    gone.delete()
    dotted = {"a.b": 1, "a": {"b": 2}}
    with pytest.raises(OSError, match="bytes"):
        manager.save(3, args=Save({"w": huge}))
    for state, reason in [
        ({"w": gone}, "'default/w' was donated or deleted"),
        ({"w": "text"}, "JsonSave"),
        ({"w": 2**70}, "64 bits"),
        ({"w": np.array(["a"])}, "dtype"),
        (dotted, "one name in Orbax"),
        (3.0, "not a tree"),
        ({"w": {}}, "holds no leaf"),
    ]:
        with pytest.raises(ValueError, match=reason):
            manager.save(3, args=Save(state))
    with pytest.raises(ValueError, match="PyTreeSaveArgs.*Allowed"):
        manager.save(3, args=ocp.args.PyTreeSave(good))
    assert manager.all_steps() == [1, 2]
    for step in (1, 2):
        assert bits(manager.restore(step)) == bits(good)
    assert manager.save(3, args=Save(good))


def test_a_state_may_change_its_shape(manager: Any) -> None:
    for step, size in ((1, 4), (2, 4000), (3, 12), (4, 12)):
        manager.save(step, args=Save({"w": jnp.arange(size), f"only {step}": step}))
        for kept in manager.all_steps():
            assert manager.restore(kept)[f"only {kept}"] == kept
    assert manager.all_steps() == [3, 4]


def test_a_tree_that_does_not_fit_is_refused(manager: Any) -> None:
    manager.save(1, args=Save({"w": jnp.arange(3.0), "n": 3, "c": jnp.int32(5)}))
    w = jax.ShapeDtypeStruct((3,), jnp.float32)
    for tree, reason in [
        ({"w": w, "n": 3}, "Saved but not in the tree: default/c"),
        ({"w": w, "n": 3, "c": 5, "d": 1}, "Not saved: default/d"),
        ({"w": jax.ShapeDtypeStruct((4,), jnp.float32), "n": 3, "c": 5}, r"float32\[3"),
        ({"w": jax.ShapeDtypeStruct((3,), jnp.int32), "n": 3, "c": 5}, "dtype"),
        ({"w": w, "n": 3.0, "c": 5}, "float"),
        ({"w": w, "n": True, "c": 5}, "bool"),
    ]:
        with pytest.raises(ValueError, match=reason):
            manager.restore(1, args=Restore(tree))
    # Before the first step a counter is often a Python number, and an array after it.
    tree = {"w": np.zeros(3, np.float32), "n": jax.ShapeDtypeStruct((), "int32")}
    back = manager.restore(1, args=Restore(tree | {"c": 0}))
    wanted = {"w": np.arange(3, dtype=np.float32), "n": jnp.int32(3), "c": 5}
    assert bits(back) == bits(wanted)
    with pytest.raises(ValueError, match="strict"):
        manager.restore(1, args=Restore(tree, strict=False))


def test_steps_follow_orbaxs_rules(tmp_path: Path) -> None:
    manager = memory_only(tmp_path, save_interval_steps=5, memory_to_keep=3)
    state = {"w": jnp.ones(2)}
    assert manager.latest_step() is None and manager.best_step() is None
    saved = [step for step in range(3, 12) if manager.save(step, args=Save(state))]
    stock = ocp.CheckpointManager(
        tmp_path / "stock", options=ocp.CheckpointManagerOptions(save_interval_steps=5)
    )
    assert saved == [3, 5, 10] == manager.all_steps()
    assert stock.should_save(3) and not manager.should_save(7)
    stock.close()
    assert manager.save(7, args=Save(state), force=True)
    with pytest.raises(ValueError, match="step=7 exists already: 5, 7, 10"):
        manager.save(7, args=Save(state), force=True)
    manager.delete(10)
    assert manager.all_steps() == [5, 7]
    assert manager.save(8, args=Save(state), force=True)
    assert manager.latest_step() == 8
    assert manager.save(6, args=Save({"w": jnp.zeros(2)}), force=True)
    assert manager.all_steps() == [6, 7, 8]  # those saved last
    assert manager.restore(6)["w"].tolist() == [0, 0]
    assert manager.restore(7)["w"].tolist() == [1, 1]
    with pytest.raises(FileNotFoundError):
        manager.delete(10)
    assert ocp.AbstractCheckpointManager in type(manager).__mro__
    forget(manager)
    with pytest.raises(ValueError, match="is closed"):
        manager.save(9, args=Save(state))


def test_named_items_and_json(manager: Any) -> None:
    position = {"sample": 12, "names": ["a", None]}
    args = ocp.args.Composite(
        model=Save({"w": jnp.ones(2)}), data=ocp.args.JsonSave(position)
    )
    manager.save(1, args=args, metrics={"loss": jnp.float32(0.5)})
    position["sample"] = 13  # what was saved is a copy
    back = manager.restore(
        1,
        args=ocp.args.Composite(data=ocp.args.JsonRestore(), model=Restore()),
    )
    assert back.data == {"sample": 12, "names": ["a", None]}
    assert back["model"]["w"].tolist() == [1, 1]
    assert set(manager.restore(1).keys()) == {"model", "data"}
    assert manager.metrics(1) == {"loss": 0.5}
    assert manager.metadata(1).metrics == {"loss": 0.5}
    with pytest.raises(ValueError, match="named items were saved: model, data"):
        manager.restore(1, args=Restore())
    with pytest.raises(ValueError, match="'other' was not saved"):
        manager.restore(1, args=ocp.args.Composite(other=Restore()))
    with pytest.raises(ValueError, match="not allowed|Not allowed"):
        manager.save(2, args=ocp.args.Composite(dtft=ocp.args.JsonSave({})))


# ------------------------------------------------------------------------ storage


@pytest.fixture(scope="module", name="written")
def a_directory(tmp_path_factory: pytest.TempPathFactory):
    """A run with metrics that wrote steps 1, 2 and 4 and kept the best and the newest.

    Step 1 goes for 4 because its loss is the largest; memory has 4 and 5.
    """
    options = ReplicatedOptions(
        storage_interval_steps=2,
        memory_to_keep=2,
        max_to_keep=2,
        best_fn=lambda metrics: metrics["loss"],
        best_mode="min",
    )
    directory = tmp_path_factory.mktemp("run") / "steps"
    with ReplicatedCheckpointManager(directory, options=options) as manager:
        for step, loss in [(1, 0.9), (2, 0.1), (3, 0.05), (4, 0.3), (5, 0.2)]:
            state = odd_state() | empties() | {"number": step}
            manager.save(
                step,
                args=Save(state),
                metrics={"loss": loss},
                custom_metadata={"note": step},
            )
            if step < 5:
                manager.wait_until_finished()
        yield manager, directory


def stored_only(manager: Any, step: int) -> None:
    if step in manager._work._versions.steps:
        manager._work._versions.drop(step)


def test_every_bit_comes_back_from_storage(written: Any) -> None:
    manager, _ = written
    state = odd_state() | empties() | {"number": 2}
    assert manager.all_steps() == [2, 4, 5]
    back = manager.restore(2, args=Restore(like(state)))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert bits(back) == bits(state)
    plain = manager.restore(2)
    assert jax.tree.structure(plain) == jax.tree.structure(manager.restore(5))
    assert bits(plain["keys"]) == bits(state["keys"])
    tree = manager.item_metadata(2)
    assert jax.tree.structure(tree) == jax.tree.structure(plain)
    assert manager.metadata(2).custom_metadata == {"note": 2}
    assert manager.metrics(2) == {"loss": 0.1} and manager.best_step() == 2


def test_stock_orbax_reads_it_onto_another_mesh(written: Any) -> None:
    _, directory = written
    state = odd_state() | {"number": 4}
    sharding = NamedSharding(meshes()[1], PartitionSpec("stage", "tensor"))
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=sharding)
    target = like(state) | {"rows": struct, "columns": struct, "both": half}
    # Orbax has no numpy scalars and no empty arrays.
    target |= {"scalar": np.zeros(()), "nothing": None, "no keys": None}
    with ocp.CheckpointManager(directory) as stock:
        assert sorted(stock.all_steps()) == [2, 4]
        back = stock.restore(4, args=Restore(target))
        assert stock.metrics(4) == {"loss": 0.3}
    assert back["rows"].sharding == back["both"].sharding == sharding
    assert back.pop("nothing") is None and back.pop("no keys") is None
    assert bits(back) == bits(state | {"scalar": np.array(0.1)})


def test_a_corrupt_copy_in_memory_is_replaced_from_storage(written: Any) -> None:
    manager, _ = written
    record = manager._work._versions.get(4).record
    paths = [leaf.path for leaf in record.leaves]
    flip(manager, 4, paths.index("default/number"))  # which step 5 does not share
    assert bits(manager.restore(4)["columns"]) == bits(odd_state()["columns"])
    assert manager.restore(4)["number"] == 4 and 4 in manager.all_steps()


def test_a_flipped_bit_in_storage_is_not_loaded(written: Any, tmp_path: Path) -> None:
    _, directory = written
    subprocess.run(
        ["cp", "-r", directory / "2", tmp_path / "2"], check=True, timeout=50
    )
    saved = tmp_path / "2" / "dtft" / "metadata"
    text = saved.read_text()
    mark = '"default/rows": "'
    at = text.index(mark, text.index("fingerprints")) + len(mark)
    saved.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    manager = ReplicatedCheckpointManager(tmp_path)
    with pytest.raises(CheckpointUnreadable, match="record does not match its digest"):
        manager.restore()
    early = json.loads(saved.read_text())
    del early["digest"]  # as steps have it that were written before there was one
    saved.write_text(json.dumps(early))
    with pytest.raises(CheckpointUnreadable, match="corrupt leaves: default/rows"):
        manager.restore()
    manager.close()


def test_it_goes_on_where_stock_orbax_stopped(tmp_path: Path) -> None:
    state = {"w": jnp.arange(4.0), "n": 3}
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        stock.save(7, args=Save(state), metrics=None)
    manager = ReplicatedCheckpointManager(tmp_path / "run")
    assert manager.all_steps() == [7] and not manager.should_save(7)
    assert bits(manager.restore(args=Restore(state))) == bits(state)
    assert manager.item_metadata(7)["n"].dtype == np.int64
    manager.delete(7)
    assert (
        manager.all_steps() == [] == list(ocp.utils.checkpoint_steps(tmp_path / "run"))
    )
    manager.close()


def test_storage_that_fails_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    manager = ReplicatedCheckpointManager(tmp_path / "file" / "steps")
    for step in (1, 2, 3):
        assert manager.save(step, args=Save({"w": jnp.full(3, step)}))
    with pytest.raises(Failed, match="step 1 did not reach storage.*Not a directory"):
        manager.wait_until_finished()
    manager.check_for_errors()  # told once
    assert manager.restore()["w"].tolist() == [3, 3, 3]
    with pytest.raises(Failed, match="step 3 did not reach storage"):
        manager.close()


def test_storage_that_cannot_be_listed_leaves_the_steps_in_memory(
    manager: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(_: StoredSteps) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    assert manager.save(1, args=Save({"w": jnp.ones(3)}))
    monkeypatch.setattr(StoredSteps, "steps", stale)
    assert manager.all_steps(read=True) == [1]
    assert "cannot be listed: [Errno 116] Stale file handle" in caplog.text


def test_a_bit_that_flipped_in_memory_does_not_reach_storage(tmp_path: Path) -> None:
    options = ReplicatedOptions(storage_interval_steps=NEVER)
    manager = ReplicatedCheckpointManager(tmp_path / "steps", options=options)
    manager.save(1, args=Save({"w": jnp.arange(8.0)}))
    manager.wait_until_finished()
    manager.save(2, args=Save({"w": jnp.arange(8.0)}))
    flip(manager, 2)
    with pytest.raises(Failed, match="step 2 is corrupt in this host's memory.*/w"):
        manager.close()
    assert ocp.utils.checkpoint_steps(tmp_path / "steps") == [1]


SCRIPT = """
import signal, sys, jax.numpy as jnp, orbax.checkpoint as ocp
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of `&` ignores it
from dtft.checkpoint import ReplicatedCheckpointManager
manager = ReplicatedCheckpointManager(sys.argv[1])
for step in map(int, sys.argv[2:]):
    manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(1 << 20, step)}))
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(180)  # two processes that import jax
@pytest.mark.parametrize("how", ["exits", "interrupted", "killed"])
def test_nothing_is_left_in_shared_memory(tmp_path: Path, how: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path / "steps", "1", "2", "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )
    try:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == b"saved\n"
        if how == "killed":
            child.send_signal(signal.SIGKILL)
        if how == "interrupted":  # as by Ctrl-C, which the whole group gets
            while not ocp.utils.checkpoint_steps(tmp_path / "steps"):
                time.sleep(0.1)
            os.killpg(child.pid, signal.SIGINT)
            child.wait(timeout=150)  # before its script ends with its stdin
        child.stdin.close()
        code = child.wait(timeout=150)
        child.stdout.close()
    finally:
        child.kill()
        child.wait(timeout=10)
    assert not list(Path("/dev/shm").glob(f"dtft-{child.pid}-*"))
    if how != "killed":
        assert code == (0 if how == "exits" else -signal.SIGINT)
        with ocp.CheckpointManager(tmp_path / "steps") as stock:
            assert stock.latest_step() == 3
            assert stock.restore(3)["w"].tolist() == [3] * (1 << 20)


@pytest.mark.timeout(180)  # a process that imports jax
def test_a_process_that_goes_on_and_just_ends_has_stored_its_newest_step(
    tmp_path: Path,
) -> None:
    with ReplicatedCheckpointManager(tmp_path / "steps") as manager:
        manager.save(1, args=Save({"w": jnp.full(1 << 20, 1)}))
    subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "steps", "2", "3"],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=150,
    )
    assert sorted(ocp.utils.checkpoint_steps(tmp_path / "steps")) == [1, 3]


def test_importing_the_package_is_light() -> None:
    code = "import sys, dtft.checkpoint; assert not {'jax', 'orbax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_an_array_with_another_order_in_memory_is_not_transposed(manager: Any) -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    turned = jax.jit(lambda x: x * 1, out_shardings=Format(Layout((1, 0)), here))
    w = turned(jnp.arange(6.0).reshape(2, 3))
    manager.save(1, args=Save({"w": w}))
    assert manager.restore(1)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
