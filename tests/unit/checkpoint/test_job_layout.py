"""What slices a user's tree has in a job of several processes, and the way back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dtft.checkpoint.state.record import Record, record_of
from dtft.checkpoint.state.slices import Layout, MeshLayout
from dtft.checkpoint.storage.job_layout import (
    config_of,
    dynamic_part,
    layout_of,
    record_in,
    same_slices,
)


def mesh(*sizes: int) -> jax.sharding.Mesh:
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def put(value: jax.Array, on: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(on, PartitionSpec(*spec)))


def laid_out(tree: object) -> tuple[Record, Layout]:
    record, values = record_of(ocp.args.StandardSave(tree))
    shardings = [getattr(value, "sharding", None) for value in values]
    return record, layout_of(record.leaves, shardings, 1, config_of(record))


def test_every_leaf_has_the_slices_of_its_sharding() -> None:
    on = mesh(4, 2)
    tree = {
        "w": put(jnp.zeros((8, 6)), on, "data", "model"),
        "same": put(jnp.zeros((8, 6)), on),
        "local": jnp.zeros(3),
        "table": np.arange(3),
        "count": 7,
        "key": jax.random.key(0),
    }
    record, layout = laid_out(tree)
    assert layout.mesh == MeshLayout(
        axis_names=("data", "model"), axis_sizes=(4, 2), slots=(0,) * 8
    )
    specs = {leaf.path.removeprefix("default/"): leaf.spec for leaf in layout.leaves}
    assert specs.pop("w") == (("data",), ("model",))
    assert set(specs.values()) == {()} and len(specs) == 5
    (sharded,) = [leaf for leaf in layout.leaves if leaf.path == "default/w"]
    assert len([p for p in layout.slices(0) if p.path == sharded.path]) == 8
    back = record_in(layout, dynamic_part(record))
    assert back is not None and record.leaves == back.leaves


def test_two_ways_to_write_one_sharding_are_one_layout() -> None:
    on = mesh(8)
    first = laid_out({"w": put(jnp.zeros((8, 2)), on, "data")})[1]
    second = laid_out({"w": put(jnp.zeros((8, 2)), on, "data", None)})[1]
    assert first.digest == second.digest


def test_what_changes_from_step_to_step_is_no_part_of_the_layout() -> None:
    def saved(loss: float) -> tuple[Record, Layout]:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave({"w": jnp.zeros(2)}),
            note=ocp.args.JsonSave({"loss": loss}),
        )
        record, values = record_of(args, {"loss": loss}, {"by": "me"})
        shardings = [value.sharding for value in values]
        return record, layout_of(record.leaves, shardings, 1, config_of(record))

    (record, layout), (_, other) = saved(1.0), saved(2.0)
    assert layout.digest == other.digest
    back = record_in(layout, dynamic_part(record))
    assert back is not None
    assert back.json_items == {"note": {"loss": 1.0}}
    assert (back.metrics, back.custom_metadata) == ({"loss": 1.0}, {"by": "me"})


def test_a_state_of_dtft_itself_is_no_tree_of_a_user() -> None:
    layout = laid_out({"w": jnp.zeros(2)})[1]
    for config in ("", '{"optim": {}}', "[]", "no json"):
        other = Layout(mesh=layout.mesh, leaves=(), config=config)
        assert record_in(other, {}) is None


@pytest.mark.parametrize(
    "tree, hint",
    [
        (
            {
                "a": (jnp.zeros((8, 8)), (4, 2), ("data",)),
                "b": (jnp.zeros((8, 8)), (8,), ("data",)),
            },
            "one mesh for all leaves",
        ),
    ],
)
def test_what_cannot_be_expressed_is_named(tree: dict, hint: str) -> None:
    placed = {
        name: put(v, mesh(*sizes), *spec) for name, (v, sizes, spec) in tree.items()
    }
    with pytest.raises(ValueError, match=f"leaf 'default/b'.*{hint}"):
        laid_out(placed)


def test_a_mesh_without_some_process_is_refused() -> None:
    record, values = record_of(
        ocp.args.StandardSave({"w": put(jnp.zeros(8), mesh(8), "data")})
    )
    with pytest.raises(ValueError, match=r"processes \[0\], the job has 2"):
        layout_of(record.leaves, [value.sharding for value in values], 2)


def test_slices_decide_what_can_be_read_here() -> None:
    saved = laid_out({"w": put(jnp.zeros((8, 2)), mesh(8), "data")})[1]
    # The same index ranges under other names of axes, and other ranges.
    renamed = laid_out({"w": put(jnp.zeros((8, 2)), mesh(4, 2), ("data", "model"))})[1]
    coarser = laid_out({"w": put(jnp.zeros((8, 2)), mesh(4, 2), "data")})[1]
    assert same_slices(saved, renamed) and not same_slices(saved, coarser)
