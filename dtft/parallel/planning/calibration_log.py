"""The calibration log: what a plan was predicted to take, and what a step took.

A planned run adds a line to `plan_times.jsonl` of its run directory, from which the
planner's cost model is fitted (`dtft.planner.cost.learn`).
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import jax
from jax.sharding import Mesh

from dtft.planner.cluster import Cluster
from dtft.planner.cost import PastRun, link_key
from dtft.planner.plan import Plan

PLAN_TIMES_FILE = "plan_times.jsonl"
"""Its name in a run directory."""


def past_run(plan: Plan, mesh: Mesh, step_s: Sequence[float]) -> PastRun | None:
    """One line of the log; None on devices that the planner does not know.

    Args:
        plan: what was run.
        mesh: what it ran on.
        step_s: wall time of a step in seconds, each measured over several in turn; the
            median counts, which stalls do not move.
    """
    try:
        pool = Cluster.from_devices(list(mesh.devices.flat)).uniform
    except ValueError:
        return None
    expected = plan.prediction
    sizes = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    knobs = " ".join(f"{name}={value}" for name, value in vars(plan.knobs).items())
    return PastRun(
        device=pool.device.name,
        fabric=tuple(link_key(level.link) for level in pool.levels),
        software=f"jax {jax.__version__}",
        plan=f"{plan.model_hash} {sizes} {knobs}".strip(),
        terms={
            name: s / expected.scales.get(name, 1.0)
            for name, s in expected.terms.items()
        },
        step_s=median(step_s),
    )


def append_past_run(path: Path, run: PastRun) -> None:
    """Adds a line."""
    with path.open("a") as file:
        print(run.to_json(), file=file)
