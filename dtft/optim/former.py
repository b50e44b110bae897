"""Names that `dtft.optim` exported before 24 November 2026.

`dtft.optim.NAME` still loads each name, with a warning.
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
"""Maps each former name to the replacement that the warning recommends."""


def unguarded(
    inner: optax.GradientTransformation, *, history: int = 64
) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` in `skip_outlier_gradients` without a limit, so it skips nothing.

    The state is a `SkipOutliersState`. `history` is the length of its array `norms`,
    which stays as it was in the first state, because no norms are recorded.
    """
    return guard_gradients(inner, None, history=history)


def as_transform(phases: Phases) -> optax.GradientTransformation:
    """Makes an optax transform from the pure functions of an optimizer (`Phases`).

    The transform adds the gradient to the moments, then computes the update from the
    moments. The update is not multiplied by a learning rate.
    """

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        state = phases.accumulate(updates, state)
        return phases.direction(updates, state), state

    return optax.GradientTransformation(phases.init, update)  # pyright: ignore[reportArgumentType]
