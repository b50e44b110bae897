"""How parameters, gradients and optimizer state are divided at rest, and what it moves.

Decides on which dim of each array the axis `fsdp` lies at a ZeRO level, and which
collectives bring arrays together for the model.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dtft.planner.ir import Value
from dtft.planner.spmd.collective_combiner import Bundle, bundle
from dtft.planner.spmd.partitioner import (
    CollectiveOp,
    ShardedSize,
    ShardingAssignment,
    Sizes,
    parts,
)
from dtft.planner.types import Spec

ZERO_AXIS = "fsdp"
ZERO_BESIDE = "tensor"
"""The axis for dims of weights, whether it lies on any of an array or not."""
_UNDIVIDED = 2**60
"""Dims that no axis divides are larger than all others."""


def rest_spec(
    value: Value, spec: Spec, sizes: Mapping[str, int], loops: Container[int] = ()
) -> Spec:
    """A spec with the axis `fsdp` on the largest dim that can take it, if any can.

    Of equally large dims the first, dims that no axis divides before others; never a
    dim that a loop goes along, as XLA would gather all of it before the loop.

    Args:
        value: the array.
        spec: how other axes divide it.
        sizes: of the axes.
        loops: dims that a loop goes along.

    >>> made = Value(shape=(6, 8), dtype="float32", dims=(0, 1))
    >>> rest_spec(made, ((), ("tensor",)), {"tensor": 2, "fsdp": 2})
    (('fsdp',), ('tensor',))
    >>> rest_spec(made, ((), ("tensor",)), {"tensor": 2, "fsdp": 4})
    ((), ('tensor', 'fsdp'))
    """
    place = int(rest_place(value, spec, sizes, loops))
    return tuple(
        (*axes, ZERO_AXIS) if at == place else axes for at, axes in enumerate(spec)
    )


def rest_place(
    value: Value, spec: Spec, sizes: Sizes, loops: Container[int] = ()
) -> np.ndarray:
    """The dim on which `rest_spec` puts the axis `fsdp`; -1 where it is on none.

    Args:
        value: the array.
        spec: how other axes divide it.
        sizes: of the axes; numbers, or arrays with one for each mesh.
        loops: dims that a loop goes along.

    >>> made = Value(shape=(6, 8), dtype="float32", dims=(0, 1))
    >>> rest_place(made, ((), ("tensor",)), {"tensor": 2, "fsdp": np.array([1, 2, 4])})
    array([-1,  0,  1])
    """
    fsdp = np.asarray(sizes.get(ZERO_AXIS, 1))
    best = np.full(fsdp.shape, -1)
    largest = np.zeros(fsdp.shape, np.int64)
    if any(ZERO_AXIS in axes for axes in spec):
        return best
    for place, (size, axes) in enumerate(zip(value.shape, spec, strict=True)):
        if value.dims[place] in loops:
            continue
        divided = parts(axes, sizes)
        rank = size // divided + (0 if axes else _UNDIVIDED)
        better = (fsdp > 1) & (size % (divided * fsdp) == 0) & (rank > largest)
        best, largest = np.where(better, place, best), np.where(better, rank, largest)
    return best


def turned_place(value: Value) -> int:
    """The dim along which gathering an array leaves its elements out of order.

    What is gathered along a dim lies as if that dim were the first. Of the last dim the
    elements of a row are then far apart; of others whole rows are moved. -1: of none,
    as there is one dim only.

    >>> turned_place(Value(shape=(12, 8, 1), dtype="float32", dims=(0, 1, 2)))
    1
    """
    places = [place for place, size in enumerate(value.shape) if size > 1]
    return places[-1] if len(places) > 1 else -1


@dataclass(frozen=True, kw_only=True)
class StateArray:
    """An array of the state: what it is and where it is divided."""

    path: str
    value: Value
    used: Spec
    """As the model computes with it."""
    rest: Spec
    """As it is kept between steps."""

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes over which it is brought together for use."""
        used = {axis for axes in self.used for axis in axes}
        return tuple(a for axes in self.rest for a in axes if a not in used)


