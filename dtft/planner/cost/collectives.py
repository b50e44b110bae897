"""Seconds of a collective on mesh axes, its sync skew, and how much of it is hidden.

The formulas count the latency of hops and the bytes through ports (`Curve`), for each
algorithm of `dtft.collectives` and for hierarchical algorithms over the levels of the
fabric. `num_bytes` is the size of a collective: the bytes of the larger of a device's
operand and its result. `hops` are the levels of the fabric over which the devices of
the collective communicate, innermost first. A collective is hidden while the devices
compute at the same time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from dtft.planner.cluster import CollectiveKind, Curve, Link
from dtft.planner.cost.mesh_topology import DeviceGroup, DeviceGroups

# A ring or tree that spans hosts uses the ports of all its members on a host, as
# in the backends.


Algorithm = Literal["best", "ring", "tree", "gather", "hierarchical", "direct"]


def collective_s(
    kind: CollectiveKind,
    num_bytes: Any,
    group: DeviceGroup,
    algorithm: Algorithm = "best",
) -> Any:
    """Computes the seconds of one collective among all devices of a group.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute (a shift by
            one).
        num_bytes: bytes of the larger of a device's operand and its result; a number or
            an array.
        group: the devices that communicate, such as a result of `group_of`.
        algorithm: `ring` is for all_reduce, all_gather and reduce_scatter; `tree` and
            `gather` are for all_reduce; `direct` is for all_to_all and permute;
            `hierarchical` is for all kinds but permute. `best` is the fastest algorithm
            of the kind. But if the group lies on one level, and its link has measured
            times of the kind, `best` is `ring`, or `direct` for kinds without `ring`.

    Returns:
        Seconds, in the shape of `num_bytes`; 0 for one device or no bytes.

    Raises:
        ValueError: the kind is unknown, or the kind has no such algorithm.

    The examples are in microseconds. Sending 1e6 bytes takes 1000, a hop 1. A ring of 4
    sends 3/4 of the bytes twice in 6 hops; a tree sends all bytes twice in 4 hops.

    >>> from dtft.planner.cluster.hardware import Curve
    >>> port = Curve(latency_s=1e-6, bandwidth=1e9)
    >>> link = Link(kind="NVLink", curve=port, source="")
    >>> group = DeviceGroup(sizes=(4,), links=(link,))
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
    many = np.ndim(num_bytes) > 0
    if not group.sizes:
        return np.zeros(np.shape(num_bytes)) if many else 0.0
    hops = _hops(kind, group)
    native = len(hops) == 1 and kind in group.links[0].measured
    if algorithm != "best":
        chosen = [ways[algorithm]]
    else:  # measured times include the backend's own choice of algorithm
        chosen = list(ways.values())[: 1 if native else None]
    sizes = np.asarray(num_bytes, float) if many else num_bytes
    times = [way(kind, sizes, hops) for way in chosen]
    if not many:
        return float(min(times)) if num_bytes > 0 else 0.0
    fastest = np.minimum.reduce(np.broadcast_arrays(*times))
    return np.where(sizes > 0, fastest, 0.0)


def collectives_s(
    kind: CollectiveKind, num_bytes: np.ndarray, groups: DeviceGroups, which: np.ndarray
) -> np.ndarray:
    """Computes the seconds of many collectives of one kind, as `collective_s` does.

    Args:
        kind: the kind of collective.
        num_bytes: bytes of the larger of a device's operand and its result, for each
            collective; [..., collectives].
        groups: the device groups.
        which: index of each collective's group in `groups`; int [collectives].

    Returns:
        Seconds, in the shape of `num_bytes`.
    """
    seconds = np.zeros(num_bytes.shape)
    alike, used = groups.alike(kind)[which], groups.sizes > 1
    for number in np.flatnonzero(np.bincount(alike)):
        rows = np.flatnonzero(alike == number)
        found = which[rows]
        levels = np.flatnonzero(used[found[0]]).tolist()
        sizes: list[Any] = [groups.sizes[found, level] for level in levels]
        group = DeviceGroup(
            sizes=tuple(float(n[0]) if (n == n[0]).all() else n for n in sizes),
            links=tuple(groups.links[level] for level in levels),
        )
        seconds[..., rows] = collective_s(kind, num_bytes[..., rows], group)
    return seconds


