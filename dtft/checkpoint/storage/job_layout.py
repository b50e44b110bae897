"""Converts a user's tree to the layout of a job of several processes, and back.

`layout_of` turns leaves and their shardings into slices per process (slot = process
index). The tree's structure is stored in the layout's config, so it is kept with the
copies and in storage. `record_in` reads the structure back, as a record (the
description of one save: items, tree structures and leaves).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from dtft.checkpoint.state import (
    Layout,
    Leaf,
    LeafRecord,
    MeshLayout,
    Record,
    listed,
    sealed,
    unsealed,
)

MARK = "dtft_tree"
"""Key in a layout's config that marks the state as a user's tree, and not as that of
dtft's own training loop."""


def layout_of(
    leaves: Sequence[LeafRecord],
    shardings: Sequence[Sharding | None],
    num_processes: int,
    config: str = "",
) -> Layout:
    """Computes the layout: which process owns which slices of the leaves.

    Args:
        leaves: the leaves of the tree.
        shardings: the sharding of each leaf; None for a leaf that is not a jax.Array.
        num_processes: number of processes of the job; each process is one slot.
        config: text that is stored in the layout, see `config_of`.

    Returns:
        A layout whose slots are process indices. A leaf that every process has whole (a
        numpy array, a number, a jax array that is not divided) is taken to be the same
        on every process.

    Raises:
        ValueError: a sharding cannot be expressed as a layout, or the mesh does not
            have devices of all processes; the message names the leaf or the mesh.
    """
    mesh = _mesh(leaves, shardings)
    divided = tuple(
        Leaf(
            path=leaf.path,
            shape=leaf.shape,
            dtype=leaf.dtype,
            spec=_spec(leaf, sharding, mesh),
        )
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )
    slots = _mesh_layout(mesh, num_processes)
    return Layout(mesh=slots, leaves=divided, config=config)


def config_of(record: Record) -> str:
    """Encodes the parts of a record that are the same at all steps, as JSON.

    These are the structure of the user's tree, and path, kind, shape and dtype of its
    leaves. The result is the argument `config` of `layout_of`.
    """
    raw = record.to_json()
    static = {name: raw[name] for name in ("default", "structures", "leaves")}
    return json.dumps({MARK: static}, sort_keys=True)


def dynamic_part(record: Record) -> dict[str, Any]:
    """Encodes the parts of a record that may change at each step, with a digest.

    These are JSON items, metrics, custom metadata and shardings. The result is stored
    with the step.
    """
    return sealed(
        {
            "json_items": record.json_items,
            "metrics": record.metrics,
            "custom_metadata": record.custom_metadata,
            "shardings": record.shardings,
        }
    )


def record_in(layout: Layout, items: Mapping[str, Any]) -> Record | None:
    """Makes the record (description) of a saved step from its layout and its items.

    Args:
        layout: the layout of the job that saved the step.
        items: the step's items: the result of `dynamic_part` when it was saved.

    Returns:
        The record; None if the layout's `config` is not from `config_of`: the state is
        then that of dtft's own training loop, and not a user's tree.

    Raises:
        CorruptItems: `items` do not match the digest that `dynamic_part` added.
    """
    static = _static_part(layout)
    return None if static is None else Record.from_json(static | unsealed(items))


def _static_part(layout: Layout) -> dict[str, Any] | None:
    try:
        return json.loads(layout.config or "{}").get(MARK)
    except (ValueError, AttributeError):
        return None


def same_slices(saved: Layout, wanted: Layout) -> bool:
    """Whether every process saved all slices that it needs in the layout `wanted`.

    False if the layouts have different numbers of processes.

    >>> mesh = MeshLayout(axis_names=("x",), axis_sizes=(2,), slots=(0, 1))
    >>> leaf = Leaf(path="w", shape=(4,), dtype="float32")
    >>> whole = Layout(mesh=mesh, leaves=(leaf,))
    >>> half = Layout(mesh=mesh, leaves=(Leaf(
    ...     path="w", shape=(4,), dtype="float32", spec=(("x",),)),))
    >>> same_slices(half, half), same_slices(half, whole)
    (True, False)
    """
    if saved.mesh.num_slots != wanted.mesh.num_slots:
        return False
    return all(
        set(wanted.slices(slot)) <= set(saved.slices(slot))
        for slot in range(saved.mesh.num_slots)
    )


def moved_leaf(saved: Layout, wanted: Layout) -> str:
    """Describes the first leaf of which a process needs a slice that it did not save.

    A process needs its slices in the layout `wanted`. If every process has saved all
    its slices, the text is "every process has what it wants". In the example, processes
    0 and 1 have changed places in the mesh, so each needs the half of the leaf that the
    other has saved.

    >>> one, other = (MeshLayout(axis_names=("x",), axis_sizes=(2,), slots=slots)
    ...     for slots in ((0, 1), (1, 0)))
    >>> leaf = Leaf(path="w", shape=(4,), dtype="int8", spec=(("x",),))
    >>> moved_leaf(Layout(mesh=one, leaves=(leaf,)), Layout(mesh=other, leaves=(leaf,)))
    "leaf 'w' was saved as int8[4] over (('x',),) of mesh x: 2 (processes 0, 1), \
wanted is int8[4] over (('x',),) of mesh x: 2 (processes 1, 0)"
    """
    for slot in range(wanted.mesh.num_slots):
        here = set(saved.slices(slot))
        for piece in wanted.slices(slot):
            if piece not in here:
                texts = [_text_on(layout, piece.path) for layout in (saved, wanted)]
                saved_as, asked = texts
                return f"leaf {piece.path!r} was saved as {saved_as}, wanted is {asked}"
    return "every process has what it wants"


