"""Load balancing: divides load between nodes by measured seconds.

* `balance`: `Balance`, one value per round: divide, train, measure, judge; the rules
  for accepting a division.
* `speed_estimator`: seconds of a unit of load on each node, estimated from the tried
  divisions, and their drift.
* `work`: divisible work: microbatches of replicas, layers of pipeline stages.
* `operators`: the operators of a placement as divisible work. Only this module imports
  JAX.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.balance.balance import Balance, Policy, Rules, Work
    from dtft.balance.operators import Operators
    from dtft.balance.speed_estimator import SpeedEstimator, Speeds, UnitTimes
    from dtft.balance.work import (
        Counts,
        Layers,
        Microbatches,
        allocate,
        makespan,
        waits,
    )

_PUBLIC = {
    "Balance": "balance",
    "Counts": "work",
    "Layers": "work",
    "Microbatches": "work",
    "Operators": "operators",
    "Policy": "balance",
    "Rules": "balance",
    "SpeedEstimator": "speed_estimator",
    "Speeds": "speed_estimator",
    "UnitTimes": "speed_estimator",
    "Work": "balance",
    "allocate": "work",
    "makespan": "work",
    "waits": "work",
}

__all__ = [
    "Balance",
    "Counts",
    "Layers",
    "Microbatches",
    "Operators",
    "Policy",
    "Rules",
    "SpeedEstimator",
    "Speeds",
    "UnitTimes",
    "Work",
    "allocate",
    "makespan",
    "waits",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
