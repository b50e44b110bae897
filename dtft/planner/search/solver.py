"""Solves small discrete cost problems exactly.

A problem has variables with a few values each, and factors: tables of costs over the
combinations of values of a few variables. The cost of an assignment is the sum of its
entries in all tables; +inf forbids a combination.

Eliminates variables if the tables stay small, as on chains and trees. Otherwise prunes
dominated values first, and then eliminates variables or solves a mixed-integer program.
If the deadline ends that program, the result may not be optimal. If every assignment is
forbidden, the error names the variables in conflict.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dtft.planner.search import mixed_integer
from dtft.planner.search.elimination import (
    CostProblem,
    Factor,
    eliminate,
    eliminate_each,
    elimination_order,
)

# Pruning drops dominated values: another value never costs more. Pruning is sound: an
# assignment of least cost stays.


@dataclass(frozen=True, kw_only=True, eq=False)
class Pruned:
    """A problem without its dominated values.

    A value of a variable is dominated if another value of it costs no more in any
    table, whatever the values of the other variables are.
    """

    problem: CostProblem
    """The problem with the values that stay, renumbered."""
    kept: tuple[np.ndarray, ...]
    """For each variable the values that stay, as numbered in the original problem."""

    def restored(self, values: Sequence[int]) -> tuple[int, ...]:
        """Converts values of the pruned problem to values of the original problem."""
        return tuple(
            int(kept[value]) for kept, value in zip(self.kept, values, strict=True)
        )


def prune(problem: CostProblem) -> Pruned:
    """Removes dominated values until no dominated value is left.

    Value a dominates value b if a costs no more than b in every factor, for all values
    of the other variables. Any assignment with b can use a instead, so an optimum
    without b exists. Of values that dominate each other the first stays. Entries are
    compared without arithmetic, so rounding cannot remove the optimum.

    In the example, values 1 and 2 cost less than value 0 and equally much, so value 1
    stays.

    >>> from dtft.planner.search.elimination import Factor
    >>> cost = Factor(variables=(0,), costs=np.array([3.0, 1.0, 1.0]))
    >>> prune(CostProblem(sizes=(3,), factors=(cost,))).kept
    (array([1]),)
    """
    kept = [np.arange(size) for size in problem.sizes]
    tables = [factor.costs for factor in problem.factors]
    around = problem.factors_of_variables()
    waiting = dict.fromkeys(range(len(problem.sizes)))
    while waiting:
        variable = next(iter(waiting))
        del waiting[variable]
        lines = [
            _by_value(tables[at], problem.factors[at].variables.index(variable))
            for at in around[variable]
        ]
        stay = _undominated(lines, len(kept[variable]))
        if len(stay) == len(kept[variable]):
            continue
        kept[variable] = kept[variable][stay]
        for at in around[variable]:
            scope = problem.factors[at].variables
            tables[at] = np.take(tables[at], stay, axis=scope.index(variable))
            # With fewer combinations, values of other variables may be dominated now.
            waiting.update(dict.fromkeys(other for other in scope if other != variable))
    return Pruned(problem=problem.restricted(kept), kept=tuple(kept))


def _by_value(costs: np.ndarray, place: int) -> np.ndarray:
    """Returns costs as a matrix with a row for each value of one variable.

    The variable is dim `place` of `costs`. A column has a combination of the values of
    the other variables.
    """
    return np.moveaxis(costs, place, 0).reshape(costs.shape[place], -1)


def _undominated(tables: Sequence[np.ndarray], num_values: int) -> np.ndarray:
    """Returns the values of a variable that no other value dominates, ascending.

    A value dominates another if it costs no more in any column of any table. Of values
    that dominate each other the first is returned.

    Args:
        tables: the costs of each factor that has the variable, as a matrix: a row for
            each value, a column for each combination of values of other variables.
        num_values: the number of values of the variable.
    """
    # [a, b]: a is never worse than b.
    never_worse = np.ones((num_values, num_values), bool)
    for table in tables:
        for value in range(num_values):
            never_worse[value] &= (table[value] <= table).all(axis=1)
    first = np.tri(num_values, k=-1, dtype=bool).T  # [a, b]: a comes before b
    # `removes` is a strict order, because dominance is transitive. So a value that
    # removes b is itself removed only by a value that removes b too.
    removes = never_worse & (~never_worse.T | first)
    return np.flatnonzero(~removes.any(axis=0))


MAX_ENTRIES = 2**22
"""Limit of the entries of the largest table that elimination creates: 32 MiB."""

_MAX_TOTAL = 2**27
"""Limit of the entries of all tables of an elimination (about a second of work)."""

_FEWER = 64
"""Factor by which `solve_each` reduces the number of values in one elimination, if
its tables are too large."""

_MAX_SWEEPS = 100
"""Limit of the sweeps over all variables in the search for a local optimum."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A value for each variable of a problem."""

    values: tuple[int, ...]
    """Values of the variables, in the order of `CostProblem.sizes`."""
    cost: float
    method: Literal["elimination", "mixed-integer", "descent"]
    """How the assignment was found. `descent`: the mixed-integer program ran out of
    time, and coordinate descent found a cheaper assignment than the program."""
    bound: float
    """A lower bound of the cost of any assignment. Equals `cost` if the assignment is
    proven to be optimal. A mixed-integer program proves optimality to HiGHS's
    tolerance, 1e-10 of the largest cost."""


