"""`dtft soak`: many drills with random faults, and how often the job recovers.

Each episode is a drill with a schedule of faults that is drawn from a seed
(`fault_schedule`). All episodes are compared with one undisturbed run. The file of
--json is written after every episode. If the same command is run again, it continues
after the last episode in this file.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dtft.config import Experiment
from dtft.drills.compare import ended_at_expected_step, is_good
from dtft.drills.drill import DEADLINE_S
from dtft.drills.fault_schedule import STEADY, SoakedJob, kinds_of, schedule
from dtft.drills.options import for_clusters, handed_on
from dtft.elastic.faults import (
    OF_DIRECTORIES,
    check_mounts,
    check_namespaces,
    small_memory,
)
from dtft.elastic.processes import run_to_end
from dtft.train import only_run_in

if TYPE_CHECKING:
    from dtft.cli import SoakCommand

CLOSING_S = 120.0
"""Seconds that a drill may take beyond the time limits of its two runs."""
MEMORY_MIB = 512
"""Size in MiB of the memory file system that all hosts of an episode share."""
_MARK = ".soak"
"""Name of the folder in the run directory that a soak locks. The drill of each episode
locks the run directory itself."""
_TRACEBACK = "Traceback (most recent call last)"
_INTENDED = "drill: fail at step"
"""Text in every traceback that a fault of kind `fail` causes."""

_UNRECORDED = {
    "min_replicas": None,
    "host_flags": [],
    "deadline": 180.0,
    "rejoin": 3.0,
}
"""Settings that files of soaks before 2026-11-27 lack, with the values that those soaks
had. Their files also lack `kinds`, which is then not compared."""

Episode = dict[str, Any]
"""Record of one episode; see `judged_episode`."""


def run_soak(options: "SoakCommand", words: list[str]) -> int:
    """Runs the episodes (one drill each); prints a line for each, and then the totals.

    Args:
        options: CONFIG, number of episodes, seed, and settings of the cluster.
        words: overrides of config keys, as typed on the command line.

    Returns:
        0 if all drills passed their checks and no log has an unexpected traceback,
        else 1.

    Raises:
        ValueError: wrong input, another soak uses the run directory, the file of --json
            is of another soak, or etcd does not start.
        FileNotFoundError: there is no etcd executable.
        SystemExit: CONFIG or a key of it is wrong, or the undisturbed run did not end
            in time.
    """
    experiment, _ = for_clusters(options, words, "dtft soak")
    job = soaked_job(experiment, options.spares, options.replicas)
    if job.sizes:
        words = [*words, "--log.every", "1"]  # the losses of all steps are compared
    root = Path(experiment.log.run_dir or "runs/soak").resolve()
    what = {
        "config": options.config,
        "overrides": words,
        "hosts": job.slots,
        "spares": job.spares,
        "replicas": list(job.sizes),
        "seed": options.seed,
        "kinds": list(job.kinds),
        "min_replicas": options.run_flags.min_replicas,
        "host_flags": handed_on(options.host),
        "deadline": options.deadline,
        "rejoin": options.rejoin,
    }
    file = Path(options.json) if options.json else root / "soak.json"
    with only_run_in(root, mark=_MARK):
        episodes = former_episodes(file, what)
        if episodes:
            print(f"dtft: {len(episodes)} episodes are in {file} already", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        with _memory(root, job) as memory:
            for number in range(len(episodes), options.episodes):
                episode = _episode(options, [*words, *memory], job, number, root)
                episodes.append(episode)
                _write(file, what | sums(episodes) | {"records": episodes})
    for line in lines(sums(episodes)):
        print(line)
    return 0 if all(episode["passed"] for episode in episodes) else 1


def soaked_job(experiment: Experiment, spares: int, sizes: Sequence[int]) -> SoakedJob:
    """Returns the properties of a job on which its random faults depend.

    The properties are the numbers of slots, spares and steps, the sizes to which the
    job may be scaled, and the kinds of faults that may be drawn. Cuts are left out if
    this process cannot make network namespaces, and full or read-only directories if it
    cannot mount file systems.

    Args:
        experiment: the experiment.
        spares: number of spare hosts.
        sizes: numbers of replicas that a fault `scale` may request; empty: no `scale`
            is drawn.
    """
    left_out = [*OF_DIRECTORIES] * (not _can(check_mounts))
    left_out += ["cut"] * (not _can(check_namespaces))
    return SoakedJob(
        slots=experiment.cluster.hosts,
        spares=spares,
        steps=experiment.stop.steps,
        sizes=tuple(sizes),
        kinds=tuple(kind for kind in STEADY if kind not in left_out),
    )


def _can(check: Callable[[], None]) -> bool:
    try:
        check()
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _memory(root: Path, job: SoakedJob) -> Iterator[list[str]]:
    """Mounts a small memory file system that the fault `full-memory` can fill.

    Yields the flags that make a run use it; [] if the job has no such fault. Unmounts
    the file system at the end.
    """
    if "full-memory" not in job.kinds:
        yield []
        return
    with small_memory(root / "memory", MEMORY_MIB) as directory:
        yield ["--checkpoint.arena_directory", str(directory)]


def _episode(
    options: "SoakCommand", words: list[str], job: SoakedJob, number: int, root: Path
) -> Episode:
    """Runs episode `number`: a drill in a new process; returns and prints its result.

    The faults are drawn from the seed `options.seed` + `number`. If the episode failed,
    the files of its faulted run are kept in `episode-NUMBER` in the directory `root`.

    Args:
        options: CONFIG, seed, and settings of the cluster.
        words: overrides of config keys, as typed on the command line.
        job: the properties of the job on which the faults depend.
        number: the episode's number, from 0.
        root: directory of the soak's files.
    """
    seed = options.seed + number
    faults = schedule(seed, job)
    begun = time.monotonic()
    file, log = root / "drill.json", root / "drill.log"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "dtft.cli", "drill", options.config, *words]
    command += [*options.run_flags.keys(), *handed_on(options.host)]
    command += ["--run-dir", str(root), "--control", str(root / "control")]
    command += ["--spares", str(options.spares), "--rejoin", str(options.rejoin)]
    command += ["--deadline", str(options.deadline), "--seed", str(seed)]
    command += ["--json", str(file)]
    command += [word for fault in faults for word in ("--fault", fault)]
    with open(log, "wb") as out:
        limit_s = options.deadline + DEADLINE_S + CLOSING_S
        run_to_end(command, limit_s, out)
    faulted = root / "faulted"
    if file.exists():
        record = json.loads(file.read_text())
        traced = tracebacks(faulted / "logs", faults)
        episode = judged_episode(number, seed, faults, record, traced)
    else:
        text = log.read_text(errors="replace").strip()
        why = f"the drill failed: {text[-1000:]}"
        episode = failed_episode(number, seed, faults, why)
    episode["seconds"] = round(time.monotonic() - begun, 1)
    if not episode["passed"]:
        kept = root / f"episode-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        if faulted.exists():
            faulted.rename(kept)
        for path in (file, log):
            if path.exists() and kept.exists():
                shutil.copy(path, kept)
        episode["kept"] = str(kept)
    print(line_of(episode), flush=True)
    return episode


def failed_episode(number: int, seed: int, faults: Sequence[str], why: str) -> Episode:
    """Makes the record of an episode (one drill) that ended without a record.

    The record has the same fields as that of any other episode; its field `passed` is
    False.

    Args:
        number: the episode's number, from 0.
        seed: seed of its faults.
        faults: the faults.
        why: the reason for which the drill failed.
    """
    return {
        "number": number,
        "seed": seed,
        "faults": list(faults),
        "passed": False,
        "why": [why],
        "hung": False,
        "wrong": False,
        "expects_bits": False,
        "bit_identical": False,
        "not_over": [],
        "recoveries": [],
    }


def judged_episode(
    number: int,
    seed: int,
    faults: Sequence[str],
    record: dict[str, Any],
    traced: Sequence[str],
) -> Episode:
    """Makes the record of an episode from the record of its drill.

    Args:
        number: the episode's number, from 0.
        seed: seed of its faults.
        faults: the faults.
        record: the record of the drill.
        traced: names of logs with an unexpected traceback.

    Returns:
        The record. `passed`: whether the faulted run passes all checks of the drill
        (`is_good`) and no log has an unexpected traceback. Faults that had not happened
        or were not undone when the job ended do not matter; `not_over` lists them.
        `why`: failed checks in words.
        `expects_bits`: whether the final state must equal that of the undisturbed run
        bit for bit. `wrong`: True in two cases. The job trained on with another state
        or other shares than those of the restored commit. Or the job ended normally,
        but its final state (or its losses), its last step or its use of the samples is
        not that of the undisturbed run. `hung`: whether the job did not end before the
        deadline.
    """
    expects_bits = not (record["resized"] or record["shares"])
    curve = record.get("loss_curve", {"within_tolerance": False})
    same = record["bit_identical"] if expects_bits else curve["within_tolerance"]
    hung = not record["ended_in_time"]
    finished = record["status"] == "done" and not hung
    is_whole = ended_at_expected_step(record)
    others = {
        "a restored state that is not the committed one": not all(
            change["bit_exact"] for change in record["resized"]
        ),
        "a restart with other shares than committed": not all(
            restart["replayed"] for restart in record["shares"]
        ),
    }
    whys = {
        "hung": hung,
        f"status {record['status']} {record['message']}".strip(): not finished,
        "another final state": finished and not same,
        f"ended at step {record['final_step']}, not {record['expected_step']}": (
            finished and not is_whole
        ),
        "wrong samples": finished and not record["samples_exactly_once"],
        **others,
        f"fault: {record['fault_error']}": bool(record["fault_error"]),
        f"left behind: {record['left_behind']}": bool(record["left_behind"]),
        f"traceback in {', '.join(traced)}": bool(traced),
    }
    why = [text for text, holds in whys.items() if holds]
    return {
        "number": number,
        "seed": seed,
        "faults": list(faults),
        "passed": is_good(record) and not traced,
        "why": why,
        "hung": hung,
        "wrong": any(others.values())
        or (finished and not (same and is_whole and record["samples_exactly_once"])),
        "expects_bits": expects_bits,
        "bit_identical": record["bit_identical"],
        "not_over": record["faults_not_over"],
        "recoveries": [
            {
                name: recovery[name]
                for name in (
                    *("rung", "cause", "gap_s", "phases_s", "steps_lost", "survivors"),
                    *("survivors_restarted", "restarted_because"),
                )
            }
            for recovery in record["recoveries"]
        ],
    }


def tracebacks(logs: Path, faults: Sequence[str]) -> list[str]:
    """Lists the log files in `logs` that have an unexpected traceback.

    Two kinds of tracebacks are expected: that of the exception which a fault `fail`
    raises and, if a fault makes storage full or read-only, those in logs of exporters
    (processes that write to storage). `faults` are in the notation of `dtft drill`.
    """
    of_storage = any(kind.endswith("-storage") for kind in kinds_of(faults))
    found = []
    for path in sorted(logs.glob("*.log")):
        if of_storage and path.name.endswith(".exporter.log"):
            continue
        parts = path.read_text(errors="replace").split(_TRACEBACK)[1:]
        if any(_INTENDED not in part for part in parts):
            found.append(path.name)
    return found


def sums(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Counts the episodes, their results and their recoveries.

    Returns:
        Numbers of episodes. `episodes`: all episodes. `passed`, `hangs`, `wrong`:
        episodes whose field `passed`, `hung` or `wrong` is True (`judged_episode`).
        `bit_identical_expected`: episodes whose final state must equal that of the
        undisturbed run bit for bit. `bit_identical`: those of them in which it does.

        Over all episodes: `recoveries`: the number of recoveries. `steps_lost`: the sum
        of the steps that they lost. `rungs`: maps each rung (how far a recovery had to
        go, 0 to 3) to its number of recoveries. `gaps_s`: maps each rung to (median,
        largest) of the seconds from the last commit before a recovery to the first
        commit after it.
    """
    recoveries = [one for episode in episodes for one in episode["recoveries"]]
    gaps: dict[int, list[float]] = {}
    for one in recoveries:
        if one["gap_s"] is not None:
            gaps.setdefault(one["rung"], []).append(one["gap_s"])
    expected = [episode for episode in episodes if episode["expects_bits"]]
    return {
        "episodes": len(episodes),
        "passed": sum(episode["passed"] for episode in episodes),
        "bit_identical": sum(episode["bit_identical"] for episode in expected),
        "bit_identical_expected": len(expected),
        "hangs": sum(episode["hung"] for episode in episodes),
        "wrong": sum(episode["wrong"] for episode in episodes),
        "recoveries": len(recoveries),
        "rungs": dict(sorted(Counter(one["rung"] for one in recoveries).items())),
        "gaps_s": {
            rung: (round(median(found), 3), max(found))
            for rung, found in sorted(gaps.items())
        },
        "steps_lost": sum(one["steps_lost"] for one in recoveries),
    }


