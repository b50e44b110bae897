"""Cost problems: variables with few values each, and tables that say what they cost.

The value that the exact solver (`assignment`) and its methods exchange: minimise the
sum of tables, each over a few of the variables. Decides nothing; must not know what a
variable stands for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

_SHOWN = 8
"""Variables that an error names; of more it gives the number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Factor:
    """What combinations of values of a few variables cost."""

    variables: tuple[int, ...]
    """The variables, as positions in `Problem.sizes`; each at most once."""
    costs: np.ndarray
    """One dim per variable; float; +inf where a combination is forbidden."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Choose one value of each variable so that the sum of all factors is smallest.

    Raises:
        ValueError: a factor does not fit its variables, or a cost is NaN or -inf.
    """

    sizes: tuple[int, ...]
    """How many values each variable has; at least one."""
    factors: tuple[Factor, ...]
    names: tuple[str, ...] = field(default=())
    """What errors call the variables; without it `variable 0`, `variable 1`, ..."""

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
        # Copies of a block share their tables: each array is looked at once.
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
        """What errors call a variable."""
        return self.names[variable] if self.names else f"variable {variable}"

    def words(self, variables: Iterable[int]) -> str:
        """Names of variables, the first few of many."""
        names = [self.name(variable) for variable in variables]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more

    def cost(self, values: Sequence[int]) -> float:
        """What an assignment costs; +inf if any factor forbids it.

        >>> pair = Factor(variables=(0, 1), costs=np.array([[1.0, 5.0], [2.0, 0.5]]))
        >>> Problem(sizes=(2, 2), factors=(pair,)).cost((1, 1))
        0.5
        """
        return float(
            sum(
                factor.costs[tuple([values[variable] for variable in factor.variables])]
                for factor in self.factors
            )
        )

    def factors_of_variables(self) -> list[list[int]]:
        """For each variable the factors that have it, as positions in `factors`."""
        around: list[list[int]] = [[] for _ in self.sizes]
        for at, factor in enumerate(self.factors):
            for variable in factor.variables:
                around[variable].append(at)
        return around

    def restricted(self, kept: Sequence[np.ndarray]) -> "Problem":
        """The same problem with fewer values.

        Args:
            kept: for each variable the values that stay, ascending; they are
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
        return Problem(sizes=sizes, factors=factors, names=self.names)
