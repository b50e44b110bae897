"""Which dims the axis `tensor` divides: exact for given sizes of the axes.

Makes a cost problem of a program (a variable per dim that could be divided, a table per
group of operators) and has it solved exactly (`assignment`). Equal layers share their
variables. Pure; must not know how other axes or knobs are chosen.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dtft.planner.amounts import Work
from dtft.planner.assignment import solve
from dtft.planner.factors import Factor, Problem
from dtft.planner.graph import Graph
from dtft.planner.groups import Group
from dtft.planner.partition import Division, work

Price = Callable[[Work], float]
"""Seconds of one execution."""


def candidates(
    graph: Graph, groups: Iterable[Group], alias: Mapping[int, int], parts: int
) -> tuple[int, ...]:
    """Dims that an axis of `parts` devices could divide with gain.

    Those of matmuls and convolutions that every array which has them lets be divided.
    """
    found: dict[int, None] = {}
    for group in groups:
        if group.operator.kind not in ("matmul", "convolution"):
            continue
        for index in (*group.operator.inputs, *group.operator.outputs):
            for dim in graph.values[index].dims:
                known = graph.dims[dim]
                if known.divisible_by(parts) and not known.loop:
                    found[alias.get(dim, dim)] = None
    return tuple(found)


class Chooser:
    """Lays one axis on the dims of a program, for meshes of many sizes.

    What each choice means for each group of operators is found once; prices are asked
    for every mesh.
    """

    def __init__(
        self, graph: Graph, groups: Sequence[Group], base: Division, axis: str
    ) -> None:
        """Nothing is laid yet.

        Args:
            graph: the program.
            groups: its operators.
            base: what the other axes divide; their dims are left to them.
            axis: the axis to lay.
        """
        self._graph, self._groups = graph, groups
        self.base, self._axis = base, axis
        self._works: dict[tuple[int, tuple[int, ...]], Work] = {}
        self._scopes = [self._scope(group) for group in groups]

    def choose(self, dims: Sequence[int], price: Price) -> Division:
        """The division of least cost, with the axis along any of `dims`.

        Args:
            dims: dims it may divide (`candidates`).
            price: seconds of one execution of an operator, its collectives included.
        """
        free = [dim for dim in dims if not self.base.of(dim)]
        tables = self._tables(free, price)
        if not tables:
            return self.base
        used = sorted({dim for scope, _ in tables for dim in scope})
        number = {dim: place for place, dim in enumerate(used)}
        factors = tuple(
            Factor(variables=tuple(number[dim] for dim in scope), costs=costs)
            for scope, costs in tables
        )
        found = solve(Problem(sizes=(2,) * len(used), factors=factors))
        chosen = [dim for dim, on in zip(used, found.values, strict=True) if on]
        return self._with(chosen)

    def _scope(self, group: Group) -> tuple[int, ...]:
        """Dims that an operator has, each once."""
        operator, values = group.operator, self._graph.values
        dims = (
            d for i in (*operator.inputs, *operator.outputs) for d in values[i].dims
        )
        return tuple(dict.fromkeys(map(self.base.root, dims)))

    def _tables(
        self, free: Iterable[int], price: Price
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """For each set of dims what its operators cost by which of them are divided."""
        allowed = set(free)
        found: dict[tuple[int, ...], np.ndarray] = {}
        for number, group in enumerate(self._groups):
            scope = tuple(sorted(d for d in self._scopes[number] if d in allowed))
            if not scope:
                continue
            costs = found.setdefault(scope, np.zeros((2,) * len(scope)))
            for choice in itertools.product((0, 1), repeat=len(scope)):
                chosen = tuple(d for d, on in zip(scope, choice, strict=True) if on)
                costs[choice] += group.times * price(self._work(number, chosen))
        return list(found.items())

    def _work(self, number: int, chosen: tuple[int, ...]) -> Work:
        key = number, chosen
        if key not in self._works:
            operator = self._groups[number].operator
            self._works[key] = work(self._graph, operator, self._with(chosen))
        return self._works[key]

    def _with(self, dims: Iterable[int]) -> Division:
        axes = {**self.base.axes, **dict.fromkeys(dims, (self._axis,))}
        return replace(self.base, axes=axes)
