"""How a step runs on a mesh.

* `functional_model` (a model as functions), `step` (`TrainStep`: how parameters and
  moments are divided on a config's mesh), `feed` (from rows to arrays on the mesh),
  `validation` (whether an experiment fits a cluster).
* `sharding`, `fsdp` (ZeRO level 3), `grad_accumulation`, `local_updates` (optimizers
  that reduce by themselves), `pipeline` (an SPMD pipeline over stages).
* Packages: `planning` (a step as a plan says), `load_balancing` (uneven shares; which
  rows a share means: `row_assignment`), `mpmd` (operators placed on unlike devices).

`validation` and `row_assignment` import no JAX: agents check configs with them. What a
plan is and how it is found is in `dtft.planner`; the loop is in `dtft.train`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.parallel.feed import Feed, evaluate
    from dtft.parallel.functional_model import Metrics, State
    from dtft.parallel.pipeline import STAGE_AXIS, pipelined_step
    from dtft.parallel.step import TrainStep, make_mesh, sharded_step
    from dtft.parallel.validation import (
        check_experiment,
        check_input,
        row_parts,
        scaled_mesh,
    )

_PUBLIC = {
    "Feed": "feed",
    "Metrics": "functional_model",
    "STAGE_AXIS": "pipeline",
    "State": "functional_model",
    "TrainStep": "step",
    "check_experiment": "validation",
    "check_input": "validation",
    "evaluate": "feed",
    "make_mesh": "step",
    "pipelined_step": "pipeline",
    "row_parts": "validation",
    "scaled_mesh": "validation",
    "sharded_step": "step",
}

__all__ = [
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
