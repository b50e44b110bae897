"""A job's failure domains: placed once, kept while arenas live, told when too few."""

import functools
from dataclasses import replace

from dtft.checkpoint.replication.commit import commit_health
from dtft.checkpoint.replication.copy_placement import Spread
from dtft.elastic.anti_affinity import (
    Surroundings,
    known_domains,
    next_spread,
    preferred,
    shortfall,
)
from dtft.elastic.assignment import HostRecord, SlotAssignment, fill_slots, seat
from dtft.elastic.store.view import View
from tests.support.commits import HOSTS, assignment, commit_of, holdings_of, layout

RACKS = {"h0": "r1", "h1": "r1", "h2": "r2", "h3": "r2", "s1": "r2", "s2": "r1"}
STATE = layout(1, 4)


def record(host: str, racks: dict[str, str] = RACKS, joined: int = 0) -> HostRecord:
    label = f"rack={racks[host]}" if racks else ""
    return HostRecord(
        host=host, address="", incarnation=host, joined_ns=joined, pid=1, domain=label
    )


DOMAINS, _ = known_domains(record(host) for host in RACKS)


def test_a_spread_stays_while_copies_stay_in_memory() -> None:
    first = next_spread(None, HOSTS, DOMAINS, 2, keep=False)
    assert first == Spread(copies=2, level="rack", domains=("r1", "r1", "r2", "r2"))
    now = assignment(first)
    assert SlotAssignment.from_json(now.to_json()) == now
    moved = ("h0", "s1", "h2", "h3")
    assert next_spread(now, moved, DOMAINS, 2, keep=True) == first
    again = next_spread(now, moved, DOMAINS, 2, keep=False)
    assert again.domains == ("r1", "r2", "r2", "r2")
    nothing, _ = known_domains([])
    assert next_spread(None, HOSTS, nothing, 2, keep=False) == Spread(copies=2)


def test_of_equal_spares_the_one_with_the_slots_bytes_is_taken() -> None:
    seats = [record("h0", {}), None, record("h2", {}), None]
    spares = [record("s1", {}), record("s2", {})]
    old, (nothing, _) = assignment(Spread(copies=2)), known_domains([])
    ahead = {"s1": {3: 10}, "s2": {1: 10}}
    taken = preferred(old, STATE, seats, spares, nothing, ahead)
    assert [it.host for it in taken if it] == ["h0", "s2", "h2", "s1"]
    taken = preferred(old, STATE, seats, spares, nothing)
    assert [it.host for it in taken if it] == ["h0", "s1", "h2", "s2"]


def test_a_spare_that_keeps_copies_apart_goes_before_one_that_joined_earlier() -> None:
    old = assignment(next_spread(None, HOSTS, DOMAINS, 2, keep=False))
    live = [record("h0"), record("h2"), record("h3")]
    live += [record("s1", joined=1), record("s2", joined=2)]
    filled = fill_slots(
        [(host, host) for host in HOSTS],
        live,
        4,
        lambda seats, spares: preferred(old, STATE, seats, spares, DOMAINS),
    )
    assert [found.host for found in filled if found] == ["h0", "s2", "h2", "h3"]
    unknown = preferred(
        old, None, [None, *live[1:3], live[0]], [record("s1"), record("s2")], DOMAINS
    )
    assert unknown[0] is not None and unknown[0].host == "s1"


def test_too_few_domains_are_told() -> None:
    spread = next_spread(None, HOSTS, DOMAINS, 2, keep=False)
    placement = spread.place(STATE)
    assert shortfall(spread, placement, HOSTS, DOMAINS) == (2, "")
    slots = ("h0", "s1", "h2", "h3")
    effective, text = shortfall(spread, placement, slots, DOMAINS)
    assert effective == 1 and "in 1 rack only" in text and "another rack" in text
    three = next_spread(None, HOSTS, DOMAINS, 3, keep=False)
    assert three.level == "host" and len(set(three.domains)) == 4
    effective, text = shortfall(three, three.place(STATE), HOSTS, DOMAINS)
    assert effective == 2 and "in 2 racks only" in text
    nothing, _ = known_domains([])
    lone = Spread(copies=3)
    two = layout(1, 2)
    assert shortfall(lone, lone.place(two), HOSTS[:2], nothing)[0] == 2


def test_whoever_looks_at_a_job_sees_its_effective_copies() -> None:
    spread = next_spread(None, HOSTS, DOMAINS, 2, keep=False)
    moved = replace(assignment(spread), slots=("h0", "s1", "h2", "h3"))
    for now, expected in [(assignment(spread), 2), (moved, 1)]:
        view = View(hosts={host: record(host) for host in RACKS}, assignment=now)
        seen = Surroundings.of(view)
        asked, effective, problem = seen.copies(STATE)
        assert (asked, effective, bool(problem)) == (2, expected, expected < 2)
        assert seen.placed == spread.domains
    gone = View(hosts={}, assignment=moved)
    assert Surroundings.of(gone).copies(STATE) == (0, 0, "")
    assert Surroundings.of(View()).copies(STATE) == (0, 0, "")


def test_copies_in_one_rack_count_once() -> None:
    held = holdings_of(STATE, 2, 7)  # by slot: h0 and h1 keep copies of each other
    racks = {host: RACKS[host] for host in HOSTS}
    found = commit_health(commit_of(STATE, 7), STATE, held, domains=racks)
    assert (found.copies[0], found.state) == (1, "degraded")
    assert commit_health(commit_of(STATE, 7), STATE, held).state == "healthy"


def test_labels_that_contradict_are_not_used() -> None:
    domains, problem = known_domains([record("h0"), record("h1", {})])
    assert domains.levels == () and "Name the same levels" in problem


def test_a_label_survives_registration() -> None:
    mine = record("h0")
    assert HostRecord.from_json(mine.to_json()) == mine
    assert replace(mine, domain="").domain == ""


def test_another_size_is_spread_anew_and_takes_spares_in_order() -> None:
    old = assignment(next_spread(None, HOSTS, DOMAINS, 2, keep=False))
    assert len(next_spread(old, ("h0", "h2"), DOMAINS, 2, keep=True).domains) == 2
    live = [record("h0"), record("s2", joined=1), record("s1", joined=2)]
    for state in (STATE, layout(2, 1), None):  # of either size, or not known
        choose = functools.partial(preferred, old, state, domains=DOMAINS)
        filled = seat([(host, host) for host in HOSTS], live, 2, 1, choose)
        assert [it.host for it in filled if it] == ["h0", "s2"]
