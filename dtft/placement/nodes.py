"""The devices of a cluster as nodes, with the links between each pair.

Each pair of nodes has the seconds of an empty message, the seconds per byte, and the
ports that a transfer occupies. Two devices of a pool communicate through the outermost
level (`Level`) of the fabric on which their positions differ. Devices of different
pools communicate through the link between pools.
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
    """The nodes of a placement: names, memory, links, ports and device types."""

    names: tuple[str, ...]
    memory_bytes: Floats
    """Bytes of memory of each node, `[nodes]`."""
    empty_s: Floats
    """Seconds of an empty message, `[from, to]`; 0 from a node to itself."""
    byte_s: Floats
    """Seconds per byte of a message, `[from, to]`."""
    ports: Numbers
    """Sending and receiving port of each transfer, `[from, to, 2]`. A port sends or
    receives one value at a time."""
    devices: tuple[DeviceType, ...] = ()
    """Device type of each node; empty if the nodes were not made from a cluster."""

    @classmethod
    def of(cls, cluster: Cluster, *, reserve: float = 0.0) -> "Nodes":
        """Makes the nodes of a cluster, named by type and number: `h100:0`.

        Args:
            cluster: each of its devices is a node.
            reserve: fraction of a device's memory that the nodes do not offer, 0 to 1.
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
        """Makes nodes with equal links; each node has a sending and a receiving port.

        `memory_bytes` has the bytes of memory of each node. `latency_s` is in seconds,
        `bandwidth` in bytes a second. The example shows the seconds per byte between
        two nodes.

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
        """The number of nodes."""
        return len(self.names)

    def alike(self) -> list[str]:
        """Returns each node's device type; the node's own name if types are unknown."""
        if not self.devices:
            return list(self.names)
        return [device.name for device in self.devices]


class _Routes:
    """Tables of link speeds and ports of all pairs of nodes.

    A fabric has levels of links. The entries of an inner level must be set first,
    because those of the outer levels overwrite some of them.
    """

    def __init__(self, num: int) -> None:
        self.empty_s, self.byte_s = np.zeros((num, num)), np.zeros((num, num))
        self.ports = np.zeros((num, num, 2), np.int64)
        self._next = 0

    def inside(self, pool: Pool, start: int) -> None:
        """Fills the entries between the devices of a pool.

        `start` is the number of the pool's first device in the cluster.
        """
        numbers = np.arange(pool.num_devices)
        below = 1
        for level in pool.levels:
            # Pairs of devices in different groups of the level below. Outer levels
            # come later and overwrite the entries of this level.
            apart = np.not_equal.outer(numbers // below, numbers // below)
            self.through(level.link, numbers + start, apart)
            below *= level.size

    def through(self, link: Link, devices: Numbers, apart: NDArray[np.bool_]) -> None:
        """Sets the seconds and ports of the pairs of devices that a link joins.

        Args:
            link: the link.
            devices: numbers of devices of the cluster.
            apart: `[devices, devices]`, True for the pairs whose entries are set.
        """
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
