"""Load balance of a placed model over unlike nodes, one of which slows down.

Three processes are the nodes of a pipeline (1F1B): each runs its part of one model and
gets a part of a core (cgroup v1 `cpu.cfs_quota_us`, period 10 ms). Rounds of steps
measure how long each node works and waits; `dtft.balance` divides the model
anew, state moves, and training goes on. Then the first node is slowed, and it starts
over. Done twice: once whole layers are divided (`Layers`), once operators, each where
`place` has it by the weights found (`Operators`). In the end contiguous
splits are measured beside both (`balance_placed_beside`). About 4 minutes; needs root.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dtft.balance import Balance, Rules
from experiments.balance_placed_beside import result, splits_beside, undivided
from experiments.balance_placed_nodes import Nodes, Tasks, started, step_s
from experiments.balance_placed_report import show
from experiments.balance_placed_ways import (
    NUM_NODES,
    Way,
    by_layers,
    by_operators,
    operator_names,
    splits,
)
from experiments.balance_placed_worker import HIDDEN, MICROBATCHES, Form
from experiments.quotas import Quota, quotas

SHARES = (0.6, 0.35, 0.2)
"""Part of a core of each node."""
SLOWED = 0.25
"""That of the first node from the middle of the run on."""
STEPS, QUICK_STEPS, MOST_ROUNDS = 12, 3, 15
NEAR = 1.35
"""Splits are measured that are predicted to take at most this times the best's step."""
RUN_STEPS = 2000
"""For so many steps a training run would go on: what a change has to pay for."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Some steps of one division."""

    way: str
    slowed: bool
    division: str
    nodes: tuple[int, ...]
    """Of each operator."""
    weights: tuple[float, ...]
    max_wait_s: float
    mean_wait_s: float
    step_s: float
    gain: float
    changed: bool
    change_s: float
    """What the change took afterwards, compiling and moving state."""
    drifted: tuple[int, ...]


