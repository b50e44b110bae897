"""How often recovery works: random faults on six kinds of jobs, hundreds of episodes.

Runs `dtft soak` for each kind of job in turn. The records are kept in a directory, so
that the same command goes on where it was interrupted. Usage:

    python -m experiments.soak [--episodes 84] [--seed 1] [--directory runs/soak] \
        [--only replica]
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.elastic.processes import run_to_end
from experiments import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DIGITS = ("digits_cnn", "--hosts", "3", "--stop.steps", "150")
_CHARS = (
    *("chars_transformer", "--model.width", "32", "--data.global_batch", "16"),
    *("--stop.steps", "60", "--checkpoint.storage_interval", "20"),
)
JOBS: dict[str, tuple[str, ...]] = {
    "replica": (*_DIGITS, "--spares", "1"),
    "fsdp": (
        *(*_CHARS, "--hosts", "2", "--spares", "1"),
        *("--mesh.replica", "1", "--mesh.fsdp", "2"),
    ),
    "stage": (
        *(*_CHARS, "--hosts", "4", "--spares", "1", "--mesh.replica", "2"),
        *("--mesh.fsdp", "1", "--mesh.stage", "2", "--pipeline.microbatches", "2"),
    ),
    "planned": (*_DIGITS, "--spares", "1", "--plan", "auto"),
    "balanced": (
        *(*_DIGITS, "--spares", "1", "--data.global_batch", "480"),
        *("--balance", "exact"),
    ),
    "scaled": (
        *(*_DIGITS, "--spares", "2", "--data.global_batch", "96"),
        # Time to compile for another size while the job trains.
        *("--stop.steps", "600", "--replicas", "2", "--replicas", "4"),
    ),
}
LONGEST_S = 86400.0
"""Seconds after which the episodes of one kind of job are ended."""
HEADER = (
    *("job", "episodes", "passed", "bit-equal of expected", "hung", "wrong"),
    *("recoveries", "by rung", "gaps on rung 0 [s]: median, largest", "steps lost"),
)


def row(name: str, found: Mapping[str, Any]) -> list[object]:
    """Makes the row of one kind of job from the sums of `dtft soak`."""
    gap = found["gaps_s"].get("0")
    return [
        name,
        found["episodes"],
        found["passed"],
        f"{found['bit_identical']} of {found['bit_identical_expected']}",
        found["hangs"],
        found["wrong"],
        found["recoveries"],
        ", ".join(f"{rung}: {count}" for rung, count in found["rungs"].items()) or "-",
        f"{gap[0]:.2f}, {gap[1]:.2f}" if gap else "-",
        found["steps_lost"],
    ]


def failures(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lists the episodes that failed, with seed, faults and reason."""
    return [
        f"{name}, seed {one['seed']}: {' '.join(one['faults'])}: "
        f"{'; '.join(one['why'])[:300]}"
        for name, record in found.items()
        for one in record["records"]
        if not one["passed"]
    ]


def pending(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Says how many faults were still pending or in effect when their job ended."""
    episodes = [one for record in found.values() for one in record["records"]]
    faults = sum(len(one["faults"]) for one in episodes)
    left = sum(len(one["not_over"]) for one in episodes)
    whole = sum(len(one["not_over"]) == len(one["faults"]) for one in episodes)
    return (
        f"{left} of {faults:,} faults had not happened, or were not undone, when the "
        f"job ended; in {whole} episodes no fault was over."
    )


def drawn(found: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Draws the gaps of recoveries by rung, and the number of each kind of fault."""
    from matplotlib.figure import Figure

    episodes = [one for record in found.values() for one in record["records"]]
    gaps: dict[int, list[float]] = {}
    for one in (it for episode in episodes for it in episode["recoveries"]):
        if one["gap_s"] is not None:
            gaps.setdefault(one["rung"], []).append(one["gap_s"])
    kinds = Counter(
        fault.partition("@")[0].partition(":")[0]
        for episode in episodes
        for fault in episode["faults"]
    )
    figure = Figure(figsize=(8, 6))
    above, below = figure.subplots(2, 1)
    for rung, values in sorted(gaps.items()):
        ordered = sorted(values)
        share = [(n + 1) / len(ordered) for n in range(len(ordered))]
        above.step(ordered, share, where="post", label=f"rung {rung} ({len(ordered)})")
    above.set(xscale="log", xlabel="commit to commit [s]", ylabel="share of recoveries")
    above.legend()
    below.barh(list(kinds), list(kinds.values()))
    below.set(xlabel="faults")
    figure.tight_layout()
    return figure


def _recorded(run: Path, seed: int) -> dict[str, Any] | None:
    """Reads the record of one kind of job; None if it has none.

    Args:
        run: the run directory of its soak.
        seed: the seed that the record must have.

    Raises:
        SystemExit: the record is of another seed.
    """
    file = run / "soak.json"
    if not file.exists():
        return None
    record = json.loads(file.read_text())
    if record["seed"] != seed:
        raise SystemExit(
            f"--seed {seed}: {file} is of seed {record['seed']}. Give that seed, or "
            "another --directory."
        )
    return record


def main(arguments: list[str] | None = None) -> None:
    """Runs the episodes that are still to come; writes table and figure of all.

    Raises:
        SystemExit: a flag is wrong; `dtft soak` could not run or took too long; or the
            directory has records of another seed. Nothing was written then.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=84, help="of each kind of job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path("runs/soak"))
    parser.add_argument(
        "--only",
        choices=[*JOBS],
        help="run only this kind of job; the table has the records of the others, too",
    )
    asked = parser.parse_args(arguments)
    for name in JOBS:  # before hours of episodes
        _recorded(asked.directory / name, asked.seed)
    found: dict[str, dict[str, Any]] = {}
    for name, words in JOBS.items():
        run = asked.directory / name
        if asked.only in (None, name):
            more = ["--episodes", str(asked.episodes), "--seed", str(asked.seed)]
            more += ["--run-dir", str(run)]
            command = [sys.executable, "-m", "dtft.cli", "soak", *words, *more]
            code = run_to_end(command, LONGEST_S, sys.stdout)
            if code not in (0, 1):
                why = f"code {code}" if code is not None else f"over {LONGEST_S:.0f} s"
                raise SystemExit(f"{name}: `dtft soak` ended with an error ({why}).")
        if (record := _recorded(run, asked.seed)) is not None:
            found[name] = record
    if not found:
        raise SystemExit(f"--episodes {asked.episodes}: there is no episode to show.")
    report.write(
        "soak",
        title="Random faults: how often recovery works",
        command=f"python -m experiments.soak --episodes {asked.episodes} "
        f"--seed {asked.seed}",
        header=HEADER,
        rows=[row(name, record) for name, record in found.items()],
        figure=drawn(found),
        notes=[
            "Each episode has one to three random faults (`dtft soak`), and is "
            "compared with an undisturbed run: bit for bit, or by its losses where "
            "the number of hosts or the shares change.",
            pending(found),
            *failures(found),
        ],
    )


if __name__ == "__main__":
    main()
