"""An adaptive optimizer in two phases, so that something can happen between them.

Phase one folds a gradient into the moments, phase two makes the update from them.
`dtft.optim.sync` communicates in between, `dtft.optim.shampoo` takes the magnitude.
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
    """The three functions of an adaptive optimizer; all pure."""

    init: Callable[[optax.Params], Any]
    """Parameters (or their ShapeDtypeStructs under a trace) to the first state."""
    accumulate: Callable[[optax.Updates, Any], Any]
    """(gradients, state) to the state with moments that contain the gradients."""
    direction: Callable[[optax.Updates, Any], optax.Updates]
    """(the same gradients, that state) to the update, before the learning rate."""
    operands: tuple[str, ...]
    """Fields of the state that `direction` is made of."""
    decay: Mapping[str, Any] = MappingProxyType({})
    """Per field of the state that `direction` corrects for bias, 1 - decay^count, the
    decay: an old value of the field has to be corrected for its own count."""


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
    """The two phases of `scale_by_max_belief`, whose arguments these are.

    Raises:
        ValueError: a hyperparameter whose number is known is out of range.
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
