"""Optimizer configs: which optax transform, with which learning rate at which step.

Every option keeps the structure of the optimizer state the same (clipping, decay and
guard are always there), so that changing one does not make a checkpoint unreadable.
Must stay free of jax imports at module level.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import optax


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


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Base of all optimizer configs."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """How the learning rate changes with the step."""
    clip: float = 0.0
    """Largest global norm of the gradient; 0 for no limit."""
    weight_decay: float = 0.0
    """Strength of decoupled weight decay."""
    guard: float = 0.0
    """Skip steps whose gradient is not finite or whose norm is this many times the
    median of the last 64; 0 for never. 10 is a good value."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip", "weight_decay", "guard"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"optim.{name}={value} is not a finite number of 0 or more. "
                    f"Set --optim.{name} to one."
                )
        if 0 < self.guard <= 1:
            raise ValueError(
                f"optim.guard={self.guard} would skip ordinary steps. Allowed: above "
                "1, or 0 for no guard. Set --optim.guard 10."
            )

    def learning_rate_at(self) -> Callable[[Any], Any]:
        """The schedule: step to learning rate. For use under a trace."""
        import jax
        import optax

        if self.schedule.kind == "constant":
            return optax.constant_schedule(self.learning_rate)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0 if self.schedule.warmup_steps else self.learning_rate,
            self.learning_rate,
            self.schedule.warmup_steps,
            self.schedule.decay_steps,
            self.learning_rate * self.schedule.end,
        )

        def standard(step: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):
                return schedule(step)

        return standard

    def scale(self) -> "optax.GradientTransformation":
        """What makes a direction out of a gradient; supplied by the subclass."""
        raise NotImplementedError(
            f"{type(self).__name__} is no optimizer. Use MaxAdaBeliefConfig, "
            "AdamWConfig or SGDConfig as the experiment's optim."
        )

    def build(self) -> "optax.GradientTransformation":
        """The whole chain: clip, scale, decay, learning rate; the guard around it."""
        import optax

        from dtft.optim.guard import guard_gradients, unguarded

        # identity() has the same (empty) state as what it stands for.
        clip = optax.clip_by_global_norm(self.clip) if self.clip else optax.identity()
        decay = (
            optax.add_decayed_weights(self.weight_decay)
            if self.weight_decay
            else optax.identity()
        )
        chain = optax.chain(
            clip,
            self.scale(),
            decay,
            optax.scale_by_learning_rate(self.learning_rate_at()),
        )
        return guard_gradients(chain, self.guard) if self.guard else unguarded(chain)


@dataclass(frozen=True, kw_only=True)
class MaxAdaBeliefConfig(OptimConfig):
    """Max-AdaBelief (dtft.optim)."""

    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-16
    """Added to the denominator outside the root."""
    eps_root: float = 1e-16
    """Added to the second moment at every step."""
    debias_max: bool = True
    """Whether the maximum is corrected for bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(b1=self.b1, b2=self.b2)
        if self.b1 == 0:
            raise ValueError(
                "optim.b1=0.0 makes AdaBelief's second moment zero. "
                "Set --optim.b1 to a number between 0 and 1, such as 0.9."
            )

    def scale(self) -> "optax.GradientTransformation":
        """The Max-AdaBelief direction."""
        from dtft.optim.max_adabelief import scale_by_max_belief

        return scale_by_max_belief(
            self.b1, self.b2, self.eps, self.eps_root, debias_max=self.debias_max
        )


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimConfig):
    """AdamW (optax)."""

    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator outside the root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(b1=self.b1, b2=self.b2)

    def scale(self) -> "optax.GradientTransformation":
        """The Adam direction."""
        import optax

        return optax.scale_by_adam(self.b1, self.b2, self.eps)


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimConfig):
    """Stochastic gradient descent with momentum (optax)."""

    momentum: float = 0.9
    """Decay of the momentum; 0 for none."""
    nesterov: bool = False
    """Whether to look one step ahead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _decays(momentum=self.momentum)

    def scale(self) -> "optax.GradientTransformation":
        """The momentum."""
        import optax

        return optax.trace(self.momentum, self.nesterov)


def _decays(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"optim.{name}={value} is not a decay. Allowed: 0 <= {name} < 1. "
                f"Set --optim.{name} to such a number."
            )