def main() -> None:
    """Runs it and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="short rounds, no files")
    options = parser.parse_args()
    # Quotas are taken down on the way out, so the way out is an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        tempfile.TemporaryDirectory() as name,
        started(Path(name), NUM_NODES) as nodes,
        quotas(SHARES) as groups,
    ):
        found = _run(nodes, groups, quick=options.quick)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    show(found, write=not options.quick)


def _run(nodes: Nodes, groups: Sequence[Quota], *, quick: bool) -> dict[str, Any]:
    for group, process in zip(groups, nodes.processes, strict=True):
        group.enter(process.pid)
    runs = [_Run(nodes, groups, way, quick) for way in (by_layers(), by_operators())]
    for run in runs:
        run.all()
    rows = runs[0].near()[: 2 if quick else None]
    with runs[0].full_speed():
        nodes.prepare(rows)
    measured = splits_beside(nodes, rows, [run.form for run in runs])
    for group in groups:  # what follows is no measurement
        group.limit(1.0)
    wanted = undivided({run.num_steps for run in runs})
    return {
        "rounds": [vars(one) for run in runs for one in run.rounds],
        "results": {
            run.way.name: {
                **result(measured, rows, run.form),
                "division": run.words,
                "steps": run.num_steps,
                "off": run.off(wanted[run.num_steps]),
            }
            for run in runs
        },
        "splits": [{"layers": row, "step_s": measured[row]} for row in rows],
        "gantt": {run.way.name: run.pictures for run in runs},
        "operators": operator_names(),
        "shares": SHARES,
        "slowed": SLOWED,
        "near": NEAR,
        "steps": runs[0].steps,
        "run_steps": RUN_STEPS,
        "microbatches": MICROBATCHES,
    }


class _Run:
    """One way to divide, from equal weights to the slowed node's."""

    def __init__(
        self, nodes: Nodes, groups: Sequence[Quota], way: Way, quick: bool
    ) -> None:
        self.nodes, self.groups, self.way = nodes, groups, way
        self.steps = QUICK_STEPS if quick else STEPS
        """Of a round."""
        self.folder = nodes.folder / way.name
        """Where nodes leave their state for the next division."""
        self.folder.mkdir()
        self.rounds: list[Round] = []
        self.pictures: dict[str, list[Tasks]] = {}
        rules = Rules(patience=1) if quick else Rules()
        self._balance = Balance.begin(way.work, rules)
        self._slowed = False
        self._cost_s = 0.0

    @property
    def form(self) -> Form:
        """The division in force."""
        return self.way.form(self._balance.division)

    @property
    def words(self) -> str:
        """What it is called."""
        return self.way.words(self._balance.division)

    @property
    def num_steps(self) -> int:
        """Steps that were trained."""
        return self.steps * len(self.rounds)

    def all(self) -> None:
        """Rounds until it is stable, then once more with a slower node."""
        with self.full_speed():
            self._cost_s = self.nodes.change(None, self.form, self.folder)
        for self._slowed in (False, True):
            self._limit()
            self._until_stable()
        self.nodes.all("leave", str(self.folder))

    def off(self, wanted: Any) -> float:
        """How far parameters are from others, relative to these: the worst array."""
        return max(
            float(np.linalg.norm(found - leaf) / np.linalg.norm(leaf))
            for found, leaf in zip(self.nodes.params(self.folder), wanted, strict=True)
        )

    def near(self) -> list[tuple[int, ...]]:
        """Splits that may be the best, by what nodes were found to need, best first."""
        speeds = self._balance.tried.speeds()
        step_s = {
            row: self.way.work.seconds(np.array(row), speeds.unit_s, speeds.fixed_s)
            for row in splits(len(HIDDEN), NUM_NODES)
        }
        most = NEAR * min(step_s.values())
        return sorted((s for s in step_s if step_s[s] <= most), key=lambda s: step_s[s])

    @contextmanager
    def full_speed(self) -> Iterator[None]:
        """What is compiled slows no node down."""
        self._limit(1.0)
        yield
        self._limit()

    def _limit(self, share: float | None = None) -> None:
        """Gives all nodes their parts of a core, or all the same."""
        shares = (SLOWED if self._slowed else SHARES[0], *SHARES[1:])
        for group, own in zip(self.groups, shares, strict=True):
            group.limit(own if share is None else share)

    def _until_stable(self) -> None:
        name = "slowed" if self._slowed else "equal weights"
        last = len(self.rounds) + MOST_ROUNDS
        steps = self._round()
        self.pictures[f"{name}, first round"] = steps[-1]
        while not self._balance.settled and len(self.rounds) < last:
            steps = self._round()
        self.pictures[f"{name}, stable"] = steps[-1]

    def _round(self) -> list[list[Tasks]]:
        """Steps, a judgement, and a change where it pays."""
        steps = self.nodes.steps(self.steps)
        before = self._balance
        left = RUN_STEPS - self.num_steps - self.steps
        busy = np.array([[_busy(tasks) for tasks in step] for step in steps])
        self._balance = before.after(
            busy,
            step_s=list(map(step_s, steps)),
            remaining_steps=left,
            cost_s=self._cost_s,
        )
        judged = self._balance.judgement
        assert judged is not None
        change_s = self._change() if judged.changed else 0.0
        waits = np.array([_wait_s(step) for step in steps])
        self.rounds.append(
            Round(
                way=self.way.name,
                slowed=self._slowed,
                division=self.way.words(before.division),
                nodes=self.way.nodes(before.division),
                weights=tuple((before.weights / before.weights.sum()).tolist()),
                max_wait_s=float(np.median(waits.max(1))),
                mean_wait_s=float(np.median(waits.mean(1))),
                step_s=median(map(step_s, steps)),
                gain=judged.gain,
                changed=judged.changed,
                change_s=change_s,
                drifted=judged.drifted,
            )
        )
        return steps

    def _change(self) -> float:
        """State moves to its new nodes."""
        with self.full_speed():
            self._cost_s = self.nodes.change(self.folder, self.form, self.folder)
        return self._cost_s


def _busy(tasks: Tasks) -> float:
    return sum(end - start for _, _, _, start, end in tasks)


def _wait_s(step: Sequence[Tasks]) -> list[float]:
    """Seconds of the step in which each node had nothing to do."""
    end = step_s(step)
    return [end - _busy(tasks) for tasks in step]


if __name__ == "__main__":
    main()
