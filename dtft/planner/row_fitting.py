"""Fits the scalars of `rows` to measured steps, and judges predictions.

Soft-L1 least squares on log residuals, drawn to the values of the data sheet where
rows say little (reference section 7, level 2); leave-one-out; concordance of pairs and
regret (section 3). Numbers in, numbers out: must not know files or what a row is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

Predictor = Callable[[np.ndarray], np.ndarray]
"""Scalars to predicted seconds, one per row."""

_ALIKE = 1e-5
"""Predicted so close, neither of two comes first."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Scalars fitted to measured steps."""

    values: np.ndarray
    errors: np.ndarray
    """Relative residuals: predicted / measured - 1."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How good predictions of the same rows are."""

    median_error: float
    """Median of |predicted / measured - 1|."""
    p90_error: float
    worst_error: float
    concordance_5: float
    """Share of pairs, measured more than 5 % apart, that are ordered rightly."""
    concordance_10: float
    num_pairs_5: int
    num_pairs_10: int


NOISE = 0.03
"""Relative scatter of one measured step (data README); also the knee of soft L1."""
SPREAD = 0.5
"""How far, as a logarithm, a scalar may be from the data sheet before rows must
speak for it: one standard deviation."""


def fit(
    predict: Predictor,
    measured: np.ndarray,
    start: np.ndarray,
    *,
    spread: float | np.ndarray = SPREAD,
) -> Fit:
    """The scalars, all above 0, that predict measured seconds best.

    Args:
        predict: From scalars to seconds per row.
        measured: Seconds, one per row.
        start: Values of the data sheet; the fit is drawn to them.
        spread: Standard deviation of ln(value / start) before any row is seen.
    """
    start = np.asarray(start, float)

    def residuals(log_scale: np.ndarray) -> np.ndarray:
        predicted = predict(start * np.exp(log_scale))
        rows = np.log(predicted / measured) / NOISE
        return np.concatenate([rows, log_scale / spread])

    found = least_squares(residuals, np.zeros_like(start), loss="soft_l1", x_scale=0.1)
    values = start * np.exp(found.x)
    return Fit(values=values, errors=predict(values) / measured - 1)


def leave_one_out(
    predict: Predictor,
    measured: np.ndarray,
    start: np.ndarray,
    *,
    spread: float | np.ndarray = SPREAD,
) -> np.ndarray:
    """Seconds of each row, predicted with scalars fitted to the others."""
    found = np.empty_like(measured)
    for left_out in range(len(measured)):
        others = np.arange(len(measured)) != left_out
        fitted = fit(
            lambda values, keep=others: predict(values)[keep],
            measured[others],
            start,
            spread=spread,
        )
        found[left_out] = predict(fitted.values)[left_out]
    return found


def concordance(
    predicted: np.ndarray, measured: np.ndarray, apart: float
) -> tuple[float, int]:
    """Share of pairs ordered rightly among those measured further apart, and how many.

    Args:
        predicted: Seconds; a pair that is predicted alike counts half.
        measured: Seconds of the same rows.
        apart: Least relative difference, of the smaller one.

    Returns:
        The share (of no pairs: 1, as none is ordered wrongly) and the number of pairs.

    >>> concordance(np.array([1.0, 2.0, 2.5]), np.array([1.0, 1.2, 1.1]), 0.05)
    (0.6666666666666666, 3)
    >>> concordance(np.array([3.0, 3.0]), np.array([1.0, 2.0]), 0.05)
    (0.5, 1)
    """
    first, second = np.triu_indices(len(measured), 1)
    ratio = measured[first] / measured[second]
    far = np.maximum(ratio, 1 / ratio) > 1 + apart
    alike = np.isclose(predicted[first], predicted[second], rtol=_ALIKE, atol=0)
    in_order = (predicted[first] > predicted[second]) == (ratio > 1)
    right = np.where(alike, 0.5, in_order)[far]
    return (float(right.mean()) if right.size else 1.0), right.size


def regret(predicted: np.ndarray, measured: np.ndarray, top: int) -> float:
    """Best measured time among the `top` rows predicted best, by the best of all.

    >>> regret(np.array([1.0, 2.0, 3.0]), np.array([1.1, 1.0, 3.0]), 1)
    1.1
    """
    chosen = np.argsort(predicted, kind="stable")[:top]
    return float(measured[chosen].min() / measured.min())


def judge(
    predicted: np.ndarray, measured: np.ndarray, ranked: Sequence[bool] | np.ndarray
) -> Judgement:
    """Errors over all rows, concordance over those marked as `ranked`."""
    errors = np.abs(predicted / measured - 1)
    keep = np.asarray(ranked, bool)
    near, num_near = concordance(predicted[keep], measured[keep], 0.05)
    far, num_far = concordance(predicted[keep], measured[keep], 0.10)
    return Judgement(
        median_error=float(np.median(errors)),
        p90_error=float(np.percentile(errors, 90)),
        worst_error=float(errors.max()),
        concordance_5=near,
        concordance_10=far,
        num_pairs_5=num_near,
        num_pairs_10=num_far,
    )
