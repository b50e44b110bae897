"""Detects hung trainers and finds the host that the other hosts wait for.

A trainer writes its phase and the phase's start time to shared memory (its host's
progress board). The agent reads the board about every second (`ProgressWatch`) and
reports long phases to the leader. One hung trainer blocks all others in the next
collective, so the phases of all trainers exceed a limit. The leader then finds the
hosts for which the others wait (`verdict`). Nothing here reads a clock, the board or a
process: callers pass what they have read.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dtft.checkpoint.managers import Phase
from dtft.checkpoint.timeouts import Timeouts

QUIET_S = 2.0
"""Seconds after which a phase counts as long; the agent then reports the trainer's
progress every second."""
PERIOD_S = 1.0
"""Seconds between two reports of a long phase."""
MOVING_S = 10.0
"""Seconds between two reports of a trainer without a long phase."""
FRESH_S = 3.0
"""Seconds without a report after which a host counts as silent."""
BLIND_S = 2.0
"""Largest number of seconds that one interval between two reads of the progress board
adds to a phase's duration. In a longer interval the agent itself was stopped, and
perhaps its trainer too."""
DUMP_AT = 0.8
"""Fraction of a phase's limit after which the agent has the trainer write its stacks to
its log. Once a phase exceeds its limit, the leader may restart all trainers, and the
stacks are lost."""
KNOWN_STEPS = 3
"""Least number of measured step times from which the default limit of a step is
computed. With fewer, the limit is `Timeouts.start`."""
KEPT_STEPS = 64
SHORTEST_LIMIT_S = 10.0
MEDIANS = 20
"""The default limit of a step as a multiple of the median step time; the limit is at
least `SHORTEST_LIMIT_S` seconds."""
BUSY = 0.2
"""Least number of processors that a computing process uses. A process that waits for a
collective uses about 0."""

STOPPED = "T"
UNINTERRUPTIBLE = "D"
ALONE: tuple[Phase, ...] = ("start", "compile", "data")
"""Phases in which a trainer does not wait for other hosts."""


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A phase that has exceeded its limit; times are in seconds."""

    phase: Phase
    for_s: float
    limit_s: float
    timeout: str
    """Name of the field of `Timeouts` that sets the limit."""

    def text(self, host: str, slot: int, step: int) -> str:
        """Describes the stuck trainer in one line, with the flag that sets the limit.

        Args:
            host: the trainer's host.
            slot: the trainer's slot.
            step: the last step that the trainer has dispatched.

        >>> found = Stuck(phase="data", for_s=61.0, limit_s=60.0, timeout="data")
        >>> found.text("b", 1, 7).partition(" (")[0]
        'trainer of slot 1 on b is stuck: 61 s in phase data after step 7'
        """
        where = "of" if self.phase in ("step", "save", "evaluate") else "after"
        return (
            f"trainer of slot {slot} on {host} is stuck: {self.for_s:.0f} s in phase "
            f"{self.phase} {where} step {step} (limit {self.limit_s:.0f} s; raise "
            f"--timeouts.{self.timeout} if it takes that long)"
        )


def stuck(
    phase: Phase, for_s: float, step_s: Sequence[float], timeouts: Timeouts
) -> Stuck | None:
    """Returns a `Stuck` if a phase has lasted longer than its limit, else None.

    Args:
        phase: the trainer's phase.
        for_s: seconds that the phase has lasted.
        step_s: measured seconds of the newest steps.
        timeouts: timeouts of the job, from which the limit is taken (`limit_of`).
    """
    limit_s, timeout = limit_of(phase, step_s, timeouts)
    if for_s <= limit_s:
        return None
    return Stuck(phase=phase, for_s=for_s, limit_s=limit_s, timeout=timeout)


