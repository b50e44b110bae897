"""A host's duties where the trainer is the user's own process.

As `Follower`, but the process decides when it saves and restores: it learns the step on
offer at once, tells its layout at its first save, and asks for what it wants, which may
be a step on other shardings. Must not know who else is in the job.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dtft.checkpoint.board import Board
from dtft.checkpoint.slices import Layout, Slice
from dtft.checkpoint.transport import Credentials
from dtft.elastic.assembling import bring
from dtft.elastic.attached import AttachedTrainers
from dtft.elastic.config import AgentConfig
from dtft.elastic.follower import Follower
from dtft.elastic.formation import Formation
from dtft.elastic.replication import FetchFailed
from dtft.elastic.side_arena import SideArena


class ServedFollower(Follower):
    """One host's duties towards the process that is attached to it."""

    def __init__(
        self,
        pool: AttachedTrainers,
        config: AgentConfig,
        credentials: Credentials,
        board: Board,
        emit: Callable[..., None],
        report: Callable[..., None],
    ) -> None:
        """`pool` listens already; its events go to `emit` from now on."""
        self._attached = pool
        self._side = SideArena(config.memory_directory)
        super().__init__(config, credentials, board, emit, report)
        pool.bind(emit)

    def _make_pool(self) -> Any:
        return self._attached

    def _holds(self, read: bool) -> dict[str, Any]:
        return super()._holds(read) | {"attached_ns": self._attached.waiting}

    def restored_memory(self, formation: Formation, outcome: dict[str, Any]) -> None:
        """The step is here, so the process may go on and ask for it."""
        super().restored_memory(formation, outcome)
        if formation is self._formation and formation.restored is not None:
            order = formation.order
            self._board.set("recovering", 0)
            self._attached.formed(source=order["source"], step=order["step"])

    # --------------------------------------------------------------- the process

    def trainer_says(self, pid: int, message: dict[str, Any]) -> None:
        """A message of the user's process."""
        formation = self._formation
        if message["op"] == "stage" and self._attached.is_active(pid):
            self._board.set("finished", message["step"])  # so a loss can be counted
        if not self._attached.is_active(pid) or formation is None:
            return
        slot = formation.slot
        if message["op"] == "locate":
            self._locate(message["step"])
        elif message["op"] == "want":
            wanted = {name: message[name] for name in ("step", "layout")}
            self._tell("wanted", slot=slot, **wanted)
        elif message["op"] == "taken":
            self._side.free()
        elif message["op"] == "flush":
            wanted = {name: message[name] for name in ("token", "step", "store")}
            self._tell("flush", slot=slot, **wanted)
        elif message["op"] == "left":
            step = message["step"]
            self._tell("finished", slot=slot, step=step)
        else:
            super().trainer_says(pid, message)

    def _locate(self, step: int) -> None:
        holder = self._copies.holding(step)
        if holder is None or step not in holder.steps():
            text = f"{self._config.host} does not hold step {step} any more"
            self._attached.send("located", error=text)
            return
        self._attached.send(
            "located",
            step=step,
            layout=holder.layout.to_json(),
            arena=str(holder.path),
            places=holder.own_places(step),
            digests=holder.all_own_digests(step),
            items=holder.items(step),
        )

    # ---------------------------------------------------------- other shardings

    def pass_on(self, op: str, **fields: Any) -> None:
        """As `Follower.pass_on`, but what is to be assembled is this host's work."""
        formation = self._formation
        if op != "assemble" or "error" in fields:
            super().pass_on("assembled" if op == "assemble" else op, **fields)
        elif formation is not None:
            args = formation, fields
            threading.Thread(target=self._assemble, args=args, daemon=True).start()

    def _assemble(self, formation: Formation, told: dict[str, Any]) -> None:
        """On a thread: makes the wanted slices, checks them and says where they are."""
        config, copies = self._config, self._copies
        holders = [it for it in (copies.holder, *copies.former) if it is not None]
        epoch = dict(zip(("generation", "attempt"), formation.epoch, strict=True))

        def fill(new: Mapping[Slice, memoryview]) -> int:
            return bring(
                *(new, told | epoch, config.host, self._credentials),
                *(config.timeouts.restore, holders, config.chunk_bytes),
            )

        layout = Layout.from_json(told["layout"])
        answer: dict[str, Any] = {"step": told["step"], "layout": told["layout"]}
        try:
            answer |= self._side.fill(layout, formation.slot, config.chunk_bytes, fill)
        except (FetchFailed, OSError, KeyError) as error:
            answer["error"] = str(error)
        self._emit("assembled", formation, answer)

    def assembled(self, formation: Formation, answer: dict[str, Any]) -> None:
        """What a process wants is in memory, or why not."""
        if formation is self._formation:
            self._attached.send("assembled", **answer)
        elif "arena" in answer:
            self._side.free(answer["arena"])

    def _stand_down(self, reason: str = "", fatal: bool = False) -> None:
        self._side.free()
        super()._stand_down(reason, fatal)

    def _announced(self, formation: Formation, layout: Layout) -> None:
        """Another layout than the commit's gets memory beside it, until its first."""
        order = formation.order
        held = (
            Layout.from_json(order["layout"]) if order["source"] == "memory" else None
        )
        if held is None or held.digest == layout.digest:
            super()._announced(formation, layout)
            return
        try:
            slot, domains = order["slot"], order["domains"]
            self._copies.hold(layout, slot, domains, keep=order["step"])
        except OSError as error:
            self._fatal(str(error))
            return
        formation.stop_pushers()  # they sent again what peers had lost of the old one
        formation.order = {**order, "source": "init"}
        self._accept(formation, layout)

    def trainer_exited(self, pid: int, code: int) -> None:
        """The process has gone; without a goodbye the leader must know.

        Args:
            pid: its ident.
            code: 1 if it has said goodbye.
        """
        if self._attached.exited(pid) == "active" and not code:
            self._tell("process_gone")
