"""The cluster that JAX's devices are: their attributes, completed by the catalog.

Reads attributes of what it is given and runs nothing. Must not import JAX.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtft.planner import catalog
from dtft.planner.cluster import Cluster, Level, Pool
from dtft.planner.device import DeviceType


def cluster_of(devices: Sequence[Any], host_memory_bytes: int | None = None) -> Cluster:
    """The cluster of a list of devices; see `Cluster.from_devices`.

    Raises:
        ValueError: there are none, they or their hosts are unlike, or the catalog does
            not have their type.
    """
    if not devices:
        raise ValueError("devices is empty. Give `jax.devices()`.")
    kinds = Counter(device.device_kind for device in devices)
    if len(kinds) > 1:
        raise ValueError(
            f"devices are of {len(kinds)} types ({_counts(kinds)}). One jit runs on "
            "like devices only: give those of one type."
        )
    hosts = Counter(_host(device) for device in devices)
    if len(set(hosts.values())) > 1:
        raise ValueError(
            f"hosts have unlike numbers of devices ({_counts(hosts)}). Give as many of "
            "each, or describe the cluster in a file (`dtft.planner.cluster_file`)."
        )
    per_host = len(devices) // len(hosts)
    if host_memory_bytes is None:
        host_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = host_memory_bytes // per_host
    if devices[0].platform == "cpu":  # processes are mostly on one machine
        memory = host_memory_bytes // len(devices)
    return Cluster(pools=(_pool(devices, len(hosts), memory),))


def _host(device: Any) -> int:
    """Devices of a number communicate fast: JAX's `slice_index` on GPUs (one host, or
    one NVLink domain of many), else the process."""
    if device.platform in ("gpu", "cuda", "rocm"):
        found = getattr(device, "slice_index", None)
        return device.process_index if found is None else found
    return device.process_index


def _pool(devices: Sequence[Any], num_hosts: int, memory: int) -> Pool:
    first = devices[0]
    found = _type(first, memory)
    machine = catalog.MACHINES[found.name]
    if machine.torus_dims and (levels := _torus(devices, machine)):
        shape = levels
    else:
        shape = (
            Level(
                size=len(devices) // num_hosts,
                link=catalog.link(machine.inside),
                name="devices",
            ),
            Level(size=num_hosts, link=catalog.link(machine.outside), name="hosts"),
        )
    return Pool(
        device=found,
        levels=tuple(level for level in shape if level.size > 1),
        host_link=catalog.link(machine.host_link) if machine.host_link else None,
        host_memory_bytes=memory,
    )


def _type(device: Any, memory: int) -> DeviceType:
    """The catalog's type, with the memory that this device says it has."""
    found = catalog.device_type_of_kind(device.device_kind)
    if found is None:
        catalog.unknown(
            "device type", device.device_kind, catalog.DEVICES, catalog.DEVICES
        )
    if device.platform == "cpu":
        return replace(found, memory_bytes=memory)
    stats = getattr(device, "memory_stats", lambda: None)()
    limit = stats.get("bytes_limit") if isinstance(stats, Mapping) else None
    return replace(found, memory_bytes=int(limit)) if limit else found


def _torus(devices: Sequence[Any], machine: catalog.Machine) -> tuple[Level, ...]:
    """A level for each coordinate that differs, and slices; () if they have none."""
    coordinates = [getattr(device, "coords", None) for device in devices]
    if any(found is None for found in coordinates):
        return ()
    sizes = [len(set(values)) for values in zip(*coordinates, strict=True)]
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    made = [
        Level(size=size, link=catalog.torus_link(machine, size), name=f"torus {number}")
        for number, size in enumerate(sizes)
    ]
    network = Level(size=slices, link=catalog.link(machine.outside), name="slices")
    return (*made, network)


def _counts(found: Counter[Any]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in found.most_common())
