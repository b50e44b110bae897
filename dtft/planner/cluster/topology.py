"""Clusters: pools of equal devices, the links of each level, and host memory.

`Cluster.parse` reads a shorthand (`64x8xH100`) or the path of a YAML or JSON file.
`Cluster.from_devices` reads JAX's devices.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from dtft.planner import serialization
from dtft.planner.cluster import catalog
from dtft.planner.cluster.catalog import (
    DEVICES,
    MACHINES,
    Machine,
    canonical_name,
    link,
    machine,
    torus_link,
)
from dtft.planner.cluster.hardware import (
    CATALOG,
    Accuracy,
    Curve,
    DeviceType,
    Efficiency,
    Link,
)

_POOLS = "pools"
_OF_HOSTS = ("hosts", _POOLS)
"""Names of levels that join whole hosts: if the innermost level has such a name, each
host has one device."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level of a pool's fabric: a link joins `size` devices, or groups of them.

    The groups are those of the level below.
    """

    size: int
    link: Link
    """The port of one device at this level."""
    name: str = ""
    """Name of what is joined, such as `devices` (of one host), `hosts` or `slices`."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size} of level {self.name!r}. Allowed: >= 1.")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices of one type on a uniform fabric.

    Device numbers run through the innermost level first: the devices of an innermost
    group have consecutive numbers.
    """

    device: DeviceType
    levels: tuple[Level, ...] = ()
    """Levels, innermost (fastest) first: devices of a host, then hosts. A torus has a
    level for each of its dimensions. Empty for a single device."""
    host_link: Link | None = None
    """Link from a device to its host's memory; with None the planner may not use host
    memory."""
    host_memory_bytes: int = 0
    """Bytes of host memory that each device may use."""
    accuracy: Accuracy | None = None
    """Accuracy of measured figures; None for the catalog's figures."""

    @property
    def trust(self) -> Accuracy:
        """Accuracy of predictions with the pool's figures.

        This is the pool's own `accuracy`. If that is None, it is the accuracy of the
        catalog's uncalibrated figures (`CATALOG`).
        """
        if self.accuracy is not None:
            return self.accuracy
        return replace(CATALOG, source=f"{CATALOG.source}: {self.device.source}")

    @property
    def num_devices(self) -> int:
        """The number of devices: the product of the level sizes."""
        return math.prod(level.size for level in self.levels)

    @property
    def words(self) -> str:
        """Shorthand of the pool, such as `64x8xh100`, outermost level first.

        Levels of size 1 are left out. But if each host has one device, the shorthand
        says so, as in `3x1xcpu`.
        """
        levels = [level for level in reversed(self.levels) if level.size > 1]
        sizes = [str(level.size) for level in levels]
        if levels and levels[-1].name in _OF_HOSTS:
            sizes.append("1")
        return "x".join([*sizes, self.device.name])

    @property
    def fabric_words(self) -> str:
        """The pool's shorthand and kinds of links: `2x8xh100 by NVLink and InfiniBand`.

        A pool that `Cluster.parse` reads from a shorthand with a device type's name has
        the same text as a pool that `Cluster.from_devices` builds from such devices.
        Pools with other kinds of links, and tori of another shape, have another text.
        """
        kinds = dict.fromkeys(
            level.link.kind for level in self.levels if level.size > 1
        )
        return f"{self.words} by {' and '.join(kinds)}" if kinds else self.words


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One pool of devices, or several pools that the link `between` joins."""

    pools: tuple[Pool, ...]
    between: Link | None = None
    """Link from a device to devices of other pools; None is allowed for one pool."""
    name: str = ""

    def __post_init__(self) -> None:
        if not self.pools or (len(self.pools) > 1 and self.between is None):
            raise ValueError(
                f"cluster {self.name!r}: {len(self.pools)} pools, between="
                f"{self.between}. Allowed: one pool, or several and the link between."
            )

    @property
    def num_devices(self) -> int:
        """The number of devices in all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def words(self) -> str:
        """Name of the cluster; without one, the shorthands of its pools (`8xh100`)."""
        return self.name or "+".join(pool.words for pool in self.pools)

    @property
    def uniform(self) -> Pool:
        """The whole cluster as one pool; an outermost level joins several equal pools.

        Raises:
            ValueError: the pools are not equal.
        """
        first = self.pools[0]
        if len(self.pools) == 1:
            return first
        if any(pool != first for pool in self.pools) or self.between is None:
            raise ValueError(
                f"cluster {self.words} has unlike pools: one SPMD program runs on like "
                "devices only. Plan for one of its pools (`Cluster(pools=(pool,))`), "
                f"such as {first.words}."
            )
        outer = Level(size=len(self.pools), link=self.between, name=_POOLS)
        return replace(first, levels=(*first.levels, outer))

    @property
    def fingerprint(self) -> str:
        """Hash of the cluster's figures: twelve hexadecimal digits.

        Names and sources are not part of the hash.
        """
        text = json.dumps(_figures(asdict(self)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Reads a cluster from a shorthand or from a file (`.json`, `.yaml`, `.yml`).

        Args:
            text: `64x8xH100` (64 hosts of 8 devices), `8xA100` (one host), `512xH100`
                (hosts of the catalog's size), `h100` (one device), `4x8xv5e` (a torus,
                its sizes in any order), `2x4x4x4xv7x` (64 chips of two devices),
                `48xjean-zay` (48 hosts, each a machine of the catalog),
                `4x8xH100+4x8xA100` (two pools), or the path of a file. The format of
                files is described in this module, above `read_cluster_file`.

        Raises:
            ValueError: the text or file cannot be read, or the sizes do not fit the
                name; or the catalog lacks the device or machine, in which case the
                message lists the known names.
        """
        if not isinstance(text, str):
            raise ValueError(
                f"text={text!r:.80} is no text, but a {type(text).__name__}. Allowed: "
                "such as '64x8xH100', or the path of a cluster file as a str."
            )
        if is_cluster_path(text):
            return read_cluster_file(text)
        return parse_shorthand(text)

    @classmethod
    def from_devices(
        cls, devices: Sequence[Any], host_memory_bytes: int | None = None
    ) -> "Cluster":
        """Builds the cluster of JAX's devices (`jax.devices()`).

        Only attributes of the devices are read: platform, device_kind, process_index,
        and, if present, coords, core_on_chip, slice_index and memory_stats().

        Args:
            devices: devices of one type, equally many on every host.
            host_memory_bytes: memory of one host in bytes; by default the memory of
                this machine. On CPU all processes are taken to share it, because they
                usually run on one machine.

        Raises:
            ValueError: there is no device, the devices or hosts differ, or the catalog
                lacks the device type.
        """
        return cluster_of(devices, host_memory_bytes)

    def to_json(self) -> str:
        """Writes the cluster as JSON: the text of a `.json` file that `parse` reads."""
        return json.dumps(_plain(self), indent=1)


def _figures(items: Any) -> Any:
    """Copies nested mappings and lists without the keys `name` and `source`."""
    if isinstance(items, Mapping):
        kept = {k: v for k, v in items.items() if k not in ("name", "source")}
        return {key: _figures(value) for key, value in kept.items()}
    if isinstance(items, frozenset):
        return sorted(items)
    if isinstance(items, list | tuple):
        return [_figures(item) for item in items]
    return items


def _plain(value: Any) -> Any:
    """Converts nested dataclasses to JSON values; fields that are None are dropped."""
    if hasattr(value, "__dataclass_fields__"):
        items = {field.name: getattr(value, field.name) for field in fields(value)}
        return {key: _plain(item) for key, item in items.items() if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


# Shorthand: `64x8xH100`, `8xA100`, `16x16xv5e`, `48xjean-zay`.


_POOL = re.compile(r"((?:\d+x)*)(?!(?:\d+x)+$)(\S.*)", re.IGNORECASE)


def parse_shorthand(text: str) -> Cluster:
    """Reads a cluster from a shorthand, such as `64x8xH100` (64 hosts of 8 devices).

    `+` separates pools. The slowest of the pools' links between hosts then joins the
    pools. `Cluster.parse` lists all forms of shorthands.

    Raises:
        ValueError: the shorthand has an unknown device type or machine, or sizes that
            do not fit the device type or machine.

    >>> parse_shorthand("64x8xH100").num_devices, parse_shorthand("h100").num_devices
    (512, 1)
    >>> parse_shorthand("4x8xH100+4x8xA100").words
    '4x8xh100+4x8xa100'
    """
    parts = [part.strip() for part in text.split("+")]
    pools = tuple(parse_pool(part) for part in parts)
    if len(pools) == 1:
        return Cluster(pools=pools, name=canonical_name(text))
    outside = [link(machine(_split(part)[1]).outside) for part in parts]
    slowest = min(outside, key=lambda port: port.curve.bandwidth / port.shared_by)
    name = "+".join(canonical_name(part) for part in parts)
    return Cluster(pools=pools, between=slowest, name=name)


def parse_pool(text: str) -> Pool:
    """Reads one pool of devices, such as `64x8xH100`: 64 hosts of 8 devices.

    Raises:
        ValueError: the text cannot be read, the device type or machine is unknown, a
            size is below 1, or the machine cannot have the sizes (for example 12
            devices on hosts of 8).
    """
    sizes, name = _split(text)
    if canonical_name(name) not in MACHINES and (meant := _respelled(text)):
        raise ValueError(
            f"cluster {text!r} cannot be read. Did you mean {meant!r}? Allowed: "
            f"{_FORM}, without spaces, counts first."
        )
    found = machine(name)
    if found.torus_dims:
        levels = _torus(text, sizes, found)
    else:
        levels = _hosts(
            text, sizes, found, of_hosts=canonical_name(name) not in DEVICES
        )
    per_host = max(1, found.per_host)
    return Pool(
        device=DEVICES[found.device],
        levels=levels,
        host_link=link(found.host_link) if found.host_link else None,
        host_memory_bytes=found.host_memory_bytes // per_host,
    )


_FORM = "[HOSTSx][DEVICESx]NAME, such as 64x8xH100"
_NUMBER = re.compile(r"(?:\d+x)*([-+]?\d*\.?\d+)x", re.IGNORECASE)
"""Matches the sizes at the start of a pool's shorthand; group 1 is the last number
before an `x`, whole or not."""


def _split(text: str) -> tuple[list[int], str]:
    """Splits a pool into its sizes and the name of its device type or machine.

    Raises:
        ValueError: the text cannot be read, or a size is no whole number of 1 or more.
    """
    found = _POOL.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"cluster {text!r} cannot be read. Allowed: {_FORM}, several joined by +, "
            "or the path of a .yaml or .json file."
        )
    sizes = [int(size) for size in re.findall(r"\d+", found[1])]
    number = _NUMBER.match(text.strip())
    wrong = [str(size) for size in sizes if size < 1]
    wrong += [number[1]] if number is not None and not number[1].isdigit() else []
    if wrong:
        raise ValueError(
            f"cluster {text!r}: {wrong[0]} is no number of hosts or devices. Allowed: "
            f"whole numbers of 1 or more: {_FORM}."
        )
    return sizes, found[2]


def _respelled(text: str) -> str | None:
    """Corrects a shorthand that has spaces, another sign than `x`, or its count last.

    Returns None if the text has another form, or a name that the catalog lacks.

    >>> _respelled("2 x 8 H100"), _respelled("h100:8"), _respelled("8xh10")
    ('2x8xh100', '8xh100', None)
    """
    plain = text.strip().lower()
    if ahead := re.fullmatch(r"((?:\d+\s*[x×*]?\s*)+)(\D.*)", plain):
        counts, name = ahead[1], ahead[2]
    elif behind := re.fullmatch(r"(\D.*?)\s*[x×*:]\s*(\d+)", plain):
        counts, name = behind[2], behind[1]
    else:
        return None
    if canonical_name(name) not in MACHINES:
        return None
    return "x".join([*re.findall(r"\d+", counts), name])


def _hosts(
    text: str, sizes: list[int], found: Machine, *, of_hosts: bool
) -> tuple[Level, ...]:
    """Builds the fabric's levels: the devices of a host, then the hosts.

    A level of size 1 is left out.

    Args:
        text: a pool in words, such as `64x8xH100`; used in errors.
        sizes: the numbers in `text`, outermost first: hosts and devices of each, one of
            the two, or none.
        found: the catalog's machine of the name in `text`.
        of_hosts: whether a lone number counts hosts; otherwise it counts devices.

    Raises:
        ValueError: there are more than two sizes, or a lone number of devices does not
            fill hosts of the catalog's size.
    """
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
    """Finds the number of hosts and the number of devices of each host.

    Args:
        text: a pool in words, such as `64x8xH100`; used in errors.
        sizes: the numbers in `text`, outermost first: hosts and devices of each, one of
            the two, or none.
        found: the catalog's machine of the name in `text`.
        of_hosts: whether a lone number counts hosts; otherwise it counts devices.

    Raises:
        ValueError: the devices do not fill hosts of the catalog's size.
    """
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
    """Builds the levels of TPUs: a level per torus dimension, and one of TPU slices.

    A TPU slice is one torus; the network between hosts joins several slices. `text` is
    the shorthand, `sizes` has its sizes, and `found` is the machine that it names. The
    smallest dimension is innermost, as the coordinates of Google's TPU slices have
    ascending sizes and the first coordinate varies fastest. If a chip has several
    devices, the devices of a chip are the innermost level. Leaves out levels of size 1.

    Raises:
        ValueError: the sizes do not fit the machine.
    """
    dims = found.torus_dims + (found.per_chip > 1)
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
    made, shape = [], sorted(shape)
    if found.per_chip > 1 and shape[-1] > 1:
        if found.per_chip not in shape:
            raise ValueError(
                f"cluster {text!r}: a chip of {found.device} is {found.per_chip} "
                f"devices. Allowed: 1 device, an even number, or sizes of which one is "
                f"{found.per_chip}, such as {found.per_chip}x4x4x4x{found.device}."
            )
        shape.remove(found.per_chip)
        made.append(_chip(found, found.per_chip))
    made += [
        Level(size=size, link=torus_link(found, size), name=f"torus {number}")
        for number, size in enumerate(shape)
        if size > 1
    ]
    if slices > 1:
        made.append(Level(size=slices, link=link(found.outside), name="slices"))
    return tuple(made)


def _chip(found: Machine, size: int) -> Level:
    """Builds the level of the `size` devices of one chip."""
    return Level(size=size, link=link(found.on_chip), name="chip")


def _slices(text: str, number: int, found: Machine) -> tuple[int, list[int]]:
    """Finds the number of TPU slices for `number` devices, and the sizes of a slice.

    A TPU slice is one torus. There are as few slices as possible, and the sizes of a
    slice's torus dimensions are as equal as possible. `text` is the shorthand, for
    errors, and `found` the machine that it names.

    Raises:
        ValueError: the devices do not divide into equal TPU slices.
    """
    slices = -(-number // found.pod)
    if number % slices:
        raise ValueError(
            f"cluster {text!r}: a {found.device} pod has {found.pod} devices, and "
            f"{number} do not divide into {slices} pods. Write SLICESxSIZESx"
            f"{found.device}."
        )
    each, chip = number // slices, []
    if found.per_chip > 1 and number > 1:
        if each % found.per_chip:
            return slices, [each]  # refused by `_torus`
        each, chip = each // found.per_chip, [found.per_chip]
    divisors = [size for size in range(1, each + 1) if each % size == 0]
    shapes = product(divisors, repeat=found.torus_dims - 1)
    whole = [shape for shape in shapes if each % math.prod(shape) == 0]
    cubic = min(([*s, each // math.prod(s)] for s in whole), key=lambda s: (sum(s), s))
    return slices, [*chip, *cubic]


# Cluster files, in YAML or JSON:
#
#     name: two kinds
#     pools:
#       - shorthand: 4x8xh100          # a pool as on the command line, or:
#       - device: a100                 # of the catalog, or a mapping (`DeviceType`)
#         levels:                      # innermost first
#           - {size: 4, link: nvlink-3}
#           - size: 2
#             name: hosts              # an innermost level of hosts: one device each
#             link: {kind: Ethernet, latency_s: 20.0e-6, bandwidth: 12.5e9}
#         host_link: pcie-4
#         host_memory_bytes: 64.0e9    # that each device may use
#     between: ethernet-100g           # needed for several pools
#
# The output of `Cluster.to_json` is also such a file. An unknown key is an error.


_SUFFIXES = (".json", ".yaml", ".yml")
_CURVE = frozenset(field.name for field in fields(Curve))


def is_cluster_path(text: str) -> bool:
    """Returns whether a text ends with `.json`, `.yaml` or `.yml`, as cluster files."""
    return text.lower().endswith(_SUFFIXES)


def read_cluster_file(path: str | Path) -> Cluster:
    """Reads a cluster from a YAML or JSON file.

    Raises:
        ValueError: the file cannot be read, is not YAML or JSON, or is not a cluster;
            for a wrong key, the message names the key.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"cluster file {path}: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise ValueError(
            f"cluster file {path} is no text. Allowed: YAML or JSON, as "
            "`dtft.planner.cluster.topology` describes it."
        ) from None
    try:
        return cluster_from_text(text)
    except ValueError as error:
        raise ValueError(f"cluster file {path}: {error}") from error


def cluster_from_text(text: str) -> Cluster:
    """Reads a cluster from YAML or JSON text (JSON is a subset of YAML).

    Raises:
        ValueError: the text is not YAML, or not a cluster; for a wrong key, the message
            names the key.

    >>> cluster_from_text("{pools: [{shorthand: 2x8xa100}]}").num_devices
    16
    """
    try:
        items = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"neither YAML nor JSON: {error}") from error
    items = _checked(items, Cluster, "cluster")
    pools = items.get("pools")
    if not isinstance(pools, list):
        raise ValueError(f"pools={pools!r}. Allowed: a list of pools.")
    between = items.get("between")
    return Cluster(
        pools=tuple(
            _pool_of_mapping(item, f"pools[{n}]") for n, item in enumerate(pools)
        ),
        between=None if between is None else _link(between, "between"),
        name=str(items.get("name", "")),
    )


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys in a mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        scalars = [pair for pair in node.value if isinstance(pair[0], yaml.ScalarNode)]
        line = node.start_mark.line + 1
        serialization.mapping_once(
            ((key.value, value) for key, value in scalars),
            f"the mapping that begins in line {line}",
        )
        return super().construct_mapping(node, deep)


