"""`dtft drill`: an undisturbed run and a faulted run with one seed, compared.

Runs both on local clusters, lets `elastic.strikes` play the faults, and judges: are the
final states equal as bytes, was every sample used exactly once, what did each recovery
cost. Must not take part in the recovery itself.
"""

import json
import logging
import os
import shlex
import shutil
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.elastic.faults import Fault, parse_fault
from dtft.elastic.journal import read_events, storage_steps
from dtft.elastic.launch import ClusterOptions, LocalCluster
from dtft.elastic.strikes import Strike, Striker
from dtft.train import config as configs
from dtft.train.experiment import Experiment
from dtft.train.resize_check import compare_losses, resize_lines, resizes

DEADLINE_S = 600.0

Events = Sequence[dict[str, Any]]


def drill(experiment: Experiment, options: Namespace, overrides: list[str]) -> int:
    """Runs the drill; 0 if the faulted run is as good as the undisturbed one.

    Raises:
        ValueError: a fault cannot be read.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    hosts = experiment.cluster.hosts
    if any(text.startswith("scale:") for text in options.fault):
        hosts += options.spares  # the job may grow over them
    faults = [parse_fault(t, hosts) for t in options.fault]
    for fault in faults:
        if fault.step >= experiment.stop.steps:
            raise ValueError(
                f"--fault {fault}: the run ends at step {experiment.stop.steps}. Give "
                "an earlier step, or raise --stop.steps."
            )
    root = Path(experiment.log.run_dir or f"runs/drill-{time.strftime('%H%M%S')}")
    root = root.resolve()
    arguments = [options.config, *overrides, "--log.sample_ids", "True"]
    arguments += ["--log.tensorboard", "False"]
    if experiment.cluster.min_replicas or any(it.kind == "scale" for it in faults):
        arguments += ["--log.every", "1"]  # the losses of all steps are compared
    control = Path(options.control).resolve() if options.control else root / "control"
    if not _usable(control, experiment):
        print(f"dtft: undisturbed run in {control}", flush=True)
        _fresh(control)
        _run(experiment, arguments, control, 0, [], options)
    faulted = root / "faulted"
    print(
        f"dtft: faulted run in {faulted}: {', '.join(map(str, faults)) or 'no fault'}",
        flush=True,
    )
    _fresh(faulted)
    striker = _run(experiment, arguments, faulted, options.spares, faults, options)
    record = judge(control, faulted, striker, experiment)
    _say(record)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")
    return 0 if record["ok"] else 1


def _usable(control: Path, experiment: Experiment) -> bool:
    """Whether a finished control run has the same result by construction."""
    saved = control / "config.json"
    if not (control / "summary.json").exists() or not saved.exists():
        return False
    return _decisive(saved.read_text()) == _decisive(configs.to_json(experiment))


def _decisive(resolved: str) -> dict[str, Any]:
    """The part of a config that decides the final state."""
    free = ("log", "timeouts", "checkpoint")
    return {k: v for k, v in json.loads(resolved).items() if k not in free}


def _fresh(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _run(
    experiment: Experiment,
    arguments: Sequence[str],
    directory: Path,
    spares: int,
    faults: Sequence[Fault],
    options: Namespace,
) -> Striker:
    from dtft.train.commands import cluster_options

    settings: ClusterOptions = cluster_options(
        experiment,
        [*arguments, "--log.run_dir", str(directory)],
        spares,
        directory,
    )
    cache = os.environ.get(
        "DTFT_COMPILATION_CACHE", str(directory.parent / "xla-cache")
    )
    settings.environment["DTFT_COMPILATION_CACHE"] = cache
    command = ["dtft", "launch", *settings.agent_arguments]
    settings.environment["DTFT_RESUME_COMMAND"] = shlex.join(command)
    cluster = LocalCluster(settings)
    striker = Striker(cluster, faults, seed=options.seed, rejoin_s=options.rejoin)
    try:
        cluster.start()
        striker.start()
        ended = cluster.wait(DEADLINE_S)
    finally:
        striker.stop()
        cluster.close()
    if not ended:
        raise SystemExit(f"dtft: error: {directory} did not end in {DEADLINE_S:.0f} s")
    return striker


# --------------------------------------------------------------------- judging


def judge(
    control: Path, faulted: Path, striker: Striker, experiment: Experiment
) -> dict[str, Any]:
    """The drill's record: every promise checked, every cost listed."""
    events = read_events(faulted)
    ended = [event for event in events if event["event"] == "end"]
    step = max(storage_steps(faulted / "checkpoints"), default=0)
    differing = _differing(control, faulted, step)
    samples = samples_exactly_once(
        faulted, control, step, experiment.data.global_batch, events
    )
    recoveries = _recoveries(events, striker.strikes)
    summary = _summary(faulted)
    record: dict[str, Any] = {
        "config": experiment.name,
        "final_step": step,
        "bit_identical": differing == [],
        "differing_leaves": differing,
        "samples_exactly_once": samples,
        "steps_lost": max((entry["steps_lost"] for entry in recoveries), default=0),
        "bytes_from_storage": sum(r["bytes_from_storage"] for r in recoveries),
        "recoveries": recoveries,
        "faults": [_strike(strike, events) for strike in striker.strikes],
        "fault_error": striker.error,
        "storage_interval": experiment.checkpoint.storage_interval,
        "status": ended[-1]["status"] if ended else "none",
        "resized": resizes(control, events),
        **{k: v for k, v in summary.items() if k.startswith("test_")},
    }
    same_state = record["bit_identical"]
    if record["resized"]:
        segments = surviving_segments(events, step)
        record["loss_curve"] = compare_losses(control, faulted, segments)
        exact = all(it["bit_exact"] for it in record["resized"])
        same_state = exact and record["loss_curve"]["within_tolerance"]
    record["ok"] = bool(
        same_state
        and samples
        and striker.done
        and not striker.error
        and record["status"] == "done"
    )
    return record


