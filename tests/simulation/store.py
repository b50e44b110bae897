"""A simulated etcd: one store on the virtual clock, and each host's way to it.

A call may be slow, unanswered before or after it was applied, applied late, or refused;
the store may be paused, killed, full, or come back with older data or none. Mirrors are
told in order, late, and may miss what was between. Must not know the job.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dtft.elastic.store.api import (
    Compare,
    Delete,
    Events,
    KeyValue,
    KeyValues,
    Put,
    StoreEvent,
    StoreFull,
    StoreUnavailable,
)
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.mirror import Changed
from tests.simulation.network import Process, Wire
from tests.simulation.scheduler import Clockwork

STORE = "etcd"
"""Its name in cuts of the network."""
CALL_S = 2.0
"""Limit of one call of the real client."""
T = TypeVar("T")


class Twin(MemoryStore):
    """The store's data; tells of every change, with who made it."""

    def __init__(
        self, clock: Callable[[], float], changed: Callable[[int, Events], None]
    ) -> None:
        super().__init__(clock)
        self._tell = changed

    def _record(self, revision: int, events: Events) -> None:
        super()._record(revision, events)
        self._tell(revision, events)

    def listing(self, prefix: str) -> dict[str, KeyValue]:
        """The pairs under a prefix, whatever is wrong with the store."""
        return {pair.key: pair for pair in self._listing(prefix)}

    @property
    def revision(self) -> int:
        """The newest."""
        return self._revision

    @property
    def next_expiry(self) -> float:
        """No lease ends before this."""
        return self._next_expiry

    def expire(self) -> None:
        """Ends leases that are due."""
        with self._changed:
            self._expire()

    def renew_all(self) -> None:
        """As etcd does when it starts: every lease begins anew."""
        for lease in self._leases.values():
            lease.expires = self._clock() + lease.ttl_s

    def copy_from(self, other: "Twin") -> None:
        """Takes another store's data as they are now; revisions too."""
        self._pairs = dict(other._pairs)
        self._leases = {
            number: type(lease)(ttl_s=lease.ttl_s, expires=lease.expires)
            for number, lease in other._leases.items()
        }
        self._revision = other._revision
        self._next_expiry = 0.0

    def continue_leases(self, other: "Twin") -> None:
        """Numbers of leases are never given twice, as etcd's are random."""
        self._next_lease = max(self._next_lease, other._next_lease) + 1000


@dataclass(eq=False, kw_only=True)
class _Mirror:
    process: Process
    prefix: str
    changed: Changed
    told: int = -1
    """Revision that was delivered last; -1 asks for a listing."""
    waiting: list[tuple[dict[str, KeyValue], int]] = field(default_factory=list)
    under_way: bool = False
    ended: bool = False


