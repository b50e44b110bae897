"""Which values of a loss have a gradient, and which losses have none.

Decides what a placed step differentiates, and refuses what it cannot. Must not know
nodes or how derivatives are computed.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Var

from dtft.planner.ir import is_var
from dtft.train.placed_cut import Cut


def check(cut: Cut, params: Sequence[int], num_microbatches: int) -> None:
    """Refuses losses and parameters that have no gradient, or results without a mean.

    Args:
        cut: of a program whose first result is the loss.
        params: numbers of the parameters.
        num_microbatches: parts of the batch.

    Raises:
        ValueError: names the result or parameter, and what is allowed.
    """
    maker = {number for segment in cut.segments for number in segment.writes}
    loss = cut.results[0]
    aval: Any = cut.variables[loss].aval if isinstance(loss, int) else None
    made = isinstance(loss, int) and loss in maker
    if aval is None or not made or aval.shape or not is_float(aval):
        raise ValueError(
            f"loss returns {aval}: a floating-point scalar that it computes is "
            "needed. Return the mean over the batch."
        )
    for place, number in enumerate(params):
        if not is_float(cut.variables[number].aval):
            raise ValueError(
                f"params: leaf {place} is {cut.variables[number].aval}, which "
                "has no gradient. Use floating-point arrays only; what is no "
                "parameter belongs into the batch, or into the loss."
            )
    for place, number in enumerate(cut.results):
        if not isinstance(number, int) or number not in maker:
            raise ValueError(
                f"loss returns, as result {place}, an argument or a constant as "
                "it is: only what it computes can be returned. Leave it out."
            )
        if num_microbatches > 1 and not is_float(cut.variables[number].aval):
            raise ValueError(
                f"loss returns, as result {place}, "
                f"{cut.variables[number].aval}: with "
                f"{num_microbatches} microbatches floating-point means over the batch "
                "are allowed, which can be averaged. Return a mean, or nothing."
            )


def between(cut: Cut, params: Sequence[int]) -> frozenset[int]:
    """Numbers of the values on a way from a parameter to the loss.

    Raises:
        ValueError: there are none.
    """
    units = [unit for s in cut.segments for unit in s.units]
    variables = cut.variables
    moved: set[Var] = {variables[n] for n in params if is_float(variables[n].aval)}
    for unit in units:
        if moved.intersection(a for a in unit.eqn.invars if is_var(a)):
            moved.update(v for v in unit.eqn.outvars if is_float(v.aval))
    loss = cut.results[0]
    assert isinstance(loss, int)
    ways = moved.intersection([variables[loss]])
    for unit in reversed(units):
        if ways.intersection(unit.eqn.outvars):
            ways.update(moved.intersection(filter(is_var, unit.eqn.invars)))
    found = frozenset(n for n, var in enumerate(variables) if var in ways)
    if loss not in found:
        raise ValueError(
            "loss does not depend on any floating-point parameter: there is "
            "nothing to differentiate. Use params in the loss."
        )
    return found


def is_float(aval: Any) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)
