"""Leaves that are easy to get wrong, through all that an agent's hosts do with them.

-0.0, NaN payloads, keys, bf16, fp8, int4, scalars, empty arrays and None: from devices
into memory, to a peer, back from it after a loss, onto devices, into storage, and onto
another mesh. `test_replicated.py` does the same to the manager that people use alone.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.memory.snapshot import SnapshotPlan
from dtft.checkpoint.state.slices import Layout, Leaf
from dtft.checkpoint.state.tree import (
    from_paths,
    to_paths,
    with_plain_keys,
    with_typed_keys,
)
from dtft.checkpoint.storage.directory import StorageTier
from tests.support import states
from tests.support.memory_job import CHUNK, Job

Paths = dict[str, Any]
SPECS = {**states.SPECS, "rng/keys": (("fsdp",),)}


def sharding(path: str, devices: tuple[int, int] = (2, 2)) -> NamedSharding:
    count = devices[0] * devices[1]
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(devices), ("replica", "fsdp"))
    spec = (axes[0] if axes else None for axes in SPECS.get(path, ()))
    return NamedSharding(mesh, PartitionSpec(*spec))


def leaves() -> Paths:
    """Every kind of leaf on four devices."""
    found: Paths = dict(states.state())
    found["rng/typed"] = jax.random.key(3)
    found["rng/keys"] = jax.random.split(jax.random.key(5, impl="rbg"), 4)
    return {path: jax.device_put(leaf, sharding(path)) for path, leaf in found.items()}


def abstract(arrays: Paths, devices: tuple[int, int] = (2, 2)) -> Paths:
    return {
        path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(path, devices))
        for path, a in arrays.items()
    }


def layout(slots: tuple[int, ...]) -> Layout:
    words = [
        Leaf(path=path, shape=leaf.shape, dtype=leaf.dtype.name, spec=SPECS[path])
        if path in SPECS
        else Leaf(path=path, shape=leaf.shape, dtype=leaf.dtype.name, spec=())
        for path, leaf in with_plain_keys(abstract(leaves())).items()
    ]
    return Layout(mesh=states.layout(slots).mesh, leaves=tuple(words))


def bits(arrays: Paths) -> dict[str, tuple[Any, ...]]:
    """Dtype, shape and bytes by path; of keys those of their words."""
    words = {path: np.asarray(leaf) for path, leaf in with_plain_keys(arrays).items()}
    return {
        path: (str(arrays[path].dtype), leaf.shape, leaf.tobytes())
        for path, leaf in words.items()
    }


@pytest.mark.parametrize("lost", [0, 3])
def test_a_peer_gives_every_bit_back(tmp_path: Path, lost: int) -> None:
    arrays = with_plain_keys(leaves())
    job = Job(layout((0, 1, 2, 3)), 2, tmp_path)
    try:
        job.save(1, arrays)
        job.lose(f"h{lost}")
        decision = job.decide()
        assert decision.source == "memory"
        assert "error" not in job.carry_out(decision)[f"h{lost}-spare"]
        host = job.hosts[f"h{lost}-spare"]
        for piece in host.holder.own_slices:
            ends = zip(piece.start, piece.stop, strict=True)
            index = tuple(slice(start, stop) for start, stop in ends)
            expected = np.asarray(arrays[piece.path])[index].tobytes()
            held = bytes(host.holder.own_parts(1, piece))
            assert held == expected, piece.key
    finally:
        job.close()


def test_every_bit_gets_from_devices_to_memory_and_back() -> None:
    arrays = leaves()
    plan = SnapshotPlan(layout((0, 0, 0, 0)), 0, CHUNK)
    memory = memoryview(bytearray(plan.chunks.nbytes))
    buffers = np.zeros(plan.chunks.num_chunks, np.uint8)
    digests = plan.write(1, with_plain_keys(arrays), memory, buffers).snapshot().digests
    wanted = abstract(arrays)
    back = with_typed_keys(
        plan.read(memory, buffers, digests, with_plain_keys(wanted)), wanted
    )
    assert bits(back) == bits(arrays)
    for path, leaf in back.items():
        assert leaf.sharding.is_equivalent_to(sharding(path), leaf.ndim), path
    drawn = jax.random.bits(back["rng/typed"], (4,))
    assert np.array_equal(drawn, jax.random.bits(jax.random.key(3), (4,)))


@pytest.mark.timeout(180)  # Orbax's files, on a busy machine
def test_every_bit_gets_to_storage_and_onto_another_mesh(tmp_path: Path) -> None:
    arrays = leaves()
    tier = StorageTier(tmp_path)
    tier.save(1, with_plain_keys(arrays), {})
    tier.wait_until_finished()
    wanted = abstract(arrays, devices=(4, 2))
    back = with_typed_keys(tier.restore(1, with_plain_keys(wanted))[0], wanted)
    tier.close()
    assert bits(back) == bits(arrays)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in back.values())


def test_none_is_where_it_was() -> None:
    state = {"a": None, "b": [jax.random.key(1), None], "c": {}}
    paths = to_paths(state)
    back = from_paths(state, with_typed_keys(with_plain_keys(paths), paths))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert bits(to_paths(back)) == bits(paths)
