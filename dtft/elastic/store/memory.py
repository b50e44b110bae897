"""`MemoryStore`: a `Store` in the memory of one process, for tests and simulations.

Leases use a clock that is passed as an argument.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dtft.elastic.store.api import (
    Compare,
    Delete,
    Events,
    KeyValue,
    KeyValues,
    LeaseGone,
    Put,
    Resync,
    StoreEvent,
    StoreUnavailable,
    check_changes,
)

_POLL_S = 0.02  # real seconds between two looks of a watch at the clock


@dataclass(kw_only=True)
class _Lease:
    ttl_s: float
    expires: float


class MemoryStore:
    """A `Store` in memory; reads and writes first end the leases that have expired."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        history: int = 10_000,
    ) -> None:
        """Makes an empty store.

        Args:
            clock: function that returns seconds; a test passes a simulated clock.
            history: number of revisions kept for watches.
        """
        self._clock, self._revision, self._compacted = clock, 1, 0
        self._pairs: dict[str, tuple[KeyValue, int]] = {}  # with the version
        self._leases: dict[int, _Lease] = {}
        self._next_lease, self._next_expiry = 1, math.inf
        self._history: deque[tuple[int, Events]] = deque()
        self._history_limit = history
        self._changed = threading.Condition(threading.RLock())
        self._down = ""

    @property
    def private(self) -> bool:
        """Always True: the store has no other user, so its history may be dropped."""
        return True

    def set_available(self, up: bool) -> None:
        """Makes calls raise StoreUnavailable (`up` False), or succeed again (True).

        Calls that drop history (`compact`, `reclaim`) always succeed. A watch yields
        nothing while the store is unavailable.
        """
        with self._changed:
            self._down = "" if up else "made unavailable"

    def get(self, key: str) -> KeyValue | None:
        """Reads a key; returns None if the key does not exist."""
        with self._changed:
            self._enter("get")
            found = self._pairs.get(key)
            return found[0] if found else None

    def list(self, prefix: str) -> tuple[KeyValues, int]:
        """Returns all pairs whose keys have `prefix`, and the store's revision.

        The pairs are sorted by key.
        """
        with self._changed:
            self._enter("list")
            return self._listing(prefix), self._revision

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Writes one key; see `Store.put`."""
        self.txn([], [Put(key=key, value=value, lease=lease)])

    def delete(self, key: str) -> None:
        """Deletes one key; a missing key is no error."""
        self.txn([], [Delete(key=key)])

    def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """Applies all changes if all compares hold; see `Store.txn`."""
        check_changes(changes)
        with self._changed:
            self._enter("txn")
            if not all(self._holds(compare) for compare in compares):
                return False
            for change in changes:
                lease = change.lease if isinstance(change, Put) else 0
                if lease and lease not in self._leases:
                    raise LeaseGone(f"memory store: put {change.key}: lease {lease}")
            self._apply(changes)
            return True

    def grant(self, ttl_s: float) -> int:
        """Makes a lease of exactly `ttl_s` seconds; returns its id."""
        if ttl_s <= 0:
            raise ValueError(f"ttl_s={ttl_s}: a lease needs more than 0 seconds.")
        with self._changed:
            self._enter("grant")
            lease, self._next_lease = self._next_lease, self._next_lease + 1
            self._leases[lease] = _Lease(ttl_s=ttl_s, expires=self._clock() + ttl_s)
            self._next_expiry = min(self._next_expiry, self._leases[lease].expires)
            return lease

    def keepalive(self, lease: int) -> float | None:
        """Renews a lease; returns its remaining seconds, None if it has expired."""
        with self._changed:
            self._enter("keepalive")
            found = self._leases.get(lease)
            if found is None:
                return None
            found.expires = self._clock() + found.ttl_s
            return found.ttl_s

    def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys; an expired lease is no error."""
        with self._changed:
            self._enter("revoke")
            self._end_lease(lease)

    def watch(
        self,
        prefix: str,
        start_revision: int,
        stop: threading.Event,
        known: Callable[[], Sequence[Compare]] = tuple,
    ) -> Iterator[Events]:
        """Yields changes under `prefix` in order; see `Store.watch`.

        `known` is not called, because this store has no connection and loses no data.
        """
        del known
        position = start_revision
        while not stop.is_set() and self._down != "closed":
            with self._changed:
                position = position or self._revision + 1
                batch, position = self._since(prefix, position)
                if not batch and not isinstance(batch, Resync):
                    self._changed.wait(_POLL_S)
                    continue
            yield batch  # after the lock is released

    def compact(self, revision: int) -> None:
        """Drops values that were replaced up to `revision`; see `Store.compact`."""
        with self._changed:
            self._compacted = max(self._compacted, revision)
            while self._history and self._history[0][0] < revision:
                self._history.popleft()

    def reclaim(self) -> None:
        """Drops all history; this store has no quota, so it is never full."""
        self.compact(self._revision)

    def status(self) -> str:
        """Returns "memory", in place of a version."""
        with self._changed:
            self._enter("status")
            return "memory"

    def close(self) -> None:
        """Ends watches; later calls raise StoreUnavailable."""
        with self._changed:
            self._down = "closed"
            self._changed.notify_all()

    # ------------------------------------------------------- with the lock held

    def _enter(self, operation: str) -> None:
        if self._down:
            raise StoreUnavailable(f"memory store: {operation}: {self._down}")
        self._expire()

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_expiry:  # a lower bound: keepalives may extend leases
            return
        for lease in [i for i, it in self._leases.items() if it.expires <= now]:
            self._end_lease(lease)
        times = (it.expires for it in self._leases.values())
        self._next_expiry = min(times, default=math.inf)

    def _end_lease(self, lease: int) -> None:
        if self._leases.pop(lease, None) is None:
            return
        keys = [key for key, (pair, _) in self._pairs.items() if pair.lease == lease]
        self._apply([Delete(key=key) for key in sorted(keys)])

    def _holds(self, compare: Compare) -> bool:
        found = self._pairs.get(compare.key)
        if found is None:
            return compare.value == 0
        pair, version = found
        properties = {
            "mod": pair.mod_revision,
            "create": pair.create_revision,
            "version": version,
            "value": pair.value,
        }
        return properties[compare.target] == compare.value

    def _apply(self, changes: Sequence[Put | Delete]) -> None:
        revision, events = self._revision + 1, Events()
        for change in changes:
            old = self._pairs.get(change.key)
            if isinstance(change, Delete):
                if old is not None:
                    del self._pairs[change.key]
                    pair = _tombstone(change.key, revision)
                    events.append(StoreEvent(kind="delete", kv=pair))
                continue
            pair = KeyValue(
                key=change.key,
                value=bytes(change.value),
                mod_revision=revision,
                create_revision=old[0].create_revision if old else revision,
                lease=change.lease,
            )
            self._pairs[change.key] = (pair, old[1] + 1 if old else 1)
            events.append(StoreEvent(kind="put", kv=pair))
        if events:
            self._record(revision, events)

    def _record(self, revision: int, events: Events) -> None:
        self._revision = revision
        self._history.append((revision, events))
        if len(self._history) > self._history_limit:
            self._compacted = self._history.popleft()[0] + 1
        self._changed.notify_all()

    def _listing(self, prefix: str) -> KeyValues:
        keys = sorted(key for key in self._pairs if key.startswith(prefix))
        return [self._pairs[key][0] for key in keys]

    def _since(self, prefix: str, position: int) -> tuple[Events, int]:
        """Returns the events from revision `position` on, and the next position.

        Only events of keys with the prefix are returned. If some of them were dropped
        from the history, returns a listing of all these keys (`Resync`) in their place.
        Returns no events while the store is unavailable.
        """
        if self._down:
            return [], position
        self._expire()
        if position < self._compacted:
            return Resync(self._listing(prefix), self._revision), self._revision + 1
        found = Events()
        for revision, events in reversed(self._history):  # newest revision first
            if revision < position:
                break
            found[:0] = [it for it in events if it.kv.key.startswith(prefix)]
        return found, max(position, self._revision + 1)


def _tombstone(key: str, revision: int) -> KeyValue:
    blank = KeyValue(key=key, value=b"", mod_revision=0, create_revision=0, lease=0)
    return replace(blank, mod_revision=revision)
