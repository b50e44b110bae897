"""A host's registration, the leader key and its fence, on the in-memory store."""

import dataclasses
import json
from collections.abc import Iterator

import pytest

from dtft.elastic.assignment import process_of
from dtft.elastic.store.api import Put, StoreFull
from dtft.elastic.store.membership import claim
from dtft.elastic.store.memory import MemoryStore
from dtft.elastic.store.view import View, job_key
from tests.support.desks import LEASE_S, record_of
from tests.support.members import Cluster, Host


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for host in made.hosts:
        host.member.close()


@pytest.fixture
def two(cluster: Cluster) -> tuple[Host, Host]:
    hosts = cluster.add("a"), cluster.add("b")
    cluster.loop.turn(0.2)
    return hosts


def allowed(cluster: Cluster, host: Host, view: View) -> bool:
    """Whether a host may write as the leader of a term."""
    return host.member.fenced(view, [Put(key=host.member.key("m/x"), value=b"1")])


def incarnations(cluster: Cluster) -> dict[str, str]:
    return {name: it.incarnation for name, it in cluster.view.hosts.items()}


def test_hosts_see_each_other_and_one_leader(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    for host in two:
        assert set(host.view.hosts) == {"a", "b"}
        host.member.campaign()
    cluster.loop.turn(0.1)
    assert {host.view.leader for host in two} == {"a"}


def test_registrations_last_while_the_loop_turns(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    before = incarnations(cluster)
    cluster.loop.turn(20 * LEASE_S)
    assert incarnations(cluster) == before
    assert not any(host.lapses for host in two)


def test_a_leader_that_was_replaced_cannot_write(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    old = cluster.lead(a)
    assert allowed(cluster, a, old)
    b.member.expel(old.leader_lease)
    cluster.loop.turn(0.1)
    new = cluster.lead(b)
    assert new.term > old.term
    assert not allowed(cluster, a, old) and allowed(cluster, b, new)


def test_an_expelled_host_is_gone_at_once_and_registers_as_the_next_incarnation(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    before = a.view.hosts["b"].incarnation
    a.member.expel(a.view.leases["b"])
    cluster.loop.turn(0.05)
    assert set(a.view.hosts) == {"a"}
    cluster.loop.turn(LEASE_S)
    after = a.view.hosts["b"].incarnation
    assert after != before and process_of(after) == process_of(before)
    assert b.lapses == [after]


def test_a_host_whose_loop_stands_still_loses_its_lease_and_comes_back(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    b.ticks = False
    cluster.loop.turn(LEASE_S + 1)
    assert set(a.view.hosts) == {"a"}
    b.ticks = True
    cluster.loop.turn(1)
    assert a.view.hosts["b"].incarnation == "b.2" and b.lapses == ["b.2"]
    assert b.up == []  # the store was there all the time


def test_a_short_stop_costs_nothing(cluster: Cluster, two: tuple[Host, Host]) -> None:
    a, b = two
    before = incarnations(cluster)
    b.ticks = False
    cluster.loop.turn(2.0)
    b.ticks = True
    cluster.loop.turn(3 * LEASE_S)
    assert incarnations(cluster) == before and not b.lapses


@pytest.mark.parametrize("operation", ["txn", "grant", "put"])
def test_a_registration_whose_answer_was_lost_is_repaired(
    cluster: Cluster, two: tuple[Host, Host], operation: str
) -> None:
    a, b = two
    a.member.expel(a.view.leases["b"])
    b.door.lost = [operation]
    cluster.loop.turn(3 * LEASE_S)
    assert not b.door.lost
    found = a.view.hosts["b"]
    assert found.incarnation == b.member.record.incarnation
    # It is kept: the lease that the record has is the one that is renewed.
    cluster.loop.turn(10 * LEASE_S)
    assert a.view.hosts["b"].incarnation == found.incarnation


def test_a_record_that_vanished_is_written_again(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    cluster.store.delete(job_key("job", "m/hosts/b"))
    cluster.loop.turn(LEASE_S)
    assert a.view.hosts["b"].incarnation == "b.1" and not b.lapses


def test_of_two_agents_of_one_name_the_earlier_one_gives_way(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    _, b = two
    later = dataclasses.replace(b.member.record, incarnation="other.1", joined_ns=99)
    cluster.store.put(job_key("job", "m/hosts/b"), later.to_json().encode())
    cluster.loop.turn(LEASE_S)
    assert b.replaced and b.replaced[0].incarnation == "other.1"
    earlier = dataclasses.replace(later, joined_ns=-1)
    assert not earlier.replaces(b.member.record)
    kept = cluster.store.get(job_key("job", "m/hosts/b"))
    assert kept is not None and kept.value == later.to_json().encode()


def test_a_host_whose_record_cannot_be_written_keeps_its_lease(
    cluster: Cluster, two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two

    def full(key: str, value: bytes, lease: int = 0) -> None:
        raise StoreFull("no space")

    monkeypatch.setattr(b.door, "put", full)
    b.member.describe(record_of("b", process=3, attached_ns=7))
    cluster.loop.turn(4 * LEASE_S)
    assert not b.lapses and a.view.hosts["b"].process == -1
    monkeypatch.undo()
    cluster.loop.turn(1)
    assert not b.lapses and a.view.hosts["b"].process == 3


def test_what_a_host_says_of_itself_reaches_the_others(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    b.door.lost = ["put"]
    b.member.describe(record_of("b", process=3, attached_ns=7, incarnation="old.1"))
    cluster.loop.turn(1)
    assert a.view.hosts["b"].process == 3
    assert a.view.hosts["b"].incarnation == "b.1"


def test_a_store_that_is_away_is_told_of_once_and_costs_nothing_if_short(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    for host in two:
        host.door.shut = True
    cluster.loop.turn(3.0)
    assert a.up == b.up == [False]
    for host in two:
        host.door.shut = False
    cluster.loop.turn(3.0)
    assert a.up == b.up == [False, True] and not a.lapses and not b.lapses


def test_a_host_cut_off_from_the_store_comes_back_as_the_next_incarnation(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    b.door.shut = True
    cluster.loop.turn(2 * LEASE_S)
    assert set(a.view.hosts) == {"a"}
    b.door.shut = False
    cluster.loop.turn(2.0)
    assert incarnations(cluster) == {"a": "a.1", "b": "b.2"}
    assert b.lapses == ["b.2"]


# ------------------------------------------------------------------ the store's data


def test_an_emptied_store_begins_a_new_era_once(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    old = cluster.lead(a)
    cluster.empty()
    cluster.loop.turn(2 * LEASE_S)
    assert {host.view.era for host in two} == {2}
    assert set(a.view.hosts) == {"a", "b"} and a.view.leader is None
    assert {host: process_of(it) for host, it in incarnations(cluster).items()} == {
        "a": "a",
        "b": "b",
    }
    known = cluster.store.get(job_key("job", "m/fingerprint"))
    assert known is not None and known.value == b"known"
    assert not allowed(cluster, a, old)
    assert cluster.lead(b).term > old.term


def test_views_never_go_back(cluster: Cluster, two: tuple[Host, Host]) -> None:
    a, _ = two
    cluster.lead(a)
    cluster.empty()
    cluster.loop.turn(2 * LEASE_S)
    for host in two:
        ages = [view.age for view in host.views]
        assert ages == sorted(ages)


def test_data_older_than_what_was_seen_begin_a_new_era(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, _ = two
    pairs, _ = cluster.store.list("")
    for number in range(50):
        cluster.store.put(job_key("job", "m/stored"), str(number).encode())
    cluster.loop.turn(0.1)
    assert a.view.stored == 49
    old, cluster.store = cluster.store, MemoryStore(cluster.loop.now)
    for pair in pairs:  # from a copy of the time before
        cluster.store.put(pair.key, pair.value)
    for host in two:
        host.door.store = cluster.store
    cluster.loop.turn(2 * LEASE_S)
    assert a.view.era == 2 and a.view.stored == 0
    old.close()


def test_a_store_that_began_again_refuses_a_former_leader_at_equal_revisions(
    cluster: Cluster,
) -> None:
    a = cluster.add("a")
    cluster.loop.turn(0.2)
    old = cluster.lead(a)
    again = Cluster()
    b = again.add("b")
    again.loop.turn(0.2)
    new = again.lead(b)
    assert (new.term, new.revision) == (old.term, old.revision)
    a.door.store = again.store
    assert not allowed(cluster, a, old)
    a.member.let_go(old)
    cluster.loop.turn(0.05)
    leader = again.store.get(job_key("job", "m/leader"))
    assert leader is not None and leader.value == b"b"
    b.member.close()


def test_a_store_that_began_the_same_era_again_begins_a_new_one(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, _ = two
    key = job_key("job", "m/era")
    again, era = MemoryStore(cluster.loop.now), json.dumps({"era": 1, "id": "other"})
    for _ in range(50):  # beyond every revision that was seen
        again.put(key, era.encode())
    cluster.store.close()
    cluster.store = again
    for host in two:
        host.door.store = again
    cluster.loop.turn(3 * LEASE_S)
    assert a.view.era == 2 and set(a.view.hosts) == {"a", "b"}


# --------------------------------------------------------------------- the leader key


def test_a_host_that_does_not_know_who_led_last_cannot_win(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    blind = b.member.view
    b.member._end_mirror()  # its watch has fallen behind
    lease = cluster.lead(a).leader_lease
    a.member.expel(lease)
    cluster.loop.turn(0.05)
    assert cluster.view.leader is None and b.member.view is blind
    b.member.campaign()
    cluster.loop.turn(0.05)
    assert cluster.view.leader is None
    cluster.loop.turn(1)
    assert cluster.lead(a).last_led == "a"


def test_letting_go_frees_the_key_and_keeps_the_registration(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    view = cluster.lead(a)
    a.member.let_go(view)
    cluster.loop.turn(0.05)
    assert cluster.view.leader is None and set(cluster.view.hosts) == {"a", "b"}
    assert cluster.view.leases["a"] != view.leader_lease
    assert cluster.lead(b).term > view.term
    cluster.loop.turn(5 * LEASE_S)
    assert set(cluster.view.hosts) == {"a", "b"}


def test_a_key_that_could_not_be_deleted_ends_with_its_lease(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, _ = two
    view = cluster.lead(a)
    a.door.shut = True
    a.member.let_go(view)
    cluster.loop.turn(0.5)
    a.door.shut = False
    cluster.loop.turn(2 * LEASE_S)
    assert cluster.view.leader is None and set(cluster.view.hosts) == {"a", "b"}


def test_a_host_without_a_lease_does_not_campaign(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, _ = two
    cluster.loop.hold("membership")
    a.member.let_go(cluster.lead(a))
    cluster.loop.turn(0.5)
    a.member.campaign()
    cluster.loop.turn(0.5)
    assert cluster.view.leader is None


def test_closing_ends_the_registration(
    cluster: Cluster, two: tuple[Host, Host]
) -> None:
    a, b = two
    b.member.close()
    cluster.loop.turn(2 * LEASE_S)
    assert set(cluster.view.hosts) == {"a"}


def test_a_job_has_one_fingerprint() -> None:
    store = MemoryStore()
    assert claim(store, "/dtft/job/m/fingerprint", b"first") == b"first"
    assert claim(store, "/dtft/job/m/fingerprint", b"second") == b"first"
