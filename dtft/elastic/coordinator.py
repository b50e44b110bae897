"""Starts and ends the JAX coordination service beside the leading agent.

One process for each formation, on a fresh port. Reports readiness as an event; what it
is for is not known here.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable

from dtft.elastic.config import AgentConfig
from dtft.elastic.processes import die_with_parent, free_port, open_log


class Coordinator:
    """One coordination service that serves, and one that waits with imports done."""

    def __init__(self, config: AgentConfig, emit: Callable[..., None]) -> None:
        """Starts the waiting one; emits ("coordinator", ballot, address)."""
        self._config, self._emit = config, emit
        self._serving: subprocess.Popen | None = None
        self._waiting = self._spawn()

    def _spawn(self) -> subprocess.Popen:
        log_path = self._config.run_directory / "logs" / f"{self._config.host}.jax.log"
        with open_log(log_path) as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dtft.elastic.coordination"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,
            )

    def start(self, num_processes: int, ballot: tuple[int, int]) -> None:
        """Has a service serve a world of `num_processes`."""
        self.end()
        host = self._config.bind.rsplit(":", 1)[0]
        address = f"{host}:{free_port()}"
        if self._waiting.poll() is not None:
            _kill(self._waiting)
            self._waiting = self._spawn()
        self._serving, self._waiting = self._waiting, self._spawn()
        process = self._serving
        assert process.stdin is not None
        heartbeat_s = self._config.timeouts.heartbeat
        with contextlib.suppress(OSError):  # it just died: the formation times out
            process.stdin.write(f"{address} {num_processes} {heartbeat_s}\n")
            process.stdin.flush()

        def wait() -> None:
            assert process.stdout is not None
            said = ""
            with contextlib.suppress(ValueError):  # closed: it was ended before this
                said = process.stdout.readline()
            if said.strip() == "serving":
                self._emit("coordinator", ballot, address)
            process.wait()

        threading.Thread(target=wait, daemon=True).start()

    def end(self) -> None:
        """Ends the service at once; the trainers of its world abort."""
        process, self._serving = self._serving, None
        if process is not None:
            _kill(process)

    def close(self) -> None:
        """Ends both processes."""
        self.end()
        _kill(self._waiting)


class NoCoordinator:
    """In place of `Coordinator` where the user's processes have a service already."""

    def __init__(self, config: AgentConfig, emit: Callable[..., None]) -> None:
        """Starts nothing."""
        del config
        self._emit = emit

    def start(self, num_processes: int, ballot: tuple[int, int]) -> None:
        """It serves at once."""
        del num_processes
        self._emit("coordinator", ballot, "")

    def end(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


def _kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(timeout=10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not sent is lost with it
                pipe.close()
