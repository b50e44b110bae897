"""Clusters that the catalog does not have, described in a YAML or JSON file.

    name: two kinds
    pools:
      - shorthand: 4x8xh100          # a pool as on the command line, or:
      - device: a100                 # of the catalog, or a mapping (`DeviceType`)
        levels:                      # innermost first
          - {size: 4, link: nvlink-3}
          - size: 2
            name: hosts              # tells hosts of one device from devices of one
            link: {kind: Ethernet, latency_s: 20.0e-6, bandwidth: 12.5e9}
        host_link: pcie-4
        host_memory_bytes: 64.0e9    # that each device may use
    between: ethernet-100g           # needed for several pools

What `Cluster.to_json` writes is read too. A key that does not exist is an error. Must
not know what a cluster is used for.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import yaml

from dtft.planner import catalog, once, shorthand
from dtft.planner.accuracy import Accuracy
from dtft.planner.cluster import Cluster, Level, Pool
from dtft.planner.device import DeviceType, Efficiency
from dtft.planner.links import Curve, Link

_SUFFIXES = (".json", ".yaml", ".yml")
_CURVE = frozenset(field.name for field in fields(Curve))


def is_path(text: str) -> bool:
    """Whether a text names a file and is no shorthand."""
    return text.lower().endswith(_SUFFIXES)


def read(path: str | Path) -> Cluster:
    """The cluster of a file.

    Raises:
        ValueError: no such file, no YAML or JSON, or not a cluster; names the key.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"cluster file {path}: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise ValueError(
            f"cluster file {path} is no text. Allowed: YAML or JSON, as "
            "`dtft.planner.cluster_file` describes it."
        ) from None
    try:
        return from_text(text)
    except ValueError as error:
        raise ValueError(f"cluster file {path}: {error}") from error


def from_text(text: str) -> Cluster:
    """The cluster of a file's text (YAML, of which JSON is a part).

    Raises:
        ValueError: no YAML, or not a cluster; names the key.

    >>> from_text("{pools: [{shorthand: 2x8xa100}]}").num_devices
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
        pools=tuple(_pool(item, f"pools[{n}]") for n, item in enumerate(pools)),
        between=None if between is None else _link(between, "between"),
        name=str(items.get("name", "")),
    )


class _Loader(yaml.SafeLoader):
    """YAML whose keys each stand once in their mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        scalars = [pair for pair in node.value if isinstance(pair[0], yaml.ScalarNode)]
        line = node.start_mark.line + 1
        once.mapping(
            ((key.value, value) for key, value in scalars),
            f"the mapping that begins in line {line}",
        )
        return super().construct_mapping(node, deep)


def _checked(
    items: Any, of: Any, where: str, more: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """A mapping that has only fields of a dataclass, and all that it needs."""
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
    """The dataclass, once its nested values are made; texts become numbers."""
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
        made = {key: _number(key, value, hints[key]) for key, value in items.items()}
        return of(**made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _number(name: str, value: Any, hint: Any) -> Any:
    """YAML reads 5e-6 as text and 64.0e9 as a float; here the field decides."""
    if hint not in (int, float):
        return value
    what = "a whole number" if hint is int else "a number, such as 12.5e9"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is no number. Allowed: {what}.") from None
    if hint is int and not number.is_integer():
        raise ValueError(f"{name}={value!r} is no whole number. Allowed: {what}.")
    return hint(number)


def _pool(items: Any, where: str) -> Pool:
    if isinstance(items, str):
        return shorthand.pool(items)
    if isinstance(items, Mapping) and set(items) == {"shorthand"}:
        return shorthand.pool(str(items["shorthand"]))
    found = _checked(items, Pool, where, frozenset({"shorthand"}))
    if "shorthand" in found:
        raise ValueError(f"{where}.shorthand stands alone. Leave the other keys out.")
    if "device" in found:
        found["device"] = _device(found["device"], f"{where}.device")
    found["levels"] = tuple(
        _level(item, f"{where}.levels[{number}]")
        for number, item in enumerate(found.get("levels", ()))
    )
    if found.get("host_link") is not None:
        found["host_link"] = _link(found["host_link"], f"{where}.host_link")
    if "accuracy" in found:
        given = _checked(found["accuracy"], Accuracy, f"{where}.accuracy")
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
    if isinstance(found.get("peak_flops"), Mapping):
        found["peak_flops"] = {k: float(v) for k, v in found["peak_flops"].items()}
    if found.get("kernels") is not None:
        found["kernels"] = frozenset(found["kernels"])
    if "tile" in found:
        found["tile"] = tuple(found["tile"])
    return _built(DeviceType, found, where)


def _link(items: Any, where: str) -> Link:
    """A link of the catalog, or a mapping; the curve's figures may stand beside it."""
    if isinstance(items, str):
        return catalog.link(items)
    found = {"source": "cluster file", **_checked(items, Link, where, _CURVE)}
    beside = {key: found.pop(key) for key in _CURVE & set(found)}
    found["curve"] = _curve(found.get("curve", beside), f"{where}.curve")
    found["measured"] = {
        kind: _by_number(curves, f"{where}.measured.{kind}", _curve)
        for kind, curves in found.get("measured", {}).items()
    }
    for name in ("meeting", "ahead"):
        found[name] = _by_number(
            found.get(name, {}),
            f"{where}.{name}",
            lambda item, name: _number(name, item, float),
        )
    return _built(Link, found, where)


def _by_number(
    items: Mapping[Any, Any], where: str, build: Callable[[Any, str], Any]
) -> dict[int, Any]:
    """What is known for numbers of devices; texts of one number are one key."""
    built = ((int(n), build(item, f"{where}.{n}")) for n, item in items.items())
    return once.mapping(built, where)


def _curve(items: Any, where: str) -> Curve:
    return _built(Curve, _checked(items, Curve, where), where)
