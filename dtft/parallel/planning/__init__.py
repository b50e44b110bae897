"""Makes plans with `dtft.plan`, compiles the step of a plan, chooses the plan of a run.

* `api`: `dtft.plan` and its result. `inputs`: checks the arguments of `dtft.plan`.
* `planned_step`: `make_step` and `jit_plan`. `planned_experiment`: builds the train
  step of a config from a plan.
* `choice`: the plan of a run, recorded in checkpoints and replayed. `auto`: plans a
  config with the planner. `calibration_log`: predicted and measured step times.
* `verify`: compiles plans for devices that need not exist. `trial`: runs plans.

The search for a plan is in `dtft.planner`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.parallel.planning.api import RunnablePlan, plan
    from dtft.parallel.planning.auto import PlannerInputs, asked_of, first_batch
    from dtft.parallel.planning.calibration_log import (
        PLAN_TIMES_FILE,
        append_past_run,
        past_run,
    )
    from dtft.parallel.planning.choice import PlanChoice, choose, recorded_plan
    from dtft.parallel.planning.inputs import (
        check_arrays,
        check_function,
        check_like,
        check_optimizer,
    )
    from dtft.parallel.planning.planned_experiment import (
        planned_mesh,
        planned_train_step,
    )
    from dtft.parallel.planning.planned_step import jit_plan, make_step
    from dtft.parallel.planning.trial import Runner, in_turns, trial_section, try_plans
    from dtft.parallel.planning.verify import (
        candidate_of,
        first_fitting,
        target_of,
        verified,
        verify_sections,
    )

_PUBLIC = {
    "PLAN_TIMES_FILE": "calibration_log",
    "PlanChoice": "choice",
    "PlannerInputs": "auto",
    "RunnablePlan": "api",
    "Runner": "trial",
    "append_past_run": "calibration_log",
    "asked_of": "auto",
    "candidate_of": "verify",
    "check_arrays": "inputs",
    "check_function": "inputs",
    "check_like": "inputs",
    "check_optimizer": "inputs",
    "choose": "choice",
    "first_batch": "auto",
    "first_fitting": "verify",
    "in_turns": "trial",
    "jit_plan": "planned_step",
    "make_step": "planned_step",
    "past_run": "calibration_log",
    "plan": "api",
    "planned_mesh": "planned_experiment",
    "planned_train_step": "planned_experiment",
    "recorded_plan": "choice",
    "target_of": "verify",
    "trial_section": "trial",
    "try_plans": "trial",
    "verified": "verify",
    "verify_sections": "verify",
}

__all__ = [
    "PLAN_TIMES_FILE",
    "PlanChoice",
    "PlannerInputs",
    "RunnablePlan",
    "Runner",
    "append_past_run",
    "asked_of",
    "candidate_of",
    "check_arrays",
    "check_function",
    "check_like",
    "check_optimizer",
    "choose",
    "first_batch",
    "first_fitting",
    "in_turns",
    "jit_plan",
    "make_step",
    "past_run",
    "plan",
    "planned_mesh",
    "planned_train_step",
    "recorded_plan",
    "target_of",
    "trial_section",
    "try_plans",
    "verified",
    "verify_sections",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
