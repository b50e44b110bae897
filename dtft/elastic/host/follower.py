"""One host's duties in a job: carries out the leader's orders and reports.

Starts and ends the trainer, keeps the copies, replicates, restores and exports. The
leader decides slot, step and peers. All methods run on the agent's event loop; long
work runs on threads that report with events.

In a served job the trainer is a user's process, which decides when it saves and when it
restores. Once the host has a slot (and, if the leader orders a restore from memory, the
slot's slices), the process is sent the number of the step that it can restore. The
process sends its layout at its first save, and requests each step that it restores.
"""

import functools
import itertools
import logging
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtft.checkpoint.managers import AGENT_SOCKET, ProgressBoard, ProgressField
from dtft.checkpoint.memory import ReplicaStore
from dtft.checkpoint.replication import Commit
from dtft.checkpoint.state import Layout
from dtft.checkpoint.storage import ExporterProcess
from dtft.checkpoint.transport import Credentials, parse_address, start_nixl
from dtft.elastic.assignment import HostRecord
from dtft.elastic.event_loop import Loop
from dtft.elastic.hang_detection import Observation, ProgressWatch
from dtft.elastic.host.export import HostExports
from dtft.elastic.host.trainers import Command, Trainers, joining, start_message
from dtft.elastic.job import AgentConfig
from dtft.elastic.messages import known_commit
from dtft.elastic.network import Network, PortState
from dtft.elastic.processes import free_port
from dtft.elastic.reachability import try_all
from dtft.elastic.seat_policy import missing
from dtft.elastic.stack_dump import dump_stack, process_state
from dtft.elastic.transfer import (
    Copies,
    Inbox,
    Prefetcher,
    Resharding,
    SlotTask,
    restore_copies,
)

logger = logging.getLogger(__name__)

REPORTED = ("step", "digests", "interval", "window")
"""Fields of the report to the leader about a staged step."""
WANTED, FLUSHED, LEFT = ("step", "layout"), ("token", "step", "store"), ("step",)
"""Fields that are passed on to the leader from the messages of a user's process: `want`
(request of a step for another layout), `flush` (wait until a step is committed or
stored), and `left` (the process leaves)."""

_INVALID = (LookupError, AttributeError, TypeError, ValueError, struct.error)
"""Errors that a trainer's message with missing or wrong fields raises."""

Message = Mapping[str, Any]
Handler = Callable[[SlotTask, Message], None]


LOOK_S = 1.0
"""Seconds between two checks of the trainer's progress."""
WARM_S, MOST_WARM_S = 5.0, 60.0
"""Seconds until a standby trainer is started again after a failed start or after its
end. The pause begins at `WARM_S` and doubles with each failure, up to `MOST_WARM_S`. It
begins anew after `2 * MOST_WARM_S` seconds without a failure."""
LEAVE_S = 2.0
"""Seconds that a trainer has to give up its slot; then it is killed."""
STACKS_S = 0.3
"""Seconds before the end of `LEAVE_S` at which a trainer that has not given up its slot
is made to write its stacks to its log."""
ROOM_AGAIN_S = 0.5
"""Seconds between two tries to take buffers for a step, if no buffer is free."""
KEPT_COMMITS = 2
"""Number of newest commits that a host remembers, in case the store lacks commits."""
_OF_A_SLOT: tuple[ProgressField, ...] = (
    *("computing", "replicating", "committing", "exporting", "trainer_pid"),
)
"""Cells of the progress board that are 0 while this host has no slot."""


@dataclass(frozen=True, kw_only=True)
class HostParts:
    """The objects and functions through which a `Follower` acts on its host."""

    board: ProgressBoard
    trainers: Trainers
    copies: Copies
    exports: HostExports
    resharding: Resharding | None
    """Reshards steps for the user's process; None if the agent starts the trainer."""
    restore: Callable[[dict[str, Any]], dict[str, Any]]
    """Restores the slot's slices as a leader's order says, and returns the outcome: see
    `restore_copies`."""
    probe: Callable[[str, Callable[[PortState], None]], None]
    """Tries to connect to another host's port; see `Network.probe`."""
    free_port: Callable[[], int]
    observe: Callable[[int], Observation | None]
    """Returns the state of the trainer with a process id, from the progress board and
    the kernel; None if the process has ended."""
    dump_stack: Callable[[int, Path], str]
    """Makes a process write its stacks to a log file, and returns a message about it;
    takes about a second."""
    prefetcher: Prefetcher | None = None
    """Prefetches slices while this host is a spare; None: no slices are prefetched."""
    nixl: Any = None