def _differing(control: Path, faulted: Path, step: int) -> list[str]:
    from dtft.checkpoint.compare import compare

    if not step or step not in storage_steps(control / "checkpoints"):
        return [f"no final step in common (faulted run ended at {step})"]
    return compare(control / "checkpoints", step, faulted / "checkpoints", step)


def _summary(directory: Path) -> dict[str, Any]:
    path = directory / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _recoveries(events: Events, strikes: Sequence[Strike]) -> list[dict[str, Any]]:
    """Every recovery, its times counted from the blow, which only the drill knows."""
    found, previous = [], 0.0
    for event in events:
        if event["event"] != "recovery":
            continue
        entry = {k: v for k, v in event.items() if k not in ("time", "event", "by")}
        entry["cause"] = entry["fault"]
        blows = [blow for blow in strikes if previous < blow.at <= event["ended"]]
        if blows:
            entry["fault"] = ", ".join(str(blow.fault) for blow in blows)
            entry["detect_s"] = round(event["detected"] - blows[0].at, 4)
            entry["total_s"] = round(event["ended"] - blows[0].at, 4)
            finished = max(event["last_finished_step"], blows[0].finished)
            entry["last_finished_step"] = finished
            entry["steps_lost"] = max(0, finished - event["restored_step"])
        entry |= _replicated(entry, events)
        previous = event["ended"]
        found.append(entry)
    return found


def _replicated(recovery: dict[str, Any], events: Events) -> dict[str, Any]:
    """When every slice had its copies again after a recovery, and what was pushed."""
    epoch = recovery["generation"], recovery["attempt"]
    for event in events:
        if event["event"] == "replicated":
            if (event["generation"], event["attempt"]) == epoch:
                return {
                    "replicated_s": round(event["seconds"], 4),
                    "bytes_re_replicated": event["num_bytes"],
                    "healthy": event["healthy"],
                }
    return {"replicated_s": None, "bytes_re_replicated": 0, "healthy": None}