def solve(
    problem: CostProblem, *, deadline_s: float = 10.0, max_entries: int = MAX_ENTRIES
) -> Assignment:
    """Finds an assignment of least cost.

    The result is deterministic, unless the deadline ends a mixed-integer program. Then
    the best assignment found so far is returned, and the lower bound in the result
    (`Assignment.bound`) may be below its cost.

    Of assignments whose costs are equal to the last bit, elimination returns the
    lexicographically smallest one in the reverse of the elimination order. On a tree
    whose parents have lower numbers than their children, such as a chain that is
    numbered from end to end, this is the lexicographically smallest one in the order of
    `sizes`. After pruning, or with a mixed-integer program, another assignment of equal
    cost may be returned.

    Args:
        problem: the problem to minimise.
        deadline_s: seconds for the mixed-integer program, if it is needed. Elimination
            is used only if it takes about a second at most.
        max_entries: limit of the entries of the largest table that elimination creates.

    Raises:
        ValueError: every assignment is forbidden. The error names the variables of a
            set of factors that together forbid every assignment. The set is minimal if
            elimination can find it within its limits.
        TimeoutError: no allowed assignment was found in the time. Cannot happen if no
            combination is forbidden.
        RuntimeError: HiGHS failed.

    >>> pair = Factor(variables=(0, 1), costs=np.array([[3.0, 5.0], [2.0, 9.0]]))
    >>> solve(CostProblem(sizes=(2, 2), factors=(pair,)))
    Assignment(values=(1, 0), cost=2.0, method='elimination', bound=2.0)
    """
    order = _order(problem, max_entries)
    if order is not None:
        return _eliminated(problem, order)
    pruned = prune(problem)
    order = _order(pruned.problem, max_entries)
    if order is not None:
        found = _eliminated(pruned.problem, order)
    else:
        found = _programmed(pruned.problem, deadline_s)
    return Assignment(
        values=pruned.restored(found.values),
        cost=found.cost,
        method=found.method,
        bound=found.bound,
    )


