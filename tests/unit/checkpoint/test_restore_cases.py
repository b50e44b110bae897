"""The seeds' cases by name: each is one lookup by slice, never by rank."""

import pytest

from dtft.checkpoint.replication.restore_plan import Lost, plan_restore
from tests.support.restores import held_at, hosts, layout_of, restore, routes_of

FSDP = (("fsdp",),)
HYBRID = {"w": FSDP, "b": ()}


def test_related_peer_is_the_same_position_in_another_replica_group() -> None:
    layout = layout_of({"replica": 2, "fsdp": 4}, {"w": FSDP})
    old = hosts(8)
    for dead in range(8):
        slots = [*old[:dead], "spare", *old[dead + 1 :]]
        plan = restore(layout, old, layout, slots, dead=[old[dead]])
        assert routes_of(plan) == {(old[(dead + 4) % 8], "spare")}
        assert all(r.whole for t in plan.transfers for r in t.regions)


def test_with_three_groups_both_related_peers_send_half() -> None:
    layout = layout_of({"replica": 3, "fsdp": 2}, {"w": FSDP}, shape=(1024, 256))
    slots = ["spare", *hosts(5, 1)]
    plan = restore(layout, hosts(6), layout, slots, dead=["h00"])
    assert plan.sent == {"h02": 256 * 1024, "h04": 256 * 1024}


def test_same_stage() -> None:
    layout = layout_of({"replica": 2, "stage": 3}, {"layers": (("stage",),)})
    slots = [*hosts(4), "spare", "h05"]
    plan = restore(layout, hosts(6), layout, slots, dead=["h04"])
    assert routes_of(plan) == {("h01", "spare")}