def _checked(
    items: Any, of: Any, where: str, more: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Copies a mapping whose keys are all fields of the dataclass `of`, or in `more`.

    `where` names the mapping in errors.

    Raises:
        ValueError: `items` is no mapping, or has another key.
    """
    if not isinstance(items, Mapping):
        raise ValueError(f"{where}={items!r}. Allowed: a mapping of its fields.")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(of)}
    if strange := [str(key) for key in items if key not in {*known, *more}]:
        raise ValueError(
            f"{where}.{strange[0]} does not exist. Allowed: "
            f"{', '.join([*known, *sorted(more)])}."
        )
    return dict(items)


def _built(of: Any, items: Mapping[str, Any], where: str) -> Any:
    """Builds the dataclass `of` from field values; converts numeric fields from text.

    Nested values must already be built. `where` names the dataclass in errors.

    Raises:
        ValueError: a required field is missing, or a value is not allowed.
    """
    needed = [
        field.name
        for field in fields(of)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    if missing := [name for name in needed if name not in items]:
        raise ValueError(
            f"{where}.{missing[0]} is missing. Needed: {', '.join(needed)}."
        )
    hints = {field.name: field.type for field in fields(of)}
    try:
        made = {key: _scalar(key, value, hints[key]) for key, value in items.items()}
        return of(**made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _scalar(name: str, value: Any, hint: Any) -> Any:
    """Converts the value of an int or float field to a number; checks a str field.

    `hint` is the field's type, `name` its name in errors.

    The YAML loader reads 5e-6 and 64.0e9 as text. Values of other fields are returned
    unchanged.

    Raises:
        ValueError: the value is no number, no whole number for an int field, or no text
            for a str field.
    """
    if hint is str and not isinstance(value, str):
        raise ValueError(f"{name}={value!r:.80} is no text. Allowed: text, in quotes.")
    if hint not in (int, float):
        return value
    what = "a whole number" if hint is int else "a number, such as 12.5e9"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name}={value!r:.80} is no number. Allowed: {what}."
        ) from None
    if hint is int and not number.is_integer():
        raise ValueError(f"{name}={value!r:.80} is no whole number. Allowed: {what}.")
    return hint(number)


def _items(value: Any, where: str, of: str) -> list[tuple[Any, Any]]:
    """Lists the items of a mapping.

    `where` names it in the error, and `of` describes its keys and values.

    Raises:
        ValueError: `value` is no mapping.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}={value!r:.80}. Allowed: a mapping from {of}.")
    return list(value.items())


