"""The planner: chooses a mesh and shardings of a training step on a cluster.

The planner never runs a model. `ir` traces the step, and `workload` gives the step's
arrays roles. A candidate is a mesh on the devices (`cluster`), with shardings and
knobs. For each candidate the step is partitioned (`spmd`), and its time and memory are
predicted (`cost`, `memory`). `search` ranks the candidates and writes the best as a
`plan`, which `report` explains and `aot` compares with XLA's compiled program.
`transformer` predicts the step times of the transformer training runs in a table.
Importing this package is light: names load on first use.

* `Cluster`: the devices and links to plan for, from `Cluster.parse("64x8xH100")`, a
  file, or JAX's devices. A cluster consists of `Pool`, `Level`, `Link`, `Curve` and
  `DeviceType` (`Efficiency`).
* `Plan`: the values of a plan, with `Knobs`, `Prediction`, `Collective`, `Alternative`
  and `AxisUse`. `dtft.Plan` adds methods to run and query the plan.
* `Calibration`: the measurements of `dtft calibrate`.
* `Lint`: a finding of `plan.lints()`, such as a batch size that leaves devices idle.
* `CAPABILITIES`: the knobs that each entry point and backend can run.
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
