"""The planner's best plans for one GPU, run: three models.

    python experiments/gpu_plans.py             predicts the plans of the table; no GPU
    python experiments/gpu_plans.py --measure   measures this GPU's rows anew

On one GPU a plan is a number of microbatches and a rematerialization policy. For each
model, the five plans with the shortest predicted step are run, and the best plan of
each policy that is not among them. The table is `data/gpu_plans.jsonl`. Nothing is
fitted to it.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import gpu_steps
import jax
import numpy as np
import report
from gpu_optimizer import require_gpu
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))  # the ResNet is the tests' own

from dtft.parallel.planning import Runner, in_turns  # noqa: E402
from dtft.planner.cluster import Cluster, parse_pool  # noqa: E402
from dtft.planner.plan import Plan  # noqa: E402
from dtft.planner.search import best_of, next_best  # noqa: E402
from dtft.planner.transformer import concordance  # noqa: E402
from dtft.planner.types import Remat  # noqa: E402
from dtft.planner.workload import Workload, of_loss  # noqa: E402
from tests.support.zoo import MODELS as ZOO  # noqa: E402

TABLE = Path(__file__).parent / "data" / "gpu_plans.jsonl"
TITLE = "The planner's best plans for one GPU, run"
BEST = 5
"""Plans of a model that are run."""
APART = 0.05
"""Pairs of plans whose measured times differ by less do not count in concordance."""
POLICIES = get_args(Remat)
HEADER = [
    "model", "device", "microbatches", "remat", "measured s", "predicted s", "error",
    "over the fastest",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of the table."""

    model: str
    microbatches: int
    remat: Remat
    turns_s: tuple[float, ...]
    """Mean seconds of a step in each turn of the plan."""
    device: str
    """JAX's `device_kind`."""
    jax: str

    @property
    def step_s(self) -> float:
        """Seconds of a step: median of the turns."""
        return median(self.turns_s)


def models() -> dict[str, dict[str, Any]]:
    """The arguments of `dtft.plan`, by name of the model."""
    gpt, llama = gpu_steps.CASES[0], gpu_steps.CASES[5]
    found: dict[str, dict[str, Any]] = {}
    for name, case in {
        "GPT": replace(gpt, batch=32),
        "Llama": replace(llama, layers=4, batch=16),
    }.items():
        found[name] = {
            "loss": gpu_steps.loss_of(case, cudnn=True),
            "optimizer": gpu_steps.optimizer(),
            "params": gpu_steps.arrays(case)[0],
            # Equal tokens would take longer: gradients of one row are added one by one.
            "batch": gpu_steps.tokens_of(case),
        }
    resnet = ZOO["resnet"]()
    found["ResNet-50"] = {
        "loss": resnet.loss, "optimizer": resnet.optimizer,
        "params": resnet.params, "batch": resnet.batch,
    }  # fmt: skip
    return found


def cluster_of(device: str) -> Cluster:
    """One device of a `device_kind`."""
    return Cluster(pools=(parse_pool(gpu_steps.cluster_of(device)),))


def plans(question: Workload, cluster: Cluster) -> dict[tuple[int, str], Plan]:
    """All plans that fit, by microbatches and policy, the fastest one first."""
    found = {}
    for policy in POLICIES:
        decision = best_of(question, cluster, {"remat": policy, "zero": 0})
        for one in next_best(decision, 100):
            found[one.plan.knobs.microbatches, policy] = one.plan
    return dict(sorted(found.items(), key=lambda item: item[1].prediction.step_s))


def to_run(found: Mapping[tuple[int, str], Plan]) -> list[Plan]:
    """The best five, and the best of each other policy; `found` is in order."""
    best = list(found)[:BEST]
    for policy in POLICIES:
        of_policy = [key for key in found if key[1] == policy]
        if of_policy and not any(key[1] == policy for key in best):
            best.append(of_policy[0])
    return [found[key] for key in best]


