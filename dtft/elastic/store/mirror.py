"""A local copy of the keys under a prefix, kept current by a watch on a thread.

After every change the complete copy is reported, with the store's revision. If the
watch misses changes or the store loses data, the keys are listed again. To detect a
loss, the newest pairs of the copy are compared with the store's each time the watch
connects; a watch without events connects again every 30 s. The keys are not listed at
each connect, because each listing would send the records of all hosts to this host.
"""

import functools
import heapq
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from dtft.elastic.store.api import Compare, KeyValue, Resync, Store, StoreUnavailable

logger = logging.getLogger(__name__)

RETRY_S = 0.2
_COMPARED, _COMPARED_BYTES = 16, 4096
"""Number of a mirror's newest pairs that are compared with the store's after a
reconnect. Pairs with a value of more than `_COMPARED_BYTES` bytes are left out. Among
so many pairs of a job is a random id, of its era or of a host's process. So the pairs
differ from those of a store that has lost data and got other data."""

Pairs = Mapping[str, KeyValue]
Changed = Callable[[Pairs, int], None]
"""Called with the pairs by key, and the store's revision that the pairs belong to."""


class MirrorSource(Protocol):
    """Starts mirrors, local copies of the store's keys under a prefix.

    A simulation implements this protocol without threads.
    """

    def mirror(self, prefix: str, changed: Changed) -> Callable[[], None]:
        """Calls `changed` with all pairs under `prefix`, now and after every change.

        The second argument of `changed` is the store's revision of these pairs.

        Returns:
            A function that ends the mirror.
        """
        ...


class ThreadMirrors:
    """A `MirrorSource` that runs each mirror on a thread."""

    def __init__(self, store: Store) -> None:
        """Starts no thread yet."""
        self._store = store

    def mirror(self, prefix: str, changed: Changed) -> Callable[[], None]:
        """Starts a thread that calls `changed` with all pairs under `prefix`.

        `changed` is called at once and after every change, also with the store's
        revision. Returns a function that ends the mirror.
        """
        stop = threading.Event()
        arguments = (self._store, prefix, changed, stop)
        threading.Thread(
            target=_follow, args=arguments, name=f"mirror {prefix}", daemon=True
        ).start()
        return stop.set


def _follow(store: Store, prefix: str, changed: Changed, stop: threading.Event) -> None:
    said = ""
    while not stop.is_set():
        try:
            pairs, revision = store.list(prefix)
            copy = {pair.key: pair for pair in pairs}
            changed(dict(copy), revision)
            known = functools.partial(_conditions, copy)
            for batch in store.watch(prefix, revision + 1, stop, known):
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
        except (LookupError, TypeError, ValueError) as error:
            if (text := repr(error)) != said:
                said = text
                logger.warning(
                    "the store's answer for the keys %s cannot be read (%s): trying "
                    "again every %.1f s",
                    *(prefix, text, RETRY_S),
                )
            stop.wait(RETRY_S)


def _conditions(copy: Pairs) -> list[Compare]:
    """Returns the conditions that a store has the same newest pairs as `copy`.

    The newest pairs are the 16 pairs that were written last; pairs with a value of more
    than 4096 bytes are left out. Each condition is that the store has the same value
    for one key. `copy` maps each key to its pair.
    """
    small = (it for it in copy.values() if len(it.value) <= _COMPARED_BYTES)
    newest = heapq.nlargest(_COMPARED, small, key=lambda it: it.mod_revision)
    return [Compare(key=it.key, target="value", value=it.value) for it in newest]
