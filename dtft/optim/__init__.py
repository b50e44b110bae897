"""Optimizers as optax transforms. Needs jax and optax, nothing else of dtft."""

from dtft.optim.max_adabelief import (
    ScaleByMaxBeliefState,
    max_adabelief,
    scale_by_max_belief,
)

__all__ = ["ScaleByMaxBeliefState", "max_adabelief", "scale_by_max_belief"]
