"""The roofline of a plan: a bound of its step with communication, and what binds it."""

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dtft
from dtft.planner.cluster import Accuracy, Cluster, CollectiveKind, Curve, Link, Pool
from dtft.planner.cluster.hardware import LinkKind
from dtft.planner.cost import (
    DeviceGroup,
    collective_s,
    links_at_peak_s,
    matmul_s,
)
from dtft.planner.plan import Plan
from dtft.planner.report.html_report import report_html
from dtft.planner.report.text import bound, explain
from dtft.planner.search import Decision, as_plan, decide
from dtft.planner.workload import Workload, of_loss
from tests.support import deciding_zoo
from tests.support.zoo import MODELS

NVLINK, NETWORK = "NVLink between devices", "InfiniBand between hosts"
ABOVE = 1 + 1e-9
"""Rounding errors of sums."""


@cache
def question(name: str) -> Workload:
    if name == "gpt":
        return deciding_zoo.question()
    sizes: dict[str, Any] = {
        "mlp": {"batch": 64, "widths": (64, 256, 16)},
        "gpt_scan": {
            "batch": 16, "time": 128, "width": 128, "layers": 2, "heads": 4,
            "vocabulary": 512,
        },
        "rnn": {"batch": 16, "time": 4, "width": 64, "vocabulary": 64},
    }  # fmt: skip
    model = MODELS[name](**sizes[name])
    return of_loss(model.loss, model.optimizer, model.params, model.batch)


@cache
def decision(name: str, cluster: str, what_if: bool = False) -> Decision:
    return decide(question(name), Cluster.parse(cluster), what_if=what_if)


def check(plan: Plan) -> None:
    """No resource is busy for longer than the step, the busiest for the bound."""
    assert {"compute", "memory bandwidth"} <= plan.roofline.keys()
    assert 0 < plan.roofline_s <= plan.prediction.step_s * ABOVE
    assert plan.roofline[plan.bound_by] == plan.roofline_s
    assert plan.bound_s <= plan.roofline_s * ABOVE


CLUSTERS = ["h100", "2x4xH100", "8xA100", "4x8xT4", "2x2x4xv5e", "8xcpu", "3x1xcpu"]


@pytest.mark.parametrize(
    "name", ["mlp", "gpt", pytest.param("gpt_scan", marks=pytest.mark.more), "rnn"]
)
@given(data=st.data(), cluster=st.sampled_from(CLUSTERS))
def test_no_plan_is_predicted_below_its_roofline(
    name: str, cluster: str, data: st.DataObject
) -> None:
    """Any candidate of the search, good or bad, is written as a plan."""
    made = decision(name, cluster)
    remat = data.draw(st.sampled_from(sorted(made.found)))
    one = made.found[remat]
    at = data.draw(st.integers(0, len(one.priced.space) - 1))
    check(as_plan(one.search, one.priced, at, made.cluster))


@given(data=st.data())
def test_stages_and_state_on_the_host_are_not_below_it(data: st.DataObject) -> None:
    made = decision("gpt_scan", "2x4xH100", what_if=True)
    priced = made.found["none"].priced
    at = data.draw(st.integers(0, len(priced.space) - 1))
    check(as_plan(made.found["none"].search, priced, at, made.cluster))


@pytest.mark.parametrize(
    ("pins", "resource"),
    [
        ({"stage": 2, "replica": 4}, NETWORK),
        ({"offload": True, "fsdp": 8}, "PCIe to host memory"),
    ],
)
def test_sends_between_stages_and_copies_to_the_host_count(
    pins: dict[str, Any], resource: str
) -> None:
    plan = decide(
        question("gpt_scan"), Cluster.parse("2x4xH100"), pins, what_if=True
    ).plan
    check(plan)
    assert plan.roofline[resource] > 0


def test_past_runs_that_were_faster_lower_the_roofline() -> None:
    pool = Cluster.parse("8xA100").uniform
    scales = {"compute": 0.1, "collectives": 0.2, "optimizer": 0.3}
    learnt = Accuracy(scales=scales)
    plans = [
        decide(question("mlp"), Cluster(pools=(one,)), {"replica": 8}).plan
        for one in (pool, replace(pool, accuracy=learnt))
    ]
    for plan in plans:
        check(replace(plan, bound_s=0.0))
    compute = [plan.roofline["compute"] for plan in plans]
    assert compute[1] == pytest.approx(0.1 * compute[0])


