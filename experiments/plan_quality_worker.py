"""One process of `plan_quality.py`: calibrates, then runs every plan of some models.

    python -m experiments.plan_quality_worker RANK PROCESSES ADDRESS MODEL,MODEL

Alone it has eight CPU devices, in a world of several processes one each. Must not know
what becomes of the figures.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]
if int(sys.argv[2]) == 1:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax  # noqa: E402
import worlds  # noqa: E402

from dtft.calibration import measure_devices  # noqa: E402
from dtft.parallel.planning import Runner, in_turns  # noqa: E402
from dtft.planner.cluster import Cluster  # noqa: E402
from dtft.planner.cost import Calibration, apply_calibration  # noqa: E402
from dtft.planner.plan import Plan  # noqa: E402
from dtft.planner.search import Decision, decide, next_best  # noqa: E402
from dtft.planner.workload import of_loss  # noqa: E402
from dtft.train import keep_freed  # noqa: E402
from tests.support.zoo import MODELS  # noqa: E402

SIZES: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"batch": 256, "widths": (512, 1024, 1024, 1024, 512)},
    "gpt_scan": {"batch": 16, "time": 64, "width": 256, "layers": 4, "heads": 8,
                 "vocabulary": 1024},
    "resnet": {"batch": 64, "size": 32, "depths": (1, 1), "width": 32, "classes": 64},
}  # fmt: skip
TURNS, TURN_S = {1: 5, 4: 15}, 0.25
"""Turns of every plan, by the number of processes, and seconds of each. Where four
processes share two cores medians of five differ by more than the plans do."""
BEST, AGAIN, AGAIN_S = 10, 11, 0.3
"""Plans measured again; turns of each, and seconds of each."""
ONE_PASS = {"microbatches": 1, "remat": "none"}


def main() -> None:
    """Measures, and answers with all figures (rank 0)."""
    rank, num, address, names = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    keep_freed(large=True)
    if num > 1:
        worlds.join(rank, num, address)
    else:
        jax.config.update("jax_platforms", "cpu")
    begin = time.monotonic()
    calibration = measure_devices(jax.devices())
    calibrated_s = time.monotonic() - begin
    models = [of_model(name, calibration) for name in names.split(",")]
    made = {
        "calibration": json.loads(calibration.to_json()),
        "calibrated_s": calibrated_s,
        "models": models,
    }
    worlds.answer(made if rank == 0 else None)


def of_model(name: str, calibration: Calibration) -> dict[str, Any]:
    """Every mesh and ZeRO level of one model, measured; the best again, in turns."""
    model = MODELS[name](**SIZES[name])
    given = {
        "loss": model.loss, "optimizer": model.optimizer,
        "params": model.params, "batch": model.batch,
    }  # fmt: skip
    asked = of_loss(**given)
    catalog = Cluster.from_devices(jax.devices())
    cluster = apply_calibration(catalog, calibration)
    chosen = decide(asked, cluster, whole=True).plan
    found = _plans(decide(asked, cluster, ONE_PASS, whole=True))
    found.setdefault(_name(chosen), chosen)
    before = _plans(decide(asked, catalog, ONE_PASS, whole=True))
    turns = TURNS[jax.process_count()]
    runners = {text: Runner(plan, given) for text, plan in found.items()}
    rows = []
    # All are compiled first: a step right behind compiling takes up to twice as long.
    for (text, plan), times in zip(
        found.items(), in_turns(list(runners.values()), turns, TURN_S), strict=True
    ):
        known = before.get(text)
        rows.append(
            {
                "plan": text,
                "step_s": median(times),
                "predicted_s": plan.prediction.step_s,
                "terms": dict(plan.prediction.terms),
                "catalog_s": known and known.prediction.step_s,
                "chosen": text == _name(chosen),
            }
        )
        _say(rows[-1])
    _again(rows, runners)
    return {"model": name, "sizes": dict(SIZES[name]), "rows": rows}


def _plans(decision: Decision) -> dict[str, Plan]:
    """All that fit, in the order of their predictions."""
    return {_name(one.plan): one.plan for one in next_best(decision, 10_000)}


def _name(plan: Plan) -> str:
    """Mesh and knobs in words; an order of axes that says nothing is left out."""
    axes = [f"{axis}={size}" for axis, size in plan.mesh.items()]
    knobs = plan.knobs
    more = [f"zero={knobs.zero}"] if knobs.zero else []
    more += [f"microbatches={knobs.microbatches}"] if knobs.microbatches > 1 else []
    more += [f"remat={knobs.remat}"] if knobs.remat != "none" else []
    return " ".join([*axes, *more])


def _again(rows: list[dict[str, Any]], runners: Mapping[str, Runner]) -> None:
    """The ten best, the chosen one and the three predicted best, in turns."""
    best = sorted(rows, key=lambda row: row["step_s"])[:BEST]
    best += sorted(rows, key=lambda row: row["predicted_s"])[:3]
    best += [row for row in rows if row["chosen"]]
    again = {row["plan"]: row for row in best}
    turns = in_turns([runners[text] for text in again], AGAIN, AGAIN_S)
    for row, times in zip(again.values(), turns, strict=True):
        row["turns_s"], row["again_s"] = times, median(times)


def _say(row: Mapping[str, Any]) -> None:
    if jax.process_index() == 0:
        seconds = f"{1e3 * row['step_s']:8.1f} ms {1e3 * row['predicted_s']:8.1f}"
        print(f"{row['plan']:40} {seconds}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
