"""`dtft checkpoint ls|show|verify|export`, on a storage directory or on a live job.

Each command makes a record, a dict of values that JSON can hold. It prints the record
with `--json`, otherwise text lines made from the record.
"""

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtft.checkpoint.replication import CommitHealth
from dtft.checkpoint.storage import (
    checkpoints_in,
    copy_step,
    describe_step,
    list_steps,
    pick_step,
    verify_step,
)
from dtft.checkpoint.tables import size_text, table

if TYPE_CHECKING:
    from dtft.cli.commands import CheckpointFlags, JobFlags
    from dtft.elastic.inspect_job import JobState, Observer


Record = dict[str, Any]

PROGRESS_S = 5.0
"""Least seconds between two progress lines that `dtft checkpoint verify` prints for a
live job."""


def storage_lines(record: Record) -> list[str]:
    """Formats the record of a storage directory as lines: its steps and problems.

    A step is in the table with its size and time of writing, or in a line of its own
    with the reason why it cannot be restored.
    """
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
    """Converts the state of a live job into a dict of values that JSON can hold.

    It has the job's assignment, its commits (newest first), its storage directory, and
    for each host the steps that it holds and the bytes of its arena.
    """
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
    """Formats the record of a job as lines: commits in memory, hosts, stored steps."""
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
    """Formats the commits (complete snapshots in the hosts' memory) as a table."""
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
    """Formats the hosts as a table.

    The column "slices" counts those slices of the newest commit that have a copy on the
    host.
    """
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


def verify_record(state: "JobState") -> Record:
    """Converts the state of a live job after a verification into a record.

    The record has the keys of `job_record`'s. Each host in it also has `copies_read`
    (how many copies the host has read), `bytes_read` (how many bytes they have), and
    `seconds`, the time that reading took.
    """
    record = job_record(state)
    for told, host in zip(record["hosts"], state.hosts, strict=True):
        told["copies_read"] = host.copies_read
        told["bytes_read"] = host.bytes_read
        told["seconds"] = host.seconds
    return record


def verify_lines(record: Record) -> tuple[list[str], bool]:
    """Formats a verification as lines; also returns whether it succeeded.

    A verification succeeded if there is a commit, some bytes were read, no copy is
    corrupt, all hosts answered, and every commit is healthy. A commit is healthy if
    each slice has copies in as many failure domains as when it was committed
    (`copies_wanted`). The health of a commit is ignored if a host dropped copies of the
    commit before it had read these copies.

    Args:
        record: the result of `verify_record`.
    """
    hosts, commits = record["hosts"], record["commits"]
    unread = {step for host in hosts for step in host["unread"]}
    rows = [
        (
            host["host"],
            host["copies_read"],
            size_text(host["bytes_read"]),
            f"{host['seconds']:.1f}",
            "-" if host["error"] else len(host["corrupt"]),
        )
        for host in hosts
    ]
    lines = list(table(("host", "copies", "read", "seconds", "corrupt"), rows))
    problems = [
        f"corrupt copy: {host['host']} {text}"
        for host in hosts
        for text in host["corrupt"]
    ]
    problems += [
        f"no answer: {host['host']}: {host['error']}" for host in hosts if host["error"]
    ]
    lines, well = lines * bool(rows) + problems, not problems
    for it in commits:
        copies = f"{it['slices']} slices, {it['copies'][0]} good copies or more of each"
        late = " (dropped before all was read)" if it["step"] in unread else ""
        lines.append(
            f"step {it['step']}: {it['health']}, {it['problem'] or copies}{late}"
        )
    read = [it for it in commits if it["step"] not in unread]
    well = well and all(it["health"] == "healthy" for it in read)
    # Steps may be dropped before they are read; the bytes read must be right.
    well = well and bool(commits) and any(host["bytes_read"] for host in hosts)
    return lines if commits else [*lines, "nothing is committed yet"], well


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


Printed = tuple[Record, list[str], int]
"""Result of a command: the record for --json, the text lines, and the exit code."""


