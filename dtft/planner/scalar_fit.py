"""Positive scalars with which a formula is closest to measured times, with errors.

Every fit is of logarithms, by soft-L1 least squares: outliers count little, and a fit
is as good for short times as for long ones (reference section 7, Calibration). Pure.
Must not know what was measured (`calibration_fit`, `past_runs`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

NOISE = 0.05
"""Relative error of one measurement above which it counts as an outlier."""
_WEAK = 3.0
"""Standard deviation, as a logarithm, within which a scalar is expected of its start:
it decides only where the measurements do not (latency against half_bytes)."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Scalars with their errors, and how well they explain what was measured."""

    values: Mapping[str, float]
    errors: Mapping[str, float]
    """Standard error of each, relative (of its logarithm)."""
    residual: float
    """Median of |predicted / measured - 1|."""
    worst: float
    """Maximum of the same."""
    num: int
    """Measurements."""


def fit(
    predict: Callable[[Mapping[str, float]], Any],
    start: Mapping[str, float],
    measured: Sequence[float],
    bounds: Mapping[str, tuple[float, float]] | None = None,
    spread: float = _WEAK,
) -> Fit:
    """Positive scalars with which predictions are closest to measurements.

    Args:
        predict: seconds for values of the scalars, as many as measured.
        start: scalars to begin with, above 0; those that the measurements do not
            decide stay there.
        measured: seconds.
        bounds: least and greatest value of some scalars.
        spread: standard deviation, as a logarithm, expected of the start.

    Raises:
        ValueError: nothing was measured, or times that are not above 0.
    """
    seconds = np.asarray(measured, float)
    if seconds.size == 0 or not (seconds > 0).all():
        raise ValueError(
            f"measured={list(measured)}. Allowed: one time or more, all above 0 s."
        )
    names = list(start)
    first = np.array([start[name] for name in names])

    def values(theta: np.ndarray) -> dict[str, float]:
        return dict(zip(names, (first * np.exp(theta)).tolist(), strict=True))

    def residuals(theta: np.ndarray) -> np.ndarray:
        predicted = np.asarray(predict(values(theta)), float)
        return np.concatenate([np.log(predicted / seconds) / NOISE, theta / spread])

    wide = {name: (1e-300, 1e300) for name in names} | dict(bounds or {})
    low, high = (
        np.log([wide[name][end] / start[name] for name in names]) for end in (0, 1)
    )
    begin = np.clip(np.zeros(len(names)), low + 1e-9, high - 1e-9)
    found = least_squares(
        residuals, begin, bounds=(low, high), loss="soft_l1", x_scale=1.0
    )
    off = residuals(found.x)[: seconds.size]
    relative = np.abs(np.expm1(off * NOISE))
    return Fit(
        values=values(found.x),
        errors=dict(zip(names, _errors(found.jac, off), strict=True)),
        residual=float(np.median(relative)),
        worst=float(relative.max()),
        num=seconds.size,
    )


def _errors(jacobian: np.ndarray, off: np.ndarray) -> list[float]:
    """Standard errors: the inverse of the Hessian, by how far the residuals spread."""
    spread = max(1.4826 * float(np.median(np.abs(off))), 1e-3)
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * spread**2
    return np.sqrt(np.diag(covariance)).tolist()
