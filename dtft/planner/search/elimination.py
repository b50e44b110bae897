"""Minimises a sum of cost tables over discrete variables exactly, by elimination.

Implements bucket elimination (Dechter, Artificial Intelligence 113, 1999). To eliminate
a variable, adds up the tables that have it, and replaces them by one table of the least
sum for each combination of values of the other variables. On a chain or a tree,
elimination is dynamic programming. On other graphs it is exact as well; its time
depends on the largest table that the elimination order creates.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Eliminating a variable adds up the tables that contain the variable. For every
# combination of values of the other variables, the sum keeps its smallest entry.


Table = tuple[tuple[int, ...], np.ndarray]
"""Variables, and their costs in an array with one dim per variable."""

_Price = tuple[float, int, int, int]
"""Sort key of a variable; the variable with the smallest key is eliminated next.

Variables that share a table are neighbors; an edge joins them.

* The number of edges that its elimination adds between its neighbors; inf if its table
  is too large.
* The number of entries of its table; 0 if no edges are added.
* The negated number of the variable.
* The number of entries of its table.

The table of a variable is the sum of all tables with the variable. It has a dim for the
variable and for each of its neighbors.
"""


def elimination_order(
    sizes: Sequence[int],
    scopes: Iterable[Sequence[int]],
    *,
    max_entries: int,
    max_total: int,
) -> list[int] | None:
    """Returns the order in which to eliminate the variables of a sum of tables.

    Returns None if the tables that elimination in this order creates exceed a limit.

    The order is greedy (minimum fill). In a graph of the variables, edges join those
    that share a table. Elimination of a variable adds edges between its neighbors. The
    next variable is the one whose elimination adds the fewest edges. Ties go to the
    variable that creates the smallest table, unless the tied variables add no edges.
    Further ties go to the highest number. For a chain that is numbered from end to end,
    and for a tree whose parents have lower numbers than their children, the order is
    the reverse of the numbers.

    Args:
        sizes: the number of values of each variable; variables with one value are
            left out.
        scopes: the variables of each table.
        max_entries: limit of the entries of the largest table.
        max_total: limit of the entries of all created tables together.

    >>> elimination_order((2, 2, 2), [(0, 1), (1, 2)], max_entries=8, max_total=99)
    [2, 1, 0]
    """
    neighbors = _neighbors(sizes, scopes)
    prices = {
        variable: _price(variable, sizes, neighbors, max_entries)
        for variable in range(len(sizes))
        if sizes[variable] > 1
    }
    heap = list(prices.values())
    heapq.heapify(heap)
    order: list[int] = []
    total = 0
    while heap:
        price = heapq.heappop(heap)
        variable = -price[2]
        if prices.get(variable) != price:
            continue  # stale entry: the variable has a newer price
        total += price[3]
        if price[3] > max_entries or total > max_total:
            return None
        del prices[variable]
        order.append(variable)
        for near in _remove(variable, neighbors, filled=price[0] > 0):
            again = _price(near, sizes, neighbors, max_entries)
            if again != prices[near]:
                prices[near] = again
                heapq.heappush(heap, again)
    return order


def _neighbors(sizes: Sequence[int], scopes: Iterable[Sequence[int]]) -> list[set[int]]:
    neighbors: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        free = [variable for variable in scope if sizes[variable] > 1]
        for variable in free:
            neighbors[variable].update(free)
    for variable, near in enumerate(neighbors):
        near.discard(variable)
    return neighbors


def _price(
    variable: int, sizes: Sequence[int], neighbors: list[set[int]], max_entries: int
) -> _Price:
    near = neighbors[variable]
    entries = sizes[variable] * math.prod([sizes[other] for other in near])
    if entries > max_entries:  # Over the limit: skip the quadratic count.
        return math.inf, entries, -variable, entries
    fill = 0
    if len(near) > 1:
        for first, second in itertools.combinations(near, 2):
            fill += second not in neighbors[first]
    return fill, entries if fill else 0, -variable, entries


def _remove(variable: int, neighbors: list[set[int]], *, filled: bool) -> set[int]:
    """Removes an eliminated variable from the graph of variables.

    Edges join variables that share a table. Elimination creates a table of all
    neighbors of the variable, so the missing edges between them are added.

    Args:
        variable: the eliminated variable.
        neighbors: for each variable, those that share a table with it; changed in
            place.
        filled: whether to add edges; False if none is missing.

    Returns:
        The variables whose elimination may now add another number of edges or create a
        table of another size.
    """
    near = neighbors[variable]
    changed = set(near)
    for other in near:
        neighbors[other].discard(variable)
    if filled:
        for first, second in itertools.combinations(near, 2):
            if second not in neighbors[first]:
                neighbors[first].add(second)
                neighbors[second].add(first)
                # The fill of every common neighbor is now smaller by this edge.
                changed |= neighbors[first] & neighbors[second]
    return changed


def eliminate(
    sizes: Sequence[int], tables: Iterable[Table], order: Sequence[int]
) -> tuple[list[int], float]:
    """Finds the assignment of least cost, and its cost, by variable elimination.

    The cost is +inf if every assignment is forbidden. Of assignments of equal cost,
    finds the one that is lexicographically smallest in the reverse of `order`.

    Args:
        sizes: the number of values of each variable.
        tables: the tables whose sum is minimised: pairs of variables and costs.
        order: every variable with more than one value, once, in the order of
            elimination (a result of `elimination_order`).
    """
    rank = {variable: place for place, variable in enumerate(order)}
    buckets: list[list[Table]] = [[] for _ in order]
    constant = 0.0
    for scope, costs in tables:
        if 1 in costs.shape:
            scope, costs = _squeezed(scope, costs)
        if scope:
            buckets[min(map(rank.__getitem__, scope))].append((scope, costs))
        else:
            constant += float(costs)
    for bucket, variable in zip(buckets, order, strict=True):
        if not bucket:
            continue
        scope, costs = _added(bucket)
        place = scope.index(variable)
        least = np.minimum.reduce(costs, axis=place)
        rest = scope[:place] + scope[place + 1 :]
        if rest:
            buckets[min(map(rank.__getitem__, rest))].append((rest, least))
        else:
            constant += float(least)
    return _substituted(sizes, buckets, order), constant


def eliminate_each(
    sizes: Sequence[int], tables: Iterable[Table], order: Sequence[int], given: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the assignment of least cost for every value of one variable.

    Eliminates all variables but this one (`given`), so that one pass serves all of its
    values. Several problems with tables of equal shapes can be solved at once: `given`
    is then an additional variable, the index of the problem.

    Args:
        sizes: the number of values of each variable.
        tables: the tables whose sum is minimised: pairs of variables and costs.
        order: every other variable with more than one value, once, in the order of
            elimination.
        given: the variable for each of whose values an assignment is found.

    Returns:
        Values of all variables, int [values of `given`, variables]; and the costs,
        float [values of `given`], +inf if every assignment is forbidden.

    In the example, each row has a value of variable 0, and the value of variable 1 that
    costs least with it.

    >>> pair = np.array([[3.0, 1.0], [4.0, 4.0], [2.0, 5.0]])
    >>> values, costs = eliminate_each((3, 2), [((0, 1), pair)], [1], 0)
    >>> values.tolist(), costs.tolist()
    ([[0, 1], [1, 0], [2, 0]], [1.0, 4.0, 2.0])
    """
    rank = {variable: place for place, variable in enumerate(order)}
    rank[given] = len(order)
    buckets: list[list[Table]] = [[] for _ in (*order, given)]
    for scope, costs in tables:
        kept = [
            v == given or size > 1 for v, size in zip(scope, costs.shape, strict=True)
        ]
        costs = costs.reshape([n for n, k in zip(costs.shape, kept, strict=True) if k])
        scope = tuple(v for v, k in zip(scope, kept, strict=True) if k)
        buckets[min(map(rank.__getitem__, scope), default=-1)].append((scope, costs))
    values = np.zeros((sizes[given], len(sizes)), np.int64)
    values[:, given] = np.arange(sizes[given])
    for bucket, variable in zip(buckets, order, strict=False):
        if bucket:
            scope, costs = _added(bucket)
            place = scope.index(variable)
            rest = scope[:place] + scope[place + 1 :]
            least = np.minimum.reduce(costs, axis=place)
            buckets[min(map(rank.__getitem__, rest), default=-1)].append((rest, least))
    total = np.zeros(sizes[given])
    for _, costs in buckets[-1]:
        total = total + costs
    for place in reversed(range(len(order))):
        if buckets[place]:
            line = _lines(buckets[place], order[place], values)
            values[:, order[place]] = np.argmin(line, axis=1)
    return values, total


