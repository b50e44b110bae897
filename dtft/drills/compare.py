"""Compares a drill's faulted run with the undisturbed run; makes and prints a record.

A drill is a run with planned faults. Both runs must normally end at the same step, with
final states of equal bytes, and every sample must be used exactly once.

Two kinds of runs may end with other bytes: those whose mesh changed, and those with
load balancing, which changes the shares (microbatches of each replica). Then the losses
must agree up to rounding, a state restored onto another mesh must equal the committed
state, and a restart with the same number of replicas must begin with the shares that
were in force after the restored step.

The files of the runs are only read.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtft.checkpoint.storage import storage_steps
from dtft.config import CheckpointConfig, Experiment
from dtft.elastic.faults import (
    INTERRUPTIONS,
    STORE_AWAY_S,
    FaultInjector,
    InjectedFault,
)
from dtft.elastic.leader import read_events
from dtft.parallel.load_balancing import BALANCE_FILE

Span = tuple[float, float]
"""Wall-clock times of start and end."""


def fault_fields(strike: InjectedFault) -> dict[str, Any]:
    """Returns a drill record's fields about a fault that lasts; {} for other faults.

    A fault lasts if it is a stop (SIGSTOP) of processes, a cut, a pause of the store,
    or a full or read-only directory (`INTERRUPTIONS`).

    Returns:
        `until`: wall-clock time in seconds at which the fault was undone. `stopped_s`:
        seconds from the fault until then. Both are None if the fault was not undone.
        `killed_after_s`: seconds from the fault until all processes that it suspended
        had ended; missing if some had not, or if it suspended none. `steps_per_s`,
        `steps_per_s_during`: training steps per second before and during a pause of the
        store, None if too few steps were seen; missing for other kinds.
    """
    if strike.fault.kind not in INTERRUPTIONS:
        return {}
    entry: dict[str, Any] = {
        "until": strike.until,
        "stopped_s": None if strike.until is None else strike.until - strike.at,
    }
    if strike.gone_s is not None:
        entry["killed_after_s"] = round(strike.gone_s, 3)
    if strike.fault.kind == "pause-store":
        entry["steps_per_s"] = strike.steps_per_s
        entry["steps_per_s_during"] = strike.steps_per_s_during
    return entry


def agents(
    faulted: Path, injected: Sequence[InjectedFault]
) -> dict[str, dict[str, Any]]:
    """Finds the longest call of each agent's event loop in the faulted run.

    Time in which a fault had suspended the agent does not count. The calls are read
    from the file `loop-HOST.json`, which an agent writes when it ends.

    Args:
        faulted: directory of the run with faults.
        injected: the faults of this run.

    Returns:
        Maps each host to the call's seconds (`longest_call_s`) and its name (`what`). A
        host whose file is missing or unreadable is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(faulted.glob("loop-*.json")):
        with contextlib.suppress(OSError, json.JSONDecodeError, KeyError):
            said = json.loads(path.read_text())
            stops = _stops(said["host"], injected)
            found[said["host"]] = longest_call(said["calls"], stops)
    return found


def _stops(host: str, injected: Sequence[InjectedFault]) -> list[Span]:
    """Lists the time spans in which faults had suspended a host's agent.

    These faults are `stop-agent` and `stop-host`. A span is (begin, end), wall-clock
    times in seconds; the end is infinity if the fault was not undone.
    """
    return [
        (strike.at, strike.until or float("inf"))
        for strike in injected
        if host in strike.hosts and strike.fault.kind in ("stop-agent", "stop-host")
    ]


def longest_call(
    calls: Sequence[dict[str, Any]], stops: Sequence[Span]
) -> dict[str, Any]:
    """Finds the longest call of an event loop; time while suspended does not count.

    Args:
        calls: for each call, its name (`what`, such as "tick"), the `seconds`
            that the call took, and the wall-clock time of its start (`at`).
        stops: spans of wall-clock time, (begin, end), in which the loop's process was
            suspended (SIGSTOP).

    Returns:
        `longest_call_s`, the call's seconds outside of `stops`, and its name as `what`.
        Without calls these are 0 and "".

    In the example the loop was suspended for 10 of the 10.5 s of the call "tick", so
    the call "view" took longest.

    >>> calls = [{"what": "tick", "seconds": 10.5, "at": 100.25},
    ...          {"what": "view", "seconds": 0.75, "at": 90.0}]
    >>> longest_call(calls, [(100.5, 110.5)])
    {'longest_call_s': 0.75, 'what': 'view'}
    """
    found = {"longest_call_s": 0.0, "what": ""}
    for call in calls:
        seconds = float(call["seconds"])
        begun, ended = call["at"], call["at"] + seconds
        for first, last in stops:
            seconds -= max(0.0, min(last, ended) - max(first, begun))
        if seconds > found["longest_call_s"]:
            found = {"longest_call_s": round(seconds, 4), "what": call["what"]}
    return found


