"""The exporter process: a world of one, a world of two, and its way to fail."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.storage.directory import StorageTier, load_numpy
from dtft.checkpoint.storage.export_plan import export_world
from dtft.elastic.leader.storage import is_corrupt
from tests.support.exporting import Process, buffers, opening, saving
from tests.support.states import extent, layout, same_bits, state

pytestmark = pytest.mark.timeout(180)  # children import JAX, on a busy machine too


@pytest.fixture
def exporters() -> Iterator[list[Process]]:
    started = [Process(), Process()]
    yield started
    for one in started:
        one.end()


@pytest.mark.usefixtures("default_flags")
def test_world_of_one_writes_every_bit(
    tmp_path: Path, exporters: list[Process]
) -> None:
    exporter, _ = exporters
    whole = layout(slots=(0, 0, 0, 0))
    exporter.send(**opening(tmp_path, whole, 0, 0))
    exporter.send(**saving(tmp_path, whole, 0, 7, items={"position": 7}))
    assert exporter.answer() == {"op": "open", "ok": True}
    answer = exporter.answer()
    assert answer["ok"] and answer["step"] == 7 and answer["seconds"] > 0
    assert answer["bytes"] == sum(piece.nbytes for piece in whole.slices(0))
    loaded = load_numpy(tmp_path / "storage", 7)
    assert all(same_bits(loaded[path], value) for path, value in state().items())

    for wrong in (buffers(whole, 0)[2:], buffers(whole, 0, buffer=2)):
        exporter.send(**saving(tmp_path, whole, 0, 8, buffers=wrong))
        answer = exporter.answer()
        assert not answer["ok"] and "are not buffers of" in answer["error"]
    (tmp_path / "empty").touch()  # an arena whose agent was killed before it had a size
    order = saving(tmp_path, whole, 0, 8) | {"memory": [str(tmp_path / "empty")]}
    exporter.send(**order)
    answer = exporter.answer()
    assert not answer["ok"] and "empty has at most 0 of each" in answer["error"]
    exporter.send(**saving(tmp_path, whole, 0, 8))
    assert exporter.answer()["ok"]
    size = len(extent(whole, 0, state()))  # where the buffers begin that are used
    with open(tmp_path / "arena-0", "r+b") as arena:
        arena.seek(size)
        first = arena.read(1)
        arena.seek(size)
        arena.write(bytes([first[0] ^ 1]))  # of what was digested long before
    exporter.send(**saving(tmp_path, whole, 0, 9))
    answer = exporter.answer()
    assert not answer["ok"] and "step 9 is corrupt in this host's" in answer["error"]
    assert is_corrupt(answer["error"])  # so the leader forms the job anew
    assert whole.slices(0)[0].key in answer["error"]
    exporter.send(op="close")
    assert exporter.process.wait(timeout=40) == 0
    assert StorageTier(tmp_path / "storage").all_steps() == (7, 8)


@pytest.mark.usefixtures("default_flags")
def test_world_of_two_writes_one_checkpoint(
    tmp_path: Path, exporters: list[Process], free_port: int
) -> None:
    for rank, exporter in enumerate(exporters):
        message = opening(tmp_path, layout(), rank, slot=rank, world=2)
        exporter.send(**message | {"coordinator": f"localhost:{free_port}"})
        for step in (3, 4, 5):
            items = {"position": step}
            exporter.send(**saving(tmp_path, layout(), rank, step, items=items))
    for exporter in exporters:
        answers = [exporter.answer() for _ in range(4)]
        assert all(answer["ok"] for answer in answers), answers
    for exporter in exporters:
        exporter.send(op="close")
    tier = StorageTier(tmp_path / "storage", read_only=True)
    assert tier.all_steps() == (4, 5)

    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    specs = {"params/w": PartitionSpec("fsdp")}
    arrays, items = tier.restore(
        5,
        {
            path: jax.ShapeDtypeStruct(
                value.shape,
                value.dtype,
                sharding=NamedSharding(mesh, specs.get(path, PartitionSpec())),
            )
            for path, value in state().items()
        },
    )
    assert items == {"position": 5}
    assert all(same_bits(arrays[path], value) for path, value in state().items())


def test_what_does_not_open_is_answered_on_every_save(
    tmp_path: Path, exporters: list[Process]
) -> None:
    exporter, other = exporters
    exporter.send(**opening(tmp_path, layout(), 0, slot=0, world=1))
    exporter.send(**saving(tmp_path, layout(), 0, 1))
    assert "slots (0, 1) hold" in exporter.answer()["error"]
    answer = exporter.answer()
    assert not answer["ok"] and "slots (0, 1) hold" in answer["error"]
    assert other.process.stdin is not None
    other.process.stdin.close()  # an agent that died
    assert other.process.wait(timeout=40) == 0


def test_a_save_beyond_its_limit_ends_the_process(
    tmp_path: Path, exporters: list[Process]
) -> None:
    exporter, _ = exporters
    exporter.send(**opening(tmp_path, layout(slots=(0,) * 4), 0, 0))
    assert exporter.answer()["ok"]
    exporter.send(**saving(tmp_path, layout(slots=(0,) * 4), 0, 1, timeout_s=0))
    answer = exporter.answer()
    assert not answer["ok"] and "TimeoutError" in answer["error"]
    assert exporter.process.wait(timeout=40) == 1


def test_every_axis_in_use_takes_every_slot_part() -> None:
    mesh = MeshLayout(
        axis_names=("replica", "fsdp"), axis_sizes=(2, 2), slots=(1, 1, 0, 0)
    )
    per_replica = Leaf(path="r", shape=(2,), dtype="int32", spec=(("replica",),))
    world = export_world(Layout(mesh=mesh, leaves=(per_replica,)))
    assert world.slots == (0, 1)
    assert world.mesh.axis_sizes == (2, 1) and world.mesh.slots == (1, 0)


def test_the_export_world_holds_every_slice() -> None:
    whole = layout()
    world = export_world(whole)
    assert world.slots == (0, 1)
    held = {piece for slot in world.slots for piece in whole.slices(slot)}
    assert held == set(whole.owners)
