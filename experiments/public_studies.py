"""What the planner's predictions of published runs are worth: the numbers.

Leave-one-out on BigScience, transfer to Megatron on Selene, a fit to H100. Nothing is
run; every figure is deterministic. Tables and pictures are `public_measurements.py`'s.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtft.planner.search import Scales, StepCost, stack
from dtft.planner.transformer import (
    A100_SCALES,
    SPREADS,
    ParallelLayout,
    PredictedLayout,
    PredictionAccuracy,
    ScaleFit,
    Shape,
    elsewhere,
    fit,
    judge,
    leave_one_out,
    pool_of,
    regret,
    search,
    step_cost,
)
from experiments.published_rows import (
    ANOMALY,
    Published,
    llm_foundry,
    megatron,
    ranking_set,
)

CATALOG = Scales()


@functools.cache
def cost_of(shape: Shape, layout: ParallelLayout, cluster: str) -> StepCost:
    """Base seconds of a row; each row is priced once."""
    return step_cost(shape, layout, pool_of(cluster, layout.gpus))


def costs_of(rows: Sequence[Published]) -> StepCost:
    """Base seconds of all rows."""
    return stack([cost_of(p.row.shape, p.row.layout, p.cluster) for p in rows])


def seconds_of(rows: Sequence[Published]) -> np.ndarray:
    """Measured."""
    return np.array([p.step_s for p in rows])


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """Reference section 12, T5."""

    rows: list[Published]
    fitted: ScaleFit
    """To all rows."""
    predicted: np.ndarray
    """Of each row, from a fit to the others."""
    judgement: PredictionAccuracy
    top_1: float
    """Regret."""
    top_3: float


def bigscience_loo(spread: Scales = SPREADS) -> LeaveOneOut:
    """The ranking set, each row predicted from a fit to the others."""
    rows = ranking_set()
    costs, measured = costs_of(rows), seconds_of(rows)
    start, widths = CATALOG.vector(), spread.vector()
    predicted = leave_one_out(costs.step_s, measured, start, spread=widths)
    batch = np.array([p.row.layout.global_batch for p in rows])
    whole = batch >= 2016
    each = (predicted / batch)[whole], (measured / batch)[whole]
    return LeaveOneOut(
        rows=rows,
        fitted=fit(costs.step_s, measured, start, spread=widths),
        predicted=predicted,
        judgement=judge(predicted, measured, [p.name != ANOMALY for p in rows]),
        top_1=regret(*each, 1),
        top_3=regret(*each, 3),
    )


RULE = "all but links"
"""Settled on after results had been seen, so it is no blind test: fitted scalars, and
the catalog's figures of Selene's links, because what was fitted to links belongs to
Jean Zay's."""
DEVICE_ONLY = "matmul and memory"
"""What `dtft plan predict` carries over."""
TRANSFERS: Mapping[str, Scales] = {
    RULE: replace(elsewhere(A100_SCALES), launch=A100_SCALES.launch),
    DEVICE_ONLY: elsewhere(A100_SCALES),
    "all but links between hosts": replace(A100_SCALES, network=1.0, next_stage=1.0),
    "all but NVLink": replace(A100_SCALES, fast_link=1.0),
    "everything, Jean Zay's network too": A100_SCALES,
}
"""What is carried over from BigScience to Selene."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One row of Selene."""

    published: Published
    step_s: float
    """Predicted."""
    best: PredictedLayout
    split_ratio: float
    """Time of the published (tp, pp, dp), with its best micro-batch and virtual
    stages, by that of the best layout."""

    @property
    def rate_error(self) -> float:
        """Of TFLOP/s: predicted / measured - 1."""
        return self.published.step_s / self.step_s - 1


def transfer(rule: str = RULE) -> list[Transfer]:
    """The Megatron table, with scalars that saw none of it, by a rule of TRANSFERS."""
    scales = TRANSFERS[rule]
    found = []
    for p in megatron():
        layout = p.row.layout
        pool = pool_of(p.cluster, layout.gpus)
        candidates = search(p.row.shape, layout, pool, scales)
        split = (layout.tp, layout.pp, layout.dp)
        own = next(c for c in candidates if c.split == split)
        cost = cost_of(p.row.shape, layout, p.cluster)
        found.append(
            Transfer(
                published=p,
                step_s=float(cost.step_s(scales.vector())[0]),
                best=candidates[0],
                split_ratio=own.step_s / candidates[0].step_s,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A table that was not seen by the fit that predicts it."""

    rows: list[Published]
    device_only: np.ndarray
    """Predicted with the scalars of the device."""
    starts: np.ndarray
    """Predicted with the scalar of kernel launches, too."""


def left_out_tables() -> dict[str, LeftOut]:
    """Each table of A100, with scalars fitted to the rows of the others."""
    a100 = [p for p in llm_foundry() if p.group.startswith("a100")]
    tables = {"BigScience": ranking_set(), "Megatron": megatron(), "llm-foundry": a100}
    found = {}
    for name, rows in tables.items():
        others = [p for other, some in tables.items() if other != name for p in some]
        fitted = fit(
            costs_of(others).step_s,
            seconds_of(others),
            CATALOG.vector(),
            spread=SPREADS.vector(),
        )
        scales = Scales.of(fitted.values)
        kept, costs = elsewhere(scales), costs_of(rows)
        found[name] = LeftOut(
            rows=rows,
            device_only=costs.step_s(kept.vector()),
            starts=costs.step_s(replace(kept, launch=scales.launch).vector()),
        )
    return found


def h100_rows() -> list[Published]:
    """The bfloat16 rows on H100."""
    return [p for p in llm_foundry() if p.group.startswith("h100_bf16")]


H100_START = replace(A100_SCALES, fast_link=1.0)
"""What the fit to H100 is drawn to: A100's, but NVLink as the catalog has it."""


def h100_fit() -> ScaleFit:
    """To all bfloat16 rows of H100."""
    rows = h100_rows()
    start, spread = H100_START.vector(), SPREADS.vector()
    return fit(costs_of(rows).step_s, seconds_of(rows), start, spread=spread)


def h100_loo() -> np.ndarray:
    """Seconds of each of these rows, from a fit to the others."""
    rows = h100_rows()
    start, spread = H100_START.vector(), SPREADS.vector()
    return leave_one_out(costs_of(rows).step_s, seconds_of(rows), start, spread=spread)
