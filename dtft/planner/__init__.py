"""The planner: chooses a mesh and shardings of a training step on a cluster.

The planner never runs a model. `ir` traces the step, and `workload` finds which arrays
are parameters, optimizer state and batch. A candidate is a mesh on the devices
(`cluster`), with shardings and a value for each further setting, called a knob, such as
microbatches, ZeRO level, remat and offload. For each candidate the step is partitioned
(`spmd`), and its time and memory are predicted (`cost`, `memory`). `search` ranks the
candidates and writes the best as a `plan`, which `report` explains and `aot` compares
with XLA's compiled program. `transformer` predicts step time and memory for transformer
training runs, one per row of a CSV file (`dtft plan predict`). Importing this package
is light: names load on first use.

* `Cluster`: the devices and links to plan for, from `Cluster.parse("64x8xH100")`, a
  file, or JAX's devices. Its parts are `Pool` (devices of one type), `Level` (one stage
  of a pool's fabric), `Link`, `Curve` (seconds of a transfer by its size) and
  `DeviceType` with its `Efficiency`.
* `Plan`: the values of a plan, with `Knobs`, `Prediction`, `Collective`, `Alternative`
  and `AxisUse`. `dtft.Plan` adds methods to run and query the plan.
* `Calibration`: the measurements of `dtft calibrate`.
* `Lint`: a finding of `plan.lints()`, such as a batch size that leaves devices idle.
* `CAPABILITIES`: the knobs that a plan may use, by what is planned (a step or a loss)
  and by backend.
* `trace`: traces a function of arrays into a program, for `place`.
* `register_kernel`: tells the planner how many operations a custom kernel has.
* From `dtft.placement` (operators on nodes of different kinds): `place`, `Placement`,
  `Kernels`, `PricedTasks`.
* From `dtft.balance` (divides load between nodes by measured seconds): `Balance`,
  `Rules`, `Operators`, `Layers`, `Microbatches`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.balance import Balance, Layers, Microbatches, Operators, Rules
    from dtft.placement import Kernels, Placement, PricedTasks, place
    from dtft.planner.cluster import (
        Cluster,
        Curve,
        DeviceType,
        Efficiency,
        Level,
        Link,
        Pool,
    )
    from dtft.planner.cost import Calibration
    from dtft.planner.ir import register_kernel, trace
    from dtft.planner.plan import (
        Alternative,
        AxisUse,
        Collective,
        Knobs,
        Plan,
        Prediction,
    )
    from dtft.planner.report import Lint
    from dtft.planner.search import CAPABILITIES

_PUBLIC = {
    "Alternative": "plan",
    "AxisUse": "plan",
    "Balance": "dtft.balance",
    "CAPABILITIES": "search",
    "Calibration": "cost",
    "Cluster": "cluster",
    "Collective": "plan",
    "Curve": "cluster",
    "DeviceType": "cluster",
    "Efficiency": "cluster",
    "Kernels": "dtft.placement",
    "Knobs": "plan",
    "Layers": "dtft.balance",
    "Level": "cluster",
    "Link": "cluster",
    "Lint": "report",
    "Microbatches": "dtft.balance",
    "Operators": "dtft.balance",
    "Placement": "dtft.placement",
    "Plan": "plan",
    "Pool": "cluster",
    "Prediction": "plan",
    "PricedTasks": "dtft.placement",
    "Rules": "dtft.balance",
    "place": "dtft.placement",
    "register_kernel": "ir",
    "trace": "ir",
}

__all__ = [
    "CAPABILITIES",
    "Alternative",
    "AxisUse",
    "Balance",
    "Calibration",
    "Cluster",
    "Collective",
    "Curve",
    "DeviceType",
    "Efficiency",
    "Kernels",
    "Knobs",
    "Layers",
    "Level",
    "Link",
    "Lint",
    "Microbatches",
    "Operators",
    "Placement",
    "Plan",
    "Pool",
    "Prediction",
    "PricedTasks",
    "Rules",
    "place",
    "register_kernel",
    "trace",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
