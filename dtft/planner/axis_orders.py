"""In which orders mesh axes can lie on the fabric, without those that cannot be better.

A mesh of given sizes can be laid on the devices in many orders; what an order decides
is how much of each axis stays inside a host, a rack, and so on. Decides which orders
are worth a candidate; must not know costs, beyond that inner links are never slower.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Orders:
    """Orders of the axes of several meshes."""

    mesh: np.ndarray
    """For each order, the mesh that it is of; ascending."""
    order: np.ndarray
    """For each order, its position in `named`."""
    named: tuple[tuple[str, ...], ...]
    """Axes larger than one, slowest-varying (outermost on the fabric) first."""


def extents(
    sizes: np.ndarray, strides: np.ndarray, capacity: int, used: np.ndarray
) -> np.ndarray:
    """How many neighbors along an axis always lie in one group of the fabric.

    The largest part of the axis for which every run of that many devices, from a
    multiple of it on, is inside one group: all of it in a mesh that one group holds,
    and otherwise the largest m with m * stride a divisor of the group's devices.

    Args:
        sizes: of the axes.
        strides: how far apart neighbors along them are, in devices.
        capacity: devices in a group, such as a host.
        used: devices of the whole mesh.

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
    """The orders of each mesh that may be the best.

    One order dominates another if no axis has a smaller extent (`extents`) at any level
    and one has a larger; of orders with equal extents the first stays, in the order in
    which `axes` are given. Whoever prices a mesh by how its axes lie on the levels, and
    never cheaper for less of an axis inside, finds the same least price without them.

    Args:
        axes: names, in the usual order, slowest-varying first.
        sizes: of the axes of each mesh; [meshes, axes].
        levels: how many devices, then groups, each level of the fabric joins, innermost
            first; the last one joins all that is left.
        before: axes that have to lie in this order, slowest-varying first.

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
    """Which orders of which meshes stay; bool [meshes, ways]."""
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
    # Where all fill the levels exactly, more of one axis inside is less of another.
    for row in np.flatnonzero((loose & keep).any(axis=1)):
        kept = np.flatnonzero(keep[row])
        keep[row, kept] = _maximal(inside[row, kept].reshape(len(kept), -1))
    return keep


def _first_of_equals(features: np.ndarray) -> np.ndarray:
    """Which entries differ from all before them; bool [rows, entries].

    Args:
        features: non-negative integers; [rows, entries, features].
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
    """Which of several different rows are nowhere-larger than no other row."""
    as_large = (features[:, None] >= features[None]).all(axis=2)  # [a, b]: a as b
    return as_large.sum(axis=0) == 1