def interruption_lines(record: dict[str, Any]) -> list[str]:
    """Formats lines of a drill's record: its lasting faults, and two further checks.

    Each fault that lasts, such as a stop or a cut, has a line. One line has the longest
    event-loop call of all agents. Each leftover of the run on the machine, such as a
    process, has a line. `record` is the drill's record, as `judge` makes it.
    """
    said = []
    for entry in record["faults"]:
        if "stopped_s" not in entry:
            continue
        whom = ", ".join(entry["hosts"]) or _whom(entry["fault"])
        took = entry["stopped_s"]
        lasted = "for ever" if took is None else f"for {took:.1f} s"
        line = f"dtft: {entry['fault']}: {whom} {lasted}"
        if "killed_after_s" in entry:
            line += f", killed by its agent after {entry['killed_after_s']:.1f} s"
        if entry.get("steps_per_s") and entry.get("steps_per_s_during") is not None:
            line += (
                f"; {entry['steps_per_s']:.1f} steps per second before, "
                f"{entry['steps_per_s_during']:.1f} meanwhile"
            )
        said.append(line)
    if record.get("agents"):
        host, worst = max(
            record["agents"].items(), key=lambda item: item[1]["longest_call_s"]
        )
        said.append(
            f"dtft: longest call of an agent's event loop: "
            f"{1e3 * worst['longest_call_s']:.0f} ms ({worst['what']} on {host})"
        )
    return said + [
        f"dtft: LEFT BEHIND: {name}" for name in record.get("left_behind", ())
    ]


# Shares follow measured times, so two runs have different shares and their results are
# equal only up to rounding: their losses are compared (`compare_losses`). The functions
# here compare the shares at the begin of each attempt with the shares that were in
# force at the restored step.

Record = dict[str, Any]


def _whom(fault: str) -> str:
    """Names the target of a fault that hits no host, such as the store.

    `fault` is in the notation of `dtft drill --fault`.

    >>> _whom("full-storage@20:5"), _whom("pause-store@3:2")
    ('storage', 'the store')
    """
    what = fault.partition("@")[0].partition("-")[2]
    return {"store": "the store", "memory": "shared memory"}.get(what, what)


def attempts(directory: Path) -> list[Record]:
    """Lists the attempts of a run with load balancing; [] for a run without it.

    Each start of the trainers begins an attempt.

    Returns:
        For each attempt: `step`: the step that the attempt restored. `shares`: the
        numbers of microbatches per step, one for each replica, when the attempt began.
        `replayed`: whether an earlier attempt had these shares in force after the step
        that was restored; also True for the first attempt, and if the number of
        replicas changed. `unknown`: names of the replicas without measured times when
        the attempt began. `found`: the shares at the end of the attempt.
    """
    path = directory / BALANCE_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    return judged([json.loads(line) for line in lines if line.endswith("}")])


def judged(records: Sequence[Record]) -> list[Record]:
    """Lists a run's attempts (starts of its trainers) from its log of load balancing.

    `records` are the parsed lines of the log, the file `balance.jsonl`. The result has
    the fields that `attempts` describes.

    In the example the first attempt changes its shares after step 4, at the end of a
    round (some steps with the same shares). The second attempt restores step 5 and
    begins with the changed shares, so its field `replayed` is True.

    >>> begin = {"event": "begin", "step": 0, "shares": [2, 2], "unknown": []}
    >>> moved = {"event": "round", "step": 4, "next": [3, 1]}
    >>> again = begin | {"step": 5, "shares": [3, 1]}
    >>> [it["replayed"] for it in judged([begin, moved, again])]
    [True, True]
    """
    found: list[Record] = []
    in_force: list[tuple[int, list[int]]] = []
    for record in records:
        if record["event"] == "round":
            in_force.append((record["step"], record["next"]))
            found[-1]["found"] = record["next"]
            continue
        step, shares = record["step"], record["shares"]
        # Shares that a lost attempt found after the restored step are void.
        in_force = [(at, it) for at, it in in_force if at <= step]
        before = in_force[-1][1] if in_force else shares
        # Another number of replicas has other shares; no commit could have them.
        replayed = before == shares or len(before) != len(shares)
        entry = {"step": step, "shares": shares, "replayed": replayed}
        found.append(entry | {"unknown": record["unknown"], "found": shares})
        in_force.append((step, shares))
    return found


