"""Leaves and slices of the state, and the slots that own each slice.

A slice is identified by leaf path, global index range and dtype. A slot is a numbered
position in the job that one host fills; it owns the slices on the host's devices. The
slices of a slot are computed from the mesh and the leaves' shapes and partition specs.
This module has no side effects.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16, float8 and int4 with NumPy)
import numpy as np
import xxhash

ALIGNMENT = 64
"""Alignment of slices in memory, in bytes, so that JAX can use the memory without a
copy."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One piece of a leaf, identified by leaf path, global index range and dtype.

    The identity has no rank and no host, so equal pieces on two hosts are equal slices.
    The slice in the example has 2 x 4 elements of 4 bytes.

    >>> Slice(path="params/w", start=(0, 4), stop=(2, 8), dtype="float32").nbytes
    32
    """

    path: str
    """Path of the leaf in the state tree, keys joined by "/"."""
    start: tuple[int, ...]
    """First global index of each dim."""
    stop: tuple[int, ...]
    """One past the last global index of each dim."""
    dtype: str
    """Numpy (or ml_dtypes) name of the dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @functools.cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @functools.cached_property
    def key(self) -> str:
        """The identity of the slice as text, e.g. ``params/w[0:2,4:8]:float32``."""
        ranges = ",".join(
            f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)
        )
        return f"{self.path}[{ranges}]:{self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One global array of the state."""

    path: str
    """Path in the state tree, keys joined by "/"."""
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Numpy (or ml_dtypes) name of the dtype."""
    spec: tuple[tuple[str, ...], ...] = ()
    """The mesh axes that divide each dim; missing trailing dims are undivided."""


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """A mesh without device objects: axis names and sizes, and the slot of each device.

    A slot is a numbered position in the job that one host fills.
    """

    axis_names: tuple[str, ...]
    """Axis names, slowest-varying first."""
    axis_sizes: tuple[int, ...]
    """Axis sizes, in the order of the names."""
    slots: tuple[int, ...]
    """The slot of each device, devices in row-major mesh order."""

    def __post_init__(self) -> None:
        if math.prod(self.axis_sizes) != len(self.slots):
            raise ValueError(
                f"slots has {len(self.slots)} entries, but axis_sizes="
                f"{self.axis_sizes} needs {math.prod(self.axis_sizes)}: "
                "give one slot per device."
            )

    @functools.cached_property
    def num_slots(self) -> int:
        """The number of slots: the largest slot number plus 1."""
        return max(self.slots) + 1

    @functools.cached_property
    def _positions(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        positions: dict[int, list[tuple[int, ...]]] = {}
        coordinates = itertools.product(*(range(n) for n in self.axis_sizes))
        for slot, coordinate in zip(self.slots, coordinates, strict=True):
            positions.setdefault(slot, []).append(coordinate)
        return {slot: tuple(found) for slot, found in positions.items()}

    def positions(self, slot: int) -> tuple[tuple[int, ...], ...]:
        """Returns the mesh coordinates of the devices of `slot`, in mesh order.

        Returns () for a slot without devices.
        """
        return self._positions.get(slot, ())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The mesh and leaves of the whole state, and the config of the job.

    Mesh and leaves decide which slices every slot owns.
    """

    mesh: MeshLayout
    leaves: tuple[Leaf, ...]
    config: str = ""
    """The resolved experiment config as JSON. For a training loop of the user's own,
    the JSON that `storage.job_layout.config_of` returns."""

    @functools.cached_property
    def digest(self) -> str:
        """Hex digest (xxh3-128) of the layout; equal layouts have equal digests."""
        return xxhash.xxh3_128_hexdigest(self.to_json().encode())

    @functools.cached_property
    def _slices_by_slot(self) -> dict[int, tuple[Slice, ...]]:
        return {}

    def slices(self, slot: int) -> tuple[Slice, ...]:
        """Returns the distinct slices that a slot owns, in leaf order then mesh order.

        Returns () for a slot without devices.

        Raises:
            ValueError: a dim of a leaf cannot be divided evenly by its mesh axes.
            KeyError: the mesh lacks an axis of a leaf's spec.
        """
        # Cached per slot: one of thousands of hosts needs only its own slices.
        if slot not in self._slices_by_slot:
            self._slices_by_slot[slot] = _distinct(
                slice_at(self.mesh, leaf, position)
                for leaf in self.leaves
                for position in self.mesh.positions(slot)
            )
        return self._slices_by_slot[slot]

    @functools.cached_property
    def _keys_by_slot(self) -> dict[int, tuple[str, ...]]:
        return {}

    def keys(self, slot: int) -> tuple[str, ...]:
        """Returns the keys (`Slice.key`) of the slices that a slot owns.

        They are in the order of `slices(slot)`. Slots with equal slices get the same
        tuple object, which saves memory. For the errors, see `slices`.
        """
        if slot not in self._keys_by_slot:
            keys = tuple(piece.key for piece in self.slices(slot))
            same = (it for it in self._keys_by_slot.values() if it == keys)
            self._keys_by_slot[slot] = next(same, keys)
        return self._keys_by_slot[slot]

    @functools.cached_property
    def owners(self) -> dict[Slice, tuple[int, ...]]:
        """Maps every distinct slice to the slots that own the slice, ascending."""
        owners: dict[Slice, list[int]] = {}
        for slot in range(self.mesh.num_slots):
            for piece in self.slices(slot):
                owners.setdefault(piece, []).append(slot)
        return {piece: tuple(slots) for piece, slots in owners.items()}

    def to_json(self) -> str:
        """Encodes the layout as canonical JSON; the inverse of `from_json`."""
        return self._json

    @functools.cached_property
    def _json(self) -> str:
        return json.dumps(
            {
                "mesh": dataclasses.asdict(self.mesh),
                "leaves": [vars(leaf) for leaf in self.leaves],
                "config": self.config,
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """Decodes a layout from the JSON of `to_json`."""
        raw = json.loads(text)
        mesh = {key: tuple(value) for key, value in raw["mesh"].items()}
        leaves = tuple(
            Leaf(
                path=leaf["path"],
                shape=tuple(leaf["shape"]),
                dtype=leaf["dtype"],
                spec=tuple(tuple(axes) for axes in leaf["spec"]),
            )
            for leaf in raw["leaves"]
        )
        return cls(mesh=MeshLayout(**mesh), leaves=leaves, config=raw["config"])


def slice_at(mesh: MeshLayout, leaf: Leaf, position: Sequence[int]) -> Slice:
    """Returns the slice of a leaf on the device at a position in the mesh.

    `position` has the device's coordinate along each mesh axis.

    Raises:
        ValueError: a dim cannot be divided evenly by its mesh axes.
        KeyError: the mesh lacks an axis of the leaf's spec.
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    coordinate = dict(zip(mesh.axis_names, position, strict=True))
    start, stop = [0] * len(leaf.shape), list(leaf.shape)
    for dim, axes in enumerate(leaf.spec):
        parts, index = 1, 0
        for axis in axes:
            parts, index = parts * sizes[axis], index * sizes[axis] + coordinate[axis]
        if leaf.shape[dim] % parts:
            raise ValueError(
                f"leaf {leaf.path!r}: dim {dim} of size {leaf.shape[dim]} cannot be "
                f"divided by axes {axes} of total size {parts}. Change the spec."
            )
        width = leaf.shape[dim] // parts
        start[dim], stop[dim] = index * width, (index + 1) * width
    return Slice(path=leaf.path, start=tuple(start), stop=tuple(stop), dtype=leaf.dtype)


def offsets_of(slices: Sequence[Slice]) -> tuple[tuple[int, ...], int]:
    """Computes offsets in memory that put slices one after the other.

    Returns the offset of each slice, and the total size. All numbers are in bytes and
    are multiples of `ALIGNMENT`, which is 64. In the example each slice has 3 bytes.

    >>> a = Slice(path="a", start=(0,), stop=(3,), dtype="uint8")
    >>> offsets_of([a, a])
    ((0, 64), 128)
    """
    offsets, total = [], 0
    for piece in slices:
        offsets.append(total)
        total += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), total


def _distinct(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    return tuple(dict.fromkeys(slices))