def _lines(bucket: list[Table], variable: int, values: np.ndarray) -> np.ndarray:
    """Adds up tables for every value of one variable, at given values of the others.

    Args:
        bucket: the tables to add up; all of them have the variable.
        variable: the variable that takes every value.
        values: values of all variables, one assignment per row; the column of
            `variable` is not read.

    Returns:
        For each row, the sum for each value of `variable`; float [rows, values].
    """
    total: Any = 0.0
    for scope, costs in bucket:
        place = scope.index(variable)
        others = [values[:, v] for v in scope if v != variable]
        last = np.moveaxis(costs, place, -1)
        total = total + (last[tuple(others)] if others else last[np.newaxis])
    return np.broadcast_to(total, (len(values), total.shape[-1]))


def _squeezed(scope: tuple[int, ...], costs: np.ndarray) -> Table:
    kept = tuple(v for v, size in zip(scope, costs.shape, strict=True) if size > 1)
    return kept, costs.reshape([size for size in costs.shape if size > 1])


def _added(bucket: list[Table]) -> Table:
    """Adds up tables (pairs of variables and costs) into one table of all variables.

    The first variables of the sum are those of the table with the most variables.
    """
    wide = bucket[0][0]
    for scope, _ in bucket:
        if len(scope) > len(wide):
            wide = scope
    for scope, _ in bucket:
        for variable in scope:
            if variable not in wide:
                wide += (variable,)
    total = _aligned(*bucket[0], wide)
    for scope, costs in bucket[1:]:
        total = total + _aligned(scope, costs, wide)
    return wide, total


