"""Optimizers as optax transforms. Needs jax and optax, nothing else of dtft."""

from dtft.optim.guard import GuardState, guard_gradients, unguarded
from dtft.optim.max_adabelief import (
    ScaleByMaxBeliefState,
    max_adabelief,
    max_belief_phases,
    scale_by_max_belief,
)
from dtft.optim.phases import Phases, as_transform

__all__ = [
    "GuardState",
    "Phases",
    "ScaleByMaxBeliefState",
    "as_transform",
    "guard_gradients",
    "max_adabelief",
    "max_belief_phases",
    "scale_by_max_belief",
    "unguarded",
]
