"""Runs training steps on a mesh: data, model and pipeline parallelism.

* `functional_model`: a model as pure functions. `step`: `TrainStep`, the compiled step
  of an experiment. `feed`: makes sharded arrays from rows. `validation`: checks that an
  experiment fits a cluster.
* `state_sharding`: how parameters and moments are divided on a config's mesh without
  stages; `plan_shardings`: applies a plan's shardings.
* `fsdp`: ZeRO level 3. `grad_accumulation`: gradients over microbatches.
  `local_updates`: steps of optimizers that communicate between replicas. `pipeline`:
  an SPMD pipeline over stages.
* Packages: `planning` (the step of a plan), `load_balancing` (shares of the batch that
  differ between replicas; `row_assignment` selects the rows of a share), `mpmd`
  (operators placed on devices of different types).

`validation` and `row_assignment` do not import JAX, so that host agents can check
configs without loading JAX. Plans and their search are in `dtft.planner`, the training
loop is in `dtft.train`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.parallel.feed import Feed, evaluate
    from dtft.parallel.functional_model import Metrics, State
    from dtft.parallel.pipeline import STAGE_AXIS, pipelined_step
    from dtft.parallel.state_sharding import make_mesh
    from dtft.parallel.step import Arrays, TrainStep, sharded_step
    from dtft.parallel.validation import (
        check_experiment,
        check_input,
        row_parts,
        scaled_mesh,
    )

_PUBLIC = {
    "Arrays": "step",
    "Feed": "feed",
    "Metrics": "functional_model",
    "STAGE_AXIS": "pipeline",
    "State": "functional_model",
    "TrainStep": "step",
    "check_experiment": "validation",
    "check_input": "validation",
    "evaluate": "feed",
    "make_mesh": "state_sharding",
    "pipelined_step": "pipeline",
    "row_parts": "validation",
    "scaled_mesh": "validation",
    "sharded_step": "step",
}

__all__ = [
    "Arrays",
    "Feed",
    "Metrics",
    "STAGE_AXIS",
    "State",
    "TrainStep",
    "check_experiment",
    "check_input",
    "evaluate",
    "make_mesh",
    "pipelined_step",
    "row_parts",
    "scaled_mesh",
    "sharded_step",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
