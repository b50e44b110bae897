"""What the planner's predictions of published runs are worth: the numbers.

Leave-one-out on BigScience, transfer to Megatron on Selene, a fit to H100. Nothing is
run; every figure is deterministic. Tables and pictures are `public_measurements.py`'s.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtft.planner.cluster import Accuracy
from dtft.planner.search import Scales, StepCost, stack, terms_of_accuracy
from dtft.planner.transformer import (
    A100_SCALES,
    SPREADS,
    IntervalCoverage,
    ParallelLayout,
    PredictedLayout,
    PredictionAccuracy,
    ScaleFit,
    Shape,
    UnseenRows,
    accuracy_from,
    coverage,
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


@functools.cache
def a100_tables() -> Mapping[str, list[Published]]:
    """The tables that were measured on A100."""
    a100 = [p for p in llm_foundry() if p.group.startswith("a100")]
    return {"BigScience": ranking_set(), "Megatron": megatron(), "llm-foundry": a100}


@functools.cache
def fitted_to(tables: tuple[str, ...]) -> Scales:
    """Scalars fitted to tables of A100."""
    rows = [p for name in tables for p in a100_tables()[name]]
    measured, start = seconds_of(rows), CATALOG.vector()
    fitted = fit(costs_of(rows).step_s, measured, start, spread=SPREADS.vector())
    return Scales.of(fitted.values)


def left_out_tables() -> dict[str, LeftOut]:
    """Each table of A100, with scalars fitted to the rows of the others."""
    found = {}
    for name, rows in a100_tables().items():
        scales = fitted_to(tuple(other for other in a100_tables() if other != name))
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


def fp8_rows() -> list[Published]:
    """The rows on H100 whose layers multiply in fp8."""
    return [p for p in llm_foundry() if p.group == "h100_fp8"]


def as_bfloat16(rows: Sequence[Published]) -> list[Published]:
    """The rows as if all of them were computed in bfloat16."""
    layouts = (replace(p.row.layout, dtype="bfloat16") for p in rows)
    return [
        replace(p, row=replace(p.row, layout=layout))
        for p, layout in zip(rows, layouts, strict=True)
    ]


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


# ------------------------------------------------------------------ intervals

H100_TABLE = "llm-foundry H100"
FROM_CATALOG, FROM_OTHERS = "catalog", "scalars of other tables"
FROM_OWN, FROM_RUNS = "scalars of the device, row left out", "own runs, row left out"
LEVELS = (FROM_CATALOG, FROM_OTHERS, FROM_OWN, FROM_RUNS)
"""How the seconds of a row are predicted: by the catalog's figures (no fit); by the
scalars of A100 that were fitted to other tables, of which those of the device are
carried over; by such scalars of the device that were fitted to the other rows of the
table; or by all scalars that were fitted to the other rows of the table, as past runs
on the cluster would be."""


@functools.cache
def tables() -> Mapping[str, list[Published]]:
    """All tables."""
    return {**a100_tables(), H100_TABLE: h100_rows()}


def unseen(rows: Sequence[Published], scales: Scales) -> UnseenRows:
    """Rows as they are predicted by scalars that were not fitted to them."""
    terms = costs_of(rows).terms(scales.vector())
    return UnseenRows(terms=terms_of_accuracy(terms), measured=seconds_of(rows))


@functools.cache
def row_left_out(table: str, *, of_device: bool) -> UnseenRows:
    """Each row of a table as predicted by scalars that were fitted to its other rows.

    Args:
        table: its name.
        of_device: whether only the scalars of the device are kept.
    """
    rows = tables()[table]
    costs, measured = costs_of(rows), seconds_of(rows)
    start = CATALOG.vector()
    found: list[Mapping[str, np.ndarray]] = []
    for at in range(len(rows)):
        others = np.flatnonzero(np.arange(len(rows)) != at)
        rest = costs.take(others)
        fitted = fit(rest.step_s, measured[others], start, spread=SPREADS.vector())
        scales = Scales.of(fitted.values)
        kept = elsewhere(scales) if of_device else scales
        own = costs.take(np.array([at])).terms(kept.vector())
        found.append(terms_of_accuracy(own))
    terms = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    return UnseenRows(terms=terms, measured=measured)


def widths_without(table: str, level: str) -> Accuracy:
    """Accuracy of a level of calibration, from tables other than the one that is named.

    Each of the others is predicted by what was fitted to the rest: neither to itself
    nor to the table that is named. "" leaves out no table.
    """
    others = [name for name in tables() if name != table]
    if level == FROM_CATALOG:
        seen = [unseen(tables()[name], CATALOG) for name in others]
    elif level == FROM_RUNS:
        seen = [row_left_out(name, of_device=False) for name in others]
    else:
        seen = [predicted_by_others(name, table) for name in others]
    return accuracy_from(seen, f"errors of {', '.join(others)}")


def predicted_by_others(table: str, hidden: str = "") -> UnseenRows:
    """A table as predicted by the device's scalars, fitted to other tables of A100.

    Args:
        table: its name.
        hidden: a further table that the fit does not see.
    """
    others = tuple(name for name in a100_tables() if name not in (table, hidden))
    return unseen(tables()[table], elsewhere(fitted_to(others)))


def interval_coverage(table: str) -> dict[str, IntervalCoverage]:
    """By level: how many rows of a table are in intervals made of the other tables."""
    rows = {
        FROM_CATALOG: unseen(tables()[table], CATALOG),
        FROM_OTHERS: predicted_by_others(table),
        FROM_RUNS: row_left_out(table, of_device=False),
    }
    if table == H100_TABLE:
        rows[FROM_OWN] = row_left_out(table, of_device=True)
    return {
        level: coverage(rows[level], widths_without(table, level))
        for level in LEVELS
        if level in rows
    }
