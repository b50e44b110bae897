"""One host's agent in `memory_tier_vs_orbax.py`: dtft's memory tier without the rest.

The parts are those of `dtft agent` (copies, pushes, fetches, restore, the link to the
trainer), driven by a leader that knows neither faults nor generations. It starts no
trainer: one that connects is served, so that both tiers begin with trainers that run.
It must never import JAX.
"""

import json
import queue
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtft.checkpoint.managers import AgentLink, LinkClosed, listen_for_links
from dtft.checkpoint.state import Layout
from dtft.checkpoint.timeouts import Timeouts
from dtft.checkpoint.transport import Credentials, TransportServer
from dtft.elastic.job import AgentConfig
from dtft.elastic.transfer import (
    Copies,
    Inbox,
    Pusher,
    restore_into,
    serve_fetch,
    serve_pushes,
)

CHUNK_BYTES = 4 << 20
LIMIT_S = 120.0
JOB = "tier"


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """What an agent is told on stdin, as JSON."""

    host: str
    """Name of the host."""
    slot: int
    """The slot it fills."""
    directory: str
    """Holds the sockets and every host's memory; a memory file system."""
    copies: int
    """Copies of every slice."""
    secret: str
    """Of the job."""

    def to_json(self) -> str:
        """JSON in one line."""
        return json.dumps(asdict(self))

    @property
    def memory(self) -> Path:
        """This host's arena."""
        return self.config.memory_directory

    @property
    def config(self) -> AgentConfig:
        """The settings that the parts of an agent read."""
        return AgentConfig(
            job=JOB,
            host=self.host,
            store="",
            secret=self.secret.encode(),
            num_slots=1,
            trainer_command=(),
            run_directory=Path(self.directory),
            storage_directory=Path(self.directory) / "checkpoints",
            config_digest="",
            arena_directory=Path(self.directory),
            copies=self.copies,
            chunk_bytes=CHUNK_BYTES,
            timeouts=Timeouts(replicate=LIMIT_S, restore=LIMIT_S),
        )


def socket_of(directory: Path, slot: int) -> Path:
    """Where the agent of a slot listens for its trainer."""
    return directory / f"agent{slot}.sock"


def leader_socket(directory: Path) -> Path:
    """Where the leader listens for agents."""
    return directory / "leader.sock"


