"""Load balance on real unlike hosts: four processes with unlike CPUs and one slow link.

Each host is a process with a part of a core of its own (`quotas.py`), in a network
namespace of its own; one link is limited (`links.py`). They train one model over gloo.
Both policies look for shares; what they found is then run in turns with equal shares
and with the shares around the best, without being timed apart, and the few fastest of
these in turns once more. In the end one host becomes slower in mid-run. Needs root;
takes about 8 minutes.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.elastic.processes import free_port
from experiments import links, report
from experiments.balance_unlike_worker import (
    FEW,
    MICROBATCHES,
    ROWS_EACH,
    STEPS,
    Task,
)
from experiments.quotas import quotas
from experiments.worlds import run_world

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CORES = (0.15, 0.25, 0.4, 0.6)
CPUS = (0, 1, 1, 0)
"""The core that each has its part of, where there are two: moved about, hosts get in
each other's way for seconds."""
SLOW_LINK, LIMITS = 1, (10_000.0, 100.0, 10_000.0, 10_000.0)
"""The host with the limited link; Mbit/s of each."""
SLOWED, SLOWED_TO = 3, 0.3
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
}
ROUNDS, TRIALS, REPETITIONS = 12, 5, 25
"""Most rounds of a search; turns with all candidates, turns with the few that count."""
DEADLINE_S = 600.0
SEARCHES = ("exact", "proportional")


def main() -> None:
    """Measures, prints the table, and writes the results unless `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, no files")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    # What limits hosts is taken down on the way out, so the way out is an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), quick=options.quick)
        searches = {
            phase: _rounds(Path(folder) / phase / "balance.jsonl") for phase in SEARCHES
        }
    figures = summary(found, searches["exact"])
    figures["wall_s"] = round(time.monotonic() - began, 1)
    print(json.dumps({k: v for k, v in figures.items() if k != "all"}, indent=1))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**figures, "searches": searches}, indent=1)
        options.json.write_text(text + "\n")
    rows = _rows(figures)
    if options.quick:
        print("\n".join(report.table(HEADER, rows)))
        return
    report.write(
        "balance_unlike_hosts",
        title="Load balance on four unlike hosts",
        command="python -m experiments.balance_unlike_hosts",
        header=HEADER,
        rows=rows,
        figure=_figure(searches, slowed_after=figures["rounds"]),
        notes=_notes(figures),
    )


def run(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Runs the hosts: what the first one measured, and what is summed over all.

    Raises:
        links.CannotLimitError, quotas.NoQuotasError: this machine cannot play hosts.
    """
    num, cpus = len(CORES), sorted(os.sched_getaffinity(0))
    with links.limited_hosts(num, LIMITS) as limited, quotas(CORES) as groups:
        task = Task(
            folder=str(folder),
            quotas=[group.path for group in groups],
            cores=list(CORES),
            slowed=SLOWED,
            slowed_to=SLOWED_TO,
            rounds=3 if quick else ROUNDS,
            trials=1 if quick else TRIALS,
            repetitions=1 if quick else REPETITIONS,
        )
        answers = run_world(
            "experiments.balance_unlike_worker",
            [[json.dumps(asdict(task))]] * num,
            address=f"{limited.gateway}:{free_port()}",
            deadline_s=DEADLINE_S,
            prefixes=[
                [*host.prefix, "taskset", "-c", str(cpus[cpu % len(cpus)])]
                for host, cpu in zip(limited.hosts, CPUS, strict=True)
            ],
            environment=ONE_THREAD,
        )
    used = answers[0]["used"]
    others_s = used["machine_s"] - sum(answer["used"]["own_s"] for answer in answers)
    return answers[0] | {
        "recompilations": sum(answer["recompilations"] for answer in answers),
        "others": others_s / used["wall_s"],
    }


