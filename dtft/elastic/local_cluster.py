"""A local cluster: a private etcd and one agent per host, each a session of processes.

Agents run the same code here as on many machines. Processes die when the thread that
started them ends, so this thread must last until the job's end: it calls
`LocalCluster.wait`, which also supervises the store.
`kill_host` simulates the loss of a host: it kills all processes of its session and
deletes the host's memory. `supervise` runs a cluster until its job ends. On signals,
`supervise` stops the job, prints what the job waits for, or ends the job by force.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from dtft.checkpoint.managers import ProgressBoard, ProgressField
from dtft.elastic.host import (
    NotSalvaged,
    Salvage,
    check_arena_room,
    sweep_memory,
    swept_line,
)
from dtft.elastic.leader import newest_stored, read_events
from dtft.elastic.processes import die_with_parent, session
from dtft.elastic.stop_signals import (
    StopProgress,
    end_line,
    heard_signals,
    lost_steps,
    presses,
    second_line,
)
from dtft.elastic.store import (
    EmbeddedEtcd,
    EtcdStore,
    StoreUnavailable,
    SupervisionLimits,
    Supervisor,
    job_key,
    read_view,
)

LAUNCHED = "DTFT_LAUNCHED"
"""Environment variable that is set only for agents of a local cluster. These agents do
not print the job's end, because the cluster does."""
HEAD_START_S = 0.5
"""Seconds by which spares start later than the other hosts, so that host-0, host-1, ...
usually take slot 0, 1, ..."""
LAST_EXPORT_S = 10.0
"""Limit in seconds of the export of the newest step, before a job is ended by force."""
ASK_AGAIN_S = 1.0
"""Seconds between two checks that the store still has the request to stop. A store that
has lost its data gets the request again."""
KILL_S = 10.0
STORE_S = 2.0
"""Timeout of a store call, in seconds."""


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """How the processes of one host are started on this machine."""

    prefix: tuple[str, ...] = ()
    """A program and its arguments, put before the agent's command; the program must
    `exec` the command."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the agent."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Settings of a local cluster."""

    agent_arguments: tuple[str, ...]
    """Arguments of `dtft agent` that all hosts share: CONFIG and overrides."""
    job: str
    """Name of the job."""
    hosts: int
    """Number of hosts that fill slots."""
    spares: int
    """Number of spare hosts."""
    run_directory: Path
    """Directory of logs and events."""
    storage_directory: Path
    """Directory of the storage tier."""
    arena_directory: Path = Path("/dev/shm")
    """Directory of the arenas."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables of every agent."""
    place: Callable[[str], HostPlace] = lambda _: HostPlace()
    """Returns the `HostPlace` of a host name."""
    store_host: str = "127.0.0.1"
    """The address of this machine at which hosts reach etcd."""
    storage_keep: int = 3
    """Number of checkpoints that storage keeps."""
    store_limits: SupervisionLimits = field(default_factory=SupervisionLimits)
    """Limits of the supervision of the store."""


