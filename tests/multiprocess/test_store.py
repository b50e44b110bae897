"""The semantics of a store, the same for `MemoryStore` and for a real etcd."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.elastic.processes import free_port
from dtft.elastic.store import etcd as etcd_module
from dtft.elastic.store import etcd_wire, memory
from dtft.elastic.store.address import StoreAddress
from dtft.elastic.store.api import (
    Compare,
    Delete,
    LeaseGone,
    Put,
    Resync,
    Store,
    StoreEvent,
    StoreFull,
    StoreUnavailable,
)
from dtft.elastic.store.embedded import EmbeddedEtcd
from dtft.elastic.store.etcd import EtcdStore, version_warning
from dtft.elastic.store.etcd_wire import Connection, encode
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.mirror import ThreadMirrors
from tests.support.hosts import wait_until
from tests.support.watches import AnyStore, Watcher

LEASE_S = 4
"""A lease that is kept alive: a busy machine may stop a test for some seconds."""
PROTOCOL: tuple[type[Store], ...] = (MemoryStore, EtcdStore)  # for the type checker


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """One private etcd for this file."""
    etcd = EmbeddedEtcd(Path(tmp_path_factory.mktemp("etcd")))
    etcd.start()
    etcd.wait_ready()
    yield etcd
    etcd.stop()


@pytest.fixture(params=["memory", "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[AnyStore]:
    """A store of each kind."""
    if request.param == "memory":
        made: AnyStore = MemoryStore()
    else:
        address = request.getfixturevalue("server").address
        made = EtcdStore(StoreAddress.parse(address, private=True))
    yield made
    made.close()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Keys of one test only."""
    return f"/{request.node.name}/"


def shape(events: list[StoreEvent]) -> list[tuple[str, str, bytes]]:
    """The events without revisions."""
    return [(it.kind, it.kv.key.rpartition("/")[2], it.kv.value) for it in events]


def test_empty_prefix_is_everything(store: AnyStore, prefix: str) -> None:
    store.put(prefix + "a", b"")
    assert prefix + "a" in [it.key for it in store.list("")[0]]
    watcher = Watcher(store, "", store.list("")[1] + 1)
    store.put(prefix + "b", b"1")
    assert shape(watcher.events(1)) == [("put", "b", b"1")]
    watcher.end()


def test_put_get_list_delete(store: AnyStore, prefix: str) -> None:
    assert store.get(prefix + "b") is None
    before = store.list(prefix)[1]
    store.put(prefix + "b", b"\x00\xff")
    store.put(prefix + "a", b"")
    pairs, revision = store.list(prefix)
    assert [(it.key, it.value) for it in pairs] == [
        (prefix + "a", b""),
        (prefix + "b", b"\x00\xff"),
    ]
    assert revision == pairs[0].mod_revision == before + 2
    store.put(prefix + "b", b"2")
    pair = store.get(prefix + "b")
    assert pair is not None and pair.lease == 0
    assert (pair.create_revision, pair.mod_revision) == (before + 1, before + 3)
    store.delete(prefix + "b")
    store.delete(prefix + "b")
    assert [it.key for it in store.list(prefix)[0]] == [prefix + "a"]
    assert store.list(prefix)[1] == before + 4


def test_create_if_absent(store: AnyStore, prefix: str) -> None:
    absent = Compare(key=prefix + "leader", target="create", value=0)
    assert store.txn([absent], [Put(key=prefix + "leader", value=b"a")])
    assert not store.txn([absent], [Put(key=prefix + "leader", value=b"b")])
    pair = store.get(prefix + "leader")
    assert pair is not None and pair.value == b"a"


def test_compare_and_swap(store: AnyStore, prefix: str) -> None:
    key = prefix + "generation"
    store.put(key, b"1")
    pair = store.get(key)
    assert pair is not None
    seen = Compare(key=key, target="mod", value=pair.mod_revision)
    assert store.txn([seen], [Put(key=key, value=b"2")])
    assert not store.txn([seen], [Put(key=key, value=b"3")])
    second = Compare(key=key, target="version", value=2)
    created = Compare(key=key, target="create", value=pair.create_revision)
    other, equal = (Compare(key=key, target="value", value=it) for it in (b"1", b"2"))
    assert not store.txn([other], [Delete(key=key)])
    assert store.txn([second, created, equal], [Delete(key=key)])
    assert store.get(key) is None
    for value in (b"2", b""):
        gone = Compare(key=key, target="value", value=value)
        assert not store.txn([gone], [Put(key=key, value=b"3")])


