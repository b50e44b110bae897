"""The shardings that a step of a job was saved with: as JSON beside it, and back.

Slices do not say on which mesh an array was, so a restore that states no sharding needs
this. Devices are found again by their ids, or by process where ids have changed. Must
not know agents, memory or slices.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from dtft.checkpoint import placing
from dtft.checkpoint.record import Record
from dtft.checkpoint.wanted import Wanted

ELSEWHERE = -1
"""In place of the number of a sharding: of one process's own, or no jax array."""
Numbered = tuple[int, int]
"""A device: (process index, id)."""


def shardings_json(shardings: Sequence[Sharding | None]) -> dict[str, Any]:
    """The shardings of leaves that several processes have, as JSON values.

    Args:
        shardings: of each leaf; None for what is no jax array.

    Returns:
        `meshes`, `specs` (number of the mesh, then axes per dim), and per leaf the
        number of its spec.

    >>> mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    >>> found = shardings_json([None, NamedSharding(mesh, PartitionSpec(None, "x"))])
    >>> found["leaves"], found["specs"], found["meshes"][0]["names"]
    ([-1, 0], [[0, None, 'x']], ['x'])
    """
    meshes: dict[Mesh, int] = {}
    specs: dict[tuple[Any, ...], int] = {}
    leaves: list[int] = []
    for sharding in shardings:
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if not isinstance(mesh, Mesh) or _is_local(mesh):
            leaves.append(ELSEWHERE)
            continue
        assert isinstance(sharding, NamedSharding)
        spec = meshes.setdefault(mesh, len(meshes)), *sharding.spec
        leaves.append(specs.setdefault(spec, len(specs)))
    return {
        "meshes": [_mesh_json(mesh) for mesh in meshes],
        "specs": [[_plain(part) for part in spec] for spec in specs],
        "leaves": leaves,
    }


def _is_local(mesh: Mesh) -> bool:
    """Whether it is one process's own, beside others."""
    processes = {device.process_index for device in mesh.devices.flat}
    return len(processes) < jax.process_count()


def _plain(part: Any) -> Any:
    return list(part) if isinstance(part, tuple) else part


def _mesh_json(mesh: Mesh) -> dict[str, Any]:
    return {
        "names": [str(name) for name in mesh.axis_names],
        "sizes": list(mesh.devices.shape),
        "types": [kind.name for kind in mesh.axis_types],
        "devices": [[it.process_index, it.id] for it in mesh.devices.flat],
    }


def shardings_had(record: Record) -> list[NamedSharding | None]:
    """The sharding that each leaf was saved with, on the devices of this run.

    Returns:
        None for what is no array of the whole job, and for a leaf whose mesh cannot be
        made of this run's devices.
    """
    raw = record.shardings
    if raw is None:
        return [None] * len(record.leaves)
    devices = jax.devices()
    meshes = [_mesh_on(mesh, devices) for mesh in raw["meshes"]]
    found = [_sharding(spec, meshes) for spec in raw["specs"]]
    return [None if number == ELSEWHERE else found[number] for number in raw["leaves"]]


def _sharding(
    spec: Sequence[Any], meshes: Sequence[Mesh | None]
) -> NamedSharding | None:
    number, *parts = spec
    mesh = meshes[number]
    if mesh is None:
        return None
    axes = (tuple(part) if isinstance(part, list) else part for part in parts)
    return NamedSharding(mesh, PartitionSpec(*axes))


def _mesh_on(raw: Mapping[str, Any], devices: Sequence[Any]) -> Mesh | None:
    wanted = [(process, ident) for process, ident in raw["devices"]]
    known = {(device.process_index, device.id): device for device in devices}
    there = renumbered(wanted, list(known))
    if there is None:
        return None
    array = np.array([known[pair] for pair in there], object).reshape(raw["sizes"])
    types = tuple(AxisType[name] for name in raw["types"])
    return Mesh(array, tuple(raw["names"]), axis_types=types)


def renumbered(
    wanted: Sequence[Numbered], there: Sequence[Numbered]
) -> list[Numbered] | None:
    """The devices that stand for those that were saved on; None if there are too few.

    Every process keeps its part; where ids have changed their order counts.

    >>> renumbered([(1, 9), (0, 4)], [(0, 4), (1, 9)])
    [(1, 9), (0, 4)]
    >>> renumbered([(0, 9), (0, 4)], [(0, 0), (0, 1), (1, 2)])
    [(0, 1), (0, 0)]
    >>> renumbered([(0, 4), (1, 9)], [(0, 4)])
    """
    if set(wanted) <= set(there):
        return list(wanted)
    found: dict[Numbered, Numbered] = {}
    for process in {process for process, _ in wanted}:
        mine = sorted(pair for pair in wanted if pair[0] == process)
        theirs = sorted(pair for pair in there if pair[0] == process)
        if len(theirs) < len(mine):
            return None
        found |= dict(zip(mine, theirs, strict=False))
    return [found[pair] for pair in wanted]


def placed(
    record: Record, wanted: Mapping[str, Wanted | None]
) -> dict[str, Wanted | None]:
    """What is wanted, on the shardings of the save where none is stated.

    Raises:
        ValueError: a leaf's mesh cannot be made of this run's devices; names both.
    """
    had = shardings_had(record)
    return {
        name: None if item is None else _item_placed(record, name, item, had)
        for name, item in wanted.items()
    }


def _item_placed(
    record: Record, name: str, item: Wanted, had: Sequence[NamedSharding | None]
) -> Wanted:
    targets = dict(item.targets)
    numbers = jax.tree.leaves(record.tree(name, range(len(record.leaves))))
    for number in [] if item.fallback else numbers:
        leaf, target = record.leaves[number], targets.get(number)
        if leaf.kind not in ("array", "key") or getattr(target, "sharding", None):
            continue
        if placing.kind_wanted(target, leaf) not in ("array", "key"):
            continue
        sharding = had[number]
        if sharding is None:
            _refuse_lost(record, number)
            continue
        like = placing.struct_of(leaf, None) if target is None else target
        targets[number] = jax.ShapeDtypeStruct(
            like.shape, like.dtype, sharding=sharding
        )
    return dataclasses.replace(item, targets=targets)


def _refuse_lost(record: Record, number: int) -> None:
    """Raises ValueError if several processes had this leaf."""
    raw = record.shardings
    if raw is None or raw["leaves"][number] == ELSEWHERE:
        return
    mesh, *spec = raw["specs"][raw["leaves"][number]]
    devices = dict(Counter(device.process_index for device in jax.devices()))
    raise ValueError(
        f"leaf {record.leaves[number].path!r} was saved over {spec} of a mesh "
        f"{_text(raw['meshes'][mesh])}, which this run's devices (per process: "
        f"{devices}) do not make up, and the target states no sharding. Give "
        "StandardRestore a tree of arrays, or of jax.ShapeDtypeStruct with sharding."
    )


def _text(mesh: Mapping[str, Any]) -> str:
    axes = zip(mesh["names"], mesh["sizes"], strict=True)
    return "(" + ", ".join(f"{name}: {size}" for name, size in axes) + ")"