# What is counted.


def large(cluster: Cluster, **pins: Any) -> Plan:
    """A plan of two wide layers; three products of forward and backward pass each."""
    params = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2
    rows = jax.ShapeDtypeStruct((2**18, 4096), jnp.bfloat16)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ params[0]) @ params[1])

    asked = of_loss(loss, optax.sgd(1e-3), params, rows)
    return decide(asked, cluster, pins).plan


def with_links(pool: Pool, **factors: float) -> Cluster:
    """A cluster whose links between `devices` or `hosts` have so much bandwidth."""
    levels = [
        replace(
            level,
            link=replace(
                level.link,
                measured={},
                curve=replace(
                    level.link.curve,
                    bandwidth=level.link.curve.bandwidth * factors[level.name],
                ),
            ),
        )
        if level.name in factors
        else level
        for level in pool.levels
    ]
    return Cluster(pools=(replace(pool, levels=tuple(levels)),), name="changed")


def test_on_one_device_with_fast_memory_it_is_the_bound_of_compute() -> None:
    pool = Cluster.parse("h100").uniform
    fast = replace(pool, device=replace(pool.device, memory_bandwidth=math.inf))
    plan = large(Cluster(pools=(fast,), name="fast"))
    assert plan.roofline == {"compute": plan.bound_s, "memory bandwidth": 0.0}
    assert plan.roofline_s == plan.at_peak_s and plan.bound_by == "compute"


def test_memory_has_what_kernels_read_and_write() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w).astype(jnp.float32))

    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    row = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
    asked = of_loss(loss, optax.sgd(1e-3), weight, row)
    cluster = Cluster.parse("h100")
    plan = decide(asked, cluster).plan
    busy_s = plan.roofline["memory bandwidth"]
    num_bytes = busy_s * cluster.uniform.device.memory_bandwidth
    # Forward reads weights, backward writes gradients, the update reads both and
    # writes weights.
    assert num_bytes == pytest.approx(5 * 4 * 4096**2, rel=0.01)
    assert plan.bound_by == "memory bandwidth"


def test_links_have_the_bytes_of_the_collectives() -> None:
    pool = Cluster.parse("2x4xH100").uniform
    plan = large(with_links(pool, devices=1.0, hosts=1.0), replica=8)
    kinds = {one.kind for one in plan.collectives if one.num_bytes > 100}
    assert kinds == {"all_reduce"}
    num_bytes = sum(one.num_bytes * one.trips for one in plan.collectives)
    inner, outer = (level.link for level in pool.levels)
    assert plan.roofline[NVLINK] == pytest.approx(
        2 * 3 / 4 * num_bytes / inner.curve.bandwidth
    )
    port = outer.curve.bandwidth / outer.shared_by
    assert plan.roofline[NETWORK] == pytest.approx(2 * 1 / 2 * num_bytes / 4 / port)


@pytest.mark.parametrize(
    ("factors", "resource"),
    [
        ({}, "compute"),
        ({"hosts": 1e-2}, NETWORK),
        ({"devices": 1e-3}, NVLINK),
    ],
)
def test_a_slow_link_binds(factors: dict[str, float], resource: str) -> None:
    pool = Cluster.parse("2x4xH100").uniform
    plans = [
        large(with_links(pool, **{"devices": 1.0, "hosts": 1.0} | some), replica=8)
        for some in ({}, factors)
    ]
    for plan in plans:
        check(plan)
    assert [plan.bound_by for plan in plans] == ["compute", resource]
    for name, factor in (
        (NVLINK, factors.get("devices", 1.0)), (NETWORK, factors.get("hosts", 1.0))
    ):  # fmt: skip
        usual, changed = (plan.roofline[name] for plan in plans)
        assert changed == pytest.approx(usual / factor)


def test_what_is_computed_again_is_work_of_the_plan_and_not_of_the_bound() -> None:
    once, again = (
        decide(
            question("gpt_scan"), Cluster.parse("8xA100"), {"remat": remat, "fsdp": 8}
        ).plan
        for remat in ("none", "full")
    )
    assert again.bound_s == pytest.approx(once.bound_s)
    assert again.roofline["compute"] > 1.2 * once.roofline["compute"]


# Links alone.


