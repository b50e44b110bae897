"""Says how ZeRO divides arrays of the state while no operator uses them.

Selects the dim of each array that the axis `fsdp` divides, and the collectives that
gather divided parameters for use. An array has two specs: in use (`used`), with which
the step computes, and between steps (`rest`). If ZeRO divides the array, `rest` has the
axes of `used` and `fsdp`; otherwise both are equal.
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
"""The axis that divides some weights, besides `fsdp`. Devices along this axis repeat
operators that the axis does not divide (`ShardingAssignment.spare`)."""
_UNDIVIDED = 2**60
"""Added to the size of dims that no axis divides, so that `rest_place` prefers them."""


def rest_spec(
    value: Value,
    spec: Spec,
    sizes: Mapping[str, int],
    loops: Container[int] = (),
    *,
    flat: bool = False,
) -> Spec:
    """Adds the axis `fsdp` to the largest dim of a spec that `fsdp` can divide.

    Dims that no axis divides are preferred. Of equally large dims the first one is
    selected. A dim that a loop slices is never selected, because XLA would gather the
    whole array before the loop. Returns the spec unchanged if `fsdp` can divide no dim
    or already divides one.

    Args:
        value: the array.
        spec: how other axes divide the array.
        sizes: map from an axis to its size; a missing axis has size one.
        loops: dims (indices into `Graph.dims`) that loops slice.
        flat: whether arrays lie one after another in a buffer, and `fsdp` divides the
            buffer, so that a dim may have any size (`Software.flat_state`).

    In the example, an axis `fsdp` of size 2 divides the first dim, which no other axis
    divides. An axis of size 4 does not divide the 6 elements of the first dim.

    >>> made = Value(shape=(6, 8), dtype="float32", dims=(0, 1))
    >>> rest_spec(made, ((), ("tensor",)), {"tensor": 2, "fsdp": 2})
    (('fsdp',), ('tensor',))
    >>> rest_spec(made, ((), ("tensor",)), {"tensor": 2, "fsdp": 4})
    ((), ('tensor', 'fsdp'))
    """
    place = int(rest_place(value, spec, sizes, loops, flat=flat))
    return tuple(
        (*axes, ZERO_AXIS) if at == place else axes for at, axes in enumerate(spec)
    )


def rest_place(
    value: Value,
    spec: Spec,
    sizes: Sizes,
    loops: Container[int] = (),
    *,
    flat: bool = False,
) -> np.ndarray:
    """Finds the position of the dim that `rest_spec` divides by `fsdp`; -1 for no dim.

    The result has one entry per mesh, as the sizes do.

    Args:
        value: the array.
        spec: how other axes divide the array.
        sizes: map from an axis to its size, a number or an array with one entry per
            mesh.
        loops: dims (indices into `Graph.dims`) that loops slice.
        flat: whether `fsdp` divides any size, not only multiples of its own size.

    In the example, `fsdp` divides no dim at size 1, the first dim at size 2, and the
    second dim at size 4, because 4 does not divide the first dim's 6 elements.

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
        fits = flat | (size % (divided * fsdp) == 0)
        better = (fsdp > 1) & fits & (rank > largest)
        best, largest = np.where(better, place, best), np.where(better, rank, largest)
    return best


def turned_place(value: Value) -> int:
    """Returns the position of the dim along which a gather transposes elements.

    This is the last dim. An all-gather along a dim stores the result as if this dim
    were the first. After a gather along the last dim, the elements of a row are far
    apart in memory; after a gather along another dim, each row stays in one piece. Dims
    of size one are ignored. Returns -1 if fewer than two dims are larger than one.

    >>> turned_place(Value(shape=(12, 8, 1), dtype="float32", dims=(0, 1, 2)))
    1
    """
    places = [place for place, size in enumerate(value.shape) if size > 1]
    return places[-1] if len(places) > 1 else -1


