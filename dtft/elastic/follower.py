"""What every host does for its job: it obeys the leader and reports to it.

Kills and starts the trainer, keeps the copies, replicates, restores and exports. All
methods run on the agent's event loop; what takes long runs on threads that answer with
events. Decides nothing about the job: which slot, which step and which peers are told.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtft.checkpoint.board import Board
from dtft.checkpoint.holder import Holder
from dtft.checkpoint.placement import place
from dtft.checkpoint.slices import Layout
from dtft.checkpoint.transport import Credentials
from dtft.elastic.config import AgentConfig
from dtft.elastic.exports import Exporter
from dtft.elastic.processes import free_port
from dtft.elastic.replication import FetchFailed, Inbox, Pusher, fetch
from dtft.elastic.trainers import TrainerPool

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Formation:
    """The order this host obeys at present: one slot in one epoch."""

    order: dict[str, Any]
    restored: dict[str, Any] | None = None
    """What the restore from memory came to; None while it runs."""
    announced: bool = False
    """The trainer has told the layout."""
    pushers: list[Pusher] = field(default_factory=list)

    @property
    def epoch(self) -> tuple[int, int]:
        return self.order["generation"], self.order["attempt"]


class Follower:
    """One host's duties."""

    def __init__(
        self,
        config: AgentConfig,
        credentials: Credentials,
        board: Board,
        emit: Callable[..., None],
        report: Callable[..., None],
    ) -> None:
        """`report(op, **fields)` sends to the leader, `emit(...)` to the event loop."""
        self._config, self._credentials, self._board = config, credentials, board
        self._emit, self._report = emit, report
        self._logs = config.run_directory / "logs"
        self._pool = TrainerPool(
            config.trainer_command,
            config.trainer_environment,
            config.memory_directory / "agent.sock",
            self._logs / f"{config.host}.trainer.log",
            emit,
        )
        self.holder: Holder | None = None
        self._formation: Formation | None = None
        self._ballot: tuple[int, int] = (0, 0)
        self._exporter: Exporter | None = None
        self._pinned: dict[int, int] = {}

    @property
    def epoch(self) -> tuple[int, int]:
        """(generation, attempt) that this host obeys; (0, 0) for none."""
        return self._formation.epoch if self._formation else (0, 0)

    def inbox(self) -> Inbox:
        """What the transport's serving threads may ask."""
        return Inbox(
            epoch=lambda: self.epoch,
            holder=lambda: self.holder,
            held=lambda step, source: self._emit("held", self.epoch, step, source),
        )

    def warm(self) -> None:
        """Starts a standby trainer: imports are paid for before they are needed."""
        self._pool.ensure_standby()

    # ------------------------------------------------------- orders of the leader

    def reform(self, ballot: tuple[int, int]) -> None:
        """Stops training here and reports what this host holds, read and checked."""
        if ballot < self._ballot:
            return
        self._ballot = ballot
        self._board.set("recovering", 1)
        self._stand_down()
        good, bad = self.holder.holdings() if self.holder else ({}, [])
        self._report(
            "holdings",
            ballot=ballot,
            layout=self.holder.layout.to_json() if self.holder else "",
            holdings=good,
            items={s: self.holder.items(s) for s in good} if self.holder else {},
            corrupt=[f"{self._config.host} {text}" for text in bad],
            finished=self._board.get("finished"),
        )

    def _stand_down(self) -> None:
        formation, self._formation = self._formation, None
        if formation is not None:
            for pusher in formation.pushers:
                pusher.close()
            self._pool.kill_active()
        self._close_exporter()
        for field_name in ("computing", "replicating", "committing", "exporting"):
            self._board.set(field_name, 0)

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
        self._board.set("staged", 0)
        self._board.set("recovering", 1)
        self._pool.start(self._start_message(order))
        if order["source"] == "memory":
            threading.Thread(
                target=self._restore_memory, args=(formation,), daemon=True
            ).start()
        else:
            self._emit("restored_memory", formation, {"own": 0, "peers": 0, "s": 0.0})

    def _start_message(self, order: dict[str, Any]) -> dict[str, Any]:
        timeouts = self._config.timeouts
        return {
            "slot": order["slot"],
            "num_slots": self._config.num_slots,
            "generation": order["generation"],
            "attempt": order["attempt"],
            "coordinator": order["coordinator"],
            "board": str(self._config.memory_directory / "board"),
            "run_directory": str(self._config.run_directory),
            "storage_directory": str(self._config.storage_directory),
            "chunk_bytes": self._config.chunk_bytes,
            "heartbeat_s": timeouts.heartbeat,
            "start_s": timeouts.start,
        }

    def _restore_memory(self, formation: Formation) -> None:
        order, begun = formation.order, time.monotonic()
        digests: dict[str, bytes] = order["digests"]
        try:
            holder = self._hold(Layout.from_json(order["layout"]), order["slot"])
            step = order["step"]
            missing = holder.begin_restore(step, digests, order["items"])
            planned = {
                key for transfer in order["transfers"] for key in transfer["keys"]
            }
            surprise = [piece.key for piece in missing if piece.key not in planned]
            if surprise:
                name = self._config.host
                raise FetchFailed(
                    name, f"own copy of {surprise[0]} is corrupt", surprise
                )
            peers = self._fetch_all(holder, order)
            own = sum(piece.nbytes for piece in holder.own_slices) - peers
            seconds = time.monotonic() - begun
            outcome = {"own": own, "peers": peers, "s": seconds}
        except FetchFailed as error:
            outcome = {
                "error": str(error),
                "host": error.host,
                "corrupt": error.corrupt,
            }
        except OSError as error:
            outcome = {"fatal": str(error)}
        self._emit("restored_memory", formation, outcome)

    def _fetch_all(self, holder: Holder, order: dict[str, Any]) -> int:
        """Fetches from all peers in parallel; returns the bytes received."""
        results: list[int | FetchFailed] = []

        def one(transfer: dict[str, Any]) -> None:
            try:
                limit = self._config.timeouts.restore
                results.append(
                    fetch(
                        holder,
                        order["step"],
                        transfer,
                        order["digests"],
                        self._credentials,
                        limit,
                    )
                )
            except FetchFailed as error:
                results.append(error)

        threads = [
            threading.Thread(target=one, args=(transfer,), daemon=True)
            for transfer in order["transfers"]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total = 0
        for result in results:
            if isinstance(result, FetchFailed):
                raise result
            total += result
        return total

    def _hold(self, layout: Layout, slot: int) -> Holder:
        """The holder for a layout and slot; its arena is kept if nothing changed."""
        old = self.holder
        if old and old.layout.digest == layout.digest and old.slot == slot:
            return old
        self.holder = None
        if old is not None:
            old.close()
        self.holder = Holder(
            layout,
            slot,
            place(layout, self._config.copies),
            path=self._config.memory_directory / "arena",
            chunk_bytes=self._config.chunk_bytes,
        )
        return self.holder

    def restored_memory(self, formation: Formation, outcome: dict[str, Any]) -> None:
        """The restore of this host's slices has ended, well or not."""
        if formation is not self._formation:
            return
        if "fatal" in outcome:
            self._report("fatal", message=outcome["fatal"])
        elif "error" in outcome:
            self._report("prepare_failed", ballot=self._ballot, **outcome)
        else:
            formation.restored = outcome
            self._report(
                "prepared",
                ballot=self._ballot,
                export_port=free_port(),
                own=outcome["own"],
                peers=outcome["peers"],
                seconds=outcome["s"],
            )
            self._hand_over(formation)

    def _hand_over(self, formation: Formation) -> None:
        """Gives the trainer its state, once both it and the state are there."""
        if not formation.announced or formation.restored is None:
            return
        order, holder = formation.order, self.holder
        assert holder is not None
        memory = order["source"] == "memory"
        self._pool.send(
            "restore",
            source=order["source"],
            step=order["step"],
            arena=str(holder.path),
            offset=holder.own_offset(order["step"]) if memory else 0,
            digests=holder.all_own_digests(order["step"]) if memory else [],
            items=holder.items(order["step"]) if memory else {},
        )

    def release(self, step: int, committed: bool, stop_at: int | None) -> None:
        """A step is safe: older copies go, the trainer may run on."""
        if self.holder is None or self._formation is None:
            return
        last = self._board.get("committed")
        if committed:
            self._board.set("committed", step)
            last = step
        self.holder.drop_before(step, keep={last})
        if self._board.get("replicating") <= step:
            self._board.set("replicating", 0)
        self._pool.send("release", step=step, committed=committed, stop_at=stop_at)
        self.warm()

    # --------------------------------------------------------------- the trainer

    def trainer_linked(self, pid: int, link: Any) -> None:
        """A trainer process has connected."""
        self._pool.linked(pid, link)

    def trainer_says(self, pid: int, message: dict[str, Any]) -> None:
        """A message of the trainer; those of an ended one are ignored."""
        active, formation = self._pool.active, self._formation
        if active is None or active.process.pid != pid or formation is None:
            return
        op = message.pop("op")
        if op == "layout":
            self._announced(formation, Layout.from_json(message["layout"]))
        elif op == "stage" and self.holder is not None:
            self._stage(message["step"])
        elif op == "staged" and self.holder is not None:
            self._staged(formation, self.holder, message)
        elif op in ("running", "finished", "fatal"):
            self._board.set("recovering", 0)
            self._report(
                op, ballot=self._ballot, slot=formation.order["slot"], **message
            )

    def _announced(self, formation: Formation, layout: Layout) -> None:
        order = formation.order
        if order["source"] == "memory":
            if Layout.from_json(order["layout"]).digest != layout.digest:
                text = "the trainer's state differs from the commit's: other config?"
                self._report("fatal", message=text)
                return
        else:
            try:
                self._hold(layout, order["slot"]).keep_only(set())
            except OSError as error:
                self._report("fatal", message=str(error))
                return
        assert self.holder is not None
        formation.announced = True
        formation.pushers = [
            Pusher(
                self.holder,
                push,
                order["addresses"][push.target],
                self._credentials,
                formation.epoch,
                self._config.timeouts.replicate,
            )
            for push in self.holder.outgoing
        ]
        self._report("layout", ballot=self._ballot, layout=layout.to_json())
        self._hand_over(formation)

    def _stage(self, step: int) -> None:
        assert self.holder is not None
        try:
            self._pool.send("extent", step=step, offset=self.holder.begin_stage(step))
        except RuntimeError as error:
            self._report("fatal", message=str(error))

    def _staged(
        self, formation: Formation, holder: Holder, message: dict[str, Any]
    ) -> None:
        step = message["step"]
        holder.staged(step, message["digests"], message["items"])
        self._board.set("staged", step)
        self._board.set("replicating", step)
        for pusher in formation.pushers:
            pusher.offer(step)
        self._report(
            "staged",
            ballot=self._ballot,
            slot=formation.order["slot"],
            step=step,
            digests=message["digests"],
        )

    def held(self, epoch: tuple[int, int], step: int, source: int) -> None:
        """A peer's slices have arrived here and were checked."""
        if self._formation is not None and epoch == self.epoch:
            slot = self._formation.order["slot"]
            self._report(
                "held", ballot=self._ballot, step=step, source=source, target=slot
            )

    def trainer_exited(self, pid: int, code: int) -> None:
        """A trainer has ended; if it was the active one, the leader must know."""
        role = self._pool.exited(pid)
        if role == "active":
            self._report("trainer_exit", ballot=self._ballot, code=code)

    # ------------------------------------------------------------------- storage

    def export(self, order: dict[str, Any]) -> None:
        """Begins to write a committed step to storage, from the arena."""
        formation, holder = self._formation, self.holder
        if formation is None or holder is None or order["step"] in self._pinned:
            return
        step = order["step"]
        try:
            self._pinned[step] = holder.pin(step)
        except (KeyError, AssertionError):
            self._exported(step, {"ok": False, "error": f"step {step} is not here"})
            return
        opening = {
            "directory": str(self._config.storage_directory),
            "max_to_keep": self._config.storage_keep,
            "rank": order["rank"],
            "world": order["world"],
            "coordinator": order["coordinator"],
            "layout": holder.layout.to_json(),
            "arena": str(holder.path),
            "slot": holder.slot,
            "devices": len(holder.layout.mesh.positions(holder.slot)),
        }
        if self._exporter is None or self._exporter.opening != opening:
            if self._exporter is not None:
                self._exporter.close()
            path = self._logs / f"{self._config.host}.exporter.log"
            self._exporter = Exporter(opening, path, self._emit)
        self._board.set("exporting", step)
        items = {**holder.items(step), "config": holder.layout.config}
        self._exporter.save(step, holder.own_offset(step), items)

    def exporter_says(self, exporter: Exporter, message: dict[str, Any]) -> None:
        """The exporter has written a step, failed, or ended."""
        if exporter is not self._exporter or message.get("op") == "open":
            return
        for step in list(self._pinned):
            self._exported(step, message)
        if not message.get("ok"):
            self._close_exporter()

    def _exported(self, step: int, message: dict[str, Any]) -> None:
        self._board.set("exporting", 0)
        if step in self._pinned and self.holder is not None:
            self.holder.unpin(self._pinned.pop(step))
        self._report(
            "exported",
            ballot=self._ballot,
            step=step,
            ok=bool(message.get("ok")),
            error=message.get("error", ""),
        )

    def _close_exporter(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()
        for step in list(self._pinned):
            if self.holder is not None:
                self.holder.unpin(self._pinned.pop(step))
        self._pinned.clear()

    def close(self) -> None:
        """Ends every process of this host and frees its memory."""
        self._stand_down()
        self._pool.close()
        if self.holder is not None:
            self.holder.close()