@given(
    kind=st.sampled_from(get_args(CollectiveKind)),
    sizes=st.lists(st.sampled_from([2.0, 3.0, 4.0, 8.0]), min_size=1, max_size=3),
    data=st.data(),
    num_bytes=st.floats(1.0, 1e12),
)
def test_no_algorithm_is_faster_than_a_link_at_its_peak(
    kind: CollectiveKind, sizes: list[float], data: st.DataObject, num_bytes: float
) -> None:
    """Whichever level is the slow one."""
    link_kind: LinkKind = data.draw(st.sampled_from(["NVLink", "ICI"]))
    links = tuple(
        Link(
            kind=link_kind,
            curve=Curve(
                latency_s=data.draw(st.floats(0, 1e-3)),
                bandwidth=data.draw(st.floats(1e6, 1e12)),
                half_bytes=data.draw(st.floats(0, 1e6)),
            ),
            shared_by=data.draw(st.integers(1, 8)),
            source="",
        )
        for _ in sizes
    )
    group = DeviceGroup(sizes=tuple(sizes), links=links)
    busy_s = links_at_peak_s(kind, num_bytes, group)
    assert len(busy_s) == len(sizes) and min(busy_s) > 0
    assert max(busy_s) <= collective_s(kind, num_bytes, group) * ABOVE


def test_a_gather_waits_for_a_slow_level_inside() -> None:
    """Else an all-reduce is predicted faster than a device's own port."""
    slow, fast = (
        Link(kind="PCIe", curve=Curve(latency_s=0, bandwidth=at), source="")
        for at in (1e6, 1e12)
    )
    group = DeviceGroup(sizes=(4.0, 2.0), links=(slow, fast))
    assert collective_s("all_reduce", 1e6, group, "gather") == 2 * 4
    (inside, _) = links_at_peak_s("all_reduce", 1e6, group)
    assert inside == 1.5 <= collective_s("all_reduce", 1e6, group)


# What users read.


def test_explain_and_the_page_have_it() -> None:
    plan = decision("gpt", "2x4xH100").plan
    section = bound(plan)
    assert [row[0] for row in section.rows] == sorted(
        plan.roofline, key=lambda name: -plan.roofline[name]
    )
    assert f"bound by {plan.bound_by}; the predicted step is" in section.notes[0]
    for text in (explain(plan), report_html(plan)):
        assert f"bound by {plan.bound_by};" in text


def test_a_plan_of_an_older_file_has_none() -> None:
    plan = decision("gpt", "2x4xH100").plan
    assert Plan.from_json(plan.to_json()) == plan
    fields = json.loads(plan.to_json())
    del fields["roofline"]
    old = Plan.from_json(json.dumps(fields))
    assert (old.roofline_s, old.bound_by) == (0.0, "")
    assert not bound(old).rows and len(bound(old).notes) == 1
    assert bound(replace(old, bound_s=0.0)).notes == ("none is known",)


@pytest.mark.parametrize("cluster", ["1xh100", "8xh100", "8xcpu"])
def test_a_loss_across_examples_has_a_roofline(cluster: str) -> None:
    """Its collectives gather the batch, also over microbatches."""

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = (batch["x"] @ params["a"]) @ (batch["x"] @ params["b"]).T
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))

    side = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    plan = dtft.plan(
        loss=loss,
        optimizer=optax.adam(1e-3),
        params={"a": side, "b": side},
        batch={"x": jax.ShapeDtypeStruct((1024, 512), jnp.float32)},
        cluster=cluster,
        microbatches=2,
    )
    assert 0 < plan.roofline_s <= plan.prediction.step_s


@pytest.mark.parametrize("cluster", ["1xh100", "8xh100", "2xcpu"])
def test_matmuls_of_complex_numbers_take_four_products_of_reals(cluster: str) -> None:
    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        made = batch @ jax.lax.complex(params["real"], params["imag"])
        return jnp.mean(made.real**2 + made.imag**2)

    side = 4096
    weight = jax.ShapeDtypeStruct((side, side), jnp.float32)
    batch = jax.ShapeDtypeStruct((side, side), jnp.complex64)
    params, optimizer = {"real": weight, "imag": weight}, optax.sgd(0.1)
    plan = decide(of_loss(loss, optimizer, params, batch), Cluster.parse(cluster)).plan
    check(plan)
    device = Cluster.parse(cluster).uniform.device
    once, reals = (
        matmul_s(device, side, side, side, dtype=dtype, precision="highest")
        for dtype in ("complex64", "float32")
    )
    assert once == pytest.approx(4 * reals)
