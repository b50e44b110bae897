"""Partitions of leaves over a mesh, and the overlaps of two partitions.

A slot is a numbered position in the job that one host fills; it owns the slices on the
host's devices. An old and a new partition differ if a job continues on another mesh.

A partition is computed once per partition spec, and overlaps once per pair of specs,
with vectorised operations. `LeafBundle` finds where an overlap can be cut into regions;
each region is a piece of an old slice that becomes a piece of a new slice.
`move_regions` copies the bytes of a region from an old slice to a new slice.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.state.digests import DIGEST_BYTES
from dtft.checkpoint.state.slices import Layout, Leaf, MeshLayout, Slice

# Leaves with the same partition spec have the same owners, part by part, whatever their
# shapes. Placement and restore are therefore decided once per partition spec, not once
# per slice, which is fast even at 10,000 hosts.


Spec = tuple[tuple[str, ...], ...]
"""The mesh axes that divide each dim; for the normal form see `normal_spec`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Partition:
    """How leaves are divided over a mesh.

    Each leaf is cut into equal parts, which are numbered row-major over the dims.
    """

    counts: tuple[int, ...]
    """Number of parts along each dim; missing trailing dims are undivided."""
    part_of_device: np.ndarray
    """[devices] int64: the part on each device, devices in row-major mesh order."""
    slot_of_device: np.ndarray
    """[devices] int64: the slot of each device."""

    @property
    def num_parts(self) -> int:
        """The number of parts of every leaf with this partition."""
        return math.prod(self.counts)

    @functools.cached_property
    def owned(self) -> tuple[np.ndarray, np.ndarray]:
        """All pairs of a part and a slot that owns the part, sorted by part, then slot.

        Two arrays of equal length: the number of each pair's part, and of its slot.
        """
        num_slots = int(self.slot_of_device.max()) + 1
        pairs = np.unique(self.part_of_device * num_slots + self.slot_of_device)
        return pairs // num_slots, pairs % num_slots

    @functools.cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """The slots that own each part, ascending."""
        part, slot = self.owned
        ends = np.searchsorted(part, np.arange(self.num_parts), side="right")
        slots, begun, owners = slot.tolist(), 0, []
        for end in ends.tolist():
            owners.append(tuple(slots[begun:end]))
            begun = end
        return tuple(owners)

    def slice_of(self, leaf: Leaf, part: int) -> Slice:
        """Returns the slice of a leaf that is the part with number `part`."""
        start, stop = [0] * len(leaf.shape), list(leaf.shape)
        for dim, index in enumerate(self.index(part)):
            width = leaf.shape[dim] // self.counts[dim]
            start[dim], stop[dim] = index * width, (index + 1) * width
        return Slice(
            path=leaf.path, start=tuple(start), stop=tuple(stop), dtype=leaf.dtype
        )

    def index(self, part: int) -> tuple[int, ...]:
        """Returns the index of a part along each dim, counted in parts.

        Trailing dims that are not divided, and have no entry in `counts`, are left out.
        """
        index = []
        for count in reversed(self.counts):
            part, rest = divmod(part, count)
            index.append(rest)
        return tuple(reversed(index))