class HostAgent:
    """Serves one slot until the leader is gone."""

    def __init__(self, task: AgentTask) -> None:
        """Listens to peers and to the trainer; says hello to the leader."""
        self._task, self._credentials = (
            task,
            Credentials(job=JOB, secret=task.secret.encode()),
        )
        directory = Path(task.directory)
        task.memory.mkdir()
        self._copies = Copies(task.config)
        self._events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._epoch = (0, 0)
        self._pushers: list[Pusher] = []
        self._trainer: AgentLink | None = None
        self._wanted: tuple[int, int] | None = None
        """The step staged last, and the step for which the trainer wants buffers."""
        inbox = Inbox(
            epoch=lambda: self._epoch,
            holder=lambda: self._copies.holder,
            held=lambda step, source, root: self._events.put(
                ("held", {"step": step, "source": source, "root": root})
            ),
        )
        self._server = TransportServer(
            "127.0.0.1:0",
            self._credentials,
            {
                "push": lambda channel: serve_pushes(channel, inbox),
                "fetch": lambda channel: serve_fetch(channel, inbox),
            },
        )
        self._listener = listen_for_links(socket_of(directory, task.slot))
        threading.Thread(target=self._accept, daemon=True).start()
        self._leader = AgentLink.connect(leader_socket(directory), LIMIT_S)
        self._tell("hello", address=self._server.address)
        threading.Thread(target=self._hear_leader, daemon=True).start()

    def _tell(self, op: str, **fields: Any) -> None:
        self._leader.send(op, host=self._task.host, slot=self._task.slot, **fields)

    def _hear_leader(self) -> None:
        try:
            while True:
                message = self._leader.receive()
                self._events.put((message.pop("op"), message))
        except LinkClosed:
            self._events.put(("end", {}))

    def _accept(self) -> None:
        while True:
            self._trainer = AgentLink(self._listener.accept()[0])
            self._hear_trainer(self._trainer)  # one trainer after the other

    def _hear_trainer(self, link: AgentLink) -> None:
        try:
            while True:
                message = link.receive()
                self._events.put((message.pop("op"), message))
        except LinkClosed:
            link.close()

    def run(self) -> None:
        """Handles one event after the other."""
        while (event := self._events.get())[0] != "end":
            getattr(self, f"_on_{event[0]}")(**event[1])

    # ------------------------------------------------------------- the formation

    def _on_layout(self, layout: str) -> None:
        self._layout = Layout.from_json(layout)
        self._tell("layout", layout=layout)

    def _on_expect(self, layout: str) -> None:
        self._copies.expect(Layout.from_json(layout))

    def _on_report(self, epoch: list[int]) -> None:
        self._epoch = (epoch[0], epoch[1])  # what peers ask for in it is served
        self._tell("holdings", **self._copies.report(read=False))

    def _on_begin(self, epoch: list[int], addresses: list[str]) -> None:
        self._copies.hold(self._layout, self._task.slot).keep_only(set())
        self._join(epoch, addresses)
        self._hand_over("init", 0)

    def _on_restore(self, epoch: list[int], addresses: list[str], **order: Any) -> None:
        holder = self._copies.hold(self._layout, self._task.slot)
        host = self._task.host
        outcome = restore_into(holder, order, host, self._credentials, LIMIT_S)
        self._tell("restored", outcome=outcome)
        if "error" not in outcome:
            self._join(epoch, addresses)
            self._hand_over("memory", order["step"])

    def _join(self, epoch: list[int], addresses: list[str]) -> None:
        for pusher in self._pushers:
            pusher.close()
        self._epoch = (epoch[0], epoch[1])
        self._pushers = self._copies.pushers(addresses, self._credentials, self._epoch)

    def _hand_over(self, source: str, step: int) -> None:
        where = self._copies.located(step, source == "memory")
        assert self._trainer is not None
        self._trainer.send("restore", source=source, step=step, **where)

    # -------------------------------------------------------------------- a step

    def _on_stage(self, step: int) -> None:
        assert self._trainer is not None
        self._trainer.send("room", **self._room(step))

    def _room(self, step: int) -> dict[str, Any]:
        assert self._copies.holder is not None
        self._wanted = None
        return {
            "step": step,
            "copied": b"",
            **vars(self._copies.holder.begin_stage(step)),
        }

    def _on_staged(
        self,
        step: int,
        digests: list[bytes],
        kept: bytes,
        items: dict,
        following: int | None,
        **_: Any,
    ) -> None:
        assert self._copies.holder is not None
        self._wanted = None if following is None else (step, following)
        self._copies.holder.staged(step, digests, items, kept)
        for pusher in self._pushers:
            pusher.offer(step)
        self._tell("staged", step=step, digests=digests)

    def _on_held(self, step: int, source: int, root: str) -> None:
        self._tell("held", step=step, source=source, root=root)

    def _on_release(self, step: int) -> None:
        assert self._copies.holder is not None and self._trainer is not None
        self._copies.holder.drop_before(step, keep={step})
        room, wanted = None, self._wanted
        if wanted is not None and wanted[0] <= step:
            room = self._room(wanted[1])
        try:
            self._trainer.send(
                "release",
                step=step,
                committed=True,
                stop_at=None,
                changes=(),
                room=room,
            )
        except LinkClosed:
            pass  # the trainer has ended; its last step is committed all the same


def main() -> None:
    """Serves until the leader is gone."""
    HostAgent(AgentTask(**json.loads(sys.stdin.readline()))).run()


if __name__ == "__main__":
    main()
