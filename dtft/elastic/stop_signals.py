"""Stop signals of a job, and the messages printed while the job stops.

The first signal asks the job to stop at a step boundary, the second prints the reason
for the wait, the third ends the job after an attempt to export its newest step, and the
fourth ends it without that export. SIGHUP counts only as the first signal, because a
closing terminal sends SIGHUP several times.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SIGNALS: tuple[signal.Signals, ...] = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)
ECHO_S = 0.3
"""Signals closer than this many seconds count as one, because a shell and a wrapper may
both send a signal for one Ctrl-C."""


def heard_signals() -> tuple[signal.Signals, ...]:
    """Returns the stop signals, without SIGHUP if this process ignores it (nohup)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return tuple(it for it in SIGNALS if it != signal.SIGHUP)
    return SIGNALS


def presses(signals: Sequence[tuple[float, int]]) -> int:
    """Counts the separate stop requests among the signals.

    A signal less than 0.3 s after the signal before it does not count (`ECHO_S`). A
    SIGHUP counts only as the first signal.

    Args:
        signals: (time in seconds, number) of each signal, in order of arrival.

    >>> interrupt, hang_up = int(signal.SIGINT), int(signal.SIGHUP)
    >>> presses([(0.0, hang_up), (5.0, hang_up)])
    1
    >>> presses([(0.0, interrupt), (0.01, interrupt), (2.0, interrupt)])
    2
    """
    count, last = 0, float("-inf")
    for at, number in signals:
        if at - last >= ECHO_S and not (count and number == signal.SIGHUP):
            count += 1
        last = at
    return count


@dataclass(frozen=True, kw_only=True)
class StopProgress:
    """How far a job is and what it lacks, as the process that runs its cluster sees it.

    This process reads it on its own machine, without a call to the store or the leader.
    """

    finished: Mapping[str, int] = field(default_factory=dict)
    """Maps each host with a slot to the last step that its trainer has finished."""
    computing: int = 0
    """The newest dispatched step; 0 for none."""
    committed: int = 0
    """The newest commit in memory; 0 for none."""
    recorded: int = 0
    """The newest commit in the event log; 0 for none."""
    stored: int = 0
    """The newest step in storage; 0 for none."""
    exporting: int = 0
    """The step that is being written to storage; 0 for none."""
    reforming: bool = False
    """Whether the job is being formed: hosts get slots, trainers start and restore."""
    reason: str = ""
    """Why the job was last formed; "" if unknown."""
    missing: tuple[int, ...] = ()
    """Slots without a host, if the job waits for hosts; else ()."""
    store_serves: bool = True
    asked: bool = True
    """Whether the stop request is recorded in the store."""


def waits_for(progress: StopProgress) -> str:
    """Describes what the job waits for before it can stop.

    The first of these that applies is described: the store, if it does not answer or
    has not recorded the request to stop; an export in progress; a host for an empty
    slot; the forming of the job; the beginning of the last export; the start of the
    trainers; the trainers, which must reach a step boundary. For the trainers the text
    has the last finished step of each host.

    The last export is awaited once the newest step that any trainer has dispatched is
    finished on a host and committed. In the first example step 12 is finished but not
    committed; in the second, step 10 is dispatched but not finished.
    >>> waits_for(StopProgress(finished={"host-0": 12, "host-1": 11}, committed=11))
    'host-0 (step 12), host-1 (step 11) to reach a step boundary'
    >>> waits_for(StopProgress(finished={"host-0": 9}, committed=9, computing=10))
    'host-0 (step 9) to reach a step boundary'
    >>> waits_for(StopProgress(finished={"host-0": 9}, committed=9, computing=9))
    'the export of step 9 to begin'
    >>> waits_for(StopProgress(committed=9, exporting=9))
    'the export of step 9'
    """
    newest = max(progress.finished.values(), default=0)
    if not progress.store_serves or not progress.asked:
        return "the store (etcd), which has not recorded the request to stop yet"
    if progress.exporting:
        return f"the export of step {progress.exporting}"
    if progress.missing:
        slots = ", ".join(map(str, progress.missing))
        return f"a host for slot {slots}"
    if progress.reforming:
        return f"the job to be formed anew ({progress.reason or 'its start'})"
    if progress.committed == newest >= max(progress.computing, 1):
        return f"the export of step {progress.committed} to begin"
    names = [f"{host} (step {step})" for host, step in progress.finished.items()]
    if not names:
        return "the trainers to start"
    return f"{', '.join(names)} to reach a step boundary"


def second_line(progress: StopProgress, left_s: float) -> str:
    """Makes the line that a second Ctrl-C prints: what the job waits for.

    Args:
        progress: the job's progress.
        left_s: seconds until the job is ended by force.
    """
    return (
        f"stopping; waiting for {waits_for(progress)}. {_safe(progress)} The job is "
        f"ended by force in {max(left_s, 0):.0f} s. Ctrl-C once more ends it now, "
        "after an attempt to export its newest step"
    )


def _safe(progress: StopProgress) -> str:
    stored = f"Storage has step {progress.stored}" if progress.stored else "No step is"
    stored += "" if progress.stored else " in storage"
    if progress.committed > progress.stored:
        return f"{stored}, memory has step {progress.committed}."
    return f"{stored}."


def end_line(status: str, step: int, stored: int, where: str) -> str:
    """Makes the line for the end of a job.

    The line has the status and the last step. If storage lacks this step, it has the
    steps that storage lacks instead of the status.

    Args:
        status: how the job ended: "done" or "stopped".
        step: its last step; 0 if none was committed.
        stored: the newest step in storage; 0 for none.
        where: the storage directory.
    >>> end_line("done", 100, 100, "run/checkpoints")
    'done at step 100, which is in run/checkpoints'
    >>> end_line("done", 100, 1, "run/checkpoints")
    'steps 2 to 100 are lost: run/checkpoints lacks the last step, 100'
    """
    if lost := lost_steps(step, stored):
        return f"{lost}: {where} lacks the last step, {step}"
    return f"{status} at step {step}, which is in {where}" if step else status


def left_line(host: str, job: str, committed: int, stored: int) -> str:
    """Makes the line for a host that leaves a job before the job's end.

    `committed` is the newest commit, `stored` the newest step in storage.

    >>> left_line("a", "j", committed=9, stored=9)
    'a left job j before its end; storage has step 9'
    """
    line = f"{host} left job {job} before its end; storage has step {stored}"
    if committed <= stored:
        return line
    return (
        f"{line}, and steps {stored + 1} to {committed} are in the memory of the hosts "
        "that are left; they are lost with the last one. To keep them, run `dtft "
        "checkpoint export` or stop the job before its hosts leave"
    )


def lost_steps(newest: int, stored: int) -> str:
    """Describes the steps up to `newest` that storage lacks; "" for none.

    `stored` is the newest step in storage.

    >>> lost_steps(100, 1), lost_steps(5, 4), lost_steps(4, 4)
    ('steps 2 to 100 are lost', 'step 5 is lost', '')
    """
    if newest <= stored:
        return ""
    if newest == stored + 1:
        return f"step {newest} is lost"
    return f"steps {stored + 1} to {newest} are lost"
