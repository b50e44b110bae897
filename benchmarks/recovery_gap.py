"""Times the phases of recoveries: processes killed one after the other in live jobs.

For a mesh of replicas, one with fsdp and one with stages, `dtft drill` kills the host
of slot 1 again and again; a spare takes the slot, and the killed host comes back as a
spare. In a second job only the trainer of slot 1 is killed; a spare takes the slot, and
the host that lost it is the next spare (both rung 0). Without `cluster.hot_swap` all
trainers start anew, after a lost trainer from each host's own memory (rung 1), after a
lost host from a peer's (rung 2). Prints the median and the 95th percentile of each
phase and of the gap between the last commit before the loss and the first after it.

    python benchmarks/recovery_gap.py [--kills 20] [--losses host trainer] [--json FILE]
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
    "host": ("kill-host", "True"),
    "trainer": ("kill-trainer", "True"),
    "trainer-restart": ("kill-trainer", "False"),
    "host-restart": ("kill-host", "False"),
}
"""What is killed, and `cluster.hot_swap` of the job, by the name in the table."""
PHASES = ("detect", "leave", "record", "restore", "first_step")


def recoveries(
    mesh: Sequence[str], apart: int, kills: int, root: Path, *, loss: str
) -> list[dict[str, Any]]:
    """Runs one drill, with `kills` losses of one kind; returns its recoveries.

    Raises:
        SystemExit: the drill failed.
    """
    file = root / "drill.json"
    fault, hot_swap = LOSSES[loss]
    faults = [f"{fault}:1@{apart * number}" for number in range(1, kills + 1)]
    words = [*mesh, "--spares", "1", "--rejoin", "1", "--run-dir", str(root)]
    words += ["--control", str(root / "control"), "--json", str(file)]
    words += ["--stop.steps", str(apart * (kills + 1))]
    words += ["--cluster.hot_swap", hot_swap, "--checkpoint.storage_interval", "0"]
    words += [word for fault in faults for word in ("--fault", fault)]
    command = [sys.executable, "-m", "dtft.cli", "drill", *words]
    log = root / "drill.log"
    with open(log, "wb") as output:
        code = run_to_end(command, LIMIT_S, output)
    if code != 0:
        raise SystemExit(log.read_text(errors="replace")[-4000:])
    return json.loads(file.read_text())["recoveries"]


def row(name: str, loss: str, found: Sequence[dict[str, Any]]) -> str:
    """Formats one line of the table: median / 95th percentile, in milliseconds."""
    values = {phase: [it["phases_s"][phase] for it in found] for phase in PHASES}
    values["gap"] = [it["gap_s"] for it in found]
    cells = [f"{1e3 * median(of):.0f} / {_p95(of):.0f}" for of in values.values()]
    restarted = sum(it["survivors_restarted"] for it in found)
    lost = sum(it["steps_lost"] for it in found)
    rungs = ", ".join(map(str, sorted({it["rung"] for it in found})))
    start = [name, loss, rungs, str(len(found)), str(restarted), str(lost)]
    return "| " + " | ".join([*start, *cells]) + " |"


def _p95(values: Sequence[float]) -> float:
    return 1e3 * (quantiles(values, n=20)[-1] if len(values) > 1 else values[0])


def main() -> None:
    """Runs all jobs and prints the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="of each mesh and loss")
    parser.add_argument("--only", default="", help="names of meshes to run: a part")
    parser.add_argument(
        "--losses", nargs="+", choices=LOSSES, default=[*LOSSES], help="a part"
    )
    parser.add_argument("--json", default="", help="file for all recoveries")
    options = parser.parse_args()
    seen: dict[str, list[dict[str, Any]]] = {}
    header = ["mesh", "loss", "rung", "kills", "restarted", "steps lost"]
    header += [*PHASES, "gap"]
    print("| " + " | ".join(header) + " |")
    print("|---" * len(header) + "|")
    for name, mesh in MESHES.items():
        if options.only not in name:
            continue
        apart = STEPS_BETWEEN[name.partition(",")[0]]
        for loss in options.losses:
            found: list[dict[str, Any]] = []
            with tempfile.TemporaryDirectory() as directory:
                while len(found) < options.kills:
                    kills = min(PER_JOB, options.kills - len(found))
                    found += recoveries(mesh, apart, kills, Path(directory), loss=loss)
            seen[f"{name}, {loss}"] = found
            print(row(name, loss, found), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()
