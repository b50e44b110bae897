"""A host that has the leader key leads, or lets go of the key in time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtft.elastic.leader.leadership import Leadership
from dtft.elastic.store.api import KeyValue, Put, StoreUnavailable
from dtft.elastic.store.embedded import EmbeddedEtcd
from dtft.elastic.store.etcd import EtcdStore
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import View
from tests.support.agents import agents, config, joined
from tests.support.desks import ASSIGNMENT, LEASE_S, LeaderDesk, record_of
from tests.support.hosts import wait_until
from tests.support.members import Cluster, Host


class Term:
    """A leader that only counts."""

    def __init__(self, view: View) -> None:
        self.view, self.seen, self.closed = view, 0, False

    def see(self, view: View) -> None:
        self.view, self.seen = view, self.seen + 1

    def close(self) -> None:
        self.closed = True


class Leading:
    """One host with its leadership, which hears of every view."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.host: Host = cluster.add(name)
        self.terms: list[Term] = []
        self.told: list[str] = []
        self.leadership = Leadership(
            *(name, self.host.member, cluster.loop, LEASE_S, self._make),
            on_begun=lambda: self.told.append("begun"),
            on_ended=lambda: self.told.append("ended"),
        )
        self.host.member._on_view = self.leadership.see

    def _make(self, view: View, commits: Any) -> Any:
        self.terms.append(Term(view))
        return self.terms[-1]

    def campaign(self) -> None:
        if self.leadership.may_campaign:
            self.host.member.campaign()

    @property
    def leads(self) -> bool:
        return self.leadership.leader is not None


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield Cluster()


@pytest.fixture
def two(cluster: Cluster) -> tuple[Leading, Leading]:
    hosts = Leading(cluster, "a"), Leading(cluster, "b")
    cluster.loop.turn(0.2)
    return hosts


def test_who_has_the_key_leads_and_the_other_does_not(
    cluster: Cluster, two: tuple[Leading, Leading]
) -> None:
    a, b = two
    for host in two:
        host.campaign()
    cluster.loop.turn(0.1)
    assert a.leads and not b.leads and a.told == ["begun"]


def test_a_host_whose_store_went_away_as_it_came_to_lead_leads_later(
    cluster: Cluster, two: tuple[Leading, Leading]
) -> None:
    a, _ = two
    cluster.loop.hold("leadership")
    a.campaign()
    cluster.loop.turn(0.1)
    a.host.door.shut = True
    cluster.loop.let_go("leadership")
    cluster.loop.turn(2.0)
    assert not a.leads
    a.host.door.shut = False
    cluster.loop.turn(1.0)
    assert a.leads and a.told == ["begun"]


