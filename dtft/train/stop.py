"""Convergence of training: a metric's plateau, as a pure fold over its values.

Decides from the config and the values alone, which are the same on every process.
Its state travels in checkpoints as JSON.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtft.config import StopConfig


class NonFinite(FloatingPointError):
    """The loss is NaN or infinite; the text names step and value."""


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """The best value of the watched metric so far."""

    best: float | None = None
    """None before the first value."""
    best_step: int = 0
    """Step of the best value."""

    def observe(self, config: StopConfig, step: int, value: float) -> "Plateau":
        """The state after one more value.

        >>> config = StopConfig(metric="loss", patience=2)
        >>> Plateau().observe(config, 1, 0.5).observe(config, 2, 0.7)
        Plateau(best=0.5, best_step=1)
        """
        if self.best is not None:
            gain = self.best - value if config.mode == "min" else value - self.best
            if not gain > config.min_delta:
                return self
        return replace(self, best=value, best_step=step)

    def converged(self, config: StopConfig, step: int) -> bool:
        """Whether `patience` steps have passed without improvement."""
        return bool(config.metric) and step - self.best_step >= config.patience

    def to_items(self) -> dict[str, Any]:
        """A JSON object; inverse of `from_items`."""
        return asdict(self)

    @classmethod
    def from_items(cls, items: Mapping[str, Any]) -> "Plateau":
        """Reads what `to_items` wrote."""
        return cls(**items)


def observe(
    plateau: Plateau, config: StopConfig, step: int, values: Mapping[str, float]
) -> Plateau:
    """Checks one step's metrics and updates the plateau of the watched metric.

    Raises:
        NonFinite: the loss is NaN or infinite.
        ValueError: the watched metric is not among `values`.
    """
    if not math.isfinite(values["loss"]):
        raise NonFinite(
            f"step {step}: loss is {values['loss']}. Training ends here; checkpoints "
            "of earlier steps are untouched. Lower --optim.learning_rate or set "
            "--optim.clip, and resume."
        )
    if not config.metric:
        return plateau
    if config.metric not in values:
        raise ValueError(
            f"stop.metric={config.metric!r} is not a metric of this run. Allowed: "
            f"{', '.join(sorted(values))}. Set --stop.metric."
        )
    return plateau.observe(config, step, values[config.metric])
