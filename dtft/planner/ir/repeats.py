"""Finds repetition in a program: equal blocks, and equal dims of a loss and its step.

* `find_repeats`: finds runs of operators that repeat with the same shapes. The planner
  divides repeats in the same way, and computes their cost once.
* `same_dims`: maps dims of a loss to dims of the step that differentiates the loss.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from dtft.planner.ir.fusion import CHEAP, PRODUCTS
from dtft.planner.ir.graph import Graph, Operator
from dtft.planner.ir.op_groups import region

# Equal dims. The forward pass of a traced step contains the operators of the loss in
# their order, between operators that differentiation adds.


def same_dims(program: Graph, graph: Graph) -> dict[int, int]:
    """Maps dims of a loss's program to the equal dims of a step's program.

    Dims of arguments are matched by path. Other dims are matched through operators with
    the same primitive and shapes in the same order. Operators that XLA fuses (`CHEAP`,
    such as elementwise ones) are left out: differentiation adds and replaces such
    operators, so those of the loss and of the step do not match. A dim without a match
    is not in the map.

    Args:
        program: the program of the loss alone.
        graph: the program of a step that differentiates this loss, with arguments of
            the same paths.
    """
    found: dict[int, int] = {}
    for path, index in program.inputs.items():
        _join(found, program, index, graph, graph.inputs[path])
    ours = _heavy(program.operators)
    theirs = _heavy(op for op in graph.operators if region(op) == "forward")
    keys = [_key(program, op) for op in ours], [_key(graph, op) for op in theirs]
    # autojunk would drop frequent items, but long programs repeat the same operators.
    for first, second, count in SequenceMatcher(
        None, *keys, autojunk=False
    ).get_matching_blocks():
        for one, other in zip(
            ours[first : first + count], theirs[second : second + count], strict=True
        ):
            for index, twin in zip(_values(one), _values(other), strict=True):
                _join(found, program, index, graph, twin)
    return found


def _heavy(operators: Iterable[Operator]) -> list[Operator]:
    return [op for op in operators if op.kind not in CHEAP]


def _values(operator: Operator) -> tuple[int, ...]:
    return *operator.inputs, *operator.outputs


def _key(graph: Graph, operator: Operator) -> object:
    arrays = tuple(
        (graph.values[index].shape, graph.values[index].dtype)
        for index in _values(operator)
    )
    return operator.primitive, len(operator.within), arrays


def _join(
    found: dict[int, int], program: Graph, index: int, graph: Graph, other: int
) -> None:
    pairs = zip(program.values[index].dims, graph.values[other].dims, strict=True)
    for dim, twin in pairs:
        found.setdefault(dim, twin)


# Repeats. The layers of an unrolled program are runs of operators with the same shapes,
# joined in the same way. In such a run each dim of a layer corresponds to the dim at
# the same position of the next layer, and both are in one class. Layers inside a scan
# are one body already.


_NEXT = 16
"""A layer is found only if one of its matmuls, convolutions or custom kernels occurs at
most this many times in the layer."""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A block of operators that repeats `count` times in a row."""

    start: int
    """Number of the first operator of the first copy."""
    period: int
    """The number of operators in one copy."""
    count: int


@dataclass(frozen=True, kw_only=True)
class RepeatClasses:
    """The repeated blocks of a program, and the equal dims and operators in all of it.

    Each dim and each operator of the program has a class, given by the lowest number of
    its members; one without an equal is a class of its own. Dims are equal if they have
    the same position in two copies of a block. Operators are equal if they have the
    same primitive, precision, operations, executions, and shapes and dtypes, and the
    dims of their arrays are equal.
    """

    dims: tuple[int, ...]
    """For each dim of the graph its class: the lowest number of the dims at the same
    position in all copies of its block. No array has two different dims of one
    class."""
    operators: tuple[int, ...]
    """For each operator its class: the lowest number of the operators equal to it. The
    costs are equal as long as mesh axes divide all dims of a class in the same way."""
    repeats: tuple[Repeat, ...]
    """The repeated blocks (layers), in the order of the program."""


def find_repeats(graph: Graph) -> RepeatClasses:
    """Finds the repeated blocks of a program, such as layers.

    Also finds for every dim and operator of the program those that are equal to it, as
    `RepeatClasses` describes.
    """
    signatures = _Signatures(graph)
    kinds = np.array([signatures.of(op) for op in graph.operators], np.int64)
    classes = _Classes(graph)
    taken = np.zeros(len(kinds), bool)
    repeats: list[Repeat] = []
    heavy = np.array([op.kind in PRODUCTS for op in graph.operators], bool)
    periods = _periods(kinds, heavy)
    for start, length, period in _runs(kinds, periods):
        copy = slice(start, start + period)
        part = slice(start, start + length + period)
        # Adjacent repeats may share a few operators at their border.
        new = np.count_nonzero(taken[part]) < period
        if not (new and heavy[copy].any() and _chained(graph, start, period)):
            continue
        if classes.add(_pairs(graph, start, length, period)):
            taken[part] = True
            count = length // period + 1
            repeats.append(Repeat(start=start, period=period, count=count))
    dims = tuple(map(classes.of, range(len(graph.dims))))
    return RepeatClasses(
        dims=dims,
        operators=_operator_classes(graph, dims),
        repeats=tuple(sorted(repeats, key=lambda repeat: repeat.start)),
    )


