"""Selects for every mesh the dims that the axis `tensor` divides.

Writes a program as one cost problem for all points (meshes with a number of
microbatches). The problem has a variable for the point, one for each dim that can be
divided, and one table of seconds for all operators that have the same of these dims.
For each point, `solver` minimises the seconds of a step in which no collective is
hidden behind computation. Equal layers share their variables.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from dtft.planner.search.elimination import CostProblem, Factor
from dtft.planner.search.price_table import Cases, PricedOp, Prices, Total
from dtft.planner.search.solver import solve_each
from dtft.planner.spmd import ShardingAssignment
from dtft.planner.workload import Workload

DEADLINE_S = 10.0
"""Seconds after which the solver returns the best division found so far.

Applies only to programs whose tables are too large for variable elimination. No model
in the tests has such tables.
"""

Tables = dict[tuple[int, ...], dict[tuple[int, ...], list[PricedOp]]]
"""Priced operators by their dims, then by which of these dims are divided (0 or 1)."""


def candidates(question: Workload) -> tuple[int, ...]:
    """Returns the dims that the axis `tensor` may divide.

    These are the weight dims of matmuls and convolutions. A dim that several equal
    layers have is returned once, as the dim that represents it (`Workload.root`).

    Excludes dims of examples and positions, which other axes divide, and dims of loops,
    which no axis divides. Also excludes dims that only intermediate values have, such
    as positions sliced from those of the batch.
    """
    graph = question.graph
    allowed = question.weight_dims.difference(
        question.batch_dims, question.sequence_dims
    )
    found: dict[int, None] = {}
    for group in question.groups:
        if group.operator.kind not in ("matmul", "convolution"):
            continue
        for index in (*group.operator.inputs, *group.operator.outputs):
            for dim in graph.values[index].dims:
                root = question.root(dim)
                if not graph.dims[dim].loop and root in allowed:
                    found[root] = None
    return tuple(found)


class Chooser:
    """Selects the dims of a program that one mesh axis divides, for each point.

    A point is a mesh and a number of microbatches.
    """

    def __init__(self, prices: Prices, base: ShardingAssignment, axis: str) -> None:
        """Keeps its arguments; `choose` selects the dims.

        Args:
            prices: prices of the program's operators.
            base: dims that the other axes divide; `axis` does not divide these dims.
            axis: the axis whose dims are selected.
        """
        self._prices, self._base, self._axis = prices, base, axis

    def choose(
        self, dims: Sequence[int]
    ) -> tuple[list[ShardingAssignment], np.ndarray]:
        """Finds which dims the axis divides at each point, so that a step is fastest.

        A point is a mesh and a number of microbatches. The seconds of a step are those
        without overlap of collectives and computation.

        Args:
            dims: dims that the axis may divide (`candidates`) if their sizes allow it.

        Returns:
            The distinct divisions (which axes divide which dims), and the index of the
            division of each point; int [points].
        """
        columns = self._prices.columns
        tables = self._tables([dim for dim in dims if self._fits(dim)])
        used = sorted({dim for scope in tables for dim in scope})
        if not used:
            return [self._base], np.zeros(len(columns), np.int64)
        alike = columns.together(self._respects(tables))
        number = {dim: 1 + place for place, dim in enumerate(used)}
        factors = [self._possible(dim, number[dim], alike) for dim in used]
        factors += [
            Factor(
                variables=(0, *(number[dim] for dim in scope)),
                costs=np.moveaxis(_costs(choices, alike), -1, 0),
            )
            for scope, choices in tables.items()
        ]
        sizes = (len(alike.first), *(2,) * len(used))
        problem = CostProblem(sizes=sizes, factors=tuple(factors))
        found = solve_each(problem, given=0, deadline_s=DEADLINE_S)[:, 1:]
        rows, which = np.unique(found, axis=0, return_inverse=True)
        divisions = [
            self._with([dim for dim, on in zip(used, row, strict=True) if on])
            for row in rows
        ]
        return divisions, which.ravel()[alike.of]

    def _tables(self, free: Sequence[int]) -> Tables:
        """Prices the operators for each choice of dims that the axis divides.

        Operators are grouped by their dims in `free`. Operators without a dim in `free`
        are left out.

        Args:
            free: the dims that the axis may divide.
        """
        prices, allowed = self._prices, set(free)
        asked: list[tuple[int, ShardingAssignment]] = []
        with_dims = cache(self._with)
        places: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for number in range(len(prices.question.groups)):
            scope = tuple(sorted(d for d in prices.works.dims(number) if d in allowed))
            choices = itertools.product((0, 1), repeat=len(scope))
            for choice in choices if scope else ():
                chosen = tuple(dim for dim, on in zip(scope, choice, strict=True) if on)
                asked.append((number, with_dims(chosen)))
                places.append((scope, choice))
        found: Tables = {}
        for (scope, choice), way in zip(places, prices.all(asked), strict=True):
            found.setdefault(scope, {}).setdefault(choice, []).append(way)
        return found

    def _respects(self, tables: Tables) -> Iterable[Cases]:
        """Returns the partitions of the points that determine the costs in the tables.

        A point is a mesh and a number of microbatches. Points that are in one case
        (part) of each of these partitions have equal costs and an equal size of the
        axis.
        """
        found = {self._prices.columns.divided([(self._axis,)]): None}
        for choices in tables.values():
            for way in itertools.chain(*choices.values()):
                found |= dict.fromkeys(cases for cases, _ in way.seconds)
        return found

    def _fits(self, dim: int) -> bool:
        """Whether some mesh has a size of the axis that divides a dim evenly.

        Also false if another axis divides the dim.
        """
        known = self._prices.question.graph.dims[dim]
        parts = np.unique(self._prices.columns.sizes[self._axis]).tolist()
        fits = any(part > 1 and known.divisible_by(part) for part in parts)
        return fits and not self._base.of(dim)

    def _possible(self, dim: int, variable: int, alike: Cases) -> Factor:
        """Makes a factor (a table of costs) that keeps a dim undivided at some points.

        Dividing the dim costs infinitely much at points (meshes with a number of
        microbatches) at which the axis has size one, or a size that does not divide the
        dim's size evenly.

        Args:
            dim: the dim.
            variable: the dim's variable in the cost problem.
            alike: the points, as cases of equal costs; variable 0 selects the case.
        """
        parts = alike.sizes[self._axis]
        fits = parts > 1
        for size in self._prices.question.graph.dims[dim].sizes:
            fits = fits & (size % parts == 0)
        costs = np.where(np.stack([fits | True, fits], axis=1), 0.0, np.inf)
        return Factor(variables=(0, variable), costs=costs)

    def _with(self, dims: Iterable[int]) -> ShardingAssignment:
        axes = {**self._base.axes, **dict.fromkeys(dims, (self._axis,))}
        return replace(self._base, axes=axes)


def _costs(
    choices: Mapping[tuple[int, ...], list[PricedOp]], alike: Cases
) -> np.ndarray:
    """Adds up the seconds of operators with the same dims; float [2, ..., 2, cases].

    The result has one dim of size 2 (0: undivided, 1: divided) for each dim of the
    operators that the axis may divide. A case is a set of points (meshes with a number
    of microbatches) of equal costs.

    Args:
        choices: map from the choice of divided dims to the operators with their prices.
        alike: the cases.
    """
    shape = (2,) * len(next(iter(choices)))
    costs = np.zeros((*shape, len(alike.first)))
    for choice, ways in choices.items():
        total = Total()
        for way in ways:
            for cases, seconds in way.seconds:
                total.add(cases, seconds)
        costs[choice] = total.at(alike.first)
    return costs
