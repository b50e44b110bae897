"""Carries out the faults of a drill (a run with planned faults), each at its moment.

The moment of a fault is a training step and, if the fault has a phase, an activity of
the job such as a commit. The injector finds most moments in the hosts' progress boards
(shared memory with the current steps of each host). Whether an export has completed
(phase `stored`) is in the event log. The moment of a fault `fail`, an exception that a
trainer raises by itself, is in a marker file or in the trainer's log.

Before a kill of hosts or trainers, the injector suspends (SIGSTOP) the victims. If the
phase is replicate, commit, export or recovery, and no copies are corrupted with the
kill, it then reads the boards again. If they show that the activity has ended, the
victims continue, and the injector waits for the activity again. Stops, cuts, pauses,
and full and read-only directories are undone when their duration is over, also while
later faults are pending. The injector takes no part in the recovery.
"""

import contextlib
import functools
import mmap
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtft.checkpoint.managers import ProgressBoard, ProgressField
from dtft.elastic.faults.interruptions import (
    INTERRUPTIONS,
    OF_DIRECTORIES,
    Interruption,
    begin,
    stopped,
)
from dtft.elastic.faults.network_namespaces import HostNamespaces
from dtft.elastic.faults.schedule import Fault, in_order
from dtft.elastic.inspect_job import Observer
from dtft.elastic.job_changes import drain, scale
from dtft.elastic.leader import EventReader, read_events
from dtft.elastic.local_cluster import LocalCluster
from dtft.elastic.store import EtcdStore, StoreUnavailable, job_key

POLL_S, FAR_POLL_S = 0.0003, 0.01
"""Seconds between two reads of the progress boards: near the moment of a fault, and
before that."""
NEAR_STEPS = 20
"""The moment of a fault is near from this number of steps before the fault's step."""
STORE_AWAY_S = 5.0
FIRST_EXPORT_S = 50.0  # below `timeouts.stage`, the limit between two snapshots
LEADER_S = 30.0
"""Seconds for which a fault that hits hosts by their role waits for a leader."""
REQUEST_S = 240.0
"""Limit in seconds of the wait for the reply to a `scale` or to a `drain` of a host."""
HEALED_S = 5.0
"""A fault of phase `healed` waits until this many seconds have passed since all earlier
faults with a duration were undone."""
JOIN_S = 10.0
"""Limit in seconds of the wait for the injector's thread to end."""
SAMPLE_S = 0.05
WARM_STEPS = 10
"""Number of first steps left out of measured speeds, because of compilation and cold
caches."""
_STORE = ("kill-store", "crash-store", "pause-store", "empty-store")
_REQUESTS = ("scale", "drain")
_OF_TRAINERS = ("kill-trainer", "stop-trainer")
_PHASE_FIELD: dict[str, ProgressField] = {
    "replicate": "replicating",
    "commit": "committing",
    "export": "exporting",
    "recovery": "recovering",
}


class NoLeader(RuntimeError):
    """No host has the leader key: the job is electing a leader, or has none left."""


@dataclass(kw_only=True)
class InjectedFault:
    """Record of one fault that has happened: victims, times and steps."""

    fault: Fault
    hosts: tuple[str, ...] = ()
    at: float = 0.0
    """Wall-clock time of the fault in seconds."""
    finished: int = 0
    """Last step that any trainer had finished at the time of the fault. `computing` and
    `committed`: the last dispatched and the last committed step at that time; for a
    `scale` or a `drain`, `computing` is 0."""
    computing: int = 0
    committed: int = 0
    steps_seen: tuple[int, int] = (0, 0)
    """kill-store: last finished step when the store was killed and when it was
    restarted."""
    until: float | None = None
    """Wall-clock time in seconds at which a fault with a duration was undone; None
    before that and for other faults."""
    gone_s: float | None = None
    """Seconds from the fault until all processes that it suspended had ended; None if
    some were alive when the fault was undone, and for faults that suspend none."""
    steps_per_s: float | None = None
    """pause-store: steps per second before the pause, in an interval as long as the
    pause. `steps_per_s_during`: steps per second during the pause. Both are None for
    other faults, until the pause is over, or if too few steps were seen."""
    steps_per_s_during: float | None = None
    corrupted_bytes: int = 0
    reply: dict[str, Any] = field(default_factory=dict)
    """scale, drain: the job's reply to the request; of several hosts' drains, the last
    reply. {"error": TEXT} if the request failed; empty before the reply."""


