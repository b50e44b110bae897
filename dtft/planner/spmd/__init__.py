"""Models SPMD partitioning: the compute, memory and collectives of a sharding.

* `partitioner`: work and collectives of each operator, as in XLA's SPMD partitioner.
* `op_signature`: groups operators that differ only in their dims, so that each pattern
  is partitioned once.
* `zero`: how parameters, gradients and optimizer state are divided between steps, and
  the collectives that gather parameters.
* `collective_combiner`: the collectives that XLA combines into one.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.spmd.collective_combiner import Bundle, bundle, messages
    from dtft.planner.spmd.op_signature import Instance, Pattern, PatternKey, instance
    from dtft.planner.spmd.partitioner import (
        MICRO,
        Axes,
        CollectiveOp,
        OperatorWork,
        ShardedSize,
        ShardingAssignment,
        Sizes,
        flat,
        parts,
        work_of,
    )
    from dtft.planner.spmd.zero import (
        ZERO_AXIS,
        ZERO_BESIDE,
        Gathered,
        Moved,
        StateArray,
        further_division,
        gather_bundle,
        loop_slices,
        rest_place,
        times_gathered,
        turned_place,
        zero_gathers,
        zero_leaves,
    )

_PUBLIC = {
    "Axes": "partitioner",
    "Bundle": "collective_combiner",
    "CollectiveOp": "partitioner",
    "Gathered": "zero",
    "Instance": "op_signature",
    "MICRO": "partitioner",
    "Moved": "zero",
    "OperatorWork": "partitioner",
    "Pattern": "op_signature",
    "PatternKey": "op_signature",
    "ShardedSize": "partitioner",
    "ShardingAssignment": "partitioner",
    "Sizes": "partitioner",
    "StateArray": "zero",
    "ZERO_AXIS": "zero",
    "ZERO_BESIDE": "zero",
    "bundle": "collective_combiner",
    "flat": "partitioner",
    "further_division": "zero",
    "gather_bundle": "zero",
    "instance": "op_signature",
    "loop_slices": "zero",
    "messages": "collective_combiner",
    "parts": "partitioner",
    "rest_place": "zero",
    "times_gathered": "zero",
    "turned_place": "zero",
    "work_of": "partitioner",
    "zero_gathers": "zero",
    "zero_leaves": "zero",
}

__all__ = [
    "Axes",
    "Bundle",
    "CollectiveOp",
    "Gathered",
    "Instance",
    "MICRO",
    "Moved",
    "OperatorWork",
    "Pattern",
    "PatternKey",
    "ShardedSize",
    "ShardingAssignment",
    "Sizes",
    "StateArray",
    "ZERO_AXIS",
    "ZERO_BESIDE",
    "bundle",
    "flat",
    "further_division",
    "gather_bundle",
    "instance",
    "loop_slices",
    "messages",
    "parts",
    "rest_place",
    "times_gathered",
    "turned_place",
    "work_of",
    "zero_gathers",
    "zero_leaves",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
