"""What meeting for a collective takes, and what computing hides of a gather: fitted,
read, counted where it belongs."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.planner.cluster.catalog import link
from dtft.planner.cluster.hardware import Curve, Efficiency, Link
from dtft.planner.cluster.topology import Cluster
from dtft.planner.cost.calibration import Calibration, link_key
from dtft.planner.cost.collectives import (
    collective_s,
    hidden,
    hiddens,
    sync_skew_s,
    sync_skews_s,
)
from dtft.planner.cost.fitting import (
    PrefetchTime,
    SyncSkewTime,
    fit_prefetch_overlap,
    fit_sync_skew,
)
from dtft.planner.cost.mesh_topology import DeviceGroup, DeviceGroups
from dtft.planner.plan import Plan
from dtft.planner.search.decision import decide
from dtft.planner.workload import of_loss
from tests.support.layer_chain import BATCH, LAYERS, PARAMS, loss

PORT = Link(
    kind="loopback",
    curve=Curve(latency_s=1e-4, bandwidth=1e9, half_bytes=1e4),
    source="",
)


def cluster_with(
    meeting: dict[int, float], ahead: dict[int, float] | None = None
) -> Cluster:
    cluster = Cluster.parse("8xcpu")
    pool = cluster.uniform
    levels = tuple(
        replace(level, link=replace(level.link, meeting=meeting, ahead=ahead or {}))
        for level in pool.levels
    )
    return replace(cluster, pools=(replace(pool, levels=levels),))


def planned(meeting: dict[int, float], **pins: int) -> Plan:
    asked = of_loss(loss, optax.sgd(1e-3), PARAMS, BATCH)
    known = {"microbatches": 1, "remat": "none", **pins}
    return decide(asked, cluster_with(meeting), known).plan


@given(
    extra=st.dictionaries(st.sampled_from([2, 4, 8]), st.floats(0, 0.1), min_size=1),
    sizes=st.lists(st.integers(1, 2**24), min_size=1, max_size=4),
)
def test_the_fit_gives_back_what_was_added(
    extra: dict[int, float], sizes: list[int]
) -> None:
    times = [
        SyncSkewTime(
            num_bytes=size,
            num_devices=n,
            seconds=more
            + collective_s("all_reduce", size, DeviceGroup(sizes=(n,), links=(PORT,))),
        )
        for n, more in extra.items()
        for size in sizes
    ]
    assert fit_sync_skew(PORT, times).meeting == pytest.approx(extra, abs=1e-9)


def test_computing_that_hides_a_collective_is_no_gain() -> None:
    """Nor does one odd time count; nothing measured leaves the link as it is."""
    group = DeviceGroup(sizes=(2,), links=(PORT,))
    alone = collective_s("all_reduce", 4, group)
    off = [-0.5, 0.002, 0.5]
    times = [SyncSkewTime(num_bytes=4, num_devices=2, seconds=alone + x) for x in off]
    assert fit_sync_skew(PORT, times).meeting == pytest.approx({2: 0.002})
    assert fit_sync_skew(PORT, times[:1]).meeting == {2: 0.0}
    assert fit_sync_skew(PORT, []) == PORT


def test_of_several_levels_the_slowest_counts() -> None:
    near, far = (replace(PORT, meeting={2: s, 4: 2 * s}) for s in (1.0, 5.0))
    groups = DeviceGroups(
        sizes=np.array([[1.0, 1.0], [2.0, 1.0], [4.0, 2.0]]), links=(near, far)
    )
    assert sync_skews_s(groups).tolist() == [0.0, 1.0, 5.0]
    assert sync_skew_s(DeviceGroup(sizes=(4.0, 2.0), links=(near, far))) == 5.0
    assert sync_skew_s(DeviceGroup(sizes=(), links=())) == 0.0
    with pytest.raises(ValueError, match=r"meeting=\{2: -1.0\} of a loopback link"):
        replace(PORT, meeting={2: -1.0})


def test_a_file_keeps_it_and_older_files_have_none() -> None:
    port = replace(link("tcp-loopback"), meeting={2: 1e-3, 4: 2e-3})
    made = Calibration(
        device="cpu", fabric=(link_key(port),), num_devices=4, software="jax",
        peak_flops={"float32": 1e9}, memory_bandwidth=1e9, efficiency=Efficiency(),
        links={link_key(port): port},
    )  # fmt: skip
    assert Calibration.from_json(made.to_json()) == made
    items = json.loads(made.to_json())
    for item in items["links"].values():
        del item["meeting"]
    read = Calibration.from_json(json.dumps(items))
    assert read.links[link_key(port)] == replace(port, meeting={})


def test_what_goes_together_meets_once() -> None:
    """Gradients of a layer in each turn of the loop, and the rest behind it."""
    plans = [planned(meeting, replica=8) for meeting in ({}, {8: 1.0})]
    before, after = (plan.prediction.terms["collectives"] for plan in plans)
    assert after - before == pytest.approx(LAYERS + 1)


@given(share=st.floats(0, 1), computing=st.floats(1e-4, 1), gathers=st.floats(1e-4, 1))
def test_the_fit_gives_back_what_was_hidden(
    share: float, computing: float, gathers: float
) -> None:
    time = PrefetchTime(
        num_devices=4,
        computing_s=computing,
        gathers_s=gathers,
        together_s=computing + (1 - share) * gathers,
    )
    assert fit_prefetch_overlap(PORT, [time]).ahead == pytest.approx(
        {4: share}, abs=1e-9
    )


def test_nothing_measured_hides_nothing_and_no_more_than_all_is_hidden() -> None:
    times = [
        PrefetchTime(num_devices=n, computing_s=1.0, gathers_s=1.0, together_s=both)
        for n, both in ((2, 0.5), (8, 2.5))
    ]
    assert fit_prefetch_overlap(PORT, times).ahead == {2: 1.0, 8: 0.0}
    assert fit_prefetch_overlap(PORT, []) == PORT


def test_of_several_levels_the_one_that_hides_least_counts() -> None:
    near, far = (replace(PORT, ahead={2: s, 4: s / 2}) for s in (1.0, 0.5))
    groups = DeviceGroups(
        sizes=np.array([[1.0, 1.0], [2.0, 1.0], [4.0, 2.0]]), links=(near, far)
    )
    assert hiddens(groups).tolist() == [0.0, 1.0, 0.5]
    assert hidden(DeviceGroup(sizes=(4.0, 2.0), links=(near, far))) == 0.5
    assert hidden(DeviceGroup(sizes=(), links=())) == 0.0


def wide(params, batch):
    for up, down in params:
        batch = jnp.tanh(batch @ up) @ down
    return jnp.mean(jnp.square(batch))


PAIR = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 4096), (4096, 64)))


@pytest.mark.parametrize(("zero", "left"), [(1, 1.0), (2, 1.0), (3, 0.25)])
def test_only_parameters_gathered_before_they_are_used_are_hidden(
    zero: int, left: float
) -> None:
    """At ZeRO 1 and 2 gathers wait for the update: those are as long as they were, and
    devices meet for them once."""
    known = {"fsdp": 8, "zero": zero, "microbatches": 1, "remat": "none"}
    asked = of_loss(wide, optax.sgd(1e-3), [PAIR] * 3, BATCH)
    gathers, terms = [], []
    for meeting, ahead in (({}, {}), ({}, {8: 0.75}), ({8: 1.0}, {8: 0.75})):
        plan = decide(asked, cluster_with(meeting, ahead), known).plan
        listed = [one for one in plan.collectives if one.kind == "all_gather"]
        gathers.append(sum(one.seconds for one in listed))
        terms.append(plan.prediction.terms["collectives"])
        assert sum(one.seconds for one in plan.collectives) == pytest.approx(terms[-1])
    assert gathers[1] == pytest.approx(left * gathers[0])
    assert terms[0] - terms[1] == pytest.approx(gathers[0] - gathers[1])
    assert gathers[2] - gathers[1] == pytest.approx(float(zero != 3))


def test_gathers_inside_a_loop_wait_for_the_layer_before() -> None:
    """So they meet; what is outside of the loop does not."""
    known = {"fsdp": 8, "zero": 3, "microbatches": 1, "remat": "none"}
    asked = of_loss(loss, optax.sgd(1e-3), PARAMS, BATCH)
    plans = [
        decide(asked, cluster_with(meeting), known).plan for meeting in ({}, {8: 1.0})
    ]
    seconds = [
        {one.where: one.seconds for one in plan.collectives if one.kind == "all_gather"}
        for plan in plans
    ]
    more = {where: seconds[1][where] - seconds[0][where] for where in seconds[0]}
    assert more["params/head"] == pytest.approx(0.0)
    assert more["params/layers/w"] > LAYERS / 2


def test_each_sum_of_activations_meets() -> None:
    asked = of_loss(wide, optax.sgd(1e-3), [PAIR] * 3, BATCH)
    known = {"tensor": 8, "microbatches": 1, "remat": "none"}
    plans = [
        decide(asked, cluster_with(meeting), known).plan for meeting in ({}, {8: 1e-6})
    ]
    sums = sum(one.trips for one in plans[0].collectives if one.kind == "all_reduce")
    assert sums == 3 + 2  # forward, and backward without the batch's own gradient
    before, after = (plan.prediction.terms["collectives"] for plan in plans)
    assert after - before == pytest.approx(1e-6 * sums)


@pytest.mark.parametrize(
    "pins", [{"replica": 8}, {"tensor": 8}, {"fsdp": 8, "zero": 3}]
)
def test_the_list_adds_up_to_what_is_priced(pins: dict[str, int]) -> None:
    plan = planned({2: 0.1, 8: 0.3}, **pins)
    sent = sum(one.seconds for one in plan.collectives)
    assert sent == pytest.approx(plan.prediction.terms["collectives"])