def links_at_peak_s(
    kind: CollectiveKind, num_bytes: float, group: DeviceGroup
) -> tuple[float, ...]:
    """Computes the seconds that one collective keeps the links of each level busy.

    The seconds are those at the links' peak: without latency, and with the bandwidth
    that large messages reach. The largest of them is a lower bound for all algorithms
    of `collective_s`. A part of a level is the devices that the level below joins.

    * Gathers and reductions send level by level: if a part has n devices, each of them
      sends 1 / n of the bytes. On a torus, all dimensions are busy for equally many
      seconds.
    * An all-to-all sends through a level only the bytes for other parts.
    * In a permute, one device of each part sends all its bytes to another part.

    Args:
        kind: the kind of collective.
        num_bytes: bytes of the larger of a device's operand and its result.
        group: the devices that communicate.

    Returns:
        Seconds for each level of the group, innermost first.

    In the examples, the ports have 8e6 and 1e6 bytes per second. The all-gather sends
    3/4 of 32e6 bytes through the inner level, and 1/2 of 8e6 bytes through the outer
    level. The all-to-all sends 3/8 and 4/8 of 32e6 bytes: a device has 3 of the other
    devices in its part of the outer level, and 4 in the other part.

    >>> from dtft.planner.cluster.hardware import Curve
    >>> ports = [Curve(latency_s=1.0, bandwidth=n * 1e6) for n in (8, 1)]
    >>> links = tuple(Link(kind="NVLink", curve=port, source="") for port in ports)
    >>> group = DeviceGroup(sizes=(4, 2), links=links)
    >>> links_at_peak_s("all_gather", 32e6, group)
    (3.0, 4.0)
    >>> links_at_peak_s("all_to_all", 32e6, group)
    (1.5, 16.0)
    """
    hops = [
        replace(hop, curve=replace(hop.curve, latency_s=0.0, half_bytes=0.0))
        for hop in _hops(kind, group)
    ]
    if kind == "permute":
        found = [hop.seconds(num_bytes, alone=True) for hop in hops]
    elif kind == "all_to_all":
        n = _members(hops)
        found = [
            (hop.size - 1) * hop.inner / n * _passed(hop) * hop.seconds(num_bytes)
            for hop in hops
        ]
    elif _paths(hops) > 1:
        found = [_hierarchical(kind, num_bytes, hops)] * len(hops)
    else:
        found = [
            _rounds(kind)
            * (hop.size - 1)
            / hop.size
            * hop.seconds(num_bytes / hop.inner)
            for hop in hops
        ]
    return tuple(map(float, found))


@dataclass(frozen=True, kw_only=True)
class _Hop:
    """One level of the fabric inside a device group.

    The numbers are arrays if groups of several sizes are computed together.
    """

    size: Any
    """The number of devices of the group that the level joins; above the innermost
    level, the number of parts (each part is the devices joined by the level below)."""
    inner: Any
    """The number of devices of the group in each part; 1 on the innermost level."""
    link: Link
    curve: Curve

    def seconds(self, num_bytes: Any, senders: float = 1.0, alone: bool = False) -> Any:
        """Computes the seconds to send bytes through the ports of the sending devices.

        Latency is left out. A part is the devices that the level below joins.

        Args:
            num_bytes: bytes that `senders` devices send together, in equal shares.
            senders: the number of devices among which the bytes are divided; with 1,
                each of the sending devices sends all of them.
            alone: whether only one device of each part sends. It then shares its port
                with devices of other parts only. Otherwise all devices that share a
                port send at once.
        """
        sharing = self.link.shared_by
        if alone:
            sharing = sharing / np.minimum(sharing, self.inner)
        sent = num_bytes / senders + self.curve.half_bytes
        return sent * sharing / self.curve.bandwidth


_Hops = Sequence[_Hop]


def _hops(kind: CollectiveKind, group: DeviceGroup) -> _Hops:
    levels = zip(group.sizes, group.inner, group.links, strict=True)
    return [
        _Hop(size=size, inner=inner, link=link, curve=link.curve_of(kind, size))
        for size, inner, link in levels
    ]


