"""What a drill found: the faulted run beside the undisturbed one, as record and text.

Reads what the runs wrote and what the strikes saw: are the final states equal as bytes,
was every sample used exactly once, what did each recovery cost. Must not run anything.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.checkpoint.storage import storage_steps
from dtft.elastic.faults import STORE_AWAY_S, Strike, Striker
from dtft.elastic.leader import read_events
from dtft.train import interruption_check, shares_check
from dtft.train.experiment import Experiment
from dtft.train.resize_check import compare_losses, resize_lines, resizes

Events = Sequence[dict[str, Any]]


def judge(
    control: Path,
    faulted: Path,
    striker: Striker,
    experiment: Experiment,
    *,
    ended_in_time: bool = True,
    left_behind: Sequence[str] = (),
) -> dict[str, Any]:
    """The drill's record: every promise checked, every cost listed.

    Args:
        control: directory of the undisturbed run.
        faulted: directory of the run that was struck.
        striker: who struck it; has ended.
        experiment: what both ran.
        ended_in_time: whether the struck run ended before the drill's deadline.
        left_behind: what it left on the machine.
    """
    events = read_events(faulted)
    ended = [event for event in events if event["event"] == "end"]
    step = max(storage_steps(faulted / "checkpoints"), default=0)
    differing = _differing(control, faulted, step)
    recoveries = _recoveries(events, striker.strikes)
    record: dict[str, Any] = {
        "config": experiment.name,
        "final_step": step,
        "bit_identical": differing == [],
        "differing_leaves": differing,
        "samples_exactly_once": samples_exactly_once(
            faulted, control, step, experiment.data.global_batch, events
        ),
        "steps_lost": max((entry["steps_lost"] for entry in recoveries), default=0),
        "bytes_from_storage": sum(r["bytes_from_storage"] for r in recoveries),
        "recoveries": recoveries,
        "faults": [_strike(strike, events) for strike in striker.strikes],
        "fault_error": striker.error,
        "faults_not_over": striker.not_over,
        "storage_interval": experiment.checkpoint.storage_interval,
        "status": ended[-1]["status"] if ended else "none",
        "message": ended[-1].get("message", "") if ended else "",
        "expected_status": expected_status(striker.strikes),
        "ended_in_time": ended_in_time,
        "left_behind": list(left_behind),
        "agents": interruption_check.agents(faulted, striker.strikes),
        "resized": resizes(control, events),
        "shares": shares_check.attempts(faulted),
        **{k: v for k, v in _summary(faulted).items() if k.startswith("test_")},
    }
    if record["resized"] or record["shares"]:
        segments = surviving_segments(events, step)
        record["loss_curve"] = compare_losses(control, faulted, segments)
    record["ok"] = bool(striker.done) and _is_good(record)
    return record


def _is_good(record: dict[str, Any]) -> bool:
    """Whether a run in which every fault was played kept all promises."""
    same_state = record["bit_identical"]
    if record["resized"] or record["shares"]:
        exact = all(it["bit_exact"] for it in record["resized"])
        exact &= all(it["replayed"] for it in record["shares"])
        same_state = exact and record["loss_curve"]["within_tolerance"]
    return bool(
        same_state
        and record["samples_exactly_once"]
        and not record["fault_error"]
        and record["status"] == record["expected_status"]
        and record["ended_in_time"]
        and not record["left_behind"]
    )


def expected_status(strikes: Sequence[Strike]) -> str:
    """How the job must end: a step that fails every time ends it with an error."""
    return "error" if any(strike.fault.always for strike in strikes) else "done"


def _differing(control: Path, faulted: Path, step: int) -> list[str]:

    from dtft.checkpoint.storage import compare_steps

    if step and step not in storage_steps(control / "checkpoints"):
        return _differing_roots(control, faulted, step)
    if not step:
        return [f"no final step in common (faulted run ended at {step})"]
    return compare_steps(control / "checkpoints", step, faulted / "checkpoints", step)


def _differing_roots(control: Path, faulted: Path, step: int) -> list[str]:
    """As `_differing`, by digests: the undisturbed run only committed this step."""
    roots = [
        {it["step"]: it["root"] for it in read_events(run) if it["event"] == "commit"}
        for run in (control, faulted)
    ]
    if step not in roots[0] or step not in roots[1]:
        return [f"no final step in common (faulted run ended at {step})"]
    same = roots[0][step] == roots[1][step]
    return [] if same else [f"digest over all leaves of step {step}"]


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
    entry |= interruption_check.fault_fields(strike)
    if strike.fault.kind == "kill-store":
        entry |= _outage(strike, events)
    return entry


def _outage(strike: Strike, events: Events) -> dict[str, int]:
    """What went on while the store was away, and that commits did after it."""
    back = strike.at + STORE_AWAY_S
    commits = [event["time"] for event in events if event["event"] == "commit"]
    return {
        "steps_during_outage": strike.steps_seen[1] - strike.steps_seen[0],
        "commits_during_outage": sum(strike.at + 0.1 < at < back for at in commits),
        "commits_after_outage": sum(at >= back for at in commits),
    }


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


def say(record: dict[str, Any]) -> None:
    """Prints a record for people."""
    for entry in record["faults"]:
        if "steps_during_outage" in entry:
            print(
                f"dtft: store away for {STORE_AWAY_S:.0f} s: "
                f"{entry['steps_during_outage']} steps meanwhile, "
                f"{entry['commits_after_outage']} commits after it"
            )
    for entry in record["recoveries"]:
        print(_recovery_line(entry))
    if record.get("message"):
        print(f"dtft: error: {record['message']}")
    lasting = interruption_check.lines(record)
    for line in [*lasting, *resize_lines(record), *shares_check.lines(record)]:
        print(line)
    tests = [f"{k} {v:.4f}" for k, v in record.items() if k.startswith("test_")]
    once = "every sample once" if record["samples_exactly_once"] else "SAMPLES WRONG"
    print(
        f"dtft: final parameters and optimizer state at step {record['final_step']} "
        f"{_likeness(record)}; {once}; {', '.join(tests)}"
    )
    if not record["ok"]:
        reason = record["fault_error"] or record["differing_leaves"]
        if early := record.get("faults_not_over"):
            reason = reason or f"the job ended before {', '.join(early)}"
        late = "" if record.get("ended_in_time", True) else "not ended in time, "
        print(f"dtft: the drill FAILED: {late}{record['status']} {reason}")


def _likeness(record: dict[str, Any]) -> str:
    """How the final state compares with the undisturbed run's."""
    if record["bit_identical"]:
        return "are equal bit for bit to the undisturbed run's"
    if record.get("loss_curve", {}).get("within_tolerance"):
        why = "another number of hosts adds" if record["resized"] else "shares add"
        return (
            "are those of the undisturbed run up to rounding, by their losses: "
            f"{why} in another order"
        )
    return "are DIFFERENT from the undisturbed run's"


def _recovery_line(entry: dict[str, Any]) -> str:
    return (
        f"dtft: recovery: rung {entry['rung']}, step {entry['restored_step']} "
        f"restored, {entry['steps_lost']} steps lost, detected in "
        f"{entry['detect_s']:.2f} s, training again after "
        f"{entry['total_s']:.2f} s, "
        f"{entry['bytes_from_peers']} bytes from peers' memory, "
        f"{entry['bytes_from_storage']} from storage"
    )