class Etcd:
    """The store as a process with faults."""

    def __init__(self, clockwork: Clockwork, wire: Wire) -> None:
        self._clockwork, self._wire = clockwork, wire
        self._scheduler, self.rng = clockwork.scheduler, clockwork.scheduler.rng
        self.watchers: list[Callable[[str, Events], None]] = []
        """Called with the host that writes ("" for the store itself) and its events."""
        self._writer = ""
        self.twin = self._new()
        self.paused = self.down = self.full = False
        self.slow_s = 0.0
        self.flaky = 0.0
        """Part of the calls that are not answered in time."""
        self.late = True
        """Whether calls on a paused store may be applied when it goes on."""
        self._late_calls: list[Callable[[], None]] = []
        self._mirrors: list[_Mirror] = []
        self._expiry_at = float("inf")
        self.past: list[tuple[float, Twin]] = []
        self.calls = self.writes = self.written_bytes = 0
        self.thin: Callable[[Process, dict[str, KeyValue]], dict[str, KeyValue]]
        self.thin = lambda process, pairs: pairs
        self.concerns: Callable[[Process, list[str]], bool] | None = None
        """Whether a host is told of changed keys; listings take the place of single
        changes then. For jobs of thousands of hosts."""

    def _new(self) -> Twin:
        return Twin(lambda: self._scheduler.now, self._changed)

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not (
            self.paused or self.down or self.full or self.flaky or self.slow_s > 1
        )

    # -------------------------------------------------------------------- calls

    def call(self, process: Process, write: bool, work: Callable[[Twin], T]) -> T:
        """One call of a host's client."""
        self.calls += 1
        there, back = (
            self._wire.blocked(process.host, STORE),
            self._wire.blocked(STORE, process.host),
        )
        clockwork = self._clockwork
        if self.down and not (there or back):
            raise StoreUnavailable("etcd refuses connections")
        if self.down or self.paused or there:
            if self.paused and not there and self.late and self.rng.random() < 0.5:
                self._late_calls.append(lambda: self._apply_late(process, work))
            clockwork.charged_s += CALL_S
            raise StoreUnavailable("etcd does not answer")
        clockwork.charged_s += self.rng.uniform(0.0005, 0.004)
        if self.slow_s:
            clockwork.charged_s += self.rng.uniform(0, self.slow_s)
            if clockwork.charged_s > CALL_S:
                self._apply_late(process, work)
                raise StoreUnavailable("etcd is too slow")
        if self.full and write:
            raise StoreFull("etcdserver: mvcc: database space exceeded")
        if self.flaky and self.rng.random() < self.flaky:
            if self.rng.random() < 0.5:
                self._apply_late(process, work)
            clockwork.charged_s += CALL_S
            raise StoreUnavailable("etcd did not answer in time")
        if back:
            self._apply_late(process, work)
            clockwork.charged_s += CALL_S
            raise StoreUnavailable("etcd's answer does not come")
        return self._apply(process, work)

    def _apply(self, process: Process, work: Callable[[Twin], T]) -> T:
        self._writer = process.host
        try:
            return work(self.twin)
        finally:
            self._writer = ""
            self._await_expiry()

    def _apply_late(self, process: Process, work: Callable[[Twin], Any]) -> None:
        try:
            self._apply(process, work)
        except (StoreUnavailable, ValueError):
            pass

    def _await_expiry(self) -> None:
        at = self.twin.next_expiry
        if at < self._expiry_at:
            self._expiry_at = at
            self._scheduler.at(at + 0.01, self._expire, at)

    def _expire(self, at: float) -> None:
        if at != self._expiry_at:
            return
        self._expiry_at = float("inf")
        if not (self.paused or self.down):
            self.twin.expire()
            self._await_expiry()

    # ------------------------------------------------------------------- faults

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: what was asked meanwhile may be done now; leases may have ended."""
        self.paused = False
        calls, self._late_calls = self._late_calls, []
        if self.rng.random() < 0.5:
            self.twin.expire()
        for call in calls:
            call()
        self.twin.expire()
        self._expiry_at = float("inf")
        self._await_expiry()
        self._list_again()

    def kill(self) -> None:
        """Its process has ended."""
        self.down = True
        self._late_calls.clear()

    def restart(self, data: str) -> None:
        """Comes back; `data`: "kept", "empty", or "older"."""
        self.down, former = False, self.twin
        if data == "empty":
            self.twin = self._new()
            self.twin.continue_leases(former)
        elif data == "older":
            self.twin = self._new()
            if self.past:
                self.twin.copy_from(self.past[0][1])
            self.twin.continue_leases(former)
        self.twin.renew_all()
        self._expiry_at = float("inf")
        self.twin.expire()
        self._await_expiry()
        for mirror in self._mirrors:
            mirror.told = -1
        self._list_again()

    def remember(self) -> None:
        """Keeps a copy of the data for a restart with older ones."""
        copy = self._new()
        copy.copy_from(self.twin)
        self.past = [*self.past[-3:], (self._scheduler.now, copy)]

    # ------------------------------------------------------------------ mirrors

    def mirror(
        self, process: Process, prefix: str, changed: Changed
    ) -> Callable[[], None]:
        """See `MirrorSource.mirror`."""
        one = _Mirror(process=process, prefix=prefix, changed=changed)
        self._mirrors.append(one)
        self._deliver_soon(one)

        def end() -> None:
            one.ended = True
            if one in self._mirrors:
                self._mirrors.remove(one)

        return end

    def forget(self, process: Process) -> None:
        """A process has ended: nobody watches for it."""
        self._mirrors = [it for it in self._mirrors if it.process is not process]

    def _changed(self, revision: int, events: Events) -> None:
        self.writes += bool(self._writer)
        self.written_bytes += sum(
            len(event.kv.value) + len(event.kv.key) for event in events
        )
        for watcher in self.watchers:
            watcher(self._writer, events)
        keys = [event.kv.key for event in events]
        made: dict[str, dict[str, KeyValue]] = {}
        for mirror in self._mirrors:
            prefix = mirror.prefix
            if self.concerns is not None:
                if self.concerns(mirror.process, keys):
                    mirror.told = -1
                    self._deliver_soon(mirror, 0.02)
            elif any(key.startswith(prefix) for key in keys):
                if prefix not in made:
                    made[prefix] = self.twin.listing(prefix)
                mirror.waiting.append((made[prefix], revision))
                self._deliver_soon(mirror)

    def _list_again(self) -> None:
        for mirror in self._mirrors:
            self._deliver_soon(mirror)

    def _deliver_soon(self, mirror: _Mirror, delay_s: float | None = None) -> None:
        if mirror.under_way:
            return
        mirror.under_way = True
        if delay_s is None:
            delay_s = self.rng.expovariate(300)
            if self.slow_s:
                delay_s += self.rng.uniform(0, self.slow_s)
        process = mirror.process
        self._scheduler.after(
            delay_s, process.loop.beside, 0.0, lambda: self._deliver(mirror)
        )

    def _deliver(self, mirror: _Mirror) -> None:
        mirror.under_way = False
        if mirror.ended:
            return
        host = mirror.process.host
        away = self._wire.blocked(host, STORE) or self._wire.blocked(STORE, host)
        if away or self.paused or self.down:
            mirror.told = -1  # a new listing when it is there again
            mirror.waiting.clear()
            if away:
                self._deliver_soon(mirror, 0.3)
            return
        if mirror.told < 0 or (mirror.waiting and self.rng.random() < 0.3):
            pairs, revision = self.twin.listing(mirror.prefix), self.twin.revision
            mirror.waiting.clear()
        elif mirror.waiting:
            pairs, revision = mirror.waiting.pop(0)
        else:
            return
        mirror.told = revision
        mirror.changed(self.thin(mirror.process, pairs), revision)
        if mirror.waiting:
            self._deliver_soon(mirror)


class Client:
    """One host's `Store`."""

    def __init__(self, etcd: Etcd, process: Process) -> None:
        self._etcd, self._process = etcd, process
        self.private = True

    def _read(self, work: Callable[[Twin], T]) -> T:
        return self._etcd.call(self._process, False, work)

    def _write(self, work: Callable[[Twin], T]) -> T:
        return self._etcd.call(self._process, True, work)

    def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        return self._read(lambda store: store.get(key))

    def list(self, prefix: str) -> tuple[KeyValues, int]:
        """See `Store.list`."""
        return self._read(lambda store: store.list(prefix))

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """See `Store.put`."""
        self._write(lambda store: store.put(key, value, lease))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._write(lambda store: store.delete(key))

    def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """See `Store.txn`."""
        return self._write(lambda store: store.txn(compares, changes))

    def grant(self, ttl_s: float) -> int:
        """See `Store.grant`."""
        return self._write(lambda store: store.grant(ttl_s))

    def keepalive(self, lease: int) -> float | None:
        """See `Store.keepalive`."""
        return self._read(lambda store: store.keepalive(lease))

    def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        self._read(lambda store: store.revoke(lease))

    def watch(
        self,
        prefix: str,
        start_revision: int,
        stop: threading.Event,
        known: Callable[[], Sequence[Compare]] = tuple,
    ) -> Iterator[Events]:
        """Not used: mirrors are simulated."""
        raise AssertionError("a simulated store is watched by its mirrors")

    def compact(self, revision: int) -> None:
        """See `Store.compact`."""
        self._read(lambda store: store.compact(revision))

    def reclaim(self) -> None:
        """See `Store.reclaim`: the quota is met by it if the seed says so."""
        self._read(lambda store: None)
        if self._etcd.rng.random() < 0.2:
            self._etcd.full = False

    def status(self) -> str:
        """See `Store.status`."""
        return self._read(lambda store: store.status())

    def close(self) -> None:
        """See `Store.close`."""


def kinds(events: Sequence[StoreEvent]) -> list[str]:
    """The last part of each key, for traces."""
    return [f"{event.kind} {event.kv.key.rpartition('/')[2]}" for event in events]