def _members(hops: _Hops) -> Any:
    return np.round(hops[-1].size * hops[-1].inner)


def _alpha(hops: _Hops) -> float:
    """Returns the largest latency of the levels, in seconds; each message takes it."""
    return max(hop.curve.latency_s for hop in hops)


def _most(times: list[Any]) -> Any:
    """Returns the longest of several times; of arrays, the longest at each position."""
    if any(isinstance(time, np.ndarray) for time in times):
        return np.maximum.reduce(np.broadcast_arrays(*times))
    return max(times)


def _slowest(num_bytes: Any, hops: _Hops) -> Any:
    """Computes the seconds to send bytes through all levels at once.

    The result is the seconds of the slowest level, without latency. A part of a level
    is the devices that the level below joins. On each level, each part sends
    `num_bytes`, and each device of the part sends an equal share of them.
    """
    return _most([hop.seconds(num_bytes, hop.inner) for hop in hops])


def _rounds(kind: CollectiveKind) -> int:
    return 2 if kind == "all_reduce" else 1


def _ring(kind: CollectiveKind, num_bytes: Any, hops: _Hops) -> Any:
    n = _members(hops)
    sent = (n - 1) / n * _slowest(num_bytes, hops)
    return _rounds(kind) * ((n - 1) * _alpha(hops) + sent)


def _tree(kind: CollectiveKind, num_bytes: Any, hops: _Hops) -> Any:
    latency = sum(np.log2(hop.size) * hop.curve.latency_s for hop in hops)
    return _rounds(kind) * (latency + _slowest(num_bytes, hops))


def _gather(kind: CollectiveKind, num_bytes: Any, hops: _Hops) -> Any:
    """Computes the seconds to gather arrays on one device and to broadcast their sum.

    The formula is 2 alpha + 2 n S / B, where each of n devices has S bytes
    (`num_bytes`). Alpha is the largest latency of the levels. B is the bandwidth of the
    port of the device that gathers. On each level, n is the number of devices that this
    level and the levels below join. The level that takes longest counts.
    """
    sent = [
        np.round(hop.size * hop.inner) * hop.seconds(num_bytes, alone=True)
        for hop in hops
    ]
    return _rounds(kind) * (_alpha(hops) + _most(sent))


def _hierarchical(kind: CollectiveKind, num_bytes: Any, hops: _Hops) -> Any:
    """Computes the seconds if devices communicate level by level, innermost first.

    The result is the sum over the levels. If the levels below a level join n devices,
    each of the n devices sends 1 / n of the bytes on this level.

    On a torus each dimension is a level. The array is split into as many pieces as
    there are dimensions. All pieces are sent at once, each along another dimension
    first.
    """
    seconds: Any = 0.0
    for hop in hops:
        sent = hop.seconds(num_bytes / hop.inner) / _paths(hops)
        latency = (hop.size - 1) * hop.curve.latency_s
        seconds = seconds + latency + (hop.size - 1) / hop.size * sent
    return _rounds(kind) * seconds


def _paths(hops: _Hops) -> int:
    """Returns the number of pieces of an array that are sent along levels at once.

    This is the number of dimensions on a torus (ICI), where each piece is sent along
    another dimension, and 1 on other fabrics.
    """
    return len(hops) if all(hop.link.kind == "ICI" for hop in hops) else 1


def _passed(hop: _Hop) -> Any:
    """Returns the number of links that a byte of an all-to-all passes on average.

    This is n / 4, but at least 1, on a torus dimension (ICI) of n devices, and 1 on
    other links.
    """
    return np.maximum(1.0, hop.size / 4) if hop.link.kind == "ICI" else 1.0


def _direct(_: CollectiveKind, num_bytes: Any, hops: _Hops) -> Any:
    """Computes the seconds of an all-to-all: each device sends to all other devices.

    All levels send at once; the slowest level counts.
    """
    n = _members(hops)
    sent = [(n - h.inner) / n * _passed(h) * h.seconds(num_bytes) for h in hops]
    return (n - 1) * _alpha(hops) + _most(sent)


