"""A store and a network that fail on demand, for hosts on one `VirtualLoop`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from dtft.elastic.network import Closed, ControlChannel, Heard, Message, PortState
from dtft.elastic.store.api import (
    Compare,
    Delete,
    Events,
    KeyValue,
    KeyValues,
    Put,
    Store,
    StoreUnavailable,
)
from tests.support.virtual_loop import VirtualLoop

DIAL_S = 1.0
"""A host that does not answer is called for so long."""


class Door:
    """One host's way to a `Store`, which is a `Store` itself.

    Attributes:
        store: behind it; a test may put an empty one in its place.
        shut: no call comes through.
        lost: operations that are done, but whose answers are lost, once each.
    """

    private = True

    def __init__(self, store: Store) -> None:
        """Open."""
        self.store, self.shut, self.lost = store, False, list[str]()

    def _pass(self, operation: str, call: Callable[[], Any]) -> Any:
        if self.shut:
            raise StoreUnavailable(f"{operation}: the door is shut")
        answer = call()
        if operation in self.lost:
            self.lost.remove(operation)
            raise StoreUnavailable(f"{operation}: the answer was lost")
        return answer

    def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        return self._pass("get", lambda: self.store.get(key))

    def list(self, prefix: str) -> tuple[KeyValues, int]:
        """See `Store.list`."""
        return self._pass("list", lambda: self.store.list(prefix))

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """See `Store.put`."""
        self._pass("put", lambda: self.store.put(key, value, lease))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._pass("delete", lambda: self.store.delete(key))

    def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """See `Store.txn`."""
        return self._pass("txn", lambda: self.store.txn(compares, changes))

    def grant(self, ttl_s: float) -> int:
        """See `Store.grant`."""
        return self._pass("grant", lambda: self.store.grant(ttl_s))

    def keepalive(self, lease: int) -> float | None:
        """See `Store.keepalive`."""
        return self._pass("keepalive", lambda: self.store.keepalive(lease))

    def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        self._pass("revoke", lambda: self.store.revoke(lease))

    def watch(
        self,
        prefix: str,
        start_revision: int,
        stop: threading.Event,
        known: Callable[[], Sequence[Compare]] = tuple,
    ) -> Iterator[Events]:
        """See `Store.watch`."""
        return self.store.watch(prefix, start_revision, stop, known)

    def compact(self, revision: int) -> None:
        """See `Store.compact`."""
        self._pass("compact", lambda: self.store.compact(revision))

    def reclaim(self) -> None:
        """See `Store.reclaim`."""
        self._pass("reclaim", self.store.reclaim)

    def status(self) -> str:
        """See `Store.status`."""
        return self._pass("status", self.store.status)

    def close(self) -> None:
        """See `Store.close`; the store behind stays open."""


class VirtualChannel:
    """One end of a connection; `peer` is the other."""

    def __init__(self, wires: "VirtualNetwork", owner: str, address: str) -> None:
        """Nothing hears it yet; it is an end of host `owner`."""
        self.wires, self.owner, self.address, self.open = wires, owner, address, True
        self.peer: VirtualChannel
        self.heard: Heard = lambda channel, message: None
        self.closed: Closed = lambda channel, reason: None

    def post(self, message: Message) -> None:
        """See `ControlChannel.post`."""
        if self.open:
            self.wires.carry(self, lambda: self.peer.arrived(message))

    def arrived(self, message: Message) -> None:
        """The peer has sent something."""
        if self.open:
            self.heard(self, message)

    def close(self) -> None:
        """See `ControlChannel.close`."""
        if self.open:
            self.open = False
            self.wires.loop.post(self.closed, self, "it was closed")
            self.wires.carry(self, self.peer.broken)

    def broken(self) -> None:
        """The peer has closed the connection, or its process is gone."""
        if self.open:
            self.open = False
            self.closed(self, "the peer closed it")


Accept = Callable[[Message, ControlChannel], tuple[Heard, Closed] | None]


class VirtualNetwork:
    """A `Network` of ports that tests open. A host's address is its name and ":1".

    Attributes:
        ports: address to what accepts connections there.
        cut: hosts that nothing reaches, and whose messages are lost.
        stopped: hosts that take nothing for now, to what they take later.
        dialed: every address that was called.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        """Nobody listens."""
        self.loop = loop
        self.ports: dict[str, Accept] = {}
        self.cut: set[str] = set()
        self.stopped: dict[str, list[Callable[[], None]]] = {}
        self.dialed: list[str] = []

    def stop(self, host: str) -> None:
        """A host's process stands still; its kernel keeps what arrives."""
        self.stopped[host] = []

    def resume(self, host: str) -> None:
        """It goes on."""
        for arrive in self.stopped.pop(host):
            self.loop.post(arrive)

    def carry(self, sender: VirtualChannel, arrive: Callable[[], None]) -> None:
        """Takes something to the other end, unless one of them is cut off."""
        if not self.cut & {sender.owner, sender.peer.owner}:
            self.loop.post(self._arrive, sender.peer.owner, arrive)

    def _arrive(self, host: str, arrive: Callable[[], None]) -> None:
        if host in self.stopped:
            self.stopped[host].append(arrive)
        else:
            arrive()

    def _unreachable(self, host: str) -> bool:
        return host in self.cut or host in self.stopped

    def dial(
        self,
        address: str,
        hello: Message,
        opened: "Callable[[Future[ControlChannel]], None]",
        heard: Heard,
        closed: Closed,
    ) -> None:
        """See `Network.dial`."""
        self.dialed.append(address)
        outcome: Future[ControlChannel] = Future()
        caller, host = hello["host"], host_of(address)
        if self._unreachable(caller) or self._unreachable(host):
            outcome.set_exception(TimeoutError("no answer"))
            self.loop.call_later(DIAL_S, opened, outcome)
            return
        if address not in self.ports:
            outcome.set_exception(ConnectionRefusedError("nobody listens"))
        else:
            mine = VirtualChannel(self, caller, address)
            other = VirtualChannel(self, host, f"{caller}:1")
            mine.peer, other.peer = other, mine
            mine.heard, mine.closed = heard, closed
            hears = self.ports[address](hello, other)
            if hears is not None:
                other.heard, other.closed = hears
            outcome.set_result(mine)
        self.loop.post(opened, outcome)

    def probe(self, address: str, then: Callable[[PortState], None]) -> None:
        """See `Network.probe`."""
        if host_of(address) in self.cut:
            self.loop.post(then, "silent")
        else:
            self.loop.post(then, "open" if address in self.ports else "refused")


def host_of(address: str) -> str:
    """The host of an address."""
    return address.removesuffix(":1")
