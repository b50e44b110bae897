"""Finds what a program repeats: equal layers share decisions and are costed once.

The layers of an unrolled program are runs of operators that come again and again with
the same shapes, joined in the same way. A run found, each dim of one layer stands for
the dim at its place in the next: they form a class. Layers inside a scan are one body
already. Pure; must not know meshes or costs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.planner.graph import Graph, Operator

_HEAVY = ("matmul", "convolution")
_NEXT = 16
"""Times the same heavy operator may come in one layer."""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Operators that come `count` times, one copy after the other."""

    start: int
    """Number of the first operator of the first copy."""
    period: int
    """Operators in one copy."""
    count: int


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Classes of dims and operators."""

    dims: tuple[int, ...]
    """For each dim of the graph its class: the lowest dim that plays the same part.
    No array has two different dims of one class."""
    operators: tuple[int, ...]
    """For each operator its class: the lowest operator that costs the same under every
    division that divides the dims of a class alike."""
    repeats: tuple[Repeat, ...]
    """The layers, in the order of the program."""


def find(graph: Graph) -> Blocks:
    """The repeated blocks of a program."""
    signatures = _Signatures(graph)
    kinds = np.array([signatures.of(op) for op in graph.operators], np.int64)
    classes = _Classes(graph)
    taken = np.zeros(len(kinds), bool)
    repeats: list[Repeat] = []
    heavy = np.array([op.kind in _HEAVY for op in graph.operators], bool)
    periods = _periods(kinds, heavy)
    for start, length, period in _runs(kinds, periods):
        copy = slice(start, start + period)
        part = slice(start, start + length + period)
        # Neighbours may share an operator or two that end the one and begin the other.
        new = np.count_nonzero(taken[part]) < period
        if not (new and heavy[copy].any() and _chained(graph, start, period)):
            continue
        if classes.add(_pairs(graph, start, length, period)):
            taken[part] = True
            count = length // period + 1
            repeats.append(Repeat(start=start, period=period, count=count))
    dims = tuple(map(classes.of, range(len(graph.dims))))
    return Blocks(
        dims=dims,
        operators=_operator_classes(graph, dims),
        repeats=tuple(sorted(repeats, key=lambda repeat: repeat.start)),
    )


class _Signatures:
    """Numbers for operators that do the same with arrays of the same shapes."""

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
        key = (op.primitive, op.flops, op.trips, op.again, arrays, joined, op.within)
        return self._numbers.setdefault(key, len(self._numbers))


def _dims(graph: Graph, op: Operator) -> Iterator[int]:
    for index in (*op.inputs, *op.outputs):
        yield from graph.values[index].dims
    yield from op.summed
    yield from op.whole


def _periods(kinds: np.ndarray, heavy: np.ndarray) -> list[int]:
    """Distances between heavy operators that are alike."""
    found: set[int] = set()
    for kind in np.unique(kinds[heavy]):
        places = np.flatnonzero(heavy & (kinds == kind))
        for step in range(1, min(_NEXT, len(places) - 1) + 1):
            found.update((places[step:] - places[:-step]).tolist())
    return sorted(found)


def _runs(kinds: np.ndarray, periods: Iterable[int]) -> list[tuple[int, int, int]]:
    """Stretches that equal what comes one period later: start, length, period.

    Those that cover most come first, and of these the shortest period.
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
    """Whether the second copy reads what the first one writes, as layers do.

    Branches side by side (queries, keys, values) are alike by chance.
    """
    first = graph.operators[start : start + period]
    second = graph.operators[start + period : start + 2 * period]
    written = {index for op in first for index in op.outputs}
    return any(index in written for op in second for index in op.inputs)


def _pairs(
    graph: Graph, start: int, length: int, period: int
) -> Iterator[tuple[int, int]]:
    """Dims of each operator and those at their place one period later."""
    for number in range(start, start + length):
        one, other = graph.operators[number], graph.operators[number + period]
        yield from zip(_dims(graph, one), _dims(graph, other), strict=True)


class _Classes:
    """Classes of dims that never meet in one array."""

    def __init__(self, graph: Graph) -> None:
        self._dims = graph.dims
        self._parent = list(range(len(graph.dims)))
        self._arrays = {frozenset(value.dims) for value in graph.values}

    def of(self, dim: int) -> int:
        return _root(self._parent, dim)

    def add(self, pairs: Iterable[tuple[int, int]]) -> bool:
        """Merges all pairs, or none where two dims of an array would be one."""
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
            op.primitive, op.flops, op.trips,
            tuple(arrays[index] for index in op.inputs),
            tuple(arrays[index] for index in op.outputs),
            tuple(dims[dim] for dim in op.summed),
            tuple(dims[dim] for dim in op.whole),
        )  # fmt: skip
        classes.append(first.setdefault(key, number))
    return tuple(classes)
