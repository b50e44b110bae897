"""Collectives that XLA sends as one are priced as one."""

import jax.numpy as jnp
import numpy as np
import pytest

from dtft.parallel.planning.planned_step import make_step
from dtft.planner.aot.hlo import collectives
from dtft.planner.cluster.topology import Cluster
from dtft.planner.cost.collectives import collective_s
from dtft.planner.cost.mesh_topology import group_of
from dtft.planner.plan import Plan
from dtft.planner.search.decision import decide
from dtft.planner.search.price_table import Columns, Message, Rates, Total
from dtft.planner.spmd import MICRO, CollectiveOp, ShardedSize
from dtft.planner.spmd.collective_combiner import Bundle
from dtft.planner.workload import of_loss
from tests.support.layer_chain import BATCH, LAYERS, OPTIMIZER, PARAMS, WIDTH, loss


def planned(cluster: str, **pins: int) -> Plan:
    given = {"microbatches": 1, "remat": "none", **pins}
    asked = of_loss(loss, OPTIMIZER, PARAMS, BATCH)
    return decide(asked, Cluster.parse(cluster), given).plan


def test_sums_of_gradients_wait_for_nothing() -> None:
    question = of_loss(loss, OPTIMIZER, PARAMS, BATCH)
    sums = [group for group in question.groups if group.last]
    trips = sorted(group.operator.trips for group in sums)
    # The loss and the head; weights, and biases summed in two steps.
    assert trips == [1, 1, LAYERS, LAYERS, LAYERS]
    waiting = [g for g in question.groups if g.operator.summed and not g.last]
    assert {g.operator.kind for g in waiting} == {"matmul"}  # activations


def test_the_statistics_of_a_batch_are_waited_for() -> None:
    def normalized(params, batch):
        hidden = batch @ params["head"]
        hidden = hidden - jnp.mean(hidden, axis=0, keepdims=True)
        return jnp.mean(jnp.square(hidden @ params["head"]))

    asked = of_loss(normalized, OPTIMIZER, {"head": PARAMS["head"]}, BATCH)
    means = [g for g in asked.groups if g.operator.primitive == "reduce_sum"]
    assert [g.last for g in means if g.region == "forward"] == [False, True]


def test_on_cpu_each_array_is_priced_as_a_message() -> None:
    """XLA writes one all-reduce for many arrays, and then sends each by itself."""
    plan = planned("8xcpu", replica=8)
    step = make_step(loss, OPTIMIZER, plan)
    text = step.lower(PARAMS, BATCH).compile().as_text()
    assert text is not None
    found = collectives(text, plan.mesh)
    assert sum(one.trips for one in found if one.kind == "all_reduce") == LAYERS + 1
    arrays = sum(one.trips * len(one.operands) for one in found)
    assert arrays == sum(one.trips for one in plan.collectives)


@pytest.mark.parametrize("cluster", ["8xcpu", "8xH100"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_list_adds_up_to_what_is_priced(cluster: str, zero: int) -> None:
    """On CPU nothing overlaps; elsewhere what is hidden is less than what is sent."""
    plan = planned(cluster, **({"fsdp": 8, "zero": zero} if zero else {"replica": 8}))
    sent = sum(one.seconds for one in plan.collectives)
    priced = plan.prediction.terms["collectives"]
    assert priced <= sent * (1 + 1e-9)
    overlaps = Cluster.parse(cluster).uniform.device.efficiency.overlap_fraction > 0
    assert overlaps or np.isclose(priced, sent)


def test_latency_counts_once_for_what_is_sent_as_one() -> None:
    """One message in each turn of the backward loop, and one outside of it."""
    sums = [o for o in planned("8xH100", replica=8).collectives if "reduce" in o.kind]
    group = group_of(Cluster.parse("8xH100").uniform, {"replica": 8}, "replica")
    layer, outside = 4 * (WIDTH**2 + WIDTH), 4 * (WIDTH**2 + 1)
    each = [collective_s("all_reduce", size, group) for size in (layer, outside)]
    assert np.isclose(sum(one.seconds for one in sums), LAYERS * each[0] + each[1])
    assert sum(one.trips for one in sums) == 2 * LAYERS + 2


def test_priced_for_many_divisions_at_once_is_as_one_by_one() -> None:
    asked = of_loss(loss, OPTIMIZER, PARAMS, BATCH)
    decision = decide(asked, Cluster.parse("2x8xH100"), {"remat": "none"})
    space = decision.found["none"].priced.space
    rates = Rates(Columns(Cluster.parse("2x8xH100").uniform, space))
    points, cases = np.arange(len(rates.columns)), rates.columns.divided([("fsdp",)])
    bundles = [
        Bundle(kind=kind, axes=axes, times=2, repeated=repeated, place=0)
        for kind in ("all_reduce", "all_gather")
        for axes in (("replica", "fsdp"), ("fsdp",))
        for repeated in (False, True)
    ]
    some = [(bundles[start::2], points[start::3]) for start in range(3)]
    sent = []
    for several, there in some:
        totals = {one: Total() for one in several}
        for size, total in enumerate(totals.values(), 20):
            total.add(cases, 2.0**size / cases.sizes["fsdp"])
        sent.append((totals, there))
    together = rates.together_s(sent)
    assert all(seconds.any() for seconds in together)
    for one, seconds in zip(sent, together, strict=True):
        np.testing.assert_array_equal(rates.together_s([one])[0], seconds)


@pytest.mark.parametrize("order", [1, -1])
def test_what_microbatches_divide_is_repeated_for_each_only_if_asked(
    order: int,
) -> None:
    asked = of_loss(loss, OPTIMIZER, PARAMS, BATCH)
    decision = decide(asked, Cluster.parse("8xH100"), {"remat": "none"})
    space = decision.found["none"].priced.space
    columns = Columns(Cluster.parse("8xH100").uniform, space)
    amount = ShardedSize(total=2.0**20, axes=(MICRO,))
    sent = CollectiveOp(kind="all_reduce", axes=("replica",), amount=amount)
    messages = [Message(sent=sent, repeats=it) for it in ((), ((MICRO,),))]
    together = Rates(columns).sending(messages[::order])[::order]
    once, each = (seconds[cases.of] for cases, seconds in together)
    np.testing.assert_allclose(each, once * columns.sizes[MICRO])
    assert columns.sizes[MICRO].max() > 1 and once.any()
