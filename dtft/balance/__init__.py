"""Load balancing: divides load between nodes by measured seconds.

* `balance`: `Balance` holds the division (the load of each node) in force and its
  measurements; each round of steps makes a new `Balance`. `Rules` decide when a new
  division is accepted.
* `speed_estimator`: seconds of a unit of load on each node, estimated from measured
  divisions, and the drift of these seconds.
* `load_shares`: divisible work: microbatches of replicas, layers of pipeline stages.
* `operators`: the operators of a placement as divisible work. Only this module imports
  JAX.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.balance.balance import Balance, Policy, Rules, Work
    from dtft.balance.load_shares import (
        Counts,
        Layers,
        Microbatches,
        allocate,
        makespan,
        waits,
    )
    from dtft.balance.operators import Operators
    from dtft.balance.speed_estimator import SpeedEstimator, Speeds, UnitTimes

_PUBLIC = {
    "Balance": "balance",
    "Counts": "load_shares",
    "Layers": "load_shares",
    "Microbatches": "load_shares",
    "Operators": "operators",
    "Policy": "balance",
    "Rules": "balance",
    "SpeedEstimator": "speed_estimator",
    "Speeds": "speed_estimator",
    "UnitTimes": "speed_estimator",
    "Work": "balance",
    "allocate": "load_shares",
    "makespan": "load_shares",
    "waits": "load_shares",
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
