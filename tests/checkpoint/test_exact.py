"""Every needed slice comes exactly once, from a host that has it, evenly shared."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dtft.checkpoint.exact import (
    SLACK,
    ExactPlan,
    Missing,
    plan_exact,
)
from dtft.checkpoint.slices import Slice

HOSTS = ["host-0", "host-1", "host-2", "host-3", "host-4"]


def piece(name: str, size: int = 4) -> Slice:
    return Slice(path=name, start=(0,), stop=(size,), dtype="int8")


PIECES = [piece(f"p{i}", size) for i, size in enumerate([0, 1, 7, 7, 7, 64, 500])]

needs_of_hosts = st.dictionaries(
    st.sampled_from(HOSTS), st.lists(st.sampled_from(PIECES)).map(tuple)
)
holders_of_pieces = st.fixed_dictionaries(
    {
        p.key: st.lists(st.sampled_from(HOSTS), unique=True, max_size=3).map(tuple)
        for p in PIECES
    }
)


@given(needs_of_hosts, holders_of_pieces)
@settings(max_examples=300, deadline=None)
def test_each_needed_slice_exactly_once_from_a_live_holder(
    needs: dict[str, tuple[Slice, ...]], holders: dict[str, tuple[str, ...]]
) -> None:
    plan = plan_exact(needs, holders)
    wanted = {p for pieces in needs.values() for p in pieces}
    lost = {p for p in wanted if not holders[p.key]}
    if lost:
        assert isinstance(plan, Missing)
        assert set(plan.slices) == lost
        assert set(plan.keys) == {p.key for p in lost}
        return
    assert isinstance(plan, ExactPlan)
    got = {host: list(plan.own[host]) for host in needs}
    assert all(host in holders[p.key] for host in needs for p in plan.own[host])
    for transfer in plan.transfers:
        assert transfer.source != transfer.target
        assert all(transfer.source in holders[p.key] for p in transfer.slices)
        assert all(transfer.target not in holders[p.key] for p in transfer.slices)
        got[transfer.target] += transfer.slices
    for host, pieces in needs.items():
        assert len(got[host]) == len(set(got[host]))
        assert set(got[host]) == set(pieces)
    routes = [(t.target, t.source) for t in plan.transfers]
    assert routes == sorted(set(routes))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 4))
def test_load_is_balanced(sizes: list[int], num_holders: int) -> None:
    pieces = tuple(piece(f"p{i}", size) for i, size in enumerate(sizes))
    hosts = tuple(HOSTS[1 : 1 + num_holders])
    plan = plan_exact({HOSTS[0]: pieces}, {p.key: hosts for p in pieces})
    assert isinstance(plan, ExactPlan)
    sent = {t.source: sum(p.nbytes for p in t.slices) for t in plan.transfers}
    assert max(sent.values()) <= sum(sizes) / num_holders + max(sizes)
    assert len(sent) == min(num_holders, len(sizes))
    for transfer in plan.transfers:
        order = [pieces.index(p) for p in transfer.slices]
        assert order == sorted(order)


@given(needs_of_hosts, holders_of_pieces)
@settings(max_examples=50, deadline=None)
def test_order_of_holders_does_not_matter(
    needs: dict[str, tuple[Slice, ...]], holders: dict[str, tuple[str, ...]]
) -> None:
    backwards = {key: hosts[::-1] for key, hosts in reversed(holders.items())}
    assert plan_exact(needs, holders) == plan_exact(needs, backwards)


def test_nothing_moves_when_memory_is_intact() -> None:
    plan = plan_exact({"a": (piece("w"),)}, {piece("w").key: ("a", "b")})
    assert plan == ExactPlan(own={"a": (piece("w"),)}, transfers=())


def test_unknown_slices_are_missing() -> None:
    assert plan_exact({"a": (piece("w"),)}, {}) == Missing(slices=(piece("w"),))


def test_near_hosts_send_first_within_their_share() -> None:
    pieces = tuple(piece(f"p{i}", 10) for i in range(30))
    holders = {one.key: ("a", "b", "c") for one in pieces}
    domains = {"a": "p1/r1", "b": "p1/r2", "c": "p2/r3", "new": "p2/r3"}
    plan = plan_exact({"new": pieces}, holders, domains)
    assert isinstance(plan, ExactPlan)
    sent = {t.source: sum(p.nbytes for p in t.slices) for t in plan.transfers}
    assert sent == {"a": 90, "b": 90, "c": SLACK * 100}
    blind = plan_exact({"new": pieces}, holders)
    assert isinstance(blind, ExactPlan)
    assert {len(t.slices) for t in blind.transfers} == {10}
    lone = plan_exact({"new": pieces[:1]}, holders, domains)
    assert isinstance(lone, ExactPlan)
    assert [t.source for t in lone.transfers] == ["c"]
