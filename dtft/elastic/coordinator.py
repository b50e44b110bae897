"""Starts and ends the JAX coordination service beside the leading agent.

One process for each formation, on a fresh port. Reports readiness as an event; what it
is for is not known here.
"""

import subprocess
import sys
import threading
from collections.abc import Callable

from dtft.elastic.config import AgentConfig
from dtft.elastic.processes import die_with_parent, free_port


class Coordinator:
    """At most one coordination service of this host."""

    def __init__(self, config: AgentConfig, emit: Callable[..., None]) -> None:
        """Nothing is started yet; emits ("coordinator", ballot, address)."""
        self._config, self._emit = config, emit
        self._process: subprocess.Popen | None = None

    def start(self, num_processes: int, ballot: tuple[int, int]) -> None:
        """Starts the service for a world of `num_processes`."""
        self.close()
        host = self._config.bind.rsplit(":", 1)[0]
        address = f"{host}:{free_port()}"
        log_path = self._config.run_directory / "logs" / f"{self._config.host}.jax.log"
        with open(log_path, "ab") as log:
            self._process = process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "dtft.elastic.coordination",
                    address,
                    str(num_processes),
                    str(self._config.timeouts.heartbeat),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,
            )

        def wait() -> None:
            assert process.stdout is not None
            if process.stdout.readline().strip() == "serving":
                self._emit("coordinator", ballot, address)
            process.wait()

        threading.Thread(target=wait, daemon=True).start()

    def close(self) -> None:
        """Ends the service at once; the trainers of its world abort."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=10)
