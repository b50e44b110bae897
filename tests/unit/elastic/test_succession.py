"""Who leads next, and which hosts of the last assignment a new leader looks for."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dtft.elastic.host.agent import campaign_delay_s, unlisted
from dtft.elastic.store.view import View
from tests.support.desks import ASSIGNMENT, record_of
from tests.support.obedient_desk import ObedientDesk

LEASE_S = 5.0
HOSTS = {host: record_of(host) for host in "abc"}


@given(st.booleans(), st.sampled_from("abc"), st.sampled_from("abc"), st.booleans())
def test_a_host_that_leaves_campaigns_after_all_others(
    hears: bool, leaver: str, last: str, has_led: bool
) -> None:
    hosts = HOSTS | {leaver: replace(HOSTS[leaver], leaving=True)}
    view = View(hosts=hosts, last_led=last if has_led else "")
    delays = {
        host: campaign_delay_s(view, record, LEASE_S, hears=hears)
        for host, record in hosts.items()
    }
    assert max(delays, key=delays.__getitem__) == leaver
    assert len(set(delays.values())) == len(delays)


def test_a_leader_that_leaves_is_not_waited_for_though_it_is_heard() -> None:
    stays = View(hosts=HOSTS, last_led="a")
    leaves = View(hosts=HOSTS | {"a": replace(HOSTS["a"], leaving=True)}, last_led="a")
    waits, hurries = (
        campaign_delay_s(view, HOSTS["b"], LEASE_S, hears=True)
        for view in (stays, leaves)
    )
    assert waits == hurries + LEASE_S / 2


def test_only_agents_with_a_slot_that_the_store_lists_no_more_are_looked_for() -> None:
    view = View(hosts={"a": HOSTS["a"]}, assignment=ASSIGNMENT)  # of a and b
    assert unlisted(view, HOSTS) == [HOSTS["b"]]
    anew = HOSTS | {"b": record_of("b", incarnation="anew.1")}
    assert unlisted(view, anew) == []
    assert unlisted(View(hosts=HOSTS, assignment=ASSIGNMENT), HOSTS) == []
    assert unlisted(View(), HOSTS) == []


def test_why_all_restart_is_said_though_the_job_is_formed_anew_meanwhile(
    tmp_path: Path,
) -> None:
    desk = ObedientDesk(tmp_path, hosts=4, hot_swap=True)
    try:
        desk.leader.close()
        desk.config = replace(desk.config, host="h2")
        desk.delete("m/hosts/h0")  # led, and its agent served the processes of all
        desk.begin()
        desk.leader._rendezvous.form("the store has lost its data")
        desk.until(lambda: desk.phase == "running", limit_s=LEASE_S)
        (recovery,) = [it for it in desk.events() if it["event"] == "recovery"][-1:]
        assert recovery["survivors_restarted"] == 1
        assert "h0, which served" in recovery["restarted_because"]
    finally:
        desk.close()
