"""How the learning rate changes with the step, as options of an experiment.

Must stay free of jax imports at module level.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate changes with the step."""

    kind: Literal["constant", "warmup_cosine"] = "constant"
    """`constant`, or linear warm-up and then a cosine to `end`."""
    warmup_steps: int = 0
    """Steps of linear warm-up (`warmup_cosine` only)."""
    decay_steps: int = 0
    """Steps until the cosine reaches its end, warm-up included (`warmup_cosine`)."""
    end: float = 0.1
    """Learning rate at the end, as a fraction of the peak (`warmup_cosine` only)."""

    def __post_init__(self) -> None:
        if self.kind == "constant" and (self.warmup_steps or self.decay_steps):
            raise ValueError(
                f"optim.schedule.warmup_steps={self.warmup_steps} and decay_steps="
                f"{self.decay_steps} have no effect with kind='constant'. Set "
                "--optim.schedule.kind warmup_cosine, or both to 0."
            )
        if self.kind == "warmup_cosine" and not (
            0 <= self.warmup_steps < self.decay_steps
        ):
            raise ValueError(
                f"optim.schedule.warmup_steps={self.warmup_steps} must be at least 0 "
                f"and below optim.schedule.decay_steps={self.decay_steps}. Raise "
                "--optim.schedule.decay_steps."
            )

    def of(self, peak: float) -> Callable[[Any], Any]:
        """Step to learning rate, of which `peak` is the highest. For use in a trace."""
        import jax
        import optax

        if self.kind == "constant":
            return optax.constant_schedule(peak)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0 if self.warmup_steps else peak,
            peak,
            self.warmup_steps,
            self.decay_steps,
            peak * self.end,
        )

        def standard(step: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):
                return schedule(step)

        return standard
