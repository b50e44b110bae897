"""How long a collective takes among the devices along mesh axes.

Formulas of reference section 7, for each algorithm that `dtft.collectives` has and for
hierarchical ones, over the levels that the devices lie on. A ring (or tree) that spans
hosts uses the ports of all its members there, as backends do. Pure. Must not know
models, plans or overlap.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from dtft.planner.cluster import Pool
from dtft.planner.links import CollectiveKind, Link

Algorithm = Literal["best", "ring", "tree", "gather", "hierarchical", "direct"]


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


def collective_s(
    kind: CollectiveKind, num_bytes: Any, group: Group, algorithm: Algorithm = "best"
) -> Any:
    """Seconds of one collective in which every device of the group takes part.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute (a shift by
            one).
        num_bytes: of the larger of a device's operand and its result; a number or an
            array of them.
        group: of `group_of`.
        algorithm: `best` is the fastest of those that the kind has; tree and gather
            are only for all_reduce, `permute` has one way.

    Returns:
        Seconds, of the shape of `num_bytes`; 0 for one device or no bytes.

    Raises:
        ValueError: an unknown kind or algorithm, or one that the kind does not have.

    >>> from dtft.planner.links import Curve
    >>> port = Curve(latency_s=1e-6, bandwidth=1e9)
    >>> link = Link(kind="NVLink", curve=port, source="")
    >>> group = Group(sizes=(4,), links=(link,))
    >>> round(collective_s("all_reduce", 1e6, group, "ring") * 1e6)
    1506
    >>> round(collective_s("all_reduce", 1e6, group, "tree") * 1e6)
    2004
    """
    if kind not in get_args(CollectiveKind):
        raise ValueError(
            f"kind={kind!r} is no collective. Allowed: "
            f"{', '.join(get_args(CollectiveKind))}."
        )
    ways = _WAYS[kind]
    if algorithm not in (*ways, "best"):
        raise ValueError(
            f"algorithm={algorithm!r} of {kind} is unknown. Allowed: "
            f"{', '.join(ways)}, best."
        )
    if not group.sizes:
        return np.zeros_like(num_bytes, float) if np.ndim(num_bytes) else 0.0
    chosen = ways.values() if algorithm == "best" else [ways[algorithm]]
    times = [way(kind, num_bytes, group) for way in chosen]
    if not np.ndim(num_bytes):
        return float(min(times)) if num_bytes > 0 else 0.0
    return np.where(np.asarray(num_bytes) > 0, np.minimum.reduce(times), 0.0)


def _port(link: Link, kind: CollectiveKind, inner: float = 1.0) -> tuple[float, float]:
    """Bandwidth and half_bytes of the ports of `inner` devices, all in use."""
    curve = link.curve_of(kind)
    return curve.bandwidth * inner / link.shared_by, curve.half_bytes * inner


def _one_port(link: Link, kind: CollectiveKind, inner: float) -> tuple[float, float]:
    """The same where one of `inner` members sends, so others leave the port to it."""
    curve = link.curve_of(kind)
    return curve.bandwidth * min(
        link.shared_by, inner
    ) / link.shared_by, curve.half_bytes


def _slowest(kind: CollectiveKind, num_bytes: Any, group: Group) -> Any:
    """Seconds of num_bytes through each level at once."""
    times = []
    for link, inner in zip(group.links, group.inner, strict=True):
        bandwidth, half = _port(link, kind, inner)
        times.append((num_bytes + half) / bandwidth)
    return np.maximum.reduce(times) if len(times) > 1 else times[0]


def _alpha(kind: CollectiveKind, group: Group) -> float:
    """Latency of the slowest hop: the others wait for it in every round."""
    return max(link.curve_of(kind).latency_s for link in group.links)


def _rounds(kind: CollectiveKind) -> int:
    return 2 if kind == "all_reduce" else 1


def _ring(kind: CollectiveKind, num_bytes: Any, group: Group) -> Any:
    n = group.num_devices
    sent = (n - 1) / n * _slowest(kind, num_bytes, group)
    return _rounds(kind) * ((n - 1) * _alpha(kind, group) + sent)


def _tree(kind: CollectiveKind, num_bytes: Any, group: Group) -> Any:
    hops = sum(
        math.log2(size) * link.curve_of(kind).latency_s
        for size, link in zip(group.sizes, group.links, strict=True)
    )
    return 2 * (hops + _slowest(kind, num_bytes, group))


def _gather(kind: CollectiveKind, num_bytes: Any, group: Group) -> Any:
    """Everything to one device and back: 2 alpha + 2 n S / B of that device's port."""
    link, inner = group.links[-1], group.inner[-1]
    bandwidth, half = _one_port(link, kind, inner)
    sent = group.num_devices * (num_bytes + half) / bandwidth
    return 2 * (_alpha(kind, group) + sent)


def _hierarchical(kind: CollectiveKind, num_bytes: Any, group: Group) -> Any:
    """Level by level: inside groups, then between them on what is left.

    On a torus each dimension is such a level, and as many parts of the array go round
    at once, each beginning with another dimension.
    """
    seconds: Any = 0.0
    torus = all(link.kind == "ICI" for link in group.links)
    parts = len(group.links) if torus else 1
    for size, link, inner in zip(group.sizes, group.links, group.inner, strict=True):
        bandwidth, half = _port(link, kind)
        sent = (size - 1) / size * (num_bytes / inner + half) / bandwidth / parts
        seconds = seconds + (size - 1) * link.curve_of(kind).latency_s + sent
    return _rounds(kind) * seconds


def _direct(kind: CollectiveKind, num_bytes: Any, group: Group) -> Any:
    """All-to-all: each level carries what leaves its parts, all at once."""
    n = group.num_devices
    times = []
    for link, size, inner in zip(group.links, group.sizes, group.inner, strict=True):
        bandwidth, half = _port(link, kind)
        # What goes to members beyond the part of this level that the device is in. On
        # a ring of a torus it passes others: a quarter of the ring on the average.
        passed = max(1.0, size / 4) if link.kind == "ICI" else 1.0
        times.append((n - inner) / n * passed * (num_bytes + half) / bandwidth)
    worst = np.maximum.reduce(times) if len(times) > 1 else times[0]
    return (n - 1) * _alpha(kind, group) + worst


def _staged(kind: CollectiveKind, num_bytes: Any, group: Group) -> Any:
    """All-to-all inside groups, then between them: fewer messages, more bytes."""
    seconds: Any = 0.0
    for link, size in zip(group.links, group.sizes, strict=True):
        one = Group(sizes=(size,), links=(link,))
        seconds = seconds + _direct(kind, num_bytes, one)
    return seconds


def _shift(kind: CollectiveKind, num_bytes: Any, group: Group) -> Any:
    """Every device to its neighbour; one in each group of the level crosses it."""
    times = []
    for link, inner in zip(group.links, group.inner, strict=True):
        bandwidth, half = _one_port(link, kind, inner)
        sent = (num_bytes + half) / bandwidth
        times.append(link.curve_of(kind).latency_s + sent)
    return np.maximum.reduce(times) if len(times) > 1 else times[0]


_WAYS: Mapping[CollectiveKind, Mapping[str, Any]] = {
    "all_reduce": {
        "ring": _ring, "tree": _tree, "gather": _gather, "hierarchical": _hierarchical
    },
    "all_gather": {"ring": _ring, "hierarchical": _hierarchical},
    "reduce_scatter": {"ring": _ring, "hierarchical": _hierarchical},
    "all_to_all": {"direct": _direct, "hierarchical": _staged},
    "permute": {"direct": _shift},
}  # fmt: skip