@dataclass(frozen=True, kw_only=True)
class StateArray:
    """An array of the training state, with two specs: in use and between steps.

    ZeRO may divide the array further between steps than while the model uses it.
    """

    path: str
    value: Value
    used: Spec
    """The spec with which the model computes."""
    rest: Spec
    """The spec with which the array is kept between steps."""

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes that divide the array between steps only.

        For use, the array is gathered over these axes.
        """
        used = {axis for axes in self.used for axis in axes}
        return tuple(a for axes in self.rest for a in axes if a not in used)


def zero_leaves(
    values: Mapping[str, Value],
    division: ShardingAssignment,
    sizes: Mapping[str, int],
    divides: bool,
    loops: Container[int],
    *,
    flat: bool = False,
) -> tuple[StateArray, ...]:
    """Finds the specs of arrays of the state, in use and between steps.

    Args:
        values: map from the path of each array to the array.
        division: which axes divide which dims while computing.
        sizes: map from an axis to its size.
        divides: whether `fsdp` divides the arrays between steps; otherwise both specs
            are equal.
        loops: dims (indices into `Graph.dims`) that loops slice.
        flat: whether `fsdp` divides any size, not only multiples of its own size.
    """
    found = []
    for path, value in values.items():
        used = division.spec(value)
        rest = rest_spec(value, used, sizes, loops, flat=flat) if divides else used
        found.append(StateArray(path=path, value=value, used=used, rest=rest))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """How often a parameter that ZeRO divides is gathered, and in how many parts.

    A parameter that a loop slices is gathered in one part for each iteration.
    """

    times: int
    """The number of gathers: per microbatch if `per_microbatch`, else per step."""
    slices: int
    """The number of parts that are gathered one after another because a loop slices the
    parameter; 1 if none does."""
    per_microbatch: bool
    ahead: bool
    """Whether the gather depends on no computation. In a loop over layers a gather
    waits for the layer before."""

    @property
    def messages(self) -> int:
        """Number of all-gathers of the parameter: per microbatch, or else per step.

        It is per microbatch if `per_microbatch` is true. Every gather (`times`) has one
        message for each part (`slices`).
        """
        return self.times * self.slices


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The all-gather of a parameter that ZeRO divides; no operator of the program.

    `where` is the parameter's path, `how` says how often it is gathered.
    """

    sent: CollectiveOp
    """The gather of the whole array, or of one of `how.slices` parts."""
    how: Gathered
    where: str


def loop_slices(value: Value, loops: Container[int]) -> int:
    """Counts the parts into which loops slice an array, such as one for each layer.

    Returns 1 if no loop slices the array.

    Args:
        value: the array.
        loops: dims (indices into `Graph.dims`) that loops slice.
    """
    along = (s for s, dim in zip(value.shape, value.dims, strict=True) if dim in loops)
    return max(1, math.prod(along))


def times_gathered(passes: int, changes: bool, zero: int, num_slices: int) -> Gathered:
    """Computes how often a parameter that ZeRO divides is gathered, in how many parts.

    At ZeRO level 3, a parameter is gathered for every pass that reads it: the backward
    pass gathers again (see `dtft.parallel.fsdp`). A loop over layers gathers the part
    of each layer separately. At levels 1 and 2, a parameter is gathered once, after the
    update. If the step does not change the parameter, it is not gathered at these
    levels, because it is still whole on every device. At level 0, nothing is gathered.

    Args:
        passes: the number of passes (forward, backward) that read the parameter.
        changes: whether the step changes the parameter.
        zero: ZeRO level.
        num_slices: the number of parts into which loops slice the parameter; 1 if none
            does.

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
    """Makes the bundle (set of combined collectives) of a gather of a parameter.

    Returns None for a kind of collective that XLA never combines.

    Args:
        platform: the platform of the devices, such as `cpu` or `cuda`.
        sent: the gather.
        how: how often the parameter is gathered, and in how many parts.
    """
    place = "parameters", how.slices
    found = bundle(platform, sent, how.messages, how.per_microbatch, place)
    return found and replace(found, ahead=how.ahead)


def zero_gathers(
    parameters: Iterable[StateArray], times: Mapping[str, Gathered]
) -> list[Moved]:
    """Lists the all-gathers of the parameters that ZeRO divides.

    Parameters whose two specs are equal, or that are never gathered, are left out.

    Args:
        parameters: the parameters, with their specs in use and between steps.
        times: map from a parameter's path to how often it is gathered
            (`times_gathered`).
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
    """Finds the axes that divide gradients, but not their parameters in use.

    Makes `ShardingAssignment.rest` for ZeRO levels 2 and 3, at which a gradient is
    divided as its parameter is divided between steps. Inside a loop over layers, a
    gradient lacks the dim that the loop slices.

    Args:
        parameters: the parameters, with their specs in use and between steps.
        division: which axes divide which dims while computing.
        loops: dims (indices into `Graph.dims`) that loops slice.

    Returns:
        Map from the set of a gradient's dims to the additional axes of each dim.
        Parameters with equal specs in use and between steps are left out.
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
