"""A leader at a desk: what it orders and emits is written down, for tests.

The leader and its threads are the real ones, the store is the in-memory twin. What
hosts answer is each test's own business; there are no trainers and no sockets.
"""

import queue
from pathlib import Path
from typing import Any

import msgpack

from dtft.elastic.config import AgentConfig
from dtft.elastic.journal import Journal
from dtft.elastic.leader import Leader
from dtft.elastic.membership import Membership, View
from dtft.elastic.memory_store import MemoryStore
from dtft.elastic.orders import fault_of_order
from dtft.elastic.roles import HostRecord


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
        "config_digest": "",
    }
    return AgentConfig(**settings | changes)


class LeaderDesk:
    """Has no leader before `lead`."""

    leader: Leader

    def __init__(self, directory: Path, record: HostRecord, **changes: Any) -> None:
        """The leader is to be on the host of `record`; `changes` are of its config."""
        (directory / "logs").mkdir()  # the agent makes it
        self.directory, self.store = directory, MemoryStore()
        self.config = agent_config(directory, record.host, **changes)
        self.member = Membership(self.store, "j", record, 5.0, lambda *_: None)
        self.orders: list[tuple[str, str, dict[str, Any]]] = []
        self.emitted: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def begin(self, view: View) -> None:
        """A leader takes over; every host of the view is connected to it."""
        self.leader = Leader(
            *(self.config, self.member, view),
            emit=lambda *event: self.emitted.put(event),
            send=self.ordered,
            journal=Journal(self.directory, self.config.host),
        )
        for host in view.hosts:
            self.leader.connected(host)

    def ordered(self, host: str, op: str, **fields: Any) -> None:
        """The leader has an order for a host, who could read it as it arrives there."""
        received = msgpack.unpackb(
            msgpack.packb({"op": op, **fields}), strict_map_key=False
        )
        assert fault_of_order(received, host) is None
        self.orders.append((host, op, fields))

    def take(self, op: str) -> list[tuple[str, dict[str, Any]]]:
        """The orders of one kind, which are then forgotten."""
        found = [(to, fields) for to, kind, fields in self.orders if kind == op]
        self.orders = [order for order in self.orders if order[1] != op]
        return found