class Follower:
    """Carries out the leader's orders on one host, and reports to the leader."""

    def __init__(
        self,
        config: AgentConfig,
        credentials: Credentials,
        parts: HostParts,
        loop: Loop,
        emit: Callable[..., None],
        report: Callable[..., None],
    ) -> None:
        """Stores the arguments; this host has no slot yet.

        Args:
            config: settings of this host's agent.
            credentials: the job's credentials.
            parts: the objects and functions through which the follower acts.
            loop: the agent's event loop.
            emit: `emit(kind, *values)` makes the event loop call `happened(kind,
                *values)`; may be called from any thread.
            report: `report(op, **fields)` sends a report to the leader.
        """
        self._config, self._credentials = config, credentials
        self._parts, self._loop = parts, loop
        self._emit, self._report = emit, report
        self._seats = config.seats
        self._board, self._trainers = parts.board, parts.trainers
        self._copies, self._exports = parts.copies, parts.exports
        self._resharding = parts.resharding
        self._task: SlotTask | None = None
        self._ballot: tuple[int, int] = (0, 0)
        self._holding = loop.lane("copies")
        """Lane (thread with a queue) on which changes and reports of this host's copies
        run one after the other."""
        self._reserving = loop.lane("reserve")
        """Lane on which memory for a later slot is allocated, which may take long."""
        self._export_attempt = 0
        """Field `failures` of the last export order: number of exports that failed or
        were replaced before in this formation."""
        self._obeyed: Mapping[str, Any] | None = None
        """The last `prepare` order that this host accepted; None before the first."""
        self._commits: list[Commit] = []
        """At most `KEPT_COMMITS` commits that this host knows, newest first."""
        self._warm_at, self._warm_s, self._warm_failed_at = 0.0, 0.0, -math.inf
        """Time of the next start of a standby, the last pause in seconds, and the time
        of the last failure."""
        self._leaves = itertools.count(1)
        self._left: tuple[int, Callable[[int | None], None]] | None = None
        """Number of the order to the trainer to give up its slot, and the function to
        call afterwards; None if no trainer is giving up its slot."""
        self._watch = ProgressWatch(config.timeouts)
        self._look_at = 0.0
        self._handlers = self._handlers_of_messages()
        self._trainers.bind(emit)

    @property
    def epoch(self) -> tuple[int, int]:
        """(generation, attempt) of the assignment that gave this host its slot.

        `attempt` numbers the starts of the trainers within one generation, from 1.
        (0, 0) without a slot.
        """
        return self._task.epoch if self._task else (0, 0)

    @property
    def ballot(self) -> tuple[int, int]:
        """(term, number) of the newest round that this host knows.

        A round is an attempt to form the job: to assign slots and start trainers. The
        term numbers the leader's time in office; the second number counts the leader's
        rounds.
        """
        return self._ballot

    @property
    def has_slot(self) -> bool:
        """Whether this host has a slot."""
        return self._task is not None

    @property
    def has_copies(self) -> bool:
        """Whether this host has copies for its slot or for a former slot."""
        return bool(self._copies.holders())

    def inbox(self) -> Inbox:
        """Returns the functions through which other threads read this host's state.

        With these functions, the threads that serve connections read the copies and
        report received slices.
        """
        return Inbox(
            epoch=lambda: self.epoch,
            holder=lambda: self._copies.holder,
            held=lambda *copy: self._emit("held", self.epoch, *copy),
            former=lambda: self._copies.former,
            nixl=self._parts.nixl,
        )

    def warm(self) -> None:
        """Starts a standby trainer, so that imports are done before a slot is taken.

        Does nothing if a trainer waits already, if the user starts the trainers, or
        during the pause of 5 s (`WARM_S`) or more after a failed start or a standby's
        end. A host without a standby starts its trainer when it gets a slot, and
        reports to the leader that it is unfit for a slot if that start fails.
        """
        if self._loop.now() < self._warm_at:
            return
        try:
            self._trainers.ensure_standby()
        except OSError as error:
            self._standby_failed(f"no standby trainer can be started ({error})")

    def standby_exited(self, code: int) -> None:
        """Delays the start of the next standby: a trainer that waits for a slot.

        The last standby has ended with the return code `code` before it got a slot. The
        pause keeps a standby that always fails from being started again at once.
        """
        self._standby_failed(
            f"the standby trainer has ended with code {code} before it got a slot (see "
            f"{self._config.trainer_log})"
        )

    def _standby_failed(self, what: str) -> None:
        """Begins the pause before the next start of a standby trainer.

        A standby trainer is a process that has started and waits for a slot.
        The pause lasts 5 s (`WARM_S`), and doubles with each further failure up to 60 s
        (`MOST_WARM_S`). After 120 s without a failure the next pause is 5 s again.
        `what` describes the failure in words; only the first of a series is logged.
        """
        now = self._loop.now()
        if now < self._warm_failed_at + 2 * MOST_WARM_S:
            self._warm_s = min(2 * self._warm_s, MOST_WARM_S)
        else:
            self._warm_s = WARM_S
            logger.warning(
                "%s: the next one is started after %.0f s. The pause doubles with each "
                "failure, up to %.0f s",
                *(what, WARM_S, MOST_WARM_S),
            )
        self._warm_failed_at, self._warm_at = now, now + self._warm_s

    @property
    def attachment(self) -> tuple[int, int]:
        """(index in the job, ident) of the attached user's process; (-1, 0) for none.

        The ident is the wall-clock time of attachment in ns.
        """
        return self._trainers.attachment

    def see(self, hosts: Collection[HostRecord]) -> None:
        """Tells a waiting user's process which processes have not attached yet.

        Does nothing if all have attached or if agents start the trainers. `hosts` are
        the registered hosts with their attached processes.
        """
        absent = missing(hosts, self._config.num_slots) if self._seats.attached else ""
        if absent:
            self._trainers.note(absent)

    # ------------------------------------------------------- orders of the leader

    def obey(self, message: dict[str, Any]) -> None:
        """Calls the method for a leader's order; does not check the order's fields.

        The kind of the order (its field `op`) decides the method. An order of a kind
        without a method here is passed to the trainer.
        """
        fields = {key: value for key, value in message.items() if key != "op"}
        if "ballot" in fields:
            fields["ballot"] = tuple(fields["ballot"])
        match message["op"]:
            case "reform":
                self.reform(**fields)
            case "reach":
                self.reach(**fields)
            case "prepare":
                self.prepare(fields)
            case "join":
                self.join(**fields)
            case "rehearse":
                self.rehearse(**fields)
            case "keys":
                self.share(**fields)
            case "replicate":
                self.replicate(**fields)
            case "release":
                self.release(**fields)
            case "expect":
                self.expect(**fields)
            case "prefetch":
                self.prefetch(**fields)
            case "export":
                self.export(fields)
            case "lend":
                self.lend(**fields)
            case op:
                self.pass_on(op, **fields)

    def happened(self, kind: str, *values: Any) -> None:
        """Passes an event of this host, with its values, to the method for its kind.

        Raises:
            ValueError: there is no such kind.
        """
        match kind:
            case "trainer":
                self.trainer_says(*values)
            case "trainer_exit":
                self.trainer_exited(*values)
            case "standby_exit":
                self.standby_exited(*values)
            case "left_slot":
                self.left_slot(*values)
            case "joined":
                self._tell("joined", world=values[0])
            case "rehearsed":
                self._tell("rehearsed", **values[0])
            case "assembled":
                self.assembled(*values)
            case "held":
                self.held(*values)
            case "exporter":
                self.exporter_says(*values)
            case _:
                raise ValueError(f"kind={kind!r}: nothing of that kind happens here")

    def committing(self, step: int) -> None:
        """Shows which step this host, as the leader, is committing; 0 for none.

        Writes the step to the progress board, which other processes on the machine
        read.
        """
        self._board.set("committing", step)

    def expect(self, layout: str, domains: list[str], committed: bool = False) -> None:
        """Reserves memory for a slot of the running job, in case a slot becomes free.

        Allocates on a thread. Then reports to the leader that this host is fit for a
        slot or, with too little memory, that it is unfit; it is then no spare. Without
        a slot, this host also ends the exporter that it has kept from its last slot.

        Args:
            layout: the job's layout as JSON.
            domains: failure domain of each slot; empty if every slot is its own domain.
            committed: whether a step was committed since slots were last assigned. If
                this host has no slot, its copies are of earlier assignments, and are
                freed first.
        """
        has_slot, epoch = self._task is not None, self._copies.epoch
        if not has_slot:
            self._exports.close()
        expected = Layout.from_json(layout)

        def reserve(freed: "Future[None] | None" = None) -> None:
            if freed is not None and (error := freed.exception()) is not None:
                logger.warning("copies of a former slot stay in memory: %r", error)
            self._reserving.submit(
                lambda: self._copies.expect(expected, domains), self._expected
            )

        if committed and not has_slot:
            self._holding.submit(lambda: self._copies.free(epoch), reserve)
        else:
            reserve()

    def prefetch(
        self, layout: str, slot: int, address: str, epoch: Sequence[int]
    ) -> None:
        """Starts to fetch a slot's slices that training does not change, ahead of need.

        This spare host may get that slot later. Ignores the order if this host has a
        slot.

        Args:
            layout: the job's layout (mesh and arrays of the state) as JSON.
            slot: the slot whose slices are fetched.
            address: "host:port" of the host that has the slot now; sends the slices.
            epoch: (generation, attempt) of the assignment that gave that host the slot.
        """
        if self._task is None and self._parts.prefetcher is not None:
            generation, attempt = epoch
            self._parts.prefetcher.start(layout, slot, address, (generation, attempt))

    def _expected(self, outcome: "Future[None]") -> None:
        error = outcome.exception()
        if error is None:
            self._tell("fit")
        else:
            self._unfit(_why(error))

    def reform(
        self,
        ballot: tuple[int, int],
        reason: str = "",
        fatal: bool = False,
        read: bool = True,
        epoch: Sequence[int] = (0, 0),
        step: int = -1,
        reach: Mapping[str, str] | None = None,
        keep: int = 0,
    ) -> None:
        """Stops training here; reports this host's copies and the unreachable hosts.

        Args:
            ballot: (term, number) of the round, a new attempt to form the job. An order
                of an earlier round is ignored.
            reason: why training stops; sent to the user's process.
            fatal: whether the running processes would fail again; then a trainer that
                waits without a slot is ended too.
            read: whether copies are read and checked against their digests for the
                report.
            epoch: (generation, attempt) of the newest assignment that the leader knows.
                A later one that this host knows is added to the report.
            step: step of the newest commit that the leader knows, -1 for none. Later
                commits that this host knows are added to the report.
            reach: maps the name of each host to which this host tries to connect to its
                address; None for no host.
            keep: number of the world (set of connected JAX processes) whose trainers
                give up their slots and keep their processes; 0 for none. A trainer of
                another world is killed.
        """
        if ballot < self._ballot:
            return
        former, self._ballot = self._ballot, ballot
        self._board.set("recovering", 1)
        has_left: list[bool] = []
        code = self._stand_down(reason, fatal, keep, lambda code: left(code))
        if code is not None:  # this exit may have caused the failures of other hosts
            self._tell_exit(code, former)
        told = {
            "finished": self._board.get("finished"),
            "export_port": self._parts.free_port(),
            "commits": [it.to_json() for it in self._commits if it.step > step],
        }
        obeyed = self._obeyed
        if obeyed is not None and _epoch_of(obeyed) > tuple(epoch):
            told["assignment"] = obeyed["assignment"]
        if self._seats.attached:
            told["attached_ns"] = self._trainers.waiting
        outcomes: list[Future[dict[str, Any]]] = []

        def tell() -> None:
            if outcomes and "missed" in told and has_left:
                world, place, has_joined = self._trainers.membership
                told.update(world=world, place=place, joined=has_joined)
                self._tell_holdings(ballot, outcomes[0], told)

        def left(code: int | None) -> None:
            if code is not None:  # its end may have caused the failures of other hosts
                self._tell_exit(code, former)
            has_left.append(True)
            tell()

        def listed(outcome: "Future[dict[str, Any]]") -> None:
            outcomes.append(outcome)
            tell()

        def tried(missed: list[str]) -> None:
            told["missed"] = missed
            tell()

        if self._left is None:
            has_left.append(True)
        self._holding.submit(lambda: self._copies.report(read), listed)
        try_all(self._parts.probe, reach or {}, tried)

    def left_slot(self, number: int, code: int | None) -> None:
        """Continues a `reform` order after the trainer has given up its slot or ended.

        Args:
            number: identifies the order with which this host made the trainer give up
                its slot. Nothing happens if this host no longer waits for this order.
            code: return code of a trainer that has ended by itself, else None.
        """
        if self._left is not None and self._left[0] == number:
            _, then = self._left
            self._left = None
            then(code)

    def join(self, ballot: tuple[int, int], world: Mapping[str, Any]) -> None:
        """Makes this spare host's trainer join a world, without a slot.

        A world is a set of connected JAX processes. Also ends the exporter that this
        host has kept from its last slot. If this host has a slot from an earlier round
        (attempt to form the job) than that of the order, it has missed that it lost
        this slot, and gives it up. Ignores the order if this host has a slot from this
        round, or if the order is of an earlier round than this host knows.

        Args:
            ballot: (term, number) of the round.
            world: the world's `number`, `size` (number of processes) and `address` of
                its coordination service, and the `index` of this host's process.
        """
        is_of_now = self._task is not None and ballot == self._ballot
        if ballot < self._ballot or is_of_now:
            return
        if self._task is not None:
            self._stand_down()
        self._ballot = ballot
        self._board.set("recovering", 0)
        self._exports.close()
        try:
            self._trainers.join({**world, **joining(self._config)})
        except OSError as error:
            self._unfit(f"a trainer cannot be started: {error}")

    def reach(self, ballot: tuple[int, int], reach: Mapping[str, str]) -> None:
        """Tries to connect to hosts, and reports to the leader which it cannot reach.

        Args:
            ballot: (term, number) of the round, an attempt to form the job; the report
                names it.
            reach: maps the name of each host to its address.
        """
        told = functools.partial(self._report, "reached", ballot=ballot)
        try_all(self._parts.probe, reach, lambda missed: told(missed=missed))

    def _report_of(self, outcome: "Future[dict[str, Any]]") -> dict[str, Any]:
        """Returns this host's report of its copies, for the leader.

        `outcome` is the finished future whose result is this report. If it has an
        exception instead, returns a report that lists no copy and names all copies of
        this host as corrupt.
        """
        error = outcome.exception()
        if error is None:
            return outcome.result()
        logger.error(
            "this host's copies cannot be listed; the leader is told that it has none",
            exc_info=error,
        )
        lost = f"{self._config.host}: all copies: {error}"
        return {"layouts": [], "holdings": {}, "items": {}, "corrupt": [lost]}

    def _tell_holdings(
        self,
        ballot: tuple[int, int],
        outcome: "Future[dict[str, Any]]",
        told: dict[str, Any],
    ) -> None:
        if ballot == self._ballot:  # otherwise a newer round has asked again
            self._tell("holdings", **self._report_of(outcome), **told)

    def rehearse(
        self,
        ballot: tuple[int, int],
        world: int,
        turn: int,
        formations: list[list[int]],
        items: Mapping[str, Any],
    ) -> None:
        """Makes the trainer compile steps ahead, for assignments that may follow.

        Does nothing if the order is of another round than the newest one, or if the
        trainer is not in this world.

        Args:
            ballot: (term, number) of the round, an attempt to form the job.
            world: number of the world, the set of connected JAX processes.
            turn: number of the next assignment of slots in this world, from 0.
            formations: for each assignment that may follow, a list with an entry per
                slot: the index in the world of the process that would fill the slot.
            items: JSON values of the checkpoint that record the trainers' plan.
        """
        if ballot == self._ballot:
            fields = {"turn": turn, "formations": formations, "items": items}
            self._trainers.rehearse(world, fields)

    def share(self, ballot: tuple[int, int], keys: Mapping[str, str]) -> None:
        """Passes entries of another host's coordination service to the trainer.

        If each JAX process has a JAX coordination service of its own, the processes
        find each other by these entries, which the trainer writes into its service.

        Args:
            ballot: (term, number) of the order's round, an attempt to form the job. An
                order of another round than the newest one is ignored.
            keys: maps the name of each key-value entry to its value.
        """
        if ballot == self._ballot:
            self._trainers.share(keys)

    def _stand_down(
        self,
        reason: str = "",
        fatal: bool = False,
        keep: int = 0,
        left: Callable[[int | None], None] = lambda code: None,
    ) -> int | None:
        """Gives up this host's slot: ends its trainer, pushes and exports.

        An idle exporter may be kept for the next slot (`HostExports.stand_down`).

        Args:
            reason: why; sent to the user's process.
            fatal: whether a waiting trainer is ended too, also without a slot.
            keep: number of the world (set of connected JAX processes) whose trainer
                keeps its process; 0 for none.
            left: called once the kept trainer has given up its slot, or has ended. Its
                argument is the return code of a trainer that has ended by itself, else
                None.

        Returns:
            The exit code of this slot's trainer, if the trainer had already ended and
            its end was not reported to the leader yet; else None.
        """
        code = None
        task, self._task = self._task, None
        self._copies.has_slot = False
        if task is not None:
            task.stop_pushers()
        if self._resharding is not None:
            self._resharding.free()
        if self._left is not None and keep and not fatal:
            self._left = self._left[0], left
        elif task is not None or fatal or self._left is not None:
            self._left = None
            if not (keep and not fatal and self._leave(keep, left)):
                code = self._trainers.let_go(reason, waiting=fatal)
        self._exports.stand_down()
        self._board.enter("", 0)
        for name in _OF_A_SLOT:
            self._board.set(name, 0)
        return code

    def _leave(self, world: int, left: Callable[[int | None], None]) -> bool:
        """Orders the trainer to give up its slot, and to keep its process.

        A trainer that has not given up its slot after 2 s (`LEAVE_S`) is killed; it
        writes its stacks to its log 0.3 s (`STACKS_S`) earlier.

        Args:
            world: number of the world (set of connected JAX processes) in which the
                trainer must be.
            left: called once the trainer has given up its slot, or has ended. Its
                argument is the return code of a trainer that has ended by itself, else
                None.

        Returns:
            Whether the order was sent. False if this host's slot has no trainer in this
            world that can obey, for example because it has ended.
        """
        number = next(self._leaves)
        if not self._trainers.leave(number, world):
            return False
        self._left = number, left
        self._loop.call_later(LEAVE_S - STACKS_S, self._dump_if_leaving, number)
        self._loop.call_later(LEAVE_S, self._trainers.end_leaving, number)
        return True

    def _dump_if_leaving(self, number: int) -> None:
        pid = self._trainers.leaving_pid(number)
        if pid:
            logger.warning(
                "the trainer (pid %d) has not given up its slot yet: it writes its "
                "stacks to its log, and is killed in %.1f s",
                *(pid, STACKS_S),
            )
            self._dump_stacks(pid)

    def _dump_stacks(self, pid: int) -> None:
        log = self._config.trainer_log
        self._loop.aside(
            lambda: self._parts.dump_stack(pid, log),
            lambda outcome: logger.warning("%s", outcome.result()),
        )

    def _tell(self, op: str, **fields: Any) -> None:
        """Sends a report to the leader; adds `ballot`, the newest round known here."""
        self._report(op, ballot=self._ballot, **fields)

    def retire(self) -> None:
        """Gives up the slot, so that this host becomes a spare.

        The host keeps its copies until a later order replaces or frees them.
        """
        self._stand_down()
        self._exports.close()
        self._board.set("recovering", 0)
        self.warm()

    def prepare(self, order: dict[str, Any]) -> None:
        """Takes the slot that a `prepare` order gives this host; starts the trainer.

        If the order restores from memory, also restores the slot's slices, on a thread.
        Ignores an order of an earlier round (attempt to form the job) than this host
        knows.
        """
        if tuple(order["ballot"]) < self._ballot:
            return
        self._ballot = tuple(order["ballot"])
        self._stand_down()
        self._exports.keep_only(order["slot"])
        if self._parts.prefetcher is not None:
            self._parts.prefetcher.stop()
        self._task = task = SlotTask(order=order)
        self._copies.epoch, self._copies.has_slot = task.epoch, True
        self._board.set("generation", order["generation"])
        self._board.set("attempt", order["attempt"])
        self._board.set("finished", order["step"])
        self._board.set("committed", order["step"])  # kept until a newer commit
        self._board.set("staged", 0)
        self._board.set("recovering", 1)
        self._obeyed = order
        self._board.enter("start", int(self._loop.now() * 1e9))
        self._watch.begin()
        try:
            self._trainers.start(start_message(self._config, order))
        except OSError as error:
            self._unfit(f"a trainer cannot be started: {error}")
            return
        if order["source"] == "memory":
            self._loop.aside(
                lambda: self._parts.restore(order),
                lambda outcome: self._has_restored(task, outcome),
            )
        else:
            self._restored(task, {"own": 0, "peers": 0, "s": 0.0})

    def _has_restored(self, task: SlotTask, outcome: "Future[dict[str, Any]]") -> None:
        """Handles the end of a restore; ignores the restore of a former slot.

        Such a restore may have found its memory freed. The arguments are the slot for
        which slices were restored, and the restore that has ended.
        """
        if task is self._task:
            self._restored(task, _outcome(outcome))

    def _restored(self, task: SlotTask, outcome: dict[str, Any]) -> None:
        """Reports a restore's outcome.

        After success, also sends the trainer the state's location, or the user's
        process the step that it can restore.

        Args:
            task: the slot for which slices were restored.
            outcome: the restore's result: bytes and seconds, or the error; see
                `restore_copies`.
        """
        if "fatal" in outcome:
            self._unfit(outcome["fatal"])
        elif "error" in outcome:
            error, corrupt = outcome["error"], outcome["corrupt"]
            self._tell("prepare_failed", error=error, corrupt=corrupt)
        else:
            task.restored = outcome
            self._copies.prefetched.clear()  # the arena has what was used
            self._tell(
                "prepared",
                export_port=self._parts.free_port(),
                own=outcome["own"],
                peers=outcome["peers"],
                seconds=outcome["s"],
                restored=outcome.get("restored", {}),
            )
            if task.layout is not None:
                self._accept_restored(task)
            else:
                self._hand_over(task)
            if self._seats.attached:  # the process goes on and may ask for the step
                order = task.order
                self._board.set("recovering", 0)
                self._trainers.formed(source=order["source"], step=order["step"])

    def _fatal(self, message: str) -> None:
        """Reports to the leader an error that would occur on any host."""
        self._tell("fatal", message=message)

    def _unfit(self, why: str, **told: str) -> None:
        """Reports to the leader an error that concerns this host alone.

        The leader then gives this host no slot. `why` describes the error in words;
        `told` has further fields of the report, such as the layout.
        """
        self._tell("unfit", why=why, **told)

    def _hand_over(self, task: SlotTask) -> None:
        """Sends the trainer the state's location in memory, once it may load the state.

        Does nothing before the trainer's layout is accepted and the restore has
        succeeded. The location is in the arena, a file in shared memory.
        """
        order = task.order
        if task.announced and task.restored is not None:
            where = self._copies.located(order["step"], order["source"] == "memory")
            self._trainers.send(
                "restore", source=order["source"], step=order["step"], **where
            )

    def release(
        self, step: int, committed: bool, commit: str = "", **told: Any
    ) -> None:
        """Drops the copies of steps before `step`, except those of the last commit.

        Also tells the trainer that the step is released, and starts a standby trainer.
        If the trainer waits for the buffers of its next snapshot, sends them, too.
        Without a slot or copies, this host only remembers the commit.

        Args:
            step: the replicated step: each of its slices has enough copies on hosts.
            committed: whether the store has recorded the step; False while the store
                does not answer.
            commit: JSON of the commit that the store has recorded or will record; "" to
                remember none. The JSON leaves out the commit's holders, because they
                are the hosts in this host's `prepare` order.
            told: further fields of the leader's message, passed on to the trainer.
        """
        if commit:
            self._keep(known_commit(commit))
        holder = self._copies.holder  # the lane may replace the holder meanwhile
        if holder is None or self._task is None:
            return
        last = self._board.get("committed")
        if committed and step in holder.steps():
            self._board.set("committed", step)
            last = step
            if step > self._task.order["step"]:
                self._copies.committed()
        holder.drop_before(step, keep={last})
        if self._board.get("replicating") <= step:
            self._board.set("replicating", 0)
        room, wanted = None, self._task.wanted
        if wanted is not None and wanted[0] <= step:
            room = self._room(self._task, holder, wanted[1])
        self._trainers.send(
            "release", step=step, committed=committed, room=room, **told
        )
        self.warm()

    def _keep(self, commit: Commit) -> None:
        """Remembers a commit if it is of the assignment in the last `prepare` order.

        The hosts in that order are remembered as the hosts that have the commit.
        Replaces the remembered commit of the same step: a commit that the store could
        not record at first is released a second time once it is recorded. Only the two
        newest commits are remembered.
        """
        obeyed, epoch = self._obeyed, (commit.generation, commit.attempt)
        if obeyed is not None and _epoch_of(obeyed) == epoch:
            whole = replace(commit, holders=tuple(obeyed["hosts"]))
            others = [it for it in self._commits if it.step != commit.step]
            known = sorted([whole, *others], key=_age, reverse=True)
            self._commits = known[:KEPT_COMMITS]

    def replicate(self, ballot: tuple[int, int], step: int, targets: list[int]) -> None:
        """Sends this host's slices of a restored step to hosts that lack them.

        Ignores an order of another round than the newest one, and an order to a host
        without a slot.

        Args:
            ballot: (term, number) of the round, an attempt to form the job.
            step: the restored step.
            targets: the slots of the hosts that lack the slices.
        """
        task = self._task
        if task is None or ballot != self._ballot:
            return
        self._start_pushers(task)
        task.push(step, targets)

    def pass_on(self, op: str, **fields: Any) -> None:
        """Passes a leader's message of the kind `op` to the trainer.

        A message of the kind `assemble` is not passed on. It makes this host assemble
        the slices of a step that the user's process has requested under other
        shardings. If the message has an error, the process is sent an `assembled`
        message with this error instead.
        """
        if op != "assemble":
            self._trainers.send(op, **fields)
        elif "error" in fields:
            self._trainers.send("assembled", **fields)
        elif self._resharding is not None and self._task is not None:
            self._resharding.begin(self._task, fields)

    def assembled(self, task: SlotTask, answer: dict[str, Any]) -> None:
        """Tells the user's process where its resharded step is, or why there is none.

        If the slot was assigned anew meanwhile, frees the memory of the step instead.

        Args:
            task: the slot for which the process has requested the step.
            answer: the step, its layout and the path of its memory, or an error.
        """
        if task is self._task:
            self._trainers.send("assembled", **answer)
        elif self._resharding is not None:
            self._resharding.outdated(answer)

    # --------------------------------------------------------------- the trainer

    def _handlers_of_messages(self) -> dict[str, Handler]:
        """Maps each kind (`op`) of message from a trainer to its handler."""
        handlers: dict[str, Handler] = {
            "layout": self._on_layout,
            "stage": self._on_stage,
            "staged": self._on_staged,
            "keys": lambda task, message: self._tell("keys", keys=message["keys"]),
            "running": functools.partial(self._pass_up, "running"),
            "finished": functools.partial(self._pass_up, "finished"),
            "fatal": functools.partial(self._pass_up, "fatal"),
            "failed": functools.partial(self._pass_up, "failed"),
        }
        if self._resharding is not None:
            handlers["locate"] = self._on_locate
            handlers["want"] = functools.partial(self._ask_leader, "wanted", WANTED)
            handlers["flush"] = functools.partial(self._ask_leader, "flush", FLUSHED)
            handlers["left"] = functools.partial(self._ask_leader, "finished", LEFT)
            free = self._resharding.free
            handlers["taken"] = lambda task, message: free()
        return handlers

    def trainer_says(self, ident: int, message: dict[str, Any]) -> None:
        """Handles a message of the trainer with this ident, if it has this host's slot.

        A message of an unknown kind is ignored, and so is a message while this host has
        no slot. A trainer that sends an invalid message is killed or, if it is a user's
        process, detached; the leader is told.

        Args:
            ident: number that identifies the trainer.
            message: the message, with its kind in the field `op`.
        """
        if not self._trainers.is_active(ident):
            return
        op = message.pop("op")
        try:
            if op == "stage" and self._seats.attached:
                self._board.set("finished", message["step"])  # counts lost steps
            if self._task is not None and op in self._handlers:
                self._handlers[op](self._task, message)
        except _INVALID as error:
            self._refuse_trainer(f"{op}: {type(error).__name__}: {error}")

    def _refuse_trainer(self, fault: str) -> None:
        """Gives up a trainer that sent an invalid message, and tells the leader.

        Kills a process that this agent started; detaches a user's process, which is
        sent the reason (`Trainers.let_go`). The leader is told at once that the trainer
        has gone. `fault` says what is wrong with the message.
        """
        logger.error(
            "this host gives up its trainer, which sent an invalid message: %s", fault
        )
        self._trainers.let_go(f"it sent an invalid message: {fault}")
        self._tell_exit(0 if self._seats.attached else 1, self._ballot)

    def _pass_up(self, op: str, task: SlotTask, message: Message) -> None:
        """Passes a trainer's message to the leader as a report of the kind `op`.

        The report also has this host's slot, from `task`. A trainer that sends such a
        message has restored its state, or fails. The progress board, which other
        processes read, therefore no longer shows this host as recovering.
        """
        self._board.set("recovering", 0)
        self._tell(op, slot=task.slot, **message)

    def _ask_leader(
        self, op: str, names: Iterable[str], task: SlotTask, message: Message
    ) -> None:
        """Reports a request of the user's process to the leader.

        The report is of the kind `op`. It has the slot of `task`, and those fields of
        the process's message that `names` lists.
        """
        told = {name: message[name] for name in names}
        self._tell(op, slot=task.slot, **told)

    def _on_locate(self, task: SlotTask, message: Message) -> None:
        step = message["step"]
        holder = self._copies.holding(step)
        if holder is None or step not in holder.steps():
            text = f"{self._config.host} does not hold step {step} any more"
            self._trainers.send("located", error=text)
            return
        self._trainers.send(
            "located",
            step=step,
            layout=holder.layout.to_json(),
            arena=str(holder.path),
            buffers=holder.own_buffers(step),
            digests=holder.all_own_digests(step),
            items=holder.items(step),
        )

    def _on_layout(self, task: SlotTask, message: Message) -> None:
        layout, order = Layout.from_json(message["layout"]), task.order
        is_held = order["source"] == "memory"
        is_new = is_held and Layout.from_json(order["layout"]).digest != layout.digest
        if is_new and not self._seats.attached:
            self._fatal("the trainer's state differs from the commit's: other config?")
            return
        if is_held and not is_new:
            task.layout = layout
            self._accept_restored(task)
            return
        slot, domains, copies = order["slot"], order["domains"], self._copies

        def hold() -> None:
            if is_new:  # the committed arena stays until the first new commit
                copies.hold(layout, slot, domains, keep=order["step"])
            else:
                copies.hold(layout, slot, domains).keep_only(set())

        self._holding.submit(
            hold, lambda outcome: self._held_for(task, layout, is_new, outcome)
        )

    def _held_for(
        self,
        task: SlotTask,
        layout: Layout,
        is_new: bool,
        outcome: "Future[None]",
    ) -> None:
        """Accepts a layout if its memory was allocated; else reports the host as unfit.

        Args:
            task: the task of the slot for which memory was allocated. If this host has
                another task now, the layout is not accepted.
            layout: the trainer's layout.
            is_new: whether the layout differs from that of the restored commit.
            outcome: the allocation that has ended; has an exception if it failed.
        """
        error = outcome.exception()
        if error is not None:  # also for a former formation: slots need equal memory
            self._unfit(_why(error), layout=layout.to_json())
            return
        if task is not self._task:
            return
        if is_new:
            task.stop_pushers()  # pushers of the old layout end
            task.order = {**task.order, "source": "init"}
        self._accept(task, layout)

    def _accept_restored(self, task: SlotTask) -> None:
        """Reports the trainer's layout, once it has arrived and the slot is restored.

        Is called after each of the two, and does nothing until both have happened: the
        restore takes the memory that replication writes to. Replication starts then.
        The layout in `task` is that of the restored commit.
        """
        if task.layout is not None and task.restored is not None:
            self._accept(task, task.layout)

    def _accept(self, task: SlotTask, layout: Layout) -> None:
        """Reports an accepted layout to the leader, and starts to send slices to peers.

        Also sends the trainer the state's location, if the restore has succeeded.
        """
        task.announced = True
        self._start_pushers(task)
        self._tell("layout", layout=layout.to_json())
        self._hand_over(task)

    def _start_pushers(self, task: SlotTask) -> None:
        limit_s = self._config.timeouts.replicate
        task.start_pushers(self._copies, self._credentials, limit_s)

    def _on_stage(self, task: SlotTask, message: Message) -> None:
        if (holder := self._copies.holder) is None:
            return
        room = self._room(task, holder, message["step"])
        if room is not None:
            self._trainers.send("room", **room)

    def _room(
        self, task: SlotTask, holder: ReplicaStore, step: int
    ) -> dict[str, Any] | None:
        """Takes free buffers of the arena for a step that the trainer will write.

        Args:
            task: this host's slot.
            holder: this host's copies, in whose arena the buffers are.
            step: the step.

        Returns:
            The answer to the trainer: the step, the buffer of each chunk, and `copied`:
            one bit for each of the slot's slices, whether the trainer copies it from
            its devices (b"" if it copies all). None if a chunk has no free buffer. Then
            the answer is sent later, once all chunks have one. The trainer waits for at
            most `timeouts.start` seconds (config).
        """
        task.wanted = None
        try:
            return self._taken_room(task, holder, step)
        except RuntimeError as error:
            # A restore that was given up has a buffer until its peer answers.
            logger.warning(
                "%s Taking a buffer is tried again every %.1f s.", error, ROOM_AGAIN_S
            )
            self._loop.call_later(ROOM_AGAIN_S, self._room_late, task, holder, step)
            return None

    def _room_late(self, task: SlotTask, holder: ReplicaStore, step: int) -> None:
        """Sends the trainer the buffers for a step, once every chunk has a free one.

        Tries again every 0.5 s until then. Does nothing if the slot or its copies were
        replaced meanwhile. The arguments are those of `_room`.
        """
        if task is not self._task or holder is not self._copies.holder:
            return
        try:
            self._trainers.send("room", **self._taken_room(task, holder, step))
        except RuntimeError:
            self._loop.call_later(ROOM_AGAIN_S, self._room_late, task, holder, step)

    def _taken_room(
        self, task: SlotTask, holder: ReplicaStore, step: int
    ) -> dict[str, Any]:
        """Takes buffers for a step; returns the answer to the trainer.

        The arguments and the answer are those of `_room`.

        Raises:
            RuntimeError: a chunk has no free buffer.
        """
        room = holder.begin_stage(step)
        return {"step": step, "copied": self._copies.share(task.turn), **vars(room)}

    def _on_staged(self, task: SlotTask, message: Message) -> None:
        if (holder := self._copies.holder) is None:
            return
        step = message["step"]
        holder.staged(step, message["digests"], message["items"], message["kept"])
        self._board.set("staged", step)
        self._board.set("replicating", step)
        task.staged(step, message["interval"], message["window"])
        following = message["following"]
        task.wanted = None if following is None else (step, following)
        told = {name: message[name] for name in REPORTED}
        self._tell("staged", slot=task.slot, **told)

    def held(self, epoch: tuple[int, int], step: int, source: int, root: str) -> None:
        """Reports to the leader that a peer's slices arrived here and were verified.

        Args:
            epoch: (generation, attempt) of the assignment under which the peer sent
                them. If it is not this host's, nothing is reported.
            step: the step of the slices.
            source: slot of the peer.
            root: one digest over all these slices.
        """
        task = self._task
        if task is not None and epoch == task.epoch:
            where = {"source": source, "target": task.slot}
            self._tell("held", step=step, root=root, **where)

    def tick(self) -> None:
        """Checks the trainer's progress, at most once a second.

        Reports the progress to the leader: every second while a phase (such as a step)
        lasts for 2 s (`LOOK_S`) or longer, else every ten seconds. Makes the trainer
        write its stacks to its log once a phase has lasted for 80% of its time limit.
        Does nothing without a slot, or if the user starts the trainers.
        """
        task, now = self._task, self._loop.now()
        if task is None or self._seats.attached or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        seen = self._parts.observe(self._trainers.pid)
        if seen is None:
            return
        progress = self._watch.look(now, seen)
        if self._watch.dump_due(progress):
            self._dump_stacks(self._trainers.pid)
        if self._watch.report_due(now, progress):
            self._tell("progress", slot=task.slot, **asdict(progress))

    def trainer_exited(self, ident: int, code: int) -> None:
        """Reports to the leader that the trainer of this host's slot has ended.

        `ident` identifies the ended trainer. Does nothing if that trainer did not have
        the slot. `code` is the return code of a process that this agent started. For a
        user's process it is 1 if the process had said that it leaves the job, else 0.
        """
        if self._trainers.exited(ident):
            self._tell_exit(code, self._ballot)

    def _tell_exit(self, code: int, ballot: tuple[int, int]) -> None:
        told = self._seats.exit_report(code)
        if told is not None:
            op, fields = told
            self._report(op, ballot=ballot, **fields)

    # ------------------------------------------------------------------- storage

    def export(self, order: dict[str, Any]) -> None:
        """Starts this host's part in the export of a committed step to storage.

        `order` is the leader's order. Among its fields are `step`, the `slot` whose
        slices this host writes, and `transfers` (slices to fetch from peers first).
        """
        self._export_attempt = order["failures"]
        holder = self._copies.holding(order["step"], order["slot"])
        self._exports.begin(holder, {**order, "epoch": self.epoch})

    def lend(self, step: int) -> None:
        """Keeps a step in memory while other hosts write it to storage.

        Those hosts fetch slices of the step from this host. Frees the step of the
        previous call; with `step` -1 keeps none.
        """
        self._exports.lend(self._copies.holding(step), step)

    def exporter_says(self, exporter: ExporterProcess, message: dict[str, Any]) -> None:
        """Handles a message of an exporter process: step written, failure, or end.

        Messages of an exporter that was replaced are ignored.
        """
        self._exports.answer(exporter, message)

    def exported(self, step: int, ok: bool, error: str) -> None:
        """Reports to the leader whether this host's part of an export succeeded.

        `error` is the reason of a failure; "" if `ok`.
        """
        attempt = self._export_attempt
        self._tell("exported", step=step, ok=ok, error=error, attempt=attempt)

    def close(self) -> None:
        """Ends this host's trainers and exporter, and frees its copies' memory."""
        self._stand_down("this agent ends")
        self._exports.close()
        if self._parts.prefetcher is not None:
            self._parts.prefetcher.stop()
        self._holding.close()
        self._reserving.close()
        self._trainers.close()
        self._copies.close()