def _strike(strike: Strike, events: Events) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "fault": str(strike.fault),
        "hosts": list(strike.hosts),
        "at": strike.at,
        "finished": strike.finished,
        "committed": strike.committed,
    }
    if strike.reply:
        entry["reply"] = strike.reply
    if strike.corrupted_bytes:
        entry["corrupted_bytes"] = strike.corrupted_bytes
    if strike.fault.kind == "kill-store":
        back = strike.at + 5.0
        entry["steps_during_outage"] = strike.steps_seen[1] - strike.steps_seen[0]
        entry["commits_during_outage"] = sum(
            e["event"] == "commit" and strike.at + 0.1 < e["time"] < back
            for e in events
        )
        entry["commits_after_outage"] = sum(
            e["event"] == "commit" and e["time"] >= back for e in events
        )
    return entry


def surviving_segments(
    events: Events, last: int
) -> list[tuple[tuple[int, int], int, int]]:
    """Which steps of which attempt survive: (epoch, after step, up to step).

    >>> one = {"event": "assignment", "generation": 1, "attempt": 1, "step": 0}
    >>> two = {"event": "assignment", "generation": 2, "attempt": 1, "step": 7}
    >>> surviving_segments([one, two], last=9)
    [((1, 1), 0, 7), ((2, 1), 7, 9)]
    """
    starts: list[tuple[tuple[int, int], int]] = []
    for event in events:
        if event["event"] != "assignment":
            continue
        starts = [start for start in starts if start[1] < event["step"]]
        starts.append(((event["generation"], event["attempt"]), event["step"]))
    ends = [step for _, step in starts[1:]] + [last]
    return [
        (epoch, begin, end) for (epoch, begin), end in zip(starts, ends, strict=True)
    ]


def samples_exactly_once(
    faulted: Path, control: Path, last: int, batch: int, events: Events
) -> bool:
    """Whether the surviving history used each global row once, and the right sample."""
    used = _samples(faulted)
    expected_ids = {
        row: sample for rows in _samples(control).values() for row, sample in rows
    }
    history: list[tuple[int, int]] = []
    for epoch, begin, end in surviving_segments(events, last):
        for step in range(begin + 1, end + 1):
            history += used.get((*epoch, step), [])
    rows = sorted(row for row, _ in history)
    return rows == list(range(last * batch)) and all(
        expected_ids.get(row) == sample for row, sample in history
    )


def _samples(directory: Path) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """(generation, attempt, step) -> (global row, sample id) over all slots."""
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for path in sorted((directory / "samples").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # torn by the kill; its step did not survive
            key = (entry["generation"], entry["attempt"], entry["step"])
            found.setdefault(key, []).extend(
                zip(entry["rows"], entry["ids"], strict=True)
            )
    return found


def _say(record: dict[str, Any]) -> None:
    for entry in record["faults"]:
        if "steps_during_outage" in entry:
            print(
                f"dtft: store away for 5 s: {entry['steps_during_outage']} steps "
                f"meanwhile, {entry['commits_after_outage']} commits after it"
            )
    for entry in record["recoveries"]:
        print(
            f"dtft: recovery: rung {entry['rung']}, step {entry['restored_step']} "
            f"restored, {entry['steps_lost']} steps lost, detected in "
            f"{entry['detect_s']:.2f} s, training again after "
            f"{entry['total_s']:.2f} s, "
            f"{entry['bytes_from_peers']} bytes from peers' memory, "
            f"{entry['bytes_from_storage']} from storage"
        )
    tests = [f"{k} {v:.4f}" for k, v in record.items() if k.startswith("test_")]
    for line in resize_lines(record):
        print(line)
    different = "not those of" if record["resized"] else "DIFFERENT from"
    equal = "equal bit for bit to" if record["bit_identical"] else different
    once = "every sample once" if record["samples_exactly_once"] else "SAMPLES WRONG"
    print(
        f"dtft: final parameters and optimizer state at step {record['final_step']} "
        f"are {equal} the undisturbed run's; {once}; {', '.join(tests)}"
    )
    if not record["ok"]:
        reason = record["fault_error"] or record["differing_leaves"]
        print(f"dtft: the drill FAILED: {record['status']} {reason}")
