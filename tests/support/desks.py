"""A leader at a desk: what it orders is written down, for tests.

The leader is the real one, on a loop whose time is a number and on the in-memory twin
of the store. What hosts answer is each test's own business; there are no trainers and
no sockets.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgpack

from dtft.checkpoint.storage.step_directories import storage_steps
from dtft.elastic.assignment import HostRecord, SlotAssignment
from dtft.elastic.job import AgentConfig
from dtft.elastic.leader.events import Journal, read_events
from dtft.elastic.leader.leader import Leader
from dtft.elastic.messages.orders import fault_of_order
from dtft.elastic.store.membership import Membership
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import View, job_key, read_commits, read_view
from tests.support.virtual_loop import VirtualLoop, VirtualMirrors

TICK_S = 0.1
LEASE_S = 5.0
ASSIGNMENT = SlotAssignment(
    generation=1,
    attempt=1,
    slots=("a", "b"),
    incarnations=("a.1", "b.1"),
    source="memory",
    step=7,
    rung=1,
    reason="",
)
"""Of hosts a and b, whose incarnations are those of `record_of`."""


def agent_config(directory: Path, host: str, **changes: Any) -> AgentConfig:
    """Settings of one host of a job of two slots, in which nothing is started."""
    settings: dict[str, Any] = {
        "job": "j",
        "host": host,
        "store": "s:1",
        "secret": b"x" * 16,
        "num_slots": 2,
        "trainer_command": (),
        "run_directory": directory,
        "storage_directory": directory / "checkpoints",
        "config_digest": "",
    }
    return AgentConfig(**settings | changes)


def record_of(host: str, **changes: Any) -> HostRecord:
    """What a host says of itself; its process is named as the host is."""
    settings: dict[str, Any] = {
        "host": host,
        "address": f"{host}:1",
        "incarnation": f"{host}.1",
        "joined_ns": 0,
        "pid": 1,
    }
    return HostRecord(**settings | changes)


class LeaderDesk:
    """Has no leader before `begin`. A leader ticks as time passes."""

    leader: Leader

    def __init__(
        self,
        directory: Path,
        record: HostRecord,
        *,
        list_steps: Callable[[Path], Iterable[int]] = storage_steps,
        **changes: Any,
    ) -> None:
        """The leader is to be on the host of `record`; `changes` are of its config."""
        (directory / "logs").mkdir()  # the agent makes it
        self.directory, self.loop = directory, VirtualLoop()
        self.store = MemoryStore(self.loop.now)
        self.config = agent_config(directory, record.host, **changes)
        self.member = Membership(
            *(self.store, VirtualMirrors(self.store, self.loop), "j", record, LEASE_S),
            self.loop,
            on_view=lambda view: None,
            on_lapse=lambda: None,
            on_store=lambda up: None,
            on_replaced=lambda by: None,
        )
        self._list_steps = list_steps
        self.orders: list[tuple[str, str, dict[str, Any]]] = []
        self.ended: list[str] = []
        self.commits_begun: list[int] = []
        self.resigned: list[int] = []
        """Terms in which the leader let another host lead."""
        self._terms = 0

    # --------------------------------------------------------------- the store

    def put(self, name: str, text: str) -> None:
        """Writes a key of the job."""
        self.store.put(job_key("j", name), text.encode())

    def delete(self, name: str) -> None:
        """Deletes a key of the job."""
        self.store.delete(job_key("j", name))

    def view(self) -> View:
        """What the store says now."""
        return read_view(self.store, "j")[0]

    def look(self) -> None:
        """The leader is told what the store says."""
        self.leader.see(self.view())

    def register(self, record: HostRecord) -> None:
        """The store knows a host."""
        self.put(f"m/hosts/{record.host}", record.to_json())

    # -------------------------------------------------------------- the leader

    def begin(self) -> None:
        """A leader takes over; every host that the store knows is connected to it."""
        self.delete("m/leader")
        self.put("m/leader", self.config.host)
        self._terms += 1
        if hasattr(self, "leader"):
            self.leader._journal.close(20)  # its last lines come before the next one's
        self.leader = Leader(
            *(self.config, self.member, self.view(), read_commits(self.store, "j")),
            self.loop,
            self.ordered,
            Journal(self.directory, self.config.host),
            self._list_steps,
            committing=self.commits_begun.append,
            ended=self.ended.append,
            resign=lambda: self.resigned.append(self._terms),
        )
        self._tick(self._terms)
        for record in self.view().hosts.values():
            self.leader.connected(record)

    def _tick(self, term: int) -> None:
        if term == self._terms:
            self.leader.tick()
            self.loop.call_later(TICK_S, self._tick, term)

    def turn(self, seconds: float = 2 * TICK_S) -> None:
        """Time passes."""
        self.loop.turn(seconds)

    def ordered(self, host: str, op: str, **fields: Any) -> None:
        """The leader has an order for a host, who could read it as it arrives there."""
        received = msgpack.unpackb(
            msgpack.packb({"op": op, **fields}), strict_map_key=False
        )
        assert fault_of_order(received, host) is None
        if op == "serve":
            if host == fields["server"]:
                self.loop.post(self._serves, host, fields["ballot"], fields["size"])
            return
        self.orders.append((host, op, fields))

    def _serves(self, host: str, ballot: tuple[int, int], size: int) -> None:
        """JAX's coordination service, which nobody here connects to, is ready."""
        address = f"10.0.0.1:{7000 + size}"
        report = {"op": "serving", "ballot": ballot, "address": address, "error": ""}
        self.leader.handle_report(host, report)

    def take(self, op: str) -> list[tuple[str, dict[str, Any]]]:
        """The orders of one kind, which are then forgotten."""
        found = [(to, fields) for to, kind, fields in self.orders if kind == op]
        self.orders = [order for order in self.orders if order[1] != op]
        return found

    @property
    def phase(self) -> str:
        """What the leader awaits."""
        return self.leader._rendezvous.phase

    @property
    def assignment(self) -> SlotAssignment | None:
        """Of the newest round, recorded or being recorded."""
        round_ = self.leader._rendezvous.current
        return round_.assignment if round_ is not None else None

    # ----------------------------------------------------------------- the run

    def events(self) -> list[dict[str, Any]]:
        """What the leader has recorded."""
        self.leader._journal.close(20)  # waits until it is written
        return read_events(self.directory)

    def kinds(self) -> list[str]:
        """The kinds of these events."""
        return [event["event"] for event in self.events()]

    @property
    def said(self) -> str:
        """The lines for people."""
        told = [e["text"] for e in self.events() if e["event"] == "message"]
        return "\n".join(told)

    def close(self) -> None:
        """Ends the leader."""
        self._terms += 1
        if hasattr(self, "leader"):
            self.leader.close()
        self.store.close()


class Desk(LeaderDesk):
    """A leader of two slots, on host a."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        super().__init__(directory, record_of("a"), **changes)
        self.register(record_of("a"))
        self.put("m/era", '{"era": 1, "id": "x"}')
        self.begin()

    def join(self, host: str) -> None:
        """A host registers and connects."""
        self.register(record_of(host))
        self.look()
        self.leader.connected(record_of(host))

    def answer(self, host: str, **has: Any) -> None:
        """A host says what it holds, if it was asked to."""
        for asked, _, fields in list(self.orders):
            if asked == host and "ballot" in fields:
                reply = {"holdings": {}, "corrupt": [], "finished": 0, "layouts": []}
                report = {"op": "holdings", "ballot": fields["ballot"], "items": {}}
                self.leader.handle_report(host, report | reply | has)