def shares_lines(record: Record) -> list[str]:
    """Formats each restart of a run with load balancing as a line.

    The line has the shares (microbatches of each replica) at the start and at the end
    of the attempt.
    """
    said = []
    for it in record.get("shares", [])[1:]:
        how = "replayed" if it["replayed"] else "NOT those of the commit"
        new = f" ({', '.join(it['unknown'])} new)" if it["unknown"] else ""
        said.append(
            f"dtft: step {it['step']}: shares {_row(it['shares'])} {how}{new}, then "
            f"{_row(it['found'])}"
        )
    return said


def _row(shares: Sequence[int]) -> str:
    return " ".join(map(str, shares))


# A run whose mesh changed cannot end bit for bit like an undisturbed one: another
# number of replicas adds the same numbers in another order. Two things are judged
# instead: the state restored onto each new mesh is the committed one, bit for bit, and
# the losses stay within rounding of the undisturbed run's.

LOSS_TOLERANCE = 1e-4
"""Largest allowed difference of a step's loss, as a fraction of the undisturbed run's
first loss.

float32 sums in another order differ by about 1e-7; training amplifies the difference a
little at every step. A row used twice or left out, or one wrong leaf, causes a
difference of 1e-3 or more."""

Events = Sequence[dict[str, Any]]
Epoch = tuple[int, int]
Segments = Sequence[tuple[Epoch, int, int]]
"""For each attempt, the steps that no later attempt repeats: (epoch, step before the
first, last step). The epoch is (generation, attempt)."""


def resizes(control: Path, events: Events) -> list[dict[str, Any]]:
    """Lists the restores of the faulted run onto another mesh, with digests of states.

    Args:
        control: directory of the undisturbed run.
        events: events of the faulted run.

    Returns:
        For each restore the fields of its event "resized" (such as `step`, the restored
        step, and `leaves`, the number of leaves), and three more. `hosts`: the numbers
        of hosts before and after the change. `control_root`: the digest over the
        undisturbed run's state at the restored step; None if the faulted run had
        changed its number of hosts earlier, too, or if the undisturbed run did not
        commit the step. `bit_exact`: whether the committed state, the restored state
        and, if its digest is known, the undisturbed run's state have equal digests, and
        no restored leaf differs from the commit or between hosts.
    """
    roots = {
        event["step"]: event.get("root")
        for event in read_events(control)
        if event["event"] == "commit"
    }
    found: list[dict[str, Any]] = []
    slots: list[int] = []
    for event in events:
        if event["event"] == "assignment":
            slots.append(len(event["slots"]))
        elif event["event"] == "resized":
            entry = {k: v for k, v in event.items() if k not in ("time", "event", "by")}
            entry["hosts"] = slots[-2:]
            same_mesh = set(slots[:-1]) == {slots[0]}
            entry["control_root"] = roots.get(event["step"]) if same_mesh else None
            known = {entry["committed_root"], entry["restored_root"]}
            known |= {entry["control_root"]} - {None}
            entry["bit_exact"] = len(known) == 1 and not event["differing"]
            found.append(entry)
    return found


def compare_losses(control: Path, faulted: Path, segments: Segments) -> dict[str, Any]:
    """Compares the faulted run's losses with those of the undisturbed run.

    Args:
        control: directory of the undisturbed run.
        faulted: directory of the faulted run.
        segments: the steps to compare, as `surviving_segments` lists them.

    Returns:
        `steps`: the number of steps with a loss in both runs. `missing`: the numbers of
        the other steps. `largest_difference`: the largest difference between the two
        losses of a step, as a fraction of the undisturbed run's first loss; infinite if
        no step has both losses. `at_step`: the number of the step with this difference;
        0 for none. `tolerance`: the largest allowed difference (`LOSS_TOLERANCE`), as
        the same fraction. `within_tolerance`: whether no loss is missing and no
        difference is larger than allowed.
    """
    expected = {step: loss for (_, step), loss in _losses(control).items()}
    found = _losses(faulted)
    scale = abs(expected[min(expected)]) if expected else 1.0
    differences: dict[int, float] = {}
    missing: list[int] = []
    for epoch, begin, end in segments:
        for step in range(begin + 1, end + 1):
            if (epoch, step) in found and step in expected:
                differences[step] = abs(found[epoch, step] - expected[step]) / scale
            else:
                missing.append(step)
    worst = max(differences, key=lambda step: differences[step], default=0)
    largest = differences.get(worst, float("inf"))
    return {
        "steps": len(differences),
        "missing": missing,
        "largest_difference": largest,
        "at_step": worst,
        "tolerance": LOSS_TOLERANCE,
        "within_tolerance": not missing and largest <= LOSS_TOLERANCE,
    }


