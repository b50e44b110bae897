"""The layout of a state for checkpoints in memory: the leaves and their mesh."""

from collections.abc import Mapping

import jax

from dtft.checkpoint.state import Layout, Leaf, MeshLayout, to_paths, with_plain_keys
from dtft.parallel import State


def layout_of(
    abstract_state: State, process_to_slot: Mapping[int, int], config: str
) -> Layout:
    """Makes the layout of a state for checkpoints in memory.

    Args:
        abstract_state: leaves with NamedShardings, all on one mesh.
        process_to_slot: map from the index of each JAX process with a slot to the slot.
        config: the resolved config as JSON.
    """
    leaves = tuple(
        Leaf(
            path=path,
            shape=tuple(leaf.shape),
            dtype=leaf.dtype.name,
            spec=tuple(_axes(part) for part in leaf.sharding.spec),
        )
        for path, leaf in with_plain_keys(to_paths(abstract_state)).items()
    )
    mesh = jax.tree.leaves(abstract_state)[0].sharding.mesh
    slots = tuple(process_to_slot[device.process_index] for device in mesh.devices.flat)
    sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
    layout = MeshLayout(
        axis_names=tuple(mesh.axis_names), axis_sizes=sizes, slots=slots
    )
    return Layout(mesh=layout, leaves=leaves, config=config)


def _axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)
