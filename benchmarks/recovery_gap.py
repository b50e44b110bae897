"""Times the phases of recoveries: hosts killed one after the other in live jobs.

For a mesh of replicas, one with fsdp and one with stages, `dtft drill` kills the host
of slot 1 again and again; a spare takes the slot, and the killed host comes back as a
spare. Each job runs once with `cluster.hot_swap` (rung 0) and once without (rung 2).
A third job, without it, loses the trainer of slot 1 alone, whose host starts a new one
from its own memory (rung 1). Prints the median and the 95th percentile of each phase
and of the gap between the last commit before the loss and the first after it.

    python benchmarks/recovery_gap.py [--kills 20] [--rungs 0 1 2] [--json FILE]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from dtft.elastic.processes import run_to_end

PER_JOB = 10
"""Kills in one job; a job may form 16 times in the same processes."""
CHARS = (
    *("chars_transformer", "--hosts", "4", "--model.width", "32"),
    *("--data.global_batch", "16"),
)
MESHES = {
    "replica, digits_cnn": ("digits_cnn", "--hosts", "3"),
    "fsdp, chars_transformer": (*CHARS, "--mesh.replica", "2", "--mesh.fsdp", "2"),
    "stage, chars_transformer": (
        *(*CHARS, "--mesh.replica", "2", "--mesh.stage", "2", "--mesh.fsdp", "1"),
        *("--pipeline.microbatches", "2"),
    ),
}
STEPS_BETWEEN = {"replica": 300, "fsdp": 150, "stage": 150}
"""Steps from one kill to the next, in which the killed host comes back and warms up."""
LIMIT_S = 1800.0
"""Seconds after which a job is ended."""
LOSSES = {
    0: ("kill-host", "--cluster.hot_swap", "True"),
    1: ("kill-trainer", "--cluster.hot_swap", "False"),
    2: ("kill-host", "--cluster.hot_swap", "False"),
}
"""What is killed, and the flags of the job, by the rung that recovers from it."""
PHASES = ("detect", "leave", "record", "restore", "first_step")


def recoveries(
    mesh: Sequence[str], apart: int, kills: int, root: Path, *, rung: int
) -> list[dict[str, Any]]:
    """Runs one drill, of a loss that `rung` recovers from; returns its recoveries.

    Raises:
        SystemExit: the drill failed.
    """
    file = root / "drill.json"
    fault, *flags = LOSSES[rung]
    faults = [f"{fault}:1@{apart * number}" for number in range(1, kills + 1)]
    words = [*mesh, "--spares", "1", "--rejoin", "1", "--run-dir", str(root)]
    words += ["--control", str(root / "control"), "--json", str(file)]
    words += ["--stop.steps", str(apart * (kills + 1)), *flags]
    words += ["--checkpoint.storage_interval", "0"]
    words += [word for fault in faults for word in ("--fault", fault)]
    command = [sys.executable, "-m", "dtft.cli", "drill", *words]
    log = root / "drill.log"
    with open(log, "wb") as output:
        code = run_to_end(command, LIMIT_S, output)
    if code != 0:
        raise SystemExit(log.read_text(errors="replace")[-4000:])
    return json.loads(file.read_text())["recoveries"]


def row(name: str, rung: str, found: Sequence[dict[str, Any]]) -> str:
    """Formats one line of the table: median / 95th percentile, in milliseconds."""
    values = {phase: [it["phases_s"][phase] for it in found] for phase in PHASES}
    values["gap"] = [it["gap_s"] for it in found]
    cells = [f"{1e3 * median(of):.0f} / {_p95(of):.0f}" for of in values.values()]
    restarted = sum(it["survivors_restarted"] for it in found)
    lost = sum(it["steps_lost"] for it in found)
    return f"| {name} | {rung} | {len(found)} | {restarted} | {lost} | " + " | ".join(
        [*cells, ""]
    ).rstrip(" ")


def _p95(values: Sequence[float]) -> float:
    return 1e3 * (quantiles(values, n=20)[-1] if len(values) > 1 else values[0])


def main() -> None:
    """Runs all jobs and prints the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="kills of each mesh")
    parser.add_argument("--only", default="", help="names of meshes to run: a part")
    rungs = sorted(LOSSES)
    parser.add_argument(
        "--rungs", type=int, nargs="+", choices=rungs, default=rungs, help="a part"
    )
    parser.add_argument("--json", default="", help="file for all recoveries")
    options = parser.parse_args()
    seen: dict[str, list[dict[str, Any]]] = {}
    header = ["mesh", "rung", "kills", "restarted", "steps lost", *PHASES, "gap"]
    print("| " + " | ".join(header) + " |")
    print("|---" * len(header) + "|")
    for name, mesh in MESHES.items():
        if options.only not in name:
            continue
        apart = STEPS_BETWEEN[name.partition(",")[0]]
        for rung in options.rungs:
            found: list[dict[str, Any]] = []
            with tempfile.TemporaryDirectory() as directory:
                while len(found) < options.kills:
                    kills = min(PER_JOB, options.kills - len(found))
                    found += recoveries(mesh, apart, kills, Path(directory), rung=rung)
            taken = sorted({it["rung"] for it in found})
            seen[f"{name}, rung {rung}"] = found
            print(row(name, ", ".join(map(str, taken)), found), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()