def _losses(directory: Path) -> dict[tuple[Epoch, int], float]:
    """Maps ((generation, attempt), step) to the loss in a run's metrics.jsonl.

    `attempt` numbers the starts of the trainers with one assignment, from 1. Returns {}
    if there is no such file. Lines that a kill has cut off are left out.
    """
    losses = {}
    path = directory / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a kill; its step did not survive
        epoch = entry["generation"], entry["attempt"]
        losses[epoch, entry["step"]] = float(entry["loss"])
    return losses


def resize_lines(record: dict[str, Any]) -> list[str]:
    """Formats each change of the number of hosts as a line, and the losses as another.

    The line about losses has the largest difference between the losses of the faulted
    and the undisturbed run. There is none if the drill did not compare losses.
    """
    lines = []
    for it in record["resized"]:
        how = "equal bit for bit to" if it["bit_exact"] else "DIFFERENT from"
        lines.append(
            f"dtft: from {it['hosts'][0]} to {it['hosts'][-1]} hosts at step "
            f"{it['step']}: {it['leaves']} leaves on the new mesh are {how} the commit"
        )
    if curve := record.get("loss_curve"):
        right = "within" if curve["within_tolerance"] else "NOT within"
        lines.append(
            f"dtft: losses of {curve['steps']} steps differ by at most "
            f"{curve['largest_difference']:.1e} of the first, {right} "
            f"{curve['tolerance']:.0e}"
        )
    return lines


def judge(
    control: Path,
    faulted: Path,
    injector: FaultInjector,
    experiment: Experiment,
    *,
    ended_in_time: bool = True,
    left_behind: Sequence[str] = (),
) -> dict[str, Any]:
    """Makes the drill's record: the results of all checks, and the recoveries' costs.

    Args:
        control: directory of the undisturbed run.
        faulted: directory of the faulted run.
        injector: the ended injector of the faults.
        experiment: the experiment of both runs.
        ended_in_time: whether the faulted run ended before the drill's deadline.
        left_behind: names of the faulted run's leftovers on the machine.

    Returns:
        The record. `ok`: whether all faults have happened and are over, and the faulted
        run passes all checks (`is_good`). `final_step`: the last step in the faulted
        run's storage. `expected_step`: the step at which the faulted run must end: the
        undisturbed run's last step, or the faulted run's last committed step if a fault
        makes the job end with an error. It is None (any step is right) if the losses
        decide when a run ends (config key `stop.metric`) and the two runs' losses need
        be equal only up to rounding.
    """
    events = read_events(faulted)
    ended = [event for event in events if event["event"] == "end"]
    step = max(storage_steps(_stored(faulted)), default=0)
    differing = _differing(control, faulted, step)
    recoveries = _recoveries(events, injector.injected)
    record: dict[str, Any] = {
        "config": experiment.name,
        "final_step": step,
        "expected_step": None,
        "bit_identical": differing == [],
        "differing_leaves": differing,
        "samples_exactly_once": samples_exactly_once(
            faulted, control, step, experiment.data.global_batch, events
        ),
        "steps_lost": max((entry["steps_lost"] for entry in recoveries), default=0),
        "bytes_from_storage": sum(r["bytes_from_storage"] for r in recoveries),
        "recoveries": recoveries,
        "faults": [_strike(strike, events) for strike in injector.injected],
        "fault_error": injector.error,
        "faults_not_over": injector.not_over,
        "storage_interval": experiment.checkpoint.storage_interval,
        "status": ended[-1]["status"] if ended else "none",
        "message": ended[-1].get("message", "") if ended else "",
        "expected_status": expected_status(injector.injected),
        "ended_in_time": ended_in_time,
        "left_behind": list(left_behind),
        "agents": agents(faulted, injector.injected),
        "resized": resizes(control, events),
        "shares": attempts(faulted),
        **{k: v for k, v in _summary(faulted).items() if k.startswith("test_")},
    }
    by_losses = bool(record["resized"] or record["shares"])
    if by_losses:
        segments = surviving_segments(events, step)
        record["loss_curve"] = compare_losses(control, faulted, segments)
    if record["expected_status"] == "error":
        record["expected_step"] = _committed(events)
    elif not (by_losses and experiment.stop.metric):
        record["expected_step"] = _last_step(control)
    record["ok"] = bool(injector.done) and is_good(record)
    return record


