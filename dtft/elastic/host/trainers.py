"""The trainers of one host: who they are, what they say, and how they are let go.

A trainer attaches over the agent's Unix socket. It is either a process that this agent
has started (`Command`), or one of the user's own, which is taken unless there is an
objection (`Admission`). The first is killed when it is let go, the second is
told why. Nothing here waits for a trainer: what is sent goes through a queue of each,
and a process that does not end after SIGKILL is given up.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtft.checkpoint.managers import (
    AGENT_SOCKET,
    AGENT_SOCKET_VARIABLE,
    ATTACHED,
    AgentLink,
    LinkClosed,
    NotReading,
    Outbox,
    foreign_peer,
    listen_for_links,
    serve_links,
)
from dtft.elastic.job import AgentConfig
from dtft.elastic.processes import die_with_parent, ended_with, open_log, state_letter

logger = logging.getLogger(__name__)

SEND_S = 5
"""A trainer that reads nothing for so long is let go, or killed."""
KILL_S = 10.0
"""A process that runs so long after SIGKILL is given up: nothing waits for it more."""
ABSENT = -1
"""Index, and ident, of nobody."""

Emit = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Command:
    """How an agent starts trainers of its own."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path

    @classmethod
    def of(cls, config: AgentConfig) -> "Command":
        """That of a launched job's host."""
        return cls(
            arguments=config.trainer_command,
            environment={
                **os.environ,
                **config.trainer_environment,
                AGENT_SOCKET_VARIABLE: str(config.memory_directory / AGENT_SOCKET),
            },
            log=config.run_directory / "logs" / f"{config.host}.trainer.log",
        )

    def run(self) -> subprocess.Popen:
        """Starts one; it dies with the calling thread."""
        with open_log(self.log) as log:
            return subprocess.Popen(
                self.arguments,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=die_with_parent,
            )


Objection = Callable[[Mapping[str, Any]], str | None]
"""Why a process of the user's own is not taken, from what it says; None if it is."""


def _nobody(message: Mapping[str, Any]) -> str | None:
    raise ValueError(f"process {message['pid']} was not started by this agent")


@dataclass(kw_only=True, eq=False)
class AttachedTrainer:
    """One trainer: a process of this agent's (`process`), or one of the user's own."""

    ident: int
    """Wall-clock time in ns at which it was started, or attached: no other has it."""
    pid: int
    index: int = ABSENT
    """Of a process in the user's own job."""
    process: subprocess.Popen | None = None
    link: AgentLink | None = None
    outbox: Outbox | None = None
    """Set with `link` once it has attached."""
    start: Mapping[str, Any] | None = None
    """What a trainer of this agent's is still to be told of its slot."""
    given: bool = False
    """It was told what to do, so it cannot be taken into another formation."""
    left: bool = False
    """It has said goodbye."""
    ended: threading.Event = field(default_factory=threading.Event)

    def send(self, op: str, fields: Mapping[str, Any]) -> None:
        """Queues a message, if it has attached; its end is found by other means."""
        if self.outbox is not None:
            self.outbox.send(op, **fields)


