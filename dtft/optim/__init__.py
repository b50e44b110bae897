"""Optimizers as optax transforms.

Importing this package loads jax and optax, but not `dtft.collectives`. The transforms
that communicate between replicas need `dtft.collectives`; their modules are imported
when one of their names is first used. Shampoo, and `skip_outlier_gradients` with an
`axis_name`, import `dtft.collectives` in their first update.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dtft._former import warn
from dtft.optim.guard import SkipOutliersState, skip_outlier_gradients
from dtft.optim.max_adabelief import (
    ScaleByMaxBeliefState,
    max_adabelief,
    scale_by_max_belief,
)
from dtft.optim.phases import Phases, max_belief_phases
from dtft.optim.shampoo import scale_by_shampoo, shampoo
from dtft.optim.shampoo_steps import ScaleByShampooState

if TYPE_CHECKING:
    from dtft.optim.exchange import average_params
    from dtft.optim.moment_sync import SyncState
    from dtft.optim.per_replica import PerReplica, add_groups, assign_groups
    from dtft.optim.symmetric import average_gradients, exchange_symmetric
    from dtft.optim.sync import reduce_updates, sync_moments

__all__ = [
    "PerReplica",
    "Phases",
    "ScaleByMaxBeliefState",
    "ScaleByShampooState",
    "SkipOutliersState",
    "SyncState",
    "add_groups",
    "assign_groups",
    "average_gradients",
    "average_params",
    "exchange_symmetric",
    "max_adabelief",
    "max_belief_phases",
    "reduce_updates",
    "scale_by_max_belief",
    "scale_by_shampoo",
    "shampoo",
    "skip_outlier_gradients",
    "sync_moments",
]
_LAZY = {
    "PerReplica": "per_replica",
    "SyncState": "moment_sync",
    "add_groups": "per_replica",
    "assign_groups": "per_replica",
    "average_gradients": "symmetric",
    "average_params": "exchange",
    "exchange_symmetric": "symmetric",
    "reduce_updates": "sync",
    "sync_moments": "sync",
}


_FORMER = frozenset(
    ["GuardState", "as_transform", "guard_gradients", "unguarded"]
    + ["with_local_gradients"]
)


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        former = importlib.import_module(f"{__name__}.former")
        warn(f"{__name__}.{name}", former.NOW[name])
        return getattr(former, name)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
