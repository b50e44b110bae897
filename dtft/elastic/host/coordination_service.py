"""Starts and ends the JAX coordination service beside the agent of the first slot.

Each world (set of JAX processes that connect to one service) gets one process on a
fresh port. A callback reports when the service is ready, so the event loop never waits
for a process.
"""

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence

from dtft.checkpoint.transport import format_address, parse_address
from dtft.elastic.event_loop import Loop
from dtft.elastic.job import AgentConfig
from dtft.elastic.processes import die_with_parent, free_port, open_log

logger = logging.getLogger(__name__)

KILL_S = 10.0


class CoordinationService:
    """Runs JAX's coordination service in at most one process at a time.

    Also keeps a standby process, which has done its imports and can serve at once.
    """

    def __init__(self, config: AgentConfig, loop: Loop) -> None:
        """Starts the standby process."""
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
        """Makes the standby process serve a new world of trainers.

        First ends the former service.

        Args:
            num_processes: number of JAX processes that the world has room for.
            ready: called with the service's address once it serves.
            failed: called with the reason if no process or port is available, or if the
                process ends before it serves.
        """
        self.end()
        try:
            address, process = self._address(), self._take()
        except OSError as error:  # no processes or ports are left on this host
            self._loop.post(failed, str(error))
            return
        self._serving = process
        is_open = int(self._config.hot_swap)
        line = f"{address} {num_processes} {self._config.timeouts.heartbeat} {is_open}"

        def serve() -> bool:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
                return process.stdout.readline().strip() == "serving"
            except (OSError, ValueError):  # the process died or was ended before
                return False

        self._loop.aside(
            serve,
            lambda outcome: (
                ready(address) if outcome.result() else failed("its process has ended")
            ),
        )

    def give_up(self, places: Sequence[int]) -> None:
        """Makes the service treat some processes of the world as lost.

        JAX ends these processes if they still run. The other processes of the world
        leave the collectives that they share with a lost process, with an error. Does
        nothing if no service runs.

        Args:
            places: indices in the world of the lost processes.
        """
        process = self._serving
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # it has died
            process.stdin.write(" ".join(map(str, places)) + "\n")
            process.stdin.flush()

    def _take(self) -> subprocess.Popen:
        """Takes the standby process and starts a new standby.

        If the standby has ended, starts a process in its place and takes that one.
        """
        if self._waiting.poll() is not None:
            self._kill(self._waiting)
            self._waiting = self._spawn()
        process, self._waiting = self._waiting, self._spawn()
        return process

    def _address(self) -> str:
        host, _ = parse_address(self._config.bind)
        return format_address(host, free_port(host))

    def end(self) -> None:
        """Kills the serving process, if any; JAX then aborts the connected trainers."""
        process, self._serving = self._serving, None
        if process is not None:
            self._kill(process)

    def close(self) -> None:
        """Ends the serving and the standby process."""
        self.end()
        self._kill(self._waiting)

    def _kill(self, process: subprocess.Popen) -> None:
        process.kill()

        def reap() -> None:
            # A process in an uninterruptible call ends when the call returns.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError, ValueError):
                        pipe.close()

        self._loop.aside(reap)
