"""On which mesh a step was saved: as JSON, and back on the devices of another run."""

import copy
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint.managers.distributed import placed, shardings_had, shardings_json
from dtft.checkpoint.state.leaf_codec import restore_targets
from dtft.checkpoint.state.record import DEFAULT, Record, record_of

TYPES = AxisType.Auto, AxisType.Explicit


def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), TYPES, devices=jax.devices()[::-1])


def saved() -> tuple[Record, list[Any]]:
    tree = {
        "a": jax.device_put(
            jnp.zeros((8, 2)), NamedSharding(mesh(), PartitionSpec(("x", "y")))
        ),
        "b": jax.device_put(jnp.zeros(3), NamedSharding(mesh(), PartitionSpec())),
        "c": jnp.zeros(3),
        "d": 4,
    }
    record, values = record_of(ocp.args.StandardSave(tree))
    shardings = [getattr(value, "sharding", None) for value in values]
    text = json.dumps(shardings_json(shardings))
    return dataclasses.replace(record, shardings=json.loads(text)), shardings


def test_shardings_come_back_from_json() -> None:
    record, shardings = saved()
    assert shardings_had(record) == [*shardings[:2], None, None]
    assert shardings_had(dataclasses.replace(record, shardings=None)) == [None] * 4
    found = placed(record, restore_targets(record, None))[DEFAULT]
    assert found is not None and found.targets.keys() == {0, 1}
    assert found.targets[0].sharding == shardings[0]
    bare = {name: jax.ShapeDtypeStruct((3,), jnp.float32) for name in "bc"}
    bare |= {"a": jax.ShapeDtypeStruct((8, 2), jnp.float32), "d": 0}
    args = ocp.args.StandardRestore(bare)
    found = placed(record, restore_targets(record, args))[DEFAULT]
    assert found is not None and found.targets[0].sharding == shardings[0]
    assert found.targets[2].sharding is None and found.targets[3] == 0
    fallback = ocp.args.StandardRestore(bare, fallback_sharding=shardings[1])
    found = placed(record, restore_targets(record, fallback))[DEFAULT]
    assert found is not None and found.targets[0].sharding is None


def test_a_mesh_is_found_on_devices_with_other_ids_or_refused() -> None:
    record, shardings = saved()
    raw: Any = copy.deepcopy(record.shardings)
    devices = raw["meshes"][0]["devices"]
    raw["meshes"][0]["devices"] = [[0, 100 + ident] for _, ident in devices]
    moved = dataclasses.replace(record, shardings=raw)
    assert shardings_had(moved)[:2] == shardings[:2]

    raw["meshes"][0] |= {"sizes": [2, 5], "devices": [[0, n] for n in range(10)]}
    lost = dataclasses.replace(record, shardings=raw)
    assert shardings_had(lost) == [None] * 4
    with pytest.raises(ValueError, match=r"'default/a' was saved over .*x: 2, y: 5"):
        placed(lost, restore_targets(lost, None))
