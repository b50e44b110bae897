"""How the devices along mesh axes lie on the levels of a pool, for one mesh or many.

Pure. Must not know what communication between them costs (`collective_cost`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dtft.planner.cluster import Pool
from dtft.planner.links import CollectiveKind, Link


@dataclass(frozen=True, kw_only=True)
class Group:
    """How the devices that communicate lie on the levels of a pool."""

    sizes: tuple[float, ...]
    """Members per group of the level, innermost first; all above 1. A fraction where
    members do not fill the groups evenly (3 devices on hosts of 2)."""
    links: tuple[Link, ...]

    @property
    def num_devices(self) -> int:
        """Members."""
        return round(math.prod(self.sizes))

    @property
    def inner(self) -> tuple[float, ...]:
        """For each level the members that lie within one of its groups' parts."""
        return tuple(math.prod(self.sizes[:level]) for level in range(len(self.sizes)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Many groups, each as a `Group`."""

    sizes: np.ndarray
    """Members per group of each level, innermost first, 1 on a level that a group does
    not use; float [groups, levels]."""
    links: tuple[Link, ...]
    """Of each level."""

    def alike(self, kind: CollectiveKind) -> np.ndarray:
        """A number for each group; those of one number use the same levels.

        Where a link has curves of a kind of collective by the number of devices, they
        have the same size there too.
        """
        measured = tuple(kind in link.measured for link in self.links)
        if measured not in self._alike:
            self._alike[measured] = self._numbered(measured)
        return self._alike[measured]

    @cached_property
    def _alike(self) -> dict[tuple[bool, ...], np.ndarray]:
        return {}

    def _numbered(self, measured: tuple[bool, ...]) -> np.ndarray:
        keys = np.where(measured, self.sizes, self.sizes > 1)
        keys = np.pad(keys, ((0, 0), (0, 1)))  # a pool of one device has no levels
        return np.unique(keys, axis=0, return_inverse=True)[1].ravel()


def group_of(pool: Pool, mesh: Mapping[str, int], axes: Sequence[str] | str) -> Group:
    """The devices that communicate along mesh axes, taken as one.

    Args:
        pool: its devices are numbered with the innermost level fastest.
        mesh: axis to size, slowest-varying first; filled with the first devices.
        axes: which of them communicate; those of size 1 add nothing.

    Returns:
        The group that reaches farthest out, where groups differ.

    Raises:
        ValueError: an axis that the mesh does not have, or a mesh larger than the pool.
    """
    named = (axes,) if isinstance(axes, str) else tuple(axes)
    if unknown := [axis for axis in named if axis not in mesh]:
        raise ValueError(
            f"axes={named}: the mesh has no {', '.join(unknown)}. Allowed: "
            f"{', '.join(mesh)}."
        )
    if math.prod(mesh.values()) > pool.num_devices:
        raise ValueError(
            f"mesh={dict(mesh)} has {math.prod(mesh.values())} devices, the pool "
            f"{pool.words} has {pool.num_devices}. Make the mesh smaller."
        )
    levels = tuple(level.size for level in pool.levels)
    chosen = tuple(axis in named for axis in mesh)
    sizes = _sizes(levels, tuple(mesh.values()), chosen)
    used = [level for level, size in enumerate(sizes) if size > 1]
    return Group(
        sizes=tuple(sizes[level] for level in used),
        links=tuple(pool.levels[level].link for level in used),
    )


def members(
    levels: Sequence[int], sizes: np.ndarray, chosen: Sequence[bool]
) -> np.ndarray:
    """Members per level of the groups along some axes of many meshes: see `group_of`.

    Args:
        levels: what each level of the pool joins, innermost first.
        sizes: of the axes, slowest-varying first; int [meshes, axes].
        chosen: which axes communicate.

    Returns:
        float [meshes, levels].

    >>> members((8, 512), np.array([[4, 16], [16, 4]]), (False, True))
    array([[8., 2.],
           [4., 1.]])
    """
    bounds = np.cumprod([1, *levels], dtype=np.int64)
    starts = np.ones_like(sizes)
    starts[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    ends = starts * sizes
    found = np.ones((len(sizes), len(levels)))
    uneven = np.zeros(len(sizes), bool)
    for place in np.flatnonzero(chosen):
        start, end = starts[:, place], ends[:, place]
        for level, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            part = np.minimum(end, high) / np.maximum(start, low)
            found[:, level] *= np.maximum(1.0, part)
        for bound in bounds[1:-1]:
            inside = (bound % start == 0) & (end % bound == 0)
            outer = np.where(bound >= end, bound % end == 0, inside)
            fits = np.where(bound <= start, start % bound == 0, outer)
            uneven |= ~fits & (end > start)
    marked = tuple(map(bool, chosen))
    for row in np.flatnonzero(uneven):
        found[row] = _sizes(tuple(levels), tuple(sizes[row].tolist()), marked)
    return found


@lru_cache(maxsize=65536)
def _sizes(
    levels: tuple[int, ...], mesh: tuple[int, ...], chosen: tuple[bool, ...]
) -> tuple[float, ...]:
    """Members per level; see `group_of`."""
    bounds = [math.prod(levels[:level]) for level in range(len(levels) + 1)]
    sizes = [1.0] * len(levels)
    stride = 1
    for size, is_chosen in zip(reversed(mesh), reversed(chosen), strict=True):
        if is_chosen and size > 1:
            if not _aligned(bounds[1:-1], stride, stride * size):
                return _counted(bounds, mesh, chosen)
            for level in range(len(levels)):
                low = max(stride, bounds[level])
                high = min(stride * size, bounds[level + 1])
                sizes[level] *= max(1, high / low)
        stride *= size
    return tuple(sizes)


def _aligned(bounds: Sequence[int], start: int, end: int) -> bool:
    """Whether an axis from stride `start` to `end` fills every group it enters."""
    return all(
        start % bound == 0
        if bound <= start
        else bound % end == 0
        if bound >= end
        else bound % start == 0 and end % bound == 0
        for bound in bounds
    )


def _counted(
    bounds: Sequence[int], mesh: tuple[int, ...], chosen: tuple[bool, ...]
) -> tuple[float, ...]:
    """The same by counting, for axes that do not fill groups evenly."""
    order = [*np.flatnonzero(~np.array(chosen)), *np.flatnonzero(chosen)]
    members = math.prod(
        size for size, is_chosen in zip(mesh, chosen, strict=True) if is_chosen
    )
    numbers = np.arange(math.prod(mesh)).reshape(mesh).transpose(order)
    groups = numbers.reshape(-1, members)

    def parts(bound: int) -> np.ndarray:
        found = np.sort(groups // bound, axis=1)
        return 1 + (np.diff(found, axis=1) > 0).sum(axis=1)

    counts = np.stack([parts(bound) for bound in bounds])  # [level, group], outer last
    worst = np.lexsort(counts)[-1]  # by the outermost level first
    found = counts[:, worst]
    # A mesh that leaves devices out ends within a group of the outermost level.
    return tuple(float(low / high) for low, high in zip(found, found[1:], strict=False))
