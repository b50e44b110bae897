"""Three etcd members with TLS and users: members that die, stop and return."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.cli.dispatch import main
from dtft.elastic.processes import free_port
from dtft.elastic.store import etcd as etcd_module
from dtft.elastic.store.api import (
    Compare,
    Put,
    StoreEvent,
    StoreRefused,
    StoreUnavailable,
)
from dtft.elastic.store.etcd import EtcdStore
from tests.support.etcd_cluster import (
    PASSWORD,
    PREFIX,
    Authority,
    Member,
    TlsEtcdCluster,
    has_ipv6,
    until,
)
from tests.support.watches import Watcher

DEADLINE_S = 2.0
SLACK_S = 3.0
"""A busy machine may take so much longer to return from a call."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsEtcdCluster]:
    with TlsEtcdCluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(running: TlsEtcdCluster) -> Iterator[TlsEtcdCluster]:
    """The cluster, whole again after each test."""
    yield running
    for member in running.members:
        member.revive()
    running.wait_ready()


@pytest.fixture
def store(cluster: TlsEtcdCluster) -> Iterator[EtcdStore]:
    with contextlib.closing(EtcdStore(cluster.address(), DEADLINE_S)) as made:
        made.get("warm")
        yield made


class Putting:
    """Puts 0, 1, 2, ... again and again, each until it is confirmed."""

    def __init__(self, store: EtcdStore, key: str) -> None:
        self._store, self._key = store, key
        self.confirmed, self.longest_s = 0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            with contextlib.suppress(StoreUnavailable):
                self._store.put(self._key, str(self.confirmed).encode())
                self.confirmed += 1
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            time.sleep(0.01)

    def goes_on(self) -> float:
        """Seconds until five more puts are confirmed."""
        wanted = self.confirmed + 5
        return until(lambda: self.confirmed >= wanted)

    def end(self) -> int:
        self._stop.set()
        self._thread.join(10)
        return self.confirmed


def in_use(cluster: TlsEtcdCluster, store: EtcdStore) -> Member:
    return cluster.member_at(store.endpoint)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_calls_and_watches_go_on_without_the_member_they_used(
    cluster: TlsEtcdCluster, store: EtcdStore, fault: str
) -> None:
    prefix = f"{fault}/"
    watcher = Watcher(store, prefix, store.list(prefix)[1] + 1)
    putting = Putting(store, prefix + "a")
    for _ in range(2):  # the second time perhaps the leader
        putting.goes_on()
        member = in_use(cluster, store)
        member.kill() if fault == "killed" else member.stop()
        putting.goes_on()
        member.revive()
    confirmed = putting.end()
    assert putting.longest_s < DEADLINE_S + SLACK_S
    found: list[StoreEvent] = []
    while confirmed - 1 not in {int(event.kv.value) for event in found}:
        found += watcher.batch()
    revisions = [event.kv.mod_revision for event in found]
    assert revisions == sorted(revisions)
    # None is missing. A put that a stopped member has taken, and that was confirmed by
    # another one, is applied once more when it goes on: perhaps after later puts.
    first_seen = list(dict.fromkeys(int(event.kv.value) for event in found))
    assert first_seen == list(range(first_seen[-1] + 1))
    watcher.end()


def test_a_watch_leaves_a_stopped_member_though_nothing_else_is_called(
    cluster: TlsEtcdCluster, store: EtcdStore
) -> None:
    watcher = Watcher(store, "quiet/", store.list("quiet/")[1] + 1)
    other = EtcdStore(cluster.address())
    with contextlib.closing(other):
        heard: list[StoreEvent] = []
        until(lambda: _puts(other, "quiet/a"))
        heard += watcher.events(1)
        in_use(cluster, store).stop()
        time.sleep(0.1)
        until(lambda: _puts(other, "quiet/b"))
        begun = time.monotonic()
        while heard[-1].kv.key != "quiet/b":
            heard += watcher.events(1)
        # A put of "quiet/a" that was late is applied twice. No event comes twice.
        assert [event.kv.key for event in heard[:-1]] == ["quiet/a"] * (len(heard) - 1)
        revisions = [event.kv.mod_revision for event in heard]
        assert revisions == sorted(set(revisions))
        assert time.monotonic() - begun < etcd_module._ASK_S + DEADLINE_S + SLACK_S
    watcher.end()


