"""Load balance over simulated unlike nodes: does it stop, how near is the optimum.

1,200 random clusters (16 to 1,024 nodes, speeds spread up to 8x, noise up to 10 % of a
step, 64 to 4,096 microbatches), ten steps a round: policy `exact` beside the literal
`proportional` rule at several gains. Also: how long the choice of new shares takes.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtft.balance import Balance, Counts, Microbatches, Rules, allocate, makespan
from experiments import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES = (16, 64, 256, 1024)
SPREADS = (1.0, 2.0, 4.0, 8.0)
NOISES = (0.0, 0.02, 0.05, 0.1)
MICROBATCHES = (64, 256, 1024, 4096)
STEPS = 10
MOST_ROUNDS = 60
POLICIES = {
    "exact": Rules(),
    "proportional, gain 1": Rules(policy="proportional", step=1.0),
    "proportional, gain 0.3": Rules(policy="proportional", step=0.3),
    "proportional, gain 0.1": Rules(policy="proportional", step=0.1),
    "proportional, gain 0.03": Rules(policy="proportional", step=0.03),
}
HEADER = ("policy", "noise", "clusters", "stopped", "rounds p50", "p95", "most")
HEADER += ("over optimum p50", "p95", "worst", "stopped above 1.1", "bound violated")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy on one cluster."""

    policy: str
    noise: float
    rounds: int
    stopped: bool
    ratio: float
    """Seconds of a step over the best integer shares'."""
    violated: bool
    """`exact`: the guarantee of `dtft.balance` does not hold."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """A simulated cluster."""

    unit_s: np.ndarray
    total: int
    noise: float
    seed: int

    @classmethod
    def random(cls, seed: int) -> "Nodes":
        """Speeds are log-uniform over a spread."""
        rng = np.random.default_rng(seed)
        num, spread = int(rng.choice(NODES)), float(rng.choice(SPREADS))
        return cls(
            unit_s=np.exp(rng.uniform(0, np.log(spread), num)),
            total=int(rng.choice([m for m in MICROBATCHES if m >= num])),
            noise=float(rng.choice(NOISES)),
            seed=seed,
        )

    def run(self, policy: str) -> Run:
        """Rounds until the policy stops."""
        rng = np.random.default_rng([self.seed, 1])
        work = Microbatches(num_nodes=self.unit_s.size, total=self.total)
        now = Balance.begin(work, POLICIES[policy])
        while not now.settled and now.rounds < MOST_ROUNDS:
            factors = 1 + self.noise * rng.standard_normal((STEPS, self.unit_s.size))
            now = now.after(now.division * self.unit_s * np.maximum(0.2, factors))
        best = makespan(work.best(self.unit_s), self.unit_s)
        ratio = makespan(now.division, self.unit_s) / best
        return Run(
            policy=policy,
            noise=self.noise,
            rounds=now.rounds,
            stopped=now.settled,
            ratio=ratio,
            violated=policy == "exact" and ratio > self._bound(now) * (1 + 1e-9),
        )

    def _bound(self, end: Balance[Counts]) -> float:
        assert end.judgement is not None
        speeds, needed = end.tried.speeds(), (end.division, end.work.best(self.unit_s))
        wrong = max(
            float(np.max(np.abs(speeds.needed(it) / (it * self.unit_s) - 1)))
            for it in needed
        )
        return (1 + wrong) / ((1 - wrong) * (1 - end.judgement.threshold))


def main() -> None:
    """Runs all clusters and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 clusters, no files")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    clusters = [Nodes.random(seed) for seed in range(60 if options.quick else 1200)]
    runs = [nodes.run(policy) for policy in POLICIES for nodes in clusters]
    plan_ms = _plan_ms()
    rows = list(_rows(runs))
    if options.json:
        text = json.dumps({"plan_ms": plan_ms, "runs": [asdict(run) for run in runs]})
        options.json.write_text(text)
    if options.quick:
        print("\n".join(report.table(HEADER, rows)))
        return
    report.write(
        "balance_simulation",
        title="Load balance over simulated unlike nodes",
        command="python -m experiments.balance_simulation",
        header=HEADER,
        rows=rows,
        figure=_figure(runs),
        notes=(
            "The optimum is that of whole microbatches for the true speeds. Stopped "
            f"means within {MOST_ROUNDS} rounds of {STEPS} steps. The literal rule "
            "either never stops, as whole microbatches never make all waits equal, or, "
            "with a small gain, stops before its rounded shares have moved at all.",
            f"New shares for 1,024 nodes and 65,536 microbatches: {plan_ms:.2f} ms "
            "(median of 50).",
        ),
    )


def _rows(runs: Sequence[Run]) -> Iterable[Sequence[object]]:
    for policy in POLICIES:
        for noise in (*NOISES, None):
            some = [
                run
                for run in runs
                if run.policy == policy and noise in (None, run.noise)
            ]
            if some:
                label = "all" if noise is None else f"{noise:.0%}"
                yield (policy, label, *_figures(some))


def _figures(runs: Sequence[Run]) -> tuple[object, ...]:
    rounds = np.array([run.rounds for run in runs])
    ratios = np.array([run.ratio for run in runs])
    false = [run for run in runs if run.stopped and run.ratio > 1.1]
    return (
        len(runs),
        f"{np.mean([run.stopped for run in runs]):.1%}",
        f"{np.median(rounds):.0f}",
        f"{np.percentile(rounds, 95):.0f}",
        int(rounds.max()),
        f"{np.median(ratios):.3f}",
        f"{np.percentile(ratios, 95):.3f}",
        f"{ratios.max():.3f}",
        f"{len(false) / len(runs):.1%}",
        sum(run.violated for run in runs),
    )


def _plan_ms() -> float:
    rng = np.random.default_rng(0)
    unit_s = np.exp(rng.uniform(0, np.log(8), 1024))
    took = []
    for _ in range(50):
        began = time.perf_counter()
        allocate(unit_s, 65536)
        took.append(time.perf_counter() - began)
    return float(np.median(took)) * 1e3


def _figure(runs: Sequence[Run]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    for policy in POLICIES:
        some = [run for run in runs if run.policy == policy]
        share = np.arange(1, len(some) + 1) / len(some)
        width = 2.5 if policy == "exact" else 1.2
        left.plot(sorted(run.ratio for run in some), share, lw=width, label=policy)
        ends = sorted(run.rounds if run.stopped else np.inf for run in some)
        right.plot(ends, share, lw=width, label=policy, drawstyle="steps-post")
    left.set(
        xlabel="step over the optimum's", ylabel="share of clusters", xlim=(1, 1.5)
    )
    right.set(xlabel="rounds until it stops", xlim=(0, MOST_ROUNDS), ylim=(0, 1.02))
    left.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