def _listed(value: Any, where: str, of: str) -> list[Any]:
    """Returns a list unchanged.

    `where` names it in the error, and `of` describes its items.

    Raises:
        ValueError: `value` is no list.
    """
    if not isinstance(value, list):
        raise ValueError(f"{where}={value!r:.80}. Allowed: a list of {of}.")
    return value


def _numbers(value: Any, where: str, of: str) -> dict[str, float]:
    """Builds a mapping of texts to numbers.

    `where` names it in errors, and `of` describes keys and values.

    Raises:
        ValueError: `value` is no mapping, a key is no text, or a value is no number.
    """
    return {
        _scalar(f"a name in {where}", name, str): _scalar(f"{where}.{name}", one, float)
        for name, one in _items(value, where, of)
    }


def _pool_of_mapping(items: Any, where: str) -> Pool:
    if isinstance(items, str):
        return parse_pool(items)
    if isinstance(items, Mapping) and set(items) == {"shorthand"}:
        return parse_pool(str(items["shorthand"]))
    found = _checked(items, Pool, where, frozenset({"shorthand"}))
    if "shorthand" in found:
        raise ValueError(f"{where}.shorthand stands alone. Leave the other keys out.")
    if "device" in found:
        found["device"] = _device(found["device"], f"{where}.device")
    place = f"{where}.levels"
    levels = _listed(found.get("levels", []), place, "levels, innermost first")
    found["levels"] = tuple(
        _level(item, f"{place}[{number}]") for number, item in enumerate(levels)
    )
    if found.get("host_link") is not None:
        found["host_link"] = _link(found["host_link"], f"{where}.host_link")
    if "accuracy" in found:
        given = _checked(found["accuracy"], Accuracy, f"{where}.accuracy")
        for name in {"errors", "scales"} & set(given):
            place = f"{where}.accuracy.{name}"
            given[name] = _numbers(given[name], place, "terms to numbers")
        found["accuracy"] = _built(Accuracy, given, f"{where}.accuracy")
    return _built(Pool, found, where)


