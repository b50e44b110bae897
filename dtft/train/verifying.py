"""Plans as programs to verify: lowered for devices that this machine need not have.

The other half of `dtft.planner.compiling`: that compiles candidates, this makes them of
plans, with the same code that will run the plan. Compiles and decides nothing.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from dtft.planner.compiling import Candidate, candidate, platform_of
from dtft.planner.plan import Plan
from dtft.planner.uncollected import uncollected
from dtft.train.planned_step import step_of


@uncollected()
def candidate_of(
    plan: Plan, given: Mapping[str, Any], *, target: str = "cpu", name: str = ""
) -> Candidate:
    """The step that `make_step` or `jit_plan` would run, lowered.

    Args:
        plan: of what is given.
        given: the arguments of `dtft.plan`: `step`, `state`, `batch`; or `loss`,
            `optimizer`, `params`, `batch`. Arrays may be ShapeDtypeStructs.
        target: `cpu`, or the GPU to compile for.
        name: what the candidate is called in results.

    Raises:
        ValueError: the plan is not of what is given, or cannot be run on such devices.
    """
    platform, sizes = platform_of(target), tuple(plan.mesh.values())
    # A mesh without devices: enough for shardings and for lowering.
    mesh = AbstractMesh(
        sizes, tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(sizes)
    )
    step, start = step_of(plan, given, mesh, platform)
    lowered = step.trace(start, given["batch"]).lower(lowering_platforms=(platform,))
    return candidate(lowered, mesh=plan.mesh, target=target, name=name)
