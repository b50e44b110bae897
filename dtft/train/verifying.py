"""Plans as programs to verify: lowered for devices that this machine need not have.

The other half of `dtft.planner.aot`: that compiles candidates, this makes them of
plans, with the same code that will run the plan. Compiles and decides nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType

from dtft.planner.aot import Candidate, candidate, platform_of
from dtft.planner.gc_pause import gc_paused
from dtft.planner.plan import Plan
from dtft.planner.search import check_runnable
from dtft.train.planned_step import Step
from dtft.train.planning import PlannedStep, RunnablePlan


def of_loss(
    plan: Plan,
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    target: str = "cpu",
    name: str = "",
) -> Candidate:
    """The step that `make_step(loss, optimizer, plan)` would run.

    Args:
        plan: of `dtft.plan(loss=...)`.
        loss: `(params, batch) -> scalar` or `-> (scalar, aux)`.
        optimizer: any optax transformation.
        params: arrays or ShapeDtypeStructs.
        batch: arrays or ShapeDtypeStructs.
        target: `cpu`, or the GPU to compile for.
        name: what the candidate is called in results.

    Raises:
        ValueError: the plan is not of this loss, or cannot be run on such devices.
    """
    check_runnable(plan, "loss", platform_of(target))
    step = Step(
        plan=plan, mesh=_mesh(plan), _loss=loss, _optimizer=optimizer, _weight=None
    )
    state = step._abstract(params)
    return _candidate(step, state, batch, target, name)


def of_step(
    plan: Plan,
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    *,
    target: str = "cpu",
    name: str = "",
) -> Candidate:
    """The user's own step as `jit_plan(plan, step)` would run it; see `of_loss`."""
    check_runnable(plan, "step", platform_of(target))
    runnable = RunnablePlan.of(plan)
    planned = PlannedStep(plan=runnable, mesh=_mesh(plan), _step=step)
    return _candidate(planned, state, batch, target, name)


@gc_paused()
def _candidate(
    step: Step | PlannedStep, state: Any, batch: Any, target: str, name: str
) -> Candidate:
    # Arrays are of a device here, and of a kind of its memory: only their shapes count.
    state, batch = jax.eval_shape(lambda *given: given, state, batch)
    traced = step._jitted(state, batch).trace(state, batch)
    lowered = traced.lower(lowering_platforms=(platform_of(target),))
    return candidate(lowered, mesh=step.plan.mesh, target=target, name=name)


def _mesh(plan: Plan) -> Any:
    """The plan's mesh without devices: enough for shardings and for lowering."""
    sizes = tuple(plan.mesh.values())
    return AbstractMesh(
        sizes, tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(sizes)
    )