def line_of(episode: Episode) -> str:
    """Formats an episode as a line: faults, recoveries' rungs, "passed" or errors."""
    verdict = "passed" if episode["passed"] else f"FAILED: {'; '.join(episode['why'])}"
    rungs = ", ".join(str(one["rung"]) for one in episode["recoveries"]) or "none"
    return (
        f"dtft: episode {episode['number']} (seed {episode['seed']}): "
        f"{' '.join(episode['faults'])}: rungs {rungs}, "
        f"{episode['seconds']:.0f} s, {verdict}"
    )


def lines(found: dict[str, Any]) -> list[str]:
    """Formats the totals of a soak: a line about episodes, and one about recoveries."""
    gaps = [
        f"rung {rung}: {found['rungs'][rung]} with a gap of {middle:.2f} s, at most "
        f"{largest:.2f} s"
        for rung, (middle, largest) in found["gaps_s"].items()
    ]
    return [
        f"dtft: {found['passed']} of {found['episodes']} episodes passed, "
        f"{found['bit_identical']} of {found['bit_identical_expected']} equal bit for "
        f"bit, {found['hangs']} hung, {found['wrong']} wrong",
        f"dtft: {found['recoveries']} recoveries, {found['steps_lost']} steps lost"
        + "".join(f"; {text}" for text in gaps),
    ]


def former_episodes(file: Path, what: dict[str, Any]) -> list[Episode]:
    """Reads the episodes of an earlier, interrupted run of the same soak from `file`.

    `what` maps the name of each setting of the soak to its value; the file must have
    the same values. Soaks before 2026-11-27 did not write all settings: a missing one
    counts as having the value that it had then (`_UNRECORDED`). Returns [] if the file
    does not exist.

    Raises:
        ValueError: the file is of another soak, or cannot be parsed.
    """
    if not file.exists():
        return []
    try:
        former = _UNRECORDED | json.loads(file.read_text())
        former.setdefault("kinds", what.get("kinds"))
        other = {key: former[key] for key in what if former[key] != what[key]}
        episodes = former["records"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--json {file} holds no soak ({error}). Remove it."
        ) from error
    if other:
        raise ValueError(
            f"--json {file} is of another soak: {other} there. Allowed: a file of the "
            "same command. Give another file, or remove this one."
        )
    return episodes


def _write(file: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file atomically: writes a new file and renames it."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, file)