def _puts(store: EtcdStore, key: str) -> bool:
    with contextlib.suppress(StoreUnavailable):
        store.put(key, b"")
        return True
    return False


def test_a_transaction_is_not_sent_to_a_second_member(
    cluster: TlsEtcdCluster, store: EtcdStore
) -> None:
    def version_is(number: int) -> bool:
        compare = Compare(key="once", target="version", value=number)
        return store.txn([compare], [])

    first = in_use(cluster, store)
    first.stop()
    time.sleep(0.1)
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"{first.address}: txn on once: no ans"):
        store.txn([], [Put(key="once", value=b"")])
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S
    assert store.endpoint != first.address
    first.go_on()
    until(lambda: _answers(store))
    time.sleep(0.5)  # the member may do now what it was asked to
    assert version_is(0) or version_is(1)


def _answers(store: EtcdStore) -> bool:
    with contextlib.suppress(StoreUnavailable):
        store.get("a")
        return True
    return False


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_without_a_majority_calls_end_in_time_and_go_on_afterwards(
    cluster: TlsEtcdCluster, store: EtcdStore, fault: str
) -> None:
    prefix = f"alone-{fault}/"
    store.put(prefix + "a", b"")
    watcher = Watcher(store, prefix, store.list(prefix)[1] + 1)
    lost = [member for member in cluster.members if member != in_use(cluster, store)]
    for member in lost:
        member.kill() if fault == "killed" else member.stop()
    causes: list[str] = []

    def leaderless() -> bool:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            store.get(prefix + "a")
        assert time.monotonic() - begun < DEADLINE_S + SLACK_S
        causes.append(str(caught.value))
        return "no leader" in causes[-1]

    until(leaderless)
    with pytest.raises(StoreUnavailable):
        store.put(prefix + "lost", b"")
    for member in lost:
        member.revive()
    until(lambda: _puts(store, prefix + "b"))
    keys: list[str] = []
    while prefix + "b" not in keys:
        keys += [event.kv.key for event in watcher.batch()]
    watcher.end()


def test_what_is_said_of_silent_members_is_how_long_each_was_waited_for(
    cluster: TlsEtcdCluster, store: EtcdStore
) -> None:
    for member in cluster.members[1:]:
        member.stop()
    waited: list[float] = []
    for _ in range(3):  # the time that is left after the others is of any length
        with pytest.raises(StoreUnavailable) as caught:
            store.get("a")
        waited += map(float, re.findall(r"no answer within (\S+) s", str(caught.value)))
    assert waited and min(waited) > DEADLINE_S / 8


def test_a_member_that_is_dead_at_the_start_is_passed_over(
    cluster: TlsEtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module.random, "sample", lambda items, _: list(items))
    endpoints = f"127.0.0.1:{free_port()},{cluster.addresses}"
    store = EtcdStore(cluster.address(endpoints=endpoints))
    with contextlib.closing(store):
        store.put("start", b"")
        assert store.endpoint == cluster.members[0].address


def test_a_member_that_restarts_has_forgotten_the_token(
    cluster: TlsEtcdCluster, store: EtcdStore
) -> None:
    alone = cluster.members[0]
    one = EtcdStore(cluster.address(endpoints=alone.address))
    with contextlib.closing(one):
        one.put("token", b"1")
        alone.kill()
        alone.revive()
        cluster.wait_ready()
        one.put("token", b"2")
        cluster.as_root("user", "add", "somebody:else")  # the token is too old then
        one.put("token", b"3")
        pair = store.get("token")
        assert pair is not None and pair.value == b"3"


def test_calls_go_on_while_users_are_added(cluster: TlsEtcdCluster) -> None:
    store = EtcdStore(cluster.address(), 20.0)  # a busy machine may be late
    refused: list[StoreUnavailable] = []
    ended = threading.Event()

    def put() -> None:
        while not ended.is_set():
            try:
                store.put("users", b"")
            except StoreUnavailable as error:
                refused.append(error)

    putters = [threading.Thread(target=put) for _ in range(4)]
    for thread in putters:
        thread.start()
    try:
        for number in range(20):
            cluster.as_root("user", "add", f"user-{number}:password")
    finally:
        ended.set()
        for thread in putters:
            thread.join(30)
        store.close()
    assert not refused


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
def test_ipv6(cluster: TlsEtcdCluster) -> None:
    endpoints = cluster.members[1].address.replace("127.0.0.1", "[::1]")
    with contextlib.closing(EtcdStore(cluster.address(endpoints=endpoints))) as store:
        watcher = Watcher(store, "six/", store.list("six/")[1] + 1)
        store.put("six/a", b"")
        assert store.endpoint.startswith("[::1]:") and watcher.events(1)
        watcher.end()