def ls(source: "CheckpointFlags") -> int:
    """Runs `dtft checkpoint ls`: prints the steps; returns the exit code 0.

    Args:
        source: the storage directory or the live job whose steps are printed.

    Raises:
        ValueError: wrong input, etcd cannot be reached or has no such job, or the job
            has another secret.
        FileNotFoundError: the directory does not exist.
    """
    return _answer(source, _ls_directory, _ls_job)


def show(source: "CheckpointFlags", step: int | None) -> int:
    """Runs `dtft checkpoint show`: prints one step; returns the exit code 0.

    Prints the leaves of a stored step, or the slices of a live job's step with the
    hosts that have copies.

    Args:
        source: the directory or the live job.
        step: the step; None: the newest.

    Raises:
        ValueError: wrong input, the job cannot be reached, there is no such step, or
            the stored step is damaged.
        FileNotFoundError: the directory does not exist.
    """
    on_job = partial(_show_job, step=step)
    return _answer(source, partial(_show_directory, step=step), on_job)


def verify(
    source: "CheckpointFlags", step: int | None, rate: int, timeout_s: float
) -> int:
    """Runs `dtft checkpoint verify`: reads all bytes and compares their checksums.

    The checksums are chunk digests for a live job, and fingerprints for a directory.

    Args:
        source: the directory or the live job.
        step: step of the directory; None: all steps. Not allowed for a live job.
        rate: bytes of its copies that each host of a live job may read per second; 0:
            no limit.
        timeout_s: limit in seconds for each host of a live job; with `rate`, the time
            that the host needs at this rate is added.

    Returns:
        The exit code: 0 if all is right, else 1.

    Raises:
        ValueError: wrong input, the job cannot be reached, `rate` is given for a
            directory, `step` is given for a job, or the directory lacks the step.
        FileNotFoundError: the directory does not exist.
    """
    if step is not None and source.job.store:
        raise ValueError(
            f"--step {step} is for DIR: the hosts of a live job read all copies that "
            "they have. Leave --step out, or give DIR instead of --store and --job."
        )
    if rate and source.directory:
        raise ValueError(
            f"--rate {rate} is for the hosts of a live job, but DIR is "
            f"{source.directory}. Leave --rate out, or give --store and --job."
        )
    on_job = partial(_verify_job, rate=rate, timeout_s=timeout_s)
    return _answer(source, partial(_verify_directory, step=step), on_job)


def export(source: "CheckpointFlags", step: int | None, to: str) -> int:
    """Runs `dtft checkpoint export`; returns the exit code 0.

    With a directory, copies a stored step to the directory `to`. With a live job, makes
    the job write its next commit to its storage. A job whose processes the user starts
    (--serve-only) writes its newest commit instead.

    Args:
        source: the directory or the live job.
        step: the stored step; None: the newest. Not allowed for a live job.
        to: the directory to copy to. Not allowed for a live job.

    Raises:
        ValueError: wrong input, the job cannot be reached, `to` is missing for a
            directory, `to` or `step` is given for a job, or the step cannot be copied
            or written.
        FileNotFoundError: the directory does not exist.
    """
    on_directory = partial(_export_directory, step=step, to=to)
    return _answer(source, on_directory, partial(_export_job, step=step, to=to))


