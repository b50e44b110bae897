"""The interface of a coordination store: values, errors and the `Store` protocol.

Defines the semantics of leases, transactions and watches; `EtcdStore` and `MemoryStore`
implement the protocol.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

_MAX_REQUEST_BYTES = 1_500_000
_MAX_CHANGES = 128


class StoreUnavailable(Exception):
    """The store did not confirm a call; the call may or may not have been applied."""


class StoreFull(StoreUnavailable):
    """The store refuses writes, because its space quota is used up."""


class LeaseGone(StoreUnavailable):
    """A write named a lease that has expired or never existed; nothing was applied.

    Callers handle this error like an outage: they wait until the lease's owner has a
    new lease, then write again. So this is a subclass of StoreUnavailable.
    """


@dataclass(frozen=True, kw_only=True)
class KeyValue:
    """A key with its value; in a delete event only the key and the revision are set."""

    key: str
    value: bytes
    mod_revision: int
    """Revision of the last write."""
    create_revision: int
    """Revision of the write that created the key; 0 in a delete event."""
    lease: int
    """Id of the lease whose end deletes the key; 0 without a lease."""


@dataclass(frozen=True, kw_only=True)
class StoreEvent:
    """One change of one key."""

    kind: Literal["put", "delete"]
    kv: KeyValue


Events = list[StoreEvent]
KeyValues = list[KeyValue]


class Resync(Events):
    """A batch of a watch that lists all keys, sent when events may have been lost.

    Contains one put event for each existing key under the watched prefix. A reader that
    applies these puts misses only deletions, which it can get from `gone`.
    """

    def __init__(self, pairs: KeyValues, revision: int) -> None:
        """Makes the batch.

        Args:
            pairs: every key under the watched prefix.
            revision: revision of the listing; later batches have later revisions.
        """
        super().__init__(StoreEvent(kind="put", kv=pair) for pair in pairs)
        self.revision = revision

    def gone(self, known: Collection[str]) -> tuple[str, ...]:
        """Returns the keys that a reader knows and that no longer exist.

        `known` are all keys that the reader knows under the watched prefix.
        """
        present = {event.kv.key for event in self}
        return tuple(key for key in known if key not in present)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """A condition of a transaction: a property of a key equals `value`.

    `target` names the property. "mod" is the revision of the last write, "create" the
    revision of the write that created the key, "version" the number of writes since the
    key was created; all three are 0 for an absent key. "value" is the key's value in
    bytes; no bytes equal the value of an absent key.

    Raises:
        ValueError: `value` is not of the type of its property.
    """

    key: str
    target: Literal["mod", "create", "version", "value"]
    value: int | bytes

    def __post_init__(self) -> None:
        allowed = bytes if self.target == "value" else int
        if not isinstance(self.value, allowed):
            raise ValueError(
                f"key {self.key}: target={self.target!r} cannot equal value="
                f"{self.value!r}. Allowed: {allowed.__name__}. For a key that is "
                "absent compare target='create' with 0."
            )


@dataclass(frozen=True, kw_only=True)
class Put:
    """A write of one key, which is deleted when `lease` ends; 0 for no lease."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, kw_only=True)
class Delete:
    """The deletion of one key; nothing changes if the key does not exist."""

    key: str


def check_changes(changes: Sequence[Put | Delete]) -> None:
    """Checks the changes of one transaction against etcd's limits.

    Raises:
        ValueError: a key occurs twice, or there are more than 128 changes or 1.5 MB of
            values.
    """
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
    """The store refuses this client: user, password, certificate or rights are wrong.

    Trying again does not help; a setting must be changed.
    """


class Store(Protocol):
    """A key-value store with revisions, leases, transactions and watches.

    All methods may be called from any thread. Every method but `watch` and `close`
    raises StoreUnavailable if the store does not answer in time, and ValueError if the
    request is invalid.
    """

    @property
    def private(self) -> bool:
        """Whether dtft is the store's only user, so its history may be dropped.

        To drop history (`compact`, `reclaim`) affects all keys of a store, also those
        of other users. Both methods raise ValueError if this is False.
        """
        ...

    def get(self, key: str) -> KeyValue | None:
        """Reads a key; returns None if the key does not exist."""
        ...

    def list(self, prefix: str) -> tuple[KeyValues, int]:
        """Returns all pairs whose keys have `prefix`, and the store's revision.

        The pairs are sorted by key.
        """
        ...

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Writes one key.

        A put that raised StoreUnavailable may still be applied, even after later
        writes. Use a transaction with a condition (`txn`) if that would be wrong.

        Raises:
            LeaseGone: the lease has expired or never existed.
        """
        ...

    def delete(self, key: str) -> None:
        """Deletes one key; a missing key is no error."""
        ...

    def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """Applies all changes, as one revision of the store, if all compares hold.

        Returns:
            Whether the compares held; if False, no change was applied.

        Raises:
            LeaseGone: the compares held, but a put names a lease that has expired or
                never existed.
        """
        ...

    def grant(self, ttl_s: float) -> int:
        """Makes a lease of `ttl_s` seconds and returns its id.

        etcd rounds `ttl_s` up to whole seconds, and to at least 2.
        """
        ...

    def keepalive(self, lease: int) -> float | None:
        """Renews a lease; returns its remaining seconds, or None if it has expired."""
        ...

    def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys; an expired lease is no error."""
        ...

    def watch(
        self,
        prefix: str,
        start_revision: int,
        stop: threading.Event,
        known: Callable[[], Sequence[Compare]] = tuple,
    ) -> Iterator[Events]:
        """Yields changes under `prefix` in order, until `stop` is set or `close` runs.

        After an outage the watch reconnects and continues at the next revision. If
        changes from there on are missing, because the history was compacted or the
        store lost data, the watch yields a `Resync`, which lists all keys. A store that
        lost data may have reached the watch's revision again by new writes; only the
        conditions that `known` returns then show the loss.

        The watch begins when its first item is requested. It ends within 0.5 s of
        `stop`, or within the store's timeout if packets are lost just then. To miss no
        change, list first and pass the listing's revision + 1.

        Args:
            prefix: prefix of the watched keys.
            start_revision: revision of the first change; 0 for changes from now on.
            stop: event that ends the iteration.
            known: returns conditions that held in the store right after the last
                yielded change. Called after each connect. If one does not hold any
                more, the watch yields a `Resync`: the store lost data, or has changed
                meanwhile. By default there are no conditions.
        """
        ...

    def compact(self, revision: int) -> None:
        """Drops the values that were replaced up to `revision`; current values stay."""
        ...

    def reclaim(self) -> None:
        """Frees space in a store that raised StoreFull; drops all old values."""
        ...

    def status(self) -> str:
        """Returns the version of the store."""
        ...

    def close(self) -> None:
        """Ends connections and watches; later calls raise StoreUnavailable."""
        ...
