"""Load balance of a placed model over unlike nodes, one of which slows down.

Three processes are the nodes of a pipeline (1F1B): each runs its layers of one model
and gets a part of a core (cgroup v1 `cpu.cfs_quota_us`, period 10 ms). Rounds of steps
measure how long each node works and waits; `dtft.planner.balance` divides the layers
anew. Then the first node is slowed, and it starts over. In the end every contiguous
split is measured, interleaved, to see how far from the best the result is. Needs root.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dtft.planner.balance import Balance, Rules
from dtft.planner.layer_work import Layers
from experiments.balance_placed_nodes import Counts, Nodes, Tasks, started
from experiments.balance_placed_report import show
from experiments.balance_placed_worker import (
    HIDDEN,
    MICROBATCHES,
    loss,
    make_batch,
    make_params,
)
from experiments.quotas import Quota, quotas

SHARES = (0.6, 0.35, 0.2)
"""Part of a core of each node."""
SLOWED = 0.25
"""That of the first node from the middle of the run on."""
STEPS, MOST_ROUNDS = 5, 15
REPEATS = 3
"""Times that every split is measured."""
FLOPS = 2e10
"""What the cost model takes a node for."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Some steps of one division."""

    slowed: bool
    counts: Counts
    weights: tuple[float, ...]
    max_wait_s: float
    mean_wait_s: float
    step_s: float
    gain: float
    changed: bool
    drifted: tuple[int, ...]


def main() -> None:
    """Runs it and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="few splits, no files")
    options = parser.parse_args()
    # Quotas are taken down on the way out, so the way out is an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        tempfile.TemporaryDirectory() as name,
        started(Path(name), len(SHARES)) as nodes,
    ):
        with quotas(SHARES) as groups:
            found = _run(nodes, groups, quick=options.quick)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    show(found, write=not options.quick)


def _run(nodes: Nodes, groups: Sequence[Quota], *, quick: bool) -> dict[str, Any]:
    work = Layers(layer_s=_layer_s(), microbatches=MICROBATCHES)
    splits = _splits(len(HIDDEN), len(SHARES))
    balance = Balance.begin(work, Rules())
    chosen = splits[::7] if quick else splits
    nodes.prepare([_counts(balance), *chosen])
    for group, process in zip(groups, nodes.processes, strict=True):
        group.enter(process.pid)
    rounds: list[Round] = []
    pictures: dict[str, Any] = {}
    params = nodes.folder / "params"
    nodes.all("begin", _counts(balance), str(params))
    for slowed in (False, True):
        groups[0].limit(SLOWED if slowed else SHARES[0])
        some, balance, gantts = _rounds(nodes, groups, balance, slowed)
        rounds += some
        pictures |= gantts
    measured = _measured(nodes, {*chosen, _counts(balance)})
    return _found(rounds, measured, pictures, _counts(balance))


def _rounds(
    nodes: Nodes, groups: Sequence[Quota], balance: Balance[Any], slowed: bool
) -> tuple[list[Round], Balance[Any], dict[str, Any]]:
    """Rounds until the division is stable."""
    name = "slowed" if slowed else "equal weights"
    rounds: list[Round] = []
    gantts: dict[str, Any] = {}
    steps: list[list[Tasks]] = []
    while len(rounds) < MOST_ROUNDS and (not rounds or not balance.settled):
        steps = nodes.steps(STEPS)
        if not rounds:
            gantts[f"{name}, first round"] = steps[-1]
        busy = np.array([[_busy(tasks) for tasks in step] for step in steps])
        counts, weights = _counts(balance), balance.weights
        balance = balance.after(busy)
        judged = balance.judgement
        assert judged is not None
        waits = np.array([_wait_s(step) for step in steps])
        rounds.append(
            Round(
                slowed=slowed,
                counts=counts,
                weights=tuple((weights / weights.sum()).tolist()),
                max_wait_s=float(np.median(waits.max(1))),
                mean_wait_s=float(np.median(waits.mean(1))),
                step_s=median(_step_s(step) for step in steps),
                gain=judged.gain,
                changed=judged.changed,
                drifted=judged.drifted,
            )
        )
        if judged.changed:
            _change(nodes, groups, _counts(balance), slowed)
    gantts[f"{name}, stable"] = steps[-1]
    return rounds, balance, gantts


def _change(
    nodes: Nodes, groups: Sequence[Quota], counts: Counts, slowed: bool
) -> None:
    """Layers move to their new nodes with what they have learnt."""
    params = nodes.folder / "params"
    nodes.all("leave", str(params))
    if counts not in nodes.ready:  # is compiled at full speed: that is not measured
        for group in groups:
            group.limit(1.0)
        nodes.prepare([counts])
        for group, share in zip(groups, SHARES, strict=True):
            group.limit(share)
        groups[0].limit(SLOWED if slowed else SHARES[0])
    nodes.all("begin", counts, str(params))


def _measured(nodes: Nodes, splits: set[Counts]) -> dict[Counts, list[float]]:
    """Seconds of a step of every split, all of them in turn."""
    found: dict[Counts, list[float]] = {counts: [] for counts in sorted(splits)}
    for _ in range(REPEATS):
        for counts, seconds in found.items():
            nodes.all("begin", counts, str(nodes.folder / "nothing"))
            seconds += [_step_s(step) for step in nodes.steps(2)[1:]]
    return found


def _counts(balance: Balance[Any]) -> Counts:
    return tuple(map(int, balance.division))


def _splits(num_layers: int, num_nodes: int) -> list[Counts]:
    """All ways to cut a row of layers, none of the parts empty."""
    cuts = combinations(range(1, num_layers), num_nodes - 1)
    return [
        tuple(np.diff((0, *places, num_layers)).astype(int).tolist()) for places in cuts
    ]


def _layer_s() -> np.ndarray:
    """Seconds of each layer, forward and backward, by its operations."""
    from dtft.planner.trace import trace

    graph = trace(loss, make_params(), make_batch())
    flops = np.zeros(len(HIDDEN))
    for op in graph.operators:
        for part in op.name.split("/"):
            if part.startswith("layer"):
                flops[int(part.removeprefix("layer"))] += op.flops
    seconds = 3 * flops / MICROBATCHES / FLOPS
    return np.repeat(seconds[:, None], len(SHARES), axis=1)


def _busy(tasks: Tasks) -> float:
    return sum(end - start for _, _, _, start, end in tasks)


def _step_s(step: Sequence[Tasks]) -> float:
    """Until the last node is done; all begin at the same time."""
    return max(tasks[-1][4] for tasks in step)


def _wait_s(step: Sequence[Tasks]) -> list[float]:
    """Seconds of the step in which each node had nothing to do."""
    end = _step_s(step)
    return [end - _busy(tasks) for tasks in step]


def _found(
    rounds: Sequence[Round],
    measured: dict[Counts, list[float]],
    pictures: dict[str, Any],
    counts: Counts,
) -> dict[str, Any]:
    medians = {split: median(seconds) for split, seconds in measured.items()}
    best = min(medians, key=lambda split: medians[split])
    return {
        "rounds": [vars(one) for one in rounds],
        "result": {
            "layers": counts,
            "step_s": medians[counts],
            "best": best,
            "best_step_s": medians[best],
            "over_best": medians[counts] / medians[best],
        },
        "splits": [{"layers": s, "step_s": t} for s, t in measured.items()],
        "gantt": pictures,
        "shares": SHARES,
        "slowed": SLOWED,
        "steps": STEPS,
        "repeats": REPEATS,
        "microbatches": MICROBATCHES,
    }


if __name__ == "__main__":
    main()
