"""Labels are read or refused with a reason; copies are kept apart where it counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.replication.failure_domains import (
    domains_from_labels,
    parse_domain_file,
    parse_domain_label,
    separate_copies,
)
from tests.support.failure_domains import FILE
from tests.support.restores import hosts, layout_of


def test_file() -> None:
    domains = parse_domain_file(FILE)
    assert domains.levels == ("power", "rack")
    assert domains.names == {"h00": "a/1", "h01": "a/2", "h02": "b/3", "h03": "b/4"}


@pytest.mark.parametrize(
    ("copies", "level", "effective"),
    [(1, "power", 1), (2, "power", 2), (3, "rack", 3), (5, "host", 4)],
)
def test_the_widest_level_with_enough_domains(
    copies: int, level: str, effective: int
) -> None:
    found = separate_copies(parse_domain_file(FILE), hosts(4), copies)
    assert (found.level, found.effective_copies) == (level, effective)
    layout = layout_of({"fsdp": 4}, {"w": (("fsdp",),)})
    assert place_copies(layout, copies, found.domains).effective_copies == effective


def test_three_copies_over_racks_are_on_both_feeds() -> None:
    labels = {h: f"power={'ab'[i % 2]},rack={i}" for i, h in enumerate(hosts(6))}
    found = separate_copies(domains_from_labels(labels), hosts(6), 3)
    assert found.level == "rack"
    placement = place_copies(
        layout_of({"fsdp": 6}, {"w": (("fsdp",),)}), 3, found.domains
    )
    for slots in placement.holders.values():
        assert {slot % 2 for slot in slots} == {0, 1}


def test_without_labels_every_host_is_its_own_domain() -> None:
    nothing = domains_from_labels({})
    assert separate_copies(nothing, hosts(3), 2).domains == ("h00", "h01", "h02")
    assert domains_from_labels({"h00": "", "h01": ""}) == nothing
    assert nothing.of(["x"]) == {"x": "x"}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=9),
    st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_copies_are_never_in_one_domain(
    places: list[tuple[int, int]], copies: int
) -> None:
    labels = {
        host: f"power=p{power},rack=r{power}-{rack}"
        for host, (power, rack) in zip(hosts(len(places)), places, strict=True)
    }
    found = separate_copies(domains_from_labels(labels), list(labels), copies)
    layout = layout_of({"fsdp": len(places)}, {"w": (("fsdp",),)}, shape=(2520, 1))
    placement = place_copies(layout, copies, found.domains)
    assert placement.effective_copies == found.effective_copies
    for slots in placement.holders.values():
        assert len({found.domains[slot] for slot in slots}) == found.effective_copies


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("h0 rack", "cannot read 'rack'"),
        ("h0 row=1", "cannot read 'row=1'. Allowed: each of power, rack at most once"),
        ("h0 rack=1 rack=2", "cannot read 'rack=2'"),
        ("h0 rack=", "cannot read 'rack='"),
        ("h0 rack=a/b", "must not contain '/'"),
        ("h0 rack=1\nh0 rack=1", "line 2: host 'h0' has a line already"),
        ("h0 rack=1\nh1", "'h1' is labelled with nothing, but 'h0' with rack"),
        ("h0 power=a,rack=1\nh1 power=b,rack=1", "rack '1' is in power domain 'a'"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("/", "[/]")):
        parse_domain_file(text)


def test_a_host_and_its_label_may_be_separated_by_tabs() -> None:
    found = parse_domain_file("h0\track=r1\n\n  h1 \t rack=r2 # left")
    assert found.names == {"h0": "r1", "h1": "r2"}


def test_a_host_without_a_label_is_named() -> None:
    with pytest.raises(ValueError, match="no failure domain is known for 'x'"):
        separate_copies(parse_domain_file(FILE), ["h00", "x"], 2)
    assert parse_domain_label("") == {}
