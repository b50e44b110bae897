"""The trainers of one host: attaching, messages, formations and ending.

A trainer is either a process that this agent has started, or a process of the user's.
It attaches over the agent's Unix socket. A user's process is accepted unless there is a
reason to refuse it (`Objection`) or another of the user's processes is attached.

To end a trainer (`Trainers.let_go`), a process of this agent is killed, and a user's
process is sent the reason. A process of this agent can also be made to give up its slot
and to go on without one (`Trainers.leave`). Only `Trainers.close` waits for trainers:
outgoing messages wait in a queue, and a thread waits for each killed process. A process
that still runs 10 s after SIGKILL is given up.
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
"""Seconds for which a send to a trainer that does not read may block. Then the link is
closed, and a process that the agent started is killed."""
KILL_S = 10.0
"""Seconds after SIGKILL until a process that still runs is given up."""
ABSENT = -1
"""`AttachedTrainer.index` of a process that the agent started. Also the ident in the
"trainer_exit" event that reports that no trainer could be given the slot."""

Emit = Callable[..., None]

STREAMED_BYTES = 2 << 20
"""Size in bytes from which a trainer's copies of memory go past the caches."""
TUNABLES = "GLIBC_TUNABLES"
"""Environment variable with the settings of the C library."""
_STREAMED_FROM = "glibc.cpu.x86_non_temporal_threshold"


def with_streamed_copies(tunables: str) -> str:
    """Returns a value of GLIBC_TUNABLES that makes large copies go past the caches.

    Such a copy writes memory without reading it first. glibc does this from a size on
    that it derives from the size of the last cache. A virtual machine may show its few
    processors the whole cache of the physical machine; the copy of a chunk into the
    arena is then below that size, and takes longer. A size that the user has set stays.

    Args:
        tunables: the present value of the environment variable; "" if it is not set.

    >>> with_streamed_copies("glibc.malloc.check=1")
    'glibc.malloc.check=1:glibc.cpu.x86_non_temporal_threshold=2097152'
    """
    if _STREAMED_FROM in tunables:
        return tunables
    return ":".join(filter(None, (tunables, f"{_STREAMED_FROM}={STREAMED_BYTES}")))


@dataclass(frozen=True, kw_only=True)
class Command:
    """Command line, environment and log with which an agent starts its trainers."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path

    @classmethod
    def of(cls, config: AgentConfig) -> "Command":
        """Builds the command from the settings of a host of a launched job."""
        return cls(
            arguments=config.trainer_command,
            environment={
                **os.environ,
                TUNABLES: with_streamed_copies(os.environ.get(TUNABLES, "")),
                **config.trainer_environment,
                AGENT_SOCKET_VARIABLE: str(config.memory_directory / AGENT_SOCKET),
            },
            log=config.run_directory / "logs" / f"{config.host}.trainer.log",
        )

    def run(self) -> subprocess.Popen:
        """Starts a trainer process, which is killed when the calling thread ends."""
        with open_log(self.log) as log:
            return subprocess.Popen(
                self.arguments,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=die_with_parent,
            )


Objection = Callable[[Mapping[str, Any]], str | None]
"""Maps the `attach` message of a user's process to the reason to refuse the process;
None accepts it."""


def _nobody(message: Mapping[str, Any]) -> str | None:
    raise ValueError(f"process {message['pid']} was not started by this agent")


@dataclass(kw_only=True, eq=False)
class AttachedTrainer:
    """One trainer, started by this agent or by the user."""

    ident: int
    """Wall-clock time in ns of the start or attachment; unique among trainers."""
    pid: int
    index: int = ABSENT
    """Index of a user's process in the user's job; `ABSENT` for an agent's process."""
    process: subprocess.Popen | None = None
    link: AgentLink | None = None
    outbox: Outbox | None = None
    """Queue of outgoing messages; set with `link` once the trainer has attached."""
    orders: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    """Orders (op and fields) that are not sent yet, oldest first."""
    world: int = 0
    """Number of the world (set of connected JAX processes) that an agent's process has
    joined or is joining, see `train.world`; 0 for none."""
    place: int = 0
    """Index, in the world `world`, of an agent's process."""
    joined: bool = False
    """Whether an agent's process has joined the world `world`; False for a process that
    got a slot before it had joined, until it gives up this slot."""
    given: bool = False
    """Whether the trainer is in use: an agent's process was assigned a slot, or a
    user's process was sent the restorable step. While in use, it cannot be given
    another slot."""
    left: bool = False
    """Whether the trainer has sent `left` (the process leaves the job)."""
    is_ending: bool = False
    """Whether the trainer has sent `ending`: an exception ends the trainer, which then
    waits to be killed and obeys no order. A trainer that has only sent `failed`, such
    as after a broken collective, still obeys the order to give up its slot."""
    ended: threading.Event = field(default_factory=threading.Event)

    def send(self, op: str, fields: Mapping[str, Any]) -> None:
        """Queues a message to the trainer.

        Drops the message if the trainer has not attached; does not raise if the trainer
        has exited.
        """
        if self.outbox is not None:
            self.outbox.send(op, **fields)


