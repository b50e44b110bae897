"""An adaptive optimizer in two phases, so that something can happen between them.

Phase one folds a gradient into the moments, phase two makes the update from them. A
transform calls one after the other; `dtft.optim.sync` communicates in between. Knows
jax and optax only.
"""

from collections.abc import Callable
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


def as_transform(phases: Phases) -> optax.GradientTransformation:
    """Both phases in a row, as an optax transform."""

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        state = phases.accumulate(updates, state)
        return phases.direction(updates, state), state

    return optax.GradientTransformation(phases.init, update)  # pyright: ignore[reportArgumentType]