def normal_spec(mesh: MeshLayout, leaf: Leaf) -> Spec:
    """Returns the spec of a leaf without the axes that divide nothing.

    Axes of size 1, the axes of dims without elements and trailing undivided dims are
    left out. So two leaves of the same shape have the same slice on every device if,
    and only if, their normal specs are equal.

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
    """Groups the leaves of a layout by how they are divided over its mesh.

    Returns:
        Maps each partition spec, as `normal_spec` returns it, to the positions in
        `layout.leaves` of the leaves with this spec.
    """
    found: dict[Spec, list[int]] = {}
    for index, leaf in enumerate(layout.leaves):
        found.setdefault(normal_spec(layout.mesh, leaf), []).append(index)
    return found


def partition_of(mesh: MeshLayout, spec: Spec) -> Partition:
    """Computes how leaves with a partition spec from `normal_spec` are divided.

    In the example, a leaf has two parts: slots 0 and 2 own part 0, and slots 1 and 3
    own part 1.

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
    """Computes the size of a whole leaf in bytes."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


# A cell is the overlap of one part of the old partition and one part of the new. A new
# slice is assembled from cells, and each cell lies in exactly one old slice. Leaves
# with the same partitions share the cells, in units that scale with the leaf.


EVEN_ROWS = 64
"""`LeafBundle.rows` cuts a cell (the overlap of an old and a new part of a leaf) along
the first dim with at least this many elements: so many rows can be cut into pieces of
about equal size."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A piece of an old slice that becomes a piece of a new slice.

    Slices change if a job continues on another mesh.
    """

    old: Slice
    """The committed slice to read the bytes from."""
    new: Slice
    """The slice of the new layout to write the bytes to."""
    moved: Slice
    """The moved piece, inside both `old` and `new`."""

    @property
    def whole(self) -> bool:
        """Whether the old slice equals the new slice and is moved whole."""
        return self.old == self.moved == self.new


@dataclass(frozen=True, eq=False, kw_only=True)
class Cells:
    """All overlaps (cells) of an old and a new partition; together they cover the leaf.

    Each dim is divided into equal units, as large as possible: every part of both
    partitions has a whole number of units.
    """

    units: tuple[int, ...]
    """Number of units of each dim: the least common multiple of the numbers of parts
    that the two partitions have along the dim."""
    old: np.ndarray
    """[cells] int64: number of the old part that the cell lies in."""
    new: np.ndarray
    """[cells] int64: number of the new part that the cell lies in."""
    start: np.ndarray
    """[cells, dims] int64: first unit of the cell along each dim."""
    width: np.ndarray
    """[cells, dims] int64: number of units of the cell along each dim."""

    @functools.cached_property
    def volume(self) -> np.ndarray:
        """[cells] int64: volume of each cell, the product of its widths in units."""
        return self.width.prod(axis=1, dtype=np.int64)


def overlap(old: Partition, new: Partition) -> Cells:
    """Computes the overlaps of an old and a new partition, in row-major order.

    The example cuts a dim into 2 old and 3 new parts, so the dim has 6 units. It lists
    the old part, the new part and the number of units of each overlap.

    >>> def halves(counts):
    ...     nobody = np.zeros(1, np.int64)
    ...     return Partition(
    ...         counts=counts, part_of_device=nobody, slot_of_device=nobody
    ...     )
    >>> cells = overlap(halves((2,)), halves((3,)))
    >>> list(zip(cells.old.tolist(), cells.new.tolist(), cells.volume.tolist()))
    [(0, 0, 2), (0, 1, 1), (1, 1, 1), (1, 2, 2)]
    """
    num_dims = max(len(old.counts), len(new.counts))
    before = old.counts + (1,) * (num_dims - len(old.counts))
    after = new.counts + (1,) * (num_dims - len(new.counts))
    units = tuple(math.lcm(a, b) for a, b in zip(before, after, strict=True))
    cuts = [
        np.union1d(np.arange(0, n, n // a), np.arange(0, n, n // b))
        for n, a, b in zip(units, before, after, strict=True)
    ]
    shape = tuple(len(found) for found in cuts)
    num_cells = math.prod(shape)
    along = np.unravel_index(np.arange(num_cells), shape) if shape else ()
    start = np.zeros((num_cells, num_dims), np.int64)
    width = np.ones((num_cells, num_dims), np.int64)
    of_old, of_new = np.zeros(num_cells, np.int64), np.zeros(num_cells, np.int64)
    for dim, index in enumerate(along):
        start[:, dim] = cuts[dim][index]
        width[:, dim] = np.diff(cuts[dim], append=units[dim])[index]
        for part, count in ((of_old, before[dim]), (of_new, after[dim])):
            part *= count
            part += start[:, dim] // (units[dim] // count)
    return Cells(units=units, old=of_old, new=of_new, start=start, width=width)


@dataclass(frozen=True, eq=False, kw_only=True)
class LeafBundle:
    """Non-empty leaves with the same old partition and the same new partition.

    A cell is the overlap of an old and a new part, and every leaf has the same cells.
    The bytes of a cell in the bundle are its bytes in the first leaf, then its bytes in
    the second leaf, and so on.
    """

    leaves: tuple[Leaf, ...]
    old: Partition
    new: Partition
    cells: Cells

    @property
    def unchanged(self) -> bool:
        """Whether every old slice is also a new slice."""
        return self.old.counts == self.new.counts

    @functools.cached_property
    def unit_bytes(self) -> np.ndarray:
        """[leaves] int64: bytes of each leaf per unit of `Cells.volume`."""
        volume = math.prod(self.cells.units)
        return np.array([nbytes_of(leaf) // volume for leaf in self.leaves], np.int64)

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """[leaves + 1] int64: cumulative sums of `unit_bytes`, beginning with 0.

        Multiplied by the volume of a cell (`Cells.volume`), these are the offsets in
        the cell where the bytes of each leaf begin and end.
        """
        return np.concatenate([[0], np.cumsum(self.unit_bytes)])

    @property
    def nbytes(self) -> np.ndarray:
        """[cells] int64: bytes of each cell, summed over the leaves of the bundle."""
        return self.cells.volume * self.ends[-1]

    @functools.cached_property
    def _shapes(self) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays: [leaves, rank] shape of each leaf, and [rank] units per dim.

        The rank is that of the leaf with most dims, at least 1. Other leaves get
        trailing dims of size 1, and dims that `cells` lacks have 1 unit.
        """
        rank = max(1, *(len(leaf.shape) for leaf in self.leaves))
        shapes = np.ones((len(self.leaves), rank), np.int64)
        for row, leaf in zip(shapes, self.leaves, strict=True):
            row[: len(leaf.shape)] = leaf.shape
        units = np.ones(rank, np.int64)
        units[: len(self.cells.units)] = self.cells.units
        return shapes, units

    def rows(self, leaf: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the dim along which to cut, for n pairs of a leaf and a cell.

        A cell is the overlap of an old and a new part of the leaf. The dim is the first
        dim along which the cell has at least `EVEN_ROWS` (64) elements. If there is no
        such dim, it is the dim along which the cell has most elements. A row of the
        cell is its elements at one index of this dim.

        Args:
            leaf: [n] position in the field `leaves`.
            cell: [n] position in the field `cells`.

        Returns:
            [n] the dim, [n] the number of rows of the cell.
        """
        shapes, units = self._shapes
        width = np.ones((len(cell), len(units)), np.int64)
        width[:, : len(self.cells.units)] = self.cells.width[cell]
        extent = shapes[leaf] // units * width
        enough = extent >= EVEN_ROWS
        dim = np.where(enough.any(axis=1), enough.argmax(axis=1), extent.argmax(axis=1))
        return dim, extent[np.arange(len(dim)), dim]

    def cuts(
        self, cell: np.ndarray, offset: np.ndarray, grain: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the nearest allowed cuts of a cell before and after an offset.

        A cell is the overlap of an old and a new part of every leaf of the bundle; its
        bytes are those in the first leaf, then those in the second leaf, and so on. It
        can be cut between two leaves. It can also be cut between two rows of a leaf,
        along the dim that `rows` returns, if the leaf has more than `grain` bytes in
        the cell.

        Args:
            cell: [n] position in the field `cells`.
            offset: [n] offset in the cell in bytes, below the cell's size.
            grain: bytes up to which one leaf's part of a cell is not cut.

        Returns:
            [n] offset of the nearest cut at or before `offset`, [n] offset of the
            nearest cut at or after it; both are `offset` if the cell can be cut there.
        """
        volume = self.cells.volume[cell]
        leaf = np.searchsorted(self.ends, offset // volume, side="right") - 1
        begun, size = self.ends[leaf] * volume, self.unit_bytes[leaf] * volume
        _, rows = self.rows(leaf, cell)
        step = np.where(size > grain, size // rows, size)
        low = begun + (offset - begun) // step * step
        return low, np.where(low == offset, low, low + step)

    def regions(self, cell: int, start: int, stop: int) -> Iterator[Region]:
        """Yields the pieces of a cell between two offsets, leaf by leaf.

        A cell is the overlap of an old and a new part of every leaf of the bundle.

        Args:
            cell: position in the field `cells`.
            start: offset in the cell in bytes, a result of `cuts`.
            stop: offset in the cell in bytes, a result of `cuts`.
        """
        volume = int(self.cells.volume[cell])
        first = int(np.searchsorted(self.ends, start // volume, side="right")) - 1
        last = int(np.searchsorted(self.ends, -(-stop // volume), side="left"))
        for leaf in range(first, last):
            begun, end = (int(n) * volume for n in self.ends[leaf : leaf + 2])
            region = self._region(leaf, cell)
            if start > begun or stop < end:
                one = np.array([leaf]), np.array([cell])
                dim, rows = (int(found[0]) for found in self.rows(*one))
                step = (end - begun) // rows
                base = region.moved.start[dim]
                moved = _narrowed(
                    region.moved,
                    dim,
                    base + (max(start, begun) - begun) // step,
                    base + (min(stop, end) - begun) // step,
                )
                region = dataclasses.replace(region, moved=moved)
            yield region

    def _region(self, leaf: int, cell: int) -> Region:
        whole, cells = self.leaves[leaf], self.cells
        begin, end = [0] * len(whole.shape), list(whole.shape)
        for dim, units in enumerate(cells.units):
            per_unit = whole.shape[dim] // units
            begin[dim] = int(cells.start[cell, dim]) * per_unit
            end[dim] = begin[dim] + int(cells.width[cell, dim]) * per_unit
        moved = Slice(
            path=whole.path, start=tuple(begin), stop=tuple(end), dtype=whole.dtype
        )
        return Region(
            old=self.old.slice_of(whole, int(cells.old[cell])),
            new=self.new.slice_of(whole, int(cells.new[cell])),
            moved=moved,
        )


def _narrowed(piece: Slice, dim: int, start: int, stop: int) -> Slice:
    starts, stops = list(piece.start), list(piece.stop)
    starts[dim], stops[dim] = start, stop
    return dataclasses.replace(piece, start=tuple(starts), stop=tuple(stops))


# A region is cut out of a slice that was committed with a digest for every chunk. So an
# old slice is read in whole chunks, which are checked against the commit before use. A
# digest made by the sender would only prove that the bytes arrived as they were sent.


Span = tuple[int, int]
"""A byte range of a slice: its first byte, and one past its last byte."""


def span_of(regions: Sequence[Region], chunk_bytes: int) -> Span:
    """Computes the shortest byte range of an old slice that contains all regions.

    The range consists of whole chunks, because digests are kept per chunk. It is given
    as its first byte, and one past its last byte. In the example bytes 30 to 49 of the
    old slice are moved.

    Args:
        regions: not empty, all cut from the same old slice.
        chunk_bytes: size of a chunk in bytes.

    >>> old = Slice(path="w", start=(0,), stop=(100,), dtype="int8")
    >>> moved = Slice(path="w", start=(30,), stop=(50,), dtype="int8")
    >>> span_of([Region(old=old, new=moved, moved=moved)], chunk_bytes=16)
    (16, 64)
    """
    old = regions[0].old
    size = np.dtype(old.dtype).itemsize
    first, last = old.nbytes, 0
    for region in regions:
        begin = _within(region.moved.start, old)
        end = _within([stop - 1 for stop in region.moved.stop], old)
        first = min(first, _flat(begin, old.shape) * size)
        last = max(last, (_flat(end, old.shape) + 1) * size)
    return (
        first // chunk_bytes * chunk_bytes,
        min(-(-last // chunk_bytes) * chunk_bytes, old.nbytes),
    )


def digests_in(digests: bytes, span: Span, chunk_bytes: int) -> bytes:
    """Returns the digests of the chunks in a byte range of a slice.

    Args:
        digests: of the whole slice, 16 bytes per chunk.
        span: the byte range, a result of `span_of`.
        chunk_bytes: size of a chunk in bytes.
    """
    first, last = span[0] // chunk_bytes, -(-span[1] // chunk_bytes)
    return digests[first * DIGEST_BYTES : last * DIGEST_BYTES]


def move_regions(region: Region, old: memoryview, new: memoryview) -> None:
    """Copies the bytes of a region from its old slice to its new slice.

    Args:
        region: the region.
        old: the bytes of the old slice; only the region is read.
        new: the bytes of the new slice; only the region is written.
    """
    source = _array(old, region.old)[_index(region.moved, region.old)]
    _array(new, region.new)[_index(region.moved, region.new)] = source


def _array(memory: memoryview, piece: Slice) -> np.ndarray:
    # Opaque items: copying floats as floats may change the payload of a NaN.
    raw = np.dtype((np.void, np.dtype(piece.dtype).itemsize))
    return np.frombuffer(memory, raw).reshape(piece.shape)


def _index(inner: Slice, outer: Slice) -> tuple[slice, ...]:
    begin, end = _within(inner.start, outer), _within(inner.stop, outer)
    return tuple(slice(a, b) for a, b in zip(begin, end, strict=True))


def _within(place: Sequence[int], outer: Slice) -> tuple[int, ...]:
    return tuple(a - base for a, base in zip(place, outer.start, strict=True))


def _flat(place: Sequence[int], shape: Sequence[int]) -> int:
    """Computes the row-major position of the element with index `place`."""
    at = 0
    for index, extent in zip(place, shape, strict=True):
        at = at * extent + index
    return at