def _staged(_: CollectiveKind, num_bytes: Any, hops: _Hops) -> Any:
    """Computes the seconds of an all-to-all on one level after the other.

    On a level that joins n parts, each device sends (n - 1) / n of its bytes, in n - 1
    messages. All levels together have fewer messages than `_direct`, but more bytes.
    """
    seconds: Any = 0.0
    for hop in hops:
        sent = (hop.size - 1) / hop.size * _passed(hop) * hop.seconds(num_bytes)
        seconds = seconds + (hop.size - 1) * hop.curve.latency_s + sent
    return seconds


def _shift(_: CollectiveKind, num_bytes: Any, hops: _Hops) -> Any:
    """Computes the seconds of a shift: each device sends to the next device.

    A part of a level is the devices that the level below joins. On each level, one
    device of each part sends all its bytes to the next part. The level that takes
    longest counts.
    """
    return _most(
        [hop.curve.latency_s + hop.seconds(num_bytes, alone=True) for hop in hops]
    )


_Way = Callable[[CollectiveKind, Any, _Hops], Any]

_WAYS: Mapping[CollectiveKind, Mapping[str, _Way]] = {
    "all_reduce": {
        "ring": _ring, "tree": _tree, "gather": _gather, "hierarchical": _hierarchical
    },
    "all_gather": {"ring": _ring, "hierarchical": _hierarchical},
    "reduce_scatter": {"ring": _ring, "hierarchical": _hierarchical},
    "all_to_all": {"direct": _direct, "hierarchical": _staged},
    "permute": {"direct": _shift},
}  # fmt: skip
"""Map from a kind of collective to its algorithms by name. The backends of
`dtft.collectives` use the first by default."""


# Sync skew and prefetch overlap of collectives. Calibration measures collectives back
# to back: only the first collective waits for its participants. In a training step
# participants arrive at different times, most of all where processes share cores, and
# a waiting thread must be woken. `Link.meeting` is this extra latency. A device also
# computes during a collective that waits for no other operator. `Link.ahead` is the
# share of the collective that this computation hides. Links have both figures only
# where measurements showed an effect.


def sync_skew_s(group: DeviceGroup) -> float:
    """Returns the sync skew of a group in seconds: the largest of its levels' links.

    The sync skew is the wait until all devices of the group enter a collective. It is 0
    for one device.

    Args:
        group: the devices that communicate, such as a result of `group_of`.
    """
    return _largest_sync_skew(group.sizes, group.links)


def sync_skews_s(groups: DeviceGroups) -> np.ndarray:
    """Computes the sync skew (`sync_skew_s`) of many groups of devices.

    The sync skew is the wait until all devices of a group enter a collective.

    Args:
        groups: the groups; a group of one device, which uses no level, has 0 s.

    Returns:
        Seconds; float [groups].
    """
    if not any(link.meeting for link in groups.links):
        return np.zeros(len(groups.sizes))
    return np.array(
        [_largest_sync_skew(sizes, groups.links) for sizes in groups.sizes.tolist()]
    )


def hidden(group: DeviceGroup) -> float:
    """Returns the share (0 to 1) of a prefetched gather's seconds that is hidden.

    A prefetched gather waits for no computation, so computation can hide it. Each link
    has a measured share (`Link.ahead`). The result is the smallest share of the links
    of the group's levels, and 0 for one device.

    Args:
        group: the devices that communicate, such as a result of `group_of`.
    """
    return _least(group.sizes, group.links)


def hiddens(groups: DeviceGroups) -> np.ndarray:
    """Computes `hidden` for many groups; float [groups].

    This is the share (0 to 1) of a prefetched gather that computation hides.
    """
    if not any(link.ahead for link in groups.links):
        return np.zeros(len(groups.sizes))
    return np.array([_least(sizes, groups.links) for sizes in groups.sizes.tolist()])


def _largest_sync_skew(sizes: Sequence[float], links: Sequence[Link]) -> float:
    each = (link.sync_skew_s(size) for size, link in zip(sizes, links, strict=True))
    return max(each, default=0.0)


def _least(sizes: Sequence[float], links: Sequence[Link]) -> float:
    used = [(n, link) for n, link in zip(sizes, links, strict=True) if n > 1]
    return min((link.hidden(n) for n, link in used), default=0.0)
