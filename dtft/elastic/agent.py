"""One host's agent: an event loop between store, peers, leader and trainers.

Owns the parts that have the host's connections and threads, and passes their events to
`Follower` (this host's duties) and, while this host leads, to the `Leader` that
`Leadership` has. Contains no decision of its own about the job. It must never import
JAX: a JAX client aborts its process when the coordination service dies.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import secrets
import shutil
import time
from typing import Any

from dtft.checkpoint.board import Board
from dtft.checkpoint.transport import Channel, Credentials, TransportServer
from dtft.elastic.config import AgentConfig
from dtft.elastic.demands import Answer
from dtft.elastic.entry import check_domain, check_job, refuse_taken_name
from dtft.elastic.follower import Follower
from dtft.elastic.host_memory import make_memory_directory
from dtft.elastic.leader import Leader
from dtft.elastic.leadership import Leadership
from dtft.elastic.listening import listen
from dtft.elastic.membership import Membership, View
from dtft.elastic.peers import Peers
from dtft.elastic.roles import HostRecord
from dtft.elastic.store import Store, StoreUnavailable
from dtft.elastic.trainers import Trainers
from dtft.elastic.upward import Upward

logger = logging.getLogger(__name__)

TICK_S = 0.1

FOLLOWER_EVENTS = {
    "trainer": "trainer_says",
    "trainer_exit": "trainer_exited",
    "restored_memory": "restored_memory",
    "assembled": "assembled",
    "held": "held",
    "exporter": "exporter_says",
}
LEADER_EVENTS = {
    "report": "hears",
    "written": "written",
    "write_delayed": "delayed",
    "coordinator": "coordinator_ready",
}
"""Events that go straight to a method of this host's follower or leader."""


