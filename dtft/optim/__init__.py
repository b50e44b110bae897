"""Optimizers as optax transforms. Needs jax and optax, nothing else of dtft."""

from dtft.optim.max_adabelief import (
    ScaleByMaxBeliefState,
    max_adabelief,
    max_belief_phases,
    scale_by_max_belief,
)
from dtft.optim.phases import Phases, as_transform
from dtft.optim.shampoo import scale_by_shampoo, shampoo
from dtft.optim.shampoo_steps import ScaleByShampooState

__all__ = [
    "Phases",
    "ScaleByMaxBeliefState",
    "ScaleByShampooState",
    "as_transform",
    "max_adabelief",
    "max_belief_phases",
    "scale_by_max_belief",
    "scale_by_shampoo",
    "shampoo",
]
