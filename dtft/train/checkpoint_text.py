"""What `dtft checkpoint` found, as plain values and as lines for people.

Decides wording only. Pure: must not know directories, hosts or how things are found.
"""

import time
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.replication import CommitHealth
from dtft.checkpoint.tables import size_text, table

if TYPE_CHECKING:
    from dtft.elastic.inspect_job import JobState

Record = dict[str, Any]


def storage_lines(record: Record) -> list[str]:
    """The steps of a storage directory, for people."""
    rows = [
        (it["step"], size_text(it["num_bytes"]), _when(it["written"]))
        for it in record["steps"]
        if not it["problem"]
    ]
    many = "1 checkpoint" if len(rows) == 1 else f"{len(rows)} checkpoints"
    lines = [f"storage {record['directory']}: {many}"]
    if rows:
        lines += table(("step", "size", "written"), rows)
    else:
        lines.append(
            "a storage directory has a directory for each step; a run directory has it "
            "in `checkpoints`"
        )
    lines += [
        f"step {it['step']}, not offered here: {it['problem']}"
        for it in record["steps"]
        if it["problem"]
    ]
    lines += [f"unfinished, not offered: {name}" for name in record["unfinished"]]
    return lines


def job_record(state: "JobState") -> Record:
    """A job as plain values."""
    assignment = state.view.assignment
    return {
        "job": state.job,
        "store": state.store,
        "leader": state.view.leader,
        "result": state.view.result,
        "generation": assignment.generation if assignment else 0,
        "attempt": assignment.attempt if assignment else 0,
        "slots": list(assignment.slots) if assignment else [],
        "storage_directory": state.storage_directory,
        "copies_asked": state.copies[0],
        "effective_copies": state.copies[1],
        "copies_problem": state.copies[2],
        "commits": [_commit_record(it, state) for it in state.commits],
        "hosts": [
            {
                "host": host.record.host,
                "domain": host.record.domain,
                "address": host.record.address,
                "pid": host.record.pid,
                "slot": host.slot,
                "arena_bytes": host.arena_bytes,
                "steps": sorted(host.held),
                "corrupt": list(host.corrupt),
                "unread": list(host.unread),
                "error": host.error,
            }
            for host in state.hosts
        ],
    }


def _commit_record(commit: CommitHealth, state: "JobState") -> Record:
    names = [host.record.host for host in state.hosts]
    return {
        "step": commit.step,
        "generation": commit.generation,
        "interval": commit.interval,
        "health": commit.state,
        "problem": commit.problem,
        "copies_wanted": commit.wanted,
        "copies": list(commit.copies),
        "slices": len(commit.slices),
        "num_bytes": commit.num_bytes,
        "slices_on": {name: commit.slices_on(name) for name in names},
    }


def job_lines(record: Record) -> list[str]:
    """A job for people: commits, hosts, storage."""
    lines = [
        f"job {record['job']}: generation {record['generation']}, attempt "
        f"{record['attempt']}, leader {record['leader'] or 'none'}"
    ]
    if not record["hosts"]:
        lines.append("no host of it is alive, so nothing is in memory")
    if record["result"]:
        lines.append(f"it has ended: {record['result']}")
    lines += [record["copies_problem"]] if record["copies_problem"] else []
    lines += _commit_lines(record["commits"]) + _host_lines(record)
    if record.get("storage"):
        lines += storage_lines(record["storage"])
    elif record["storage_directory"]:
        lines.append(f"storage {record['storage_directory']} is not seen from here")
    return lines


def _commit_lines(commits: list[Record]) -> list[str]:
    """The commits in memory, newest first."""
    if not commits:
        return ["nothing is committed yet"]
    rows = [
        (
            it["step"],
            size_text(it["num_bytes"]),
            it["slices"],
            "{}-{} of {}".format(*it["copies"], it["copies_wanted"]),
            it["health"],
        )
        for it in commits
    ]
    lines = table(("step", "size", "slices", "copies", "health"), rows)
    lines.append(f"snapshot interval in force: {commits[0]['interval']}")
    return lines + [
        f"step {it['step']}: {it['problem']}" for it in commits if it["problem"]
    ]


def _host_lines(record: Record) -> list[str]:
    """The hosts, with what each holds of the newest commit."""
    newest = record["commits"][0]["slices_on"] if record["commits"] else {}
    rows = [
        (
            host["host"],
            host["slot"] if host["slot"] >= 0 else "-",
            newest.get(host["host"], 0),
            ", ".join(map(str, host["steps"])) or "-",
            size_text(host["arena_bytes"]),
            host["error"] or ("CORRUPT" if host["corrupt"] else "answers"),
        )
        for host in record["hosts"]
    ]
    columns = ("host", "slot", "slices", "steps", "arena", "state")
    return list(table(columns, rows)) if rows else []


def verify_lines(record: Record) -> tuple[list[str], bool]:
    """What a job's copies came to when they were read, and whether all is well."""
    hosts, commits = record["hosts"], record["commits"]
    unread = {step for host in hosts for step in host["unread"]}
    lines = [
        f"corrupt copy: {host['host']} {text}"
        for host in hosts
        for text in host["corrupt"]
    ]
    lines += [f"no answer: {host['host']}" for host in hosts if host["error"]]
    well = not lines
    for it in commits:
        copies = f"{it['slices']} slices, {it['copies'][0]} good copies or more of each"
        late = " (dropped before all was read)" if it["step"] in unread else ""
        lines.append(
            f"step {it['step']}: {it['health']}, {it['problem'] or copies}{late}"
        )
    read = [it for it in commits if it["step"] not in unread]
    well = well and bool(read)  # nothing that was read is nothing verified
    well = well and all(it["health"] == "healthy" for it in read)
    return lines or ["nothing is committed yet"], well


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