def _level(items: Any, where: str) -> Level:
    found = _checked(items, Level, where)
    if "link" in found:
        found["link"] = _link(found["link"], f"{where}.link")
    return _built(Level, found, where)


def _device(items: Any, where: str) -> DeviceType:
    if isinstance(items, str):
        return catalog.device_type(items)
    found = {"source": "cluster file", **_checked(items, DeviceType, where)}
    if "efficiency" in found:
        given = _checked(found["efficiency"], Efficiency, f"{where}.efficiency")
        found["efficiency"] = _built(Efficiency, given, f"{where}.efficiency")
    if "peak_flops" in found:
        place = f"{where}.peak_flops"
        found["peak_flops"] = _numbers(found["peak_flops"], place, "dtypes to FLOP/s")
    if found.get("kernels") is not None:
        place = f"{where}.kernels"
        names = _listed(found["kernels"], place, "names of operators")
        found["kernels"] = frozenset(_scalar(f"one of {place}", n, str) for n in names)
    if "tile" in found:
        place, what = f"{where}.tile", "three whole numbers"
        if len(sizes := _listed(found["tile"], place, what)) != 3:
            raise ValueError(f"{place}={sizes!r:.80}. Allowed: a list of {what}.")
        found["tile"] = tuple(_scalar(f"one of {place}", n, int) for n in sizes)
    return _built(DeviceType, found, where)