class LocalCluster:
    """One job on this machine: a private etcd, and the agent of each host."""

    def __init__(self, options: ClusterOptions) -> None:
        """Makes the run directory and the secret file; starts no process."""
        self.options = options
        options.run_directory.mkdir(parents=True, exist_ok=True)
        (options.run_directory / "logs").mkdir(exist_ok=True)
        self.etcd = EmbeddedEtcd(
            options.run_directory / "etcd", host=options.store_host
        )
        self.agents: dict[str, subprocess.Popen] = {}
        self._secret_file = options.run_directory / "job.secret"
        self._secret_file.touch(mode=0o600)
        self._secret_file.write_text(os.urandom(32).hex())
        self._next = 0
        self.first_event = len(read_events(options.run_directory))
        self._requests: queue.Queue[Callable[[], object]] = queue.Queue()
        self._supervisor: Supervisor | None = None
        self._closed = threading.Event()
        self._stop: threading.Thread | None = None
        self._stop_recorded = False

    def start(self) -> None:
        """Removes memory that dead agents have left, starts etcd, then every agent.

        Raises:
            ValueError: the arena directory is full, or etcd does not start; the message
                has the reason.
            FileNotFoundError: there is no etcd executable.
        """
        directory = self.options.arena_directory
        if line := swept_line(directory, sweep_memory(directory)):
            tell(line.removeprefix("dtft: "))
        check_arena_room(directory)
        self._start_store()
        for _ in range(self.options.hosts):
            self.start_host()
        if self.options.spares:
            time.sleep(HEAD_START_S)
        for _ in range(self.options.spares):
            self.start_host()

    def _start_store(self) -> None:
        try:
            self.etcd.start()
            self.etcd.wait_ready(20.0)
        except (RuntimeError, TimeoutError) as error:
            problem = self.etcd.obstacle()
            raise ValueError(f"{error}\n{problem}".rstrip()) from error
        limits = self.options.store_limits
        self._supervisor = Supervisor(self.etcd, tell, limits)

    def start_host(self, name: str | None = None) -> str:
        """Starts one agent, by default under a new name; returns the name."""
        if name is None:
            name, self._next = f"host-{self._next}", self._next + 1
        log_path = self.options.run_directory / "logs" / f"{name}.log"
        with open(log_path, "ab") as log:
            self.agents[name] = subprocess.Popen(
                self.agent_command(name),
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.options.environment, LAUNCHED: "1"},
                preexec_fn=die_with_parent,
            )
        return name

    def agent_command(self, name: str) -> list[str]:
        """Returns the command line of one host's agent."""
        place = self.options.place(name)
        return [
            *(*place.prefix, sys.executable, "-m", "dtft.cli", "agent"),
            *self.options.agent_arguments,
            *("--store", self.store_address, "--store-private"),
            *("--job", self.options.job),
            *("--secret-file", str(self._secret_file), "--host-name", name),
            *place.arguments,
        ]

    @property
    def store_address(self) -> str:
        """host:port of the private etcd."""
        return self.etcd.address

    @property
    def secret(self) -> bytes:
        """The job's secret from the secret file."""
        return self._secret_file.read_bytes().strip()

    def memory_directory(self, name: str) -> Path:
        """Returns the directory of a host's arena and progress board."""
        return self.options.arena_directory / f"dtft-{self.options.job}-{name}"

    def signal_host(self, name: str, number: int) -> None:
        """Sends the signal `number` to every process of a host, if any still runs.

        The agent's process group gets the signal at once, other processes of its
        session (exporters, each a group of its own) directly after it.
        """
        agent = self.agents[name].pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent, number)
        for pid in session(agent):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) != agent:
                    os.kill(pid, number)

    def kill_host(self, name: str) -> None:
        """Kills every process of a host (SIGKILL) and deletes the host's memory."""
        self.signal_host(name, signal.SIGKILL)
        try:
            self.agents.pop(name).wait(timeout=KILL_S)
        except subprocess.TimeoutExpired:  # the agent is in an uninterruptible call
            tell(f"the agent of {name} still runs {KILL_S:.0f} s after SIGKILL")
        shutil.rmtree(self.memory_directory(name), ignore_errors=True)

    def request_stop(self) -> None:
        """Asks the job to stop at a step boundary; does not block.

        A thread writes the request to the store. It retries until the store has the
        request, and writes the request again if the store loses it.
        """
        if self._stop is None:
            self._stop = threading.Thread(target=self._ask_to_stop, daemon=True)
            self._stop.start()

    def _ask_to_stop(self) -> None:
        key = job_key(self.options.job, "m/stop")
        store = EtcdStore(self.store_address, STORE_S)
        with contextlib.closing(store):
            while not self._closed.is_set():
                try:
                    if store.get(key) is None:
                        store.put(key, b"1")
                    self._stop_recorded = True
                except StoreUnavailable:
                    self._stop_recorded = False
                self._closed.wait(ASK_AGAIN_S if self._stop_recorded else 0.1)

    def poll(self) -> dict[str, int]:
        """Returns the return codes of the agents that have ended, by host name."""
        agents = list(self.agents.items())  # another thread may kill hosts
        codes = {name: agent.poll() for name, agent in agents}
        return {name: code for name, code in codes.items() if code is not None}

    def call_soon(self, action: Callable[[], object]) -> None:
        """Queues `action`; `wait` calls it soon, on the thread that calls `wait`.

        Processes must be started on that thread, because a process dies with the thread
        that started it.
        """
        self._requests.put(action)

    def wait(self, deadline_s: float) -> bool:
        """Waits until every agent has ended; returns False after `deadline_s` seconds.

        Meanwhile supervises the store and runs the actions of `call_soon`.
        """
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            while not self._requests.empty():
                self._requests.get()()
            if len(self.poll()) == len(self.agents):
                return True
            if self._supervisor is not None:
                self._supervisor.tick()
            time.sleep(0.05)
        return False

    # ---------------------------------------------------------------- observing

    def events(self) -> list[dict[str, Any]]:
        """Returns the events that leaders have logged since this object was made."""
        return read_events(self.options.run_directory)[self.first_event :]

    def progress(self) -> StopProgress:
        """Returns the newest finished, committed and stored steps, and what is missing.

        Hosts for slots can be missing, or an answer of the store. Reads the event log,
        the hosts' progress boards and the storage directory; calls neither leader nor
        store.
        """
        events = self.events()
        last = {event["event"]: n for n, event in enumerate(events)}
        formed = [event for event in events if event["event"] == "assignment"]
        slots = tuple(formed[-1]["slots"]) if formed else ()
        live = [name for name in slots if name in self.agents]
        forming = events[last["forming"]] if "forming" in last else {}
        waiting = last.get("waiting_for_host", -1)
        waits = waiting > max(last.get("forming", -1), last.get("assignment", -1))
        commits = [it["step"] for it in events if it["event"] == "commit"]
        return StopProgress(
            finished={name: self._cell(name, "finished") for name in live},
            computing=self._most("computing"),
            committed=self._most("committed"),
            recorded=max(commits, default=0),
            stored=newest_stored(self.options.storage_directory),
            exporting=self._most("exporting"),
            reforming=not formed or any(self._cell(it, "recovering") for it in live),
            reason=str(forming.get("reason", "")),
            missing=tuple(events[waiting]["slots"]) if waits else (),
            store_serves=self._supervisor is None or self._supervisor.serving,
            asked=self._stop_recorded,
        )

    def _most(self, name: ProgressField) -> int:
        return max((self._cell(host, name) for host in list(self.agents)), default=0)

    def _cell(self, host: str, name: ProgressField) -> int:
        try:
            board = ProgressBoard(self.memory_directory(host) / "board")
        except (OSError, ValueError):  # no board yet, or it was deleted
            return 0
        with contextlib.closing(board):
            return board.get(name)

    def result(self) -> dict[str, Any] | None:
        """Returns the leader's record of the job's end; None if none is found.

        The record has "status" ("done", "stopped" or "error"), "step", "message" and
        "code" (exit code). It is read from the event log, or else from the store.
        """
        ends = [event for event in self.events() if event["event"] == "end"]
        if ends:
            return ends[-1]
        store = EtcdStore(self.store_address, STORE_S)
        try:  # the disk of the event log may have been full
            view, _ = read_view(store, self.options.job)
        except (StoreUnavailable, ValueError, LookupError):
            return None
        finally:
            store.close()
        return json.loads(view.result) if view.result else None

    # ------------------------------------------------------------------- ending

    def salvage(self, limit_s: float) -> int:
        """Writes the newest step in the hosts' memory to storage; returns the step.

        First suspends the trainers (SIGSTOP), so that no later step replaces this one.
        The trainers stay suspended. Needs neither leader nor store.

        Args:
            limit_s: deadline in seconds.

        Raises:
            NotSalvaged: no step was written; the message has the reason.
            ValueError: this process's memory directory cannot be made, see
                `make_memory_directory`.
        """
        hosts = list(self.agents)
        for name in hosts:
            if pid := self._cell(name, "trainer_pid"):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGSTOP)
        roots = {it["step"]: it["root"] for it in self.events() if "root" in it}
        options = self.options
        work = Salvage(
            job=options.job,
            secret=self.secret,
            memory_directories={it: self.memory_directory(it) for it in hosts},
            scratch=self.memory_directory("salvage"),
            storage_directory=options.storage_directory,
            storage_keep=options.storage_keep,
            log_path=options.run_directory / "logs" / "salvage.log",
        )
        return work.run(roots, limit_s)

    def close(self) -> None:
        """Ends all agents and etcd, frees every host's memory, removes the secret file.

        An error with one agent or with etcd does not keep the other processes from
        being ended. On the main thread, stop signals are ignored meanwhile.
        """
        self._closed.set()
        if self._supervisor is not None:
            self._supervisor.close()
        with contextlib.ExitStack() as last_first:
            if threading.current_thread() is threading.main_thread():
                last_first.enter_context(StopAsked().heard())
            last_first.callback(self._secret_file.unlink, missing_ok=True)
            last_first.callback(self._free_memory)
            last_first.callback(self.etcd.stop)
            for name in list(self.agents):
                last_first.callback(self.kill_host, name)
            for name in list(self.agents):  # signal all first, then wait for each
                self.signal_host(name, signal.SIGKILL)

    def _free_memory(self) -> None:
        prefix = f"dtft-{self.options.job}-"
        for path in self.options.arena_directory.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def tell(text: str) -> None:
    """Prints one line to stdout; ignores the error if the terminal is gone."""
    with contextlib.suppress(OSError):
        print(f"dtft: {text}", flush=True)


