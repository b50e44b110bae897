"""A local copy of the keys under a prefix, kept current by a watch on a thread.

Every change is reported as the whole copy with the store's revision. A watch that lost
history, or a store that came back with other data, leads to a new listing.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from dtft.elastic.store.api import KeyValue, Resync, Store, StoreUnavailable

RETRY_S = 0.2

Pairs = Mapping[str, KeyValue]
Changed = Callable[[Pairs, int], None]
"""Called with the key-value pairs by key, and the revision of the pairs."""


class MirrorSource(Protocol):
    """Starts mirrors; a simulation has its own."""

    def mirror(self, prefix: str, changed: Changed) -> Callable[[], None]:
        """Calls `changed` with the keys under `prefix`, now and at every change.

        Returns:
            A function that ends this.
        """
        ...


class ThreadMirrors:
    """A `MirrorSource` with a thread for each mirror."""

    def __init__(self, store: Store) -> None:
        """Starts without a watch."""
        self._store = store

    def mirror(self, prefix: str, changed: Changed) -> Callable[[], None]:
        """See `MirrorSource.mirror`; `changed` is called on a thread."""
        stop = threading.Event()
        arguments = (self._store, prefix, changed, stop)
        threading.Thread(
            target=_follow, args=arguments, name=f"mirror {prefix}", daemon=True
        ).start()
        return stop.set


def _follow(store: Store, prefix: str, changed: Changed, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            pairs, revision = store.list(prefix)
            copy = {pair.key: pair for pair in pairs}
            changed(dict(copy), revision)
            for batch in store.watch(prefix, revision + 1, stop):
                if isinstance(batch, Resync):
                    break
                revision = max(event.kv.mod_revision for event in batch)
                for event in batch:
                    if event.kind == "put":
                        copy[event.kv.key] = event.kv
                    else:
                        copy.pop(event.kv.key, None)
                changed(dict(copy), revision)
        except StoreUnavailable:
            stop.wait(RETRY_S)