class FaultInjector(threading.Thread):
    """Thread that carries out a drill's faults on a local cluster, ordered by step."""

    def __init__(
        self,
        cluster: LocalCluster,
        faults: Sequence[Fault],
        *,
        seed: int,
        rejoin_s: float | None,
        network: HostNamespaces | None = None,
        fail_marker: Path | None = None,
        last_step: int = 0,
    ) -> None:
        """Makes the thread, which is not started yet.

        Args:
            cluster: the local cluster that the faults hit.
            faults: faults in any order.
            seed: seed of the random delay of up to 50 ms before a fault without a phase
                (an activity such as a commit, during which the fault is to happen). The
                delay applies to kills of hosts and trainers, and to faults that can be
                undone, such as stops, cuts and pauses of the store.
            rejoin_s: seconds after which a killed host is started again, or after which
                a new host replaces a host that was drained, or that is stopped or cut
                off for ever; None: neither happens.
            network: the hosts' network namespaces; needed for cuts.
            fail_marker: file that a trainer makes just before it raises the exception
                of a fault `fail` that happens only once (without the option `always`).
                None: the exception is looked for in the trainer's log.
            last_step: last step of the run; speeds are measured up to this step. 0: the
                last step is unknown.
        """
        super().__init__(daemon=True)
        self._cluster = cluster
        self._faults = in_order(faults)
        self._random = random.Random(seed)
        self._rejoin_s = rejoin_s
        self._network, self._fail_marker = network, fail_marker
        self._last_step = last_step
        self._open: list[tuple[InjectedFault, Interruption]] = []
        self._samples: deque[tuple[float, int]] = deque(maxlen=20_000)
        self._cancelled = threading.Event()
        self.injected: list[InjectedFault] = []
        self.error: str | None = None
        self._boards: dict[str, ProgressBoard] = {}
        self._slots: tuple[str, ...] = ()
        self._restarts_due, self._count_lock = 0, threading.Lock()
        self._events = EventReader(cluster.options.run_directory)
        self._read_at = self._log_read_at = self._raised_at = 0.0
        self._leaderless_since: float | None = None
        """Time since which a fault waits for a leader; None if none waits."""

    def run(self) -> None:
        """Carries out every fault in order; undoes a fault when its duration is over.

        After an exception, stores its text in the attribute `error` and undoes the
        faults in force, such as suspended processes, cuts and full directories.
        """
        pending = list(self._faults)
        corrupting: list[Fault] = []
        try:
            while pending and not self._cancelled.is_set():
                fault = pending.pop(0)
                if fault.kind == "corrupt":
                    corrupting.append(fault)
                    continue
                self._play(fault, corrupting)
                corrupting = []
            while self._open and not self._cancelled.is_set():
                self._watch()
                time.sleep(POLL_S * 10)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            while self._open:
                self._open.pop()[1].end()

    def stop(self) -> None:
        """Cancels the faults that have not happened yet, and ends the thread soon.

        Faults that are in force stay in force (see `undo_mounts`).
        """
        self._cancelled.set()

    def undo_mounts(self) -> None:
        """Undoes the faults in force that make directories full or read-only.

        Call it after `stop`. If the thread was started, first waits up to 10 s
        (`JOIN_S`) for its end. If undoing one fault fails, the other faults are undone
        before the error is raised.
        """
        with contextlib.ExitStack() as undone:
            undone.callback(self._undo_mounts)
            if self.ident is not None:
                self.join(JOIN_S)

    def _undo_mounts(self) -> None:
        with contextlib.ExitStack() as undone:
            for strike, interruption in self._open:
                if strike.fault.kind in OF_DIRECTORIES:
                    undone.callback(interruption.end)

    @property
    def done(self) -> bool:
        """Whether all faults have happened and none is still in progress.

        All faults with a duration are then undone, and all requests to scale or drain
        have replies or have failed.
        """
        expected = [fault for fault in self._faults if fault.kind != "corrupt"]
        open_ = [
            it for it in self.injected if it.fault.kind in _REQUESTS and not it.reply
        ]
        lasts = [it for it in self.injected if it.fault.heals and it.until is None]
        return len(self.injected) == len(expected) and not open_ and not lasts

    @property
    def not_over(self) -> list[str]:
        """Faults that have not happened or are not undone yet.

        Each is in the notation of `dtft drill`, such as "kill-host:1@150". A fault of
        kind `corrupt` is left out: it takes effect with the fault after it. A fault
        without a duration is never undone, so it is not listed once it has happened.
        """
        pending = list(self._faults)
        for strike in self.injected:  # a fault may be planned several times
            pending.remove(strike.fault)
        lasts = [it.fault for it in self.injected if it.until is None]
        return [
            *(str(fault) for fault in pending if fault.kind != "corrupt"),
            *(str(fault) for fault in lasts if fault.heals),
        ]

    @property
    def held(self) -> frozenset[str]:
        """Names of the hosts that are suspended or cut off for ever.

        A host is suspended if its agent is. The drill does not wait until these hosts
        end.
        """
        return frozenset(
            host
            for strike in self.injected
            if strike.fault.holds and not strike.fault.heals
            for host in strike.hosts
        )

    @property
    def restarts_due(self) -> int:
        """Number of hosts that are to be started after faults and were not started yet.

        A host is started some seconds (`rejoin_s` of the constructor) after the fault
        that took one away, or after the reply to the request that drained one.
        """
        return self._restarts_due

    # ----------------------------------------------------------------- watching

    def _watch(self) -> None:
        """Undoes faults whose duration is over, and samples the progress of the run.

        A sample is the wall-clock time and the newest step that any host has finished;
        speeds are computed from samples. Also records when all processes that a fault
        suspended have died.
        """
        now = time.time()
        for strike, interruption in list(self._open):
            if strike.gone_s is None and interruption.gone:
                strike.gone_s = now - strike.at
            seconds = strike.fault.seconds
            if seconds is not None and now >= strike.at + seconds:
                self._end(strike, interruption)
        if not self._samples or now >= self._samples[-1][0] + SAMPLE_S:
            self._samples.append((now, self._most("finished")))

    def _end(self, strike: InjectedFault, interruption: Interruption) -> None:
        self._open.remove((strike, interruption))
        interruption.end()
        strike.until = time.time()
        if strike.fault.kind == "pause-store":
            length = strike.until - strike.at
            last = self._last_step
            before, during = (
                rate(self._samples, begun, begun + length, last)
                for begun in (strike.at - length, strike.at)
            )
            strike.steps_per_s, strike.steps_per_s_during = before, during

    # ------------------------------------------------------------------ looking

    def _look(self) -> None:
        """Updates the stored host of each slot from the event log's new events.

        Does nothing if the event log was read less than 20 ms ago.
        """
        if time.monotonic() < self._read_at + 0.02:
            return
        self._read_at = time.monotonic()
        for event in self._events.new():
            if event["event"] == "assignment":
                self._slots = tuple(event["slots"])

    def _board(self, host: str) -> ProgressBoard | None:
        if host not in self._boards:
            path = self._cluster.memory_directory(host) / "board"
            if not path.exists() or path.stat().st_size == 0:
                return None
            self._boards[host] = ProgressBoard(path)
        return self._boards[host]

    def _cell(self, host: str, name: ProgressField) -> int:
        board = self._board(host)
        return board.get(name) if board else 0

    def _most(self, name: ProgressField) -> int:
        hosts = list(self._cluster.agents)
        return max((self._cell(host, name) for host in hosts), default=0)

    def _trainer_pids(self, hosts: Iterable[str]) -> list[int]:
        """Returns the process ids of the hosts' trainers.

        Until a trainer has written its process id, the host's progress board has 0.
        These hosts are left out, because a signal to process id 0 would go to this
        process's own group.
        """
        cells = (self._cell(host, "trainer_pid") for host in hosts)
        return [pid for pid in cells if pid]

    def _victims_now(self, fault: Fault) -> tuple[str, ...] | None:
        """Returns the hosts that a fault hits; None while this needs a leader.

        Raises:
            NoLeader: no host has led for 30 s (`LEADER_S`).
        """
        try:
            victims = self._victims(fault)
        except NoLeader:
            now = time.monotonic()
            if self._leaderless_since is None:
                self._leaderless_since = now
            if now > self._leaderless_since + LEADER_S:
                raise
            return None
        self._leaderless_since = None
        return victims

    def _victims(self, fault: Fault) -> tuple[str, ...]:
        if fault.kind == "kill-spare":
            return self._spares()[:1]
        if fault.kind == "kill-leader" or fault.role == "leader":
            return (self._leader(),)
        if fault.role == "follower":
            leader = self._leader()
            count = 2 if fault.reach == "pair" else 1
            return tuple(host for host in self._slots if host != leader)[:count]
        return tuple(self._slots[slot] for slot in fault.slots)

    def _spares(self) -> tuple[str, ...]:
        """Returns the hosts without a slot whose agents have made progress boards."""
        return tuple(
            host
            for host in sorted(self._cluster.agents)
            if host not in self._slots and self._board(host) is not None
        )

    def _leader(self) -> str:
        """Returns the host that has the leader key.

        While the store does not answer, this is the host that last logged an assignment
        or a commit.

        Raises:
            NoLeader: no host has the leader key.
            StoreUnavailable: the store does not answer, and no host has logged an
                assignment or a commit.
        """
        store = EtcdStore(self._cluster.store_address)
        try:
            pair = store.get(job_key(self._cluster.options.job, "m/leader"))
        except StoreUnavailable:
            events = read_events(self._cluster.options.run_directory)
            led = [it["by"] for it in events if it["event"] in ("assignment", "commit")]
            if not led:
                raise
            return led[-1]
        finally:
            store.close()
        if pair is None:
            raise NoLeader("no host has the leader key")
        return pair.value.decode()

    def _reached(self, fault: Fault, corrupting: Sequence[Fault] = ()) -> bool:
        """Whether a fault may be carried out now: its step and its phase have come.

        The phase is the job's activity during which the fault is to happen. Phases
        `stored` and `collective` do not count here: `_try` waits for them. A fault of
        phase `recovery` does not wait for its step, but for a recovery after an earlier
        fault (at step 0, also after none). A fault `fail` has come once a trainer has
        raised its exception. False while the job has too few slots for the slots that
        the faults name; a fault `scale` may add slots later.

        Args:
            fault: the fault.
            corrupting: faults of kind `corrupt`, which corrupt a host's copies, that
                take effect together with this fault.
        """
        slots = [slot for it in (fault, *corrupting) for slot in it.slots]
        if max(slots, default=-1) >= len(self._slots):
            return False
        if fault.phase == "recovery":
            started = bool(self.injected) or fault.step == 0
            return started and self._most("recovering") == 1
        if fault.kind == "fail":
            return self._failed_at(fault) > 0
        if fault.phase == "healed" and not self._all_healed():
            return False
        if not self._slots or self._most("computing") < fault.step:
            return False
        if fault.phase in _PHASE_FIELD:
            reached = self._most(_PHASE_FIELD[fault.phase])
            return reached > 0 if fault.phase == "export" else reached >= fault.step
        return True

    def _is_near(self, fault: Fault) -> bool:
        """Whether the run is at most 20 steps before a fault's step, or after it.

        The number of steps is `NEAR_STEPS`. The progress boards are then read more
        often. Always True for a fault that waits for a recovery, because it can happen
        at any step.
        """
        return fault.phase == "recovery" or (
            self._most("computing") >= fault.step - NEAR_STEPS
        )

    def _all_healed(self) -> bool:
        ends = [it.until for it in self.injected if it.fault.heals]
        return all(end and time.time() >= end + HEALED_S for end in ends)

    # ----------------------------------------------------------------- striking

    def _play(self, fault: Fault, corrupting: Sequence[Fault]) -> None:
        while not self._cancelled.is_set():
            self._look()
            self._watch()
            is_reached = self._reached(fault, corrupting)
            if is_reached and self._try(fault, corrupting):
                return
            if not is_reached:
                self._leaderless_since = None
            time.sleep(POLL_S if self._is_near(fault) else FAR_POLL_S)

    def _try(self, fault: Fault, corrupting: Sequence[Fault]) -> bool:
        """Carries out a fault whose moment has been reached.

        Args:
            fault: the fault.
            corrupting: faults of kind `corrupt`, which corrupt a host's copies, that
                take effect together with this fault.

        Returns:
            Whether the fault was carried out. False in these cases:

            * The activity during which the fault was to happen (its phase) has ended
              meanwhile.
            * A victim was killed by an earlier fault and has not been started again.
            * The fault kills a spare, and there is no spare.
            * The fault hits trainers, and a victim's trainer has not started.
            * The faults were cancelled while a fault of phase `stored` waited for an
              export.
        """
        if fault.kind == "scale":
            self._request(fault, lambda it: scale(it, fault.replicas, REQUEST_S))
            return True
        victims = self._victims_now(fault)
        if victims is None:
            return False
        if any(host not in self._cluster.agents for host in victims):
            return False
        if fault.kind == "drain":
            ask = functools.partial(_drain_each, hosts=victims)
            self._request(fault, ask, *victims)
            return True
        if fault.kind == "kill-spare" and not victims:
            return False
        started = len(self._trainer_pids(victims)) == len(victims)
        if fault.kind in _OF_TRAINERS and not started:
            return False
        if fault.kind == "fail":
            strike = self._noted(fault, victims)
            strike.at = self._failed_at(fault)
            self.injected.append(strike)
            return True
        if fault.phase == "stored" and not self._hold_until_stored(victims):
            return False
        if fault.kind in INTERRUPTIONS:
            return self._interrupt(fault, victims)
        if fault.kind in _STORE:
            self._strike_store(fault)
            return True
        if fault.phase is None:
            time.sleep(self._random.uniform(0.0, 0.05))
        for host in victims:
            self._cluster.signal_host(host, signal.SIGSTOP)
        with contextlib.ExitStack() as resumed:
            resumed.callback(self._resume, victims)
            if fault.phase == "collective" or corrupting:
                time.sleep(0.15)  # the other hosts arrive in the collective and block
            elif fault.phase in _PHASE_FIELD and not self._reached(fault):
                return False
            self._strike(fault, victims, corrupting)
            resumed.pop_all()
        return True

    def _resume(self, hosts: Iterable[str]) -> None:
        """Resumes all processes of hosts (SIGCONT); leaves out killed hosts."""
        for host in hosts:
            if host in self._cluster.agents:
                self._cluster.signal_host(host, signal.SIGCONT)

    def _interrupt(self, fault: Fault, victims: tuple[str, ...]) -> bool:
        """Begins a fault that can be undone, such as a stop or a cut.

        Returns:
            Whether the fault is in force. False if the fault was to happen during a
            replication, commit, export or recovery that has ended meanwhile; the fault
            is then undone at once.
        """
        if fault.phase is None:
            time.sleep(self._random.uniform(0.0, 0.05))
        strike = self._noted(fault, victims)
        pids = self._trainer_pids(victims)
        with contextlib.ExitStack() as resumed:  # trainers that `stored` stopped
            resumed.callback(self._resume, victims)
            begun = begin(fault, victims, self._cluster, self._network, pids)
            resumed.pop_all()
        if fault.kind in OF_DIRECTORIES:
            strike.at = time.time()  # it may have waited for files that were open
        if fault.phase in _PHASE_FIELD and not self._reached(fault):
            begun.end()
            return False
        self._open.append((strike, begun))
        self._resume_held(fault, victims)
        if fault.holds and not fault.heals:
            self._expect_restarts(len(victims))
            for _ in victims:
                self._start_later()
        self.injected.append(strike)
        return True

    def _resume_held(self, fault: Fault, victims: tuple[str, ...]) -> None:
        """Resumes trainers that were suspended only to wait for the first export.

        A fault of phase `stored` first suspends the victims' trainers until an export
        has completed. If the fault is `stop-agent` or `cut`, the trainers must run on,
        and are resumed here. Does nothing for other faults: `stop-host` and
        `stop-trainer` suspend the trainers themselves, and no other kind that can be
        undone hits hosts.
        """
        if fault.phase == "stored" and fault.kind in ("stop-agent", "cut"):
            for pid in self._trainer_pids(victims):
                os.kill(pid, signal.SIGCONT)

    def _failed_at(self, fault: Fault) -> float:
        """Returns the wall-clock time at which a fault `fail` happened; 0.0 before it.

        The fault is an exception inside a step. A trainer that is to fail only once
        makes a marker file just before. If this file exists, the result is its
        modification time. Otherwise the result is the time at which this method first
        found the exception in the trainer's log. Looks at file and log at most every
        0.1 s.
        """
        if self._raised_at or time.monotonic() < self._log_read_at + 0.1:
            return self._raised_at
        self._log_read_at = time.monotonic()
        logs = self._cluster.options.run_directory / "logs"
        path = logs / f"{self._slots[fault.slots[0]]}.trainer.log"
        words = f"drill: fail at step {fault.step}".encode()
        if self._fail_marker is not None and self._fail_marker.exists():
            self._raised_at = self._fail_marker.stat().st_mtime
        elif path.exists() and words in path.read_bytes():
            self._raised_at = time.time()
        return self._raised_at

    def _noted(self, fault: Fault, victims: tuple[str, ...]) -> InjectedFault:
        """Makes the record of a fault, with the wall-clock time and the job's progress.

        The progress is the newest step that any host computes, the newest that any host
        has finished, and the newest that any host knows to be committed.
        """
        return InjectedFault(
            fault=fault,
            hosts=victims,
            at=time.time(),
            finished=self._most("finished"),
            computing=self._most("computing"),
            committed=self._most("committed"),
        )

    def _hold_until_stored(self, victims: tuple[str, ...]) -> bool:
        """Suspends the victims' trainers and waits for the run's first export.

        Does not wait if an export has completed before. The agents are not suspended,
        so an export in progress continues.

        Returns:
            True once an export has completed; the trainers stay suspended. False if the
            faults were cancelled before; the trainers continue.

        Raises:
            TimeoutError: no export completed within 50 s (`FIRST_EXPORT_S`). The
            trainers continue.
        """
        with contextlib.ExitStack() as resumed:
            resumed.callback(stopped(self._trainer_pids(victims)).end)
            end = time.monotonic() + FIRST_EXPORT_S
            while not self._cancelled.is_set():
                events = read_events(self._cluster.options.run_directory)
                if any(event["event"] == "export" and event["ok"] for event in events):
                    resumed.pop_all()
                    return True
                if time.monotonic() > end:
                    raise TimeoutError(f"nothing was exported in {FIRST_EXPORT_S} s")
                time.sleep(0.05)
        return False

    def _strike(
        self, fault: Fault, victims: tuple[str, ...], corrupting: Sequence[Fault]
    ) -> None:
        strike = InjectedFault(fault=fault, hosts=victims)
        for other in corrupting:
            for host in self._victims(other):
                memory = self._cluster.memory_directory(host)
                strike.corrupted_bytes += corrupt_copies(memory)
        strike.finished = self._most("finished")
        strike.computing, strike.committed = (
            self._most("computing"),
            self._most("committed"),
        )
        strike.at = time.time()
        match fault.kind:
            case "kill-trainer":
                self._kill_trainers(victims)
            case "kill-host" | "kill-leader" | "kill-spare":
                self._kill_hosts(victims)
            case kind:
                raise ValueError(f"fault {kind!r} is in RULES; nothing here does it")
        self.injected.append(strike)

    def _kill_hosts(self, victims: tuple[str, ...]) -> None:
        self._expect_restarts(len(victims))
        for host in victims:
            self._boards.pop(host, None)
            self._cluster.kill_host(host)
            self._start_later(host)

    def _kill_trainers(self, victims: tuple[str, ...]) -> None:
        for host in victims:
            for pid in self._trainer_pids([host]):
                os.kill(pid, signal.SIGKILL)
            self._cluster.signal_host(host, signal.SIGCONT)

    def _expect_restarts(self, count: int) -> None:
        """Adds `count` to the number of hosts that are to be started later.

        Does nothing if no host is started after a fault (`rejoin_s` of the constructor
        is None). Call it before `count` hosts are lost. Otherwise the drill could end
        because no host runs and none is to be started.
        """
        if self._rejoin_s is not None:
            with self._count_lock:
                self._restarts_due += count

    def _start_later(self, host: str | None = None) -> None:
        """Starts a host after the delay `rejoin_s` of the constructor.

        Does nothing if this delay is None. `host` is the name of a host that was
        killed; None: a new host is started. The caller has counted the host as one that
        is to be started (`_expect_restarts`).
        """
        if self._rejoin_s is not None:
            start = functools.partial(self._start_host, host)
            timer = threading.Timer(self._rejoin_s, self._cluster.call_soon, (start,))
            timer.daemon = True
            timer.start()

    def _start_host(self, host: str | None) -> None:
        try:
            self._cluster.start_host(host)
        finally:
            with self._count_lock:
                self._restarts_due -= 1

    def _request(
        self, fault: Fault, change: Callable[[Observer], dict[str, Any]], *hosts: str
    ) -> None:
        """Records a fault that changes the job; requests the change on a thread.

        The change is another number of replicas (`scale`), or hosts that leave
        (`drain`). Does not wait for the reply, so further faults may happen before it.
        A new host is started for each drained host, after the seconds `rejoin_s`
        (an argument of the constructor) since the reply; none if this is None.

        Args:
            fault: the fault.
            change: sends the request to the job; returns the reply.
            hosts: the hosts to drain; none for another number of replicas.
        """
        strike = InjectedFault(fault=fault, hosts=hosts, at=time.time())
        strike.finished, strike.committed = (
            self._most("finished"),
            self._most("committed"),
        )
        self.injected.append(strike)
        args = strike, change
        threading.Thread(target=self._ask, args=args, daemon=True).start()

    def _ask(
        self, strike: InjectedFault, change: Callable[[Observer], dict[str, Any]]
    ) -> None:
        cluster = self._cluster
        store = EtcdStore(cluster.store_address)
        try:
            observer = Observer(
                store, cluster.store_address, cluster.options.job, cluster.secret
            )
            reply = change(observer)
            self._expect_restarts(len(strike.hosts))
            strike.reply = reply
            for _ in strike.hosts:
                self._start_later()
        except Exception as error:
            strike.reply = {"error": str(error)}
            if all(fault.kind in _REQUESTS for fault in self._faults):
                self.error = f"{strike.fault}: {error}"  # no other fault is a cause
        finally:
            store.close()

    def _strike_store(self, fault: Fault) -> None:
        """Kills the store (etcd) and lets it be restarted.

        A fault `kill-store` restarts it after 5 s (`STORE_AWAY_S`), with its data, and
        `empty-store` at once, without its data. After `crash-store` the store's
        supervisor, which otherwise does not act, restarts it.
        """
        strike = self._noted(fault, ())
        etcd = self._cluster.etcd
        if fault.kind == "crash-store":
            os.kill(etcd.pid, signal.SIGKILL)
        elif fault.kind == "empty-store":
            etcd.kill()
            self._cluster.call_soon(self._restart_empty)
        else:
            etcd.kill()
            end = time.monotonic() + STORE_AWAY_S
            while time.monotonic() < end:
                self._watch()
                time.sleep(POLL_S * 10)
            strike.steps_seen = (strike.finished, self._most("finished"))
            self._cluster.call_soon(etcd.start)
        self.injected.append(strike)

    def _restart_empty(self) -> None:
        self._cluster.etcd.stop()  # removes its data
        self._cluster.etcd.start()