@pytest.mark.parametrize(
    ("target", "value"), [("value", 0), ("mod", b""), ("create", b"0")]
)
def test_a_compare_of_another_type_is_refused(
    store: AnyStore, prefix: str, target: Any, value: Any
) -> None:
    key = prefix + "absent"
    with pytest.raises(ValueError, match=f"target='{target}' cannot equal .* Allowed"):
        compare = Compare(key=key, target=target, value=value)
        store.txn([compare], [Put(key=key, value=b"1")])
    assert store.get(key) is None


def test_transaction_is_one_revision(store: AnyStore, prefix: str) -> None:
    store.put(prefix + "old", b"x")
    before = store.list(prefix)[1]
    changes = [Put(key=prefix + "a", value=b"1"), Put(key=prefix + "b", value=b"2")]
    assert store.txn([], [*changes, Delete(key=prefix + "old")])
    pairs, revision = store.list(prefix)
    assert [it.mod_revision for it in pairs] == [before + 1] * 2
    assert revision == before + 1


def test_impossible_requests(store: AnyStore, prefix: str) -> None:
    twice = [Put(key=prefix + "a", value=b"1"), Put(key=prefix + "a", value=b"2")]
    with pytest.raises(ValueError, match="test_impossible"):
        store.txn([], twice)
    with pytest.raises(ValueError):
        store.put(prefix + "a", bytes(3_000_000))
    with pytest.raises(ValueError, match="ttl_s=0"):
        store.grant(0)


def test_unknown_lease(store: AnyStore, prefix: str) -> None:
    with pytest.raises(LeaseGone, match="put"):
        store.put(prefix + "a", b"", lease=123456789)
    with pytest.raises(LeaseGone):
        store.txn([], [Put(key=prefix + "a", value=b"", lease=123456789)])
    assert store.keepalive(123456789) is None
    store.revoke(123456789)
    assert store.get(prefix + "a") is None


def test_revoke_deletes_keys(store: AnyStore, prefix: str) -> None:
    lease = store.grant(60)
    store.put(prefix + "held", b"", lease=lease)
    store.put(prefix + "moved", b"", lease=lease)
    store.put(prefix + "moved", b"")
    pair = store.get(prefix + "held")
    assert pair is not None and pair.lease == lease
    assert store.keepalive(lease) == 60
    store.revoke(lease)
    assert [it.key for it in store.list(prefix)[0]] == [prefix + "moved"]
    assert store.keepalive(lease) is None


def test_expiry(store: AnyStore, prefix: str) -> None:
    kept, lost = store.grant(LEASE_S), store.grant(LEASE_S)
    watcher = Watcher(store, prefix, store.list(prefix)[1] + 1)
    store.put(prefix + "kept", b"", lease=kept)
    store.put(prefix + "lost", b"", lease=lost)
    end = time.monotonic() + LEASE_S + 0.5
    while time.monotonic() < end:
        remaining = store.keepalive(kept)
        assert remaining is not None and 0 < remaining <= LEASE_S
        time.sleep(0.25)
    assert shape(watcher.events(3))[2] == ("delete", "lost", b"")
    assert [it.key for it in store.list(prefix)[0]] == [prefix + "kept"]
    assert store.keepalive(lost) is None
    store.revoke(kept)
    watcher.end()


def test_watch_replays_history_and_follows(store: AnyStore, prefix: str) -> None:
    start = store.list(prefix)[1] + 1
    store.put(prefix + "a", b"1")
    store.put(prefix[:-1] + "-other/a", b"not ours")
    store.delete(prefix + "a")
    watcher = Watcher(store, prefix, start)
    assert shape(watcher.events(2)) == [("put", "a", b"1"), ("delete", "a", b"")]
    store.txn([], [Put(key=prefix + "b", value=b"2"), Put(key=prefix + "c", value=b"")])
    events = watcher.events(2)
    assert shape(events) == [("put", "b", b"2"), ("put", "c", b"")]
    assert events[0].kv.create_revision == events[0].kv.mod_revision == start + 3
    assert watcher.silent()
    watcher.end()


