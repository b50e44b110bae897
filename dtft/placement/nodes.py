"""The devices of a cluster one by one, and how each reaches the others.

For every pair: seconds of an empty message, seconds of each byte, and which ports are
taken meanwhile. Two devices talk through the outermost level on which they differ
(`Level`), or through the link between pools.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dtft.planner.cluster import Cluster, DeviceType, Link, Pool

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Nodes:
    """What a placement has to know about nodes."""

    names: tuple[str, ...]
    memory_bytes: Floats
    """`[nodes]`"""
    empty_s: Floats
    """Seconds of an empty message, `[from, to]`; 0 from a node to itself."""
    byte_s: Floats
    """Seconds of each byte of it, `[from, to]`."""
    ports: Numbers
    """Of what is sent, `[from, to, 2]`: the port that it leaves by, and the one that it
    comes in by. A port sends, or receives, one value at a time."""
    devices: tuple[DeviceType, ...] = ()
    """Type of each; empty where only figures are known."""

    @classmethod
    def of(cls, cluster: Cluster, *, reserve: float = 0.0) -> "Nodes":
        """The nodes of a cluster, named by type and number: `h100:0`.

        Args:
            cluster: each of its devices is a node.
            reserve: share of a device's memory that stays free.
        """
        pools = [
            p for p, pool in enumerate(cluster.pools) for _ in range(pool.num_devices)
        ]
        devices = [cluster.pools[pool].device for pool in pools]
        num = len(devices)
        routes = _Routes(num)
        start = 0
        for pool in cluster.pools:
            routes.inside(pool, start)
            start += pool.num_devices
        if cluster.between is not None:
            apart = np.not_equal.outer(pools, pools)
            routes.through(cluster.between, np.arange(num), apart)
        return cls(
            names=_names(devices),
            memory_bytes=np.array([d.memory_bytes * (1 - reserve) for d in devices]),
            empty_s=routes.empty_s,
            byte_s=routes.byte_s,
            ports=routes.ports,
            devices=tuple(devices),
        )

    @classmethod
    def joined(
        cls,
        memory_bytes: Sequence[float] | Floats,
        *,
        latency_s: float = 0.0,
        bandwidth: float = np.inf,
    ) -> "Nodes":
        """Nodes that each have a port of their own to all others.

        >>> Nodes.joined([1e9, 1e9], latency_s=1.0, bandwidth=2.0).byte_s.tolist()
        [[0.0, 0.5], [0.5, 0.0]]
        """
        num = len(memory_bytes)
        others = ~np.eye(num, dtype=bool)
        own = np.arange(num)
        ports = np.stack(np.broadcast_arrays(own[:, None], num + own[None, :]), -1)
        return cls(
            names=tuple(f"node:{number}" for number in range(num)),
            memory_bytes=np.asarray(memory_bytes, float),
            empty_s=latency_s * others,
            byte_s=others / bandwidth,
            ports=ports,
        )

    @property
    def num(self) -> int:
        """Nodes."""
        return len(self.names)

    def alike(self) -> list[str]:
        """For each node the name of its type; its own name where that is not known."""
        if not self.devices:
            return list(self.names)
        return [device.name for device in self.devices]


class _Routes:
    """The tables, filled level by level."""

    def __init__(self, num: int) -> None:
        self.empty_s, self.byte_s = np.zeros((num, num)), np.zeros((num, num))
        self.ports = np.zeros((num, num, 2), np.int64)
        self._next = 0

    def inside(self, pool: Pool, start: int) -> None:
        """A pool, of which `start` is the first device."""
        numbers = np.arange(pool.num_devices)
        below = 1
        for level in pool.levels:
            # Devices that are in different groups of the level below; levels farther
            # out come later, and are written over this one.
            apart = np.not_equal.outer(numbers // below, numbers // below)
            self.through(level.link, numbers + start, apart)
            below *= level.size

    def through(self, link: Link, devices: Numbers, apart: NDArray[np.bool_]) -> None:
        """Pairs of some devices use a link where they are apart."""
        curve, place = link.curve, np.ix_(devices, devices)
        each = 1 / curve.bandwidth
        empty_s = curve.latency_s + curve.half_bytes * each
        own = np.arange(len(devices)) // link.shared_by
        out, into = self._next + own, self._next + own.max() + 1 + own
        self._next += 2 * (int(own.max()) + 1)
        ports = np.stack(np.broadcast_arrays(out[:, None], into[None, :]), -1)
        self.empty_s[place] = np.where(apart, empty_s, self.empty_s[place])
        self.byte_s[place] = np.where(apart, each, self.byte_s[place])
        self.ports[place] = np.where(apart[..., None], ports, self.ports[place])


def _names(devices: Sequence[DeviceType]) -> tuple[str, ...]:
    seen: Counter[str] = Counter()
    names = []
    for device in devices:
        names.append(f"{device.name}:{seen[device.name]}")
        seen[device.name] += 1
    return tuple(names)
