"""A store and a network that fail on demand, for hosts on one `VirtualLoop`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from dtft.elastic.network import Closed, ControlChannel, Heard, Message
from dtft.elastic.store import (
    Compare,
    Delete,
    Events,
    KeyValue,
    KeyValues,
    Put,
    Store,
    StoreUnavailable,
)
from tests.elastic.virtual_loop import VirtualLoop


class Door:
    """One host's way to a `Store`, which is a `Store` itself.

    Attributes:
        store: behind it; a test may put an empty one in its place.
        shut: no call comes through.
        lost: operations that are done, but whose answers are lost, once each.
    """

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
        self, prefix: str, start_revision: int, stop: threading.Event
    ) -> Iterator[Events]:
        """See `Store.watch`."""
        return self.store.watch(prefix, start_revision, stop)

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

    def __init__(self, wires: "VirtualNetwork", address: str) -> None:
        """Nothing hears it yet."""
        self.wires, self.address, self.open = wires, address, True
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
    """A `Network` of ports that tests open. What is said on a cut wire is lost.

    Attributes:
        ports: address to what accepts connections there.
        cut: addresses that nothing reaches, and whose own messages get nowhere.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        """Nobody listens."""
        self.loop = loop
        self.ports: dict[str, Accept] = {}
        self.cut: set[str] = set()
        self.dialed: list[str] = []
        self.channels: list[VirtualChannel] = []

    def carry(self, sender: VirtualChannel, arrive: Callable[[], None]) -> None:
        """Takes something to the other end, unless one of them is cut off."""
        if not self.cut & {sender.address, sender.peer.address}:
            self.loop.post(arrive)

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
        caller = str(hello["record"])
        if address in self.cut:
            outcome.set_exception(TimeoutError("no answer"))
        elif address not in self.ports:
            outcome.set_exception(ConnectionRefusedError("nobody listens"))
        else:
            mine, other = (VirtualChannel(self, it) for it in (address, caller))
            mine.peer, other.peer = other, mine
            mine.heard, mine.closed = heard, closed
            hears = self.ports[address](hello, other)
            if hears is not None:
                other.heard, other.closed = hears
            self.channels += [mine, other]
            outcome.set_result(mine)
        self.loop.post(opened, outcome)

    def probe(self, address: str, then: Callable[[bool], None]) -> None:
        """See `Network.probe`."""
        refused = address not in self.ports and address not in self.cut
        self.loop.post(then, refused)