def _aligned(
    scope: tuple[int, ...], costs: np.ndarray, wide: tuple[int, ...]
) -> np.ndarray:
    """Returns a table's costs with one dim for each variable of `wide`, in this order.

    Variables that the table lacks get dims of size 1. `scope` has the variables of the
    table, one for each dim of `costs`.
    """
    if scope == wide:
        return costs
    if len(scope) > 1:
        costs = costs.transpose([scope.index(v) for v in wide if v in scope])
    return costs[tuple([slice(None) if v in scope else None for v in wide])]


def _substituted(
    sizes: Sequence[int], buckets: list[list[Table]], order: Sequence[int]
) -> list[int]:
    """Finds the assignment of least cost by back-substitution.

    The variables get their values in the reverse of `order`: each takes the value for
    which its bucket has the least sum. All other variables of the bucket have their
    values by then.

    Args:
        sizes: the number of values of each variable.
        buckets: for each variable of `order` its bucket, the tables that were added up
            to eliminate it.
        order: the variables in the order of their elimination.
    """
    index: list[Any] = [0] * len(sizes)
    for bucket, variable in zip(reversed(buckets), reversed(order), strict=True):
        if not bucket:
            continue
        index[variable] = slice(None)
        # Adds in the order of `_added`, so that rounding gives the same ties.
        line = 0.0
        for scope, costs in bucket:
            line = line + costs[tuple([index[v] for v in scope])]
        index[variable] = int(np.argmin(line))
    return index