def local_follower(
    config: AgentConfig,
    credentials: Credentials,
    board: ProgressBoard,
    loop: Loop,
    network: Network,
    emit: Callable[..., None],
    report: Callable[..., None],
    trainers: Trainers | None = None,
) -> Follower:
    """Makes a follower on this machine; see `Follower`.

    Args:
        config: settings of this host's agent.
        credentials: the job's credentials.
        board: this host's progress board.
        loop: the agent's event loop.
        network: connects to other agents.
        emit: `emit(kind, *values)` makes the event loop pass the event to the follower.
        report: sends a report to the leader.
        trainers: trainers whose socket is open already; made here by default.
    """
    copies = Copies(config)
    nixl = start_nixl() if config.nixl else None

    def exported(step: int, ok: bool, error: str) -> None:
        follower.exported(step, ok, error)

    parts = HostParts(
        board=board,
        trainers=trainers
        or Trainers(
            config.memory_directory / AGENT_SOCKET,
            job=config.job,
            host=config.host,
            deadline_s=config.timeouts.start,
            command=Command.of(config),
        ),
        copies=copies,
        exports=HostExports(config, credentials, board, emit, exported),
        resharding=Resharding(config, credentials, copies, emit)
        if config.seats.attached
        else None,
        restore=lambda order: restore_copies(copies, order, config, credentials, nixl),
        probe=network.probe,
        free_port=functools.partial(free_port, parse_address(config.bind)[0]),
        observe=lambda pid: observe(board, pid),
        dump_stack=dump_stack,
        prefetcher=Prefetcher(
            *(copies.prefetched, credentials, config.chunk_bytes),
            config.timeouts.restore,
        ),
        nixl=nixl,
    )
    follower = Follower(config, credentials, parts, loop, emit, report)
    return follower


