"""A local cluster: a private etcd and one agent per host, each a process group.

Starts, watches and ends processes, and nothing else: what agents do is the same here
as on a thousand machines. A host's death can be played (`kill_host`): every process of
its group is killed and its memory is gone.
"""

import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dtft.elastic.etcd import EtcdStore
from dtft.elastic.etcd_server import EmbeddedEtcd
from dtft.elastic.journal import read_events
from dtft.elastic.membership import job_key
from dtft.elastic.processes import die_with_parent
from dtft.elastic.store import StoreUnavailable

HEAD_START_S = 0.5
"""Spares start later, so that host-0, host-1, ... take slot 0, 1, ... as a rule."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What a local cluster is made of."""

    agent_arguments: tuple[str, ...]
    """Arguments of `dtft agent` that all hosts share: CONFIG and overrides."""
    job: str
    """Name of the job."""
    hosts: int
    """Hosts that fill slots."""
    spares: int
    """Hosts that wait."""
    run_directory: Path
    """Logs, events, checkpoints."""
    arena_directory: Path = Path("/dev/shm")
    """Where arenas lie."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to every agent's environment."""


class LocalCluster:
    """The processes of one job on this machine."""

    def __init__(self, options: ClusterOptions) -> None:
        """Prepares the run directory and the job secret; starts nothing."""
        self.options = options
        options.run_directory.mkdir(parents=True, exist_ok=True)
        (options.run_directory / "logs").mkdir(exist_ok=True)
        self.etcd = EmbeddedEtcd(options.run_directory / "etcd")
        self.agents: dict[str, subprocess.Popen] = {}
        self._secret_file = options.run_directory / "job.secret"
        self._secret_file.touch(mode=0o600)
        self._secret_file.write_text(os.urandom(32).hex())
        self._next = 0
        self.first_event = len(read_events(options.run_directory))
        self._requests: queue.Queue[Callable[[], object]] = queue.Queue()

    def start(self) -> None:
        """Starts etcd, then every agent."""
        self.etcd.start()
        self.etcd.wait_ready(20.0)
        for _ in range(self.options.hosts):
            self.start_host()
        if self.options.spares:
            time.sleep(HEAD_START_S)
        for _ in range(self.options.spares):
            self.start_host()

    def start_host(self, name: str | None = None) -> str:
        """Starts one agent, by default under a new name; returns the name."""
        if name is None:
            name, self._next = f"host-{self._next}", self._next + 1
        command = [
            *(sys.executable, "-m", "dtft.cli", "agent"),
            *self.options.agent_arguments,
            *("--store", self.store_address, "--store-private"),
            *("--job", self.options.job),
            *("--secret-file", str(self._secret_file), "--host-name", name),
        ]
        log_path = self.options.run_directory / "logs" / f"{name}.log"
        with open(log_path, "ab") as log:
            self.agents[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.options.environment},
                preexec_fn=die_with_parent,
            )
        return name

    @property
    def store_address(self) -> str:
        """host:port of the private etcd."""
        return self.etcd.address

    @property
    def secret(self) -> bytes:
        """The job's secret, as agents read it."""
        return self._secret_file.read_bytes().strip()

    def memory_directory(self, name: str) -> Path:
        """Where a host's arena and board lie."""
        return self.options.arena_directory / f"dtft-{self.options.job}-{name}"

    def signal_host(self, name: str, number: int) -> None:
        """Sends a signal to every process of a host."""
        try:
            os.killpg(self.agents[name].pid, number)
        except ProcessLookupError:
            pass

    def kill_host(self, name: str) -> None:
        """SIGKILLs every process of a host; its memory dies with it."""
        self.signal_host(name, signal.SIGKILL)
        self.agents.pop(name).wait(timeout=10)
        shutil.rmtree(self.memory_directory(name), ignore_errors=True)

    def request_stop(self) -> None:
        """Asks the job to stop at a step boundary."""
        store = EtcdStore(self.store_address)
        try:
            store.put(job_key(self.options.job, "m/stop"), b"1")
        except StoreUnavailable:
            for name in self.agents:
                self.signal_host(name, signal.SIGTERM)
        finally:
            store.close()

    def poll(self) -> dict[str, int]:
        """Return codes of the agents that have ended."""
        codes = {name: agent.poll() for name, agent in self.agents.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def call_soon(self, action: Callable[[], object]) -> None:
        """Has the thread that waits for the cluster run something.

        Processes die with the thread that started them, so only that one may.
        """
        self._requests.put(action)

    def wait(self, deadline_s: float) -> bool:
        """Waits until every agent has ended; False if the deadline passed."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            while not self._requests.empty():
                self._requests.get()()
            if len(self.poll()) == len(self.agents):
                return True
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """Ends everything that still runs and frees every host's memory."""
        for name in list(self.agents):
            self.kill_host(name)
        self.etcd.stop()
        prefix = f"dtft-{self.options.job}-"
        for path in self.options.arena_directory.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)
        self._secret_file.unlink(missing_ok=True)


def supervise(cluster: LocalCluster, stop_s: float) -> int:
    """Runs a cluster until its job ends; Ctrl-C or SIGTERM stops it cleanly.

    Args:
        cluster: not yet started.
        stop_s: deadline for a requested stop, in seconds.

    Returns:
        The exit code: the largest of the agents' codes.
    """
    asked: list[float] = []

    def ask(number: int, frame: object) -> None:
        asked.append(time.monotonic())

    previous = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        cluster.start()
        sent = False
        while not cluster.wait(0.1):
            if asked and not sent:
                sent = True
                print("dtft: stopping at the next step boundary", flush=True)
                cluster.request_stop()
            if asked and time.monotonic() > asked[0] + stop_s - 1:
                print(f"dtft: not stopped within {stop_s} s; ending it", flush=True)
                return 1
        return _outcome(cluster)
    finally:
        cluster.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _outcome(cluster: LocalCluster) -> int:
    """The exit code, and for a failed job one line that says why."""
    events = read_events(cluster.options.run_directory)
    ends = [event for event in events[cluster.first_event :] if event["event"] == "end"]
    if ends and ends[-1]["status"] != "error":
        return 0
    if ends:
        reason, code = ends[-1]["message"], ends[-1]["code"]
    else:
        codes, logs = cluster.poll(), cluster.options.run_directory / "logs"
        reason = f"all agents ended before the job did, with codes {codes}; see {logs}"
        code = 2 if set(codes.values()) == {2} else 1
    print(f"dtft: error: {reason}", file=sys.stderr, flush=True)
    return code


def job_name(experiment_name: str) -> str:
    """A name for a local job: unique on this machine while it runs."""
    safe = "".join(c if c.isascii() and c.isalnum() else "-" for c in experiment_name)
    return f"{safe}-{os.getpid()}-{time.time_ns() % 10**6}"
