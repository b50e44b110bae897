"""The seeds' cases on the path that a running job takes: `decide`, then `fetches_for`.

The cases of tests/unit/checkpoint/test_restore_cases.py, whose plans it must
agree with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dtft.checkpoint.replication.commit import Commit
from dtft.checkpoint.replication.copy_placement import Spread
from dtft.checkpoint.state.digests import digest_root
from dtft.checkpoint.state.slices import Layout
from dtft.elastic.leader.recovery import RecoveryDecision, decide, fetches_for
from tests.support.restores import hosts, layout_of, restore, routes_of

FSDP = (("fsdp",),)
SEVERAL = {f"w{i}": FSDP for i in range(6)}


def value(key: str) -> bytes:
    return key.encode().ljust(16, b".")[:16]


def recover(
    state: Layout,
    dead: Sequence[str],
    slots: Sequence[str],
    *,
    copies: int = 1,
    domains: Mapping[str, str] | None = None,
) -> RecoveryDecision:
    """What a job decides when hosts have died after step 7."""
    old = hosts(state.mesh.num_slots)
    placement = Spread(copies=copies).place(state)
    held = {
        host: {
            7: {
                piece.key: value(piece.key)
                for piece in (*state.slices(slot), *placement.hosted(slot))
            }
        }
        for slot, host in enumerate(old)
        if host not in dead
    }
    commit = Commit(
        step=7,
        generation=1,
        attempt=1,
        root=digest_root((piece.key, value(piece.key)) for piece in state.owners),
        layout=state.digest,
        holders=tuple(old),
        copies=copies,
    )
    return decide(
        commits=[commit],
        layout=state,
        holdings=held,
        slots=slots,
        storage_steps=[5],
        domains=domains,
    )


def fetched(
    decision: RecoveryDecision, addresses: Mapping[str, str], host: str
) -> list[dict[str, Any]]:
    """The whole slices that a host is told to fetch, by source."""
    assert decision.plan is not None
    told = fetches_for(decision.plan, addresses, host)
    assert told["regions"] == []
    return told["transfers"]


def routes(decision: RecoveryDecision, slots: Sequence[str]) -> set[tuple[str, str]]:
    """(source, target) of every fetch that the hosts are told to make."""
    addresses = {name: f"{name}:1" for name in (*slots, *hosts(12))}
    return {
        (fetch["host"], host)
        for host in slots
        for fetch in fetched(decision, addresses, host)
    }


def replaced(state: Layout, dead: int) -> list[str]:
    slots = hosts(state.mesh.num_slots)
    slots[dead] = "spare"
    return slots


@pytest.mark.parametrize("dead", range(8))
def test_related_peer_is_the_same_position_in_another_replica_group(dead: int) -> None:
    state = layout_of({"replica": 2, "fsdp": 4}, SEVERAL)
    slots = replaced(state, dead)
    decision = recover(state, hosts(8)[dead : dead + 1], slots)
    assert (decision.rung, decision.source, decision.step) == (2, "memory", 7)
    assert routes(decision, slots) == {(hosts(8)[(dead + 4) % 8], "spare")}


@pytest.mark.parametrize("dead", range(6))
def test_same_stage(dead: int) -> None:
    state = layout_of({"replica": 2, "stage": 3}, {"layers": (("stage",),)})
    slots = replaced(state, dead)
    decision = recover(state, hosts(6)[dead : dead + 1], slots)
    assert routes(decision, slots) == {(hosts(6)[(dead + 3) % 6], "spare")}


def test_with_three_groups_both_related_peers_send_half() -> None:
    state = layout_of({"replica": 3, "fsdp": 2}, SEVERAL)
    slots = replaced(state, 0)
    decision = recover(state, ["h00"], slots)
    assert routes(decision, slots) == {("h02", "spare"), ("h04", "spare")}
    addresses = {host: host for host in hosts(6)}
    shares = fetched(decision, addresses, "spare")
    assert [len(fetch["keys"]) for fetch in shares] == [3, 3]


CASES = {
    "replicated": ({"replica": 4}, {f"w{i}": () for i in range(6)}, 2),
    "hybrid": ({"replica": 2, "fsdp": 2}, SEVERAL | {"b": ()}, 2),
    "fsdp": ({"fsdp": 4}, SEVERAL, 2),
    "zero-1": ({"replica": 4}, {"w": (), "opt/mu": (("replica",),)}, 2),
    "expert": ({"replica": 2, "expert": 2}, {"experts": (("expert",),), "r": ()}, 1),
}


@pytest.mark.parametrize("dead", range(4))
@pytest.mark.parametrize("case", CASES)
def test_the_job_fetches_what_plan_restore_plans(case: str, dead: int) -> None:
    axes, specs, copies = CASES[case]
    state = layout_of(axes, specs)
    slots, old = replaced(state, dead), hosts(4)
    decision = recover(state, [old[dead]], slots, copies=copies)
    plan = restore(state, old, state, slots, copies=copies, dead=[old[dead]])
    addresses = {host: host for host in [*old, "spare"]}
    told = {
        host: sorted(
            key for fetch in fetched(decision, addresses, host) for key in fetch["keys"]
        )
        for host in slots
    }
    needed = {
        host: sorted(
            {region.new.key for t in plan.transfers_to(host) for region in t.regions}
        )
        for host in slots
    }
    assert told == needed
    if case == "fsdp":  # one host only can send each slice
        assert routes(decision, slots) == routes_of(plan)


def test_near_hosts_send_first() -> None:
    state = layout_of({"replica": 4}, {f"w{i}": () for i in range(30)})
    slots = replaced(state, 0)
    domains = {"spare": "p1/r1", "h01": "p2/r3", "h02": "p1/r1", "h03": "p1/r2"}
    decision = recover(state, ["h00"], slots, domains=domains)
    addresses = {host: host for host in hosts(4)}
    fetches = fetched(decision, addresses, "spare")
    shares = {fetch["host"]: len(fetch["keys"]) for fetch in fetches}
    assert shares["h02"] == max(shares.values()) > shares["h01"] == min(shares.values())


def test_who_cannot_be_restored_is_named_with_its_failure_domain_placement() -> None:
    state = layout_of({"fsdp": 4}, {"w": FSDP})
    spread = Spread(copies=2, level="rack", domains=("1", "1", "2", "2"))
    placement = spread.place(state)
    pair = placement.holders[state.slices(0)[0]]
    assert len({spread.domains[slot] for slot in pair}) == 2
    lost = [hosts(4)[slot] for slot in pair]
    commit = Commit(
        step=7,
        generation=1,
        attempt=1,
        root="",
        layout=state.digest,
        holders=tuple(hosts(4)),
        copies=2,
    )
    decision = decide(
        commits=[commit],
        layout=state,
        holdings={},
        slots=hosts(4),
        storage_steps=[5],
        placed=spread.domains,
    )
    assert decision.rung == 3
    assert f"were {', '.join(lost)}" in decision.passed_over[0]