def limit_of(
    phase: Phase, step_s: Sequence[float], timeouts: Timeouts, state: str = ""
) -> tuple[float, str]:
    """Returns the limit of a phase in seconds, and which field of `timeouts` sets it.

    The phases "start" and "compile" have the limit `timeouts.start`. Each other phase
    has a field of its own. If `timeouts.step` is None, the limit of the phase "step" is
    20 times the median of `step_s` (`MEDIANS`), at least 10 s (`SHORTEST_LIMIT_S`).
    With fewer than 3 measured steps (`KNOWN_STEPS`) it is `timeouts.start` (180 s by
    default).

    Args:
        phase: the trainer's phase; "" has no limit.
        step_s: measured seconds of the newest steps.
        timeouts: timeouts of the job.
        state: state letter of the process in /proc/PID/stat. A stopped process ("T")
            makes no progress in any phase, so its limit is at most that of a step.

    >>> limit_of("step", [1.0, 2.0, 1.0], Timeouts())
    (20.0, 'step')
    >>> limit_of("step", [0.1] * 3, Timeouts()), limit_of("step", [], Timeouts())
    ((10.0, 'step'), (180.0, 'start'))
    """
    limits = {
        "": (float("inf"), "start"),
        "start": (timeouts.start, "start"),
        "compile": (timeouts.start, "start"),
        "data": (timeouts.data, "data"),
        "step": _limit_of_step(step_s, timeouts),
        "evaluate": (timeouts.evaluate, "evaluate"),
        "save": (timeouts.save_limit, "save"),
    }
    if state == STOPPED and phase:
        return min(limits[phase], limits["step"])
    return limits[phase]


def _limit_of_step(step_s: Sequence[float], timeouts: Timeouts) -> tuple[float, str]:
    if timeouts.step is not None:
        return timeouts.step, "step"
    if len(step_s) < KNOWN_STEPS:
        return timeouts.start, "start"
    return max(SHORTEST_LIMIT_S, MEDIANS * median(step_s)), "step"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The state of a trainer at one moment, as its agent reads it."""

    phase: Phase
    since: float
    """Start time of the phase, in seconds on the monotonic clock."""
    computing: int
    finished: int
    """The last finished step, and in `computing` the last dispatched step, as the
    trainer has written them to shared memory (the progress board)."""
    state: str = "?"
    """State letter of the process, as in /proc/PID/stat; "?" if unreadable."""
    cpu_s: float = 0.0
    """Processor time of the process in seconds."""


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """Progress of one trainer: the fields of a `progress` report to the leader."""

    computing: int
    """The last dispatched step."""
    finished: int
    """The last step that is known to have finished."""
    phase: Phase
    for_s: float
    """Seconds that the phase has lasted; a pause of the agent counts for at most
    `BLIND_S`."""
    limit_s: float
    timeout: str
    """Name of the field of `Timeouts` that sets `limit_s`."""
    state: str
    busy: float
    """Mean number of processors that the process used between the agent's last two
    reads of its state."""

    def stuck(self, longer_s: float = 0.0) -> Stuck | None:
        """Returns a `Stuck` if the phase exceeds its limit, else None.

        Args:
            longer_s: seconds since the report, which are added to the phase's duration.
        """
        for_s = self.for_s + longer_s
        if not self.phase or for_s <= self.limit_s:
            return None
        return Stuck(
            phase=self.phase, for_s=for_s, limit_s=self.limit_s, timeout=self.timeout
        )


class ProgressWatch:
    """Measures how long the phases of one host's trainers last.

    All methods run on the agent's event loop.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        """Starts with no observation."""
        self._timeouts = timeouts
        self._step_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self.begin()

    def begin(self) -> None:
        """Starts observing another trainer; keeps the step times measured before."""
        self._last: tuple[float, Observation] | None = None
        self._counted_from: tuple[float, int] | None = None
        self._for_s = 0.0
        self._reported: tuple[float, JobProgress] | None = None
        self._dumped = False

    def look(self, now: float, seen: Observation) -> JobProgress:
        """Records what the progress board shows; returns the trainer's progress.

        This is its step and phase, how long the phase has lasted, and the phase's time
        limit. `now` is the time at which the board was read, in seconds on the
        monotonic clock.
        """
        before = self._last
        gap = BLIND_S if before is None else min(now - before[0], BLIND_S)
        same = (seen.phase, seen.since, seen.computing)
        if before is not None and same == _key(before[1]):
            self._for_s += gap
        else:
            self._for_s, self._dumped = max(0.0, min(now - seen.since, gap)), False
        self._count(now, seen)
        self._last = now, seen
        limit_s, timeout = limit_of(
            seen.phase, self._step_s, self._timeouts, seen.state
        )
        return JobProgress(
            computing=seen.computing,
            finished=seen.finished,
            phase=seen.phase,
            for_s=self._for_s if seen.phase else 0.0,
            limit_s=limit_s if seen.phase else 0.0,
            timeout=timeout,
            state=seen.state,
            busy=_busy(before, now, seen),
        )

    def _count(self, now: float, seen: Observation) -> None:
        """Records the seconds of a step: the mean over the steps since the last record.

        The recorded times decide the default limit of a step. Nothing is recorded while
        the trainer has no phase, starts or compiles. Nothing is recorded either across
        two observations that are more than 2 s apart (`BLIND_S`), because the agent
        itself was suspended between them.

        Args:
            now: time of the observation, in seconds on the monotonic clock.
            seen: the observation, with the last dispatched step.
        """
        begun, before = self._counted_from, self._last
        blind = before is not None and now - before[0] > BLIND_S
        if seen.phase in ("", "start", "compile") or blind:
            self._counted_from = None
        elif begun is None or seen.computing < begun[1]:
            self._counted_from = now, seen.computing
        elif seen.computing > begun[1]:
            steps = seen.computing - begun[1]
            mean = (now - begun[0]) / steps
            self._step_s.extend([mean] * min(steps, KNOWN_STEPS))
            self._counted_from = now, seen.computing

    def report_due(self, now: float, progress: JobProgress) -> bool:
        """Whether to report progress to the leader now; if True, records the report.

        A trainer's first phase is reported at once. A phase that lasts for `QUIET_S`
        (2 s) or longer is reported every second, and its end at once. Other progress is
        reported every ten seconds. When the trainer has no phase any more, this is
        reported once. `now` is the current time, in seconds on the monotonic clock.
        """
        told = self._reported
        lasts = progress.for_s >= QUIET_S
        if not progress.phase:  # the end is told once
            due = told is not None and told[1].phase != ""
        elif told is None or not told[1].phase:
            due = True
        elif told[1].for_s >= QUIET_S and not lasts:
            due = True
        else:
            due = now - told[0] >= (PERIOD_S if lasts else MOVING_S)
        if due:
            self._reported = now, progress
        return due

    def dump_due(self, progress: JobProgress) -> bool:
        """Whether the trainer's stacks must be written to its log now.

        True once a phase has lasted longer than 80% (`DUMP_AT`) of its limit, at most
        once for each phase (each step counts as a phase).
        """
        due = bool(progress.phase) and progress.for_s > DUMP_AT * progress.limit_s
        due, self._dumped = due and not self._dumped, self._dumped or due
        return due


