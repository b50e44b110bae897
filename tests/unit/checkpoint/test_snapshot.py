"""Slices from devices into an arena and back: exact bits, and donation stays free."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dtft.checkpoint.memory import snapshot
from dtft.checkpoint.memory.snapshot import (
    CopiedStep,
    CorruptCopy,
    Snapshot,
    SnapshotPlan,
)
from dtft.checkpoint.state import digests
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout

CHUNK = 64
SPECS = {"w": ("fsdp",), "b": (), "n": (), "h": (None, "fsdp"), "m": ()}


@pytest.fixture
def mesh():
    types = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=types)


def state(mesh) -> dict[str, jax.Array]:
    odd = np.array([-0.0, np.nan, np.inf, 1e-40, 3.5, -1.0, 0.0, 2.0], np.float32)
    odd.view(np.uint32)[1] = 0x7FC12345  # a NaN with a payload
    host = {
        "w": np.stack([odd] * 4),
        "b": np.array([True, False, True]),
        "n": np.array(7, np.int32),
        "h": np.arange(32, dtype=np.float32).reshape(4, 8).astype(jnp.bfloat16),
        "m": np.full((3,), -0.0, np.float32),
    }
    return {
        path: jax.device_put(value, NamedSharding(mesh, PartitionSpec(*SPECS[path])))
        for path, value in host.items()
    }


def layout_of(arrays) -> Layout:
    leaves = tuple(
        Leaf(
            path=path,
            shape=array.shape,
            dtype=array.dtype.name,
            spec=tuple((axis,) if axis else () for axis in SPECS[path]),
        )
        for path, array in arrays.items()
    )
    mesh = MeshLayout(axis_names=("replica", "fsdp"), axis_sizes=(2, 4), slots=(0,) * 8)
    return Layout(mesh=mesh, leaves=leaves)


def abstract_of(arrays):
    return {
        path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
        for path, a in arrays.items()
    }


class Memory:
    """An arena of two buffers for each chunk, and the first of them."""

    def __init__(self, plan: SnapshotPlan) -> None:
        self.bytes = memoryview(bytearray(2 * plan.chunks.nbytes))
        self.first = np.zeros(plan.chunks.num_chunks, np.uint8)
        self.second = self.first + np.uint8(1)


def test_every_bit_comes_back(mesh):
    arrays = state(mesh)
    plan = SnapshotPlan(layout_of(arrays), 0, CHUNK)
    memory = Memory(plan)
    buffers = np.arange(plan.chunks.num_chunks, dtype=np.uint8) % 2  # scattered
    digests = plan.write(1, arrays, memory.bytes, buffers).snapshot().digests
    back = plan.read(memory.bytes, buffers, digests, abstract_of(arrays))
    for path, array in arrays.items():
        assert np.asarray(back[path]).tobytes() == np.asarray(array).tobytes(), path
        assert back[path].sharding == array.sharding


def test_slices_are_found_again_when_the_sharding_changes(mesh):
    arrays = state(mesh)
    plan = SnapshotPlan(layout_of(arrays), 0, CHUNK)
    memory = Memory(plan)
    first = plan.write(1, arrays, memory.bytes, memory.first).snapshot()
    turned = jax.sharding.Mesh(mesh.devices[:, ::-1], mesh.axis_names)
    moved = {
        path: jax.device_put(array, NamedSharding(turned, PartitionSpec(*SPECS[path])))
        for path, array in arrays.items()
    }
    second = plan.write(2, moved, memory.bytes, memory.second).snapshot()
    assert second.digests == first.digests
    whole = NamedSharding(mesh, PartitionSpec())
    moved["w"] = jax.device_put(arrays["w"], whole)
    with pytest.raises(ValueError, match="not on this host's devices"):
        plan.write(3, moved, memory.bytes, memory.first)


def test_a_flipped_bit_is_not_loaded(mesh):
    arrays = state(mesh)
    plan = SnapshotPlan(layout_of(arrays), 0, CHUNK)
    memory = Memory(plan)
    digests = plan.write(1, arrays, memory.bytes, memory.first).snapshot().digests
    plan.chunks.parts(memory.bytes, memory.first, 1).views[0][0] ^= 4
    with pytest.raises(CorruptCopy, match=r"w\[.*does not match its digest"):
        plan.read(memory.bytes, memory.first, digests, abstract_of(arrays))


def test_what_was_read_does_not_change_when_the_arena_does(mesh):
    arrays = state(mesh)
    plan = SnapshotPlan(layout_of(arrays), 0, CHUNK)
    memory = Memory(plan)
    digests = plan.write(1, arrays, memory.bytes, memory.first).snapshot().digests
    back = plan.read(memory.bytes, memory.first, digests, abstract_of(arrays))
    memory.bytes[:] = bytes(len(memory.bytes))
    assert np.asarray(back["w"]).tobytes() == np.asarray(arrays["w"]).tobytes()


def test_only_what_changes_is_written_and_it_is_read_once(mesh, monkeypatch):
    arrays = state(mesh)
    plan = SnapshotPlan(layout_of(arrays), 0, CHUNK)
    memory, digested = Memory(plan), []
    one_pass, real = [], xxhash.xxh3_128_digest
    copy_chunk = snapshot.copy_chunk

    def copying(source: memoryview, target: memoryview) -> bytes:
        one_pass.append(1)
        before = len(digested)
        found = copy_chunk(source, target)
        del digested[before:]  # what was digested while it was copied
        return found

    for module in (digests, snapshot):
        monkeypatch.setattr(module, "copy_chunk", copying)
    monkeypatch.setattr(
        xxhash, "xxh3_128_digest", lambda part: digested.append(1) or real(part)
    )

    def saved(
        step: int, base: Snapshot | None
    ) -> tuple[Snapshot, tuple[int, int, int]]:
        """What was made; its chunks copied, digested, kept."""
        one_pass.clear()
        digested.clear()
        buffers = memory.first if step % 2 else memory.second
        made = plan.write(step, arrays, memory.bytes, buffers, base).snapshot()
        return made, (len(one_pass), len(digested), int(made.kept.sum()))

    count = plan.chunks.num_chunks
    first, counts = saved(1, None)
    assert counts == (count, 0, 0)
    second, counts = saved(2, first)  # what changes is not known yet
    assert counts == (count, 0, count)
    arrays["n"] = jax.device_put(np.array(8, np.int32), arrays["n"].sharding)
    third, counts = saved(3, second)
    assert counts == (1, count, count - 1)
    arrays["n"] = jax.device_put(np.array(9, np.int32), arrays["n"].sharding)
    fourth, counts = saved(4, third)  # what changed last time: in one pass
    assert counts == (1, count - 1, count - 1)
    buffers = np.where(fourth.kept, memory.first, memory.second)
    buffers = np.where(second.kept & third.kept & fourth.kept, memory.first, buffers)
    back = plan.read(memory.bytes, buffers, fourth.digests, abstract_of(arrays))
    assert int(back["n"]) == 9
    for path, array in arrays.items():
        assert np.asarray(back[path]).tobytes() == np.asarray(array).tobytes(), path


def test_an_idle_expert_inside_one_leaf_is_not_written():
    leaf = Leaf(path="experts", shape=(4, 64, 16), dtype="float32")
    layout = Layout(
        mesh=MeshLayout(axis_names=("x",), axis_sizes=(1,), slots=(0,)), leaves=(leaf,)
    )
    plan = SnapshotPlan(layout, 0, 1024)
    memory = Memory(plan)
    experts = np.ones(leaf.shape, np.float32)
    arrays = {"experts": jnp.asarray(experts)}
    first = plan.write(1, arrays, memory.bytes, memory.first).snapshot()
    experts[2] += 1
    arrays = {"experts": jnp.asarray(experts)}
    second = plan.write(2, arrays, memory.bytes, memory.second, first).snapshot()
    assert (~second.kept).sum() == plan.chunks.num_chunks // 4


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_several_threads_write_what_one_writes(mesh, monkeypatch, skips, later):
    rows = np.arange(100 * CHUNK // 4, dtype=np.int32)
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = state(mesh) | {"big": jax.device_put(rows, whole)}
    monkeypatch.setitem(SPECS, "big", ())
    layout = layout_of(arrays)
    copied = np.array([i % 3 > 0 for i in range(len(arrays))]) if skips else None
    changed = np.array(rows)
    changed[[5, 700, 1599]] += 1
    after = arrays | {"big": jax.device_put(changed, whole)}
    workers = set[int]()
    copy_chunk = snapshot.copy_chunk

    def copying(source: memoryview, target: memoryview) -> bytes:
        workers.add(threading.get_native_id())
        return copy_chunk(source, target)

    monkeypatch.setattr(snapshot, "copy_chunk", copying)
    monkeypatch.setattr(digests.os, "sched_getaffinity", lambda _: range(3))

    def made_by(copied: CopiedStep, range_bytes: int) -> Snapshot:
        assert copied.has_digests == (range_bytes == 1 << 20 or not later)
        return copied.snapshot()

    def written(range_bytes: int) -> tuple[list[Snapshot], bytes]:
        monkeypatch.setattr(snapshot, "RANGE_BYTES", range_bytes)
        monkeypatch.setattr(digests, "THREAD_BYTES", range_bytes)
        plan = SnapshotPlan(layout, 0, CHUNK)
        memory = Memory(plan)
        made: list[Snapshot] = []
        for step, values in ((1, arrays), (2, arrays), (3, after)):
            buffers = memory.second if step == 2 else memory.first
            base = made[-1] if made else None
            to = plan.write(step, values, memory.bytes, buffers, base, copied)
            made.append(made_by(to, range_bytes))
        return made, bytes(memory.bytes)

    one, bytes_of_one = written(1 << 20)
    assert workers == {threading.get_native_id()}
    if later:
        monkeypatch.setattr(snapshot, "BRIEF_BYTES", CHUNK - 1)
    several, bytes_of_several = written(10 * CHUNK)
    assert len(workers) > 1
    assert bytes_of_several == bytes_of_one
    for mine, theirs in zip(several, one, strict=True):
        assert mine.digests == theirs.digests
        assert (mine.kept == theirs.kept).all()
    assert (~several[2].kept).sum() >= 3


def test_a_snapshot_does_not_cancel_donation(mesh):
    array = jax.device_put(jnp.ones((1024, 64)), NamedSharding(mesh, PartitionSpec()))
    leaf = Leaf(path="x", shape=(1024, 64), dtype="float32")
    one = MeshLayout(axis_names=("replica", "fsdp"), axis_sizes=(2, 4), slots=(0,) * 8)
    plan = SnapshotPlan(Layout(mesh=one, leaves=(leaf,)), 0, CHUNK)
    jax.block_until_ready(array)
    pointers = [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]
    memory = Memory(plan)
    for step in (1, 2):
        plan.write(step, {"x": array}, memory.bytes, memory.first)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    after = jax.block_until_ready(step(array))
    assert array.is_deleted()
    assert [
        s.data.unsafe_buffer_pointer() for s in after.addressable_shards
    ] == pointers