def test_a_prefix_separates_jobs_of_one_name(cluster: TlsEtcdCluster) -> None:
    one, two = (
        EtcdStore(cluster.address(prefix=f"{PREFIX}/{name}")) for name in ("a", "b")
    )
    with contextlib.closing(one), contextlib.closing(two):
        watcher = Watcher(one, "", one.list("")[1] + 1)
        two.put("job/leader", b"two")
        one.put("job/leader", b"one")
        assert [(it.key, it.value) for it in one.list("")[0]] == [
            ("job/leader", b"one")
        ]
        assert [it.kv.value for it in watcher.events(1)] == [b"one"]
        two.delete("job/leader")
        assert one.get("job/leader") is not None and watcher.silent()
        watcher.end()


def wrong(cluster: TlsEtcdCluster, folder: Path, what: str) -> dict[str, Any]:
    """Arguments of an address with one mistake."""
    other = Authority(folder, "other")
    named = cluster.authority.pair("named", subject="CN")
    (folder / "password").write_text("guess\n")
    stranger = other.pair("stranger")
    return {
        "password": {"password_file": folder / "password"},
        "user": {"user": "nobody"},
        "no user": {"user": None, "password_file": None},
        "authority": {"ca": other.certificate},
        "no certificate": {"certificate": None, "key": None},
        "certificate": {"certificate": stranger[0], "key": stranger[1]},
        "common name": {"certificate": named[0], "key": named[1]},
        "prefix": {"prefix": "/team-b"},
        "no TLS": {"ca": None, "certificate": None, "key": None},
    }[what]


@pytest.mark.parametrize(
    "what, text",
    [
        ("password", "as user dtft: .*authentication failed.*--store-password-file"),
        ("user", "as user nobody: .*authentication failed.*Change --store-user"),
        ("no user", "permission denied. Give --store-user"),
        ("authority", "certificate was not accepted: .*Give --store-ca"),
        ("no certificate", "refused this client.*Give --store-cert and --store-key"),
        ("certificate", "refused this client.*Give --store-cert and --store-key"),
        ("common name", "CommonName.*give --store-cert one whose subject has none"),
        ("prefix", "permission denied. .*below --store-prefix"),
    ],
)
def test_what_is_refused_says_what_to_change(
    cluster: TlsEtcdCluster, tmp_path: Path, what: str, text: str
) -> None:
    address = cluster.address(**wrong(cluster, tmp_path, what))
    with contextlib.closing(EtcdStore(address)) as store:
        begun = time.monotonic()
        with pytest.raises(StoreRefused, match=f"(?s){text}") as caught:
            store.get("a")
        assert time.monotonic() - begun < DEADLINE_S + SLACK_S
    assert PASSWORD not in str(caught.value) and "guess" not in str(caught.value)


def test_without_tls_the_error_names_its_flag(
    cluster: TlsEtcdCluster, tmp_path: Path
) -> None:
    address = cluster.address(**wrong(cluster, tmp_path, "no TLS"))
    with contextlib.closing(EtcdStore(address)) as store:
        with pytest.raises(StoreUnavailable, match="--store-ca"):
            store.get("a")


def test_commands_take_the_flags(
    cluster: TlsEtcdCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    job = ["--job", "none", "--secret-file", str(tmp_path / "secret")]
    flags = cluster.store_flags()
    for command in (["checkpoint", "ls"], ["scale", "--replicas", "2"]):
        assert main([*command, *flags, *job]) == 2
        assert "has no such job" in capsys.readouterr().err
        assert main([*command, *flags, *job, "--store-user", "nobody"]) == 2
        assert "Change --store-user" in capsys.readouterr().err
    for arguments in (["digits_cnn", "--run-dir", str(tmp_path / "run")], []):
        serve = [] if arguments else ["--serve-only"]
        command = ["agent", *serve, *arguments, *flags, *job, "--store-user", "nobody"]
        assert main(command) == 2
        assert "Change --store-user" in capsys.readouterr().err