class Agent:
    """Runs until the job has a result, or this host is told to leave."""

    def __init__(
        self, config: AgentConfig, store: Store, trainers: Trainers | None = None
    ) -> None:
        """Creates this host's memory directory and listens; joins nothing yet.

        Args:
            config: of this host.
            store: of the job.
            trainers: listen in this host's memory directory already; by default the
                directory is made, and this host starts its own.
        """
        refuse_taken_name(store, config)
        self._config, self._store = config, store
        self._events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._incarnation = secrets.token_hex(8)
        self._credentials = Credentials(
            job=config.job, secret=config.secret, tls=config.tls
        )
        if trainers is None:
            make_memory_directory(config.memory_directory)
        (config.run_directory / "logs").mkdir(parents=True, exist_ok=True)
        self._board = Board(config.memory_directory / "board", create=True)
        self._view = View()
        self._upward = Upward(
            config.host,
            self._incarnation,
            self._credentials,
            config.timeouts.connect,
            self._emit,
        )
        self._peers = Peers(self._emit)
        self._follower = Follower(
            *(config, self._credentials, self._board, self._emit, self._report),
            trainers,
        )
        self._server = self._listen()
        self._record = self._describe()
        self._membership = Membership(
            store, config.job, self._record, config.timeouts.lease, self._emit
        )
        self._leadership = Leadership(
            Leader, config, self._membership, self._peers, self._emit
        )

    def _listen(self) -> TransportServer:
        """Opens the port; if that cannot be, no memory is left behind."""
        try:
            return listen(
                *(self._config, self._credentials),
                *(self._follower.inbox(), self._peers, self._emit),
            )
        except ValueError:
            self._follower.close()
            shutil.rmtree(self._config.memory_directory, ignore_errors=True)
            raise

    def _describe(self) -> HostRecord:
        """What the store is told of this host."""
        return HostRecord(
            host=self._config.host,
            address=self._server.address,
            incarnation=self._incarnation,
            joined_ns=time.time_ns(),
            pid=os.getpid(),
            domain=self._config.domain,
        )

    def _emit(self, *event: Any) -> None:
        self._events.put(event)

    # --------------------------------------------------------------------- run

    def run(self) -> str:
        """Serves until the job ends.

        Returns:
            The job's result as JSON; "" if this host left before the end.

        Raises:
            StoreUnavailable: the store cannot be reached at the start.
            JobMismatch: the secret or the config differs from the job's.
        """
        try:
            check_job(self._store, self._config)
            check_domain(self._store, self._config)
            self._membership.start()
            self._follower.warm()
            return self._loop()
        finally:
            self._close()

    def leave(self) -> None:
        """Makes `run` return soon; safe in a signal handler."""
        self._events.put(("leave",))

    def _loop(self) -> str:
        next_tick = time.monotonic() + TICK_S
        while True:
            event: tuple[Any, ...] = ("tick",)
            wait = next_tick - time.monotonic()
            with contextlib.suppress(queue.Empty):
                if wait > 0:  # a full queue must not keep deadlines from being seen
                    event = self._events.get(timeout=wait)
            if event[0] == "tick":
                next_tick = time.monotonic() + TICK_S
            if event[0] == "leave":
                return ""
            if event[0] == "view" and event[1].result is not None:
                return event[1].result
            try:
                self._handle(*event)
            except StoreUnavailable as error:
                logger.warning("%s", error)

    def _handle(self, kind: str, *values: Any) -> None:
        if kind in FOLLOWER_EVENTS:
            getattr(self._follower, FOLLOWER_EVENTS[kind])(*values)
        elif kind not in LEADER_EVENTS:
            getattr(self, f"_on_{kind}")(*values)
        elif (leader := self._leadership.leader) is not None:
            getattr(leader, LEADER_EVENTS[kind])(*values)

    def _close(self) -> None:
        self._leadership.close()
        self._follower.close()
        self._membership.leave()
        self._server.close()
        self._upward.close()
        self._peers.close()
        self._board.close()
        shutil.rmtree(self._config.memory_directory, ignore_errors=True)

    # ---------------------------------------------------------------- the view

    def _on_view(self, view: View) -> None:
        self._view = view
        me = self._config.host
        if view.leader is None:
            self._leadership.give_up()
            self._membership.campaign()
        elif view.leader == me and self._mine(view):
            if self._leadership.take(view):
                self._upward.close()
        else:
            self._leadership.give_up()
            self._follow(view)
        if (leader := self._leadership.leader) is not None:
            leader.see(view)
        self._retire_if_replaced(view)
        self._follower.see(view.hosts.values())

    def _on_attachment(self) -> None:
        """A user's process has attached or gone; the store tells whoever leads."""
        index, ident = self._follower.attachment
        self._record = dataclasses.replace(
            self._record, process=index, attached_ns=ident
        )
        self._membership.describe(self._record)

    def _retire_if_replaced(self, view: View) -> None:
        """Stands down when a newer generation does without this host.

        So a host that was frozen, or cut off, comes back as a spare.
        """
        newer = view.assignment
        if newer is None or newer.epoch <= self._follower.epoch:
            return
        if (
            self._follower.epoch > (0, 0)
            and self._incarnation not in newer.incarnations
        ):
            logger.warning("generation %d is without this host", newer.generation)
            self._follower.retire()
            self._upward.close()  # connects anew, which offers it as a spare

    def _mine(self, view: View) -> bool:
        record = view.hosts.get(self._config.host)
        return record is not None and record.incarnation == self._incarnation

    def _on_deposed(self) -> None:
        self._leadership.give_up()

    def _on_store(self, up: bool) -> None:
        logger.warning("store is %s", "back" if up else "away")

    def _on_tick(self) -> None:
        if (leader := self._leadership.leader) is not None:
            leader.tick()
        elif self._leadership.pending:
            self._on_view(self._view)
        elif self._view.leader is None and self._view.hosts:
            self._membership.campaign()
        else:
            self._follow(self._view)

    # ------------------------------------------------------ towards the leader

    def _on_leader_lost(self, channel: Channel) -> None:
        self._upward.lost(channel)
        self._follow(self._view)

    def _follow(self, view: View) -> None:
        """Connects to the leader; one that refuses is dead, and all shall know."""
        leader = view.hosts.get(view.leader or "")
        if leader is None or leader.host == self._config.host:
            return
        if not self._upward.connect(leader):
            self._membership.expel_soon(leader.host, view.leader_lease)

    def _report(self, op: str, **fields: Any) -> None:
        """Sends a report of this host to whoever leads."""
        if self._leadership.leader is not None:
            self._emit("report", self._config.host, {"op": op, **fields})
        else:
            self._upward.send({"op": op, **fields})

    def _on_order(self, channel: Channel, message: dict[str, Any]) -> None:
        if self._upward.is_current(channel):
            self._obey(message)

    def _on_own_order(self, message: dict[str, Any]) -> None:
        self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        op = message["op"]
        fields = {key: value for key, value in message.items() if key != "op"}
        if "ballot" in fields:
            fields["ballot"] = tuple(fields["ballot"])
        if op in ("prepare", "export"):
            getattr(self._follower, op)(fields)
        elif op in ("reform", "replicate", "release", "lend", "expect"):
            getattr(self._follower, op)(**fields)
        else:
            self._follower.pass_on(op, **fields)

    # --------------------------------------------------- from peers (as leader)

    def _on_control(self, host: str, channel: Channel) -> None:
        self._peers.connected(host, channel)
        if (leader := self._leadership.leader) is not None:
            leader.connected(host)

    def _on_control_lost(self, host: str, channel: Channel) -> None:
        self._peers.lost(host, channel, self._view.hosts.get(host))

    def _on_host_dead(self, record: HostRecord, channel: Channel) -> None:
        if self._peers.replaced(record.host, channel):
            return  # it is back already
        known = self._view.hosts.get(record.host)
        if known is not None and known.incarnation == record.incarnation:
            self._membership.expel_soon(
                record.host, self._view.leases.get(record.host, 0)
            )
        if (leader := self._leadership.leader) is not None:
            leader.lost(record.host, "its connection closed, its port is dead")

    def _on_export_wanted(self, answer: Answer) -> None:
        self._leadership.export_wanted(answer)

    def _on_scaling_wanted(self, replicas: int, answer: Answer) -> None:
        self._leadership.scaling_wanted(replicas, answer)

    def _on_committing(self, step: int) -> None:
        self._board.set("committing", step)