def zero_leaves(
    values: Mapping[str, Value],
    division: ShardingAssignment,
    sizes: Mapping[str, int],
    divides: bool,
    loops: Container[int],
) -> tuple[StateArray, ...]:
    """The arrays of a role.

    Args:
        values: path to value.
        division: which axes divide which dims while computing.
        sizes: of the axes.
        divides: whether `fsdp` divides them at rest.
        loops: dims that a loop goes along.
    """
    found = []
    for path, value in values.items():
        used = division.spec(value)
        rest = rest_spec(value, used, sizes, loops) if divides else used
        found.append(StateArray(path=path, value=value, used=used, rest=rest))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """How a divided parameter is brought together."""

    times: int
    """In a step, or for each microbatch."""
    slices: int
    """In so many parts, one after another: where a loop goes along the parameter."""
    per_microbatch: bool
    ahead: bool
    """Whether it waits for nothing that is computed. In a loop over layers it waits for
    the layer before."""

    @property
    def messages(self) -> int:
        """Times that a part is gathered."""
        return self.times * self.slices


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A collective that belongs to an array, not to an operator: a gathered shard."""

    sent: CollectiveOp
    """Of one part."""
    how: Gathered
    where: str


def loop_slices(value: Value, loops: Container[int]) -> int:
    """Parts that loops take of an array, one after another."""
    along = (s for s, dim in zip(value.shape, value.dims, strict=True) if dim in loops)
    return math.prod(along)


def times_gathered(passes: int, changes: bool, zero: int, num_slices: int) -> Gathered:
    """How often a divided parameter is brought together, and if for each microbatch.

    At level 3 for every pass that reads it: the backward pass gathers again (see
    `dtft.parallel.fsdp`), in a loop over layers each layer's part. Below it once,
    after the update; what a step leaves as it was is still whole everywhere.

    Args:
        passes: of the model that read it.
        changes: whether the step changes it.
        zero: level.
        num_slices: parts that a loop takes of it (`loop_slices`).

    >>> [times_gathered(2, True, zero, 12).messages for zero in (0, 1, 3)]
    [0, 1, 24]
    """
    if zero == 3:
        ahead = num_slices == 1
        return Gathered(
            times=passes, slices=num_slices, per_microbatch=True, ahead=ahead
        )
    times = int(changes and zero > 0)
    return Gathered(times=times, slices=1, per_microbatch=False, ahead=False)


def gather_bundle(platform: str, sent: CollectiveOp, how: Gathered) -> Bundle | None:
    """What a gather of a parameter is sent together with; None if it stays alone."""
    place = "parameters", how.slices
    found = bundle(platform, sent, how.messages, how.per_microbatch, place)
    return found and replace(found, ahead=how.ahead)


def zero_gathers(
    parameters: Iterable[StateArray], times: Mapping[str, Gathered]
) -> list[Moved]:
    """The all-gathers that bring divided parameters together.

    Args:
        parameters: leaves.
        times: path to how often each is gathered (`times_gathered`).
    """
    found = []
    for leaf in parameters:
        how = times[leaf.path]
        if leaf.gathered and how.times:
            axes = tuple(axis for part in leaf.used for axis in part)
            part = ShardedSize(total=leaf.value.num_bytes / how.slices, axes=axes)
            sent = CollectiveOp(kind="all_gather", axes=leaf.gathered, amount=part)
            found.append(Moved(sent=sent, how=how, where=leaf.path))
    return found


def further_division(
    parameters: Iterable[StateArray],
    division: ShardingAssignment,
    loops: Container[int],
) -> dict[frozenset[int], dict[int, tuple[str, ...]]]:
    """What `ShardingAssignment.rest` has for gradients divided as their parameters.

    Inside a loop over layers a gradient lacks the dim that the loop goes along.
    """
    found = {}
    for leaf in parameters:
        dims = [dim for dim in leaf.value.dims if dim not in loops]
        extra = {
            division.root(dim): tuple(a for a in rest if a not in used)
            for dim, rest, used in zip(
                leaf.value.dims, leaf.rest, leaf.used, strict=True
            )
            if len(rest) > len(used)
        }
        if extra:
            found[frozenset(map(division.root, dims))] = extra
    return found
