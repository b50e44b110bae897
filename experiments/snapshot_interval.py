"""What a snapshot every step costs, and what an automatic interval makes of it.

`chars_transformer` on two hosts, sized so that a step takes about 100 ms and about 1 s
on two cores: with the memory tier off, with a snapshot after every step, and with
`--checkpoint.interval auto`, in turns.
"""

import argparse
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.replication import Automatic, Costs, inflation
from dtft.config import parse_experiment
from dtft.drills import measure_tier, tier_off
from experiments import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = "chars_transformer"
HOSTS = ("--cluster.hosts", "2", "--mesh.replica", "1", "--mesh.fsdp", "2")
WAYS = ("off", "1", "auto")
HEADER = (
    *("step", "memory tier", "ms per step", "inflation", "stall per snapshot, ms"),
    *("snapshot adds, ms", "interval", "snapshots", "steps at risk"),
)

Summaries = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the model, and how long it is run."""

    name: str
    """What a step takes about, on two cores."""
    overrides: tuple[str, ...]
    """Of the model and the batch."""
    rounds: int
    """Turns of all three ways."""
    steps: int
    """With the tier off and at interval 1."""
    automatic_steps: int
    """With an automatic interval, which needs some to settle."""


def _size(width: int, layers: int, batch: int) -> tuple[str, ...]:
    return (
        *("--model.width", str(width), "--model.num_layers", str(layers)),
        *("--data.global_batch", str(batch)),
    )


SIZES = (
    Size(
        name="100 ms",
        overrides=_size(128, 2, 48),
        rounds=2,
        steps=120,
        automatic_steps=360,
    ),
    Size(
        name="1 s",
        overrides=_size(256, 6, 56),
        rounds=1,
        steps=36,
        automatic_steps=104,
    ),
)


def runs(size: Size, steps: int) -> dict[str, list[str]]:
    """CONFIG and overrides of each way, for `bench.measure`."""
    common = [CONFIG, *HOSTS, *size.overrides]
    longer = str(max(steps, steps * size.automatic_steps // size.steps))
    never = ["--checkpoint.storage_interval", "0"]
    return {
        "off": [*common, "--stop.steps", str(steps), *tier_off(steps)],
        "1": [*common, "--stop.steps", str(steps), *never],
        "auto": [
            *(*common, "--stop.steps", longer, *never),
            *("--checkpoint.interval", "auto"),
        ],
    }


def figures(seen: Summaries) -> list[dict[str, Any]]:
    """One row per way, from the summaries of all rounds.

    The inflation at interval 1 is the median over rounds of the wall time per step
    against the tier off in the same round. That of an automatic interval is less than
    runs differ by themselves: it is what a snapshot adds to the steps around it, within
    the same run, spread over the interval that was chosen.

    >>> off = {"late_step_s": 0.5}
    >>> one = {"late_step_s": 0.75, "stall_s": 0.125, "interval": 1, "snapshots": 9}
    >>> auto = one | {"late_step_s": 0.5, "quiet_step_s": 0.5, "snapshot_s": 0.25,
    ...     "interval": 64}
    >>> rows = figures({"off": [off], "1": [one], "auto": [auto]})
    >>> [row["inflation"] for row in rows]
    [0.0, 0.5, 0.0078125]
    """
    rows = []
    for way in WAYS:
        pairs = list(zip(seen[way], seen["off"], strict=True))
        ratios = [ours["late_step_s"] / off["late_step_s"] for ours, off in pairs]
        row: dict[str, Any] = {
            "way": way,
            "step_s": median(one["late_step_s"] for one in seen[way]),
            "wall_inflation": median(ratios) - 1,
            "inflation": median(ratios) - 1,
        }
        if way != "off":
            row["stall_s"] = median(one["stall_s"] for one in seen[way])
            row["interval"] = median(one["interval"] for one in seen[way])
            row["snapshots"] = seen[way][-1]["snapshots"]
        if way == "auto":
            row |= _automatic(seen[way])
        rows.append(row)
    return rows


def _automatic(found: list[dict[str, Any]]) -> dict[str, Any]:
    known = [one for one in found if "snapshot_s" in one]
    if not known:
        return {"inflation": None}  # too few steps: nothing was decided yet
    parts = [
        inflation(
            one["interval"],
            Costs(step_s=one["quiet_step_s"], snapshot_s=one["snapshot_s"]),
            Automatic.maximum,
        )
        for one in known
    ]
    added = median(one["snapshot_s"] for one in known)
    return {"inflation": median(parts), "snapshot_s": added}


def cells(size: str, row: dict[str, Any]) -> list[object]:
    """One row of the table."""

    def milliseconds(name: str) -> str:
        return f"{row[name] * 1e3:.1f}" if name in row else "-"

    part = row["inflation"]
    interval = int(row["interval"]) if "interval" in row else None
    return [
        size,
        {"1": "interval 1"}.get(row["way"], row["way"]),
        f"{row['step_s'] * 1e3:.1f}",
        "-" if row["way"] == "off" or part is None else f"{part:.2%}",
        milliseconds("stall_s"),
        milliseconds("snapshot_s"),
        interval or "-",
        row.get("snapshots", "-"),
        f"at most {interval}" if interval else "all",
    ]


def figure(found: dict[str, list[dict[str, Any]]]) -> "Figure":
    """Inflation of both ways at each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(figsize=(6, 3.5))
    for place, way in enumerate(WAYS[1:]):
        bars = [
            next(row["inflation"] or 0.0 for row in rows if row["way"] == way)
            for rows in found.values()
        ]
        where = [number + 0.4 * place for number in range(len(bars))]
        name = f"interval {way}"
        axes.bar(where, [100 * bar for bar in bars], width=0.35, label=name)
    axes.axhline(100 * Automatic.budget, color="black", linewidth=0.8)
    axes.set_xticks([n + 0.2 for n in range(len(found))], list(found))
    axes.set_xlabel("a step takes about")
    axes.set_ylabel("wall time added, %")
    axes.legend()
    return picture


