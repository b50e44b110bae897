"""Places mesh axes on the fabric of a pool, and finds axis orders that may be fastest.

An axis order says which mesh axis varies slowest over the devices, which next, and so
on. `undominated_orders` keeps the orders that may be the fastest.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dtft.planner.cluster import CollectiveKind, Link, Pool

# Placement of devices along mesh axes on the levels of a pool, for one mesh or many.


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """The devices that run a collective together, on the levels of a pool's fabric.

    A level is used if it joins several of these devices, or groups of them. The object
    says how many devices or groups each used level joins, not which devices.
    """

    sizes: tuple[float, ...]
    """The number of parts that each used level joins, innermost first; all above 1. The
    parts of the innermost used level are devices. The parts of the other levels are the
    groups of the used level below. The number is a fraction if the devices do not fill
    the groups evenly (3 devices on hosts of 2)."""
    links: tuple[Link, ...]
    """Link of each used level."""

    @property
    def num_devices(self) -> int:
        """The number of devices that communicate."""
        return round(math.prod(self.sizes))

    @property
    def inner(self) -> tuple[float, ...]:
        """The number of the group's devices in each part that a used level joins.

        There is one number for each used level, innermost first. The parts of the
        innermost level are single devices, so its number is 1. A part of another level
        is a group of the used level below.
        """
        return tuple(math.prod(self.sizes[:level]) for level in range(len(self.sizes)))


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceGroups:
    """Many device groups (`DeviceGroup`) as arrays, with one entry per group."""

    sizes: np.ndarray
    """The number of parts that each level joins (`DeviceGroup.sizes`), innermost first;
    float [groups, levels]. The number is 1 on a level that the group does not use."""
    links: tuple[Link, ...]
    """Link of each level."""

    def alike(self, kind: CollectiveKind) -> np.ndarray:
        """Numbers the groups; equal numbers mean the same levels and transfer times.

        The seconds of groups with equal numbers can be computed together: they use the
        same levels. On a level whose link has measured curves of this kind of
        collective, they also have the same size. The result is int [groups].
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


def group_of(
    pool: Pool, mesh: Mapping[str, int], axes: Sequence[str] | str
) -> DeviceGroup:
    """Returns the group of devices that communicate along one or several mesh axes.

    Args:
        pool: the devices. Device numbers run through the innermost level first: the
            devices of an innermost group have consecutive numbers.
        mesh: map from axis to size, slowest-varying first; the mesh takes the first
            devices of the pool.
        axes: the mesh axes of the collective; an axis of size 1 adds nothing.

    Returns:
        The group. If the groups along the axes differ, returns the group whose
        `DeviceGroup.sizes` has the largest number at the outermost level; if these are
        equal, at the next level, and so on.

    Raises:
        ValueError: the mesh lacks an axis, or is larger than the pool.
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
    used = levels_used(pool, mesh, named)
    return DeviceGroup(
        sizes=tuple(sizes[level] for level in used),
        links=tuple(pool.levels[level].link for level in used),
    )


def levels_used(
    pool: Pool, mesh: Mapping[str, int], axes: Sequence[str]
) -> tuple[int, ...]:
    """Returns the levels of a pool over which a collective communicates.

    These are the levels of the group that `group_of` returns. Levels are given by their
    position in `Pool.levels`, innermost first.

    Args:
        pool: the devices.
        mesh: map from axis to size, slowest-varying first.
        axes: the mesh axes of the collective.
    """
    levels = tuple(level.size for level in pool.levels)
    sizes = _sizes(levels, tuple(mesh.values()), tuple(axis in axes for axis in mesh))
    return tuple(level for level, size in enumerate(sizes) if size > 1)


def members(
    levels: Sequence[int], sizes: np.ndarray, chosen: Sequence[bool]
) -> np.ndarray:
    """Counts the parts that each level joins in a collective's group, on many meshes.

    A group is the devices that run the collective together. The parts of the innermost
    level are devices; the parts of any other level are sets of devices that the level
    below joins. The number is 1 on a level that joins no devices of the group.

    Args:
        levels: the number of devices or groups that each level joins, innermost first.
        sizes: sizes of the axes, slowest-varying first; int [meshes, axes].
        chosen: whether each axis takes part in the collective.

    Returns:
        The number of parts that each level joins; float [meshes, levels].

    In the example, the 16 devices of a collective on the first mesh are in two groups
    of 8. The 4 devices on the second mesh are in one group.

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
    """Counts the parts that each level joins in a collective's group, on one mesh.

    `members` does the same for many meshes, and says what a part is. The number is a
    mean if it differs between the sets of devices that a level joins.

    Args:
        levels: the number of devices or groups that each level joins, innermost first.
        mesh: sizes of the axes, slowest-varying first.
        chosen: whether each axis takes part in the collective.
    """
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
    """Whether an axis divides evenly over the groups of each level, such as hosts.

    This is so if all positions along the axis are in one group, or each in another
    group, or equally many in each of several groups.

    Args:
        bounds: the number of devices in a group of each level.
        start: the distance of neighbors along the axis, in device numbers.
        end: `start` times the size of the axis.
    """
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
    """Counts the parts that each level joins, on a mesh whose axes fill hosts unevenly.

    `members` counts them for other meshes, and says what a part is. A group here is the
    devices that a level of the fabric joins, such as a host. For each set of devices
    that run the collective together, counts on each level the groups that have some of
    these devices. Uses the set that is in the most groups on the outermost level; of
    equal sets, the one in the most groups on the next level.

    Args:
        bounds: 1, then the number of devices in a group of each level, innermost first.
        mesh: sizes of the axes, slowest-varying first.
        chosen: whether each axis takes part in the collective.

    Returns:
        For each level, innermost first, the mean number of parts in a group of the
        level; it may be a fraction. Only parts (devices, or groups of the level below)
        and groups with devices of the set count.
    """
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
    # A mesh smaller than the pool ends within a group of the outermost level.
    return tuple(float(low / high) for low, high in zip(found, found[1:], strict=False))


