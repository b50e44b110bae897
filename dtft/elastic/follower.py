"""What every host does for its job: it obeys the leader and reports to it.

Has the trainer begin and end, keeps the copies, replicates, restores and exports. A
user's process (`SeatPolicy.attached`) decides when it saves and restores: it learns the
step on offer at once, tells its layout at its first save, and asks for what it wants.
All methods run on the agent's event loop; what takes long runs on threads that answer
with events. Decides nothing about the job: which slot, which step and which peers are
told.
"""

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from dtft.checkpoint.attach import SOCKET
from dtft.checkpoint.board import Board
from dtft.checkpoint.nixl import started
from dtft.checkpoint.slices import Layout
from dtft.checkpoint.transport import Credentials
from dtft.elastic.config import AgentConfig
from dtft.elastic.copies import Copies
from dtft.elastic.exports import ExportDesk, Exporter
from dtft.elastic.formation import Formation
from dtft.elastic.inbox import Inbox
from dtft.elastic.processes import free_port
from dtft.elastic.restoring import restore_copies
from dtft.elastic.roles import HostRecord
from dtft.elastic.scrubber import Scrubber
from dtft.elastic.served import missing
from dtft.elastic.side_arena import Resharding
from dtft.elastic.trainers import Command, Trainers, start_message

REPORTED = ("step", "digests", "interval", "window")
"""What the leader is told of a staged step."""
WANTED, FLUSHED, LEFT = ("step", "layout"), ("token", "step", "store"), ("step",)
"""What it is told of a user's process's wish, and of its goodbye."""

Message = Mapping[str, Any]
Handler = Callable[[Formation, Message], None]


