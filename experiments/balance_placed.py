"""Load balance of a placed model over unlike nodes, one of which slows down.

Three processes are the nodes of a pipeline (1F1B): each runs its layers of one model
and gets a part of a core (cgroup v1 `cpu.cfs_quota_us`, period 10 ms). Rounds of steps
measure how long each node works and waits; `dtft.planner.balance` divides the layers
anew. Then the first node is slowed, and it starts over. In the end every contiguous
split is measured, interleaved, to see how far from the best the result is. Needs root.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from dtft.elastic.processes import die_with_parent
from dtft.planner.balance import Balance, Rules
from dtft.planner.layer_work import Layers
from experiments import report
from experiments.balance_placed_worker import (
    HIDDEN,
    MICROBATCHES,
    loss,
    make_batch,
    make_params,
)
from experiments.quotas import Quota, quotas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
SHARES = (0.6, 0.35, 0.2)
"""Part of a core of each node."""
SLOWED = 0.25
"""That of the first node from the middle of the run on."""
STEPS, MOST_ROUNDS = 5, 15
REPEATS = 3
"""Times that every split is measured."""
ANSWER_S = 180.0
FLOPS = 2e10
"""What the cost model takes a node for."""
HEADER = (
    "round",
    "layers",
    "max wait ms",
    "mean wait ms",
    "step ms",
    "gain",
    "changed",
)

Counts = tuple[int, ...]
Tasks = list[list[Any]]
"""Name, microbatch, ready, start and end of each task of a node."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Some steps of one division."""

    slowed: bool
    counts: Counts
    max_wait_s: float
    mean_wait_s: float
    step_s: float
    gain: float
    changed: bool
    drifted: tuple[int, ...]


class Nodes:
    """The processes, spoken to all at once."""

    def __init__(
        self, processes: Sequence[subprocess.Popen[str]], folder: Path
    ) -> None:
        self.processes, self.folder = processes, folder
        self.ready: set[Counts] = set()

    def all(self, *command: Any) -> list[Any]:
        """What all nodes answer.

        Raises:
            TimeoutError: names the node that did not answer.
            RuntimeError: names the node that ended.
        """
        end = time.monotonic() + ANSWER_S
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [
            self._answer(n, end, str(command[0])) for n in range(len(self.processes))
        ]

    def _answer(self, node: int, end: float, command: str) -> Any:
        out = self.processes[node].stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(max(0.0, end - time.monotonic())):
                raise TimeoutError(
                    f"node {node} did not answer {command!r} in {ANSWER_S:g} s"
                )
        line = out.readline()
        if not line:
            raise RuntimeError(f"node {node} ended at {command!r}; its text is above")
        return json.loads(line)

    def prepare(self, splits: Sequence[Counts]) -> None:
        """Compiles splits: each node runs a step of them."""
        for counts in splits:
            if counts not in self.ready:
                self.all("prepare", counts)
                self.all("begin", counts, str(self.folder / "nothing"))
                self.all("step")
                self.ready.add(counts)

    def steps(self, num: int) -> list[list[Tasks]]:
        """So many steps: of each, the tasks of each node."""
        return [self.all("step") for _ in range(num)]