def _link(items: Any, where: str) -> Link:
    """Reads a link of a cluster file: a name of the catalog, or a mapping of fields.

    The mapping may have the fields of `Curve`, such as `bandwidth`, in place of the key
    `curve`. `where` names the link in errors.

    Raises:
        ValueError: the mapping has `curve` and also fields of `Curve`, a key is
            unknown, or a value is not allowed.
    """
    if isinstance(items, str):
        return catalog.link(items)
    found = {"source": "cluster file", **_checked(items, Link, where, _CURVE)}
    beside = {key: found.pop(key) for key in _CURVE & set(found)}
    if beside and "curve" in found:
        raise ValueError(
            f"{where} has `curve` and beside it {', '.join(sorted(beside))}. Give "
            "either the curve or its figures."
        )
    found["curve"] = _curve(found.get("curve", beside), f"{where}.curve")
    found["measured"] = {
        kind: _by_number(curves, f"{where}.measured.{kind}", _curve)
        for kind, curves in _items(
            found.get("measured", {}), f"{where}.measured", "collectives to curves"
        )
    }
    for name in ("meeting", "ahead"):
        found[name] = _by_number(
            found.get(name, {}),
            f"{where}.{name}",
            lambda item, name: _scalar(name, item, float),
        )
    return _built(Link, found, where)


