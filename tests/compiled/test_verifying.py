"""What is verified of a plan is the program that runs it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from dtft._jax_internals import compile_module
from dtft.parallel.planning.planned_step import jit_plan, make_step
from dtft.parallel.planning.verify import candidate_of
from dtft.planner.aot.compile import LoweredStep
from dtft.planner.aot.hlo import collectives
from dtft.planner.plan import Knobs, Plan, Prediction
from dtft.planner.types import Spec

MESH = {"fsdp": 4, "tensor": 2}
UP: Spec = (("fsdp",), ("tensor",))
DOWN: Spec = (("tensor",), ("fsdp",))
PARAMS = {
    "down": jax.ShapeDtypeStruct((64, 32), jnp.float32),
    "up": jax.ShapeDtypeStruct((32, 64), jnp.float32),
}
BATCH = {"x": jax.ShapeDtypeStruct((256, 32), jnp.float32)}


def _loss(params: Any, batch: Any) -> jax.Array:
    hidden = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.mean(jnp.square(hidden @ params["down"]))


def _step(params: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


LOSS = {"loss": _loss, "optimizer": optax.sgd(0.1), "params": PARAMS, "batch": BATCH}
STEP = {"step": _step, "state": PARAMS, "batch": BATCH}


def _plan(entry: Any) -> Plan:
    return Plan(
        entry=entry,
        mesh=MESH,
        knobs=Knobs(zero=3, microbatches=2 if entry == "loss" else 1),
        state={"down": DOWN, "up": UP},
        batch={"x": (("fsdp",), ())},
        optimizer={},
        prediction=Prediction(terms={}, low_s=0.0, high_s=0.0, source="test"),
        memory={},
        capacity_bytes=0,
    )


def _of(candidate: LoweredStep) -> Any:
    program = compile_module(candidate.module, jax.devices(), {})
    return collectives(program.hlo_modules()[0].to_string(), MESH)


def test_a_loss_is_verified_as_make_step_runs_it() -> None:
    plan = _plan("loss")
    candidate = candidate_of(plan, LOSS)
    lowered = make_step(_loss, optax.sgd(0.1), plan).lower(PARAMS, BATCH)
    found = _of(candidate)
    assert found == collectives(lowered.compile().as_text() or "", MESH)
    assert {one.kind for one in found} >= {"all_gather", "all_reduce"}
    assert max(one.trips for one in found) == 2  # microbatches


def test_a_users_step_is_verified_as_jit_plan_runs_it() -> None:
    plan = _plan("step")
    candidate = candidate_of(plan, STEP, name="mine")
    lowered = jit_plan(plan, _step).lower(PARAMS, BATCH)
    assert candidate.name == "mine" and candidate.mesh == MESH
    assert _of(candidate) == collectives(lowered.compile().as_text() or "", MESH)


def test_a_plan_of_the_other_entry_point_is_refused() -> None:
    with pytest.raises(ValueError, match="plan.entry='step'"):
        candidate_of(_plan("step"), LOSS)
    with pytest.raises(ValueError, match="target='v100'"):
        candidate_of(_plan("step"), STEP, target="v100")
