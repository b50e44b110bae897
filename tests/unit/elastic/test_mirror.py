"""A local copy of the keys under a prefix follows the store through what it goes."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest

from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.mirror import MirrorSource, Pairs, ThreadMirrors
from tests.support.hosts import wait_until
from tests.support.virtual_loop import VirtualLoop, VirtualMirrors

LIMIT_S = 10.0


class Copy:
    """What a mirror has told."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[Pairs, int]] = queue.Queue()
        self.revisions: list[int] = []

    def changed(self, pairs: Pairs, revision: int) -> None:
        self.told.put((pairs, revision))

    def until(self, **wanted: str) -> None:
        """Waits until the copy is this."""
        while True:
            pairs, revision = self.told.get(timeout=LIMIT_S)
            self.revisions.append(revision)
            if values(pairs) == wanted:
                return


def values(pairs: Pairs) -> Mapping[str, str]:
    return {key.removeprefix("/p/"): it.value.decode() for key, it in pairs.items()}


@pytest.fixture
def copy() -> Copy:
    return Copy()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore()
    yield made
    made.close()


@pytest.fixture
def mirrored(store: MemoryStore, copy: Copy) -> Iterator[Callable[[], None]]:
    """Of the keys under /p/; ends it."""
    store.put("/p/a", b"1")
    end = ThreadMirrors(store).mirror("/p/", copy.changed)
    copy.until(a="1")
    yield end
    end()


def test_writes_and_deletions_are_told_as_the_whole_copy(
    store: MemoryStore, copy: Copy, mirrored: Callable[[], None]
) -> None:
    store.put("/p/b", b"2")
    store.put("/q/c", b"of another prefix")
    store.put("/p/a", b"3")
    store.delete("/p/b")
    copy.until(a="3")
    assert copy.revisions == sorted(copy.revisions)
    assert copy.revisions[-1] == store.list("")[1]


def test_what_is_told_is_not_changed_later(
    store: MemoryStore, copy: Copy, mirrored: Callable[[], None]
) -> None:
    store.put("/p/b", b"2")
    first, _ = copy.told.get(timeout=LIMIT_S)
    store.delete("/p/a")
    copy.until(b="2")
    assert values(first) == {"a": "1", "b": "2"}


def test_an_outage_is_lived_through(
    store: MemoryStore, copy: Copy, mirrored: Callable[[], None]
) -> None:
    store.set_available(False)
    store.set_available(True)
    store.put("/p/b", b"2")
    copy.until(a="1", b="2")


def test_a_store_that_is_away_at_first_is_asked_again(copy: Copy) -> None:
    store = MemoryStore()
    store.put("/p/a", b"1")
    store.set_available(False)
    end = ThreadMirrors(store).mirror("/p/", copy.changed)
    with pytest.raises(queue.Empty):
        copy.told.get(timeout=0.3)
    store.set_available(True)
    copy.until(a="1")
    end()


def test_history_that_is_lost_leads_to_a_new_listing(copy: Copy) -> None:
    """Keys that were deleted meanwhile are gone from the copy."""
    store = MemoryStore(history=2)
    for name in "abcdef":
        store.put(f"/p/{name}", b"1")
    store.set_available(True)
    end = ThreadMirrors(store).mirror("/p/", copy.changed)
    copy.until(**dict.fromkeys("abcdef", "1"))
    store.set_available(False)  # the watch sees nothing of what follows
    store._down = ""
    with store._changed:
        for name in "abcde":
            store.delete(f"/p/{name}")
        store.compact(store.list("")[1])
    copy.until(f="1")
    end()


def test_an_ended_mirror_tells_nothing_and_its_thread_ends(
    store: MemoryStore, copy: Copy, mirrored: Callable[[], None]
) -> None:
    mirrored()
    wait_until(lambda: not any(it.name == "mirror /p/" for it in threading.enumerate()))
    store.put("/p/b", b"2")
    assert copy.told.empty()


def test_the_virtual_one_tells_the_same() -> None:
    """It stands in for the real one in other tests."""
    loop, store, copy = VirtualLoop(), MemoryStore(), Copy()
    source: MirrorSource = VirtualMirrors(store, loop)
    store.put("/p/a", b"1")
    end = source.mirror("/p/", copy.changed)
    loop.turn(1)
    copy.until(a="1")
    store.put("/p/b", b"2")
    store.delete("/p/a")
    loop.turn(1)
    copy.until(b="2")
    end()
    store.put("/p/c", b"3")
    loop.turn(1)
    assert copy.told.empty()
