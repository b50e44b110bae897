"""Prices of candidates: what is sent, what fits, and in which order they are ranked."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.planner.cluster.topology import Cluster
from dtft.planner.report.lints import batch_text, batches, find_lints
from dtft.planner.report.replan import why_not
from dtft.planner.search.decision import decide
from dtft.planner.search.enumerate import enumerate_space
from dtft.planner.search.ranking import IDLE, MEMORY, TERMS
from dtft.planner.search.search import PlanSearch
from dtft.planner.search.space import Choices
from dtft.planner.workload import Workload, of_loss, of_step
from tests.support.zoo_parts import ADAM

F32 = jnp.float32
PARAMS = {
    "up": jax.ShapeDtypeStruct((64, 256), F32),
    "down": jax.ShapeDtypeStruct((256, 64), F32),
}
BATCH = {"x": jax.ShapeDtypeStruct((64, 64), F32)}


def loss(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["up"]) @ params["down"]))


@pytest.fixture
def question() -> Workload:
    return of_loss(loss, ADAM, PARAMS, BATCH)


def test_every_candidate_costs_alone_what_it_costs_among_all(question) -> None:
    pool = Cluster.parse("8xH100").uniform
    divides = {"replica": (), "fsdp": (), "tensor": ()}
    space = enumerate_space(
        Choices(
            num_devices=8, batch=64, divides=divides, levels=(8,), zero=(0, 1, 2, 3)
        )
    )
    priced = PlanSearch(question, pool, scatters=True).price(space)
    assert len(space) > 10
    for at in range(0, len(space), 3):
        alone = PlanSearch(question, pool, scatters=True).price(
            space.where(np.array([at]))
        )
        for name in TERMS:
            assert alone.terms[name][0] == pytest.approx(priced.terms[name][at])
        for name in MEMORY:
            assert alone.memory[name][0] == pytest.approx(priced.memory[name][at])


def test_the_plan_is_the_fastest_that_fits_and_no_baseline_is_faster(question) -> None:
    decision = decide(question, Cluster.parse("8xH100"))
    found = decision.found["none"].priced
    fastest = found.worth_s[found.fits].min()
    assert decision.plan.prediction.step_s == pytest.approx(float(fastest))
    named = [one for one in decision.plan.alternatives if one.name]
    assert {"data parallel", "fsdp"} <= {one.name for one in named}
    assert all(one.step_s >= decision.plan.prediction.step_s for one in named)
    assert decision.plan.prediction.step_s >= decision.plan.bound_s


@pytest.fixture(scope="module")
def small() -> Workload:
    """So small that starts and messages are all: idle devices send nothing."""
    params = {"w": jax.ShapeDtypeStruct((6, 3), F32)}
    batch = {"x": jax.ShapeDtypeStruct((8, 6), F32)}
    return of_loss(lambda p, b: jnp.sum(b["x"] @ p["w"]), ADAM, params, batch)


def test_an_axis_that_divides_nothing_loses_if_it_is_not_far_faster(
    small: Workload,
) -> None:
    decision = decide(small, Cluster.parse("8xH100"))
    found = decision.found["none"].priced
    step_s = decision.plan.prediction.step_s
    assert step_s / IDLE < found.step_s[found.idle].min() < step_s
    assert not found.idle[decision.at]
    ranked = found.worth_s[found.ranking][: found.fits.sum()]
    assert (ranked[1:] >= ranked[:-1] * (1 - 1e-8)).all()
    assert "one device alone takes" in " ".join(map(str, find_lints(decision)))
    text = why_not(decision, tensor=8)
    assert "repeat the work of others" in text


def test_an_axis_that_divides_nothing_wins_where_sending_takes_far_longer(
    small: Workload,
) -> None:
    decision = decide(small, Cluster.parse("8xcpu"))
    found = decision.found["none"].priced
    used = found.step_s[found.fits & ~found.idle].min()
    assert decision.plan.prediction.step_s < used / IDLE
    assert found.idle[decision.at]
    assert "do the work of one" in " ".join(map(str, find_lints(decision)))


def test_data_parallel_gradients_are_summed_once(question) -> None:
    plan = decide(question, Cluster.parse("8xcpu"), {"replica": 8}).plan
    sums = [c for c in plan.collectives if c.kind == "all_reduce" and c.num_bytes > 4]
    assert sum(c.num_bytes * c.trips for c in sums) == 2 * 64 * 256 * 4
    assert all(c.axes == ("replica",) for c in plan.collectives)


def test_parameters_that_a_step_leaves_alone_are_not_gathered_after_it() -> None:
    def step(state, batch):
        gradient = jax.grad(lambda up: loss({**state, "up": up}, batch))(state["up"])
        return {"up": state["up"] - 0.1 * gradient, "down": state["down"]}, 0.0

    frozen = of_step(step, PARAMS, BATCH)
    plan = decide(frozen, Cluster.parse("8xcpu"), {"fsdp": 8, "zero": 1}).plan
    gathered = [c.where for c in plan.collectives if c.kind == "all_gather"]
    assert gathered == ["state/up"]


def _attends(params, batch):
    x_BTD = params["up"][None, None, :, 0] * batch["tokens"][..., None]
    scores_BTT = jnp.einsum("btd,bsd->bts", x_BTD, x_BTD) + batch["mask"][None]
    return jnp.mean(scores_BTT @ x_BTD @ params["up"])


def _contrasts(params, batch):
    return jnp.mean(jnp.tanh(batch["x"] @ params["up"]) @ batch["queue"].T)


@pytest.mark.parametrize(
    ("loss", "batch", "expected"),
    [
        (loss, {"a": (10,), "x": (64, 64)}, "x"),
        (loss, {"x": (64, 64), "z": (1024,)}, "x"),
        (loss, {"rng": (2,), "x": (64, 64), "y": (64, 3)}, "xy"),
        (loss, {"row": (1, 64), "x": (64, 64)}, "x"),
        (_attends, {"mask": (32, 32), "tokens": (8, 32)}, ["tokens"]),
        (_attends, {"mask": (32, 32), "tokens": (64, 32)}, ["tokens"]),
        (_contrasts, {"queue": (4096, 256), "x": (64, 64)}, "x"),
    ],
)
def test_examples_are_the_rows_that_most_of_the_work_has(loss, batch, expected) -> None:
    shapes = {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in batch.items()}
    question = of_loss(loss, ADAM, PARAMS, shapes)
    (rows,) = {batch[name][0] for name in expected}
    assert (question.num_examples, question.batch_size) == (rows, rows)
    graph = question.graph
    first = {
        name: graph.values[graph.inputs[f"batch/{name}"]].dims[0] for name in batch
    }
    divided = [name for name, dim in first.items() if dim in question.batch_dims]
    assert divided == [*expected]
    assert "unlike numbers of rows" in question.why_one_microbatch
    assert decide(question, Cluster.parse("8xH100")).plan.examples == rows


def test_a_flattened_array_of_the_batch_has_no_more_examples() -> None:
    def masked(params, batch):
        tokens = (batch["x"] @ params["up"]).mean(-1).reshape(-1)
        return jnp.mean(tokens * batch["weight"])

    shapes = {
        "x": jax.ShapeDtypeStruct((8, 16, 64), F32),
        "weight": jax.ShapeDtypeStruct((128,), F32),
    }
    question = of_loss(masked, ADAM, PARAMS, shapes)
    assert (question.num_examples, question.batch_size) == (8, 8)


def test_a_batch_that_a_reshape_splits_has_its_prices_per_example() -> None:
    def grouped(params, batch):
        return loss(params, {"x": batch["x"].reshape(8, 8, 64)})

    question = of_loss(grouped, ADAM, PARAMS, BATCH)
    text, more_s = batch_text(decide(question, Cluster.parse("3xh100"), {"replica": 3}))
    assert "does not divide the batch of 64: give it 72 rows, 8 of them" in text
    assert more_s > 0
    found = decide(question, Cluster.parse("3xh100"))
    assert [it.batch for it in batches(found)] == [48, 72]
    assert "3 devices do not divide the batch of 64: " in batch_text(found)[0]


def test_examples_that_a_reshape_splits_are_all_counted() -> None:
    def grouped(params, batch):
        return loss(params, {"x": batch["x"].reshape(8, 8, 64)})

    question = of_loss(grouped, ADAM, PARAMS, BATCH)
    assert (question.num_examples, question.batch_size) == (64, 8)


def test_a_batch_of_one_has_one_example() -> None:
    question = of_loss(loss, ADAM, PARAMS, {"x": jax.ShapeDtypeStruct((1, 64), F32)})
    assert question.num_examples == 1
    plan = decide(question, Cluster.parse("8xH100")).plan
    assert plan.examples == 1


def test_arrays_that_a_loss_closes_over_are_whole_on_every_device() -> None:
    num_bytes = 64 * 2**20 * 4
    table = np.zeros((2**20, 64), np.float32)
    unread = np.zeros((2**10, 64), np.float32)

    def looked_up(params, batch):
        del params["down"]
        jnp.asarray(unread).sum()
        rows = jnp.asarray(table)[:64]
        return jnp.mean((batch["x"] @ rows.T @ rows @ params["up"]) ** 2)

    question = of_loss(lambda p, b: looked_up(dict(p), b), ADAM, PARAMS, BATCH)
    cluster = Cluster.parse("8xH100")
    plan = decide(question, cluster).plan
    assert plan.memory["constants"] == num_bytes
    usual = of_loss(loss, ADAM, PARAMS, BATCH)
    assert "constants" not in decide(usual, cluster).plan.memory
    pool = cluster.uniform
    small = replace(pool.device, memory_bytes=num_bytes)
    with pytest.raises(ValueError, match=r"\(.*constants 256 MiB.*\), .* more than"):
        decide(question, Cluster(pools=(replace(pool, device=small),)))
    small = replace(pool.device, memory_bytes=4 * num_bytes)
    found = decide(question, Cluster(pools=(replace(pool, device=small),)))
    (lint,) = (one for one in find_lints(found) if one.kind == "constants")
    assert lint.num_bytes == found.plan.memory["constants"]


@pytest.mark.parametrize(
    ("aux", "reason"),
    [
        (lambda each: {"n": jnp.int32(3)}, "value 'n' of dtype int32"),
        (lambda each: (each.mean(), {"each": each.mean(-1)}), "'1/each' with rows of"),
        (lambda each: each.reshape(4, -1).sum(-1), "an auxiliary value with rows of"),
        (lambda each: {"features": each.mean(0), "mean": each.mean()}, ""),
    ],
)
def test_microbatches_need_auxiliary_values_that_are_means(aux, reason: str) -> None:
    def with_aux(params, batch):
        made = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        return jnp.mean(made**2), aux(made)

    question = of_loss(with_aux, ADAM, PARAMS, BATCH)
    assert reason in question.why_one_microbatch
    assert bool(reason) == bool(question.why_one_microbatch)
    pool = Cluster.parse("2xH100").uniform
    pins = {"microbatches": 2}
    if not reason:
        plan = decide(question, Cluster.parse("2xH100"), pins).plan
        assert plan.knobs.microbatches == 2
        return
    with pytest.raises(ValueError, match="at most 1 are possible here, as the loss"):
        decide(question, Cluster.parse("2xH100"), pins)
    small = replace(pool.device, memory_bytes=2**16)
    with pytest.raises(ValueError, match=f"Microbatches were not tried, as .*{reason}"):
        decide(question, Cluster(pools=(replace(pool, device=small),)))


def test_a_cluster_without_limit_is_refused(question) -> None:
    with pytest.raises(ValueError, match=r"has 10,000,000,000 devices. Allowed: up to"):
        decide(question, Cluster.parse("10000000000xh100"))


@pytest.mark.parametrize(
    ("pin", "said"),
    [({"virtual_stages": 2}, "virtual_stages=2"), ({"schedule": "gpipe"}, "'gpipe'")],
)
def test_pins_of_pipelines_need_what_if(question, pin, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} is pinned, and no pipelines are"):
        decide(question, Cluster.parse("8xH100"), pin)
