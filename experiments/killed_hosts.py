"""How much longer a job takes whose hosts are killed at random, one each 30 s or so.

`digits_cnn` on three hosts with two spares trains to a fixed step: undisturbed, again
undisturbed (which tells the machine's noise), and with hosts killed at the moments of a
seeded Poisson process; each killed host comes back 2 s later. The time with kills is
compared with the undisturbed time plus the median gap of each kill. Usage:

    python -m experiments.killed_hosts [--steps 8000] [--every 30] [--seed 1]
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dtft.elastic.leader import read_events
from dtft.elastic.processes import run_to_end
from experiments import report

HOSTS, SPARES, REJOIN_S = 3, 2, 2.0
FIRST = 20
"""Step from which times count: compilation is over."""
MARGIN_S = 5.0
"""Seconds at both ends of a run without a kill."""
LIMIT_S = 3000.0
"""Seconds after which a drill is ended."""
HEADER = ("run", "kills", "recoveries by rung", "survivors restarted", "steps lost")
HEADER += (
    "median gap [s]",
    "largest gap [s]",
    "time [s]",
    "against undisturbed + gaps",
)


def kills(seed: int, every_s: float, steps: int, step_s: float) -> list[str]:
    """Draws kills at the moments of a Poisson process, each of a random slot.

    >>> kills(1, 30.0, 8000, 0.025) == kills(1, 30.0, 8000, 0.025)
    True
    """
    draw, at, found = random.Random(seed), MARGIN_S, list[str]()
    while (at := at + draw.expovariate(1 / every_s)) < steps * step_s - MARGIN_S:
        found.append(f"kill-host:{draw.randrange(HOSTS)}@{int(at / step_s)}")
    return found


def seconds(run: Path, last: int) -> float:
    """Returns the seconds between the commits of the steps `FIRST` and `last`.

    Raises:
        ValueError: the run has not committed one of the steps.
    """
    commits = [it for it in read_events(run) if it["event"] == "commit"]
    times = {it["step"]: it["time"] for it in commits}
    if not {FIRST, last} <= times.keys():
        raise ValueError(f"run={run} has no commit of step {FIRST} or {last}")
    return times[last] - times[FIRST]


def row(
    name: str, took_s: float, undisturbed_s: float, found: Sequence[dict[str, Any]]
) -> list[object]:
    """Makes a row of the table from a run's time and its recoveries."""
    gaps = [it["gap_s"] for it in found if it["gap_s"] is not None]
    middle = median(gaps) if gaps else 0.0
    rungs = sorted({it["rung"] for it in found})
    return [
        name,
        len(found),
        ", ".join(
            f"{rung}: {sum(it['rung'] == rung for it in found)}" for rung in rungs
        )
        or "-",
        sum(it["survivors_restarted"] for it in found),
        sum(it["steps_lost"] for it in found),
        f"{middle:.2f}",
        f"{max(gaps, default=0.0):.2f}",
        f"{took_s:.1f}",
        f"{took_s / (undisturbed_s + len(found) * middle):.3f}",
    ]


def drill(root: Path, steps: int, faults: Sequence[str]) -> dict[str, Any]:
    """Runs `dtft drill`; returns its record."""
    words = ["digits_cnn", "--hosts", str(HOSTS), "--spares", str(SPARES)]
    words += ["--rejoin", str(REJOIN_S), "--stop.steps", str(steps)]
    words += ["--checkpoint.storage_interval", "1000", "--run-dir", str(root)]
    words += ["--json", str(root / "drill.json"), "--deadline", "1500"]
    words += [word for fault in faults for word in ("--fault", fault)]
    command = [sys.executable, "-m", "dtft.cli", "drill", *words]
    code = run_to_end(command, LIMIT_S, sys.stdout)
    if code != 0:
        raise SystemExit(f"the drill failed: return code {code}")
    return json.loads((root / "drill.json").read_text())


def main(arguments: list[str] | None = None) -> None:
    """Runs the three jobs; writes the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--every", type=float, default=30.0, help="seconds, on average")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        drill(root, asked.steps, [])
        control_s = seconds(root / "control", asked.steps)
        again_s = seconds(root / "faulted", asked.steps)
        step_s = control_s / (asked.steps - FIRST)
        faults = kills(asked.seed, asked.every, asked.steps, step_s)
        record = drill(root, asked.steps, faults)
        killed_s = seconds(root / "faulted", asked.steps)
    report.write(
        "killed_hosts",
        title=f"A host killed every {asked.every:.0f} s, beside the undisturbed job",
        command=f"python -m experiments.killed_hosts --steps {asked.steps} "
        f"--every {asked.every:g} --seed {asked.seed}",
        header=HEADER,
        rows=[
            row("undisturbed", control_s, control_s, []),
            row("undisturbed again", again_s, control_s, []),
            row("hosts are killed", killed_s, control_s, record["recoveries"]),
        ],
        notes=[
            f"digits_cnn, {HOSTS} hosts and {SPARES} spares, {asked.steps} steps; a "
            f"killed host is started again after {REJOIN_S:.0f} s. Final parameters "
            + ("are" if record["bit_identical"] else "are NOT")
            + " equal bit for bit to the undisturbed run's.",
        ],
    )


if __name__ == "__main__":
    main()