class Follower:
    """One host's duties."""

    def __init__(
        self,
        config: AgentConfig,
        credentials: Credentials,
        board: Board,
        emit: Callable[..., None],
        report: Callable[..., None],
        trainers: Trainers | None = None,
    ) -> None:
        """Has nothing to do yet.

        Args:
            config: of this host's agent.
            credentials: of the job.
            board: of this host.
            emit: `emit(...)` sends to the event loop.
            report: `report(op, **fields)` sends to the leader.
            trainers: listen already; by default this host starts its own.
        """
        self._config, self._credentials, self._board = config, credentials, board
        self._emit, self._report = emit, report
        self._seats = config.seats
        self._trainers = trainers or Trainers(
            config.memory_directory / SOCKET,
            job=config.job,
            host=config.host,
            deadline_s=config.timeouts.start,
            command=Command.of(config),
        )
        self._copies = Copies(config)
        self._scrubber = Scrubber(self._copies.holders)
        self._nixl = started() if config.nixl else None
        self._formation: Formation | None = None
        self._ballot: tuple[int, int] = (0, 0)
        self._exports = ExportDesk(config, credentials, board, emit, self._exported)
        self._resharding = (
            Resharding(config, credentials, self._copies, emit)
            if self._seats.attached
            else None
        )
        self._handlers = self._handlers_of_messages()
        self._trainers.bind(emit)

    @property
    def epoch(self) -> tuple[int, int]:
        """(generation, attempt) that this host obeys; (0, 0) for none."""
        return self._formation.epoch if self._formation else (0, 0)

    def inbox(self) -> Inbox:
        """What the transport's serving threads may ask."""
        return Inbox(
            epoch=lambda: self.epoch,
            holder=lambda: self._copies.holder,
            held=lambda *copy: self._emit("held", self.epoch, *copy),
            former=lambda: self._copies.former,
            nixl=self._nixl,
        )

    def warm(self) -> None:
        """Starts a standby trainer: imports are paid for before they are needed."""
        self._trainers.ensure_standby()

    @property
    def attachment(self) -> tuple[int, int]:
        """Index and ident of the user's process that is attached, (-1, 0) for none."""
        return self._trainers.attachment

    def see(self, hosts: Collection[HostRecord]) -> None:
        """The hosts of the job have changed: a process that waits is told for whom."""
        absent = missing(hosts, self._config.num_slots) if self._seats.attached else ""
        if absent:
            self._trainers.note(absent)

    # ------------------------------------------------------- orders of the leader

    def expect(self, layout: str, domains: list[str]) -> None:
        """Has memory ready for a slot of the running job, should one be free."""
        self._copies.expect(Layout.from_json(layout), domains)

    def reform(
        self,
        ballot: tuple[int, int],
        reason: str = "",
        fatal: bool = False,
        read: bool = True,
    ) -> None:
        """Stops training here and reports what this host holds.

        Args:
            ballot: of the round.
            reason: why, for whoever trains here.
            fatal: what has happened would happen again to the same processes.
            read: whether copies are read and checked for it.
        """
        if ballot < self._ballot:
            return
        self._ballot = ballot
        self._board.set("recovering", 1)
        self._stand_down(reason, fatal)
        self._tell("holdings", **self._holds(read))

    def _holds(self, read: bool) -> dict[str, Any]:
        """What the leader decides from."""
        told = {"finished": self._board.get("finished"), "export_port": free_port()}
        if self._seats.attached:
            told["attached_ns"] = self._trainers.waiting
        return self._copies.report(read) | told

    def _stand_down(self, reason: str = "", fatal: bool = False) -> None:
        formation, self._formation = self._formation, None
        if formation is not None:
            formation.stop_pushers()
        if self._resharding is not None:
            self._resharding.free()
        if formation is not None or fatal:
            self._trainers.let_go(reason, waiting=fatal)
        self._exports.stand_down()
        for field_name in ("computing", "replicating", "committing", "exporting"):
            self._board.set(field_name, 0)

    def _tell(self, op: str, **fields: Any) -> None:
        """Reports to the leader, about the newest round that this host knows."""
        self._report(op, ballot=self._ballot, **fields)

    def retire(self) -> None:
        """Gives up the slot: others have taken it. The copies stay until replaced."""
        self._stand_down()
        self._board.set("recovering", 0)
        self.warm()

    def prepare(self, order: dict[str, Any]) -> None:
        """Takes a slot: starts the trainer and, beside it, fetches the state."""
        if tuple(order["ballot"]) < self._ballot:
            return
        self._ballot = tuple(order["ballot"])
        self._stand_down()
        self._formation = formation = Formation(order=order)
        self._board.set("generation", order["generation"])
        self._board.set("attempt", order["attempt"])
        self._board.set("finished", order["step"])
        self._board.set("committed", order["step"])  # kept until there is a newer one
        self._board.set("staged", 0)
        self._board.set("recovering", 1)
        self._trainers.start(start_message(self._config, order))
        if order["source"] == "memory":
            threading.Thread(
                target=self._restore_memory, args=(formation,), daemon=True
            ).start()
        else:
            self._emit("restored_memory", formation, {"own": 0, "peers": 0, "s": 0.0})

    def _restore_memory(self, formation: Formation) -> None:
        outcome = restore_copies(
            *(self._copies, formation.order, self._config),
            *(self._credentials, self._nixl),
        )
        self._emit("restored_memory", formation, outcome)

    def restored_memory(self, formation: Formation, outcome: dict[str, Any]) -> None:
        """The restore of this host's slices has ended, well or not."""
        if formation is not self._formation:
            return
        if "fatal" in outcome:
            self._fatal(outcome["fatal"])
        elif "error" in outcome:
            error, corrupt = outcome["error"], outcome["corrupt"]
            self._tell("prepare_failed", error=error, corrupt=corrupt)
        else:
            formation.restored = outcome
            self._tell(
                "prepared",
                export_port=free_port(),
                own=outcome["own"],
                peers=outcome["peers"],
                seconds=outcome["s"],
                restored=outcome.get("restored", {}),
            )
            self._hand_over(formation)
            if self._seats.attached:  # it may go on, and ask for the step
                order = formation.order
                self._board.set("recovering", 0)
                self._trainers.formed(source=order["source"], step=order["step"])

    def _fatal(self, message: str) -> None:
        self._tell("fatal", message=message)

    def _hand_over(self, formation: Formation) -> None:
        """Gives the trainer its state, once both it and the state are there."""
        order = formation.order
        if formation.announced and formation.restored is not None:
            where = self._copies.located(order["step"], order["source"] == "memory")
            self._trainers.send(
                "restore", source=order["source"], step=order["step"], **where
            )

    def release(self, step: int, committed: bool, **told: Any) -> None:
        """A step is safe: older copies go; the trainer is told so, and the rest."""
        if self._copies.holder is None or self._formation is None:
            return
        last = self._board.get("committed")
        if committed:
            self._board.set("committed", step)
            last = step
            if step > self._formation.order["step"]:
                self._copies.committed()
        self._copies.holder.drop_before(step, keep={last})
        if self._board.get("replicating") <= step:
            self._board.set("replicating", 0)
        self._trainers.send("release", step=step, committed=committed, **told)
        self.warm()

    def replicate(self, ballot: tuple[int, int], step: int, targets: list[int]) -> None:
        """Sends the slices of a restored step again to peers that lack them."""
        formation = self._formation
        if formation is None or ballot != self._ballot:
            return
        self._start_pushers(formation)
        formation.push(step, targets)

    def pass_on(self, op: str, **fields: Any) -> None:
        """The leader has something to say to whoever trains here, or to be assembled
        for it first.
        """
        if op != "assemble":
            self._trainers.send(op, **fields)
        elif "error" in fields:
            self._trainers.send("assembled", **fields)
        elif self._resharding is not None and self._formation is not None:
            self._resharding.begin(self._formation, fields)

    def assembled(self, formation: Formation, answer: dict[str, Any]) -> None:
        """What a process wants is in memory, or why not."""
        if formation is self._formation:
            self._trainers.send("assembled", **answer)
        elif self._resharding is not None:
            self._resharding.outdated(answer)

    # --------------------------------------------------------------- the trainer

    def _handlers_of_messages(self) -> dict[str, Handler]:
        """Op of a trainer's message to what is done about it."""
        handlers: dict[str, Handler] = {
            "layout": self._on_layout,
            "stage": self._on_stage,
            "staged": self._on_staged,
            "running": functools.partial(self._pass_up, "running"),
            "finished": functools.partial(self._pass_up, "finished"),
            "fatal": functools.partial(self._pass_up, "fatal"),
        }
        if self._resharding is not None:
            handlers["locate"] = self._on_locate
            handlers["want"] = functools.partial(self._ask_leader, "wanted", WANTED)
            handlers["flush"] = functools.partial(self._ask_leader, "flush", FLUSHED)
            handlers["left"] = functools.partial(self._ask_leader, "finished", LEFT)
            free = self._resharding.free
            handlers["taken"] = lambda formation, message: free()
        return handlers

    def trainer_says(self, ident: int, message: dict[str, Any]) -> None:
        """A message of the trainer; those of an ended one are ignored."""
        if not self._trainers.is_active(ident):
            return
        op = message.pop("op")
        if op == "stage" and self._seats.attached:
            self._board.set("finished", message["step"])  # so a loss can be counted
        if self._formation is not None and op in self._handlers:
            self._handlers[op](self._formation, message)

    def _pass_up(self, op: str, formation: Formation, message: Message) -> None:
        """The leader has to know; the trainer has begun, whatever it says."""
        self._board.set("recovering", 0)
        self._tell(op, slot=formation.slot, **message)

    def _ask_leader(
        self, op: str, names: Iterable[str], formation: Formation, message: Message
    ) -> None:
        """A user's process wants something that the leader decides."""
        told = {name: message[name] for name in names}
        self._tell(op, slot=formation.slot, **told)

    def _on_locate(self, formation: Formation, message: Message) -> None:
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
            places=holder.own_places(step),
            digests=holder.all_own_digests(step),
            items=holder.items(step),
        )

    def _on_layout(self, formation: Formation, message: Message) -> None:
        layout, order = Layout.from_json(message["layout"]), formation.order
        is_held = order["source"] == "memory"
        is_new = is_held and Layout.from_json(order["layout"]).digest != layout.digest
        if is_new and not self._seats.attached:
            self._fatal("the trainer's state differs from the commit's: other config?")
            return
        try:
            slot, domains = order["slot"], order["domains"]
            if is_new:  # beside the commit's, until this one has its first
                self._copies.hold(layout, slot, domains, keep=order["step"])
            elif not is_held:
                self._copies.hold(layout, slot, domains).keep_only(set())
        except OSError as error:
            self._fatal(str(error))
            return
        if is_new:
            formation.stop_pushers()  # they sent again what peers had lost of the old
            formation.order = {**order, "source": "init"}
        self._accept(formation, layout)

    def _accept(self, formation: Formation, layout: Layout) -> None:
        """The layout is the formation's: copies can travel."""
        formation.announced = True
        self._start_pushers(formation)
        self._tell("layout", layout=layout.to_json())
        self._hand_over(formation)

    def _start_pushers(self, formation: Formation) -> None:
        limit_s = self._config.timeouts.replicate
        formation.start_pushers(self._copies, self._credentials, limit_s)

    def _on_stage(self, formation: Formation, message: Message) -> None:
        if (holder := self._copies.holder) is None:
            return
        step, copied = message["step"], self._copies.share(formation.turn)
        try:
            room = asdict(holder.begin_stage(step))
            self._trainers.send("room", step=step, copied=copied, **room)
        except RuntimeError as error:
            self._fatal(str(error))

    def _on_staged(self, formation: Formation, message: Message) -> None:
        if (holder := self._copies.holder) is None:
            return
        step = message["step"]
        holder.staged(step, message["digests"], message["items"], message["kept"])
        self._board.set("staged", step)
        self._board.set("replicating", step)
        formation.staged(step, message["interval"], message["window"])
        told = {name: message[name] for name in REPORTED}
        self._tell("staged", slot=formation.slot, **told)

    def held(self, epoch: tuple[int, int], step: int, source: int, root: str) -> None:
        """A peer's slices have arrived here and were checked; `root`: their digest."""
        formation = self._formation
        if formation is not None and epoch == formation.epoch:
            where = {"source": source, "target": formation.slot}
            self._tell("held", step=step, root=root, **where)

    def trainer_exited(self, ident: int, code: int) -> None:
        """A trainer has ended; the leader must know, if it means something."""
        told = self._seats.exit_report(code) if self._trainers.exited(ident) else None
        if told is not None:
            op, fields = told
            self._tell(op, **fields)

    # ------------------------------------------------------------------- storage

    def export(self, order: dict[str, Any]) -> None:
        """Begins to write a committed step to storage, from the arena."""
        holder = self._copies.holding(order["step"], order["slot"])
        self._exports.begin(holder, {**order, "epoch": self.epoch})

    def lend(self, step: int) -> None:
        """Keeps a step for peers that lack some of it to export; -1 ends that."""
        self._exports.lend(self._copies.holding(step), step)

    def exporter_says(self, exporter: Exporter, message: dict[str, Any]) -> None:
        """The exporter has written a step, failed, or ended."""
        self._exports.answer(exporter, message)

    def _exported(self, step: int, ok: bool, error: str) -> None:
        self._tell("exported", step=step, ok=ok, error=error)

    def close(self) -> None:
        """Ends every process of this host and frees its memory."""
        self._stand_down("this agent ends")
        self._trainers.close()
        self._scrubber.close()
        self._copies.close()