def main() -> None:
    """Runs it and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="few splits, no files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, _nodes(Path(name)) as nodes:
        with quotas(SHARES) as groups:
            found = _run(nodes, groups, quick=options.quick)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    _report(found, write=not options.quick)


@contextmanager
def _nodes(folder: Path) -> Iterator[Nodes]:
    """Processes for all nodes; none outlives this."""
    (folder / "params").mkdir()
    variables = {
        **os.environ,
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "experiments.balance_placed_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(len(SHARES)), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=variables,
            preexec_fn=die_with_parent,
        )
        for rank in range(len(SHARES))
    ]
    try:
        yield Nodes(processes, folder)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


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
    while len(rounds) < MOST_ROUNDS and (not rounds or not balance.settled):
        steps = nodes.steps(STEPS)
        if not rounds:
            gantts[f"{name}, first round"] = steps[-1]
        busy = np.array([[_busy(tasks) for tasks in step] for step in steps])
        counts = _counts(balance)
        balance = balance.after(busy)
        judged = balance.judgement
        assert judged is not None
        waits = np.array([_wait_s(step) for step in steps])
        rounds.append(
            Round(
                slowed=slowed,
                counts=counts,
                max_wait_s=float(np.median(waits.max(1))),
                mean_wait_s=float(np.median(waits.mean(1))),
                step_s=median(_step_s(step) for step in steps),
                gain=judged.gain,
                changed=judged.changed,
                drifted=judged.drifted,
            )
        )
        last = steps[-1]
        if judged.changed:
            _change(nodes, groups, _counts(balance), slowed)
    gantts[f"{name}, stable"] = last
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
    }


def _report(found: dict[str, Any], *, write: bool) -> None:
    rows = [
        (
            f"{index + 1}{' slowed' if one['slowed'] else ''}",
            " + ".join(map(str, one["counts"])),
            *(f"{1e3 * one[k]:.0f}" for k in ("max_wait_s", "mean_wait_s", "step_s")),
            f"{one['gain']:.1%}",
            "yes" if one["changed"] else "",
        )
        for index, one in enumerate(found["rounds"])
    ]
    result = found["result"]
    ended, best = result["layers"], result["best"]
    words = (
        f"In the end {' + '.join(map(str, ended))} layers: "
        f"{1e3 * result['step_s']:.0f} ms a step, {result['over_best']:.3f} of the "
        f"best of {len(found['splits'])} contiguous splits "
        f"({' + '.join(map(str, best))}: {1e3 * result['best_step_s']:.0f} ms), "
        f"medians of {REPEATS}, all splits in turn.",
        f"{len(HIDDEN)} unlike layers, {MICROBATCHES} microbatches, rounds of {STEPS} "
        f"steps. Nodes are processes with {', '.join(map(str, SHARES))} of a core "
        "(cgroup v1 quota, period 10 ms); from the round marked slowed on the first "
        f"has {SLOWED}. Waits are medians over the steps of a round: what of a step a "
        "node does not compute, the pipeline's fill and drain included.",
    )
    if not write:
        print("\n".join([*report.table(HEADER, rows), *words]))
        return
    report.write(
        "balance_placed",
        title="Load balance of a placed model over unlike nodes",
        command="python -m experiments.balance_placed",
        header=HEADER,
        rows=rows,
        figure=_figure(found),
        notes=words,
    )


def _figure(found: dict[str, Any]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8))
    grid = figure.add_gridspec(5, 1, height_ratios=(3, 1, 1, 1, 1), hspace=0.9)
    axes = figure.add_subplot(grid[0])
    numbers = range(1, len(found["rounds"]) + 1)
    for key, label in (("max_wait_s", "longest wait"), ("mean_wait_s", "mean wait")):
        waits = [1e3 * one[key] for one in found["rounds"]]
        axes.plot(numbers, waits, "o-", label=label)
    steps = [1e3 * one["step_s"] for one in found["rounds"]]
    axes.plot(numbers, steps, "k:", label="step")
    slowed = sum(not one["slowed"] for one in found["rounds"])
    axes.axvline(slowed + 0.5, color="0.7")
    axes.text(slowed + 0.55, axes.get_ylim()[1], "node 0 slowed", va="top")
    axes.set(xlabel="round", ylabel="ms", ylim=(0, None))
    axes.legend(frameon=False, ncols=3, fontsize=8)
    for place, (title, step) in enumerate(found["gantt"].items()):
        _gantt(figure.add_subplot(grid[place + 1]), title, step)
    return figure


def _gantt(axes: Any, title: str, step: Sequence[Tasks]) -> None:
    colours = {"forward": "tab:blue", "backward": "tab:orange"}
    for node, tasks in enumerate(step):
        for name, microbatch, _, start, end in tasks:
            colour = colours.get(name.split()[0], "0.6")
            bar = [(1e3 * start, 1e3 * (end - start))]
            axes.broken_barh(bar, (node - 0.4, 0.8), color=colour, ec="white", lw=0.4)
            if microbatch is not None:
                middle = 5e2 * (start + end)
                axes.text(middle, node, microbatch, ha="center", va="center", size=6)
    axes.set_title(title, size=9, loc="left")
    axes.set(yticks=range(len(step)), ylabel="node", xlim=(0, None))
    axes.invert_yaxis()


if __name__ == "__main__":
    main()
