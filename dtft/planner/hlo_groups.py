"""Which devices communicate: XLA's three spellings of groups, and their mesh axes.

Pure functions over text. XLA numbers devices by their position in the mesh; a group
that is all members along some axes is named by these axes. Must not know programs.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}"
)
_PERMUTED = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")


def groups_of(attributes: str, mesh: Mapping[str, int]) -> Groups:
    """The groups of a collective, or the (source, target) pairs of a permutation.

    >>> groups_of("channel_id=1, replica_groups={{0,1},{2,3}}, x=1", {"a": 4})
    ((0, 1), (2, 3))
    >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0), x=1", {"a": 4})
    ((0, 2), (1, 3))
    >>> groups_of("replica_groups=mesh['i'=2,'j'=2] {'i'}, x=1", {"a": 4})
    ((0, 2), (1, 3))

    Args:
        attributes: the part of the operation's line behind its operands.
        mesh: axis name to size; no groups at all means all devices.

    Raises:
        ValueError: no spelling that is known.
    """
    everyone = tuple(range(math.prod(mesh.values())))
    if found := _LISTED.search(attributes):
        listed = re.findall(r"\{([\d,]*)\}", found[1])
        return tuple(_numbers(group) for group in listed) or (everyone,)
    if found := _IOTA.search(attributes):
        return _iota(*found.groups())
    if found := _MESH.search(attributes):
        return _along_axes(*found.groups())
    if "replica_groups=" not in attributes:
        return (everyone,)
    spelling = attributes.split("replica_groups=", 1)[1][:80]
    raise ValueError(
        f"replica_groups={spelling!r} is spelled as no known XLA does. Allowed: lists, "
        "iota and mesh. Report this with the versions of jax and jaxlib."
    )


@lru_cache(maxsize=4096)
def axes_of(
    groups: Groups, mesh: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which members of a group differ, and a group's size.

    The size is smaller than the product of the axes' sizes where XLA goes along a part
    of an axis only. Of (source, target) pairs the size counts all that they connect.

    >>> axes_of(((0, 2), (1, 3)), (("data", 2), ("tensor", 2)))
    (('data',), 2)

    Raises:
        ValueError: the groups name devices that the mesh has not.
    """
    sizes = [size for _, size in mesh]
    highest = max((max(group, default=0) for group in groups), default=0)
    if highest >= math.prod(sizes):
        raise ValueError(
            f"mesh={dict(mesh)} has {math.prod(sizes)} devices, but the program names "
            f"number {highest}. Give the mesh that it was compiled for."
        )
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group, int), sizes))
        differs |= (places != places[:, :1]).any(axis=1)
    names = tuple(name for (name, _), yes in zip(mesh, differs, strict=True) if yes)
    return names, max(map(len, groups), default=1)


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))


def _iota(shape: str, source: str, order: str | None) -> Groups:
    sizes = _numbers(source)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if order:
        numbers = numbers.transpose(_numbers(order))
    return _rows(numbers.reshape(_numbers(shape)))


def _along_axes(axes: str, devices: str | None, chosen: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([^=,']+)'?=(\d+)", axes)}
    numbers = _devices(devices, tuple(sizes.values()))
    shape: list[int] = []
    first: dict[str, int] = {}
    parts = [_part(text) for text in chosen.split(",") if text.strip()]
    cuts = {name: {1, size} for name, size in sizes.items()}
    for name, before, size in parts:
        cuts[name] |= {before, before * (size or sizes[name])}
    for name in sizes:  # an axis becomes as many dims as it is cut into
        first[name] = len(shape)
        ends = sorted(cuts[name])
        shape += [b // a for a, b in zip(ends, ends[1:], strict=False)]
    grouped: list[int] = []
    for name, before, size in parts:
        ends = sorted(cuts[name])
        last = ends.index(before * (size or sizes[name]))
        grouped += range(first[name] + ends.index(before), first[name] + last)
    others = [dim for dim in range(len(shape)) if dim not in grouped]
    members = math.prod(shape[dim] for dim in grouped)
    ordered = numbers.reshape(shape).transpose(*others, *grouped)
    return _rows(ordered.reshape(-1, members))


def _part(text: str) -> tuple[str, int, int]:
    """Of `'x':(2)4` the axis, the product of what comes before, and the size."""
    found = re.fullmatch(r"\s*'?([^':]+)'?(?::\((\d+)\)(\d+))?\s*", text)
    if not found:
        raise ValueError(f"{text!r} is no axis of a group: 'name' or 'name':(2)4.")
    return found[1], int(found[2] or 1), int(found[3] or 0)


def _devices(text: str | None, shape: Sequence[int]) -> np.ndarray:
    """The devices of XLA's own mesh: counted through unless it says otherwise."""
    found = _PERMUTED.match(text) if text else None
    if text and not found:
        return np.asarray(_numbers(text)).reshape(shape)
    order = _numbers(found[3]) if found else ()
    if found is None or not order:
        return np.arange(math.prod(shape)).reshape(shape)
    sizes = _numbers(found[2] or found[1])
    return np.arange(math.prod(shape)).reshape(sizes).transpose(order).reshape(shape)


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in numbers)