def test_watch_from_now(store: AnyStore, prefix: str) -> None:
    store.put(prefix + "before", b"")
    watcher = Watcher(store, prefix, 0)

    def seen() -> bool:  # "now" is when the thread comes to it
        store.put(prefix + "after", b"")
        return not watcher.silent()

    wait_until(seen)
    assert shape(watcher.events(1))[0] == ("put", "after", b"")
    watcher.end()


def test_a_watch_does_not_wait_for_its_next_poll(
    store: AnyStore, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_POLL_S", 100.0)
    monkeypatch.setattr(etcd_wire, "_POLL_S", 100.0)
    watcher = Watcher(store, prefix, store.list(prefix)[1] + 1)
    for index in range(5):
        store.put(prefix + "a", str(index).encode())
        watcher.events(1)
    watcher.stop.set()
    store.put(prefix + "a", b"last")  # it wakes and ends
    watcher.end()


def test_resync_after_compaction(store: AnyStore, prefix: str) -> None:
    start = store.list(prefix)[1] + 1
    for name in ("a", "b", "c"):
        store.put(prefix + name, b"1")
    store.delete(prefix + "b")
    store.compact(store.list(prefix)[1])
    watcher = Watcher(store, prefix, start)
    batch = watcher.batch()
    assert isinstance(batch, Resync)
    assert shape(batch) == [("put", "a", b"1"), ("put", "c", b"1")]
    assert batch.gone([prefix + "a", prefix + "b"]) == (prefix + "b",)
    store.put(prefix + "d", b"")
    after = watcher.batch()
    assert not isinstance(after, Resync)
    assert shape(after) == [("put", "d", b"")]
    assert after[0].kv.mod_revision == batch.revision + 1
    watcher.end()


def test_close_ends_watches_and_calls(store: AnyStore, prefix: str) -> None:
    watcher = Watcher(store, prefix, 0)
    time.sleep(0.1)
    store.close()
    watcher.thread.join(20)
    assert not watcher.thread.is_alive()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get(prefix)


def test_only_one_of_many_threads_wins(store: AnyStore, prefix: str) -> None:
    absent = Compare(key=prefix + "leader", target="create", value=0)
    won: list[int] = []

    def campaign(index: int) -> None:
        put = Put(key=prefix + "leader", value=str(index).encode())
        if store.txn([absent], [put]):
            won.append(index)

    threads = [threading.Thread(target=campaign, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    pair = store.get(prefix + "leader")
    assert pair is not None and won == [int(pair.value)]


# ------------------------------------------------------------------ memory only


def test_memory_leases_follow_the_clock() -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    lease = store.grant(5)
    store.put("/a", b"", lease=lease)
    now[0] = 4.9
    assert store.keepalive(lease) == 5
    now[0] = 9.8
    assert store.get("/a") is not None
    now[0] = 9.9
    assert store.get("/a") is None
    assert store.keepalive(lease) is None


def test_memory_history_is_bounded() -> None:
    store = MemoryStore(history=3)
    for index in range(5):
        store.put("/a", str(index).encode())
    stop = threading.Event()
    assert isinstance(next(store.watch("/", 2, stop)), Resync)
    batch = next(store.watch("/", 4, stop))
    assert [it.kv.value for it in batch] == [b"2", b"3", b"4"]


def test_memory_unavailable() -> None:
    store = MemoryStore()
    store.set_available(False)
    with pytest.raises(StoreUnavailable, match="grant"):
        store.grant(1)
    store.set_available(True)
    assert store.grant(1)


# -------------------------------------------------------------------- etcd only


def test_killed_and_restarted(server: EmbeddedEtcd) -> None:
    store, prefix = EtcdStore(server.address), "/restart/"
    lease = store.grant(60)
    store.put(prefix + "a", b"1", lease=lease)
    watcher = Watcher(store, prefix, store.list(prefix)[1] + 1)
    store.put(prefix + "b", b"2")
    assert shape(watcher.events(1)) == [("put", "b", b"2")]
    server.kill()
    with pytest.raises(StoreUnavailable, match=f"{server.address}: put /restart/c"):
        store.put(prefix + "c", b"lost")
    server.start()
    server.wait_ready()
    assert shape(
        [StoreEvent(kind="put", kv=pair) for pair in store.list(prefix)[0]]
    ) == [
        ("put", "a", b"1"),
        ("put", "b", b"2"),
    ]
    assert store.keepalive(lease) == 60
    store.put(prefix + "c", b"3")
    assert shape(watcher.events(1)) == [("put", "c", b"3")]
    assert watcher.silent()
    watcher.end()
    store.close()


def test_stale_connection_is_not_an_error(server: EmbeddedEtcd) -> None:
    store = EtcdStore(server.address)
    store.put("/stale", b"1")
    server.kill()
    server.start()
    server.wait_ready()
    store.put("/stale", b"2")
    store.close()


def test_store_that_lost_its_data_resyncs(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(tmp_path)
    etcd.start()
    etcd.wait_ready()
    store = EtcdStore(etcd.address)
    for _ in range(5):
        store.put("/a", b"")
    watcher = Watcher(store, "/", store.list("/")[1] + 1)
    time.sleep(0.2)
    etcd.stop()
    etcd.start()
    try:
        etcd.wait_ready()
        batch = watcher.batch()
        assert isinstance(batch, Resync) and batch.gone(["/a"]) == ("/a",)
        store.put("/b", b"")
        assert shape(watcher.batch()) == [("put", "b", b"")]
    finally:
        watcher.end()
        store.close()
        etcd.stop()


def test_quiet_watch_connects_again(
    server: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "_QUIET_S", 0.2)
    store = EtcdStore(server.address)
    watcher = Watcher(store, "/quiet/", store.list("/quiet/")[1] + 1)
    for index in range(40):
        store.put("/quiet/a", str(index).encode())
        time.sleep(0.3 if index % 10 == 0 else 0.01)
    values = [int(event.kv.value) for event in watcher.events(40)]
    assert values == list(range(40))
    watcher.end()
    store.close()


def test_events_before_the_start_of_a_watch_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a member sends them that lags when a watch is opened (etcd issue 20221)."""
    opened: list[str] = []

    def event(revision: int) -> dict[str, Any]:
        key = {name: str(revision) for name in ("create_revision", "mod_revision")}
        return {"kv": {"key": encode("/a"), "value": encode(str(revision)), **key}}

    def message(revision: int, *events: int, **more: Any) -> dict[str, Any]:
        header = {"revision": str(revision)}
        return {"result": {"header": header, "events": [*map(event, events)], **more}}

    class Lagging:
        """A stream of a member that lags, then has caught up, and then ends."""

        quiet_s = 0.0

        def __init__(self, endpoint: Any, context: Any, body: Any, *_: Any) -> None:
            opened.append(body["create_request"]["start_revision"])
            self._messages = [
                message(59, created=True),
                message(60, 60),
                message(70, 58, 59),
                message(70, 59, 60, 61, 62),
                message(70, 62),
            ]

        def __enter__(self) -> "Lagging":
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

        def receive(self) -> dict[str, Any]:
            if not self._messages:
                raise ConnectionError("the member has ended")
            return self._messages.pop(0)

    monkeypatch.setattr(etcd_module, "EtcdStream", Lagging)
    store = EtcdStore(f"127.0.0.1:{free_port()}")
    watcher = Watcher(store, "/a", 60)
    found = watcher.events(3)
    wait_until(lambda: len(opened) > 1)
    watcher.end()
    store.close()
    assert [it.kv.mod_revision for it in found] == [60, 61, 62] and watcher.silent()
    assert set(opened) == {"60", "63"}


def test_a_watch_that_connects_again_lists_a_store_that_is_not_as_known(
    server: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "_QUIET_S", 0.1)
    store, asked = EtcdStore(server.address), list[bytes]()
    store.put("/known/a", b"1")
    store.put("/known/b", b"1")
    value = b"1"

    def known() -> list[Compare]:
        asked.append(value)
        return [Compare(key="/known/a", target="value", value=value)]

    watcher = Watcher(store, "/known/", store.list("/known/")[1] + 1, known)
    wait_until(lambda: len(asked) > 3)
    store.put("/known/b", b"2")
    assert shape(watcher.batch()) == [("put", "b", b"2")]
    wait_until(lambda: len(asked) > 6)
    assert watcher.silent()
    value = b"of other data"
    batch = watcher.batch()
    assert isinstance(batch, Resync)
    assert shape(batch) == [("put", "a", b"1"), ("put", "b", b"2")]
    watcher.end()
    store.close()


def test_a_mirror_follows_a_store_that_lost_its_data_and_went_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = EmbeddedEtcd(tmp_path)
    etcd.start()
    etcd.wait_ready()
    store, told = EtcdStore(etcd.address), list[set[str]]()
    grown = threading.Event()
    store.put("/j/a", b"1")
    monkeypatch.setattr(etcd_module, "_PAUSES_S", (0.0,))
    stream = etcd_module.EtcdStream

    def connect(*given: Any) -> Any:
        """The watch is back when the store has made more revisions than before."""
        grown.wait(20)
        return stream(*given)

    grown.set()
    monkeypatch.setattr(etcd_module, "EtcdStream", connect)
    end = ThreadMirrors(store).mirror("/j/", lambda pairs, _: told.append(set(pairs)))
    try:
        wait_until(lambda: told == [{"/j/a"}])
        store.put("/j/b", b"1")
        wait_until(lambda: told[-1] == {"/j/a", "/j/b"})
        grown.clear()
        etcd.stop()
        etcd.start()
        etcd.wait_ready()
        for _ in range(9):
            store.put("/j/c", b"2")
        grown.set()
        wait_until(lambda: told[-1] == {"/j/c"})
    finally:
        end()
        store.close()
        etcd.stop()


def test_a_mirror_follows_a_full_store_that_refuses_to_compare(
    server: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "_QUIET_S", 0.1)
    store, told = EtcdStore(server.address), list[set[str]]()
    refused: list[Any] = []

    def full(_: EtcdStore, compares: Any, changes: Any) -> bool:
        refused.append(compares)
        raise StoreFull("mvcc: database space exceeded")

    store.put("/full/a", b"1")
    store.put("/full/b", b"1")
    monkeypatch.setattr(EtcdStore, "txn", full)
    end = ThreadMirrors(store).mirror("/full/", lambda it, _: told.append(set(it)))
    try:
        wait_until(lambda: len(refused) > 1)
        store.delete("/full/a")
        wait_until(lambda: told[-1] == {"/full/b"})
    finally:
        end()
        store.close()


def test_unreachable_store() -> None:
    store = EtcdStore(f"127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnavailable, match="get /a: .*refused"):
        store.get("/a")
    Watcher(store, "/a", 1).end()
    store.close()


def test_silent_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        store = EtcdStore(address, timeout_s=0.2)
        with pytest.raises(
            StoreUnavailable, match=r"keepalive 7: no answer within 0\.(2|1\d) s"
        ):
            store.keepalive(7)
        store.close()


def test_a_reply_in_drops_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" * 9:
                    sock.sendall(bytes([byte]))
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        store = EtcdStore(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5)
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.(5|4\d) s"):
            store.get("a")
        assert time.monotonic() - begun < 10  # all would take 18 s
        store.close()


def test_a_resolver_that_hangs_does_not_hold_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, over = socket.getaddrinfo, threading.Event()

    def resolve(host: str, *rest: Any, **options: Any) -> Any:
        if host == "etcd.invalid" and not options.get("flags"):
            over.wait(20)
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    store = EtcdStore("etcd.invalid:2379", timeout_s=0.3)
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match="etcd.invalid:2379: get a: no answer"):
        store.get("a")
    assert time.monotonic() - begun < 10
    over.set()
    store.close()


@pytest.mark.parametrize("address", ["localhost", ":2379", "http://h:2379", "h:port"])
def test_bad_address(address: str) -> None:
    with pytest.raises(ValueError, match="--store"):
        EtcdStore(address)


def test_version_warning() -> None:
    assert "3.5.6" in (version_warning("3.5.1") or "")
    assert version_warning("3.5.6") is None
    assert version_warning("3.6.0-rc.1") is None


def test_status_is_a_version(server: EmbeddedEtcd) -> None:
    store = EtcdStore(server.address)
    assert store.status().startswith("3.")
    store.close()


class ClosedAsItConnects(EtcdStore):
    """Another thread closes the store after a call was let through."""

    used: list[Connection]

    def _exchange(
        self, connection: Connection, call: Any, headers: dict[str, str], end: float
    ) -> tuple[int, bytes]:
        self.used = [connection]
        self.close()
        connection.open(end)
        return super()._exchange(connection, call, headers, end)


def test_a_call_under_way_leaves_no_connection_to_a_closed_store(
    server: EmbeddedEtcd,
) -> None:
    store = ClosedAsItConnects(server.address)
    assert store.list("/none/")[0] == []
    assert [one.is_open for one in store.used] == [False]
