"""A host that has the leader key leads, or lets go of the key in time."""

import queue
import time
from collections.abc import Callable
from pathlib import Path

from dtft.elastic.peers import Peers

from dtft.elastic.etcd import EtcdStore
from dtft.elastic.etcd_server import EmbeddedEtcd
from dtft.elastic.leader import Leader
from dtft.elastic.leadership import Leadership
from dtft.elastic.membership import Membership, View
from dtft.elastic.memory_store import MemoryStore
from dtft.elastic.roles import HostRecord
from dtft.elastic.store import KeyValue, StoreUnavailable
from tests.checkpoint.hosts import wait_until
from tests.elastic.desks import agent_config
from tests.elastic.test_agents import agents, config, joined


class Host:
    """One member with its leadership; views are handed over by the test."""

    def __init__(self, folder: Path, address: str, name: str, lease_s: float) -> None:
        self.views: queue.Queue[View] = queue.Queue()
        self.now = 0.0
        self.store = EtcdStore(address)
        (folder / name / "logs").mkdir(parents=True)
        settings = agent_config(folder / name, name, store=address)
        record = HostRecord(
            host=name, address="x:1", incarnation=name, joined_ns=0, pid=1
        )
        self.member = Membership(self.store, "j", record, lease_s, self._told)
        self.leadership = Leadership(
            *(Leader, settings, self.member, Peers(lambda *_: None), lambda *_: None),
            clock=lambda: self.now,
        )
        self.member.start()

    def _told(self, kind: str, value: object) -> None:
        if isinstance(value, View):
            self.views.put(value)

    def view(self, ready: Callable[[View], object]) -> View:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            found = self.views.get(timeout=20)
            if ready(found):
                return found
        raise AssertionError("no such view")

    def close(self) -> None:
        self.leadership.close()
        self.member.leave()
        self.store.close()


def test_a_host_whose_store_went_away_as_it_came_to_lead_leads_later(
    tmp_path: Path, etcd: EmbeddedEtcd
) -> None:
    host = Host(tmp_path, etcd.address, "a", 30.0)
    try:
        host.member.campaign()
        view = host.view(lambda it: it.leader == "a")
        etcd.kill()
        assert not host.leadership.take(view)
        assert host.leadership.leader is None and host.leadership.pending
        etcd.start()
        etcd.wait_ready()
        wait_until(lambda: host.leadership.take(view))  # the agent asks at every tick
        assert host.leadership.leader is not None and not host.leadership.pending
        assert not host.leadership.take(view)
    finally:
        host.close()


def test_a_host_that_cannot_lead_lets_go_of_the_key_and_another_leads(
    tmp_path: Path, etcd: EmbeddedEtcd
) -> None:
    one, other = (Host(tmp_path, etcd.address, name, 8.0) for name in "ab")
    try:
        one.member.campaign()
        first = one.view(lambda it: it.leader == "a" and len(it.hosts) == 2)
        etcd.kill()
        for one.now, waits in [(0.0, True), (4.9, True), (5.1, False)]:
            assert not one.leadership.take(first)
            assert one.leadership.pending == waits
        etcd.start()
        etcd.wait_ready()
        assert not one.leadership.take(first)  # it has let go of this term
        free = other.view(lambda it: it.leader is None and it.leases != first.leases)
        assert set(free.hosts) == {"a", "b"}  # of the key, not of its place
        other.member.campaign()
        second = other.view(lambda it: it.leader == "b")
        wait_until(lambda: other.leadership.take(second))
    finally:
        one.close()
        other.close()


class Slow(MemoryStore):
    """Answers everything but, at first, what was committed."""

    refusals = 3

    def get(self, key: str) -> KeyValue | None:
        if key.endswith("c/commits") and self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("made unavailable")
        return super().get(key)


def test_an_agent_leads_though_no_other_view_comes(tmp_path: Path) -> None:
    store = Slow()
    with agents(store, config(tmp_path, "a")):
        wait_until(lambda: joined(tmp_path) == {"a"}, 20)
    assert store.refusals == 0