# ------------------------------------------------------------- running to the end


class StopAsked:
    """Records the stop signals of this process, in order of arrival."""

    def __init__(self) -> None:
        """Starts with no recorded signal."""
        self._signals: list[tuple[float, int]] = []

    @property
    def times(self) -> int:
        """Number of stop requests.

        A signal less than 0.3 s after the signal before it does not count (see
        `presses`). A SIGHUP counts only if it is the first signal.
        """
        return presses(tuple(self._signals))

    @property
    def since_s(self) -> float:
        """Seconds since the first signal; 0 before the first."""
        return time.monotonic() - self._signals[0][0] if self._signals else 0.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Records the signal `number` and its time; used as signal handler."""
        del frame
        self._signals.append((time.monotonic(), number))

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Records stop signals while the body runs; then restores the old handlers.

        SIGHUP stays ignored if it was ignored (nohup).
        """
        before = {it: signal.signal(it, self.note) for it in heard_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def supervise(cluster: LocalCluster, stop_s: float) -> int:
    """Runs a cluster until its job ends.

    Ctrl-C, SIGTERM or SIGHUP stops the job at a step boundary. A second Ctrl-C prints
    what the job waits for. A third Ctrl-C, or the deadline, ends the job by force after
    an attempt to export the newest step in memory. A fourth Ctrl-C cancels this export.

    Args:
        cluster: the cluster, which is not started.
        stop_s: deadline for a requested stop, in seconds. The export has
            10 s more (`LAST_EXPORT_S`).

    Returns:
        The exit code. 0: the job ended without an error, and storage has the step in
        the record of the job's end. If the record has an error: the code in the record.
        If there is no record: 2 if all agents ended with code 2. In every other case 1.
    """
    asked = StopAsked()
    with asked.heard():
        try:
            cluster.start()
            return _to_the_end(cluster, asked, stop_s)
        finally:
            cluster.close()


def _to_the_end(cluster: LocalCluster, asked: StopAsked, stop_s: float) -> int:
    answered = 0
    while not cluster.wait(0.1):
        times = asked.times
        if times > 0 and answered == 0:
            tell("stopping at the next step boundary")
            cluster.request_stop()
        elif times > 1 and answered < 2:
            left_s = stop_s - 1 - asked.since_s
            tell(second_line(cluster.progress(), left_s))
        answered = max(answered, min(times, answered + 1))
        if times > 2:
            return _end_by_force(cluster, asked, "ending now")
        if times and asked.since_s > stop_s - 1:
            why = f"not stopped within {stop_s:g} s (--timeouts.stop); ending it"
            return _end_by_force(cluster, asked, why)
    return _outcome(cluster)


def _end_by_force(cluster: LocalCluster, asked: StopAsked, why: str) -> int:
    """Tries to export the newest step in memory; prints which steps are lost.

    Exports nothing if no step was committed, or if storage has the newest commit and
    the store answers. The caller then ends the cluster.

    Args:
        cluster: the cluster.
        asked: the stop signals so far; one more Ctrl-C gives up the export.
        why: beginning of the printed line: why the job is ended by force.

    Returns:
        The exit code, 1.
    """
    progress = cluster.progress()
    newest = max(progress.committed, progress.recorded)
    if newest <= progress.stored and progress.store_serves:
        has = f"storage has step {progress.stored}, the newest" if newest else ""
        tell(f"{why}; {has or 'no step was committed, so nothing is exported'}")
        return 1
    limit_s = LAST_EXPORT_S
    tell(
        f"{why}, after an attempt to export step {newest} from the memory of the hosts "
        f"({limit_s:.0f} s at most; Ctrl-C gives it up)"
    )
    problem = _exported(cluster, asked, newest, limit_s)
    stored = cluster.progress().stored
    if stored > progress.stored:
        tell(f"exported: storage has step {stored}")
    if lost := lost_steps(newest, stored):
        tell(f"{lost} with the memory of the hosts: {problem or 'not exported'}")
    return 1


def _exported(
    cluster: LocalCluster, asked: StopAsked, newest: int, limit_s: float
) -> str:
    """Exports the newest step in memory; returns "", or why no step was exported.

    First waits for an export that the job has begun, if there is one. Returns "" if
    storage then has the step `newest`. Otherwise exports the newest step that the
    hosts' memory holds completely, which may be an earlier step. Gives up after
    `limit_s` seconds, and when `asked` gets another stop signal. Also gives up if all
    agents have ended while it waited for the job's export.
    """
    end, presses_before = time.monotonic() + limit_s, asked.times
    outcome: list[str] = []

    def work() -> None:
        try:
            cluster.salvage(end - time.monotonic())
            outcome.append("")
        except NotSalvaged as error:
            outcome.append(str(error))
        except Exception as error:  # the cluster must end even then
            outcome.append(f"{type(error).__name__}: {error}")

    begun: threading.Thread | None = None
    while time.monotonic() < end and not outcome:
        if begun is None:
            progress = cluster.progress()
            if progress.stored >= newest:
                return ""
            if progress.exporting <= progress.stored:
                begun = threading.Thread(target=work, daemon=True)
                begun.start()
        if asked.times > presses_before:
            return "given up by Ctrl-C"
        if cluster.wait(0.1) and begun is None:
            return "all agents ended"
    if outcome:
        return outcome[0]
    return f"no export ended within {limit_s:.0f} s"


def _outcome(cluster: LocalCluster) -> int:
    """Prints how the job ended, and the stored step if later steps are lost.

    Returns the exit code of the command.
    """
    result, progress = cluster.result(), cluster.progress()
    newest = max(progress.committed, progress.recorded)
    where = cluster.options.storage_directory
    if result is not None and result["status"] != "error":
        status, step = result["status"], result["step"]
        if progress.stored >= step and (lost := lost_steps(newest, step)):
            tell(f"{status}: storage has step {step}; {lost}")
            return 0  # the leader has logged why
        line = end_line(status, step, progress.stored, str(where))
        if progress.stored >= step:
            tell(line)
            return 0
        _complain(line)
        return 1
    if result is not None:
        reason, code = result["message"], result["code"]
    else:
        codes, logs = cluster.poll(), cluster.options.run_directory / "logs"
        reason = f"all agents ended before the job did, with codes {codes}; see {logs}"
        code = 2 if set(codes.values()) == {2} else 1
    if lost := lost_steps(newest, progress.stored):
        reason += f"\ndtft: {lost}: storage has step {progress.stored}"
    _complain(reason)
    return code


def _complain(reason: str) -> None:
    with contextlib.suppress(OSError):
        print(f"dtft: error: {reason}", file=sys.stderr, flush=True)


def job_name(experiment_name: str) -> str:
    """Makes a job name that is unique on this machine while the job runs.

    The job name consists of the experiment's name, this process's id and a number from
    the clock.
    """
    safe = "".join(c if c.isascii() and c.isalnum() else "-" for c in experiment_name)
    return f"{safe}-{os.getpid()}-{time.time_ns() % 10**6}"
