"""Fits factors of predictions to measured steps; searches the fastest parallel layout.

A row is one training run of a published table, with its measured seconds of a step. A
factor multiplies the predicted seconds of one kind of work or link (`Scales`). A
parallel layout is how devices divide the training of a transformer: the degrees of
data, tensor and pipeline parallelism, and the microbatches. With the fitted factors,
the search finds the layout that is predicted to be fastest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student_t

from dtft.planner.cluster import INTERVAL_SHARE, Accuracy, Pool
from dtft.planner.search import Scales
from dtft.planner.transformer.model import ParallelLayout, Shape
from dtft.planner.transformer.predict import memory, search_of, space_of

# The fit is soft-L1 least squares on log residuals, with a prior at the values of the
# data sheet. Predictions are evaluated by leave-one-out, concordance of pairs and
# regret.


Predictor = Callable[[np.ndarray], np.ndarray]
"""Function from factors (`Scales`, as an array) to predicted seconds, one per row."""

_ALIKE = 1e-5
"""Relative difference up to which two predictions count as equal."""


@dataclass(frozen=True, kw_only=True)
class ScaleFit:
    """Factors fitted to measured steps, and the errors of the predictions."""

    values: np.ndarray
    errors: np.ndarray
    """Relative error of each prediction: predicted / measured - 1."""


@dataclass(frozen=True, kw_only=True)
class PredictionAccuracy:
    """How well predictions match measured rows (training runs): errors and order."""

    median_error: float
    """Median of |predicted / measured - 1|."""
    p90_error: float
    worst_error: float
    concordance_5: float
    """Share of correctly ordered pairs among pairs measured more than 5 % apart."""
    concordance_10: float
    num_pairs_5: int
    num_pairs_10: int


NOISE = 0.03
"""Relative scatter of one measured step (`experiments/data/README.md`). The loss of
`fit`, soft L1, is about linear in residuals above this."""
SPREAD = 0.5
"""Prior standard deviation of the logarithm of a factor relative to its start value."""


def fit(
    predict: Predictor,
    measured: np.ndarray,
    start: np.ndarray,
    *,
    spread: float | np.ndarray = SPREAD,
) -> ScaleFit:
    """Fits positive factors so that predictions match the measured seconds.

    Args:
        predict: Function from the factors to predicted seconds, one per row.
        measured: Measured seconds, one per row.
        start: Start values of the factors, which are the mean of the prior.
        spread: Prior standard deviation of ln(factor / start value).
    """
    start = np.asarray(start, float)

    def residuals(log_scale: np.ndarray) -> np.ndarray:
        predicted = predict(start * np.exp(log_scale))
        rows = np.log(predicted / measured) / NOISE
        return np.concatenate([rows, log_scale / spread])

    found = least_squares(residuals, np.zeros_like(start), loss="soft_l1", x_scale=0.1)
    values = start * np.exp(found.x)
    return ScaleFit(values=values, errors=predict(values) / measured - 1)


def leave_one_out(
    predict: Predictor,
    measured: np.ndarray,
    start: np.ndarray,
    *,
    spread: float | np.ndarray = SPREAD,
) -> np.ndarray:
    """Predicts the seconds of each row with factors fitted to all other rows.

    Args:
        predict: Function from the factors to predicted seconds, one per row.
        measured: Measured seconds, one per row.
        start: Start values of the factors, which are the mean of the prior.
        spread: Prior standard deviation of ln(factor / start value).

    Returns:
        Predicted seconds, one per row.
    """
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
    """Computes the share of pairs of rows that the predictions order correctly.

    Only pairs whose measured seconds differ by more than `apart` count.

    Args:
        predicted: Predicted seconds; a pair with equal predictions counts half.
        measured: Measured seconds of the same rows.
        apart: Difference that a pair must exceed, relative to the smaller of both
            seconds.

    Returns:
        The share (1 without pairs) and the number of pairs that count.

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
    """Computes the regret of trying only the rows that are predicted to be fastest.

    The `top` rows with the shortest predicted times are selected. The result is the
    shortest measured time among them, divided by the shortest measured time of all
    rows. 1 means that the row that was measured fastest is among them.

    Args:
        predicted: Predicted seconds, one per row.
        measured: Measured seconds of the same rows.
        top: The number of rows that are selected, 1 or more.

    >>> regret(np.array([1.0, 2.0, 3.0]), np.array([1.1, 1.0, 3.0]), 1)
    1.1
    """
    chosen = np.argsort(predicted, kind="stable")[:top]
    return float(measured[chosen].min() / measured.min())


