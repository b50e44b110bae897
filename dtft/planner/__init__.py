"""Plans: from a step, its arrays and a cluster to a mesh, shardings and what they cost.

Decides and never runs a model. A step is traced (`ir`), its arrays get roles
(`workload`), every candidate for the devices (`cluster`) is divided (`spmd`), priced
(`cost`, `memory`) and ranked (`search`); the result is a `plan`, which is explained
(`report`) and compared with what XLA compiles (`aot`). `transformer` predicts training
runs from a model's shape. Importing this package is light: names load on first use.

* `Cluster`: what is planned for: `Cluster.parse("64x8xH100")`, a file, or JAX's
  devices; made of `Pool`, `Level`, `Link`, `Curve` and `DeviceType` (`Efficiency`).
* `Plan`: what is decided, with `Knobs`, `Prediction`, `Collective`, `Alternative` and
  `AxisUse` in it. `dtft.Plan` is the same and can be run and asked.
* `Calibration`: what `dtft calibrate` measured; `Lint`: what `plan.lints()` finds.
* `CAPABILITIES`: the knobs that each entry point and backend can run.
* `trace`: a function of arrays as a program, for `place`.
* Of `dtft.placement` (operators on unlike nodes): `place`, `Placement`, `Kernels`,
  `PricedTasks`; of `dtft.balance` (load divided by measured waits): `Balance`, `Rules`,
  `Operators`, `Layers`, `Microbatches`.
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
    from dtft.planner.ir import trace
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
    "trace",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