def is_good(record: dict[str, Any]) -> bool:
    """Whether a drill's record passes all checks of the faulted run.

    * The final state equals the undisturbed run's bit for bit. If the mesh or the
      shares changed, instead: the losses agree up to rounding, restored states equal
      the committed ones, and restarts begin with the shares of the restored step.
    * The last step, the use of the samples and the job's final status are as expected.
    * The run ended before its deadline, and left nothing behind on the machine.
    * No fault failed to be injected. Whether all faults have happened is not checked
      here; `judge` does that.
    """
    same_state = record["bit_identical"]
    if record["resized"] or record["shares"]:
        exact = all(it["bit_exact"] for it in record["resized"])
        exact &= all(it["replayed"] for it in record["shares"])
        same_state = exact and record["loss_curve"]["within_tolerance"]
    return bool(
        same_state
        and ended_at_expected_step(record)
        and record["samples_exactly_once"]
        and not record["fault_error"]
        and record["status"] == record["expected_status"]
        and record["ended_in_time"]
        and not record["left_behind"]
    )


def ended_at_expected_step(record: dict[str, Any]) -> bool:
    """Whether the `final_step` of a drill's record equals its `expected_step`.

    Also True if the expected step is None: then the run may end at any step.

    >>> ended_at_expected_step({"final_step": 50, "expected_step": 300})
    False
    """
    return record["expected_step"] in (None, record["final_step"])


def _last_step(run: Path) -> int:
    """Returns the last step of a run that has ended; 0 if it has stored none.

    The step is in the run's summary, or else the newest in its storage.
    """
    found = _summary(run).get("step") or max(storage_steps(_stored(run)), default=0)
    return int(found)


def _committed(events: Events) -> int:
    """Returns the last committed step of a run; 0 without a commit.

    If the run has restored an older step after its last commit, this is the older step.
    """
    kinds = ("commit", "assignment")
    steps = [event["step"] for event in events if event["event"] in kinds]
    return steps[-1] if steps else 0


def expected_status(injected: Sequence[InjectedFault]) -> str:
    """Returns the job's expected final status.

    "error" if a fault makes a step fail at every attempt, else "done".
    """
    return "error" if any(strike.fault.always for strike in injected) else "done"


def _stored(run: Path) -> Path:
    """Returns a run's default storage directory, the only one that drills allow."""
    return CheckpointConfig().storage_path(run)


def _differing(control: Path, faulted: Path, step: int) -> list[str]:

    from dtft.checkpoint.storage import compare_steps

    if step and step not in storage_steps(_stored(control)):
        return _differing_roots(control, faulted, step)
    if not step:
        return [f"no final step in common (faulted run ended at {step})"]
    return compare_steps(_stored(control), step, _stored(faulted), step)


def _differing_roots(control: Path, faulted: Path, step: int) -> list[str]:
    """Compares the state of a step by the digests of its commits in both runs.

    Used if the undisturbed run has not stored the step. Returns [] if the digests are
    equal; otherwise, also if a run has not committed the step, one line of text.
    """
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


def _recoveries(
    events: Events, injected: Sequence[InjectedFault]
) -> list[dict[str, Any]]:
    """Lists the recoveries, with their durations counted from the injected fault.

    The job itself counts the duration of a recovery from the detection of the fault. If
    several faults were injected since the previous recovery, the duration counts from
    the first. If none was, the job's duration is kept.

    Args:
        events: events of the faulted run.
        injected: the faults that were injected into it.
    """
    found, previous = [], 0.0
    for event in events:
        if event["event"] != "recovery":
            continue
        entry = {k: v for k, v in event.items() if k not in ("time", "event", "by")}
        entry["cause"] = entry["fault"]
        entry["gap_s"] = _gap_s(event, events)
        blows = [blow for blow in injected if previous < blow.at <= event["ended"]]
        if blows:
            entry["fault"] = ", ".join(str(blow.fault) for blow in blows)
            entry["detect_s"] = round(event["detected"] - blows[0].at, 4)
            entry["phases_s"] = {"detect": entry["detect_s"], **entry["phases_s"]}
            entry["total_s"] = round(event["ended"] - blows[0].at, 4)
            finished = max(event["last_finished_step"], blows[0].finished)
            entry["last_finished_step"] = finished
            entry["steps_lost"] = max(0, finished - event["restored_step"])
        entry |= _replicated(entry, events)
        previous = event["ended"]
        found.append(entry)
    return found


