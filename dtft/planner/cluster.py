"""What a cluster is: pools of like devices, the links at each level, host memory.

Values only; `shorthand` and `cluster_file` read them from text, `found_devices` makes
them of JAX's devices. Must not know models, meshes or what anything costs on them.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dtft.planner.accuracy import CATALOG, Accuracy
from dtft.planner.device import DeviceType, Efficiency
from dtft.planner.links import Curve, Link, LinkKind

__all__ = [
    "Cluster", "Curve", "DeviceType", "Efficiency", "Level", "Link", "LinkKind", "Pool",
]  # fmt: skip

_POOLS = "pools"
_OF_HOSTS = ("hosts", _POOLS)
"""Levels of which nothing is inside a host: the innermost has hosts of one device."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """`size` devices, or groups of the level below, that a link joins."""

    size: int
    link: Link
    """The port of one device at this level."""
    name: str = ""
    """What it joins: `devices` (of one host), `hosts`, or what a user calls it."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size} of level {self.name!r}. Allowed: >= 1.")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices of one type, joined alike. Numbered with the innermost level fastest."""

    device: DeviceType
    levels: tuple[Level, ...] = ()
    """Innermost (fastest) first: devices of a host, then hosts. A torus has a level
    for each of its dimensions. None: a single device."""
    host_link: Link | None = None
    """From a device to its host's memory; None: the planner may not use that memory."""
    host_memory_bytes: int = 0
    """Host memory that each device may use for itself."""
    accuracy: Accuracy | None = None
    """Of its figures, where they were measured; None: as the catalog's."""

    @property
    def trust(self) -> Accuracy:
        """How far predictions with its figures can be trusted."""
        if self.accuracy is not None:
            return self.accuracy
        return replace(CATALOG, source=f"{CATALOG.source}: {self.device.source}")

    @property
    def num_devices(self) -> int:
        """Devices of all levels."""
        return math.prod(level.size for level in self.levels)

    @property
    def words(self) -> str:
        """Such as `64x8xh100`, outermost level first; of one device each: `3x1xcpu`."""
        levels = [level for level in reversed(self.levels) if level.size > 1]
        sizes = [str(level.size) for level in levels]
        if levels and levels[-1].name in _OF_HOSTS:
            sizes.append("1")
        return "x".join([*sizes, self.device.name])

    @property
    def fabric_words(self) -> str:
        """Its words and the kinds of its links, such as `2x8xh100 by NVLink and
        InfiniBand`: the same for a shorthand and for the devices that it means, and
        another one for as many devices that are joined in another way."""
        kinds = dict.fromkeys(
            level.link.kind for level in self.levels if level.size > 1
        )
        return f"{self.words} by {' and '.join(kinds)}" if kinds else self.words


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One pool, or several that a slower link joins."""

    pools: tuple[Pool, ...]
    between: Link | None = None
    """The port of one device to other pools."""
    name: str = ""

    def __post_init__(self) -> None:
        if not self.pools or (len(self.pools) > 1 and self.between is None):
            raise ValueError(
                f"cluster {self.name!r}: {len(self.pools)} pools, between="
                f"{self.between}. Allowed: one pool, or several and the link between."
            )

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def words(self) -> str:
        """What it is, in one line."""
        return self.name or "+".join(pool.words for pool in self.pools)

    @property
    def uniform(self) -> Pool:
        """The whole cluster as one pool; equal pools become a level of it.

        Raises:
            ValueError: the pools are not alike.
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
        """Twelve hexadecimal digits; the same for what costs the same.

        Names and sources do not count, figures do.
        """
        text = json.dumps(_figures(asdict(self)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """A cluster from a shorthand, or from a file (`.json`, `.yaml`, `.yml`).

        Args:
            text: `64x8xH100` (64 hosts of 8), `8xA100` (one host), `512xH100` (hosts
                as the catalog has them), `h100` (one device), `16x16xv5e` (a torus),
                `48xjean-zay` (hosts of a machine), `4x8xH100+4x8xA100` (two pools), or
                the path of a file (`cluster_file`).

        Raises:
            ValueError: it cannot be read, or names a device or machine that the
                catalog does not have; the text lists those that it has.
        """
        from dtft.planner import cluster_file, shorthand

        if not isinstance(text, str):
            raise ValueError(
                f"text={text!r:.80} is no text, but a {type(text).__name__}. Allowed: "
                "such as '64x8xH100', or the path of a cluster file as a str."
            )
        if cluster_file.is_path(text):
            return cluster_file.read(text)
        return shorthand.parse(text)

    @classmethod
    def from_devices(
        cls, devices: Sequence[Any], host_memory_bytes: int | None = None
    ) -> "Cluster":
        """The cluster that JAX's devices are (`jax.devices()`).

        Reads attributes only: platform, device_kind, process_index, and, where they
        have them, coords, slice_index and memory_stats().

        Args:
            devices: all of one type, alike in number on every host.
            host_memory_bytes: memory of one host; default: of this machine.

        Raises:
            ValueError: no device, unlike devices or hosts, or a type that the catalog
                does not have.
        """
        from dtft.planner import found_devices

        return found_devices.cluster_of(devices, host_memory_bytes)

    def to_json(self) -> str:
        """The text of a file that `parse` reads."""
        return json.dumps(_plain(self), indent=1)


def _figures(items: Any) -> Any:
    """A nested value without its names and sources."""
    if isinstance(items, Mapping):
        kept = {k: v for k, v in items.items() if k not in ("name", "source")}
        return {key: _figures(value) for key, value in kept.items()}
    if isinstance(items, frozenset):
        return sorted(items)
    if isinstance(items, list | tuple):
        return [_figures(item) for item in items]
    return items


def _plain(value: Any) -> Any:
    """Nested dataclasses as JSON has them, without what is not set."""
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