def measure() -> list[Measurement]:
    """Runs the plans of all models on JAX's first device."""
    device, made = jax.devices()[0].device_kind, []
    for name, given in models().items():
        chosen = to_run(plans(of_loss(**given), cluster_of(device)))
        runners = [Runner(plan, given) for plan in chosen]
        for plan, times in zip(chosen, in_turns(runners), strict=True):
            knobs = plan.knobs
            made.append(
                Measurement(
                    model=name,
                    microbatches=knobs.microbatches,
                    remat=knobs.remat,
                    turns_s=tuple(times),
                    device=device,
                    jax=jax.__version__,
                )
            )
            print(json.dumps(asdict(made[-1])), flush=True)  # kept if a later one fails
    return made


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured plan beside its prediction."""

    measured: Measurement
    plan: Plan

    @property
    def error(self) -> float:
        """Relative, of seconds; positive if the plan is too slow."""
        return self.plan.prediction.step_s / self.measured.step_s - 1


def rows() -> dict[tuple[str, str], list[Row]]:
    """Plans of the table by model and device, in the order of today's predictions."""
    table = [
        Measurement(**{**row, "turns_s": tuple(row["turns_s"])})
        for row in map(json.loads, TABLE.read_text().splitlines())
    ]
    found = {}
    for name, given in models().items():
        question = of_loss(**given)
        for device in sorted({one.device for one in table if one.model == name}):
            known = plans(question, cluster_of(device))
            some = [one for one in table if (one.model, one.device) == (name, device)]
            made = [
                Row(measured=one, plan=known[one.microbatches, one.remat])
                for one in some
            ]
            made.sort(key=lambda row: row.plan.prediction.step_s)
            found[name, device] = made
    return found


def cells(of_model: Sequence[Row]) -> list[list[object]]:
    """The rows of the report of one model on one device."""
    fastest = min(row.measured.step_s for row in of_model)
    return [
        [
            row.measured.model,
            row.measured.device,
            row.measured.microbatches,
            row.measured.remat,
            row.measured.step_s,
            row.plan.prediction.step_s,
            f"{row.error:+.1%}",
            f"{row.measured.step_s / fastest:.3f}",
        ]
        for row in of_model
    ]


def verdict(name: str, device: str, of_model: Sequence[Row]) -> str:
    """How good the choice and the order of one model's plans are."""
    measured = np.array([row.measured.step_s for row in of_model])
    predicted = np.array([row.plan.prediction.step_s for row in of_model])
    share, pairs = concordance(predicted, measured, APART)
    errors = np.abs(predicted / measured - 1)
    return (
        f"{name} on {device}: the plan predicted fastest takes "
        f"{measured[0] / measured.min():.3f} times the time of the fastest measured; "
        f"of {pairs} pairs more than {APART:.0%} apart {share:.0%} are in the right "
        f"order; errors of seconds: median {np.median(errors):.1%}, worst "
        f"{errors.max():.1%}."
    )


def figure_of(found: Mapping[tuple[str, str], Sequence[Row]]) -> Figure:
    """Predicted against measured seconds, both over the fastest measured plan's."""
    figure = Figure(figsize=(5, 5))
    axes = figure.subplots()
    for (name, device), some in found.items():
        fastest = min(row.measured.step_s for row in some)
        axes.plot(
            [row.measured.step_s / fastest for row in some],
            [row.plan.prediction.step_s / fastest for row in some],
            "o",
            markersize=4,
            label=f"{name}, {device}",
        )
    axes.axline((1, 1), slope=1, color="black", linewidth=0.8)
    axes.set(xlabel="measured / fastest measured", ylabel="predicted / the same")
    axes.legend(fontsize=8)
    return figure


def main() -> None:
    """Measures the table, or predicts what it has and writes the report."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument(
        "--measure", action="store_true", help=f"on this GPU, into data/{TABLE.name}"
    )
    if parser.parse_args().measure:
        here = require_gpu("gpu_plans").device_kind
        kept = [
            line
            for line in TABLE.read_text().splitlines()
            if json.loads(line)["device"] != here
        ]
        lines = kept + [json.dumps(asdict(one)) for one in measure()]
        TABLE.write_text("\n".join(lines) + "\n")
        return
    jax.config.update("jax_platforms", "cpu")
    found = rows()
    machines = sorted(
        {
            f"one {row.measured.device} with jax {row.measured.jax}"
            for some in found.values()
            for row in some
        }
    )
    report.write(
        "gpu_plans",
        title=TITLE,
        command="python experiments/gpu_plans.py",
        header=HEADER,
        rows=[line for some in found.values() for line in cells(some)],
        figure=figure_of(found),
        notes=[
            *(verdict(*of, some) for of, some in found.items()),
            f"Each model's {BEST} plans that were predicted fastest when they were "
            "run, and the best plan of each other policy, in the order of today's "
            "predictions. Every step is waited for.",
        ],
        machine=f"{' and '.join(machines)}; the predictions depend on no machine, and "
        "are of these versions",
    )


if __name__ == "__main__":
    main()
