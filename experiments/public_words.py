"""How numbers of the published runs are worded and drawn: cells, lines, one figure.

Must not know what a study computes, nor what its report says of the result; that is
`public_studies.py` and `public_measurements.py`.
"""

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from dtft.planner.search import Scales
from dtft.planner.transformer import PredictedLayout, PredictionAccuracy
from experiments.public_studies import seconds_of
from experiments.published_rows import Published


def layout_text(p: Published) -> str:
    """Such as `tp8 pp12 dp4 mb2`."""
    made = p.row.layout
    text = f"tp{made.tp} pp{made.pp} dp{made.dp} mb{made.micro_batch}"
    text += f" v{made.virtual_stages}" if made.virtual_stages > 1 else ""
    return f"{text} batch {made.global_batch}"


def best_text(found: PredictedLayout) -> str:
    """Such as `tp8 pp12 dp4 mb2 v3`, and its seconds."""
    made = found.layout
    return (
        f"tp{made.tp} pp{made.pp} dp{made.dp} mb{made.micro_batch} "
        f"v{made.virtual_stages}: {found.step_s:.2f} s"
    )


def percent(predicted: float, measured: float) -> str:
    """Signed error."""
    return f"{predicted / measured - 1:+.1%}"


def scales_text(values: np.ndarray) -> str:
    """Names and values."""
    pairs = zip(Scales.names(), values, strict=True)
    return ", ".join(f"{name} {value:.3g}" for name, value in pairs)


def words(judged: PredictionAccuracy) -> str:
    """A judgement in a line."""
    return (
        f"median error {judged.median_error:.1%}, concordance "
        f"{judged.concordance_5:.3f} (> 5 %), {judged.concordance_10:.3f} (> 10 %)"
    )


def error_cells(
    rows: Sequence[Published], times: np.ndarray, keep: np.ndarray
) -> list[object]:
    """Rows, median, median size, 90th percentile of size, worst."""
    errors = (times / seconds_of(rows) - 1)[keep]
    sizes = np.abs(errors)
    return [
        len(errors), f"{np.median(errors):+.1%}", f"{np.median(sizes):.1%}",
        f"{np.percentile(sizes, 90):.1%}", f"{sizes.max():.1%}",
    ]  # fmt: skip


def scatter(rows: Sequence[Published], predicted: np.ndarray, how: str) -> Figure:
    """Predicted over measured seconds, with lines at 15 % to either side."""
    figure, axes = pyplot.subplots(figsize=(5.5, 5))
    measured = seconds_of(rows)
    for group in dict.fromkeys(p.group for p in rows):
        keep = [p.group == group for p in rows]
        axes.scatter(measured[keep], predicted[keep], s=14, label=group)
    ends = np.array([measured.min() * 0.85, measured.max() * 1.15])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.85, 1.15):
        axes.plot(ends, factor * ends, color="grey", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured, s per step")
    axes.set(ylabel=f"predicted ({how}), s per step")
    axes.legend(fontsize=8)
    pyplot.close(figure)
    return figure
