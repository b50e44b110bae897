"""A host's registration, the leader key and its fence, on the in-memory store."""

import queue
import threading
import time

import pytest

from dtft.elastic.membership import Membership, View, claim
from dtft.elastic.memory_store import MemoryStore
from dtft.elastic.roles import HostRecord
from dtft.elastic.store import Put


class Host:
    """One member and what it heard."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        self.events: queue.Queue = queue.Queue()
        record = HostRecord(
            host=name,
            address=f"{name}:1",
            incarnation=f"{name}-1",
            joined_ns=time.time_ns(),
            pid=1,
        )
        self.member = Membership(
            store, "job", record, 5.0, lambda *event: self.events.put(event)
        )
        self.member.start()

    def view(self, ready) -> View:
        """The first view that satisfies `ready`."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            kind, found = self.events.get(timeout=10)
            if kind == "view" and ready(found):
                return found
        raise AssertionError("no such view")


@pytest.fixture
def store():
    made = MemoryStore()
    yield made
    made.close()


@pytest.fixture
def two(store):
    hosts = Host(store, "a"), Host(store, "b")
    yield hosts
    for host in hosts:
        host.member.leave()


def test_hosts_see_each_other_and_one_leader(two):
    a, b = two
    a.view(lambda view: set(view.hosts) == {"a", "b"})
    a.member.campaign()
    b.member.campaign()
    assert a.view(lambda view: view.leader).leader == "a"
    assert b.view(lambda view: view.leader).leader == "a"


def test_a_leader_that_was_replaced_cannot_write(two):
    a, b = two
    a.member.campaign()
    old = a.view(lambda view: view.leader == "a")
    change = Put(key=a.member.key("m/x"), value=b"1")
    assert a.member.fenced(old, [change])
    b.member.expel(old.leader_lease)
    b.view(lambda view: view.leader is None)
    b.member.campaign()
    new = b.view(lambda view: view.leader == "b")
    assert new.leader_revision > old.leader_revision
    assert not a.member.fenced(old, [change])
    assert b.member.fenced(new, [change])


def test_an_expelled_host_is_gone_at_once_and_registers_again(two, store):
    a, b = two
    lease = a.view(lambda view: "b" in view.hosts).leases["b"]
    before = store.list("")[1]
    a.member.expel(lease)
    (first, *_) = next(store.watch("", before + 1, threading.Event()))
    assert (first.kind, first.kv.key) == ("delete", a.member.key("m/hosts/b"))
    # It lives, so its next keepalive is refused. Whoever looks late sees only that.
    a.view(lambda view: view.leases.get("b", lease) != lease)


def test_a_job_has_one_fingerprint(store):
    assert claim(store, "job/m/fingerprint", b"first") == b"first"
    assert claim(store, "job/m/fingerprint", b"second") == b"first"
