"""The calibration log: predicted and measured step times of planned runs.

A run with a plan appends a line to `plan_times.jsonl` in its run directory: the
predicted seconds of a step by cause (compute, collectives, optimizer and so on), and
the measured seconds of a step. It appends nothing if the plan was predicted for other
devices. `dtft calibrate --runs` fits the planner's cost model to these lines
(`dtft.planner.cost.learn`).
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
"""File name of the calibration log in a run directory."""


def past_run(plan: Plan, mesh: Mesh, step_s: Sequence[float]) -> PastRun | None:
    """Makes a run's entry for the log of predicted and measured step times.

    Its predicted seconds are without the factors that were fitted to past runs. Returns
    None if the planner does not know the device type, if devices are of several types,
    or if hosts have different numbers of devices.

    Args:
        plan: the plan that was run.
        mesh: the mesh on which the plan was run.
        step_s: wall times of a step in seconds, each a mean over consecutive steps. The
            entry has their median, because a few stalls do not change the median.
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
    """Appends a run to the log file as one line of JSON."""
    with path.open("a") as file:
        print(run.to_json(), file=file)
