"""Load balancing: steps with uneven shares of the batch for replicas of unequal speed.

* `step`: the step, its batches, and its timing. `balancer`: changes shares while
  training.
* `balance_log`: records the current shares in checkpoints and logs.

`dtft.balance` computes better shares. `dtft.parallel.row_assignment` maps shares to
rows.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.parallel.load_balancing.balance_log import (
        BALANCE_FILE,
        BalanceLog,
        begin_balance,
        node_names,
    )
    from dtft.parallel.load_balancing.balancer import Balancer
    from dtft.parallel.load_balancing.step import (
        Probe,
        SharedFeed,
        load_balanced_step,
        shared_by,
    )

_PUBLIC = {
    "BALANCE_FILE": "balance_log",
    "BalanceLog": "balance_log",
    "Balancer": "balancer",
    "Probe": "step",
    "SharedFeed": "step",
    "begin_balance": "balance_log",
    "load_balanced_step": "step",
    "node_names": "balance_log",
    "shared_by": "step",
}

__all__ = [
    "BALANCE_FILE",
    "BalanceLog",
    "Balancer",
    "Probe",
    "SharedFeed",
    "begin_balance",
    "load_balanced_step",
    "node_names",
    "shared_by",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
