"""Detects convergence: a metric that does not improve any more (a plateau).

`observe`, a pure function, updates the `Plateau` at each step. The decision depends
only on the config and on metrics, which are equal on every process. Checkpoints contain
the `Plateau` as JSON.
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
    """The best value of the watched metric so far, and its step."""

    best: float | None = None
    """Best value; None before the first value."""
    best_step: int = 0
    """Step of the best value; 0 before the first value."""

    def observe(self, config: StopConfig, step: int, value: float) -> "Plateau":
        """Returns the plateau after one more value.

        A value becomes the new best value if it is the first one, or is better than the
        best value by more than `min_delta`. `config.mode` says whether smaller values
        are better (the default) or larger values.

        In the example the value of step 2 is not better, so the plateau is unchanged.

        >>> config = StopConfig(metric="loss", patience=2)
        >>> Plateau().observe(config, 1, 0.5).observe(config, 2, 0.7)
        Plateau(best=0.5, best_step=1)
        """
        if self.best is not None:
            gain = self.best - value if config.mode == "min" else value - self.best
            if not gain > config.min_delta:
                return self
        return replace(self, best=value, best_step=step)

    def converged(self, config: StopConfig, step: int, start: int = 0) -> bool:
        """Whether a metric is watched and has not improved for `patience` steps.

        Args:
            config: the metric and its patience.
            step: the step after which the run may end.
            start: step from which the run was started or resumed. Before the first
                value of the metric, the patience counts from this step.

        In the example only one step has passed since the start, fewer than `patience`:

        >>> config = StopConfig(metric="loss", patience=2)
        >>> Plateau().converged(config, 8, start=7)  # resumed without a metric
        False
        """
        since = start if self.best is None else self.best_step
        return bool(config.metric) and step - since >= config.patience

    def to_items(self) -> dict[str, Any]:
        """Returns the fields as a JSON object; inverse of `from_items`."""
        return asdict(self)

    @classmethod
    def from_items(cls, items: Mapping[str, Any]) -> "Plateau":
        """Makes a plateau from the result of `to_items`; empty items give defaults."""
        return cls(**items)


def observe(
    plateau: Plateau, config: StopConfig, step: int, values: Mapping[str, float]
) -> Plateau:
    """Checks one step's metrics; returns the plateau updated by the watched metric.

    Returns `plateau` unchanged if `config` names no metric.

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