def summary(found: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that count, from what was measured."""
    trials, again = (_by_shares(found[phase]) for phase in ("trials", "again"))
    shares = {name: tuple(it) for name, it in found["shares"].items()}
    best, exact = max(again, key=lambda it: again[it]), again[shares["exact"]]
    named = {name: again[shares[name]] for name in ("even", "proportional", "exact")}
    slow = found["slowed_steps_per_s"]
    changes = [it["round"] for it in rounds if it["next"] != it["shares"]]
    first = found["rounds"]["exact"]
    return {
        "steps_per_s": {**named, "optimum": again[best]},
        "shares": {**shares, "optimum": best},
        "rounds": first,
        "rounds_proportional": found["rounds"]["proportional"],
        "proportional_settled": found["settled"],
        "recompilations": found["recompilations"],
        "exact_over_optimum": again[best] / exact,
        "speed_up_over_even": exact / named["even"],
        "slowed": {
            "rounds": found["rounds"]["slowed"],
            "settled": rounds[-1]["settled"],
            "last_change": max((it - first for it in changes if it > first), default=0),
            "shares": found["slowed_shares"],
            "steps_per_s": slow,
            "speed_up_over_before": slow["after"] / slow["before"],
        },
        "others": found["others"],
        "all": [
            {"shares": it, "trial": speed, "again": again.get(it)}
            for it, speed in trials.items()
        ],
    }


def _by_shares(measured: list[Any]) -> dict[tuple[int, ...], float]:
    return {tuple(shares): speed for shares, speed in measured}


HEADER = (
    *("hosts", "shares", "microbatches", "steps per s, trials", "again"),
    *("of the best", "rounds"),
)


def _rows(figures: dict[str, Any]) -> list[list[object]]:
    settled = "" if figures["proportional_settled"] else ", not settled"
    rounds = {
        "exact": figures["rounds"],
        "proportional": f"{figures['rounds_proportional']}{settled}",
    }
    names: dict[tuple[int, ...], list[str]] = {}
    for name, shares in figures["shares"].items():
        names.setdefault(tuple(shares), []).append(name)
    best = figures["steps_per_s"]["optimum"]
    rows = [
        [
            "/".join(f"{share:g}" for share in CORES),
            " = ".join(names.get(one["shares"], ["near"])),
            " ".join(map(str, one["shares"])),
            one["trial"],
            one["again"] or "",
            f"{one['again'] / best:.3f}" if one["again"] else "",
            ", ".join(str(rounds[it]) for it in rounds if it in named),
        ]
        for one in figures["all"]
        for named in [names.get(one["shares"], [])]
    ]
    return rows + _slow_rows(figures["slowed"])


def _slow_rows(slow: dict[str, Any]) -> list[list[object]]:
    cores = list(CORES)
    cores[SLOWED] = SLOWED_TO
    speeds = slow["steps_per_s"]
    return [
        [
            "/".join(f"{share:g}" for share in cores),
            name,
            " ".join(map(str, slow["shares"][name])),
            "",
            speed,
            f"{speed / max(speeds.values()):.3f}",
            slow["rounds"] if name == "after" else "",
        ]
        for name, speed in speeds.items()
    ]


def _rounds(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["event"] == "round"]


def _notes(figures: dict[str, Any]) -> tuple[str, ...]:
    slow = figures["slowed"]
    ended = "settled" if slow["settled"] else "not settled"
    return (
        "Hosts have the parts of a core that the first column names (quota in every "
        "10 ms, one XLA thread; the first and the last host are on one core, the "
        f"others on another) and the link of host {SLOW_LINK} carries "
        f"{LIMITS[SLOW_LINK]:g} Mbit/s. A step has {MICROBATCHES} microbatches of "
        f"{ROWS_EACH} rows of the one-layer character transformer. Steps per second "
        f"are medians of turns of {STEPS} steps without probes, all shares in turns: "
        f"{TRIALS} turns of all candidates and with the slowed host, and {REPETITIONS} "
        f"of `even`, `proportional`, `exact` and the {FEW} fastest candidates (again), "
        "of which the fastest is the `optimum`: the best of many noisy figures alone "
        "is too good. `by cores` are the shares that the quotas suggest, `near` those "
        "that should be best among those one microbatch from `exact`. Everything else "
        "on this machine (the network between the hosts included) used "
        f"{figures['others']:.2f} of its cores meanwhile.",
        f"exact: {figures['exact_over_optimum']:.3f} of the best's time (target 1.06), "
        f"{figures['rounds']} rounds (target 7), {figures['speed_up_over_even']:.2f} "
        f"times as fast as equal shares; {figures['recompilations']} programs compiled "
        "after the start (target 0), over all hosts and phases.",
        f"In mid-run host {SLOWED} went from {CORES[SLOWED]:g} to {SLOWED_TO:g} of a "
        f"core: shares changed last in round {slow['last_change']} after that and were "
        f"{ended} after {slow['rounds']} (target 10), "
        f"{slow['speed_up_over_before']:.2f} times as fast as with the old ones.",
    )


def _figure(
    searches: dict[str, list[dict[str, Any]]], *, slowed_after: int
) -> "Figure":
    """Waits and shares of every round, of both policies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5))
    panels = figure.subplots(2, 2, sharex="col")
    for column, (policy, rounds) in enumerate(searches.items()):
        upper, lower = panels[0][column], panels[1][column]
        numbers = [it["round"] for it in rounds]
        for host, share in enumerate(CORES):
            label = f"host {host}, {share:g} of a core"
            waits = [it["waits_ms"][host] for it in rounds]
            upper.plot(numbers, waits, "o-", ms=3, label=label)
            lower.step(numbers, [it["shares"][host] for it in rounds], where="mid")
        upper.set(title=policy, ylabel="wait for the slowest [ms]")
        lower.set(xlabel="round", ylabel=f"microbatches of {MICROBATCHES}")
    for panel, text in (
        (panels[0][0], f"host {SLOWED} slows down"),
        (panels[1][0], ""),
    ):
        panel.axvline(slowed_after + 0.5, color="grey", ls=":", label=text or None)
    panels[0][0].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