def _text_on(layout: Layout, path: str) -> str:
    leaf = next((leaf for leaf in layout.leaves if leaf.path == path), None)
    mesh = layout.mesh
    axes = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    sizes = ", ".join(f"{name}: {size}" for name, size in axes)
    slots = listed([str(slot) for slot in mesh.slots])
    text = "nothing" if leaf is None else _text(leaf)
    return f"{text} of mesh {sizes} (processes {slots})"


def layout_difference(before: Layout, now: Layout) -> str:
    """Describes the first difference between two layouts, for messages.

    If the meshes and leaves are equal, says that the tree's containers or the kinds of
    its leaves differ.

    >>> mesh = MeshLayout(axis_names=("x",), axis_sizes=(1,), slots=(0,))
    >>> one, other = (Layout(mesh=mesh, leaves=(Leaf(
    ...     path="w", shape=(n,), dtype="int8"),)) for n in (1, 2))
    >>> layout_difference(one, other)
    "leaf 'w' was int8[1], now int8[2]"
    """
    if before.mesh != now.mesh:
        return f"the mesh was {before.mesh}, now {now.mesh}"
    paths = [{leaf.path for leaf in layout.leaves} for layout in (before, now)]
    if paths[0] != paths[1]:
        return f"other leaves ({listed(sorted(paths[0] ^ paths[1]))})"
    for old, new in zip(before.leaves, now.leaves, strict=True):
        if old != new:
            return f"leaf {old.path!r} was {_text(old)}, now {_text(new)}"
    return "its containers, or the kinds of its leaves"


def _text(leaf: Leaf) -> str:
    axes = f" over {leaf.spec}" if leaf.spec else ""
    return f"{leaf.dtype}{list(leaf.shape)}{axes}"


def _mesh(
    leaves: Sequence[LeafRecord], shardings: Sequence[Sharding | None]
) -> jax.sharding.Mesh | None:
    """Returns the mesh of all leaves that are divided; None if no leaf is divided.

    Raises:
        ValueError: a divided leaf has no NamedSharding, or two divided leaves are on
            different meshes.
    """
    found: jax.sharding.Mesh | None = None
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if sharding is None or _is_whole(leaf, sharding):
            continue
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"leaf {leaf.path!r} has {sharding}. Allowed in a job of several "
                "processes: NamedSharding, and arrays that every process has whole. "
                "Put it on the mesh: jax.jit(..., out_shardings=...)."
            )
        mesh = sharding.mesh
        assert isinstance(mesh, jax.sharding.Mesh)  # an array is on real devices
        if found is None:
            found = mesh
        elif not _same(found, mesh):
            raise ValueError(
                f"leaf {leaf.path!r} is on {mesh}, others are on {found}. Allowed: one "
                "mesh for all leaves that are divided. Put them on one mesh."
            )
    return found


def _same(one: Any, other: Any) -> bool:
    return (
        one.axis_names == other.axis_names
        and one.devices.shape == other.devices.shape
        and list(one.devices.flat) == list(other.devices.flat)
    )


def _is_whole(leaf: LeafRecord, sharding: Sharding) -> bool:
    """Whether each process has the whole leaf: it is fully replicated, or a scalar."""
    return sharding.is_fully_replicated or not leaf.shape


def _spec(
    leaf: LeafRecord, sharding: Sharding | None, mesh: jax.sharding.Mesh | None
) -> tuple[tuple[str, ...], ...]:
    if sharding is None or mesh is None or _is_whole(leaf, sharding):
        return ()
    assert isinstance(sharding, NamedSharding)
    parts = [_axes(part) for part in sharding.spec]
    while parts and not parts[-1]:
        parts.pop()  # P("x") and P("x", None) are one sharding
    return tuple(parts)


def _axes(part: Any) -> tuple[str, ...]:
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def _mesh_layout(mesh: jax.sharding.Mesh | None, num_processes: int) -> MeshLayout:
    if mesh is None:
        return MeshLayout(
            axis_names=("process",),
            axis_sizes=(num_processes,),
            slots=tuple(range(num_processes)),
        )
    slots = tuple(device.process_index for device in mesh.devices.flat)
    if set(slots) != set(range(num_processes)):
        raise ValueError(
            f"the mesh {mesh} has devices of processes {sorted(set(slots))}, the job "
            f"has {num_processes}. Allowed: a mesh with devices of every process."
        )
    return MeshLayout(
        axis_names=tuple(map(str, mesh.axis_names)),
        axis_sizes=tuple(mesh.devices.shape),
        slots=slots,
    )
