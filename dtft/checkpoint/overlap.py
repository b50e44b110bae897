"""How two ways to divide the same leaves overlap, and how overlaps are cut.

A cell is where one part of the old division meets one of the new: what a host needs of
a new slice is assembled from cells, and each lies in exactly one old slice. Leaves that
are divided alike before and after share the cells, in units that scale with the leaf.
Must not know hosts, holders or loads.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dtft.checkpoint.partition import Partition, nbytes_of
from dtft.checkpoint.slices import Leaf, Slice

EVEN_ROWS = 64
"""A dim of at least this many rows can be cut evenly enough."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A piece of an old slice that becomes a piece of a new one."""

    old: Slice
    """The slice, as committed, that the bytes are read from."""
    new: Slice
    """The slice of the new layout that they become part of."""
    moved: Slice
    """What is moved: inside both."""

    @property
    def whole(self) -> bool:
        """The old slice is the new one, and all of it is moved."""
        return self.old == self.moved == self.new


@dataclass(frozen=True, eq=False, kw_only=True)
class Cells:
    """All overlaps of an old and a new division. Together they are the whole leaf."""

    units: tuple[int, ...]
    """Units per dim: the least that both divisions divide."""
    old: np.ndarray
    """[cells] int64: the old part."""
    new: np.ndarray
    """[cells] int64: the new part."""
    start: np.ndarray
    """[cells, dims] int64: first unit."""
    width: np.ndarray
    """[cells, dims] int64: units."""

    @functools.cached_property
    def volume(self) -> np.ndarray:
        """[cells] int64: units of volume."""
        return self.width.prod(axis=1, dtype=np.int64)


def overlap(old: Partition, new: Partition) -> Cells:
    """The cells of two divisions, in row-major order.

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
class Bundle:
    """Leaves, none of them empty, that are divided alike, before and after.

    A cell of the bundle is that cell of every leaf, one after the other.
    """

    leaves: tuple[Leaf, ...]
    old: Partition
    new: Partition
    cells: Cells

    @property
    def unchanged(self) -> bool:
        """Every old slice is a new one."""
        return self.old.counts == self.new.counts

    @functools.cached_property
    def unit_bytes(self) -> np.ndarray:
        """[leaves] int64: bytes of one unit of volume of each leaf."""
        volume = math.prod(self.cells.units)
        return np.array([nbytes_of(leaf) // volume for leaf in self.leaves], np.int64)

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """[leaves + 1] int64: bytes of the leaves before each, per unit of volume."""
        return np.concatenate([[0], np.cumsum(self.unit_bytes)])

    @property
    def nbytes(self) -> np.ndarray:
        """[cells] int64: bytes of each cell, all leaves."""
        return self.cells.volume * self.ends[-1]

    @functools.cached_property
    def _shapes(self) -> tuple[np.ndarray, np.ndarray]:
        """([leaves, rank] shapes, [rank] units), padded with dims of size 1."""
        rank = max(1, *(len(leaf.shape) for leaf in self.leaves))
        shapes = np.ones((len(self.leaves), rank), np.int64)
        for row, leaf in zip(shapes, self.leaves, strict=True):
            row[: len(leaf.shape)] = leaf.shape
        units = np.ones(rank, np.int64)
        units[: len(self.cells.units)] = self.cells.units
        return shapes, units

    def rows(self, leaf: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The dim along which cells are cut, and their extent there.

        The first dim with enough rows to be cut evenly, else the longest.

        Args:
            leaf: [n] position in `leaves`.
            cell: [n] position in `cells`.
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
        """The nearest offsets, before and after, where a cell can be cut.

        A cell can be cut between leaves, and between rows of a leaf that has more than
        `grain` bytes in the cell.

        Args:
            cell: [n] position in `cells`.
            offset: [n] bytes, each inside its cell.
            grain: bytes up to which a leaf's cell stays whole.

        Returns:
            ([n] at most `offset`, [n] at least `offset`): equal where it can be cut.
        """
        volume = self.cells.volume[cell]
        leaf = np.searchsorted(self.ends, offset // volume, side="right") - 1
        begun, size = self.ends[leaf] * volume, self.unit_bytes[leaf] * volume
        _, rows = self.rows(leaf, cell)
        step = np.where(size > grain, size // rows, size)
        low = begun + (offset - begun) // step * step
        return low, np.where(low == offset, low, low + step)

    def regions(self, cell: int, start: int, stop: int) -> Iterator[Region]:
        """The regions between two offsets that `cuts` gave, by leaf.

        Args:
            cell: position in `cells`.
            start: bytes from the beginning of the cell.
            stop: bytes from the beginning of the cell.
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
