"""The axis `expert`: what a compiled program sends is what the plan says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtft.parallel.planning.planned_step import make_step
from dtft.parallel.planning.verify import candidate_of
from dtft.planner.aot.check import Compiled, compare
from dtft.planner.aot.compile import compile_all
from dtft.planner.cluster.topology import Cluster
from dtft.planner.report.replan import why_not
from dtft.planner.search.decision import Decision, decide
from dtft.planner.workload import of_loss
from tests.support.zoo import MODELS
from tests.support.zoo_parts import Model

LAYERS = 1


@pytest.fixture(scope="module")
def model() -> Model:
    return MODELS["moe"](
        batch=8, time=32, width=32, layers=LAYERS, hidden=64, experts=8, heads=2,
        vocabulary=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(model: Model) -> Decision:
    question = of_loss(model.loss, model.optimizer, model.params, model.batch)
    return decide(question, Cluster.parse("8xcpu"), {"expert": 4, "replica": 2})


def test_each_device_has_the_weights_of_its_own_experts(found: Decision) -> None:
    plan = found.plan
    assert plan.runnable
    assert plan.state["layers/0/up"][0] == ("expert",)
    assert plan.optimizer["0/mu/layers/0/down"][0] == ("expert",)
    assert plan.batch["tokens"][0] == ("replica", "expert")
    assert not any(plan.state["embed"])


@pytest.mark.timeout(180)  # a child imports JAX, on a busy machine too
def test_tokens_are_exchanged_twice_forward_and_twice_backward(
    model: Model, found: Decision
) -> None:
    given = {
        "loss": model.loss,
        "optimizer": model.optimizer,
        "params": model.params,
        "batch": model.batch,
    }
    lowered = candidate_of(found.plan, given)
    (compiled,) = compile_all([lowered], deadline_s=150.0)
    assert isinstance(compiled, Compiled)
    sent = {(one.kind, one.axes): one for one in compare(found.plan, compiled)}
    exchanged = sent["all_to_all", ("expert",)]
    (local,) = {c.num_bytes for c in compiled.collectives if c.kind == "all_to_all"}
    assert exchanged.found_bytes == 4 * LAYERS * local
    # What the experts made is wanted by example for two products of the backward pass:
    # the plan counts an exchange for each, and XLA makes one of them in the forward.
    assert exchanged.predicted_bytes == 5 * LAYERS * local
    weights = sent["all_reduce", ("replica",)]
    assert weights.difference == 0


def test_why_not_has_its_price(model: Model) -> None:
    question = of_loss(model.loss, model.optimizer, model.params, model.batch)
    decision = decide(question, Cluster.parse("8xH100"), {"expert": 1})
    text = why_not(decision, expert=8)
    assert "expert=8 is possible" in text
    assert "all_to_all" in text
    assert "expert=3 is not possible" in why_not(decision, expert=3)


def test_training_is_that_of_one_device(model: Model, found: Decision) -> None:
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape) / 8, a.dtype), model.params
    )
    tokens = rng.integers(64, size=(2, 8, 32))
    batch = dict(zip(("tokens", "labels"), jnp.asarray(tokens, jnp.int32), strict=True))
    alone = decide(found.question, Cluster.parse("cpu"), {"replica": 1})
    losses = []
    for plan, number in ((found.plan, 8), (alone.plan, 1)):
        devices = jax.devices()[:number]
        step = make_step(model.loss, model.optimizer, plan, devices=devices)
        state = step.init(params)
        of_steps = []
        for _ in range(3):
            state, loss = step.step(state, batch)
            of_steps.append(float(loss))
        losses.append(of_steps)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
