"""The trainer processes of one host: started, linked, ended. At most two exist.

One trains; one is a standby that has done its imports and waits, so that a recovery
does not pay for them. A trainer is a command line; this module knows no model, no
JAX, and not why a trainer is started or ended.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dtft.checkpoint.link import Link, LinkClosed, listen, serve
from dtft.elastic.config import AgentConfig
from dtft.elastic.processes import die_with_parent, open_log

Emit = Callable[..., None]


@dataclass(kw_only=True)
class Trainer:
    """One trainer process; `link` is set once it has connected."""

    process: subprocess.Popen
    link: Link | None = None
    start: dict[str, Any] | None = None
    """The start message, once this trainer has been given a slot."""


class TrainerPool:
    """Starts trainers and hears from them; events go to `emit`.

    Emits ("trainer", pid, message) and ("trainer_exit", pid, return code).
    """

    def __init__(self, config: AgentConfig, emit: Emit) -> None:
        """Listens in the host's memory directory; starts nothing yet."""
        self._command, self._emit = config.trainer_command, emit
        self._log_path = config.run_directory / "logs" / f"{config.host}.trainer.log"
        socket_path = config.memory_directory / "agent.sock"
        self._environment = {
            **os.environ,
            **config.trainer_environment,
            "DTFT_AGENT_SOCKET": str(socket_path),
        }
        self._trainers: dict[int, Trainer] = {}
        self.active: Trainer | None = None
        self._standby: Trainer | None = None
        self._listener = listen(socket_path)
        serve(self._listener, self._hear)

    def _hear(self, link: Link) -> None:
        pid = None
        try:
            while True:
                message = link.receive()
                if message["op"] == "hello":
                    pid = message["pid"]
                    self._emit("trainer_link", pid, link)
                elif pid is not None:
                    self._emit("trainer", pid, message)
        except LinkClosed:
            link.close()

    def linked(self, pid: int, link: Link) -> None:
        """A trainer has connected; it is told at once if its start is waiting."""
        trainer = self._trainers.get(pid)
        if trainer is None:
            link.close()
            return
        trainer.link = link
        if trainer.start is not None:
            _send(trainer, "start", trainer.start)

    def _spawn(self) -> Trainer:
        with open_log(self._log_path) as log:
            process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        trainer = Trainer(process=process)
        self._trainers[process.pid] = trainer
        threading.Thread(target=self._wait, args=(process,), daemon=True).start()
        return trainer

    def _wait(self, process: subprocess.Popen) -> None:
        self._emit("trainer_exit", process.pid, process.wait())

    def ensure_standby(self) -> None:
        """Starts a standby unless there is one."""
        if self._standby is None:
            self._standby = self._spawn()

    def start(self, message: dict[str, Any]) -> None:
        """Gives the slot in `message` to the standby, or to a new trainer."""
        trainer = self._standby or self._spawn()
        self._standby = None
        self.active, trainer.start = trainer, message
        _send(trainer, "start", message)

    def is_active(self, pid: int) -> bool:
        """Whether this process is the active trainer."""
        return self.active is not None and self.active.process.pid == pid

    def send(self, op: str, **fields: Any) -> None:
        """Sends to the active trainer, if it is linked."""
        if self.active is not None:
            _send(self.active, op, fields)

    def exited(self, pid: int) -> Literal["active", "standby", "ended"]:
        """Forgets a trainer that has ended and says what it was."""
        trainer = self._trainers.pop(pid, None)
        if trainer is not None and trainer is self._standby:
            self._standby = None
            return "standby"
        if trainer is not None and trainer is self.active:
            self.active = None
            return "active"
        return "ended"

    def kill_active(self, reason: str = "", *, waiting: bool = False) -> None:
        """SIGKILLs the active trainer, who needs no reason, and waits until it ends."""
        del reason, waiting
        trainer, self.active = self.active, None
        if trainer is not None:
            trainer.process.kill()
            trainer.process.wait(timeout=10)

    def close(self) -> None:
        """Ends every trainer."""
        self._listener.close()
        for trainer in list(self._trainers.values()):
            trainer.process.kill()
        for trainer in list(self._trainers.values()):
            trainer.process.wait(timeout=10)


def _send(trainer: Trainer, op: str, fields: Mapping[str, Any]) -> None:
    """Sends to a trainer, if it is linked; one that just died is found by its exit."""
    if trainer.link is not None:
        with contextlib.suppress(LinkClosed):
            trainer.link.send(op, **fields)


def start_message(config: AgentConfig, order: dict[str, Any]) -> dict[str, Any]:
    """What a trainer is told of the slot in a leader's `order`.

    `items` is what the commit that memory restores holds beside arrays; from storage,
    the trainer reads them itself.
    """
    timeouts = config.timeouts
    return {
        "slot": order["slot"],
        "num_slots": len(order["addresses"]),
        "hosts": order["hosts"],
        "generation": order["generation"],
        "attempt": order["attempt"],
        "coordinator": order["coordinator"],
        "board": str(config.memory_directory / "board"),
        "run_directory": str(config.run_directory),
        "storage_directory": str(config.storage_directory),
        "storage_step": order["step"] if order["source"] == "storage" else None,
        "items": order["items"],
        "chunk_bytes": config.chunk_bytes,
        "heartbeat_s": timeouts.heartbeat,
        "start_s": timeouts.start,
    }
