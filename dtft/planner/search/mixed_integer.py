"""Minimises a sum of cost tables as a mixed-integer linear program.

Used for problems whose tables would become too large for variable elimination. The
formulation uses local marginals (Wainwright and Jordan, Foundations and Trends in
Machine Learning 1, 2008, section 4.1). Every value of a variable has a 0/1 unknown, the
value's binary, which is 1 if the value is selected. Every allowed combination of values
in a factor (table) of two or more variables has an unknown from 0 to 1, its weight. The
weights of all combinations with a value add up to the value's binary. The linear
relaxation is exact on trees. HiGHS solves the program through SciPy.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.planner.search.elimination import CostProblem, Factor

_SCALE = 1e4
"""Largest coefficient of the objective that HiGHS gets. All costs are scaled by one
factor to reach it, because HiGHS stops at an absolute gap of 1e-6."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run of HiGHS."""

    values: tuple[int, ...] | None
    """The best assignment that was found; None if no assignment was found."""
    bound: float
    """A lower bound of the cost; -inf if HiGHS gave no bound, +inf if every assignment
    is forbidden."""
    optimal: bool
    """Whether `values` is proven to be optimal, to HiGHS's tolerance. Also true if
    every assignment is proven to be forbidden."""


@dataclass(frozen=True, kw_only=True)
class _Program:
    """The program: minimise costs @ x with equal @ x == right and 0 <= x <= upper.

    The first `num_binaries` entries of x are integers, the others are real numbers.
    """

    costs: np.ndarray
    upper: np.ndarray
    num_binaries: int
    entries: np.ndarray
    """Rows, columns and values of the matrix `equal`; [3, N]."""
    right: np.ndarray
    constant: float
    """The part of the cost that `costs` leaves out; equal for all assignments."""


def minimise(problem: CostProblem, *, deadline_s: float) -> Outcome:
    """Solves a problem with HiGHS, within a deadline.

    Args:
        problem: the problem to minimise.
        deadline_s: seconds after which HiGHS returns its best assignment so far.

    Raises:
        RuntimeError: HiGHS ended for a reason other than the optimum, the deadline or
            an infeasible problem.
    """
    # Imported here: the import takes longer than most solves, and few problems need it.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csc_array

    program = _program(problem)
    scale = _SCALE / max(float(np.abs(program.costs).max(initial=0.0)), 1e-300)
    rows, columns, entries = program.entries
    equal = csc_array(
        (entries, (rows.astype(np.int32), columns.astype(np.int32))),
        shape=(len(program.right), len(program.costs)),
    )
    right: Any = program.right  # the types of SciPy know numbers only
    upper: Any = program.upper
    found = milp(
        program.costs * scale,
        integrality=np.arange(len(program.costs)) < program.num_binaries,
        bounds=Bounds(0.0, upper),
        constraints=LinearConstraint(equal, right, right),
        options={"time_limit": deadline_s, "mip_rel_gap": 0.0},
    )
    if found.status == 2:
        return Outcome(values=None, bound=math.inf, optimal=True)
    if found.status not in (0, 1):
        raise RuntimeError(f"HiGHS ended with status {found.status}: {found.message}")
    bound = found.mip_dual_bound
    return Outcome(
        values=None if found.x is None else _values(problem, found.x),
        bound=-math.inf if bound is None else bound / scale + program.constant,
        optimal=found.status == 0,
    )


def _values(problem: CostProblem, x: np.ndarray) -> tuple[int, ...]:
    starts = np.cumsum([0, *problem.sizes])
    return tuple(
        int(x[start : start + size].argmax())
        for start, size in zip(starts[:-1], problem.sizes, strict=True)
    )


def _program(problem: CostProblem) -> _Program:
    starts = np.cumsum([0, *problem.sizes])
    num_binaries = int(starts[-1])
    costs = [np.zeros(num_binaries)]
    upper = np.ones(num_binaries)
    owner = np.repeat(np.arange(len(problem.sizes)), problem.sizes)
    entries = [np.array([owner, np.arange(num_binaries), np.ones(num_binaries)])]
    right = [np.ones(len(problem.sizes))]
    num_rows, num_columns, constant = len(problem.sizes), num_binaries, 0.0
    for factor in problem.factors:
        finite = np.isfinite(factor.costs)
        lowest = float(factor.costs[finite].min(initial=math.inf))
        # Only differences of costs matter; a large constant would lose precision.
        shift = lowest if finite.any() else 0.0
        constant += shift
        if len(factor.variables) == 1:
            columns = starts[factor.variables[0]] + np.arange(factor.costs.size)
            costs[0][columns[finite]] += factor.costs[finite] - shift
            upper[columns[~finite]] = 0.0
            continue
        costs.append(factor.costs[finite] - shift)
        block, rows = _marginals(factor, starts, num_rows, num_columns)
        entries.append(block)
        right.append(np.zeros(rows))
        num_rows, num_columns = num_rows + rows, num_columns + len(costs[-1])
    return _Program(
        costs=np.concatenate(costs),
        upper=np.concatenate([upper, np.ones(num_columns - num_binaries)]),
        num_binaries=num_binaries,
        entries=np.concatenate(entries, axis=1),
        right=np.concatenate(right),
        constant=constant,
    )


def _marginals(
    factor: Factor, starts: np.ndarray, first_row: int, first_column: int
) -> tuple[np.ndarray, int]:
    """Makes the equations of a factor: one row for each value of each of its variables.

    A row requires that the weights of all combinations with the value add up to the
    value's binary (both are unknowns of the program; see the module).

    Args:
        factor: a factor of two or more variables.
        starts: for each variable, the column of its first value's binary.
        first_row: index of the factor's first equation.
        first_column: index of the first of the factor's weights.

    Returns:
        Rows, columns and values of entries of `_Program.equal`, [3, N]; and the number
        of rows.
    """
    allowed = np.nonzero(np.isfinite(factor.costs))
    weights = first_column + np.arange(len(allowed[0]))
    entries: list[np.ndarray] = []
    num_rows = 0
    for place, variable in enumerate(factor.variables):
        size = factor.costs.shape[place]
        row = first_row + num_rows
        entries.append(np.array([row + allowed[place], weights, np.ones(len(weights))]))
        rows, binaries = row + np.arange(size), starts[variable] + np.arange(size)
        entries.append(np.array([rows, binaries, -np.ones(size)]))
        num_rows += size
    return np.concatenate(entries, axis=1), num_rows
