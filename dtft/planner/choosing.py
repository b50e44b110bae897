"""Which dims the axis `tensor` divides: exact for given sizes of the axes.

Makes a cost problem of a program (a variable per dim that could be divided, a table per
group of operators) and has it solved exactly (`assignment`). Equal layers share their
variables. Pure; must not know how other axes or knobs are chosen.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dtft.planner.amounts import Work
from dtft.planner.assignment import solve
from dtft.planner.factors import Factor, Problem
from dtft.planner.graph import Graph
from dtft.planner.groups import Group
from dtft.planner.partition import Division, work

Axes = tuple[str, ...]
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


def choose(
    graph: Graph,
    groups: Sequence[Group],
    base: Division,
    axis: str,
    dims: Sequence[int],
    price: Price,
) -> Division:
    """The division of least cost, with `axis` along any of `dims`.

    Args:
        graph: the program.
        groups: its operators.
        base: what the other axes divide; their dims are left to them.
        axis: the axis to lay.
        dims: dims it may divide (`candidates`).
        price: seconds of one execution of an operator, its collectives included.
    """
    free = [dim for dim in dims if not base.of(dim)]
    number = {dim: place for place, dim in enumerate(free)}
    tables = []
    for group in groups:
        scope = _scope(graph, group, base, number)
        if scope:
            tables.append(_table(graph, group, base, axis, scope, number, price))
    if not tables:
        return base
    used = sorted({variable for table in tables for variable in table.variables})
    place = {variable: i for i, variable in enumerate(used)}
    factors = tuple(
        Factor(variables=tuple(place[v] for v in t.variables), costs=t.costs)
        for t in tables
    )
    found = solve(Problem(sizes=(2,) * len(used), factors=factors))
    chosen = [free[v] for v, on in zip(used, found.values, strict=True) if on]
    return _with(base, axis, chosen)


def _scope(
    graph: Graph, group: Group, base: Division, number: Mapping[int, int]
) -> list[int]:
    operator = group.operator
    dims = (
        d for i in (*operator.inputs, *operator.outputs) for d in graph.values[i].dims
    )
    roots = dict.fromkeys(base.alias.get(dim, dim) for dim in dims)
    return [dim for dim in roots if dim in number]


def _table(
    graph: Graph,
    group: Group,
    base: Division,
    axis: str,
    scope: Sequence[int],
    number: Mapping[int, int],
    price: Price,
) -> Factor:
    costs = np.empty((2,) * len(scope))
    for choice in itertools.product((0, 1), repeat=len(scope)):
        chosen = [dim for dim, on in zip(scope, choice, strict=True) if on]
        division = _with(base, axis, chosen)
        costs[choice] = group.times * price(work(graph, group.operator, division))
    return Factor(variables=tuple(number[dim] for dim in scope), costs=costs)


def _with(base: Division, axis: str, dims: Iterable[int]) -> Division:
    axes: dict[int, Axes] = {**base.axes, **dict.fromkeys(dims, (axis,))}
    return Division(axes=axes, scatters=base.scatters, alias=base.alias)