def judge(
    predicted: np.ndarray, measured: np.ndarray, ranked: Sequence[bool] | np.ndarray
) -> PredictionAccuracy:
    """Computes errors over all rows, and concordance over the rows marked in `ranked`.

    Errors are |predicted / measured - 1|. Concordance is the share of pairs of rows
    that the predictions order like the measurements. `predicted` and `measured` have
    the seconds of each row, `ranked` has one bool per row.
    """
    errors = np.abs(predicted / measured - 1)
    keep = np.asarray(ranked, bool)
    near, num_near = concordance(predicted[keep], measured[keep], 0.05)
    far, num_far = concordance(predicted[keep], measured[keep], 0.10)
    return PredictionAccuracy(
        median_error=float(np.median(errors)),
        p90_error=float(np.percentile(errors, 90)),
        worst_error=float(errors.max()),
        concordance_5=near,
        concordance_10=far,
        num_pairs_5=num_near,
        num_pairs_10=num_far,
    )


# Intervals come from the errors of rows that no fit saw, relative to the spread of
# `Accuracy.interval_s`.


UNIT_ERRORS: Mapping[str, float] = {"compute": 1.0, "collectives": 2.0}
"""Relative errors of the two terms of predicted seconds, up to a common factor that
`accuracy_from` derives. That collectives are twice as uncertain as computation is
assumed, not fitted: shared networks differ more than devices."""


@dataclass(frozen=True, kw_only=True)
class UnseenRows:
    """Measured runs of one table, predicted by factors fitted to other runs.

    The predicted seconds of a run are the sum of two terms: `compute` and
    `collectives`.
    """

    terms: Mapping[str, np.ndarray]
    """Predicted seconds of `compute` and `collectives`, one per row."""
    measured: np.ndarray

    def errors(self) -> np.ndarray:
        """Returns the error of each row in units of a spread; float [rows].

        The error is measured minus predicted seconds. The spread is the root of the sum
        of two squares: the predicted seconds of `compute` times 1, and those of
        `collectives` times 2 (`UNIT_ERRORS`).
        """
        parts = [self.terms[name] * UNIT_ERRORS[name] for name in UNIT_ERRORS]
        return (self.measured - sum(self.terms.values())) / np.hypot(*parts)

    def ends_s(self, accuracy: Accuracy) -> np.ndarray:
        """Returns the prediction interval of each row: lower and upper end, in seconds.

        The array is [rows, 2]; `accuracy` has the errors that the intervals come from.
        """
        names = list(self.terms)
        seconds = zip(*(self.terms[name] for name in names), strict=True)
        return np.array(
            [accuracy.interval_s(dict(zip(names, row, strict=True))) for row in seconds]
        )


def accuracy_from(tables: Sequence[UnseenRows], source: str) -> Accuracy:
    """Derives the errors of predictions from rows that were left out of all fits.

    With the returned errors, the interval of a prediction (`Accuracy.interval_s`) is
    the prediction interval of a random-effects model (Higgins et al., "A re-evaluation
    of random-effects meta-analysis", 2009). In this model, the error of a row is the
    sum of two errors: one that all rows of its table share, and one of its own. If both
    have normal distributions, the interval holds 80 % (`INTERVAL_SHARE`) of the rows of
    a further table. Its width follows Student's t distribution with one degree of
    freedom less than there are tables, because a few tables say little about how much
    tables differ. The interval always contains the prediction, even if the mean error
    is large.

    Args:
        tables: the measured rows (training runs) of each table, at least two rows in
            each. Tables have equal weights. One table alone gives the interval of
            further rows of this table.
        source: origin of the figures, in one line.
    """
    each = [table.errors() for table in tables]
    means = np.array([errors.mean() for errors in each])
    variance = float(np.mean([errors.var(ddof=1) for errors in each]))
    freedom = len(each[0]) - 1
    if len(each) > 1:
        variance += float(means.var(ddof=1)) * (1 + 1 / len(each))
        freedom = len(each) - 1
    half = float(student_t.ppf((1 + INTERVAL_SHARE) / 2, freedom)) * variance**0.5
    low, high = min(0.0, means.mean() - half), max(0.0, means.mean() + half)
    return Accuracy(
        source=source,
        errors={name: float(high) * error for name, error in UNIT_ERRORS.items()},
        below=float(abs(low) / high) if high else 1.0,
    )


@dataclass(frozen=True, kw_only=True)
class IntervalCoverage:
    """How many of a table's rows were measured within their prediction intervals."""

    held: float
    """Share of the rows whose measurement is in the row's interval."""
    num_below: int
    """The number of rows that were measured below the interval."""
    num_above: int
    half_width: float
    """Median over rows of half of the interval's width, relative to the prediction."""


