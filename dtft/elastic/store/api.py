"""The interface of a coordination store: values, errors and the `Store` protocol.

Defines the semantics of leases, transactions and watches; `EtcdStore` and `MemoryStore`
implement the protocol.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

_MAX_REQUEST_BYTES = 1_500_000
_MAX_CHANGES = 128


class StoreUnavailable(Exception):
    """The store did not confirm a call: it may or may not have been applied."""


class StoreFull(StoreUnavailable):
    """The store takes no writes: its quota is used up. `Store.reclaim` may help."""


class LeaseGone(StoreUnavailable):
    """A write named a lease that has expired or never was; nothing was applied.

    A subclass because the cure is that of an outage: wait for the keeper of the lease
    to grant a new one, then try again.
    """


@dataclass(frozen=True, kw_only=True)
class KeyValue:
    """One key as the store holds it; in a delete event only key and mod revision."""

    key: str
    value: bytes
    mod_revision: int
    """Revision of the last write."""
    create_revision: int
    """Revision of the write that created the key; 0 in a delete event."""
    lease: int
    """The lease with which the key expires; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class StoreEvent:
    """One change of one key."""

    kind: Literal["put", "delete"]
    kv: KeyValue


Events = list[StoreEvent]
KeyValues = list[KeyValue]


class Resync(Events):
    """A watch batch that is a full listing, because history was lost.

    Holds one put per existing key, so that a reader which only applies events stays
    nearly right. A reader that must see deletions also calls `gone`.
    """

    def __init__(self, pairs: KeyValues, revision: int) -> None:
        """Makes the batch.

        Args:
            pairs: every key under the watched prefix.
            revision: of the listing; the next events are later ones.
        """
        super().__init__(StoreEvent(kind="put", kv=pair) for pair in pairs)
        self.revision = revision

    def gone(self, known: Collection[str]) -> tuple[str, ...]:
        """The known keys that were deleted during the gap in the watch."""
        present = {event.kv.key for event in self}
        return tuple(key for key in known if key not in present)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """A condition of a transaction: a number of the key equals `value`.

    An absent key has 0 for all three.
    """

    key: str
    target: Literal["mod", "create", "version"]
    value: int


@dataclass(frozen=True, kw_only=True)
class Put:
    """Writes a key, and ties it to `lease` unless that is 0."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Deletes a key, if it exists."""

    key: str


def check_changes(changes: Sequence[Put | Delete]) -> None:
    """Raises ValueError for changes that no store takes; the limits are etcd's."""
    keys = [change.key for change in changes]
    if len(set(keys)) < len(keys):
        raise ValueError(f"changes={keys}: a transaction may name each key once.")
    if len(keys) > _MAX_CHANGES:
        raise ValueError(
            f"changes: {len(keys)} in a transaction; at most {_MAX_CHANGES}. Split it."
        )
    size = sum(len(change.value) for change in changes if isinstance(change, Put))
    if size > _MAX_REQUEST_BYTES:
        raise ValueError(
            f"changes: {size} bytes in one request; at most {_MAX_REQUEST_BYTES}."
        )


class StoreRefused(StoreUnavailable):
    """The store answers and takes no call of this client: its user, password,
    certificate or rights are wrong. Somebody has to change a setting.
    """


class Store(Protocol):
    """Keys with revisions, leases, transactions and watches; safe from any thread.

    Every call but `watch` and `close` raises StoreUnavailable when the store does not
    answer in time, and ValueError when it never would take the request.
    """

    @property
    def private(self) -> bool:
        """Whether dtft is the store's only user, so that history may be forgotten.

        `compact` and `reclaim` act on all keys of a store. They raise ValueError where
        this is False.
        """
        ...

    def get(self, key: str) -> KeyValue | None:
        """The key's newest value; None if the key does not exist."""
        ...

    def list(self, prefix: str) -> tuple[KeyValues, int]:
        """All keys that begin with `prefix`, by name, and the listing's revision."""
        ...

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Writes one key.

        A put that was sent to more than one member may be applied again later. A write
        for which this matters is a transaction that compares.

        Raises:
            LeaseGone: there is no such lease.
        """
        ...

    def delete(self, key: str) -> None:
        """Deletes one key; a missing key is no error."""
        ...

    def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """Applies all changes as one revision if all compares hold.

        Returns:
            True if they held and the changes were applied, False if nothing was.

        Raises:
            LeaseGone: the compares held, but a put names a lease that is gone.
        """
        ...

    def grant(self, ttl_s: float) -> int:
        """A new lease; etcd rounds up to seconds and gives no less than 2."""
        ...

    def keepalive(self, lease: int) -> float | None:
        """Renews a lease; returns its seconds left, or None if it is gone."""
        ...

    def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys; an expired lease is no error."""
        ...

    def watch(
        self, prefix: str, start_revision: int, stop: threading.Event
    ) -> Iterator[Events]:
        """Changes under `prefix`, in order, from a revision on, until `stop` is set.

        Lives through outages: it connects again and goes on where it was. Where the
        history is compacted, or the store came back with less than was seen, it yields
        a `Resync`. Ends within 0.5 s of `stop`; where the network swallows packets just
        then, within the store's timeout. Nothing happens before the first `next`, so
        pass the revision of a listing + 1 to miss nothing.

        Args:
            prefix: of the keys.
            start_revision: first revision wanted; 0 is whatever comes after now.
            stop: ends the iteration.
        """
        ...

    def compact(self, revision: int) -> None:
        """Drops the history of keys before `revision`; current values stay."""
        ...

    def reclaim(self) -> None:
        """Makes room in a store that raised StoreFull; drops all history."""
        ...

    def status(self) -> str:
        """The version of the store."""
        ...

    def close(self) -> None:
        """Ends connections and watches; later calls raise StoreUnavailable."""
        ...