def test_a_host_that_cannot_lead_lets_go_of_the_key_and_another_leads(
    cluster: Cluster, two: tuple[Leading, Leading], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two

    def unreadable(key: str) -> None:
        raise StoreUnavailable(f"get {key}: no answer")

    # The lease is renewed all the time: only what was committed cannot be read.
    monkeypatch.setattr(a.host.door, "get", unreadable)
    a.campaign()
    cluster.loop.turn(LEASE_S - 1)
    assert cluster.view.leader == "a" and not a.leads
    cluster.loop.turn(2)
    assert cluster.view.leader is None
    assert set(cluster.view.hosts) == {"a", "b"}  # it keeps its place
    assert not a.leadership.may_campaign
    a.campaign()
    b.campaign()
    cluster.loop.turn(0.5)
    assert b.leads and not a.leads
    cluster.loop.turn(3 * LEASE_S)
    assert a.leadership.may_campaign


def test_a_leader_that_takes_its_key_again_goes_on(
    cluster: Cluster, two: tuple[Leading, Leading]
) -> None:
    a, _ = two
    a.campaign()
    cluster.loop.turn(0.1)
    before = a.terms[-1].view
    a.host.ticks = False
    cluster.loop.turn(LEASE_S + 1)
    assert cluster.view.leader is None and a.leads
    a.host.ticks = True
    cluster.loop.turn(1)
    a.campaign()
    cluster.loop.turn(0.5)
    assert cluster.view.leader == "a" and cluster.view.term > before.term
    assert len(a.terms) == 1 and not a.terms[0].closed and a.told == ["begun"]
    assert a.terms[0].view.term == cluster.view.term


def test_a_leader_ends_when_another_leads(
    cluster: Cluster, two: tuple[Leading, Leading]
) -> None:
    a, b = two
    a.campaign()
    cluster.loop.turn(0.1)
    b.host.member.expel(cluster.view.leader_lease)
    cluster.loop.turn(0.05)
    b.campaign()
    cluster.loop.turn(0.5)
    assert b.leads and not a.leads
    assert a.terms[0].closed and a.told == ["begun", "ended"]


def test_a_leader_ends_though_another_has_led_only_meanwhile(
    cluster: Cluster, two: tuple[Leading, Leading]
) -> None:
    a, b = two
    a.campaign()
    cluster.loop.turn(0.1)
    a.host.door.shut = True
    cluster.loop.turn(LEASE_S + 1)
    b.campaign()
    cluster.loop.turn(0.2)
    assert b.leads
    b.host.member.close()
    cluster.loop.turn(0.2)
    assert cluster.view.leader is None and a.leads  # it has heard nothing yet
    a.host.door.shut = False
    cluster.loop.turn(2)
    assert not a.leads
    a.campaign()
    cluster.loop.turn(0.5)
    assert a.leads and len(a.terms) == 2


def test_a_leader_ends_when_the_store_has_lost_its_data(
    cluster: Cluster, two: tuple[Leading, Leading]
) -> None:
    a, _ = two
    a.campaign()
    cluster.loop.turn(0.1)
    cluster.empty()
    cluster.loop.turn(2 * LEASE_S)
    assert not a.leads and a.terms[0].closed
    a.campaign()
    cluster.loop.turn(0.5)
    assert a.leads and a.terms[-1].view.era == 2


def test_a_leader_that_lets_go_is_no_leader_and_another_may_be(
    cluster: Cluster, two: tuple[Leading, Leading]
) -> None:
    a, b = two
    a.campaign()
    cluster.loop.turn(0.1)
    a.leadership.let_go(a.host.view, "of 3 hosts 1 reach this one")
    assert not a.leads
    cluster.loop.turn(0.5)
    b.campaign()
    cluster.loop.turn(0.5)
    assert b.leads and not a.leads


def test_a_new_leader_forms_the_job_anew_and_names_who_is_gone(tmp_path: Path) -> None:
    desk = LeaderDesk(tmp_path, record_of("a"))
    desk.register(record_of("a"))
    desk.put("m/assignment", ASSIGNMENT.to_json())
    desk.begin()
    (event,) = [event for event in desk.events() if event["event"] == "forming"]
    assert event["reason"] == "b (slot 1) has no lease any more"
    desk.close()


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


def test_a_term_of_a_real_store_is_fenced(etcd: EmbeddedEtcd) -> None:
    """The in-memory twin, of which all else is tested, says the same as etcd."""
    cluster = Cluster(lease_s=60.0)  # the store's time is real, that of the loop is not
    store = EtcdStore(etcd.address, 20.0)
    cluster.store = store  # type: ignore[assignment]
    try:
        a, b = Leading(cluster, "a"), Leading(cluster, "b")
        cluster.loop.turn(0.05)
        a.campaign()
        cluster.loop.turn(0.05)
        old = a.terms[-1].view
        change = [Put(key=a.host.member.key("m/x"), value=b"1")]
        assert a.leads and a.host.member.fenced(old, list(change))
        b.host.member.expel(old.leader_lease)
        cluster.loop.turn(0.05)
        b.campaign()
        cluster.loop.turn(0.05)
        assert b.leads and not a.leads
        assert not a.host.member.fenced(old, list(change))
        assert b.host.member.fenced(b.terms[-1].view, list(change))
    finally:
        for host in cluster.hosts:
            host.member.close()
        store.close()