NOTES = (
    "Two hosts, the state divided over them (fsdp=2) and pushed to each other; storage "
    "is off. Wall time per step: the last half of a run. Inflation at interval 1: "
    "against the tier off in the same round, median over rounds. Inflation of auto: "
    "what a snapshot adds to the steps beside its replication, against quiet steps of "
    "the same run (as the leader measures it), spread over the interval; the line in "
    "the figure is its budget. Steps at risk: from one snapshot to the next; while a "
    "snapshot is not replicated yet, so are those since the one before it.",
)


def main() -> int:
    """Measures; prints and keeps the table and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--steps", type=int, help="of the runs at a fixed interval (results not kept)"
    )
    options = parser.parse_args()
    if options.steps is not None and options.steps < 24:
        parser.error(f"--steps {options.steps}: the first 20 are left out; give 24")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found: dict[str, list[dict[str, Any]]] = {}
    for size in SIZES:
        steps = options.steps or size.steps
        experiment = parse_experiment(CONFIG, [*HOSTS, *size.overrides])
        rounds = 1 if options.steps else size.rounds
        found[size.name] = figures(measure_tier(experiment, runs(size, steps), rounds))
        print(json.dumps({size.name: found[size.name]}), flush=True)
    if options.json:
        made = {"cores": os.cpu_count(), "budget": Automatic.budget, "sizes": found}
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    rows = [cells(name, row) for name, rows in found.items() for row in rows]
    if options.steps:
        print("\n".join(report.table(HEADER, rows)))
        return 0
    report.write(
        "snapshot_interval",
        title="Snapshots every step, and at an automatic interval",
        command="python experiments/snapshot_interval.py",
        header=HEADER,
        rows=rows,
        figure=figure(found),
        notes=NOTES,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