def solve_each(
    problem: CostProblem,
    *,
    given: int = 0,
    deadline_s: float = 10.0,
    max_entries: int = MAX_ENTRIES,
) -> np.ndarray:
    """Finds an assignment of least cost for each value of one variable.

    Eliminates the other variables for many of its values at once, if the tables stay
    small. Otherwise solves the problem of each value separately with `solve`.

    Args:
        problem: the problem to minimise.
        given: the variable for each of whose values an assignment is found.
        deadline_s: seconds for all mixed-integer programs together, if they are needed.
            The remaining time is divided evenly among the remaining values.
        max_entries: limit of the entries of the largest table that elimination creates.

    Returns:
        Values of all variables; int [values of `given`, variables].

    Raises:
        ValueError: for some value of `given`, every assignment is forbidden.
        TimeoutError: no allowed assignment was found in the time.
        RuntimeError: HiGHS failed.

    In the example, value 0 of variable 0 costs least with value 0 of variable 1, and
    value 1 with value 1.

    >>> pair = Factor(variables=(0, 1), costs=np.array([[3.0, 5.0], [2.0, 1.0]]))
    >>> solve_each(CostProblem(sizes=(2, 2), factors=(pair,))).tolist()
    [[0, 0], [1, 1]]
    """
    rows = problem.sizes[given]
    for at_once in (rows, -(-rows // _FEWER), -(-rows // _FEWER**2)):
        order = _order(_at(problem, given, 0), max_entries // at_once, at_once)
        if order is not None:
            runs = [range(n, min(n + at_once, rows)) for n in range(0, rows, at_once)]
            return np.concatenate([_each(problem, given, run, order) for run in runs])
    found = np.zeros((rows, len(problem.sizes)), np.int64)
    ends = time.monotonic() + deadline_s
    for row in range(rows):
        left_s = max(0.01, (ends - time.monotonic()) / (rows - row))
        alone = _at(problem, given, row)
        found[row] = solve(alone, deadline_s=left_s, max_entries=max_entries).values
        found[row, given] = row
    return found


def _each(
    problem: CostProblem, given: int, values: range, order: Sequence[int]
) -> np.ndarray:
    """Finds an assignment of least cost for each value of `given` in a range.

    Runs one elimination for all these values. Raises ValueError if, for any of these
    values, every assignment is forbidden.

    Args:
        problem: the problem to minimise.
        given: the variable whose values are all kept.
        values: the range of its values.
        order: the order in which to eliminate the other variables.
    """
    part = _at(problem, given, values)
    tables = [(factor.variables, factor.costs) for factor in part.factors]
    found, costs = eliminate_each(part.sizes, tables, order, given)
    if np.isinf(costs).any():
        raise _infeasible(_at(problem, given, values[int(np.isinf(costs).argmax())]))
    found[:, given] = values
    return found


def _at(problem: CostProblem, variable: int, values: int | range) -> CostProblem:
    kept = [np.arange(size) for size in problem.sizes]
    kept[variable] = np.atleast_1d(values)
    return problem.restricted(kept)


def _order(
    problem: CostProblem, max_entries: int, at_once: int = 1
) -> list[int] | None:
    return elimination_order(
        problem.sizes,
        [factor.variables for factor in problem.factors],
        max_entries=max_entries,
        max_total=_MAX_TOTAL // at_once,
    )


def _eliminated(problem: CostProblem, order: Sequence[int]) -> Assignment:
    tables = [(factor.variables, factor.costs) for factor in problem.factors]
    values, cost = eliminate(problem.sizes, tables, order)
    if math.isinf(cost):
        raise _infeasible(problem)
    return Assignment(values=tuple(values), cost=cost, method="elimination", bound=cost)


def _programmed(problem: CostProblem, deadline_s: float) -> Assignment:
    outcome = mixed_integer.minimise(problem, deadline_s=deadline_s)
    if math.isinf(outcome.bound) and outcome.bound > 0:
        raise _infeasible(problem)
    if outcome.values is not None and outcome.optimal:
        cost = problem.cost(outcome.values)
        return Assignment(
            values=outcome.values, cost=cost, method="mixed-integer", bound=cost
        )
    # HiGHS may end without a bound; the sum of the factors' least costs is a bound too.
    floor = sum(float(factor.costs.min()) for factor in problem.factors)
    return _cut_short(problem, outcome.values, max(outcome.bound, floor), deadline_s)


def _cut_short(
    problem: CostProblem, found: tuple[int, ...] | None, bound: float, deadline_s: float
) -> Assignment:
    """Returns the best known assignment after HiGHS ended without a proven optimum.

    This is the cheaper of the assignment that HiGHS found and a local optimum by
    coordinate descent. Raises TimeoutError if both are forbidden.

    Args:
        problem: the problem to minimise.
        found: the assignment that HiGHS found; None if it found none.
        bound: a lower bound of the cost of any assignment.
        deadline_s: the seconds that HiGHS had, for the error.
    """
    values, method = _descended(problem), "descent"
    if found is not None and problem.cost(found) <= problem.cost(values):
        values, method = found, "mixed-integer"
    cost = problem.cost(values)
    if math.isinf(cost):
        raise TimeoutError(
            f"deadline_s={deadline_s:g}: no allowed assignment of "
            f"{len(problem.sizes)} variables was found in that time; the least cost is "
            f"at least {bound:.6g}. Allow more time, or give variables fewer values."
        )
    return Assignment(values=values, cost=cost, method=method, bound=min(bound, cost))


def _descended(problem: CostProblem) -> tuple[int, ...]:
    """Finds a local optimum by coordinate descent, from value 0 of every variable.

    A sweep gives one variable after another its cheapest value. The descent ends when a
    sweep changes no variable, or after 100 sweeps (`_MAX_SWEEPS`).
    """
    around = problem.factors_of_variables()
    index: list[Any] = [0] * len(problem.sizes)
    for _ in range(_MAX_SWEEPS):  # rounding errors could make it cycle
        changed = False
        for variable, factors in enumerate(around):
            value, index[variable] = index[variable], slice(None)
            line = np.zeros(problem.sizes[variable])
            for factor in (problem.factors[at] for at in factors):
                line += factor.costs[tuple([index[v] for v in factor.variables])]
            best = int(line.argmin())
            better = bool(line[best] < line[value])
            index[variable] = best if better else value
            changed = changed or better
        if not changed:
            break
    return tuple(index)


def _infeasible(problem: CostProblem) -> ValueError:
    factors = _conflict(problem)
    variables = sorted({v for factor in factors for v in factor.variables})
    over = "; ".join(f"({problem.words(f.variables)})" for f in factors[:4])
    more = f" and {len(factors) - 4} more" if len(factors) > 4 else ""
    return ValueError(
        f"problem: every combination of values of {problem.words(variables)} is "
        f"forbidden, by the factors over {over}{more} taken together. Allow one of "
        "the combinations, or give one of these variables another value."
    )


def _conflict(problem: CostProblem) -> list[Factor]:
    """Finds a minimal set of factors that together forbid every assignment.

    Finds one factor after another, by the idea of QuickXplain (Junker, AAAI 2004). If
    elimination would exceed its limits, returns all factors that forbid a combination.
    """
    rest = [
        Factor(variables=f.variables, costs=np.where(np.isinf(f.costs), np.inf, 0.0))
        for f in problem.factors
        if np.isinf(f.costs).any()
    ]
    hard = CostProblem(sizes=problem.sizes, factors=tuple(rest), names=problem.names)
    order = _order(hard, MAX_ENTRIES)  # valid for subsets of the factors too
    if order is None:
        return rest
    found: list[Factor] = []
    while _allow(found, problem.sizes, order):
        too_few, enough = 0, len(rest)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if _allow([*found, *rest[:middle]], problem.sizes, order):
                too_few = middle
            else:
                enough = middle
        found.append(rest[too_few])
        del rest[too_few:]
    return found


def _allow(
    factors: Sequence[Factor], sizes: Sequence[int], order: Sequence[int]
) -> bool:
    """Returns whether any assignment is allowed by all of the factors.

    A factor forbids the assignments to which it gives the cost +inf.

    Args:
        factors: the factors.
        sizes: the number of values of each variable.
        order: the order in which to eliminate all variables with more than one value.
    """
    tables = [(factor.variables, factor.costs) for factor in factors]
    return not math.isinf(eliminate(sizes, tables, order)[1])
