"""What-if plans use knobs that cannot be run, and say so."""

import jax
import optax

from dtft.planner.cluster.topology import Cluster
from dtft.planner.search.decision import decide
from dtft.planner.workload import Workload, of_step
from tests.support.zoo import MODELS


def _step_question() -> Workload:
    model = MODELS["mlp"](batch=64, widths=(64, 256, 16))
    optimizer = optax.sgd(0.1)

    def step(state: dict[str, jax.Array], batch: object) -> object:
        value, gradients = jax.value_and_grad(model.loss)(state, batch)
        updates, _ = optimizer.update(gradients, optimizer.init(state), state)
        return optax.apply_updates(state, updates), value

    return of_step(step, model.params, model.batch)


def test_a_knob_that_cannot_be_run_marks_the_plan() -> None:
    cluster, question = Cluster.parse("4xH100"), _step_question()
    found = decide(question, cluster, {"microbatches": 2}, what_if=True)
    assert found.plan.knobs.microbatches == 2
    assert not found.plan.runnable
    assert decide(question, cluster, what_if=True).plan.prediction.step_s > 0


def test_without_it_the_same_pin_is_refused() -> None:
    cluster, question = Cluster.parse("4xH100"), _step_question()
    plan = decide(question, cluster).plan
    assert plan.runnable and plan.knobs.microbatches == 1
    try:
        decide(question, cluster, {"microbatches": 2})
    except ValueError as error:
        assert "at most 1 are possible here" in str(error)
    else:
        raise AssertionError("microbatches=2 was not refused")
