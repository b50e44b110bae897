"""Starts and ends the JAX coordination service beside the leading agent.

One process for each formation, on a fresh port. Reports readiness to whoever asked;
what it is for is not known here. No process is waited for on the event loop.
"""

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable

from dtft.checkpoint.transport import format_address, parse_address
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.processes import die_with_parent, free_port, open_log

logger = logging.getLogger(__name__)

KILL_S = 10.0


class CoordinationService:
    """One coordination service that serves, and one that waits with imports done."""

    def __init__(self, config: AgentConfig, loop: Loop) -> None:
        """Starts the waiting one."""
        self._config, self._loop = config, loop
        self._serving: subprocess.Popen | None = None
        self._waiting = self._spawn()

    def _spawn(self) -> subprocess.Popen:
        log_path = self._config.run_directory / "logs" / f"{self._config.host}.jax.log"
        with open_log(log_path) as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dtft.elastic.host.coordination_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,
            )

    def start(
        self,
        num_processes: int,
        ready: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        """Has a service serve a world of `num_processes`.

        Args:
            num_processes: trainers of the world.
            ready: called with its address once it serves.
            failed: called with the reason if it cannot, or was ended before.
        """
        self.end()
        try:
            address, process = self._address(), self._take()
        except OSError as error:  # no processes or ports are left on this host
            self._loop.post(failed, str(error))
            return
        self._serving = process
        heartbeat_s = self._config.timeouts.heartbeat

        def serve() -> bool:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(f"{address} {num_processes} {heartbeat_s}\n")
                process.stdin.flush()
                return process.stdout.readline().strip() == "serving"
            except (OSError, ValueError):  # it died, or was ended before this
                return False

        self._loop.aside(
            serve,
            lambda outcome: (
                ready(address) if outcome.result() else failed("its process has ended")
            ),
        )

    def _take(self) -> subprocess.Popen:
        """The process that waits; another one waits from now on."""
        if self._waiting.poll() is not None:
            self._kill(self._waiting)
            self._waiting = self._spawn()
        process, self._waiting = self._waiting, self._spawn()
        return process

    def _address(self) -> str:
        host, _ = parse_address(self._config.bind)
        return format_address(host, free_port(host))

    def end(self) -> None:
        """Ends the service at once; the trainers of its world abort."""
        process, self._serving = self._serving, None
        if process is not None:
            self._kill(process)

    def close(self) -> None:
        """Ends both processes."""
        self.end()
        self._kill(self._waiting)

    def _kill(self, process: subprocess.Popen) -> None:
        process.kill()

        def reap() -> None:
            # One that is in an uninterruptible call ends when that does.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError, ValueError):
                        pipe.close()

        self._loop.aside(reap)