def _answer(
    source: "CheckpointFlags",
    on_directory: Callable[[Path], Printed],
    on_job: "Callable[[Observer], Printed]",
) -> int:
    """Runs a command on a directory or a live job; prints the result.

    Args:
        source: the directory or the live job, and whether to print JSON.
        on_directory: runs the command on a storage directory. Returns the record to
            print as JSON, the lines to print as text, and the exit code.
        on_job: does the same on a live job.

    Returns:
        The exit code.

    Raises:
        ValueError: both or neither of directory and job are given, the job cannot be
            reached, or the command fails, for example because the step is damaged.
        FileNotFoundError: the directory does not exist.
    """
    job = source.job
    is_live = bool(job.store or job.name)
    if is_live == bool(source.directory) or (is_live and not (job.name and job.store)):
        raise ValueError(
            "give either DIR (a storage or run directory), or both --store HOST:PORT "
            "and --job NAME (with --secret-file FILE) for a live job."
        )
    if is_live:
        with _observer(job) as observer:
            record, lines, code = on_job(observer)
    else:
        try:
            found = on_directory(_storage_of(Path(source.directory)))
        except RuntimeError as error:  # the step is damaged; the text names the step
            raise ValueError(str(error)) from error
        record, lines, code = found
    print(json.dumps(record, indent=1) if source.json else "\n".join(lines))
    return code


# ------------------------------------------------------------- a storage directory


def _storage_of(directory: Path) -> Path:
    """Finds the storage directory: that of a run directory, or `directory` itself.

    Returns an absolute path. A run's storage directory is the one that its config.json
    names, or else `checkpoints` in the run directory.

    Raises:
        FileNotFoundError: `directory`, or the one that config.json names, does not
            exist.
        ValueError: the directory is that of one step, or of an item in a step.
    """
    from dtft.train import recorded_storage

    named = directory
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        named = recorded_storage(directory)  # if it is a run directory
    is_inside = named.parent == directory.absolute()
    return checkpoints_in(directory if is_inside else named)


def _ls_directory(directory: Path) -> Printed:
    steps, unfinished = list_steps(directory)
    record = {
        "directory": str(directory),
        "steps": [vars(found) for found in steps],
        "unfinished": unfinished,
    }
    return record, storage_lines(record), 0


def _show_directory(directory: Path, *, step: int | None) -> Printed:
    _use_cpu()
    step = pick_step(directory, step)
    leaves, items = describe_step(directory, step)
    record = {
        "directory": str(directory),
        "step": step,
        "leaves": [vars(leaf) for leaf in leaves],
        "items": items,
    }
    total = sum(leaf.num_bytes for leaf in leaves)
    rows = [
        (leaf.path, leaf.dtype, list(leaf.shape), size_text(leaf.num_bytes))
        for leaf in leaves
    ]
    lines = [f"step {step}: {len(leaves)} leaves, {size_text(total)}"]
    lines += table(("leaf", "dtype", "shape", "size"), rows)
    shown = {name: value for name, value in items.items() if name != "config"}
    lines += [f"item {name}: {json.dumps(value)}" for name, value in shown.items()]
    return record, lines, 0


def _verify_directory(directory: Path, *, step: int | None) -> Printed:
    _use_cpu()
    steps = [found.step for found in list_steps(directory)[0]]
    if step in steps:
        steps = [step]  # a torn step is included and reported
    elif step is not None or not steps:
        steps = [pick_step(directory, step)]
    found = verify_step(directory, steps)
    record = {"directory": str(directory), "problems": found}
    lines = [
        f"step {number}: {text or 'every leaf is right'}"
        for number, text in found.items()
    ]
    return record, lines, int(any(found.values()))


def _export_directory(directory: Path, *, step: int | None, to: str) -> Printed:
    if not to:
        raise ValueError("--to DIR is missing: where shall the step be copied to?")
    _use_cpu()
    step = pick_step(directory, step)
    written = copy_step(directory, step, Path(to))
    record = {"step": step, "directory": to, "num_bytes": written}
    return record, [f"step {step} copied to {to} ({size_text(written)})"], 0


# --------------------------------------------------------------------- a live job


def _ls_job(observer: "Observer") -> Printed:
    state = observer.look()
    record = job_record(state)
    directory = Path(state.storage_directory or "/nonexistent")
    record["storage"] = None
    if directory.is_dir():
        record["storage"] = _ls_directory(directory)[0]
    return record, job_lines(record), 0


