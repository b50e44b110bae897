"""A simulated network: connections as TCP makes them, cut one way or both, slow, dead.

Messages go through msgpack as they really do. What is sent over a cut waits and is
delivered when the cut heals, unless nothing was acknowledged for as long as the real
sockets wait. Must not know what messages mean.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from dtft.checkpoint.transport import protocol
from dtft.elastic.network import Closed, ControlChannel, Heard, Message, PortState
from tests.simulation.scheduler import Scheduler, SimLoop

if TYPE_CHECKING:
    from dtft.elastic.host.edges import Accept
    from dtft.elastic.transfer.replica_server import Inbox

SILENCE_S = 10.0
"""TCP_USER_TIMEOUT of the real sockets."""
RETRY_S = 0.25
PROBE_S = 1.0


class Process(Protocol):
    """An agent process, as the network sees it."""

    host: str
    loop: SimLoop
    alive: bool


class Port:
    """What listens on one host: a `HostServer`."""

    def __init__(
        self,
        wire: "Wire",
        process: Process,
        address: str,
        inbox: "Inbox",
        accept: "Accept",
    ) -> None:
        self._wire, self.process, self._address = wire, process, address
        self.inbox, self.accept = inbox, accept

    @property
    def address(self) -> str:
        """host:port for peers."""
        return self._address

    def close(self) -> None:
        """Ends every connection."""
        self._wire.close_port(self)


class End:
    """One end of a connection: a `ControlChannel`."""

    def __init__(self, wire: "Wire", process: Process) -> None:
        self._wire, self.process = wire, process
        self.peer: End = self
        self.heard: Heard | None = None
        self.closed: Closed | None = None
        self.open = True
        self.told = False
        self.backlog: list[Message] = []
        self.held: list[Packed | None] = []
        """What waits for a cut to heal; None is the end of the connection."""
        self.last_s = 0.0
        self.stalled_s: float | None = None

    @property
    def address(self) -> str:
        """Of the peer."""
        return self.peer.process.host

    def post(self, message: Message) -> None:
        """See `ControlChannel.post`."""
        if self.open:
            self._wire.send(self, self._wire.pack(self, message))

    def close(self) -> None:
        """See `ControlChannel.close`."""
        if self.open:
            self.open = False
            self._wire.send(self, None)
            self.tell("it was closed")

    def kill(self, reason: str) -> None:
        """The connection is gone for this end."""
        self.open = False
        self.held.clear()
        self.stalled_s = None
        self.tell(reason)

    def tell(self, reason: str) -> None:
        """Tells the owner, once, that the connection has ended."""
        if not self.told and self.closed is not None:
            self.told = True
            self.process.loop.post(self.closed, self, reason)

    def receive(self, message: Message) -> None:
        """A message has arrived."""
        if self.heard is None:
            self.backlog.append(message)
        else:
            self.process.loop.post(self.heard, self, message)

    def hear(self, heard: Heard, closed: Closed) -> None:
        """Messages go to `heard` from now on, with those that came before."""
        self.heard, self.closed = heard, closed
        for message in self.backlog:
            self.receive(message)
        self.backlog.clear()
        if not self.open:
            self.tell("it was closed")


Packed = bytes | Message
Mutate = Callable[[str, Message], Message]


class Wire:
    """All connections between all hosts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self.rng = scheduler, scheduler.rng
        self.ports: dict[str, Port] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self.unfelt: set[tuple[str, str]] = set()
        """Cuts that trainers do not feel: they have another network."""
        self.gone: set[str] = set()
        """Machines without power: nothing is answered, not even refused."""
        self.mutate: Mutate | None = None
        self.delay_s: dict[str, float] = {}
        """Host to the seconds that its packets take at most, beyond the usual."""
        self.large = False
        self.messages = 0
        self.bytes = 0
        self.sent: Callable[[str, str, bytes], None] | None = None
        self._ends: dict[str, dict[End, None]] = {}
        self._stalled: list[End] = []
        self._next_port = 1

    # ------------------------------------------------------------------- cuts

    def blocked(self, source: str, target: str) -> bool:
        """Whether packets do not get from one host to another."""
        if self.gone and (source in self.gone or target in self.gone):
            return True
        return bool(self._cuts) and self._cuts.get((source, target), 0) > 0

    def parted(self, source: str, target: str) -> bool:
        """Whether what trainers send does not get from one host to another."""
        return (source, target) not in self.unfelt and self.blocked(source, target)

    def cut(self, source: str, target: str) -> None:
        """Stops packets in one direction."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """Ends one cut."""
        left = self._cuts.get((source, target), 0) - 1
        if left > 0:
            self._cuts[source, target] = left
        else:
            self._cuts.pop((source, target), None)
        self._flush()

    def cut_hosts(self) -> set[str]:
        """Hosts that some packets do not reach or leave."""
        return {host for pair in self._cuts for host in pair} | self.gone

    def _flush(self) -> None:
        stalled, self._stalled = self._stalled, []
        for end in stalled:
            here, there = end.process.host, end.peer.process.host
            if end.stalled_s is None:
                continue
            if self.blocked(here, there) or self.blocked(there, here):
                self._stalled.append(end)
                if self.blocked(here, there):
                    continue
            else:
                end.stalled_s = None
            held, end.held = end.held, []
            again = self._scheduler.now + self.rng.uniform(0.01, 1.0)
            end.last_s = max(end.last_s, again)  # packets are sent again after a while
            for data in held:
                self.send(end, data)

    def latency(self, source: str, target: str) -> float:
        """Seconds that a packet takes."""
        delay = self.rng.uniform(0.0001, 0.001)
        if self.delay_s:
            for host in (source, target):
                if limit := self.delay_s.get(host, 0.0):
                    delay += self.rng.uniform(0, limit)
        return delay

    # --------------------------------------------------------------- messages

    def pack(self, end: End, message: Message) -> "Packed":
        """The bytes of a message; of `large` worlds the message, for want of memory."""
        if self.mutate is not None:
            message = self.mutate(end.process.host, message)
        data = protocol.pack(message)
        self.messages += 1
        self.bytes += len(data)
        if self.sent is not None:
            self.sent(end.process.host, message.get("op", ""), data)
        return dict(message) if self.large else data

    def send(self, end: End, data: "Packed | None") -> None:
        """Sends bytes, or the end of the connection, in order."""
        here, there = end.process.host, end.peer.process.host
        blocked = self.blocked(here, there)
        if blocked or self.blocked(there, here):
            self._stall(end)
        if blocked or end.held:
            end.held.append(data)
            return
        at = max(end.last_s + 1e-7, self._scheduler.now + self.latency(here, there))
        end.last_s = at
        self._scheduler.at(at, self._arrive, end, data)

    def _stall(self, end: End) -> None:
        if end.stalled_s is None:
            end.stalled_s = self._scheduler.now
            self._stalled.append(end)
            self._scheduler.after(SILENCE_S, self._give_up, end, end.stalled_s)

    def _give_up(self, end: End, since: float) -> None:
        if end.stalled_s == since and end.process.alive:
            end.kill("nothing was acknowledged in time")

    def _arrive(self, end: End, data: "Packed | None") -> None:
        here, target = end.process.host, end.peer
        there = target.process.host
        if self.blocked(here, there):
            end.held.append(data)
            self._stall(end)
            return
        if not target.process.alive or not target.open:
            if end.open and not self.blocked(there, here):
                end.kill("reset by peer")
        elif data is None:
            target.kill("closed by peer")
        elif isinstance(data, bytes):
            target.receive(msgpack.unpackb(data, strict_map_key=False))
        else:
            target.receive(data)

    # ------------------------------------------------------------ connections

    def listen(self, process: Process, inbox: "Inbox", accept: "Accept") -> Port:
        """Opens a port."""
        address = f"{process.host}:{20000 + self._next_port}"
        self._next_port += 1
        port = self.ports[address] = Port(self, process, address, inbox, accept)
        return port

    def close_port(self, port: Port) -> None:
        """Closes a port."""
        self.ports.pop(port.address, None)

    def _keep(self, end: End) -> None:
        ends = self._ends.setdefault(end.process.host, {})
        if len(ends) > 16 and len(ends) & (len(ends) - 1) == 0:
            for one in [it for it in ends if not it.open]:
                del ends[one]
        ends[end] = None

    def process_ended(self, process: Process) -> None:
        """A process is gone: its kernel closes what it had."""
        for port in [it for it in self.ports.values() if it.process is process]:
            del self.ports[port.address]
        for end in list(self._ends.get(process.host, ())):
            if end.process is process:
                if end.open:
                    end.open = False
                    self.send(end, None)
                self._ends[process.host].pop(end, None)

    def reset(self, host: str) -> None:
        """Breaks one connection of a host, chosen by the seed."""
        ends = [it for it in self._ends.get(host, ()) if it.open]
        if ends:
            end = self.rng.choice(ends)
            end.kill("reset")
            end.peer.kill("reset")

    def connect(
        self,
        process: Process,
        address: str,
        limit_s: float,
        reached: Callable[[Port], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Reaches the process behind a port; what follows runs there."""
        until = self._scheduler.now + limit_s
        there = address.rpartition(":")[0]

        def attempt() -> None:
            if not process.alive:
                return
            here, now = process.host, self._scheduler.now
            if self.blocked(here, there) or self.blocked(there, here):
                if now >= until:
                    failed(TimeoutError(f"{address} does not answer"))
                else:
                    self._scheduler.at(min(until, now + RETRY_S * 2), attempt)
                return
            delay = self.latency(here, there)
            port = self.ports.get(address)
            if port is None or not port.process.alive:
                refused = ConnectionRefusedError(f"{address} refuses")
                self._scheduler.after(delay, failed, refused)
            else:
                port.process.loop.beside(delay, lambda: arrived(port))
                self._scheduler.at(until + 0.01, late, port)

        done: list[bool] = []

        def arrived(port: Port) -> None:
            if not done and process.alive and port.process.alive:
                done.append(True)
                reached(port)

        def late(port: Port) -> None:
            if not done:
                done.append(True)
                if port.process.alive:
                    failed(TimeoutError(f"{address} does not say who it is"))
                else:
                    failed(ConnectionResetError(f"{address} has gone"))

        self._scheduler.after(self.latency(process.host, there), attempt)

    def dial(
        self,
        process: Process,
        address: str,
        hello: Message,
        limit_s: float,
        opened: "Callable[[Future[ControlChannel]], None]",
        heard: Heard,
        closed: Closed,
    ) -> None:
        """See `Network.dial`."""
        loop = process.loop

        def failed(error: Exception) -> None:
            outcome: Future[ControlChannel] = Future()
            outcome.set_exception(error)
            loop.beside(0.0, lambda: loop.post(opened, outcome))

        def reached(port: Port) -> None:
            near, far = End(self, process), End(self, port.process)
            near.peer, far.peer = far, near
            self._keep(near)
            self._keep(far)
            told = msgpack.unpackb(msgpack.packb(hello), strict_map_key=False)

            def take() -> None:
                hearing = port.accept(told, far)
                if hearing is None:
                    far.close()
                else:
                    far.hear(*hearing)

            port.process.loop.post(take)
            outcome: Future[ControlChannel] = Future()
            outcome.set_result(near)

            def open_near() -> None:
                loop.post(opened, outcome)
                near.hear(heard, closed)

            loop.beside(self.latency(port.process.host, process.host), open_near)

        self.connect(process, address, limit_s, reached, failed)

    def probe(
        self, process: Process, address: str, then: Callable[[PortState], None]
    ) -> None:
        """See `Network.probe`."""
        there, loop = address.rpartition(":")[0], process.loop

        def ask() -> None:
            here = process.host
            if self.blocked(here, there) or self.blocked(there, here):
                loop.beside(PROBE_S, lambda: loop.post(then, "silent"))
                return
            port = self.ports.get(address)
            serves = port is not None and port.process.alive
            loop.post(then, "open" if serves else "refused")

        loop.beside(self.latency(process.host, there), ask)

    def call(
        self,
        process: Process,
        address: str,
        handler: Callable[[Port], Any],
        limit_s: float,
        done: Callable[[Any, Exception | None], None],
    ) -> None:
        """Asks a peer's serving thread something, as pushes and fetches do.

        Args:
            process: who asks.
            address: of the peer.
            handler: runs there; what it returns or raises is the answer.
            limit_s: until when an answer is waited for.
            done: takes the answer, on a thread of the process that asks.
        """
        until = self._scheduler.now + limit_s

        def reached(port: Port) -> None:
            value, error = None, None
            try:
                value = handler(port)
            except Exception as raised:
                error = raised
            answer(port, value, error)

        def answer(port: Port, value: Any, error: Exception | None) -> None:
            here, there = port.process.host, process.host
            if not process.alive:
                return
            if self.blocked(here, there) or self.blocked(there, here):
                if self._scheduler.now >= until:
                    failed(TimeoutError(f"{address} does not answer"))
                else:
                    self._scheduler.after(RETRY_S, answer, port, value, error)
                return
            delay = self.latency(here, there)
            process.loop.beside(delay, lambda: done(value, error))

        def failed(error: Exception) -> None:
            process.loop.beside(0.0, lambda: done(None, error))

        self.connect(process, address, limit_s, reached, failed)