def _by_number(
    items: Any, where: str, build: Callable[[Any, str], Any]
) -> dict[int, Any]:
    """Builds a mapping from numbers of devices to values.

    `build` is called with an item of the file and with its name in errors, and returns
    the value. `where` names the mapping in errors.

    Raises:
        ValueError: `items` is no mapping, a key is no whole number, or two keys are the
            same number.
    """
    key = f"a number of devices in {where}"
    built = (
        (_scalar(key, n, int), build(item, f"{where}.{n}"))
        for n, item in _items(items, where, "numbers of devices to values")
    )
    return serialization.mapping_once(built, where)


def _curve(items: Any, where: str) -> Curve:
    return _built(Curve, _checked(items, Curve, where), where)


def cluster_of(devices: Sequence[Any], host_memory_bytes: int | None = None) -> Cluster:
    """Builds the cluster of a list of JAX devices.

    Args:
        devices: devices of one type, equally many on every host.
        host_memory_bytes: memory of one host in bytes; by default the memory of this
            machine. On CPU all processes are taken to share it, because they usually
            run on one machine.

    Raises:
        ValueError: there is no device, the devices or hosts differ, or the catalog
            lacks the device type.
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
            "each, or describe the cluster in a file (`dtft.planner.cluster.topology`)."
        )
    per_host = len(devices) // len(hosts)
    if host_memory_bytes is None:
        host_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = host_memory_bytes // per_host
    if devices[0].platform == "cpu":  # CPU processes usually share one machine
        memory = host_memory_bytes // len(devices)
    return Cluster(pools=(_found_pool(devices, len(hosts), memory),))


def _host(device: Any) -> int:
    """Returns a number that is equal for devices of one host.

    Devices with equal numbers are joined by fast links. The number is JAX's process
    index. On GPUs it is `slice_index` instead, if the device has this attribute (a
    slice is one host, or one NVLink domain of several hosts).
    """
    if device.platform in ("gpu", "cuda", "rocm"):
        found = getattr(device, "slice_index", None)
        return device.process_index if found is None else found
    return device.process_index


def _found_pool(devices: Sequence[Any], num_hosts: int, memory: int) -> Pool:
    first = devices[0]
    found = _type(first, memory)
    machine = catalog.MACHINES[found.name]
    if machine.torus_dims and (levels := _found_torus(devices, machine)):
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
    """Returns the type of a JAX device from the catalog, with the device's own memory.

    The memory in bytes is what the device reports (`bytes_limit`), else that of the
    catalog; on CPU it is `memory` bytes.

    Raises:
        ValueError: the catalog lacks the device type.
    """
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


def _found_torus(devices: Sequence[Any], machine: catalog.Machine) -> tuple[Level, ...]:
    """Builds the levels of TPUs from the coordinates of JAX's devices.

    These are, innermost first: the devices of one chip (if a chip of `machine` has
    several), a level for each dimension of the torus, and a level of TPU slices, which
    the network joins. Levels of size 1 are included. Returns () if a device has no
    coordinates.
    """
    coordinates = [getattr(device, "coords", None) for device in devices]
    if any(found is None for found in coordinates):
        return ()
    sizes = [len(set(values)) for values in zip(*coordinates, strict=True)]
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    made = [
        Level(size=size, link=catalog.torus_link(machine, size), name=f"torus {number}")
        for number, size in enumerate(sizes)
    ]
    if machine.per_chip > 1:
        cores = {getattr(device, "core_on_chip", 0) for device in devices}
        made.insert(0, _chip(machine, len(cores)))
    network = Level(size=slices, link=catalog.link(machine.outside), name="slices")
    return (*made, network)


def _counts(found: Counter[Any]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in found.most_common())
