"""Which hosts a leader waits for and which it can use, whatever they do."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.elastic.leader.host_registry import STRAY_S, HostRegistry
from tests.support.desks import record_of

GRACE_S = 10.0
LEASE_S = 5.0

Act = Callable[[HostRegistry], object]


def registry(*hosts: str, former: dict[str, str] | None = None) -> HostRegistry:
    """At time 0; these hosts have connected."""
    made = HostRegistry(0.0, GRACE_S, former)
    for host in hosts:
        made.connect(record_of(host))
    return made


def unfit(host: str) -> Act:
    return lambda it: it.unfit.update({host: "no room"})


CASES: list[tuple[str, list[Act], set[str], set[str], dict[str, str]]] = [
    ("all are there", [], {"a", "b"}, {"a", "b"}, {}),
    (
        "away for a moment",
        [lambda it: it.disconnect("b", 1.0)],
        {"a", "b"},
        {"a"},
        {"b": "its connection is cut"},
    ),
    (
        "away and back",
        [lambda it: it.disconnect("b", 1.0), lambda it: it.connect(record_of("b"))],
        {"a", "b"},
        {"a", "b"},
        {},
    ),
    ("lost", [lambda it: it.lose("b")], {"a"}, {"a"}, {}),
    (
        "lost and back as the next incarnation",
        [
            lambda it: it.lose("b"),
            lambda it: it.connect(record_of("b", incarnation="b.2")),
        ],
        {"a", "b"},
        {"a", "b"},
        {},
    ),
    (
        "left out",
        [lambda it: it.leave_out("b")],
        {"a"},
        {"a"},
        {"b": "it does not answer"},
    ),
    (
        "left out until it answers",
        [lambda it: it.leave_out("b"), lambda it: it.answered("b")],
        {"a", "b"},
        {"a", "b"},
        {},
    ),
    ("unfit, and still asked", [unfit("b")], {"a", "b"}, {"a"}, {"b": "no room"}),
    (
        "unfit, and the same process connects again",
        [unfit("b"), lambda it: it.connect(record_of("b", incarnation="b.2"))],
        {"a", "b"},
        {"a"},
        {"b": "no room"},
    ),
    (
        "unfit, and another process comes",
        [unfit("b"), lambda it: it.connect(record_of("b", incarnation="new.1"))],
        {"a", "b"},
        {"a", "b"},
        {},
    ),
    ("unfit and lost", [unfit("b"), lambda it: it.lose("b")], {"a"}, {"a"}, {}),
]


@pytest.mark.parametrize(
    ("acts", "expected", "usable", "why"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_who_is_waited_for_and_who_is_used(
    acts: list[Act], expected: set[str], usable: set[str], why: dict[str, str]
) -> None:
    made = registry("a", "b")
    for act in acts:
        act(made)
    assert made.expected({}, 2.0) == expected
    assert {record.host for record in made.usable()} == usable
    assert made.num_usable == len(usable)
    assert made.unusable() == why


def test_registered_hosts_are_waited_for_while_they_may_be_connecting() -> None:
    made = registry("a")
    known = {host: record_of(host) for host in "abc"}
    made.lose("c")  # never there
    assert made.expected(known, GRACE_S) == {"a", "b", "c"}
    assert made.expected(known, GRACE_S + 1) == {"a"}
    made.connect(record_of("c"))
    made.lose("c")
    assert made.expected(known, GRACE_S) == {"a", "b"}
    known["c"] = record_of("c", incarnation="new.1")  # another process than was lost
    assert made.expected(known, GRACE_S) == {"a", "b", "c"}


def test_hosts_of_slots_that_the_store_does_not_know_get_a_moment() -> None:
    made = registry("a", former={"a": "a.1", "b": "b.1"})
    assert made.expected({}, STRAY_S) == {"a", "b"}
    assert made.expected({}, STRAY_S + 0.1) == {"a"}
    made.connect(record_of("b"))
    made.lose("b")
    assert made.expected({}, STRAY_S) == {"a"}


def test_who_is_away_for_longer_than_a_lease_is_overdue() -> None:
    made = registry("a", "b")
    made.disconnect("b", 1.0)
    made.disconnect("b", 3.0)  # it counts from the first time
    made.disconnect("never there", 1.0)
    assert made.overdue(1.0 + LEASE_S, LEASE_S) == []
    assert made.overdue(1.1 + LEASE_S, LEASE_S) == ["b"]
    made.lose("b")
    assert made.overdue(100.0, LEASE_S) == []


def test_connecting_says_whether_a_host_was_not_there() -> None:
    made = registry()
    assert made.connect(record_of("a"))
    assert not made.connect(record_of("a", process=3))  # it says something new
    assert not made.connect(record_of("a", incarnation="a.2"))  # the same process
    assert made.connect(record_of("a", incarnation="new.1"))
    made.disconnect("a", 1.0)
    assert made.connect(record_of("a", incarnation="new.1"))
    assert made.lose("a") and not made.lose("a")
    assert made.connect(record_of("a", incarnation="new.1"))


HOSTS = "abc"
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["connect", "anew", "cut", "lose", "leave_out", "heard", "unfit", "fit"]
        ),
        st.sampled_from(HOSTS),
    ),
    max_size=20,
)


def carry_out(made: HostRegistry, steps: list[tuple[str, str]]) -> None:
    for number, (what, host) in enumerate(steps):
        match what:
            case "connect":
                made.connect(record_of(host))
            case "anew":
                made.connect(record_of(host, incarnation=f"{host}-{number}.1"))
            case "cut":
                made.disconnect(host, float(number))
            case "lose":
                made.lose(host)
            case "leave_out":
                made.leave_out(host)
            case "heard":
                made.answered(host)
            case "unfit":
                made.unfit[host] = "no room"
            case _:
                made.unfit.pop(host, None)


@given(STEPS)
def test_whoever_can_be_used_is_there_and_waited_for(
    steps: list[tuple[str, str]],
) -> None:
    made = registry()
    carry_out(made, steps)
    usable = {record.host for record in made.usable()}
    assert made.num_usable == len(usable)
    after_grace = made.expected({}, GRACE_S + 1)
    assert usable <= made.connected <= set(made.records)
    assert usable <= after_grace <= set(made.records)
    # Each host that is there is either used, or it is said why not.
    assert usable.isdisjoint(made.unusable())
    assert usable | set(made.unusable()) == set(made.records)
    # While hosts may be connecting, more are waited for and never fewer.
    known = {host: record_of(host) for host in HOSTS}
    assert after_grace <= made.expected(known, 1.0)


@given(STEPS)
def test_a_live_host_that_calls_and_says_that_it_is_well_is_usable(
    steps: list[tuple[str, str]],
) -> None:
    """No false death is for ever."""
    made = registry()
    carry_out(made, steps)
    for host in HOSTS:
        made.connect(record_of(host, incarnation="late.1"))
    assert {record.host for record in made.usable()} == set(HOSTS)


def test_nobody_can_have_a_slot_only_if_all_that_were_here_said_so() -> None:
    it = registry("a", "b")
    it.unfit.update({"a": "no room"})
    assert it.why_nobody() == ""  # b may be well
    it.lose("b")
    assert it.why_nobody() == ""  # and may come back
    it.connect(record_of("b"))
    it.unfit.update({"b": "no port"})
    it.lose("b")
    assert it.why_nobody() == "a: no room; b: no port"