class _Signatures:
    """Numbers operators by what they compute, in order to find repeated blocks.

    Two operators have one number if they are in the same loop, agree in primitive,
    precision, operations and executions, and have arrays of the same shapes and dtypes.
    Also, if two dims of one operator's arrays are one dim, the dims at the same
    positions of the other operator's arrays must be one dim, too.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._numbers: dict[Any, int] = {}
        self._arrays = [(value.shape, value.dtype) for value in graph.values]

    def of(self, op: Operator) -> int:
        places: dict[int, int] = {}
        joined = tuple(
            places.setdefault(dim, len(places)) for dim in _dims(self._graph, op)
        )
        arrays = tuple(self._arrays[i] for i in (*op.inputs, *op.outputs))
        key = (
            op.primitive, op.precision, op.flops, op.trips, op.again, arrays, joined,
            op.within,
        )  # fmt: skip
        return self._numbers.setdefault(key, len(self._numbers))


def _dims(graph: Graph, op: Operator) -> Iterator[int]:
    for index in (*op.inputs, *op.outputs):
        yield from graph.values[index].dims
    yield from op.summed
    yield from op.whole


def _periods(kinds: np.ndarray, heavy: np.ndarray) -> list[int]:
    """Returns the distances, in operators, between equal `heavy` operators, ascending.

    These are the distances from each heavy operator to each of the next 16 (`_NEXT`)
    operators that are equal to it.

    Args:
        kinds: number of each operator; equal operators have equal numbers.
        heavy: whether each operator is a matmul, convolution or custom kernel.
    """
    found: set[int] = set()
    for kind in np.unique(kinds[heavy]):
        places = np.flatnonzero(heavy & (kinds == kind))
        for step in range(1, min(_NEXT, len(places) - 1) + 1):
            found.update((places[step:] - places[:-step]).tolist())
    return sorted(found)


def _runs(kinds: np.ndarray, periods: Iterable[int]) -> list[tuple[int, int, int]]:
    """Finds runs in which each operator equals the operator one period later.

    `kinds` has a number for each operator, equal for equal operators; `periods` are the
    distances to try.

    Returns start, length and period of each run, in operators. The length is the number
    of operators that have an equal one a period later, so a run covers length + period
    operators. Runs with a length below the period are left out. Runs that cover the
    most operators are first; of runs that cover equally many, the run with the shortest
    period is first.
    """
    found: list[tuple[int, int, int]] = []
    for period in periods:
        equal = np.concatenate(([False], kinds[:-period] == kinds[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        long = lengths >= period
        pairs = zip(starts[long].tolist(), lengths[long].tolist(), strict=True)
        found += [(start, length, period) for start, length in pairs]
    return sorted(found, key=lambda run: (-run[1] - run[2], run[2], run[0]))


def _chained(graph: Graph, start: int, period: int) -> bool:
    """Whether a second copy of operators reads values that the first copy writes.

    Layers do; parallel branches (queries, keys, values), which have equal operators
    too, do not. The first copy has the `period` operators from number `start` on, the
    second copy the next `period`.
    """
    first = graph.operators[start : start + period]
    second = graph.operators[start + period : start + 2 * period]
    written = {index for op in first for index in op.outputs}
    return any(index in written for op in second for index in op.inputs)


def _pairs(
    graph: Graph, start: int, length: int, period: int
) -> Iterator[tuple[int, int]]:
    """Yields each dim of some operators with the same dim one period later.

    The first dims are those of the `length` operators from number `start` on, the
    second those of the operators `period` later.
    """
    for number in range(start, start + length):
        one, other = graph.operators[number], graph.operators[number + period]
        yield from zip(_dims(graph, one), _dims(graph, other), strict=True)


class _Classes:
    """Disjoint sets (classes) of dims at the same position in repeated layers.

    At first, each dim is a class of its own; `add` merges classes. No array has two
    different dims of one class.
    """

    def __init__(self, graph: Graph) -> None:
        self._dims = graph.dims
        self._parent = list(range(len(graph.dims)))
        self._arrays = {frozenset(value.dims) for value in graph.values}

    def of(self, dim: int) -> int:
        return _root(self._parent, dim)

    def add(self, pairs: Iterable[tuple[int, int]]) -> bool:
        """Merges the classes of the two dims of each pair, if both have equal sizes.

        If two dims of an array would get one class, merges nothing at all and returns
        False. Otherwise returns True.
        """
        parent = self._parent.copy()
        for pair in set(pairs):
            if pair[0] != pair[1] and self._dims[pair[0]] == self._dims[pair[1]]:
                low, high = sorted(_root(parent, dim) for dim in pair)
                parent[high] = low
        for dims in self._arrays:
            if len({_root(parent, dim) for dim in dims}) < len(dims):
                return False
        self._parent = parent
        return True


def _root(parent: Sequence[int], dim: int) -> int:
    while parent[dim] != dim:
        dim = parent[dim]
    return dim


def _operator_classes(graph: Graph, dims: Sequence[int]) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    arrays = [
        (value.shape, value.dtype, tuple(dims[dim] for dim in value.dims))
        for value in graph.values
    ]
    classes: list[int] = []
    for number, op in enumerate(graph.operators):
        key = (
            op.primitive, op.precision, op.flops, op.trips,
            tuple(arrays[index] for index in op.inputs),
            tuple(arrays[index] for index in op.outputs),
            tuple(dims[dim] for dim in op.summed),
            tuple(dims[dim] for dim in op.whole),
        )  # fmt: skip
        classes.append(first.setdefault(key, number))
    return tuple(classes)
