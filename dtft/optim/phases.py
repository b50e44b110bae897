"""An adaptive optimizer in two phases.

Phase one adds a gradient to the moments, phase two makes the update from the moments.
`dtft.optim.sync` reduces moments between the phases. `dtft.optim.shampoo` takes the
norm of its update from the result of phase two.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax

from dtft._former import renamed
from dtft.optim.max_adabelief import (
    _check_hyperparameters,
    _init,
    _scaled_first_moment,
    _updated_moments,
)


class Phases(NamedTuple):
    """An adaptive optimizer as three pure functions.

    `init` makes the state, `accumulate` adds a gradient to the moments in the state,
    and `direction` makes the update from the moments that `operands` names.
    """

    init: Callable[[optax.Params], Any]
    """Maps parameters (or ShapeDtypeStructs under a trace) to the first state."""
    accumulate: Callable[[optax.Updates, Any], Any]
    """Maps (gradients, state) to a state with the gradients added to the moments."""
    direction: Callable[[optax.Updates, Any], optax.Updates]
    """Maps (the same gradients, the new state) to the update without learning rate."""
    operands: tuple[str, ...]
    """Names of the state's fields (moments) that `direction` reads."""
    decay: Mapping[str, Any] = MappingProxyType({})
    """Decay rate of each moment that `direction` corrects for bias, that is, divides
    by 1 - decay^count. A moment from an earlier update needs the count of that
    update."""


@renamed(debias_max="bias_correct_max")
def max_belief_phases(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-16,
    eps_root: jax.typing.ArrayLike = 1e-16,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = False,
    bias_correct_max: bool = True,
) -> Phases:
    """Makes the two phases of `scale_by_max_belief` from the same arguments.

    Phase one adds a gradient to the moments; phase two makes the update from them.

    Args:
        b1: Decay rate of the first moment, 0 < b1 < 1.
        b2: Decay rate of the second moment, 0 <= b2 < 1.
        eps: Term added to the denominator outside of the square root.
        eps_root: Term added to the second moment at every step.
        mu_dtype: Dtype of the first moment; None for the dtype of the parameter.
        nesterov: Whether to use Nesterov momentum.
        bias_correct_max: Whether the maximum of the second moment is divided by
            1 - b2^t.

    Raises:
        ValueError: a hyperparameter is out of range (a traced number is not checked),
            or is a floating array of fewer than 32 bits.
    """
    _check_hyperparameters(b1, b2, eps, eps_root, mu_dtype, nesterov, bias_correct_max)

    def direction(updates: optax.Updates, state: Any) -> optax.Updates:
        return _scaled_first_moment(
            updates, state, b1, b2, eps, nesterov, bias_correct_max
        )

    return Phases(
        init=lambda params: _init(params, mu_dtype),
        accumulate=lambda g, state: _updated_moments(g, state, b1, b2, eps_root),
        direction=direction,
        operands=("mu", "nu_max"),
        decay={"mu": b1, "nu_max": b2} if bias_correct_max else {"mu": b1},
    )
