"""Slices from devices into an arena and back: exact bits, and donation stays free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dtft.checkpoint.slices import Layout, Leaf, MeshLayout
from dtft.checkpoint.snapshot import CorruptCopy, SnapshotPlan

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


def test_every_bit_comes_back(mesh):
    arrays = state(mesh)
    plan = SnapshotPlan(layout_of(arrays), 0, CHUNK)
    extent = memoryview(bytearray(plan.nbytes))
    digests = plan.write(arrays, extent)
    back = plan.read(extent, digests, abstract_of(arrays))
    for path, array in arrays.items():
        assert np.asarray(back[path]).tobytes() == np.asarray(array).tobytes(), path
        assert back[path].sharding == array.sharding


def test_a_flipped_bit_is_not_loaded(mesh):
    arrays = state(mesh)
    plan = SnapshotPlan(layout_of(arrays), 0, CHUNK)
    extent = memoryview(bytearray(plan.nbytes))
    digests = plan.write(arrays, extent)
    extent[plan.offsets[1]] ^= 4
    with pytest.raises(CorruptCopy, match=r"w\[.*does not match its digest"):
        plan.read(extent, digests, abstract_of(arrays))


def test_what_was_read_does_not_change_when_the_arena_does(mesh):
    arrays = state(mesh)
    plan = SnapshotPlan(layout_of(arrays), 0, CHUNK)
    extent = memoryview(bytearray(plan.nbytes))
    back = plan.read(extent, plan.write(arrays, extent), abstract_of(arrays))
    extent[:] = bytes(len(extent))
    assert np.asarray(back["w"]).tobytes() == np.asarray(arrays["w"]).tobytes()


def test_a_snapshot_does_not_cancel_donation(mesh):
    array = jax.device_put(jnp.ones((1024, 64)), NamedSharding(mesh, PartitionSpec()))
    leaf = Leaf(path="x", shape=(1024, 64), dtype="float32")
    one = MeshLayout(axis_names=("replica", "fsdp"), axis_sizes=(2, 4), slots=(0,) * 8)
    plan = SnapshotPlan(Layout(mesh=one, leaves=(leaf,)), 0, CHUNK)
    jax.block_until_ready(array)
    pointers = [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]
    plan.write({"x": array}, memoryview(bytearray(plan.nbytes)))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    after = jax.block_until_ready(step(array))
    assert array.is_deleted()
    assert [
        s.data.unsafe_buffer_pointer() for s in after.addressable_shards
    ] == pointers
