"""The training loop and the processes that run it.

* `loop`: the training loop; `stop`: detects convergence; `run_log`: console output and
  metrics files; `run_directory`: the directory of a run.
* `runtime`: the interface between the loop and its process. `single_process` implements
  the interface for `dtft train`, `worker` for a slot of a launched job
  (`python -m dtft.train.worker`). `devices`: the devices of this process.
* Parts of the worker: `world` and `shared_keys` connect it to the job's other JAX
  processes, `rehearsal` compiles steps ahead, `state_layout` describes the state for
  checkpoints in memory, and `drill_failure` injects failures.

`dtft.parallel` has the train step and the mesh, `dtft.config` the configs. `make_step`,
`jit_plan`, `make_placed_step` and `nodes_of_scopes` of `dtft.parallel` are exported
here too.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.parallel.mpmd import make_placed_step, nodes_of_scopes
    from dtft.parallel.planning import jit_plan, make_step
    from dtft.train.devices import (
        devices_of,
        keep_cpu_memory,
        keep_freed,
        make_cpu_devices,
    )
    from dtft.train.loop import run
    from dtft.train.run_directory import (
        config_to_continue,
        make_directory,
        only_run_in,
        recorded_storage,
        with_run_dir,
    )
    from dtft.train.single_process import LocalRuntime, train
    from dtft.train.state_layout import layout_of

_PUBLIC = {
    "LocalRuntime": "single_process",
    "config_to_continue": "run_directory",
    "devices_of": "devices",
    "jit_plan": "dtft.parallel.planning",
    "keep_cpu_memory": "devices",
    "keep_freed": "devices",
    "layout_of": "state_layout",
    "make_cpu_devices": "devices",
    "make_placed_step": "dtft.parallel.mpmd",
    "make_directory": "run_directory",
    "make_step": "dtft.parallel.planning",
    "nodes_of_scopes": "dtft.parallel.mpmd",
    "only_run_in": "run_directory",
    "recorded_storage": "run_directory",
    "run": "loop",
    "train": "single_process",
    "with_run_dir": "run_directory",
}

__all__ = [
    "LocalRuntime",
    "config_to_continue",
    "devices_of",
    "jit_plan",
    "keep_cpu_memory",
    "keep_freed",
    "layout_of",
    "make_cpu_devices",
    "make_placed_step",
    "make_directory",
    "make_step",
    "nodes_of_scopes",
    "only_run_in",
    "recorded_storage",
    "run",
    "train",
    "with_run_dir",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