def coverage(rows: UnseenRows, accuracy: Accuracy) -> IntervalCoverage:
    """Counts the rows whose measured seconds are in, below or above their interval.

    `accuracy` has the relative errors from which the intervals are computed.
    """
    low, high = rows.ends_s(accuracy).T
    below, above = rows.measured < low, rows.measured > high
    return IntervalCoverage(
        held=float(1 - np.mean(below | above)),
        num_below=int(below.sum()),
        num_above=int(above.sum()),
        half_width=float(np.median((high - low) / 2 / sum(rows.terms.values()))),
    )


# The search is exhaustive over tp, pp, dp, micro_batch and virtual_stages; the other
# knobs keep their values.


HEADROOM = 0.1
"""Share of a device's memory that `search` keeps free: 9 of 10 published BigScience
rows needed less than a tenth more memory than `memory` predicts."""
LARGEST_MICRO_BATCH = 32
LARGEST_TENSOR = 16
"""Largest `tp`: two hosts of 8 devices. With larger `tp` every matmul waits for the
network."""


@dataclass(frozen=True, kw_only=True)
class PredictedLayout:
    """A parallel layout that fits the memory, and its predicted seconds of a step."""

    layout: ParallelLayout
    step_s: float

    @property
    def split(self) -> tuple[int, int, int]:
        """The degrees of tensor, pipeline and data parallelism: tp, pp and dp."""
        return self.layout.tp, self.layout.pp, self.layout.dp


def layouts(shape: Shape, like: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yields all parallel layouts with the devices, global batch and options of `like`.

    The degrees of tensor (`tp`, up to `LARGEST_TENSOR`), pipeline (`pp`) and data
    parallelism (`dp`) have all sizes that divide the model, which has the given shape,
    and the batch into equal parts. These are combined with all possible sizes of a
    microbatch, up to `LARGEST_MICRO_BATCH` sequences, and all possible numbers of
    virtual stages.
    """
    for tp in divisors(shape.heads):
        if tp > LARGEST_TENSOR or like.gpus % tp or shape.hidden % tp:
            continue
        if (shape.kv_heads or tp) % tp or shape.ffn_width % tp:
            continue
        for pp in divisors(shape.layers):
            dp, rest = divmod(like.gpus // tp, pp * like.cp)
            if rest == 0 and like.global_batch % dp == 0 and dp % like.ep == 0:
                split = replace(like, tp=tp, pp=pp, dp=dp, stage_layers=())
                yield from _pipelines(shape, split)


def _pipelines(shape: Shape, split: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yields layouts with the tp, pp and dp of `split`.

    These are all combinations of a microbatch size and a number of virtual stages.
    Microbatches have at most 32 sequences (`LARGEST_MICRO_BATCH`). More than one
    virtual stage needs pp above 1, and a number of microbatches that is a multiple of
    pp.
    """
    of_replica = split.global_batch // split.dp
    for micro_batch in divisors(of_replica):
        if micro_batch > LARGEST_MICRO_BATCH:
            continue
        for parts in divisors(shape.layers // split.pp):
            if parts == 1 or (
                split.pp > 1 and of_replica // micro_batch % split.pp == 0
            ):
                yield replace(split, micro_batch=micro_batch, virtual_stages=parts)


def search(
    shape: Shape, like: ParallelLayout, pool: Pool, scales: Scales
) -> tuple[PredictedLayout, ...]:
    """Finds all layouts that fit the pool's memory with headroom, fastest first.

    `like` has the number of devices, the global batch and the options, and `scales` the
    factors on predicted seconds. A tenth of a device's memory is kept free.

    Raises:
        ValueError: no layout exists; or no layout fits, in which case the message has
            the needed and the available memory.
    """
    found = list(layouts(shape, like))
    if not found:
        raise ValueError(
            f"no layout of {like.gpus} devices exists: no dp that some tp and pp leave "
            f"divides global_batch={like.global_batch}. Allowed: such as a multiple of "
            f"{like.gpus}. Change the batch or the number of devices."
        )
    sizes = np.sum(list(memory(shape, found, pool).values()), axis=0)
    room = pool.device.memory_bytes * (1 - HEADROOM)
    fitting = [
        layout for layout, size in zip(found, sizes, strict=True) if size <= room
    ]
    if not fitting:
        raise ValueError(
            f"no layout of {like.gpus} devices fits: the smallest needs "
            f"{min(sizes) / 1e9:.1f} GB of {room / 1e9:.1f} GB ({HEADROOM:.0%} kept "
            "free). Give more devices, zero=1 or more, or recompute=full."
        )
    costs = search_of(shape, like, pool).step_cost(space_of(fitting))
    seconds = costs.step_s(scales.vector())
    order = np.argsort(seconds, kind="stable")
    return tuple(
        PredictedLayout(layout=fitting[number], step_s=float(seconds[number]))
        for number in order
    )


def divisors(number: int) -> tuple[int, ...]:
    """Lists the divisors of a number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(part for part in range(1, number + 1) if number % part == 0)
