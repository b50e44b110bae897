"""An adaptive optimizer in two phases, so that something can happen between them.

Phase one folds a gradient into the moments, phase two makes the update from them. A
transform calls one after the other; `dtft.optim.sync` communicates in between. Knows
jax and optax only.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import optax


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


def as_transform(phases: Phases) -> optax.GradientTransformation:
    """Both phases in a row, as an optax transform."""

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        state = phases.accumulate(updates, state)
        return phases.direction(updates, state), state

    return optax.GradientTransformation(phases.init, update)  # pyright: ignore[reportArgumentType]
