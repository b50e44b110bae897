"""The newest commit of a running job, wanted on other slices: what its leader plans."""

import pytest

from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state.slices import Layout, Leaf
from dtft.elastic.leader.reshard import NotPlanned
from tests.support.reshard_plans import HOSTS, MESH, ROWS, commit, order, saved


def test_a_host_takes_what_it_has_and_fetches_the_rest() -> None:
    plans = saved(3, 4)
    for host in HOSTS:
        found = order(plans, host, 4)
        by_source = {it["host"]: len(it["regions"]) for it in found["regions"]}
        assert by_source[host] == 2  # its own row, and the copy that it keeps
        assert sum(by_source.values()) == 3  # a piece of every row
        rows = {ROWS.slices(slot)[0].key: bytes([4, slot]) * 8 for slot in range(3)}
        assert found["digests"] == rows


def test_only_the_newest_commit_can_be_had() -> None:
    with pytest.raises(NotPlanned, match="in memory is none, not 1"):
        order(saved(), "a", 1)
    with pytest.raises(NotPlanned, match="in memory is step 2, not 1"):
        order(saved(1, 2), "a", 1)
    with pytest.raises(NotPlanned, match="in memory is none, not 1"):
        order(saved(1, slots=2), "a", 1)  # one slot's digests are not known


def test_digests_that_are_not_the_commits_are_not_used() -> None:
    plans = saved(1)
    for slot in range(3):
        plans.staged(slot, 2, [b"?" * 16])
    plans.committed(commit(2, {"w": b"!" * 16}), place_copies(ROWS, 2))
    with pytest.raises(NotPlanned, match="step 2 is not what was committed"):
        order(plans, "a", 2)


def test_what_the_commit_has_not_is_named() -> None:
    other = Layout(mesh=MESH, leaves=(Leaf(path="v", shape=(3,), dtype="uint8"),))
    with pytest.raises(NotPlanned, match="'v'"):
        order(saved(1), "a", 1, other)
