"""Clusters in a few letters: `64x8xH100`, `8xA100`, `16x16xv5e`, `48xjean-zay`.

Decides what a shorthand means, with the catalog's machines. Must not know files.
"""

import math
import re
from itertools import product

from dtft.planner.catalog import DEVICES, Machine, canonical, link, machine, torus_link
from dtft.planner.cluster import Cluster, Level, Pool

_POOL = re.compile(r"((?:\d+x)*)(?!(?:\d+x)+$)(\S.*)", re.IGNORECASE)


def parse(text: str) -> Cluster:
    """The cluster that a shorthand means; see `Cluster.parse`.

    Raises:
        ValueError: names an unknown device type or machine, or has sizes that do not
            fit it.

    >>> parse("64x8xH100").num_devices, parse("h100").num_devices
    (512, 1)
    >>> parse("4x8xH100+4x8xA100").words
    '4x8xh100+4x8xa100'
    """
    parts = [part.strip() for part in text.split("+")]
    pools = tuple(pool(part) for part in parts)
    if len(pools) == 1:
        return Cluster(pools=pools, name=canonical(text))
    outside = [link(machine(_split(part)[1]).outside) for part in parts]
    slowest = min(outside, key=lambda port: port.curve.bandwidth / port.shared_by)
    name = "+".join(canonical(part) for part in parts)
    return Cluster(pools=pools, between=slowest, name=name)


def pool(text: str) -> Pool:
    """One pool of a shorthand, such as `64x8xH100`.

    Raises:
        ValueError: the name is unknown, or the sizes do not fit it.
    """
    sizes, name = _split(text)
    found = machine(name)
    if any(size < 1 for size in sizes):
        raise ValueError(f"cluster {text!r}: sizes must be 1 or more.")
    if found.torus_dims:
        levels = _torus(text, sizes, found)
    else:
        levels = _hosts(text, sizes, found, of_hosts=canonical(name) not in DEVICES)
    per_host = max(1, found.per_host)
    return Pool(
        device=DEVICES[found.device],
        levels=levels,
        host_link=link(found.host_link) if found.host_link else None,
        host_memory_bytes=found.host_memory_bytes // per_host,
    )


def _split(text: str) -> tuple[list[int], str]:
    found = _POOL.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"cluster {text!r} cannot be read. Allowed: [HOSTSx][DEVICESx]NAME, such "
            "as 64x8xH100, several joined by +, or the path of a .yaml or .json file."
        )
    return [int(size) for size in re.findall(r"\d+", found[1])], found[2]


def _hosts(
    text: str, sizes: list[int], found: Machine, *, of_hosts: bool
) -> tuple[Level, ...]:
    """Devices of a host, then hosts; a level of size 1 is left out."""
    if len(sizes) > 2:
        raise ValueError(
            f"cluster {text!r} has {len(sizes)} sizes. Allowed: hosts and devices of a "
            "host, such as 64x8xH100. Describe more levels in a file."
        )
    hosts, inside = _host_sizes(text, sizes, found, of_hosts)
    made = []
    if inside > 1:
        made.append(Level(size=inside, link=link(found.inside), name="devices"))
    if hosts > 1:
        made.append(Level(size=hosts, link=link(found.outside), name="hosts"))
    return tuple(made)


def _host_sizes(
    text: str, sizes: list[int], found: Machine, of_hosts: bool
) -> tuple[int, int]:
    """Hosts, and devices of each."""
    if len(sizes) == 2:
        return sizes[0], sizes[1]
    if of_hosts:  # the name of a machine counts machines
        return (sizes or [1])[0], found.per_host
    number = (sizes or [1])[0]
    if not found.per_host or number <= found.per_host:
        return 1, number
    if number % found.per_host:
        raise ValueError(
            f"cluster {text!r}: {number} devices do not fill hosts of "
            f"{found.per_host}. Allowed: a multiple of {found.per_host}; or write how "
            f"many hosts of how many, such as {number}x1x{found.device}."
        )
    return number // found.per_host, found.per_host


def _torus(text: str, sizes: list[int], found: Machine) -> tuple[Level, ...]:
    """A level for each dimension, and slices joined by the network."""
    dims = found.torus_dims
    if len(sizes) > dims + 1:
        raise ValueError(
            f"cluster {text!r} has {len(sizes)} sizes, but {found.device} is a torus "
            f"of {dims} dimensions. Allowed: those, before them the number of slices."
        )
    slices, shape = 1, sizes
    if len(sizes) == dims + 1:
        slices, shape = sizes[0], sizes[1:]
    elif len(sizes) <= 1:
        slices, shape = _slices(text, (sizes or [1])[0], found)
    made = [
        Level(size=size, link=torus_link(found, size), name=f"torus {number}")
        for number, size in enumerate(reversed(shape))
        if size > 1
    ]
    if slices > 1:
        made.append(Level(size=slices, link=link(found.outside), name="slices"))
    return tuple(made)


def _slices(text: str, number: int, found: Machine) -> tuple[int, list[int]]:
    """Slices, and the most cubic torus of each, for a number of devices."""
    slices = -(-number // found.pod)
    if number % slices:
        raise ValueError(
            f"cluster {text!r}: a {found.device} pod has {found.pod} devices, and "
            f"{number} do not divide into {slices} pods. Write SLICESxSIZESx"
            f"{found.device}."
        )
    each = number // slices
    divisors = [size for size in range(1, each + 1) if each % size == 0]
    shapes = product(divisors, repeat=found.torus_dims - 1)
    whole = [shape for shape in shapes if each % math.prod(shape) == 0]
    cubic = min(([*s, each // math.prod(s)] for s in whole), key=lambda s: (sum(s), s))
    return slices, sorted(cubic)