def test_node_i_of_a_new_replica_group_copies_from_node_i_of_an_old_one() -> None:
    old = layout_of({"replica": 2, "fsdp": 3}, {"w": FSDP}, shape=(768, 768))
    new = layout_of({"replica": 3, "fsdp": 3}, {"w": FSDP}, shape=(768, 768))
    plan = restore(old, hosts(6), new, hosts(9))
    assert routes_of(plan) == {
        (f"h{group * 3 + i:02}", f"h{6 + i:02}") for group in (0, 1) for i in range(3)
    }
    assert set(plan.sent.values()) == {768 * 768 * 4 // 6}


def test_zero_1_state_over_the_replica_axis() -> None:
    specs = {"w": (), "opt/mu": (("replica",),)}
    old = layout_of({"replica": 4}, specs)
    slots = ["h00", "spare", "h02", "h03"]
    plan = restore(old, hosts(4), old, slots, copies=2, dead=["h01"])
    moment = [
        (t.source, region)
        for t in plan.transfers
        for region in t.regions
        if region.moved.path == "opt/mu"
    ]
    # Groups of two: host 0 keeps the copy of host 1.
    assert [source for source, _ in moment] == ["h00"]
    assert moment[0][1].moved.start == (6, 0) and moment[0][1].whole


def test_zero_1_onto_another_number_of_replicas() -> None:
    specs = {"w": (), "opt/mu": (("replica",),)}
    old, new = layout_of({"replica": 4}, specs), layout_of({"replica": 3}, specs)
    plan = restore(old, hosts(4), new, hosts(3), copies=2, dead=["h03"])
    assert all(r.moved.path == "opt/mu" for t in plan.transfers for r in t.regions)


def test_fsdp() -> None:
    layout = layout_of({"fsdp": 4}, HYBRID)
    slots = [*hosts(3), "spare"]
    plan = restore(layout, hosts(4), layout, slots, copies=2, dead=["h03"])
    pieces = {(t.source, r.moved.key) for t in plan.transfers for r in t.regions}
    assert ("h02", "w[18:24,0:12]:float32") in pieces
    assert len(pieces) == 2


def test_hybrid_sharding() -> None:
    layout = layout_of({"replica": 2, "fsdp": 2}, HYBRID)
    slots = ["h00", "h01", "spare", "h03"]
    plan = restore(layout, hosts(4), layout, slots, dead=["h02"])
    pieces = {r.moved.key: t.source for t in plan.transfers for r in t.regions}
    assert pieces["w[0:12,0:12]:float32"] == "h00"
    assert pieces["b[0:24,0:12]:float32"] in {"h01", "h03"}


def test_tensor_axis() -> None:
    layout = layout_of({"replica": 2, "tensor": 4}, {"w": ((), ("tensor",))})
    slots = [*hosts(6), "spare", "h07"]
    plan = restore(layout, hosts(8), layout, slots, dead=["h06"])
    assert routes_of(plan) == {("h02", "spare")}
    assert plan.transfers[0].regions[0].moved.key == "w[0:24,6:9]:float32"


def test_expert_axis() -> None:
    specs = {"experts": (("expert",),), "router": ()}
    layout = layout_of({"replica": 2, "expert": 4}, specs)
    slots = ["h00", "spare", *hosts(6, 2)]
    plan = restore(layout, hosts(8), layout, slots, dead=["h01"])
    expert = [
        t.source for t in plan.transfers for r in t.regions if r.moved.path == "experts"
    ]
    assert expert == ["h05"]


def test_device_order_changed_and_hosts_stay_where_their_slices_are() -> None:
    order = [3, 1, 0, 2]
    old = layout_of({"fsdp": 4}, {"w": FSDP})
    new = layout_of({"fsdp": 4}, {"w": FSDP}, order=order)
    seats = dict(zip(order, hosts(4), strict=True))
    still = restore(old, hosts(4), new, [seats[slot] for slot in range(4)])
    assert still.transfers == ()
    moved = restore(old, hosts(4), new, hosts(4))
    assert routes_of(moved) == {("h00", "h03"), ("h02", "h00"), ("h03", "h02")}
    assert all(r.whole for t in moved.transfers for r in t.regions)


def test_mesh_changed_fsdp_4_to_2_replica_2_to_3() -> None:
    old = layout_of({"replica": 2, "fsdp": 4}, HYBRID)
    new = layout_of({"replica": 3, "fsdp": 2}, HYBRID)
    plan = restore(old, hosts(8), new, hosts(6))
    # Host 0 has the first quarter of its new half, and needs the second.
    got = {
        (r.moved.key, r.new.key) for t in plan.transfers_to("h00") for r in t.regions
    }
    assert got == {("w[6:12,0:12]:float32", "w[0:12,0:12]:float32")}


def test_axes_changed_from_rows_to_columns() -> None:
    old = layout_of({"fsdp": 4}, {"w": FSDP})
    new = layout_of({"tensor": 3}, {"w": ((), ("tensor",))})
    plan = restore(old, hosts(4), new, hosts(3))
    assert {t.nbytes for t in plan.transfers} == {6 * 4 * 4}
    assert len(plan.transfers) == 9


@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_host_count_changed(per_host: int) -> None:
    old = layout_of({"fsdp": 8}, HYBRID)
    new = layout_of({"fsdp": 8}, HYBRID, per_host=per_host)
    fewer = hosts(8 // per_host)
    plan = restore(old, hosts(8), new, fewer)
    assert all(r.whole for t in plan.transfers for r in t.regions)
    back = restore(new, fewer, old, hosts(8))
    assert all(r.whole for t in back.transfers for r in t.regions)


def test_nothing_moves_when_nothing_changed() -> None:
    layout = layout_of({"replica": 2, "fsdp": 2}, HYBRID)
    plan = restore(layout, hosts(4), layout, hosts(4))
    assert plan.transfers == () and plan.sent == {}
    assert [r.moved.path for r in plan.own("h03")] == ["b", "w"]


def test_near_racks_send_what_they_can() -> None:
    layout = layout_of({"replica": 4}, {"w": ()}, shape=(1024, 1024))
    new = layout_of({"replica": 6}, {"w": ()}, shape=(1024, 1024))
    racks = {"h00": "a", "h01": "a", "h02": "b", "h03": "b", "h04": "a", "h05": "b"}
    domains = {host: f"power/{rack}" for host, rack in racks.items()}
    plan = restore(layout, hosts(4), new, hosts(6), domains=domains)
    assert all(racks[source] == racks[target] for source, target in routes_of(plan))
    assert len(routes_of(plan)) == 4
    assert max(plan.sent.values()) <= 1.2 * sum(plan.sent.values()) / 4


def test_a_lone_target_leans_to_its_rack_within_the_bound() -> None:
    layout = layout_of({"replica": 2}, {"w": ()}, shape=(1024, 1024))
    slots = ["spare", "h01", "h02"]
    three = layout_of({"replica": 3}, {"w": ()}, shape=(1024, 1024))
    domains = {"h01": "a", "h02": "b", "spare": "b", "h00": "a"}
    plan = restore(three, hosts(3), three, slots, dead=["h00"], domains=domains)
    assert layout.mesh.num_slots == 2
    even = 1024 * 1024 * 4 / 2
    assert even < plan.sent["h02"] <= 1.2 * even


def test_what_is_lost_is_named() -> None:
    layout = layout_of({"fsdp": 4}, HYBRID)
    holdings = held_at(layout, hosts(4), copies=2)
    plan = plan_restore(
        holdings, layout, slots=["h00", "h01", "x", "y"], alive=["h00", "h01"]
    )
    assert isinstance(plan, Lost)
    assert (plan.num_slices, plan.nbytes) == (2, 2 * 6 * 12 * 4)
    assert "w[12:18,0:12]:float32, w[18:24,0:12]:float32" in plan.reason


def test_wrong_arguments_are_named() -> None:
    layout = layout_of({"fsdp": 2}, HYBRID)
    holdings = held_at(layout, hosts(2))

    def plan(new, slots=("h00", "h01")):
        return plan_restore(holdings, new, slots=slots, alive=hosts(2))

    with pytest.raises(ValueError, match="slots names 1 hosts"):
        plan(layout, slots=["h00"])
    with pytest.raises(ValueError, match="slots names 2 hosts, 1 of them distinct"):
        plan(layout, slots=["h00", "h00"])
    with pytest.raises(ValueError, match="leaf 'x', which was not committed"):
        plan(layout_of({"fsdp": 2}, {"x": ()}))
    with pytest.raises(ValueError, match=r"float32\[2, 2\] in new_layout"):
        plan(layout_of({"fsdp": 2}, HYBRID, shape=(2, 2)))
    with pytest.raises(ValueError, match="dim 0 of size 24 cannot be divided"):
        plan(layout_of({"fsdp": 5}, HYBRID), slots=hosts(5))
    with pytest.raises(ValueError, match="'nobody' is not in this plan"):
        restore(layout, hosts(2), layout, hosts(2)).own("nobody")
