"""What `dtft.optim` exported under other names before 24 November 2026.

Each name loads, with a warning, by `dtft.optim.NAME`. Decides nothing.
"""

from typing import Any

import optax

from dtft.optim.guard import SkipOutliersState as GuardState
from dtft.optim.guard import skip_outlier_gradients as guard_gradients
from dtft.optim.phases import Phases
from dtft.optim.symmetric import average_gradients as with_local_gradients

__all__ = [
    "GuardState",
    "as_transform",
    "guard_gradients",
    "unguarded",
    "with_local_gradients",
]

NOW = {
    "GuardState": "SkipOutliersState",
    "as_transform": "scale_by_max_belief for max_belief_phases",
    "guard_gradients": "skip_outlier_gradients",
    "unguarded": "skip_outlier_gradients with max_norm_ratio=None",
    "with_local_gradients": "average_gradients",
}
"""What to use in their place."""


def unguarded(
    inner: optax.GradientTransformation, *, history: int = 64
) -> optax.GradientTransformationExtraArgs:
    """`inner` with the state of `skip_outlier_gradients`, which it leaves as it is."""
    return guard_gradients(inner, None, history=history)


def as_transform(phases: Phases) -> optax.GradientTransformation:
    """Both phases in a row, as an optax transform."""

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        state = phases.accumulate(updates, state)
        return phases.direction(updates, state), state

    return optax.GradientTransformation(phases.init, update)  # pyright: ignore[reportArgumentType]