def _show_job(observer: "Observer", *, step: int | None) -> Printed:
    commit = _chosen(observer.look(), step)
    record = {
        "step": commit.step,
        "health": commit.state,
        "problem": commit.problem,
        "slices": [vars(piece) for piece in commit.slices],
    }
    rows = [
        (
            piece.key,
            size_text(piece.num_bytes),
            piece.copies,
            ", ".join(piece.hosts),
        )
        for piece in commit.slices
    ]
    lines = [f"step {commit.step}: {commit.state} {commit.problem}".rstrip()]
    return record, lines + table(("slice", "size", "copies", "hosts"), rows), 0


def _chosen(state: "JobState", step: int | None) -> CommitHealth:
    found = {commit.step: commit for commit in state.commits}
    if not found:
        raise ValueError(f"job {state.job!r} has committed nothing yet.")
    if step is not None and step not in found:
        known = ", ".join(map(str, found))
        raise ValueError(
            f"--step {step} is not in the memory of job {state.job!r}. It has: {known}."
        )
    return state.commits[0] if step is None else found[step]


def _verify_job(observer: "Observer", *, rate: int, timeout_s: float) -> Printed:
    from dtft.elastic.inspect_job import Verification

    progress = _Progress()
    state = observer.look(
        Verification(rate=rate, timeout_s=timeout_s, progress=progress.told)
    )
    record = verify_record(state)
    lines, well = verify_lines(record)
    return record, lines, int(not well)


class _Progress:
    """Prints how many bytes of their copies the hosts of a job have read.

    Prints at most one line in 5 seconds (`PROGRESS_S`).
    """

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[int, int]] = {}
        self._lock, self._due = threading.Lock(), time.monotonic() + PROGRESS_S

    def told(self, host: str, read: int, total: int) -> None:
        """Records that a host has read `read` of the `total` bytes of its copies.

        Prints one line with the sums over all hosts if 5 seconds (`PROGRESS_S`) have
        passed since the last line, or since the start for the first line.
        """
        with self._lock:
            self._hosts[host] = read, total
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + PROGRESS_S
            sums = [sum(column) for column in zip(*self._hosts.values(), strict=True)]
        done, of = map(size_text, sums)
        print(
            f"{done} of {of} read on {len(self._hosts)} hosts",
            file=sys.stderr,
            flush=True,
        )


def _export_job(observer: "Observer", *, step: int | None, to: str) -> Printed:
    if to or step is not None:
        raise ValueError(
            "--to and --step are for DIR: a live job writes a commit to its own "
            "storage directory. Copy it from there with `dtft checkpoint export "
            "DIR --to DIR`."
        )
    step = observer.export()
    directory = observer.look().storage_directory
    record = {"step": step, "directory": directory}
    return record, [f"step {step} was written to {directory or 'storage'}"], 0


@contextlib.contextmanager
def _observer(job: "JobFlags") -> "Iterator[Observer]":
    from dtft.drills import read_secret, store_address
    from dtft.elastic.inspect_job import Observer
    from dtft.elastic.store import EtcdStore, StoreUnavailable

    address, secret = store_address(job), read_secret(job)
    store = EtcdStore(address)
    try:
        yield Observer(store, job.store, job.name, secret)
    except StoreUnavailable as error:
        raise ValueError(f"--store {job.store}: {error}") from error
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    finally:
        store.close()


def _use_cpu() -> None:
    """Makes JAX use the CPU and allow 64-bit values; hides needless messages.

    The hidden messages are Orbax's log lines below ERROR, and the tracebacks of reads
    that Orbax abandons after another read has failed.
    """
    import jax

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs needless warnings
    sys.unraisablehook = partial(_without_echoes, sys.unraisablehook)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)


def _without_echoes(shown: Callable[[Any], Any], unraisable: Any) -> None:
    """Passes an unraisable exception to `shown`, unless an abandoned read caused it.

    This is a `sys.unraisablehook`; `shown` is the hook that it replaces. When Orbax
    fails to read one array, it abandons the reads of the others. TensorStore then
    prints a traceback for each of these reads, which would hide the real error.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        shown(unraisable)
