"""Calibrations: measured figures of a device type and its links, and their JSON file.

`apply_calibration` applies a calibration to a cluster. `learn` corrects a calibration
by the measured step times of past runs.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from dtft.planner import serialization
from dtft.planner.cluster import (
    CARRIED_OVER,
    INTERVAL_SHARE,
    UNCALIBRATED,
    Accuracy,
    Cluster,
    Efficiency,
    Link,
    Pool,
)
from dtft.planner.cost.fitting import CalibrationFit, fit

SCHEMA = 1
LEFT_OUT = "runs left out"
"""Key of `Calibration.residuals` for the error on runs that were left out of the fit:
80 % of past runs are predicted within this relative error by factors fitted to the
other runs."""
HELD_BY_MEDIAN = 1.9
"""Ratio of the size that 80 % of normally distributed errors do not exceed to the
median size of these errors."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of `dtft calibrate` for one device type in one fabric.

    A calibration is valid only for its own cluster: fitted figures that rank plans well
    on one cluster may rank plans badly on another. A term, such as `compute`, is a part
    of the sum that predicts a step's time (`Prediction.terms`).
    """

    device: str
    """Name of the device type, as in the catalog."""
    fabric: tuple[str, ...]
    """`link_key` of the link of each measured level of the fabric, innermost first."""
    num_devices: int
    """The number of devices that took part in the measurement."""
    software: str
    """Software versions of the measurement, such as `jax 0.10.2`."""
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    efficiency: Efficiency
    links: Mapping[str, Link] = field(default_factory=dict)
    """Map from the `link_key` of a catalog link to the measured link."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Map from the name of a fitted figure, such as `e0`, to its relative standard
    error."""
    residuals: Mapping[str, float] = field(default_factory=dict)
    """Map from the name of a fit (`matmul`, `memory`, ...) to its median relative
    error. If there are past runs, the key `LEFT_OUT` has the error on runs that were
    left out of the fit."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Level 2: map from a term of a prediction, such as `compute`, to its factor fitted
    to past runs."""
    num_runs: int = 0
    """Level 2: the number of past runs that `scales` is fitted to."""

    @property
    def level(self) -> int:
        """Level of the calibration: 1 if only measured, 2 if also fitted to past runs.

        Level 0, the catalog, has no file.
        """
        return 2 if self.scales else 1

    @property
    def source(self) -> str:
        """Origin of the figures in one line: level, devices, software and past runs."""
        runs = f", {self.num_runs} past runs" if self.num_runs else ""
        what = f"{self.num_devices} x {self.device}, {self.software}{runs}"
        return f"calibration level {self.level} ({what})"

    @property
    def term_errors(self) -> Mapping[str, float]:
        """Relative errors of the terms `compute` and `collectives` (`Accuracy.errors`).

        With past runs, both terms have the same error (`residuals[LEFT_OUT]`). About
        80 % of the runs that were left out of the fit have no larger error. In files
        without this entry, the error is 1.9 times (`HELD_BY_MEDIAN`) the median error
        of the fit to all runs.

        Without past runs, the error of a term is sqrt(a**2 + b**2):

        * a is 1.9 times the largest median error of the term's fits. About 80 % of the
          measured times have no larger error. `compute` has the fits of matmuls and of
          memory, `collectives` has a fit for each kind of collective.
        * b is the error for a new program on devices whose figures were fitted
          (`CARRIED_OVER`).

        If there is no fit of matmuls, the error of `compute` is that of the catalog's
        figures (`UNCALIBRATED`). So is that of `collectives` if it has no fit.
        """
        residuals = self.residuals
        if self.num_runs:
            runs = residuals.get(LEFT_OUT, HELD_BY_MEDIAN * residuals.get("runs", 0.0))
            return dict.fromkeys(UNCALIBRATED, runs)
        shared = [v for k, v in residuals.items() if k.startswith("collectives")]
        products = [residuals[k] for k in ("matmul", "memory") if k in residuals]
        fits = {
            "compute": products if "matmul" in residuals else [],
            "collectives": shared,
        }
        return {
            term: math.hypot(HELD_BY_MEDIAN * max(found), CARRIED_OVER.errors[term])
            if found
            else UNCALIBRATED[term]
            for term, found in fits.items()
        }

    @property
    def below(self) -> float:
        """Width of the prediction interval below a prediction, divided by that above.

        It is `Accuracy.below`, computed from the error of `compute`. It is 1 with past
        runs. Without past runs it is below 1: the error of the fits is as wide below
        the prediction as above, but the error for a new program (`CARRIED_OVER`) lies
        mostly above it.
        """
        if self.num_runs:
            return 1.0
        above, new = self.term_errors["compute"], CARRIED_OVER.errors["compute"]
        fits = math.sqrt(max(0.0, above**2 - new**2))
        return math.hypot(fits, CARRIED_OVER.below * new) / above

    def to_json(self) -> str:
        """Writes the calibration as versioned JSON."""
        return serialization.write_versioned(self, SCHEMA)

    @classmethod
    def read(cls, path: str | Path) -> "Calibration":
        """Reads the calibration from a file that `dtft calibrate --out` wrote.

        Raises:
            ValueError: the file cannot be read, or is not a calibration.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ValueError(
                f"calibration {path} cannot be read ({why}). Allowed: a file that "
                "`dtft calibrate --out` wrote."
            ) from None
        except ValueError as error:
            raise ValueError(f"calibration {path}: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """Reads a calibration from the JSON that `to_json` writes.

        Raises:
            ValueError: the text is not JSON, has another version, or is not a
                calibration.
        """
        return serialization.read_versioned(
            text,
            Calibration,
            name="calibration",
            schema=SCHEMA,
            again="Measure again with `dtft calibrate`.",
            check=_check,
        )


def _check(calibration: Calibration) -> None:
    """Checks that a calibration with past runs also has the error of the fit to them.

    Raises:
        ValueError: `num_runs` is above 0 and `residuals` has no key `runs`.
    """
    if calibration.num_runs and "runs" not in calibration.residuals:
        raise ValueError(
            f"num_runs={calibration.num_runs}, and residuals has no 'runs'. Allowed: "
            "both, or none"
        )


def link_key(link: Link) -> str:
    """Returns the text by which a calibration names a link of the catalog.

    It has the link's kind, its bandwidth, and the number of devices that share a port
    (left out if it is 1).

    >>> from dtft.planner.cluster.catalog import link
    >>> link_key(link("ib-400g")), link_key(link("opa-100g-half"))
    ('InfiniBand 48 GB/s', 'InfiniBand 4.22 GB/s for 2')
    """
    shared = f" for {link.shared_by}" if link.shared_by > 1 else ""
    return f"{link.kind} {link.curve.bandwidth / 1e9:g} GB/s{shared}"


def apply_calibration(cluster: Cluster, calibration: Calibration) -> Cluster:
    """Returns the cluster with measured figures in place of the catalog's figures.

    Pools of the calibration's device type get its figures of devices and links. A pool
    of another device type stays unchanged. So does a link that was not measured. The
    link between pools (`Cluster.between`) is replaced like a pool's own links.

    Raises:
        ValueError: no pool of the cluster has the device type; or the calibration and
            the cluster have links, but none in common.
    """
    like = [pool.device.name == calibration.device for pool in cluster.pools]
    if not any(like):
        names = ", ".join(sorted({pool.device.name for pool in cluster.pools}))
        raise ValueError(
            f"the calibration is of {calibration.device}, the cluster {cluster.words} "
            f"has {names}. Measure there with `dtft calibrate`, or leave it out."
        )
    between = cluster.between
    keys = {link_key(level.link) for pool in cluster.pools for level in pool.levels}
    if between is not None:
        keys.add(link_key(between))
        between = _measured(between, calibration)
    if calibration.links and keys and not keys & set(calibration.links):
        raise ValueError(
            f"the calibration is of {', '.join(calibration.links)}, the cluster "
            f"{cluster.words} has {', '.join(sorted(keys))}. Never carry a calibration "
            "to another fabric: measure there with `dtft calibrate`."
        )
    pools = tuple(
        _pool(pool, calibration) if fits else pool
        for pool, fits in zip(cluster.pools, like, strict=True)
    )
    return replace(cluster, pools=pools, between=between)


def _pool(pool: Pool, calibration: Calibration) -> Pool:
    device = replace(
        pool.device,
        peak_flops=calibration.peak_flops,
        memory_bandwidth=calibration.memory_bandwidth,
        efficiency=calibration.efficiency,
        source=calibration.source,
    )
    levels = tuple(
        replace(level, link=_measured(level.link, calibration)) for level in pool.levels
    )
    accuracy = Accuracy(
        source=calibration.source,
        errors=dict(calibration.term_errors),
        below=calibration.below,
        scales=dict(calibration.scales),
    )
    return replace(pool, device=device, levels=levels, accuracy=accuracy)


def _measured(link: Link, calibration: Calibration) -> Link:
    """Returns a catalog link with its measured figures; `link` itself without any."""
    return calibration.links.get(link_key(link), link)


# Level 2 of calibration. The log has one line per run: the predicted seconds by term
# and the measured seconds of a step. The fit gives one factor per term, shrunk towards
# 1 while there are few runs. The caller reads and writes the log file.


NUM_FOLDS = 20
"""Largest number of groups of past runs that `left_out_error` leaves out in turn."""
FEWEST_RUNS = 4
"""Least number of past runs for which, on average, 80 % of new runs do not exceed the
largest error of the past runs."""
SPREAD = 0.3
"""Prior standard deviation of the logarithm of a term's factor, in `fit_terms`."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One training run: the predicted seconds of a step, and the measured seconds.

    `device`, `fabric` and `software` have the same form as in `Calibration`: the name
    of the device type, the links of the fabric's levels, and the software versions.
    """

    device: str
    fabric: tuple[str, ...]
    software: str
    plan: str
    """Hash of the plan, or its description."""
    terms: Mapping[str, float]
    """Predicted seconds by term (`Prediction.terms`), without `Calibration.scales`."""
    step_s: float
    """Measured seconds of a step, the median of the run."""

    def to_json(self) -> str:
        """Writes the run as one line of the log."""
        return json.dumps(asdict(self))


def read_log(text: str) -> list[PastRun]:
    """Reads the runs of a log with one JSON object a line; empty lines are skipped.

    Raises:
        ValueError: a line is not a run; the message names the line number.
    """
    runs = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                runs.append(
                    serialization.build_typed(PastRun, serialization.parse_once(line))
                )
            except ValueError as error:
                raise ValueError(
                    f"line {number} of the log of runs is no run ({error}). Remove it."
                ) from None
    return runs


def of_cluster(runs: Iterable[PastRun], calibration: Calibration) -> list[PastRun]:
    """Selects the runs with the device type, fabric and software of a calibration."""
    key = (calibration.device, calibration.fabric, calibration.software)
    return [run for run in runs if (run.device, run.fabric, run.software) == key]


def fit_terms(runs: Sequence[PastRun]) -> CalibrationFit:
    """Fits one factor per term of predictions, such as `compute`, to measured steps.

    A term is a part of the sum that predicts a step's time (`PastRun.terms`). A term
    that is 0 s in all runs keeps the factor 1. A term that no run has gets no factor.
    The fewer the runs, the nearer the factors are to 1.

    Raises:
        ValueError: `runs` is empty, or a measured step time is not above 0.
    """
    if not runs:
        raise ValueError("runs is empty. Train with a plan first; its log has them.")
    names = sorted({name for run in runs for name in run.terms})
    seconds = np.array([[run.terms.get(name, 0.0) for name in names] for run in runs])
    return fit(
        lambda values: seconds @ np.array([values[name] for name in names]),
        dict.fromkeys(names, 1.0),
        [run.step_s for run in runs],
        spread=SPREAD,
    )


def left_out_error(runs: Sequence[PastRun]) -> float:
    """Estimates the relative error that 80 % of new runs do not exceed.

    Each run is predicted with factors (`fit_terms`) that were fitted to other runs; a
    single run is predicted with the factors 1. The result is the 80 % quantile of
    |measured / predicted - 1| over the runs. With fewer than 4 runs (`FEWEST_RUNS`),
    the result is the largest error, but at least the error for a new program on devices
    whose figures were fitted (`CARRIED_OVER`).

    Raises:
        ValueError: `runs` is empty, or a measured step time is not above 0.
    """
    folds = min(len(runs), NUM_FOLDS)
    errors = []
    for fold in range(folds):
        others = [run for number, run in enumerate(runs) if number % folds != fold]
        factors = fit_terms(others).values if others else {}
        for run in runs[fold::folds]:
            terms = run.terms.items()
            predicted_s = sum(factors.get(name, 1.0) * s for name, s in terms)
            errors.append(abs(run.step_s / predicted_s - 1))
    rank = min(len(errors), math.ceil(INTERVAL_SHARE * (len(errors) + 1)))
    error = sorted(errors)[rank - 1]
    return (
        error
        if len(runs) >= FEWEST_RUNS
        else max(error, CARRIED_OVER.errors["compute"])
    )


def learn(calibration: Calibration, runs: Iterable[PastRun]) -> Calibration:
    """Adds factors fitted to past runs, one per term of predictions (level 2).

    A term, such as `compute`, is a part of the sum that predicts a step's time. Only
    runs with the calibration's device type, fabric and software count. Returns the
    calibration unchanged if there are none.

    Raises:
        ValueError: a measured step time is not above 0.
    """
    own = of_cluster(runs, calibration)
    if not own:
        return calibration
    found = fit_terms(own)
    return replace(
        calibration,
        scales=found.values,
        num_runs=len(own),
        residuals={
            **calibration.residuals,
            "runs": found.residual,
            LEFT_OUT: left_out_error(own),
        },
        errors={
            **calibration.errors,
            **{f"scale {name}": error for name, error in found.errors.items()},
        },
    )
