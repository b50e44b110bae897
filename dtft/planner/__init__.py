"""Plans: from a step, its arrays and a cluster to a mesh, shardings and what they cost.

Decides and never runs a model. Must not know hosts of a job, checkpoints or processes.
Importing this package is light: public names load on first use.

* `Cluster`: what is planned for: `Cluster.parse("64x8xH100")`, a file, or JAX's
  devices; made of `Pool`, `Level`, `Link`, `Curve` and `DeviceType` (`Efficiency`).
* `Plan`: what is decided, with `Knobs`, `Prediction`, `Collective`, `Alternative` and
  `AxisUse` in it. `dtft.Plan` is the same and can be run and asked.
* `Calibration`: what `dtft calibrate` measured; `Lint`: what `plan.lints()` finds.
* `place`: where operators run on nodes that are not alike, a `Placement`; `Kernels`:
  which nodes can run what.
* `Balance` (`Rules`): how load is divided anew from measured waits; what is divided:
  `Operators` of a program's `PricedTasks`, `Layers` of stages, `Microbatches` of
  replicas.
* `CAPABILITIES`: the knobs that each entry point and backend can run.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.balance import Balance as Balance
    from dtft.planner.balance import Rules as Rules
    from dtft.planner.calibration import Calibration as Calibration
    from dtft.planner.capabilities import CAPABILITIES as CAPABILITIES
    from dtft.planner.cluster import Cluster as Cluster
    from dtft.planner.cluster import Level as Level
    from dtft.planner.cluster import Pool as Pool
    from dtft.planner.device import DeviceType as DeviceType
    from dtft.planner.device import Efficiency as Efficiency
    from dtft.planner.kernels import Kernels as Kernels
    from dtft.planner.layer_work import Layers as Layers
    from dtft.planner.links import Curve as Curve
    from dtft.planner.links import Link as Link
    from dtft.planner.lints import Lint as Lint
    from dtft.planner.load_shares import Microbatches as Microbatches
    from dtft.planner.placement import PricedTasks as PricedTasks
    from dtft.planner.placement import place as place
    from dtft.planner.placement_result import Placement as Placement
    from dtft.planner.placement_work import Operators as Operators
    from dtft.planner.plan import Alternative as Alternative
    from dtft.planner.plan import AxisUse as AxisUse
    from dtft.planner.plan import Collective as Collective
    from dtft.planner.plan import Knobs as Knobs
    from dtft.planner.plan import Plan as Plan
    from dtft.planner.plan import Prediction as Prediction

_PUBLIC = {
    "Alternative": "plan",
    "AxisUse": "plan",
    "Balance": "balance",
    "CAPABILITIES": "capabilities",
    "Calibration": "calibration",
    "Cluster": "cluster",
    "Collective": "plan",
    "Curve": "links",
    "DeviceType": "device",
    "Efficiency": "device",
    "Kernels": "kernels",
    "Knobs": "plan",
    "Layers": "layer_work",
    "Level": "cluster",
    "Link": "links",
    "Lint": "lints",
    "Microbatches": "load_shares",
    "Operators": "placement_work",
    "Placement": "placement_result",
    "Plan": "plan",
    "Pool": "cluster",
    "Prediction": "plan",
    "PricedTasks": "placement",
    "Rules": "balance",
    "place": "placement",
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
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