def _gap_s(recovery: dict[str, Any], events: Events) -> float | None:
    """Computes the seconds between the commits before and after a recovery.

    These are the last commit before the fault was detected and the first commit after
    the end of the recovery. Returns None if one of them is missing.
    """
    times = [event["time"] for event in events if event["event"] == "commit"]
    before = [time for time in times if time <= recovery["detected"]]
    after = [time for time in times if time >= recovery["ended"]]
    return round(min(after) - max(before), 4) if before and after else None


def _replicated(recovery: dict[str, Any], events: Events) -> dict[str, Any]:
    """Finds how long re-replication took after a recovery, and how much was copied.

    After a recovery, hosts copy slices of the state until each slice has enough copies
    again (re-replication).

    Returns:
        `replicated_s`: seconds that the re-replication took. `bytes_re_replicated`: the
        bytes copied. `healthy`: whether each slice then had as many copies as the
        config demands, each in another failure domain. These are None, 0 and None if
        the re-replication did not end.
    """
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


def _strike(strike: InjectedFault, events: Events) -> dict[str, Any]:
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
    entry |= fault_fields(strike)
    if strike.fault.kind == "kill-store":
        entry |= _outage(strike, events)
    return entry


def _outage(strike: InjectedFault, events: Events) -> dict[str, int]:
    """Counts the steps and commits while a killed store was away, and commits after.

    Args:
        strike: the record of a fault `kill-store`.
        events: events of the faulted run.

    Returns:
        `steps_during_outage`: training steps finished during the outage.
        `commits_during_outage` and `commits_after_outage`: numbers of commits.
    """
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
    """Lists for each attempt the steps that no later attempt repeats.

    An attempt is a start of the trainers. A later attempt repeats the steps after the
    one that it restores.

    Args:
        events: events of the run.
        last: the last step of the run.

    Returns:
        For each attempt with such steps: its epoch, the step before the first of them,
        and the last of them. The epoch is (generation, number of the start with this
        assignment, from 1).

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
    """Whether the surviving steps used each row of the run once, with its sample.

    A row is an example of the batch, numbered over all steps. A step survives if no
    later start of the trainers repeats it. A row must have the same sample as in the
    undisturbed run.

    Args:
        faulted: directory of the faulted run.
        control: directory of the undisturbed run.
        last: last step of the faulted run.
        batch: rows per step.
        events: events of the faulted run.
    """
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
    """Reads which samples a run has used, from its logs of all slots.

    Returns a map from (generation, attempt, step) to the pairs (row, sample id) that
    the step has used. Rows are numbered over all steps of the run.
    """
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
    """Prints a drill's record as text."""
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
    lasting = interruption_lines(record)
    for line in [*lasting, *resize_lines(record), *shares_lines(record)]:
        print(line)
    tests = [f"{k} {v:.4f}" for k, v in record.items() if k.startswith("test_")]
    once = "every sample once" if record["samples_exactly_once"] else "SAMPLES WRONG"
    print(
        f"dtft: final parameters and optimizer state at step {record['final_step']} "
        f"{_likeness(record)}; {once}; {', '.join(tests)}"
    )
    if not record["ok"]:
        reason = record["fault_error"] or record["differing_leaves"]
        if not ended_at_expected_step(record):
            reason = reason or (
                f"ended at step {record['final_step']}, not at step "
                f"{record['expected_step']}"
            )
        if early := record.get("faults_not_over"):
            reason = reason or f"the job ended before {', '.join(early)}"
        late = "" if record.get("ended_in_time", True) else "not ended in time, "
        print(f"dtft: the drill FAILED: {late}{record['status']} {reason}")


def _likeness(record: dict[str, Any]) -> str:
    """Returns text that says whether the final state equals the undisturbed run's."""
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
        f"{entry['total_s']:.2f} s, {entry['survivors_restarted']} of "
        f"{entry['survivors']} survivors restarted, "
        f"{entry['bytes_from_peers']} bytes from peers' memory, "
        f"{entry['bytes_from_storage']} from storage"
    )
