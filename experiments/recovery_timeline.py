"""A job that loses a host, second by second, beside the same job undisturbed.

Runs the demo's drill, or reads one that was run (`--run DIRECTORY`), and draws loss,
time from commit to commit and hosts over time, with and without the fault. Usage:

    python -m experiments.recovery_timeline [--run runs/demo]
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.elastic.leader import read_events
from experiments import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "recovery_timeline"
DRILL = (
    *("digits_cnn", "--hosts", "3", "--spares", "1", "--fault", "kill-host:1@150"),
    *("--deadline", "280"),
)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One run; times are in seconds since its first commit."""

    commits: tuple[tuple[float, int], ...]
    """When each step was committed, in the order of the commits."""
    hosts: tuple[tuple[float, int, int], ...]
    """From when on how many hosts train, and how many are spares."""
    loss: dict[int, float]
    """Training loss by step."""

    @property
    def gaps_s(self) -> list[tuple[float, float]]:
        """Each commit's time, and the seconds since the commit before it."""
        times = [at for at, _ in self.commits]
        return [(b, b - a) for a, b in zip(times, times[1:], strict=False)]


def timeline(events: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> Timeline:
    """What a run's `events.jsonl` and `metrics.jsonl` say.

    Raises:
        ValueError: no step was committed.
    """
    commits = [(it["time"], it["step"]) for it in events if it["event"] == "commit"]
    if not commits:
        raise ValueError("events has no commit. Give a run that has made a step.")
    begin = commits[0][0]
    here: set[str] = set()
    slots: set[str] = set()
    leader = ""
    hosts: list[tuple[float, int, int]] = []
    for event in events:
        led, leader = leader, event["by"]
        if led not in ("", leader):  # a former leader that is still there joins again
            here.discard(led)
            hosts.append((event["time"] - begin, len(slots & here), len(here - slots)))
        match event["event"]:
            case "host_joined":
                here.add(event["host"])
            case "host_lost":
                here.discard(event["host"])
            case "assignment":
                slots = set(event["slots"])
            case _:
                continue
        hosts.append((event["time"] - begin, len(slots & here), len(here - slots)))
    return Timeline(
        commits=tuple((at - begin, step) for at, step in commits),
        hosts=tuple(hosts),
        loss={it["step"]: it["loss"] for it in metrics if "loss" in it},
    )


def read(run: Path) -> Timeline:
    """The timeline of a run directory."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return timeline(read_events(run), [json.loads(line) for line in lines])


def drawn(runs: dict[str, Timeline]) -> "Figure":
    """Loss, time from commit to commit and hosts over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6))
    loss, gap, hosts = figure.subplots(3, 1, sharex=True)
    for name, run in runs.items():
        times = [at for at, _ in run.commits]
        losses = [run.loss.get(step, math.nan) for _, step in run.commits]
        loss.plot(times, losses, ".", markersize=3, label=name)
        gap.plot(times[1:], [1e3 * s for _, s in run.gaps_s], drawstyle="steps-pre")
        shown = [it for it in run.hosts if it[0] <= times[-1]]
        moments = [max(at, 0.0) for at, _, _ in shown] + [times[-1]]
        training = [it[1] for it in shown]
        hosts.step(moments, [*training, training[-1]], where="post")
        all_hosts = [it[1] + it[2] for it in shown]
        color = hosts.lines[-1].get_color()
        hosts.step(moments, [*all_hosts, all_hosts[-1]], ":", where="post", color=color)
    loss.set(ylabel="training loss", yscale="log")
    gap.set(ylabel="commit to commit [ms]", yscale="log")
    hosts.set(ylabel="hosts that train\n(dotted: and spares)", ylim=(0, None))
    hosts.set(xlabel="seconds since the first commit")
    loss.legend()
    return figure


def row(name: str, run: Timeline) -> list[object]:
    """The table's row of a run."""
    gaps = sorted(seconds for _, seconds in run.gaps_s)
    return [
        name,
        run.commits[-1][1],
        f"{run.commits[-1][0]:.1f}",
        f"{1e3 * gaps[len(gaps) // 2]:.0f}",
        f"{gaps[-1]:.2f}",
        f"{run.loss[max(run.loss)]:.6f}",
    ]


def drill(directory: Path) -> None:
    """Runs the demo's drill."""
    command = [sys.executable, "-m", "dtft.cli", "drill", *DRILL]
    out = ["--run-dir", str(directory), "--json", str(directory / "drill.json")]
    subprocess.run([*command, *out], check=True, timeout=400)


def main(arguments: list[str] | None = None) -> None:
    """Runs or reads the drill; writes table and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="directory of a drill that was run")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        directory = asked.run or Path(scratch)
        if asked.run is None:
            drill(directory)
        record = json.loads((directory / "drill.json").read_text())
        runs = {
            "undisturbed": read(directory / "control"),
            "a host is killed": read(directory / "faulted"),
        }
    (found,) = record["recoveries"]
    report.write(
        NAME,
        title="A host is lost: loss, steps and hosts over time",
        command="python -m experiments.recovery_timeline",
        header=(
            *("run", "steps", "seconds", "median commit to commit [ms]"),
            *("longest [s]", "last loss"),
        ),
        rows=[row(name, run) for name, run in runs.items()],
        figure=drawn(runs),
        notes=(
            f"`dtft drill {' '.join(DRILL)}`: {record['faults'][0]['fault']}, rung "
            f"{found['rung']}, {record['steps_lost']} steps lost, noticed after "
            f"{found['detect_s']:.2f} s, training again after {found['total_s']:.2f} "
            f"s, {found['bytes_from_peers']:,} bytes from peers' memory, "
            f"{record['bytes_from_storage']:,} from storage; final parameters equal "
            f"bit for bit: {record['bit_identical']}.",
            "Times are those of commits in `events.jsonl`. The first commits of a run "
            "wait for compilation.",
        ),
    )


if __name__ == "__main__":
    main()
