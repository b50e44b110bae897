"""Has a hanging process write its stacks to its log, or writes why there are none.

A trainer that has called `accept_requests` writes the Python stacks of all its threads
on SIGUSR1, even if its interpreter hangs. A process that cannot run (stopped, or in
uninterruptible sleep) cannot write stacks; instead its state from /proc is written to
its log. The same is written for a process that does not catch SIGUSR1: it gets no
signal, because it could die of it. Linux only.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGUSR1
DEADLINE_S = 1.0
_POLL_S = 0.01
_SETTLED_S = 0.05
"""Seconds without growth of the log after which the dump counts as complete."""
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "is in uninterruptible sleep",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended and is not reaped",
    "X": "has ended",
    "I": "is idle",
}
_CANNOT_RUN = "DTtZX"


def accept_requests() -> None:
    """Makes this process write the stacks of all its threads to stderr on SIGUSR1."""
    faulthandler.register(SIGNAL, all_threads=True, chain=False)


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State and processor time of a process, from /proc."""

    state: str
    """State letter in /proc/PID/stat; T is stopped, D is uninterruptible sleep."""
    cpu_s: float
    """Processor time of all its threads in seconds."""


def process_state(pid: int) -> ProcessState | None:
    """Reads /proc/PID/stat, which never blocks; returns None if there is no process."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    if fields is None:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return ProcessState(state=fields[0], cpu_s=ticks / os.sysconf("SC_CLK_TCK"))


def dump_stack(pid: int, log_path: Path, deadline_s: float = DEADLINE_S) -> str:
    """Makes a process write its stacks to its log, or writes to the log why it cannot.

    Blocks for at most `deadline_s`, even if the log's disk hangs, so call it on a
    separate thread.

    Args:
        pid: id of the process, which must be a child of the caller.
        log_path: the file to which the process's stderr goes.
        deadline_s: deadline in seconds.

    Returns:
        One line for people: where the stacks are, or why there are none.
    """
    found: list[str] = []
    end = time.monotonic() + deadline_s
    work = threading.Thread(
        target=lambda: found.append(_dump(pid, log_path, end)), daemon=True
    )
    work.start()
    work.join(deadline_s)
    return found[0] if found else f"{log_path} could not be written in {deadline_s:g} s"


def _dump(pid: int, log_path: Path, end: float) -> str:
    now = process_state(pid)
    if now is None:
        return f"process {pid} has ended"
    if now.state in _CANNOT_RUN:
        return _write_state(pid, log_path, "cannot run")
    if not _catches(pid):
        return _write_state(pid, log_path, "writes no stacks: it catches no SIGUSR1")
    before = _size(log_path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)
    if _grown(log_path, before, end - _SETTLED_S):
        return f"the stacks of process {pid} are in {log_path}"
    return _write_state(pid, log_path, "wrote no stacks in time")


def _grown(log_path: Path, before: int, end: float) -> bool:
    """Waits until the log has grown and has stopped growing, at most until `end`.

    Returns whether the log has grown. `before` is the earlier size of the log in bytes,
    and `end` a time of `time.monotonic`.
    """
    size, still_since = before, time.monotonic()
    while (now := time.monotonic()) < end:
        if (newer := _size(log_path)) != size:
            size, still_since = newer, now
        elif size != before and now - still_since >= _SETTLED_S:
            return True
        time.sleep(_POLL_S)
    return size != before


def _write_state(pid: int, log_path: Path, why: str) -> str:
    """Appends the state of every thread to the log; returns a summary line.

    `why` continues the words "process PID", such as "cannot run": the reason for which
    there are no stacks.
    """
    threads = _threads(pid)
    now = process_state(pid)
    state = now.state if now is not None else "X"
    head = f"process {pid} {why}: it {_STATES.get(state, 'is')} (state {state})"
    lines = [f"{head}; its threads, with where they wait in the kernel:", *threads]
    try:
        with open(log_path, "a") as log:
            log.write("\n".join(lines) + "\n")
    except OSError as error:
        return f"{head}; {log_path} cannot be written: {error.strerror}"
    return f"{head}; more in {log_path}"


def _threads(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task")
    try:
        numbers = sorted(int(name) for name in os.listdir(tasks))
    except OSError:
        return []
    lines: list[str] = []
    for number in numbers:
        fields = _stat(tasks / str(number) / "stat")
        name = _text(tasks / str(number) / "comm").strip()
        where = _text(tasks / str(number) / "wchan").strip("0\n") or "?"
        if fields is not None:
            lines.append(f"  {number} {name}: state {fields[0]}, {where}")
    return lines


def _stat(path: Path) -> list[str] | None:
    """Returns the fields of a stat file after the process name; None if unreadable.

    The process name may contain spaces and brackets.
    """
    text = _text(path)
    return text.rpartition(")")[2].split() if text else None


def _catches(pid: int) -> bool:
    for line in _text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
