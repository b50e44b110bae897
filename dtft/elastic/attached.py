"""The user's process on one host: it attaches by itself, and is let go, never killed.

Stands where `trainers.py` stands in a job whose trainers are dtft's own. At most one
process is attached. Before the agent takes part in its job this listens already, for
the first process tells the job's terms. Must not know the leader, copies or steps.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtft.checkpoint.link import Link, LinkClosed, listen, serve
from dtft.elastic.served import Terms
from dtft.elastic.store import StoreUnavailable

SEND_S = 5
"""A process that does not read for so long is let go: the agent must not wait."""
ABSENT = -1


@dataclass(kw_only=True)
class Process:
    """One attached process."""

    ident: int
    """Wall-clock time in ns at which it attached: no other process has it."""
    pid: int
    index: int
    link: Link
    given: bool = False
    """It was told what to restore, so it cannot be taken into another formation."""
    left: bool = False
    """It has said goodbye."""


class AttachedTrainers:
    """Listens for the user's process; events go to `emit` once `bind` was called.

    Emits ("trainer", ident, message), ("trainer_exit", ident, left) when the process
    has gone (left is 1 if it said goodbye), and ("attachment",) when somebody has
    attached or gone.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        job: str,
        host: str,
        processes: int | None,
        deadline_s: float,
        agree: Callable[[Terms], Terms],
    ) -> None:
        """Listens at `socket_path`.

        Args:
            socket_path: where processes attach.
            job: name of the job.
            host: name of this host.
            processes: how many the job has to have; None for any number.
            deadline_s: how long a process may wait for the others.
            agree: makes terms those of the job, or returns the ones in force.
        """
        self.path, self._job, self._host = socket_path, job, host
        self._processes, self._deadline_s, self._agree = processes, deadline_s, agree
        self._lock = threading.Lock()
        self._attached: Process | None = None
        self._active = 0
        self._events: list[tuple[Any, ...]] = []
        self._emit: Callable[..., None] | None = None
        self._listener = listen(socket_path)
        serve(self._listener, self._hear, SEND_S)

    def bind(self, emit: Callable[..., None]) -> None:
        """Events go to `emit` from now on, with those that came before."""
        with self._lock:
            for event in self._events:
                emit(*event)
            self._emit = emit

    def _tell(self, *event: Any) -> None:
        """Emits an event; the caller holds the lock."""
        if self._emit is None:
            self._events.append(event)
        else:
            self._emit(*event)

    @property
    def attachment(self) -> tuple[int, int]:
        """Index and ident of the process, (-1, 0) for none."""
        with self._lock:
            process = self._attached
            return (process.index, process.ident) if process else (ABSENT, 0)

    @property
    def waiting(self) -> int:
        """Ident of a process that can be taken into a formation, 0 for none."""
        with self._lock:
            process = self._attached
            return process.ident if process and not process.given else 0

    # --------------------------------------------------------------- attaching

    def _hear(self, link: Link) -> None:
        process = None
        try:
            while True:
                message = link.receive()
                if process is not None:
                    self._heard(process, message)
                elif message["op"] == "who":
                    with self._lock:  # whoever is told to be attached is seen here
                        taken = self._attached.pid if self._attached else 0
                    link.send("agent", job=self._job, host=self._host, taken_by=taken)
                elif message["op"] == "attach":
                    process = self._welcome(message, link)
        except (LinkClosed, KeyError, TypeError, ValueError):
            link.close()  # it has gone, or what it says has no meaning here
        if process is not None:
            with self._lock:
                self._forget(process)
                self._tell("trainer_exit", process.ident, int(process.left))

    def _forget(self, process: Process) -> None:
        """The agent is free, at once: who attaches next need not wait for events."""
        if self._attached is process:
            self._attached = None
            self._tell("attachment")

    def _heard(self, process: Process, message: dict[str, Any]) -> None:
        with self._lock:
            process.left = process.left or message["op"] == "left"
            self._tell("trainer", process.ident, message)

    def _welcome(self, message: dict[str, Any], link: Link) -> Process | None:
        """Takes a process, or tells it why not."""
        error, taken = self._objection(message), False
        with self._lock:
            if error is None and self._attached is not None:
                taken = True
                error = (
                    f"the agent of host {self._host} (job {self._job!r}) is taken by "
                    f"process {self._attached.pid}, index {self._attached.index} of "
                    "the job: one process per agent. Give each process an agent of "
                    "its own, or end that one."
                )
            if error is not None:
                link.send("refused", error=error, taken=taken)
                return None
            link.send(
                "attached", job=self._job, host=self._host, deadline_s=self._deadline_s
            )
            self._attached = process = Process(
                ident=time.time_ns(),
                pid=message["pid"],
                index=message["process"],
                link=link,
            )
            self._tell("attachment")
            return process

    def _objection(self, message: dict[str, Any]) -> str | None:
        who = f"job {self._job!r}, agent of host {self._host}"
        try:
            terms, index = Terms(**message["terms"]), int(message["process"])
            pid = int(message["pid"])
        except (TypeError, KeyError, ValueError):
            return f"{who}: the process speaks another version of dtft. Use one version"
        if self._processes is not None and terms.processes != self._processes:
            return (
                f"{who}: started with --hosts {self._processes}, but this job has "
                f"{terms.processes} processes. Start the agents with --hosts "
                f"{terms.processes}, or leave it out."
            )
        if not 0 <= index < terms.processes or pid <= 0:
            return f"{who}: process {index} of {terms.processes} (pid {pid}) is not one"
        try:
            differences = self._agree(terms).differences(terms)
        except StoreUnavailable as error:
            return f"{who}: the store does not answer ({error}). Try again."
        if differences:
            return (
                f"{who}: this process has {differences} (what the job began with). "
                "Start it with the same, or start the agents under another --job."
            )
        return None

    # ------------------------------------------------- what `Follower` calls

    def is_active(self, ident: int) -> bool:
        """Whether this is the process of the present formation."""
        return ident == self._active != 0

    def start(self, message: dict[str, Any]) -> None:
        """Takes the process that waits into a formation; none is as one that ended."""
        del message  # a trainer of dtft would need it; the user's process has its world
        with self._lock:
            process = self._attached
            absent = process is None or process.given
            self._active = ABSENT if absent or process is None else process.ident
            if absent:
                self._tell("trainer_exit", ABSENT, 0)

    def formed(self, **fields: Any) -> None:
        """Tells the process what can be restored: it goes on."""
        process = self._of_formation()
        if process is not None:
            process.given = True
            self.send("formed", **fields)

    def _of_formation(self) -> Process | None:
        process = self._attached
        return process if process and process.ident == self._active else None

    def send(self, op: str, **fields: Any) -> None:
        """Sends to the process of the formation; one that died is found by its end."""
        process = self._of_formation()
        if process is not None:
            self._send(process, op, fields)

    def note(self, text: str) -> None:
        """Tells a process that waits what it waits for."""
        process = self._attached
        if process is not None and not process.given:
            self._send(process, "note", {"text": text})

    def _send(self, process: Process, op: str, fields: dict[str, Any]) -> None:
        try:
            process.link.send(op, **fields)
        except LinkClosed:
            process.link.close()  # its thread tells

    def linked(self, ident: int, link: Link) -> None:
        """Never called: processes attach, they are not linked."""
        raise AssertionError("an attached process says no hello")

    def ensure_standby(self) -> None:
        """The user starts processes, nobody else."""

    def exited(self, ident: int) -> Literal["active", "standby", "ended"]:
        """A process has gone; says what it was."""
        with self._lock:
            was_active = ident == self._active
            self._active = 0 if was_active else self._active
            return "active" if was_active else "ended"

    def kill_active(self, reason: str = "", *, waiting: bool = False) -> None:
        """Lets the process go, with the reason; one that was told nothing yet stays.

        Args:
            reason: what has happened, for the user.
            waiting: let go of a process that waits, too.
        """
        with self._lock:
            process, self._active = self._attached, 0
            if process is None or not (process.given or waiting):
                return
            self._forget(process)
        with contextlib.suppress(LinkClosed):
            process.link.send("detached", reason=self._farewell(reason))
        process.link.close()

    def _farewell(self, reason: str) -> str:
        return (
            f"the agent of host {self._host} (job {self._job!r}) has let go of this "
            f"process: {reason.rstrip('. ')}. What was committed stays in the agents' "
            "memory: restart all processes of the job"
        )

    def close(self) -> None:
        """Ends listening and lets the process go."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the accepting goes on
        self._listener.close()
        self.kill_active("the agent ends", waiting=True)
