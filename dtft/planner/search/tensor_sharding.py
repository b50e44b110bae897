"""Selects for every mesh the dims that the axis `tensor` divides.

Writes a program as one cost problem (minimise a sum of tables) for all points (meshes
with a number of microbatches). The problem has a variable for the point, and one for
each dim that can be divided. For each set of these dims, one table has the seconds of
all operators that have exactly these dims. For each point, `solver` minimises the
seconds of a step in which no collective is hidden behind computation. Equal layers
share their variables.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property

import numpy as np

from dtft.planner.ir import PRODUCTS
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

    Excludes dims that index examples or positions (of tokens), which other axes divide,
    and dims that loops slice, which no axis divides. Also excludes dims that only
    intermediate values have, such as positions sliced from those of the batch.
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


NEARLY_NONE = 0.01
"""Least share of the operations of matmuls, convolutions and kernels that an axis must
divide; candidates with an axis below this share count as idle."""


def busy_axes(ways: Sequence[PricedOp]) -> set[str]:
    """Returns the axes that divide at least 1 % (`NEARLY_NONE`) of the work.

    The work is the operations of matmuls, convolutions and kernels such as attention.
    If the program has none of these, all operators count.

    Args:
        ways: the program's groups of operators, with their prices.
    """
    heavy = _products(ways) or ways
    shares: dict[str, float] = {}
    for way in heavy:
        for axis in way.work.divided_by:
            shares[axis] = shares.get(axis, 0.0) + _flops(way)
    least = NEARLY_NONE * sum(map(_flops, heavy))
    return {axis for axis, flops in shares.items() if flops >= least}


def _products(ways: Iterable[PricedOp]) -> list[PricedOp]:
    return [way for way in ways if way.group.operator.kind in PRODUCTS]


def _flops(way: PricedOp) -> float:
    return way.group.operator.flops * way.group.times


class Chooser:
    """Selects the dims of a program that one mesh axis divides, for each point.

    A point is a mesh and a number of microbatches.
    """

    def __init__(
        self, prices: Prices, base: ShardingAssignment, axis: str, dims: Sequence[int]
    ) -> None:
        """Prices each operator for each subset of its dims that the axis may divide.

        Args:
            prices: computes the prices of the program's operators.
            base: the division by the other axes: which axes divide which dims. `axis`
                divides no dim that another axis divides.
            axis: the axis whose dims are selected.
            dims: dims that the axis may divide (`candidates`) if their sizes allow it.
        """
        self._prices, self._base, self._axis = prices, base, axis
        self._costs_of = self._tables([dim for dim in dims if self._fits(dim)])
        self._dims = sorted({dim for scope in self._costs_of for dim in scope})
        self._alike = prices.columns.together(self._respects(self._costs_of))

    def choose(self) -> tuple[list[ShardingAssignment], np.ndarray]:
        """Finds which dims the axis divides at each point, so that a step is fastest.

        A point is a mesh and a number of microbatches. The seconds of a step are those
        without overlap of collectives and computation.

        Returns:
            The distinct divisions (which axes divide which dims), and the index of the
            division of each point; int [points].
        """
        if not self._dims:
            return [self._base], np.zeros(len(self._prices.columns), np.int64)
        found = solve_each(self._problem, given=0, deadline_s=DEADLINE_S)
        divisions, which = self._divisions(found)
        return divisions, which[self._alike.of]

    def choose_busy(
        self, points: np.ndarray
    ) -> tuple[list[ShardingAssignment], np.ndarray]:
        """Finds the dims that make a step fastest if the axis must not be idle.

        The axis must divide at least one heavy dim. A dim is heavy if dividing only
        this dim divides at least 1 % (`NEARLY_NONE`) of the operations of matmuls,
        convolutions and kernels.

        Args:
            points: indices of the points (meshes with a number of microbatches).

        Returns:
            The distinct divisions (which axes divide which dims), and the index of the
            division of each of the points, int [points given]; -1 if the axis can
            divide no heavy dim at the point.
        """
        heavy, missing = self._heavy, np.full(len(points), -1)
        if not heavy:
            return [], missing
        cases = self._alike.of[points]
        possible = [self._possible_at(self._dims[at - 1], self._alike) for at in heavy]
        kept = np.unique(cases[np.any(possible, axis=0)[cases]])
        if not len(kept):
            return [], missing
        every = (np.arange(size) for size in self._problem.sizes[1:])
        problem = _with_any(self._problem.restricted([kept, *every]), heavy)
        found = solve_each(problem, given=0, deadline_s=DEADLINE_S)
        divisions, which = self._divisions(found)
        at = np.minimum(np.searchsorted(kept, cases), len(kept) - 1)
        return divisions, np.where(kept[at] == cases, which[at], missing)

    @cached_property
    def _problem(self) -> CostProblem:
        """The cost problem, whose costs are the seconds of a step.

        Variable 0 is the index of the case, a set of points (meshes with a number of
        microbatches) with equal costs. Each other variable is a dim: 1 if the axis
        divides the dim, else 0.
        """
        number = {dim: 1 + place for place, dim in enumerate(self._dims)}
        factors = [self._possible(dim, number[dim], self._alike) for dim in self._dims]
        factors += [
            Factor(
                variables=(0, *(number[dim] for dim in scope)),
                costs=np.moveaxis(_costs(choices, self._alike), -1, 0),
            )
            for scope, choices in self._costs_of.items()
        ]
        sizes = (len(self._alike.first), *(2,) * len(self._dims))
        return CostProblem(sizes=sizes, factors=tuple(factors))

    @cached_property
    def _heavy(self) -> list[int]:
        """The variables (in `_problem`) of the heavy dims.

        A dim is heavy if dividing only this dim divides at least 1 % (`NEARLY_NONE`) of
        the operations of matmuls, convolutions and kernels.
        """
        divided = dict.fromkeys(self._dims, 0.0)
        for scope, choices in self._costs_of.items():
            for place, dim in enumerate(scope):
                alone = tuple(int(other == place) for other in range(len(scope)))
                divided[dim] += sum(
                    _flops(way)
                    for way in _products(choices[alone])
                    if self._axis in way.work.divided_by
                )
        ways = _products(self._prices.priced_ops(self._base))
        least = NEARLY_NONE * sum(map(_flops, ways))
        return [n for n, dim in enumerate(self._dims, 1) if divided[dim] >= least]

    def _divisions(
        self, found: np.ndarray
    ) -> tuple[list[ShardingAssignment], np.ndarray]:
        """Converts solutions of the cost problem to divisions.

        A division says which axes divide which dims.

        Args:
            found: values of the problem's variables; int [solutions, variables].

        Returns:
            The distinct divisions, and for each solution the index of its division.
        """
        chosen = found[:, 1 : 1 + len(self._dims)]
        rows, which = np.unique(chosen, axis=0, return_inverse=True)
        divisions = [
            self._with([dim for dim, on in zip(self._dims, row, strict=True) if on])
            for row in rows
        ]
        return divisions, which.ravel()

    def _tables(self, free: Sequence[int]) -> Tables:
        """Prices each operator for each subset of its dims that the axis may divide.

        The result maps a tuple of dims in `free` to a second map. Its keys have 1 for
        each of these dims that the axis divides, else 0. Its values are the priced
        groups of operators that have exactly these dims of `free`. Operators without a
        dim in `free` are left out.

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
        """Returns partitions of the points that together tell where costs are equal.

        A point is a mesh and a number of microbatches. The costs are the seconds in
        `tables`. Two points that share a case in each of the partitions have equal
        costs, and the axis has the same size in both.
        """
        found = {self._prices.columns.divided([(self._axis,)]): None}
        for choices in tables.values():
            for way in itertools.chain(*choices.values()):
                found |= dict.fromkeys(cases for cases, _ in way.seconds)
        return found

    def _fits(self, dim: int) -> bool:
        """Whether some mesh has a size of the axis, above 1, that divides a dim evenly.

        False if another axis already divides the dim.
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
        fits = self._possible_at(dim, alike)
        costs = np.where(np.stack([fits | True, fits], axis=1), 0.0, np.inf)
        return Factor(variables=(0, variable), costs=costs)

    def _possible_at(self, dim: int, alike: Cases) -> np.ndarray:
        """Returns for each case of `alike` whether the axis can divide a dim evenly.

        A case is a set of points at which the axis has the same size (`Cases`). The
        result is bool [cases]; it is False where the axis has size one.
        """
        parts = alike.sizes[self._axis]
        fits = parts > 1
        for size in self._prices.question.graph.dims[dim].sizes:
            fits = fits & (size % parts == 0)
        return fits

    def _with(self, dims: Iterable[int]) -> ShardingAssignment:
        axes = {**self._base.axes, **dict.fromkeys(dims, (self._axis,))}
        return replace(self._base, axes=axes)


def _with_any(problem: CostProblem, variables: Sequence[int]) -> CostProblem:
    """Returns a problem in which at least one of some variables must also be 1.

    The condition is not one table over all the variables, which would be large.
    Instead, for each of the variables but the first, a variable is added that is 1 if
    this variable or one before it in the list is 1. Each added variable has one table
    of three variables. A last table forbids that the last added variable is 0, or the
    only variable if none is added.

    Args:
        problem: the problem.
        variables: one or more of its variables, each with two values.
    """
    any_so_far, factors, sizes = variables[0], list(problem.factors), problem.sizes
    for variable in variables[1:]:
        before, one, after = np.indices((2, 2, 2))
        costs = np.where(after == before | one, 0.0, np.inf)
        scope = (any_so_far, variable, len(sizes))
        factors.append(Factor(variables=scope, costs=costs))
        any_so_far, sizes = len(sizes), (*sizes, 2)
    factors.append(Factor(variables=(any_so_far,), costs=np.array([np.inf, 0.0])))
    return CostProblem(sizes=sizes, factors=tuple(factors))


def _costs(
    choices: Mapping[tuple[int, ...], list[PricedOp]], alike: Cases
) -> np.ndarray:
    """Adds up the seconds per step of operators with the same dims.

    Args:
        choices: an entry of `Tables`: map from a 0 or 1 for each dim (1 if the axis
            divides the dim) to the priced operators.
        alike: a partition of the points (meshes with a number of microbatches) into
            cases of equal costs.

    Returns:
        Float [2, ..., 2, cases], with one dim of size 2 for each dim of the operators
        that the axis may divide.
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