_SHOWN = 8
"""Largest number of variables that an error names; further variables are counted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Factor:
    """A cost table over the combinations of values of a few variables."""

    variables: tuple[int, ...]
    """The variables, as positions in `CostProblem.sizes`; each at most once."""
    costs: np.ndarray
    """Costs, float, with one dim per variable; +inf forbids a combination."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CostProblem:
    """A problem: select a value for each variable so that the factors' sum is smallest.

    Raises:
        ValueError: `names` and `sizes` differ in length, a size is below 1, a factor
            has no, unknown or repeated variables, the shape of its costs is not the
            sizes of its variables, or a cost is NaN or -inf.
    """

    sizes: tuple[int, ...]
    """The number of values of each variable; at least one."""
    factors: tuple[Factor, ...]
    names: tuple[str, ...] = field(default=())
    """Names of the variables in errors; by default `variable 0`, `variable 1`, ..."""

    def __post_init__(self) -> None:
        if self.names and len(self.names) != len(self.sizes):
            raise ValueError(
                f"names has {len(self.names)} entries for {len(self.sizes)} variables. "
                "Give each variable a name, or leave names out."
            )
        for variable, size in enumerate(self.sizes):
            if size < 1:
                raise ValueError(
                    f"sizes: {self.name(variable)} has {size} values. Allowed: 1 or "
                    "more. Leave a variable without a choice out, or give it one value."
                )
        for factor in self.factors:
            self._check_scope(factor)
        self._check_costs()

    def _check_scope(self, factor: Factor) -> None:
        scope, shape = factor.variables, factor.costs.shape
        sizes = self.sizes
        known = scope and min(scope) >= 0 and max(scope) < len(sizes)
        if not known or len(set(scope)) != len(scope):
            raise ValueError(
                f"factor.variables={scope}. Allowed: one or more different positions "
                f"from 0 to {len(sizes) - 1}. Where one variable is meant twice, take "
                "the diagonal of costs."
            )
        if shape != tuple([sizes[variable] for variable in scope]):
            raise ValueError(
                f"factor.costs has shape {shape} over {self.words(scope)}. Allowed: "
                f"{tuple(sizes[variable] for variable in scope)}, the numbers of "
                "values of these variables."
            )

    def _check_costs(self) -> None:
        # Copies of a block share their tables, so each array is checked once.
        tables = {id(factor.costs): factor for factor in self.factors}
        if not tables:
            return
        costs = np.concatenate([factor.costs.ravel() for factor in tables.values()])
        if (costs > -np.inf).all():
            return
        for factor in tables.values():
            if not (factor.costs > -np.inf).all():
                raise ValueError(
                    f"factor.costs over {self.words(factor.variables)} has an entry "
                    "that is NaN or -inf. Allowed: finite costs, and +inf for what is "
                    "forbidden."
                )

    def name(self, variable: int) -> str:
        """Returns the name of a variable in errors."""
        return self.names[variable] if self.names else f"variable {variable}"

    def words(self, variables: Iterable[int]) -> str:
        """Lists the names of variables for an error.

        Lists the first 8 names (`_SHOWN`), followed by the number of further variables.
        """
        names = [self.name(variable) for variable in variables]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more

    def cost(self, values: Sequence[int]) -> float:
        """Returns the cost of an assignment; +inf if any factor forbids the assignment.

        >>> pair = Factor(variables=(0, 1), costs=np.array([[1.0, 5.0], [2.0, 0.5]]))
        >>> CostProblem(sizes=(2, 2), factors=(pair,)).cost((1, 1))
        0.5
        """
        return float(
            sum(
                factor.costs[tuple([values[variable] for variable in factor.variables])]
                for factor in self.factors
            )
        )

    def factors_of_variables(self) -> list[list[int]]:
        """Returns for each variable the factors with it, as positions in `factors`."""
        around: list[list[int]] = [[] for _ in self.sizes]
        for at, factor in enumerate(self.factors):
            for variable in factor.variables:
                around[variable].append(at)
        return around

    def restricted(self, kept: Sequence[np.ndarray]) -> "CostProblem":
        """Returns the same problem with only some values of each variable.

        Args:
            kept: for each variable the values to keep, ascending; the kept values are
                renumbered from zero.
        """
        sizes = tuple(len(values) for values in kept)
        if sizes == self.sizes:
            return self
        factors = tuple(
            Factor(
                variables=factor.variables,
                costs=factor.costs[np.ix_(*[kept[v] for v in factor.variables])],
            )
            for factor in self.factors
        )
        return CostProblem(sizes=sizes, factors=factors, names=self.names)
