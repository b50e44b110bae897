"""Whether a trainer is stuck, and which host is behind when all wait for it.

A trainer writes its phase and the moment it began on its host's board. Its agent looks
there about every second (`ProgressWatch`), and tells the leader of a phase that lasts.
One hung trainer hangs all others in the collective, so all of them pass a limit: the
leader names those that are behind (`verdict`). Clock, board and process state are
arguments.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dtft.checkpoint.managers import Phase
from dtft.checkpoint.timeouts import Timeouts

QUIET_S = 2.0
"""A phase that lasts longer is reported to the leader."""
PERIOD_S = 1.0
"""From one report of a phase that lasts to the next."""
MOVING_S = 10.0
"""From one report of a trainer that gets on to the next."""
FRESH_S = 3.0
"""A report of a phase that lasts counts for so long without a newer one."""
BLIND_S = 2.0
"""At most so much time counts between two looks: an agent that was stopped did not see
whether its trainer was."""
DUMP_AT = 0.8
"""The share of its limit after which a trainer's stack is asked for. The leader acts at
the limit, which ends the process."""
KNOWN_STEPS = 3
"""Steps seen before the limit of a step follows from their times."""
KEPT_STEPS = 64
SHORTEST_LIMIT_S = 10.0
MEDIANS = 20
"""The default limit of a step: so many medians, but not below `SHORTEST_LIMIT_S`."""
BUSY = 0.2
"""Processors that a process uses at least while it computes; one that waits for a
collective uses about none."""

STOPPED = "T"
UNINTERRUPTIBLE = "D"
ALONE: tuple[Phase, ...] = ("start", "compile", "data")
"""Phases in which a trainer waits for no other host."""


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A phase that lasts longer than it may."""

    phase: Phase
    for_s: float
    limit_s: float
    timeout: str
    """The field of `Timeouts` that is the limit."""

    def text(self, host: str, slot: int, step: int) -> str:
        """For people: host, slot, phase, seconds, and the flag that allows more.

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
    """Whether a phase lasts longer than it may; see `limit_of`."""
    limit_s, timeout = limit_of(phase, step_s, timeouts)
    if for_s <= limit_s:
        return None
    return Stuck(phase=phase, for_s=for_s, limit_s=limit_s, timeout=timeout)


def limit_of(
    phase: Phase, step_s: Sequence[float], timeouts: Timeouts, state: str = ""
) -> tuple[float, str]:
    """How many seconds a phase may last, and the field of `timeouts` that says so.

    Args:
        phase: of the trainer.
        step_s: seconds of finished steps, the newest of them.
        timeouts: of the job.
        state: of the process; one that is stopped gets on in no phase, so it may not
            last longer than a step.

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
    """What an agent sees of its trainer at one moment."""

    phase: Phase
    since: float
    """When the phase began, in seconds on the monotonic clock."""
    computing: int
    finished: int
    """Steps, as on the board."""
    state: str = "?"
    """Of the process, as in /proc/PID/stat; "?" if it cannot be read."""
    cpu_s: float = 0.0
    """Processor time that the process has used."""


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """What the leader is told of one trainer; the fields of a `progress` report."""

    computing: int
    """The last step that was dispatched."""
    finished: int
    """The last step that is known to be finished."""
    phase: Phase
    for_s: float
    """How long the phase lasts; time in which the agent did not look is left out."""
    limit_s: float
    timeout: str
    """The limit of the phase, and the field of `Timeouts` that it is."""
    state: str
    busy: float
    """Processors used between the last two looks."""

    def stuck(self, longer_s: float = 0.0) -> Stuck | None:
        """Whether the phase lasts longer than it may, `longer_s` after the report."""
        for_s = self.for_s + longer_s
        if not self.phase or for_s <= self.limit_s:
            return None
        return Stuck(
            phase=self.phase, for_s=for_s, limit_s=self.limit_s, timeout=self.timeout
        )


class ProgressWatch:
    """Follows one host's trainers from look to look; on the agent's event loop."""

    def __init__(self, timeouts: Timeouts) -> None:
        """Starts without an observation."""
        self._timeouts = timeouts
        self._step_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self.begin()

    def begin(self) -> None:
        """Starts observing another trainer; the step times are kept."""
        self._last: tuple[float, Observation] | None = None
        self._counted_from: tuple[float, int] | None = None
        self._for_s = 0.0
        self._reported: tuple[float, JobProgress] | None = None
        self._dumped = False

    def look(self, now: float, seen: Observation) -> JobProgress:
        """What the trainer does, from what is on the board at `now`."""
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
        """Learns the mean time of the steps that were dispatched since the last."""
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
        """Whether the leader is to be told now; counts as told if so.

        A phase that lasts is told every second, and its end at once; anything else
        every ten seconds, and once that the trainer has no phase any more.
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
        """Whether to ask for the trainer's stack now; True once for each phase."""
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
    """Hosts that are behind, and by which sign; all of them if none is behind."""

    hosts: tuple[str, ...]
    why: str


def culprit(reports: Mapping[str, JobProgress]) -> Blame:
    """Which trainers the others wait for.

    The first of these rules that tells some hosts from the others names them:

    1. The process is stopped (state T): it cannot get on, whatever it was doing.
    2. The fewest steps dispatched: the others have handed a step to their devices that
       this one has not, so their collectives wait for it.
    3. Of those with equally many, the fewest steps finished: a collective can be over
       on one host and not on another.
    4. Of those, a phase in which no other host is waited for (start, compile, data),
       while others are in one where they wait.
    5. Of those, a process in uninterruptible sleep (state D): a disk or a network file
       system hangs.
    6. Of those, a process that uses a processor: who waits for a collective sleeps.

    Trainers without a phase, which have not begun or have ended well, are never named.
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
    """Trainers that are stuck, for the leader to start anew."""

    hosts: tuple[str, ...]
    text: str
    """For people; names host, slot, phase, seconds, cause and the flag to raise."""


def verdict(
    heard: Mapping[str, tuple[float, JobProgress]], slots: Mapping[str, int], now: float
) -> HangVerdict | None:
    """Which trainers are stuck; None if none is, or if it cannot be said yet.

    A host that is behind is only named when it is beyond its own limit: others may
    have passed theirs while they wait for one that compiles or reads, which may take
    longer. Where the phase of some has lasted too long, and a host has not been heard
    of for `FRESH_S`, that host is named: its agent cannot look. What was heard before
    that accuses nobody.

    Args:
        heard: the newest report of each host, and when it came.
        slots: host to its slot, in the order of the slots.
        now: on the clock of `heard`.
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
            return None  # it may just have begun to last there
        text = "; ".join(_silence(host, slots, heard, now) for host in silent)
        return HangVerdict(hosts=tuple(silent), text=text)
    blame = culprit({host: it for host, (it, _) in aged.items()})
    found = {
        host: found
        for host in blame.hosts
        if (found := aged[host][0].stuck(aged[host][1]))
    }
    if not found:
        return None
    texts = [
        found[host].text(host, slots[host], aged[host][0].computing) for host in found
    ]
    because = f": {blame.why}" if blame.why else ""
    return HangVerdict(hosts=tuple(found), text="; ".join(texts) + because)


def _is_silent(heard: tuple[float, JobProgress] | None, now: float) -> bool:
    """A trainer that has ended well has nothing more to say."""
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