class Trainers:
    """The trainers of one host: at most one active, one waiting and one member.

    An ident is a number that identifies a trainer (`AttachedTrainer.ident`).

    The active trainer has the host's slot. It is also called the formation's trainer,
    as each formation (assignment of hosts to slots) has one trainer for each slot.

    A member has no slot but is in a world (set of connected JAX processes): it has
    given up its slot, or its host is a spare. A waiting trainer is in no world.

    Emits these events once `bind` was called:

    * ("trainer", ident, message): the trainer with this ident has sent a message.
    * ("trainer_exit", ident, code): a trainer has ended. For a process that the agent
      started, `code` is the return code. For a user's process, `code` is 1 if the
      process had sent `left`, else 0.
    * ("standby_exit", code): a waiting trainer that the agent started has ended by
      itself, with this return code.
    * ("attachment",): a user's process has attached or gone.
    * ("left_slot", number, code): the trainer has given up its slot as ordered
      (`leave`), or has ended before. `number` identifies the order. `code` is the
      trainer's return code if it has ended by itself, else None.
    * ("joined", world): the member has joined a world.
    * ("rehearsed", fields): a trainer in a world has compiled a step ahead; `fields`
      are those that the report to the leader gets.
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
            socket_path: path of the Unix socket where trainers attach.
            job: name of the job.
            host: name of this host.
            deadline_s: seconds that a trainer waits at most for an answer of this
                agent.
            command: starts trainers; None if the user starts the trainers.
            objection: returns the reason to refuse a process that this agent has not
                started; None to accept the process. By default the link of such a
                process is closed without a reason.
        """
        self.path, self._job, self._host = socket_path, job, host
        self._deadline_s, self._command = deadline_s, command
        self._objection = objection
        self._lock = threading.RLock()
        self._known: dict[int, AttachedTrainer] = {}
        """Ident to trainer, of all trainers that have neither ended nor been given
        up."""
        self._trainer: AttachedTrainer | None = None
        """The formation's trainer; None once it has ended or was let go."""
        self._active = 0
        """Ident of the formation's trainer. `ABSENT` if none could be taken; 0 once
        `exited` has reported the trainer's end, and after `let_go`."""
        self._code: int | None = None
        """Exit code of the formation's trainer; None while it runs."""
        self._waiting: AttachedTrainer | None = None
        self._member: AttachedTrainer | None = None
        self._leaving: tuple[AttachedTrainer, int] | None = None
        """The trainer that gives up its slot, and the number of the order."""
        self._dying: set[int] = set()
        """Idents of killed trainers that still run. Until they have ended or are given
        up, no trainer is sent its `start` message."""
        self._events: list[tuple[Any, ...]] = []
        self._emit: Emit | None = None
        self._listener = listen_for_links(socket_path)
        serve_links(self._listener, self._hear, SEND_S)

    def bind(self, emit: Emit) -> None:
        """Sends all events to `emit`, beginning with the events stored until now."""
        with self._lock:
            for event in self._events:
                emit(*event)
            self._emit = emit

    def _tell(self, *event: Any) -> None:
        """Emits an event, or stores it until there is a receiver (`bind`).

        The caller has the lock of this object.
        """
        (self._emit or (lambda *told: self._events.append(told)))(*event)

    @property
    def pid(self) -> int:
        """Process id of the trainer that has this host's slot; 0 for none."""
        trainer = self._trainer
        return trainer.pid if trainer is not None else 0

    @property
    def membership(self) -> tuple[int, int, bool]:
        """World of the member, its index there, and whether it has joined by now.

        A member is a trainer without a slot in a world (set of connected JAX
        processes), or a trainer that was ordered to join a world. The world is its
        number. (0, 0, False) if there is no member.
        """
        with self._lock:
            if (found := self._member) is None:
                return 0, 0, False
            return found.world, found.place, found.joined

    @property
    def attachment(self) -> tuple[int, int]:
        """(index in the job, ident) of the user's process that is attached.

        (-1, 0) if none is.
        """
        with self._lock:
            found = self._attached
            return (found.index, found.ident) if found else (ABSENT, 0)

    @property
    def waiting(self) -> int:
        """Ident of the waiting trainer; 0 for none.

        A user's process that has a slot, but was not yet sent the step that it can
        restore, counts as waiting.
        """
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
                    with self._lock:  # an attached process is visible here
                        taken = self._attached.pid if self._attached else 0
                    link.send("agent", job=self._job, host=self._host, taken_by=taken)
                elif message["op"] == "attach":
                    trainer = self._welcome(message, link)
                else:
                    break
        except (OSError, KeyError, TypeError, ValueError):  # LinkClosed is an OSError
            pass  # the process has gone, or sent an invalid message
        link.close()
        if trainer is not None and trainer.outbox is not None:
            trainer.outbox.close()
        if trainer is not None and trainer.process is None:
            self._ended(trainer, int(trainer.left))

    def _heard(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        with self._lock:
            trainer.left = trainer.left or message["op"] == "left"
            if message["op"] == "ending":
                trainer.is_ending = True
            elif message["op"] == "left_slot":
                self._has_left(trainer, message["number"])
            elif message["op"] == "joined":
                trainer.joined = True
                if trainer is self._member:
                    self._tell("joined", trainer.world)
            elif message["op"] == "rehearsed":
                told = {key: value for key, value in message.items() if key != "op"}
                self._tell("rehearsed", told)
            else:
                self._tell("trainer", trainer.ident, message)

    def _has_left(self, trainer: AttachedTrainer, number: int) -> None:
        if self._leaving != (trainer, number):
            return  # killed meanwhile
        self._leaving, trainer.given = None, False
        self._member, trainer.joined = trainer, True
        self._tell("left_slot", number, None)

    def _welcome(
        self, message: dict[str, Any], link: AgentLink
    ) -> AttachedTrainer | None:
        """Accepts an attaching process and returns its trainer.

        `message` is the process's first message, and `link` the connection to the
        process. If the process is refused, sends it the reason and returns None.
        """
        started = self._started(message["pid"])
        error = None if started else self._objection(message)
        with self._lock:
            taken = error is None and started is None and self._attached is not None
            if taken:
                error = self._taken()
            if error is None:
                return self._take(started, message, link)
        link.send("refused", error=error, taken=taken)  # may block, so without the lock
        return None

    def _take(
        self, started: AttachedTrainer | None, message: dict[str, Any], link: AgentLink
    ) -> AttachedTrainer:
        """Accepts an attaching process; the caller has the lock of this object.

        Args:
            started: the trainer, if this agent has started the process; None for a
                user's process.
            message: the process's first message, with its pid.
            link: the connection to the process.
        """
        if started is None:
            trainer = AttachedTrainer(
                ident=time.time_ns(), pid=message["pid"], index=message["process"]
            )
            self._waiting = self._known[trainer.ident] = trainer
        else:
            trainer = started
        trainer.link = link
        trainer.outbox = Outbox(
            link, lambda error: self._failed(trainer, error), at_once=True
        )
        trainer.send(
            ATTACHED,
            {"job": self._job, "host": self._host, "deadline_s": self._deadline_s},
        )
        self._begin(trainer)
        if started is None:
            self._tell("attachment")
        return trainer

    def _started(self, pid: int) -> AttachedTrainer | None:
        """Returns the trainer that this agent has started as process `pid`.

        None if there is none, or if it has already attached or ended.
        """
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
        """Closes a trainer's link after a failed send.

        Also kills a trainer that this agent has started and that does not read.
        """
        assert trainer.link is not None
        trainer.link.close()  # the receiving thread reports a user's process
        if trainer.process is not None and isinstance(error, NotReading):
            logger.warning(
                "trainer process %d read nothing for %d s while a message for it "
                "waited: it is killed",
                *(trainer.pid, SEND_S),
            )
            with self._lock:
                self._kill(trainer, trainer.process)

    # ---------------------------------------------------------------- beginning

    def ensure_standby(self) -> None:
        """Starts a standby trainer, unless one waits or the user starts trainers.

        Raises:
            OSError: the process cannot be started.
        """
        with self._lock:  # the trainer may end at once
            if self._command is not None and self._waiting is None:
                self._waiting = self._spawn(self._command)

    def _spawn(self, command: Command) -> AttachedTrainer:
        with self._lock:  # the trainer may attach at once
            process = command.run()
            trainer = AttachedTrainer(
                ident=time.time_ns(), pid=process.pid, process=process
            )
            self._known[trainer.ident] = trainer
        args = trainer, process
        threading.Thread(target=self._await_end, args=args, daemon=True).start()
        return trainer

    def start(self, message: Mapping[str, Any]) -> None:
        """Chooses the trainer for this host's slot in a new assignment, and starts it.

        The member (a trainer without a slot in a world of JAX processes) is taken if
        the message names its world and its index there; else the waiting trainer; else
        a new process. A member that is not taken is killed. If the user starts trainers
        and none waits, a "trainer_exit" event is emitted.

        Args:
            message: the fields of the slot's `start` message, among them `world`, which
                has the `number` of the world and the `index` there. Only sent to a
                process that this agent started.

        Raises:
            OSError: a new trainer cannot be started.
        """
        with self._lock:
            trainer = self._member_of(message["world"]) or self._next
            if trainer is None and self._command is not None:
                trainer = self._spawn(self._command)
            if trainer is self._member:
                self._member = None
            else:
                self._waiting = None
            self._trainer = trainer
            self._active = ABSENT if trainer is None else trainer.ident
            self._code = None
            if trainer is None:
                self._tell("trainer_exit", ABSENT, 0)
            elif trainer.process is not None:
                trainer.given, trainer.world = True, message["world"]["number"]
                trainer.place = message["world"]["index"]
                self._order(trainer, "start", message)

    def _member_of(self, world: Mapping[str, Any]) -> AttachedTrainer | None:
        """Returns the member if it has the given index in the given world.

        The member is a trainer without a slot in a world of JAX processes. `world` has
        the `number` of a world and the `index` of a process in it. If the member is
        another process, kills it and returns None. Returns None without a member.
        """
        member, wanted = self._member, (world["number"], world["index"])
        if member is None or (member.world, member.place) == wanted:
            return member
        self._member = None
        self._dismiss(member, "")
        return None

    def join(self, world: Mapping[str, Any]) -> None:
        """Makes the waiting trainer join a world of JAX processes, without a slot.

        A trainer without a slot in a world is called the member. If there is a member
        with this index in this world, or if the user starts the trainers, does nothing.
        Otherwise kills the member that there is, and starts a trainer if none waits.

        Args:
            world: the world's `number`, the `index` of this host's process in the
                world, and what the process needs to connect, such as the address of the
                coordination service (see `train.world.World.join`).

        Raises:
            OSError: a new trainer cannot be started.
        """
        with self._lock:
            if self._command is None or self._member_of(world) is not None:
                return
            trainer = self._waiting or self._spawn(self._command)
            self._member, self._waiting = trainer, None
            trainer.world, trainer.place = world["number"], world["index"]
            self._order(trainer, "join", {"world": world})

    def rehearse(self, world: int, fields: Mapping[str, Any]) -> None:
        """Passes the order to compile steps ahead to the trainer in this world, if any.

        `world` is the number of the world (set of connected JAX processes). `fields`
        are the arguments `turn`, `formations` and `items` of `Follower.rehearse`: the
        assignments that may follow, and the trainers' plan.
        """
        with self._lock:
            for trainer in (self._trainer, self._member):
                if trainer is not None and trainer.world == world:
                    self._order(trainer, "rehearse", fields)

    def share(self, keys: Mapping[str, str]) -> None:
        """Passes entries of other hosts' coordination services to this host's trainer.

        `keys` maps the name of each key-value entry to its value. By these entries JAX
        processes find each other. Does nothing if this host has no active trainer, or
        if the user started it.
        """
        with self._lock:
            if self._trainer is not None and self._trainer.process is not None:
                self._order(self._trainer, "keys", {"keys": keys})

    def leave(self, number: int, world: int) -> bool:
        """Orders the active trainer to give up its slot and to keep its process.

        A "left_slot" event follows once the trainer has given up its slot or has ended.
        A trainer that still has not carried out an earlier `leave` is killed.

        Args:
            number: identifies the order; the event has the same number.
            world: number of the world (set of connected JAX processes) in which the
                trainer must be.

        Returns:
            True if the order was sent. False if there is no active trainer that this
            agent has started and that is in this world, or if the trainer has not
            attached, has ended, or is ending because of an exception.
        """
        with self._lock:
            trainer = self._trainer
            if trainer is None or trainer.process is None or trainer.outbox is None:
                return False
            if trainer.is_ending:  # it would be waited for until `end_leaving`
                return False
            if ended_with(trainer.process) is not None or trainer.world != world:
                return False
            if self._leaving is not None:  # its order is given up: nobody waits for it
                self._dismiss(self._leaving[0], "")
            self._trainer, self._active = None, 0
            self._leaving, trainer.orders = (trainer, number), []
            trainer.send("leave", {"number": number})
            return True

    def leaving_pid(self, number: int) -> int:
        """Returns the process id of a trainer that was ordered to give up its slot.

        `number` identifies the order, see `leave`. Returns 0 if the trainer has given
        up its slot or has ended.
        """
        with self._lock:
            if self._leaving is not None and self._leaving[1] == number:
                return self._leaving[0].pid
            return 0

    def end_leaving(self, number: int) -> None:
        """Kills the trainer that was ordered to give up its slot and still has it.

        `number` identifies the order (`leave`). A "left_slot" event follows. Does
        nothing if the trainer has given up its slot or has ended.
        """
        with self._lock:
            if self._leaving is not None and self._leaving[1] == number:
                self._dismiss(self._leaving[0], "")

    def _order(
        self, trainer: AttachedTrainer, op: str, fields: Mapping[str, Any]
    ) -> None:
        trainer.orders.append((op, fields))
        self._begin(trainer)

    def _begin(self, trainer: AttachedTrainer) -> None:
        """Sends a trainer the orders that wait for it, if the trainer can begin now.

        The trainer must have attached, and no killed trainer may still run: a process
        that is still ending may hold the devices and the shared memory.
        """
        if trainer.outbox is None or self._dying:
            return
        orders, trainer.orders = trainer.orders, []
        for op, fields in orders:
            trainer.send(op, fields)

    def formed(self, **fields: Any) -> None:
        """Sends the user's process the step that it can restore, so that it continues.

        `fields` are `source` (where the state comes from: "memory", "storage" or
        "init") and `step` (the restorable step).
        """
        with self._lock:
            if self._trainer is not None:
                self._trainer.given = True
                self._trainer.send("formed", fields)

    def is_active(self, ident: int) -> bool:
        """Whether `ident` identifies the trainer that has this host's slot.

        False once that trainer's end was recorded (`exited`).
        """
        return ident == self._active != 0

    def send(self, op: str, **fields: Any) -> None:
        """Sends a message to the active trainer; drops it if none is attached.

        `op` is the kind of the message.
        """
        if (trainer := self._trainer) is not None:
            trainer.send(op, fields)

    def note(self, text: str) -> None:
        """Sends `text`, the reason for waiting, to the user's process that waits.

        Drops the text if no user's process waits.
        """
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
        """Forgets a trainer that has ended or is given up; emits "trainer_exit".

        Does nothing in a second call for the same trainer. `code` is the return code of
        a process of this agent; for a user's process, 1 if it had said that it leaves
        the job, else 0.
        """
        with self._lock:
            if self._known.pop(trainer.ident, None) is None:
                return  # the trainer was given up before
            was_killed = trainer.ident in self._dying
            self._dying.discard(trainer.ident)
            was_attached = trainer is self._attached
            was_standby = trainer is self._waiting and trainer.process is not None
            self._waiting = None if trainer is self._waiting else self._waiting
            self._trainer = None if trainer is self._trainer else self._trainer
            self._member = None if trainer is self._member else self._member
            if self._leaving is not None and self._leaving[0] is trainer:
                number, self._leaving = self._leaving[1], None
                self._tell("left_slot", number, None if was_killed else code)
            self._code = code if trainer.ident == self._active else self._code
            if was_attached:
                self._tell("attachment")
            for other in (self._trainer, self._member):
                if other is not None:
                    self._begin(other)
            self._tell("trainer_exit", trainer.ident, code)
            if was_standby and not was_killed:
                self._tell("standby_exit", code)

    def exited(self, ident: int) -> bool:
        """Records a trainer's end; returns whether the trainer had this host's slot.

        `ident` identifies the ended trainer. If it had the slot, no trainer has the
        slot afterwards, so a second call returns False.
        """
        with self._lock:
            was_active = self.is_active(ident)
            self._active = 0 if was_active else self._active
            return was_active

    def let_go(self, reason: str = "", *, waiting: bool = False) -> int | None:
        """Ends the active trainer: kills it if the agent started it, else detaches it.

        A user's process that was not yet sent the step that it can restore is not
        detached, but waits for the next assignment of slots.

        Args:
            reason: why the trainer is ended; sent to a user's process.
            waiting: whether the waiting trainer, the member and a trainer that is
                giving up its slot are ended too.

        Returns:
            The exit code of an active trainer that has ended already, if its end was
            not recorded yet (`exited`). None in every other case.
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
            if waiting:
                for idle in (self._waiting, self._member):
                    if idle is not None:
                        self._dismiss(idle, reason)
                if self._leaving is not None:
                    self._dismiss(self._leaving[0], reason)
                self._waiting = self._member = None
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
        trainer.orders = []
        if trainer.ident in self._known and trainer.ident not in self._dying:
            self._dying.add(trainer.ident)
            threading.Thread(target=self._bury, args=(trainer,), daemon=True).start()

    def _bury(self, trainer: AttachedTrainer) -> None:
        """Waits for a killed process to end; gives the process up after 10 s.

        The limit is `KILL_S`. A process that was given up counts as ended. Runs on a
        separate thread.
        """
        if trainer.ended.wait(KILL_S):
            return
        logger.warning(
            "trainer process %d of %s still runs %.0f s after SIGKILL (state %s): it "
            "is given up, and another trainer takes its slot. Its devices and its "
            "memory are not free until the process has ended.",
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
        """Stops listening and ends every trainer.

        Waits at most 10 s (`KILL_S`) in all for killed processes, and at most 5 s
        (`SEND_S`) for each user's process to receive the message that this agent ends.
        """
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise accepting goes on
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
    """Returns the fields of the `start` message to a trainer.

    `order` is the leader's `prepare` order, with which this host takes its slot.

    Among the fields, `items` are the commit's items (values that are not arrays) for a
    restore from memory. `storage_step` is the step to restore from storage, from which
    the trainer then also reads the items; None if the restore is not from storage.
    """
    return {
        "slot": order["slot"],
        "num_slots": len(order["addresses"]),
        "hosts": order["hosts"],
        "generation": order["generation"],
        "attempt": order["attempt"],
        "world": {**order["world"], **joining(config)},
        "indices": order["indices"],
        "turn": order["turn"],
        "board": str(config.memory_directory / "board"),
        "run_directory": str(config.run_directory),
        "storage_directory": str(config.storage_directory),
        "storage_step": order["step"] if order["source"] == "storage" else None,
        "items": order["items"],
        "chunk_bytes": config.chunk_bytes,
    }


def joining(config: AgentConfig) -> dict[str, Any]:
    """Returns the fields that an order to join a world takes from the config.

    A world is a set of connected JAX processes. The fields are `heartbeat_s` (seconds
    without a sign of life after which a process counts as lost), `start_s` (longest
    wait for other processes in seconds), `devices` (number of CPU devices of a process)
    and `lasts` (whether the world can outlast an assignment of slots).
    """
    return {
        "heartbeat_s": config.timeouts.heartbeat,
        "start_s": config.timeouts.start,
        "devices": config.cpu_devices,
        "lasts": config.hot_swap,
    }
