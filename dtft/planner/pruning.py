"""Values of variables that need not be tried, because another is never worse.

Decides which values of a cost problem stay. Sound: some assignment of least cost stays.
Must not know how the rest is solved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtft.planner.factors import Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Pruned:
    """What pruning left of a problem."""

    problem: Problem
    """The problem with the values that stay, renumbered."""
    kept: tuple[np.ndarray, ...]
    """For each variable the values that stay, as numbers of the first problem."""

    def restored(self, values: Sequence[int]) -> tuple[int, ...]:
        """The first problem's values for values of the pruned one."""
        return tuple(
            int(kept[value]) for kept, value in zip(self.kept, values, strict=True)
        )


def prune(problem: Problem) -> Pruned:
    """Removes dominated values until none is left.

    Value a dominates b where in every factor, whatever the other variables' values, it
    costs no more. Whoever uses b can then use a instead, so an optimum without b
    exists; of values that dominate each other the first stays. Comparing entries one by
    one needs no arithmetic, so no rounding can remove the optimum.

    >>> from dtft.planner.factors import Factor
    >>> cost = Factor(variables=(0,), costs=np.array([3.0, 1.0, 1.0]))
    >>> prune(Problem(sizes=(3,), factors=(cost,))).kept
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
            # With fewer combinations to compare in, others may be dominated now.
            waiting.update(dict.fromkeys(other for other in scope if other != variable))
    return Pruned(problem=problem.restricted(kept), kept=tuple(kept))


def _by_value(costs: np.ndarray, place: int) -> np.ndarray:
    """A row per value of one variable, a column per combination of the others."""
    return np.moveaxis(costs, place, 0).reshape(costs.shape[place], -1)


def _undominated(tables: Sequence[np.ndarray], num_values: int) -> np.ndarray:
    """Which values stay, ascending."""
    never_worse = np.ones((num_values, num_values), bool)  # [a, b]: a than b
    for table in tables:
        for value in range(num_values):
            never_worse[value] &= (table[value] <= table).all(axis=1)
    first = np.tri(num_values, k=-1, dtype=bool).T  # [a, b]: a comes before b
    # A strict order, as dominance is transitive: what removes b is itself removed only
    # by something that removes b too.
    removes = never_worse & (~never_worse.T | first)
    return np.flatnonzero(~removes.any(axis=0))
