"""How leaves are divided into parts, and which slots own each part. Vectorised.

Leaves with the same partition spec have the same owners, part by part, whatever their
shapes. Decisions about placement and restore are therefore taken once per way of being
divided, not once per slice: that is what makes them fast at 10,000 hosts. Must not know
hosts, copies or where the bytes are.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.slices import Layout, Leaf, MeshLayout, Slice

Spec = tuple[tuple[str, ...], ...]
"""Per dim the mesh axes that divide it; normal form: see `normal_spec`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Partition:
    """One way to divide a leaf over a mesh. Parts count in row-major order of dims."""

    counts: tuple[int, ...]
    """Parts per dim; missing trailing dims are undivided."""
    part_of_device: np.ndarray
    """[devices] int64: the part on each device, devices in row-major mesh order."""
    slot_of_device: np.ndarray
    """[devices] int64: the slot of each device."""

    @property
    def num_parts(self) -> int:
        """Number of parts of every leaf that is divided so."""
        return math.prod(self.counts)

    @functools.cached_property
    def owned(self) -> tuple[np.ndarray, np.ndarray]:
        """([pairs] part, [pairs] slot): who owns what, by part, then slot."""
        num_slots = int(self.slot_of_device.max()) + 1
        pairs = np.unique(self.part_of_device * num_slots + self.slot_of_device)
        return pairs // num_slots, pairs % num_slots

    @functools.cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """For every part the slots that own it, ascending."""
        part, slot = self.owned
        ends = np.searchsorted(part, np.arange(self.num_parts), side="right")
        slots, begun, owners = slot.tolist(), 0, []
        for end in ends.tolist():
            owners.append(tuple(slots[begun:end]))
            begun = end
        return tuple(owners)

    def slice_of(self, leaf: Leaf, part: int) -> Slice:
        """The slice of a leaf that is a part."""
        start, stop = [0] * len(leaf.shape), list(leaf.shape)
        for dim, index in enumerate(self.index(part)):
            width = leaf.shape[dim] // self.counts[dim]
            start[dim], stop[dim] = index * width, (index + 1) * width
        return Slice(
            path=leaf.path, start=tuple(start), stop=tuple(stop), dtype=leaf.dtype
        )

    def index(self, part: int) -> tuple[int, ...]:
        """The index of a part along each dim of `counts`."""
        index = []
        for count in reversed(self.counts):
            part, rest = divmod(part, count)
            index.append(rest)
        return tuple(reversed(index))


def normal_spec(mesh: MeshLayout, leaf: Leaf) -> Spec:
    """The spec of a leaf without what divides nothing.

    Axes of size 1, the axes of dims without elements and trailing undivided dims are
    left out, so that equal specs mean equal slices and unequal ones do not.

    >>> mesh = MeshLayout(
    ...     axis_names=("fsdp", "tensor"), axis_sizes=(2, 1), slots=(0, 1)
    ... )
    >>> spec = ((), ("fsdp", "tensor"), ("tensor",))
    >>> normal_spec(mesh, Leaf(path="w", shape=(3, 4, 5), dtype="int8", spec=spec))
    ((), ('fsdp',))

    Raises:
        ValueError: an axis is unknown, or a dim cannot be divided evenly by its axes.
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    spec = []
    for dim, axes in enumerate(leaf.spec):
        unknown = [axis for axis in axes if axis not in sizes]
        if unknown:
            raise ValueError(
                f"leaf {leaf.path!r}: dim {dim} is divided by axis {unknown[0]!r}, but "
                f"the mesh has {mesh.axis_names}. Change the spec or the mesh."
            )
        parts = math.prod(sizes[axis] for axis in axes)
        if leaf.shape[dim] % parts:
            raise ValueError(
                f"leaf {leaf.path!r}: dim {dim} of size {leaf.shape[dim]} cannot be "
                f"divided by axes {axes} of total size {parts}. Change the spec."
            )
        dividing = tuple(axis for axis in axes if sizes[axis] > 1)
        spec.append(dividing if leaf.shape[dim] else ())
    while spec and not spec[-1]:
        spec.pop()
    return tuple(spec)


def leaves_by_spec(layout: Layout) -> dict[Spec, list[int]]:
    """The leaves of a layout, as positions in `layout.leaves`, by normal spec."""
    found: dict[Spec, list[int]] = {}
    for index, leaf in enumerate(layout.leaves):
        found.setdefault(normal_spec(layout.mesh, leaf), []).append(index)
    return found


def partition_of(mesh: MeshLayout, spec: Spec) -> Partition:
    """How a mesh divides leaves of a normal spec.

    >>> mesh = MeshLayout(
    ...     axis_names=("replica", "fsdp"), axis_sizes=(2, 2), slots=(0, 1, 2, 3)
    ... )
    >>> partition_of(mesh, (("fsdp",),)).owners
    ((0, 2), (1, 3))
    """
    num_devices = len(mesh.slots)
    along = np.unravel_index(np.arange(num_devices), mesh.axis_sizes)
    coordinate = dict(zip(mesh.axis_names, along, strict=True))
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    part = np.zeros(num_devices, np.int64)
    for axes in spec:
        for axis in axes:
            part = part * sizes[axis] + coordinate[axis]
    return Partition(
        counts=tuple(math.prod(sizes[axis] for axis in axes) for axes in spec),
        part_of_device=part,
        slot_of_device=np.array(mesh.slots, np.int64),
    )


def nbytes_of(leaf: Leaf) -> int:
    """Size of a whole leaf in bytes."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
