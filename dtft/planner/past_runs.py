"""Level 2 of calibration: what past runs say about the terms of predictions.

A log has a line per run: what was predicted, by term, and what a step really took. From
it one factor per term, drawn towards 1 as long as runs are few. Pure; the caller reads
and writes the file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from dtft.planner import once, typed
from dtft.planner.calibration import Calibration
from dtft.planner.scalar_fit import Fit, fit

SPREAD = 0.3
"""Standard deviation, as a logarithm, expected of a term's factor before any run."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One run: the plan's prediction before level 2, and the median step."""

    device: str
    fabric: tuple[str, ...]
    software: str
    plan: str
    """Hash of the plan, or its words."""
    terms: Mapping[str, float]
    """Predicted seconds by term, without `Calibration.scales`."""
    step_s: float
    """Measured."""

    def to_json(self) -> str:
        """A line of the log."""
        return json.dumps(asdict(self))


def read_log(text: str) -> list[PastRun]:
    """The runs of a log, one JSON object a line; empty lines count nothing.

    Raises:
        ValueError: a line is no run; names its number.
    """
    runs = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                runs.append(typed.build(PastRun, once.parsed(line)))
            except ValueError as error:
                raise ValueError(
                    f"line {number} of the log of runs is no run ({error}). Remove it."
                ) from None
    return runs


def of_cluster(runs: Iterable[PastRun], calibration: Calibration) -> list[PastRun]:
    """The runs that a calibration may learn from: same device, fabric and software."""
    key = (calibration.device, calibration.fabric, calibration.software)
    return [run for run in runs if (run.device, run.fabric, run.software) == key]


def fit_terms(runs: Sequence[PastRun]) -> Fit:
    """One factor per term with which predictions are closest to what was measured.

    A term that no run has a share in keeps 1.

    Raises:
        ValueError: no runs.
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


def learn(calibration: Calibration, runs: Iterable[PastRun]) -> Calibration:
    """A calibration of level 2, from those runs that are of its cluster.

    Without any it stays as it is.
    """
    own = of_cluster(runs, calibration)
    if not own:
        return calibration
    found = fit_terms(own)
    return replace(
        calibration,
        scales=found.values,
        num_runs=len(own),
        residuals={**calibration.residuals, "runs": found.residual},
        errors={
            **calibration.errors,
            **{f"scale {name}": error for name, error in found.errors.items()},
        },
    )