def _drain_each(observer: Observer, hosts: Sequence[str]) -> dict[str, Any]:
    """Drains hosts one after the other; returns the reply for the last one."""
    replies = [drain(observer, host, REQUEST_S) for host in hosts]
    return replies[-1]


def rate(
    samples: Iterable[tuple[float, int]], begin: float, end: float, last_step: int
) -> float | None:
    """Computes the steps per second in an interval; None with fewer than two samples.

    Samples of the first 10 steps (`WARM_STEPS`) do not count. Once a sample has the
    run's last step, later samples do not count either, because the run has ended. In
    the examples a step takes 0.1 s. In the second example the run ends at 99 s, at step
    990, so the two later samples are left out.

    Args:
        samples: (time in seconds, last finished step), in order of time.
        begin: start of the interval, in seconds.
        end: end of the interval, in seconds.
        last_step: last step of the run; 0 if unknown.

    >>> samples = [(float(t), 10 * t) for t in range(100)]
    >>> rate(samples, 20.0, 40.0, last_step=1000)
    10.0
    >>> rate(samples + [(101.0, 990), (110.0, 990)], 90.0, 110.0, last_step=990)
    10.0
    >>> rate(samples, 200.0, 220.0, last_step=1000) is None
    True
    """
    within = [
        (at, step) for at, step in samples if begin <= at <= end and step >= WARM_STEPS
    ]
    if last_step and (done := [at for at, step in within if step >= last_step]):
        within = [(at, step) for at, step in within if at <= done[0]]
    if len(within) < 2:
        return None
    (first_at, first), (last_at, last) = within[0], within[-1]
    return (last - first) / (last_at - first_at)


def corrupt_copies(directory: Path) -> int:
    """Inverts one byte in every 4 KiB of the files in which a host keeps copies.

    Args:
        directory: the directory of the host's files (its arena and its reserve).

    Returns:
        The number of inverted bytes.
    """
    flipped = 0
    for path in (*directory.glob("arena*"), directory / "reserve"):
        if not path.exists():
            continue
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
            places = range(0, len(memory), 4096)
            for place in places:
                memory[place] ^= 0xFF
            memory.close()
        flipped += len(places)
    return flipped