def _key(seen: Observation) -> tuple[Phase, float, int]:
    return seen.phase, seen.since, seen.computing


def _busy(
    before: tuple[float, Observation] | None, now: float, seen: Observation
) -> float:
    if before is None or now <= before[0] or seen.cpu_s < before[1].cpu_s:
        return 0.0
    return (seen.cpu_s - before[1].cpu_s) / (now - before[0])


# ----------------------------------------------------------------- at the leader


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The hosts for which the other hosts wait, and how they were found.

    These are all hosts if none is behind the others.
    """

    hosts: tuple[str, ...]
    why: str


def culprit(reports: Mapping[str, JobProgress]) -> Blame:
    """Finds the trainers that the other trainers wait for.

    `reports` maps each host to the progress of its trainer.

    If any trainer is stopped (state T), the result is the hosts of stopped trainers.
    Otherwise these rules are applied one after the other. Each keeps only the hosts
    with the stated property; a rule that would keep no host keeps all:

    1. The fewest dispatched steps: collectives of a later step wait for such a host.
    2. The fewest finished steps: a collective may have ended on some hosts only.
    3. A phase without waiting for other hosts (start, compile, data).
    4. A process in uninterruptible sleep (state D): a disk or network file hangs.
    5. A process that uses a processor: a process that waits for a collective sleeps.

    Trainers without a phase, which have not begun or have ended well, are left out. The
    reason in the result is that of the first rule that did not keep all hosts.
    """
    group = {host: it for host, it in reports.items() if it.phase}
    if stopped := _those(group, lambda it: it.state == STOPPED):
        return Blame(hosts=stopped, why="the process is stopped (state T)")
    rules = (
        (_by_computing, "the others have dispatched step {step}"),
        (_by_finished, "the others have finished a step more"),
        (_alone, "the others wait in another phase"),
        (_asleep, "uninterruptible sleep (state D): a disk or network file hangs"),
        (_idle, "it computes, and the others wait"),
    )
    most = max((it.computing for it in group.values()), default=0)
    why = ""
    for rank, text in rules:
        ranks = {host: rank(it) for host, it in group.items()}
        least = min(ranks.values(), default=0)
        behind = {host: it for host, it in group.items() if ranks[host] == least}
        if len(behind) < len(group):
            group, why = behind, why or text.format(step=most)
    alone = len(reports) == 1
    none = "" if alone else "all wait for each other, and none is behind"
    return Blame(hosts=tuple(sorted(group)), why=why or none)


def _by_computing(it: JobProgress) -> int:
    return it.computing


def _by_finished(it: JobProgress) -> int:
    return it.finished


def _alone(it: JobProgress) -> int:
    return int(it.phase not in ALONE)


def _asleep(it: JobProgress) -> int:
    return int(it.state != UNINTERRUPTIBLE)


def _idle(it: JobProgress) -> int:
    return int(it.busy < BUSY)


def _those(
    group: Mapping[str, JobProgress], fits: Callable[[JobProgress], bool]
) -> tuple[str, ...]:
    return tuple(sorted(host for host, it in group.items() if fits(it)))


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """Hosts whose trainers are stuck; the leader then restarts all trainers."""

    hosts: tuple[str, ...]
    text: str
    """Message for people. It has each host's slot, phase, seconds in the phase, cause,
    and the flag that sets the limit; for a silent host only slot and seconds."""


def verdict(
    heard: Mapping[str, tuple[float, JobProgress]], slots: Mapping[str, int], now: float
) -> HangVerdict | None:
    """Returns the hosts whose trainers are stuck; None if none is, or not yet known.

    A host is silent if it has not reported for 3 s (`FRESH_S`).

    * If no trainer on a host that reports exceeds the limit of its phase, the result is
      None.
    * If one does and some hosts are silent, the result is the silent hosts. It is None
      until the limit is exceeded by more than 3 s, because the report of a silent host
      may only be late.
    * Otherwise the result is the hosts that are behind (`culprit`). It is None until
      all their trainers exceed their own limits: a trainer may exceed its limit while
      it waits for a host that compiles or reads data, or for a new host, whose step
      times are not known yet.

    Args:
        heard: host to the arrival time and the content of its newest report.
        slots: host to its slot, in the order of the slots.
        now: current time on the clock of `heard`.
    """
    aged = {
        host: (it, min(now - at, FRESH_S) if it.for_s >= QUIET_S else 0.0)
        for host, (at, it) in heard.items()
        if host in slots
    }
    late = [
        host
        for host, (it, longer_s) in aged.items()
        if it.stuck(longer_s) and not _is_silent(heard[host], now)
    ]
    if not late:
        return None
    silent = [host for host in slots if _is_silent(heard.get(host), now)]
    if silent:
        worst = max(aged[host][0].for_s + aged[host][1] for host in late)
        least = min(aged[host][0].limit_s for host in late)
        if worst <= least + FRESH_S:
            return None  # the silent host may just not have reported yet
        text = "; ".join(_silence(host, slots, heard, now) for host in silent)
        return HangVerdict(hosts=tuple(silent), text=text)
    blame = culprit({host: it for host, (it, _) in aged.items()})
    found = {
        host: found
        for host in blame.hosts
        if (found := aged[host][0].stuck(aged[host][1]))
    }
    if len(found) < len(blame.hosts):
        return None
    texts = [
        found[host].text(host, slots[host], aged[host][0].computing) for host in found
    ]
    because = f": {blame.why}" if blame.why else ""
    return HangVerdict(hosts=tuple(found), text="; ".join(texts) + because)


def _is_silent(heard: tuple[float, JobProgress] | None, now: float) -> bool:
    """Whether a host has never reported, or its last report is more than 3 s old.

    The limit is `FRESH_S`. `heard` has the arrival time and the content of the last
    report; None if there was none. `now` is the current time on the same clock, in
    seconds. A host whose last report has no phase is not silent: its trainer has not
    begun or has ended well, so the host need not report.
    """
    return heard is None or (bool(heard[1].phase) and now - heard[0] > FRESH_S)


def _silence(
    host: str,
    slots: Mapping[str, int],
    heard: Mapping[str, tuple[float, JobProgress]],
    now: float,
) -> str:
    since = f"for {now - heard[host][0]:.0f} s" if host in heard else "yet"
    return (
        f"the agent of slot {slots[host]} on {host} has not said {since} what "
        "its trainer does, and the others wait"
    )
