"""`dtft bench`: the memory tier's cost, as wall time per step with the tier off and on.

The memory tier keeps copies of the state in the hosts' memory. The benchmark runs one
job repeatedly on a local cluster, alternately with the tier off and on, so noise of the
machine affects both. A pair is one run with the tier off and the next run, with the
tier on. Prints the median step time with the tier off, that with the tier on, and the
slowdown: the ratio of the two step times of a pair (on to off), as the median over the
pairs. Runs with the tier on take a snapshot at the config's interval. Periodic writes
to storage are off in all runs. Also prints for how long a snapshot blocks training, and
the processor time of an agent per commit.
"""

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.replication import Automatic
from dtft.config import Experiment
from dtft.drills.options import cluster_options, for_clusters
from dtft.elastic.local_cluster import LocalCluster
from dtft.elastic.stack_dump import process_state

if TYPE_CHECKING:
    from dtft.cli import BenchCommand


DEADLINE_S = 600.0
WARM_UP = 0.25
"""Share of the commits that is left out of the agents' processor time: trainers still
compile then, and agents start."""
SAMPLE_S = 0.1


def run_bench(options: "BenchCommand", words: list[str]) -> int:
    """Runs the benchmark and prints its figures; returns the exit code 0.

    Args:
        options: CONFIG, number of rounds, and a file for the figures.
        words: overrides of config keys, as typed on the command line.

    Raises:
        ValueError: wrong input, or etcd does not start.
        FileNotFoundError: there is no etcd executable.
        SystemExit: CONFIG or a key of it is wrong; or a run ended without a result, was
            too short to be timed, or did not end within 600 s (`DEADLINE_S`).
    """
    experiment, overrides = for_clusters(options, words, "dtft bench")
    steps = experiment.stop.steps
    runs = {
        "off": [options.config, *overrides, *tier_off(steps)],
        "on": [options.config, *overrides, "--checkpoint.storage_interval", "0"],
    }
    seen = measure_tier(experiment, runs, options.rounds)
    figures = summarize(seen) | {"config": experiment.name, "steps": steps}
    figures |= {"hosts": experiment.cluster.hosts, "cores": os.cpu_count()}
    print(json.dumps(figures, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def tier_off(steps: int) -> list[str]:
    """Returns the config overrides that turn the memory tier off.

    They set the snapshot interval to `steps`, the number of steps of the run, so only
    the last step is copied to the hosts' memory. They also turn periodic writes to
    storage off. They must follow all other overrides, because the last value of a key
    counts.
    """
    allowed = ["--checkpoint.stall_budget", str(Automatic.budget)]
    allowed += ["--checkpoint.max_interval", str(Automatic.maximum)]
    interval = ["--checkpoint.interval", str(steps)]
    return [*interval, *allowed, "--checkpoint.storage_interval", "0"]


def measure_tier(
    experiment: Experiment, runs: Mapping[str, Sequence[str]], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Runs variants of one experiment alternately; prints each run's step time.

    Args:
        experiment: the experiment; its name, cluster and checkpoint settings are used.
        runs: maps the name of each variant to CONFIG and overrides, in the order in
            which the variants are run.
        rounds: number of runs of each variant.

    Returns:
        Maps the name of each variant to the parsed summary.json of its runs, in order.
        A run that was long enough to measure them also has `agents_cpu_s`, the result
        of `cpu_per_commit`: host to its agent's processor seconds per commit.

    Raises:
        ValueError: etcd does not start.
        FileNotFoundError: there is no etcd executable.
        SystemExit: a run ended without a result, was too short to be timed, or did not
            end within 600 s (`DEADLINE_S`).
    """
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, arguments in runs.items():
            seen[name].append(_one(experiment, list(arguments)))
            step_ms = seen[name][-1]["step_s"] * 1e3
            print(
                f"round {number + 1}: memory tier {name}: {step_ms:.2f} ms per step",
                flush=True,
            )
    return seen


def summarize(seen: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Summarizes the runs: medians of the step time, the stall and the slowdown.

    `seen` maps "off" to the summaries (parsed summary.json) of the runs without the
    memory tier, and "on" to those of the runs with it; the n-th runs of both lists are
    a pair.

    Returns:
        `step_s_off`, `step_s_on`: median seconds per step without and with the memory
        tier. `ratios`: for each pair, the step time with the tier divided by the step
        time without the tier. `ratio`: the median of `ratios`. `stall_s`: median
        seconds for which a snapshot blocks training. `agent_cpu_s`: processor seconds
        of an agent per commit, as the median over all agents of all runs with the tier.
        `leader_cpu_s`: processor seconds per commit of the agent that used most in its
        run, as the median over the runs with the tier. Both are missing if no run was
        long enough to measure them.
        `snapshots`: number of snapshots in the first run with the tier. `interval`:
        steps between snapshots at the end of the last run with the tier.

    >>> figures = summarize({"off": [{"step_s": 1.0}], "on": [
    ...     {"step_s": 1.5, "stall_s": 0.25, "snapshots": 9, "interval": 1}]})
    >>> figures["ratio"], figures["stall_s"]
    (1.5, 0.25)
    """
    off = [run["step_s"] for run in seen["off"]]
    on = [run["step_s"] for run in seen["on"]]
    return {
        "step_s_off": median(off),
        "step_s_on": median(on),
        "ratio": median(b / a for a, b in zip(off, on, strict=True)),
        "ratios": [b / a for a, b in zip(off, on, strict=True)],
        "stall_s": median(run["stall_s"] for run in seen["on"]),
        **_agents([run["agents_cpu_s"] for run in seen["on"] if "agents_cpu_s" in run]),
        "snapshots": seen["on"][0]["snapshots"],
        "interval": seen["on"][-1]["interval"],
    }


def _agents(runs: list[dict[str, float]]) -> dict[str, float]:
    if not runs:
        return {}
    return {
        "agent_cpu_s": median(cpu_s for run in runs for cpu_s in run.values()),
        "leader_cpu_s": median(max(run.values()) for run in runs),
    }


Sample = tuple[float, dict[str, float]]
"""Wall-clock time in seconds, and host to its agent's processor time in seconds."""


def cpu_per_commit(
    samples: Sequence[Sample], commits_at: Sequence[float]
) -> dict[str, float]:
    """Computes the processor seconds of each agent per commit of the job.

    Args:
        samples: measurements in order of time: a wall-clock time in seconds, and a map
            from host to the processor seconds that its agent has used until then.
        commits_at: wall-clock times of the job's commits in seconds, in order. The
            first quarter of the commits is left out (`WARM_UP`).

    Returns:
        Maps host to seconds per commit: the processor seconds between the first and the
        last used sample, divided by the number of commits between them. A sample is
        used if it has every host that any sample has, and was taken between the first
        commit that counts and the last commit. {} with fewer than 20 commits, with
        fewer than two used samples, or without a commit between them.

    In the example there is a commit every second, and the first 10 are left out. The
    agent uses 2 s of processor time for the 20 commits from second 11 to 30.

    >>> samples = [(0.0, {"a": 1.0}), (10.0, {"a": 2.0}), (30.0, {"a": 4.0})]
    >>> cpu_per_commit(samples, [float(n) for n in range(40)])
    {'a': 0.1}
    """
    if len(commits_at) < 20:
        return {}
    begin, end = commits_at[int(WARM_UP * len(commits_at))], commits_at[-1]
    hosts = {host for _, found in samples for host in found}
    inside = [it for it in samples if begin <= it[0] <= end and it[1].keys() == hosts]
    if len(inside) < 2:
        return {}
    (since, before), (until, after) = inside[0], inside[-1]
    commits = sum(since < at <= until for at in commits_at)
    if not commits:
        return {}
    return {host: (after[host] - before[host]) / commits for host in sorted(hosts)}


def _sample(
    cluster: LocalCluster, samples: list[Sample], ended: threading.Event
) -> None:
    while not ended.wait(SAMPLE_S):
        found: dict[str, float] = {}
        for host, agent in list(cluster.agents.items()):
            if (state := process_state(agent.pid)) is not None:
                found[host] = state.cpu_s
        samples.append((time.time(), found))


def _one(experiment: Experiment, arguments: list[str]) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="dtft-bench-"))
    arguments = [*arguments, "--log.run_dir", str(directory)]
    arguments += ["--log.tensorboard", "False"]
    cluster = LocalCluster(cluster_options(experiment, arguments, 0, directory))
    samples, ended = list[Sample](), threading.Event()
    sampler = threading.Thread(target=_sample, args=(cluster, samples, ended))
    sampler.start()
    try:
        cluster.start()
        if not cluster.wait(DEADLINE_S):
            raise SystemExit(f"dtft: error: a run did not end in {DEADLINE_S:.0f} s")
        summary = directory / "summary.json"
        if not summary.exists():
            ends = [it for it in cluster.events() if it["event"] == "end"]
            why = ends[-1].get("message", "") if ends else "its hosts did not start"
            raise SystemExit(f"dtft: error: a run ended without a result: {why}")
        found = json.loads(summary.read_text())
        if "step_s" not in found:
            raise SystemExit(
                "dtft: error: a run was too short to be timed: it ended at step "
                f"{found['step']}, and its first steps do not count. Set --stop.steps "
                "to 100 or more."
            )
        commits = [it["time"] for it in cluster.events() if it["event"] == "commit"]
        if per_commit := cpu_per_commit(samples, commits):
            found["agents_cpu_s"] = per_commit
        return found
    finally:
        ended.set()
        sampler.join(timeout=10)
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)
