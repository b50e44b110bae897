"""Chooses the slots that write a step to storage, and their mesh.

The choice depends only on the layout (mesh, leaves and config).
"""

from dataclasses import dataclass

from dtft.checkpoint.state import Layout, MeshLayout


@dataclass(frozen=True, kw_only=True)
class ExportWorld:
    """The slots that write a step to storage, and their part of the mesh.

    Together these slots have every slice of the state.
    """

    slots: tuple[int, ...]
    """Slots by the rank of their exporter process: rank r writes slot `slots[r]`."""
    mesh: MeshLayout
    """Part of the layout's mesh, with the same axis names and slot numbers."""


def export_world(layout: Layout) -> ExportWorld:
    """Computes a part of the mesh whose slots together have every slice of the state.

    Replicas are left out: the part has only index 0 of each axis that divides no leaf,
    and all indices of the other axes. A position in this part of the mesh has the same
    slices as the same position in the full mesh. In the example the part is replica 0,
    which is slots 0 and 1.

    >>> from dtft.checkpoint.state.slices import Leaf
    >>> mesh = MeshLayout(
    ...     axis_names=("replica", "fsdp"), axis_sizes=(2, 2), slots=(0, 1, 2, 3))
    >>> leaf = Leaf(path="w", shape=(4,), dtype="float32", spec=(("fsdp",),))
    >>> export_world(Layout(mesh=mesh, leaves=(leaf,))).slots
    (0, 1)
    """
    mesh = layout.mesh
    used = {axis for leaf in layout.leaves for dim in leaf.spec for axis in dim}
    kept = [
        (slot, position)
        for slot in sorted(set(mesh.slots))
        for position in mesh.positions(slot)
        if all(
            axis in used or index == 0
            for axis, index in zip(mesh.axis_names, position, strict=True)
        )
    ]
    kept.sort(key=lambda pair: pair[1])  # row-major order of the mesh
    return ExportWorld(
        slots=tuple(sorted({slot for slot, _ in kept})),
        mesh=MeshLayout(
            axis_names=mesh.axis_names,
            axis_sizes=tuple(
                size if axis in used else 1
                for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
            ),
            slots=tuple(slot for slot, _ in kept),
        ),
    )