class Trainers:
    """At most one trainer of the formation, and at most one that waits for the next.

    Emits, once `bind` was called, ("trainer", ident, message), ("trainer_exit", ident,
    code) when one has ended, where the code of a user's process is whether it had said
    goodbye, and ("attachment",) when a user's process has attached or gone.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        job: str,
        host: str,
        deadline_s: float,
        command: Command | None = None,
        objection: Objection = _nobody,
    ) -> None:
        """Listens at `socket_path`; starts nothing yet.

        Args:
            socket_path: where trainers attach.
            job: name of the job.
            host: name of this host.
            deadline_s: how long a trainer may wait for the others.
            command: starts trainers; without one, the user does.
            objection: to processes that were not started here.
        """
        self.path, self._job, self._host = socket_path, job, host
        self._deadline_s, self._command = deadline_s, command
        self._objection = objection
        self._lock = threading.RLock()
        self._known: dict[int, AttachedTrainer] = {}
        """All that have not ended, by ident."""
        self._trainer: AttachedTrainer | None = None
        """Of the formation, until it ends."""
        self._active = 0
        """Its ident, until its end was asked for by `exited`."""
        self._code: int | None = None
        """With which it has ended."""
        self._waiting: AttachedTrainer | None = None
        self._dying: set[int] = set()
        """Killed, and neither ended nor given up: none is told its slot meanwhile."""
        self._events: list[tuple[Any, ...]] = []
        self._emit: Emit | None = None
        self._listener = listen_for_links(socket_path)
        serve_links(self._listener, self._hear, SEND_S)

    def bind(self, emit: Emit) -> None:
        """Events go to `emit` from now on, with those that came before."""
        with self._lock:
            for event in self._events:
                emit(*event)
            self._emit = emit

    def _tell(self, *event: Any) -> None:
        """Emits an event; the caller holds the lock."""
        (self._emit or (lambda *told: self._events.append(told)))(*event)

    @property
    def pid(self) -> int:
        """Process id of the formation's trainer, 0 for none."""
        trainer = self._trainer
        return trainer.pid if trainer is not None else 0

    @property
    def attachment(self) -> tuple[int, int]:
        """Index and ident of the user's process, (-1, 0) for none."""
        with self._lock:
            found = self._attached
            return (found.index, found.ident) if found else (ABSENT, 0)

    @property
    def waiting(self) -> int:
        """Ident of a trainer that can be taken into a formation, 0 for none."""
        with self._lock:
            found = self._next
            return found.ident if found else 0

    @property
    def _attached(self) -> AttachedTrainer | None:
        found = self._trainer or self._waiting
        return found if found is not None and found.process is None else None

    @property
    def _next(self) -> AttachedTrainer | None:
        trainer = self._trainer
        return trainer if trainer is not None and not trainer.given else self._waiting

    # --------------------------------------------------------------- attaching

    def _hear(self, link: AgentLink) -> None:
        trainer = None
        try:
            foreign = foreign_peer(link.peer[1])
            if foreign is not None:
                link.send("refused", error=foreign, taken=False)
            while foreign is None:
                message = link.receive()
                if trainer is not None:
                    self._heard(trainer, message)
                elif message["op"] == "who" and self._command is None:
                    with self._lock:  # whoever is told to be attached is seen here
                        taken = self._attached.pid if self._attached else 0
                    link.send("agent", job=self._job, host=self._host, taken_by=taken)
                elif message["op"] == "attach":
                    trainer = self._welcome(message, link)
                else:
                    break
        except (OSError, KeyError, TypeError, ValueError):  # LinkClosed is an OSError
            pass  # it has gone, or what it says has no meaning here
        link.close()
        if trainer is not None and trainer.outbox is not None:
            trainer.outbox.close()
        if trainer is not None and trainer.process is None:
            self._ended(trainer, int(trainer.left))

    def _heard(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        with self._lock:
            trainer.left = trainer.left or message["op"] == "left"
            self._tell("trainer", trainer.ident, message)

    def _welcome(
        self, message: dict[str, Any], link: AgentLink
    ) -> AttachedTrainer | None:
        """Takes a process, or tells it why not."""
        started = self._started(message["pid"])
        error = None if started else self._objection(message)
        with self._lock:
            taken = error is None and started is None and self._attached is not None
            if taken:
                error = self._taken()
            if error is None:
                return self._take(started, message, link)
        link.send("refused", error=error, taken=taken)  # may wait, so without the lock
        return None

    def _take(
        self, started: AttachedTrainer | None, message: dict[str, Any], link: AgentLink
    ) -> AttachedTrainer:
        """Takes a process; the caller holds the lock."""
        if started is None:
            trainer = AttachedTrainer(
                ident=time.time_ns(), pid=message["pid"], index=message["process"]
            )
            self._waiting = self._known[trainer.ident] = trainer
        else:
            trainer = started
        trainer.link = link
        trainer.outbox = Outbox(link, lambda error: self._failed(trainer, error))
        trainer.send(
            ATTACHED,
            {"job": self._job, "host": self._host, "deadline_s": self._deadline_s},
        )
        self._begin(trainer)
        if started is None:
            self._tell("attachment")
        return trainer

    def _started(self, pid: int) -> AttachedTrainer | None:
        """The trainer of this agent's that has a process id and did not attach yet."""
        with self._lock:
            for trainer in self._known.values():
                if trainer.process is not None and trainer.pid == pid:
                    if trainer.link is None and not trainer.ended.is_set():
                        return trainer
        return None

    def _taken(self) -> str:
        assert (by := self._attached) is not None
        return (
            f"the agent of host {self._host} (job {self._job!r}) is taken by "
            f"process {by.pid}, index {by.index} of "
            "the job: one process per agent. Give each process an agent of "
            "its own, or end that one."
        )

    def _failed(self, trainer: AttachedTrainer, error: LinkClosed) -> None:
        """What was to be sent could not be."""
        assert trainer.link is not None
        trainer.link.close()  # a user's process is told of by the thread that hears it
        if trainer.process is not None and isinstance(error, NotReading):
            logger.warning("trainer %d read nothing for %d s", trainer.pid, SEND_S)
            with self._lock:
                self._kill(trainer, trainer.process)

    # ---------------------------------------------------------------- beginning

    def ensure_standby(self) -> None:
        """Starts a trainer that waits, unless there is one, or the user starts them."""
        with self._lock:  # it may end at once
            if self._command is not None and self._waiting is None:
                self._waiting = self._spawn(self._command)

    def _spawn(self, command: Command) -> AttachedTrainer:
        with self._lock:  # it may attach at once
            process = command.run()
            trainer = AttachedTrainer(
                ident=time.time_ns(), pid=process.pid, process=process
            )
            self._known[trainer.ident] = trainer
        args = trainer, process
        threading.Thread(target=self._await_end, args=args, daemon=True).start()
        return trainer

    def start(self, message: Mapping[str, Any]) -> None:
        """Takes the trainer that waits into a formation, or a new one.

        Without either it is as if one had ended.

        Args:
            message: what one of this agent's is told of its slot; the user's own
                process has its world already.
        """
        with self._lock:
            trainer = self._next
            if trainer is None and self._command is not None:
                trainer = self._spawn(self._command)
            self._trainer, self._waiting = trainer, None
            self._active = ABSENT if trainer is None else trainer.ident
            self._code = None
            if trainer is None:
                self._tell("trainer_exit", ABSENT, 0)
            elif trainer.process is not None:
                trainer.start, trainer.given = message, True
                self._begin(trainer)

    def _begin(self, trainer: AttachedTrainer) -> None:
        """Tells a trainer its slot, once it has attached and the one before is gone.

        A process that still ends may have the devices, and the memory that both map.
        """
        if trainer.start is None or trainer.outbox is None or self._dying:
            return
        message, trainer.start = trainer.start, None
        trainer.send("start", message)

    def formed(self, **fields: Any) -> None:
        """Tells the user's process what can be restored: it goes on."""
        with self._lock:
            if self._trainer is not None:
                self._trainer.given = True
                self._trainer.send("formed", fields)

    def is_active(self, ident: int) -> bool:
        """Whether this is the trainer of the present formation."""
        return ident == self._active != 0

    def send(self, op: str, **fields: Any) -> None:
        """Sends to the trainer of the formation, if it has attached."""
        if (trainer := self._trainer) is not None:
            trainer.send(op, fields)

    def note(self, text: str) -> None:
        """Tells a user's process that waits what it waits for."""
        with self._lock:
            found = self._next
            if found is not None and found.process is None:
                found.send("note", {"text": text})

    # ------------------------------------------------------------------- ending

    def _await_end(self, trainer: AttachedTrainer, process: subprocess.Popen) -> None:
        code = process.wait()
        trainer.ended.set()
        self._ended(trainer, code)

    def _ended(self, trainer: AttachedTrainer, code: int) -> None:
        """Forgets one at once: who attaches next need not wait for events."""
        with self._lock:
            if self._known.pop(trainer.ident, None) is None:
                return  # it was given up before
            self._dying.discard(trainer.ident)
            was_attached = trainer is self._attached
            self._waiting = None if trainer is self._waiting else self._waiting
            self._trainer = None if trainer is self._trainer else self._trainer
            self._code = code if trainer.ident == self._active else self._code
            if was_attached:
                self._tell("attachment")
            if self._trainer is not None:
                self._begin(self._trainer)
            self._tell("trainer_exit", trainer.ident, code)

    def exited(self, ident: int) -> bool:
        """A trainer has ended; says whether it was the formation's until now."""
        with self._lock:
            was_active = self.is_active(ident)
            self._active = 0 if was_active else self._active
            return was_active

    def let_go(self, reason: str = "", *, waiting: bool = False) -> int | None:
        """Ends the trainer of the formation; one that was told nothing yet waits again.

        Args:
            reason: what has happened, for the user.
            waiting: let go of one that waits, too.

        Returns:
            The code with which the formation's trainer has ended already, if `exited`
            was not asked about it; None if it ran, or if there was none.
        """
        with self._lock:
            trainer, active = self._trainer, self._active
            code = self._code if active else None
            if trainer is not None and trainer.process is not None and active:
                code = ended_with(trainer.process)
            self._trainer, self._active = None, 0
            if trainer is not None and trainer.given:
                self._dismiss(trainer, reason)
            elif trainer is not None:
                self._waiting = trainer
            if waiting and self._waiting is not None:
                trainer, self._waiting = self._waiting, None
                self._dismiss(trainer, reason)
            return code

    def _dismiss(self, trainer: AttachedTrainer, reason: str) -> None:
        if trainer.process is not None:
            self._kill(trainer, trainer.process)
            return
        trainer.send("detached", {"reason": self._farewell(reason)})
        if trainer.outbox is not None:
            trainer.outbox.close(link=True)
        self._tell("attachment")

    def _kill(self, trainer: AttachedTrainer, process: subprocess.Popen) -> None:
        process.kill()
        trainer.start = None
        if trainer.ident in self._known and trainer.ident not in self._dying:
            self._dying.add(trainer.ident)
            threading.Thread(target=self._bury, args=(trainer,), daemon=True).start()

    def _bury(self, trainer: AttachedTrainer) -> None:
        """On a thread: a process that does not end is given up."""
        if trainer.ended.wait(KILL_S):
            return
        logger.warning(
            "trainer process %d of %s still runs %.0f s after SIGKILL (state %s): it "
            "is given up, and another takes its slot. What it has of devices and of "
            "memory stays taken until the machine lets go of it.",
            *(trainer.pid, self._host, KILL_S, state_letter(trainer.pid)),
        )
        self._ended(trainer, -signal.SIGKILL)

    def _farewell(self, reason: str) -> str:
        return (
            f"the agent of host {self._host} (job {self._job!r}) has let go of this "
            f"process: {reason.rstrip('. ')}. What was committed stays in the agents' "
            "memory: restart all processes of the job"
        )

    def close(self) -> None:
        """Ends listening and every trainer, and waits for that, but not for ever."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the accepting goes on
        self._listener.close()
        self.let_go("the agent ends", waiting=True)
        with self._lock:
            left = list(self._known.values())
        until = time.monotonic() + KILL_S
        for trainer in left:
            if trainer.process is not None:
                trainer.process.kill()
                trainer.ended.wait(max(0.0, until - time.monotonic()))
            elif trainer.outbox is not None:
                trainer.outbox.join(SEND_S)


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
