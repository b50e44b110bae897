"""The search: enumerates and prices candidates, and writes the best one as a plan.

A candidate is a mesh with a value for every knob, such as the number of microbatches.
To price a candidate is to predict its seconds per step and its bytes on a device.

* Candidates: `space` (candidates as columns; which knobs can be run), `meshes`, `pins`
  (settings that the user has fixed), `enumerate`.
* Time and memory of all candidates at once: `price_table` (operators), `memory_table`
  (state, batch, peak memory), `pipeline` (stages), `step_cost` (seconds by the
  catalog's figures, multiplied by scalars that are fitted to measured steps), `search`
  (totals), `ranking`.
* Dims that the axis `tensor` divides: `tensor_sharding`, with an exact solver in
  `solver`, `elimination` and `mixed_integer`.
* `decision`: selects a candidate, and explains what to change if none fits.
* `write_plan`: writes the selected candidate as a plan. `compute_split`: the plan's
  compute seconds by kind of work. `roofline`: the seconds that the plan keeps each
  resource busy, at the resource's peak.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.search.compute_split import (
        arrays_of,
        attention_scores,
        group_s,
        without_scores,
    )
    from dtft.planner.search.decision import (
        Decision,
        Fewer,
        best_of,
        decide,
        next_best,
        without_idle,
    )
    from dtft.planner.search.enumerate import enumerate_space
    from dtft.planner.search.pins import COUNTS, PINS, check_pins, did_you_mean
    from dtft.planner.search.price_table import Prices
    from dtft.planner.search.ranking import IDLE
    from dtft.planner.search.search import PlanSearch
    from dtft.planner.search.space import (
        CAPABILITIES,
        PLATFORMS,
        Choices,
        Space,
        check_runnable,
    )
    from dtft.planner.search.step_cost import (
        STEP_TERMS,
        Scales,
        StepCost,
        stack,
        terms_of_accuracy,
    )
    from dtft.planner.search.write_plan import as_plan

_PUBLIC = {
    "CAPABILITIES": "space",
    "COUNTS": "pins",
    "Choices": "space",
    "Decision": "decision",
    "Fewer": "decision",
    "IDLE": "ranking",
    "PINS": "pins",
    "PLATFORMS": "space",
    "PlanSearch": "search",
    "Prices": "price_table",
    "STEP_TERMS": "step_cost",
    "Scales": "step_cost",
    "Space": "space",
    "StepCost": "step_cost",
    "arrays_of": "compute_split",
    "as_plan": "write_plan",
    "attention_scores": "compute_split",
    "best_of": "decision",
    "check_pins": "pins",
    "check_runnable": "space",
    "decide": "decision",
    "did_you_mean": "pins",
    "enumerate_space": "enumerate",
    "group_s": "compute_split",
    "next_best": "decision",
    "stack": "step_cost",
    "terms_of_accuracy": "step_cost",
    "without_idle": "decision",
    "without_scores": "compute_split",
}

__all__ = [
    "CAPABILITIES",
    "COUNTS",
    "Choices",
    "Decision",
    "Fewer",
    "IDLE",
    "PINS",
    "PLATFORMS",
    "PlanSearch",
    "Prices",
    "STEP_TERMS",
    "Scales",
    "Space",
    "StepCost",
    "arrays_of",
    "as_plan",
    "attention_scores",
    "best_of",
    "check_pins",
    "check_runnable",
    "decide",
    "did_you_mean",
    "enumerate_space",
    "group_s",
    "next_best",
    "stack",
    "terms_of_accuracy",
    "without_idle",
    "without_scores",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