def _epoch_of(order: Message) -> tuple[int, int]:
    return order["generation"], order["attempt"]


def _age(commit: Commit) -> tuple[int, int, int]:
    """Returns (generation, attempt, step), which is larger for a newer commit."""
    return commit.generation, commit.attempt, commit.step


def _why(error: BaseException) -> str:
    """Returns the reason why memory for a layout could not be allocated, as text.

    Logs an unexpected exception.
    """
    if isinstance(error, OSError):
        return str(error)
    logger.error(
        "memory for a slot could not be allocated, so this host cannot take a slot",
        exc_info=error,
    )
    return f"{type(error).__name__}: {error}"


def _outcome(future: "Future[dict[str, Any]]") -> dict[str, Any]:
    """Returns the outcome of a restore that has ended.

    If the restore raised an unexpected exception, logs it and returns an outcome with
    the text of the exception as the error, and with no corrupt copy.
    """
    error = future.exception()
    if error is None:
        return future.result()
    logger.error(
        "the restore on this host failed unexpectedly; the leader is told",
        exc_info=error,
    )
    return {"error": f"{type(error).__name__}: {error}", "corrupt": []}


def observe(board: ProgressBoard, pid: int) -> Observation | None:
    """Reads the trainer's phase and steps (progress board) and process state (kernel).

    `pid` is the trainer's process id. Returns None if `pid` is 0, or if the process has
    ended.
    """
    state = process_state(pid) if pid else None
    if state is None:
        return None
    phase, since_ns = board.phase()
    return Observation(
        phase=phase,
        since=since_ns / 1e9,
        computing=board.get("computing"),
        finished=board.get("finished"),
        state=state.state,
        cpu_s=state.cpu_s,
    )