# Orders of mesh axes on the fabric. The order decides how much of each axis stays
# inside a host or a rack. Orders that another order dominates are dropped.


@dataclass(frozen=True, kw_only=True, eq=False)
class Orders:
    """Axis orders of several meshes: pairs of a mesh and an order, as parallel arrays.

    An order says which axis varies slowest over the devices, which next, and so on.
    """

    mesh: np.ndarray
    """For each order, the index of its mesh, ascending; int [orders]."""
    order: np.ndarray
    """For each order, its index in `named`; int [orders]."""
    named: tuple[tuple[str, ...], ...]
    """The distinct orders: axes larger than 1, slowest-varying (outermost) first."""


def extents(
    sizes: np.ndarray, strides: np.ndarray, capacity: int, used: np.ndarray
) -> np.ndarray:
    """Computes each axis's extent: how many devices along the axis share a group.

    The extent is the largest divisor m of the axis size so that, if the axis is cut
    into runs of m devices, each run lies inside one group of the fabric. If one group
    holds the mesh, m is the axis size. Otherwise m is the largest divisor of the axis
    size so that m * stride divides the number of devices in the group, or 1 if there is
    none.

    Args:
        sizes: sizes of the axes.
        strides: distance of neighbors along each axis, in devices.
        capacity: the number of devices in a group, such as a host.
        used: the number of devices of the whole mesh.

    In the example, the first axis has extent 2: 2 * 2 divides the 8 devices of a group,
    but 3 * 2 and 6 * 2 do not.

    >>> extents(np.array([6, 2]), np.array([2, 1]), 8, np.array(12))
    array([2, 2])
    """
    inside = np.gcd(sizes, capacity // strides)
    aligned = np.where(capacity % strides == 0, inside, 1)
    return np.where(used <= capacity, sizes, aligned)


def undominated_orders(
    axes: Sequence[str],
    sizes: np.ndarray,
    levels: Sequence[int],
    before: Sequence[str] = (),
) -> Orders:
    """Finds for each mesh the axis orders that may be the fastest.

    The extent of an axis at a level is the number of its devices that share a group of
    the level (`extents`); their traffic stays on the links inside the group. An order
    dominates another order if no axis has a smaller extent at any level, and some axis
    has a larger one. Orders that another order dominates are dropped. Of orders with
    equal extents, only the first in lexicographic order is kept (by the axes' positions
    in `axes`). No faster order is lost, provided that the seconds depend only on the
    extents, and that a smaller extent never makes them shorter.

    Args:
        axes: axis names in the usual order, slowest-varying first.
        sizes: sizes of the axes of each mesh; int [meshes, axes].
        levels: the number of devices, then groups, that each level of the fabric joins,
            innermost first; the last level joins all remaining groups.
        before: axes that must keep this order, slowest-varying first; other axes may
            lie between them.

    In the example, neither of the two orders dominates the other one.

    >>> found = undominated_orders(("fsdp", "tensor"), np.array([[4, 2]]), (2, 4))
    >>> [found.named[at] for at in found.order]
    [('fsdp', 'tensor'), ('tensor', 'fsdp')]
    """
    capacities = np.cumprod(levels[:-1], dtype=np.int64)
    wanted = [list(axes).index(axis) for axis in before]
    meshes, orders = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    named: list[tuple[str, ...]] = []
    weights = 1 << np.arange(len(axes))
    patterns = (sizes > 1) @ weights
    for pattern in np.unique(patterns).tolist():
        active = [at for at in range(len(axes)) if pattern & weights[at]]
        ways = [
            way
            for way in itertools.permutations(range(len(active)))
            if _follows([active[at] for at in way], wanted)
        ]
        rows = np.flatnonzero(patterns == pattern)
        keep = _undominated(sizes[rows][:, active], np.array(ways, int), capacities)
        row, way = np.nonzero(keep)
        meshes.append(rows[row])
        orders.append(len(named) + way)
        named += [tuple(axes[active[at]] for at in way) for way in ways]
    mesh, order = np.concatenate(meshes), np.concatenate(orders)
    by_mesh = np.argsort(mesh, kind="stable")
    used, order = np.unique(order[by_mesh], return_inverse=True)
    return Orders(
        mesh=mesh[by_mesh], order=order, named=tuple(named[at] for at in used)
    )


def _follows(axes: list[int], wanted: list[int]) -> bool:
    return [at for at in axes if at in wanted] == [at for at in wanted if at in axes]


def _undominated(
    sizes: np.ndarray, ways: np.ndarray, capacities: np.ndarray
) -> np.ndarray:
    """Finds for each mesh the orders that no other order dominates.

    An order dominates another order if no axis has a smaller extent (`extents`) at any
    level and at least one axis has a larger extent. Of orders with equal extents only
    the first is kept.

    Args:
        sizes: sizes of the axes larger than 1, of meshes in which the same axes are
            larger than 1; int [meshes, axes].
        ways: the orders, each a permutation of the axes' indices; int [ways, axes].
        capacities: the number of devices in a group of each level but the last.

    Returns:
        Whether an order is kept; bool [meshes, ways].
    """
    used = sizes.prod(axis=1)
    keep = np.zeros((len(sizes), len(ways)), bool)
    if ways.shape[1] < 2 or not len(capacities):
        keep[:, :1] = True
        return keep
    ordered = sizes[:, ways]  # [meshes, ways, places]
    strides = np.ones_like(ordered)
    strides[..., :-1] = np.cumprod(ordered[..., :0:-1], axis=-1)[..., ::-1]
    place = np.argsort(ways, axis=1)[np.newaxis]
    parts = [
        np.take_along_axis(
            extents(ordered, strides, int(capacity), used[:, None, None]), place, axis=2
        )
        for capacity in capacities
    ]
    inside = np.stack(parts, axis=2)  # [meshes, ways, levels, axes]
    keep = _first_of_equals(inside.reshape(*keep.shape, -1))
    full = np.minimum(capacities, used[:, None])  # what extents multiply to if exact
    loose = (inside.prod(axis=3) < full[:, None]).any(axis=2)
    # If all axes fill the levels exactly, a larger extent of one axis means a smaller
    # extent of another axis: no order dominates.
    for row in np.flatnonzero((loose & keep).any(axis=1)):
        kept = np.flatnonzero(keep[row])
        keep[row, kept] = _maximal(inside[row, kept].reshape(len(kept), -1))
    return keep


def _first_of_equals(features: np.ndarray) -> np.ndarray:
    """Finds in each row the entries that differ from all earlier entries of the row.

    Args:
        features: non-negative integers; [rows, entries, features].

    Returns:
        Whether an entry differs from all earlier ones; bool [rows, entries].
    """
    base = int(features.max(initial=0)) + 1
    keys = np.zeros(features.shape[:2], np.int64)
    bound = 1
    for column in np.moveaxis(features, 2, 0):
        if bound * base >= 2**62:
            keys = np.unique(keys, return_inverse=True)[1].reshape(keys.shape)
            bound = int(keys.max(initial=0)) + 1
        keys = keys * base + column
        bound *= base
    order = np.argsort(keys, axis=1, kind="stable")
    ranked = np.take_along_axis(keys, order, axis=1)
    first = np.ones(keys.shape, bool)
    first[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    result = np.zeros(keys.shape, bool)
    np.put_along_axis(result, order, first, axis=1)
    return result


def _maximal(features: np.ndarray) -> np.ndarray:
    """Finds the rows that no other row equals or exceeds in every column.

    Args:
        features: distinct rows; [rows, features].

    Returns:
        True for each row that no other row equals or exceeds in every column; bool
        [rows].
    """
    as_large = (features[:, None] >= features[None]).all(axis=2)  # [a, b]: a as b
    return as_large.sum(axis=0) == 1
