"""Which slots write a step to storage, and the mesh they write it on.

Pure: a layout in, the export world out.
"""

from dataclasses import dataclass

from dtft.checkpoint.state import Layout, MeshLayout


@dataclass(frozen=True, kw_only=True)
class ExportWorld:
    """The slots that together hold every slice, and their part of the mesh."""

    slots: tuple[int, ...]
    """Slots in rank order: the slot of rank r is `slots[r]`."""
    mesh: MeshLayout
    """The sub-mesh, with the axes of the full mesh; its slots are the layout's."""


def export_world(layout: Layout) -> ExportWorld:
    """The part of the mesh that holds every slice, without idle copies.

    Of every axis that divides no leaf only index 0 is kept (size 1), so a position in
    the sub-mesh owns the slices of the same position in the full mesh.

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
    kept.sort(key=lambda pair: pair[1])  # back to row-major mesh order
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
