"""The program: how a step is traced, which of its dims are divided alike, what repeats
in it.

* `graph`: values, operators, loops and named dims of a traced step; free of JAX.
* `tracing`: from a Python function to a graph; `jaxprs`: JAX's own form, walked and
  rebuilt.
* `dim_propagation`: the dims of an operator's results from those of its operands;
  `flops`: its class and operations.
* `repeats`: equal layers; `op_groups`: operators that cost alike; `remat`: what the
  backward pass computes again.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.ir.flops import COUNTED
    from dtft.planner.ir.graph import (
        CountedLoop,
        Dim,
        Graph,
        Operator,
        OperatorKind,
        Value,
        item_bits,
    )
    from dtft.planner.ir.jaxprs import (
        CALLS,
        REMAT,
        bodies,
        is_var,
        operators,
        traced,
        uncut,
        with_bodies,
    )
    from dtft.planner.ir.op_groups import CHEAP, OpGroup, group_operators, region
    from dtft.planner.ir.remat import POLICIES, rematerialized
    from dtft.planner.ir.repeats import (
        LayerStack,
        Part,
        find_layers,
        find_repeats,
        same_dims,
    )
    from dtft.planner.ir.tracing import trace

_PUBLIC = {
    "CALLS": "jaxprs",
    "CHEAP": "op_groups",
    "COUNTED": "flops",
    "CountedLoop": "graph",
    "Dim": "graph",
    "Graph": "graph",
    "LayerStack": "repeats",
    "OpGroup": "op_groups",
    "Operator": "graph",
    "OperatorKind": "graph",
    "POLICIES": "remat",
    "Part": "repeats",
    "REMAT": "jaxprs",
    "Value": "graph",
    "bodies": "jaxprs",
    "find_layers": "repeats",
    "find_repeats": "repeats",
    "group_operators": "op_groups",
    "is_var": "jaxprs",
    "item_bits": "graph",
    "operators": "jaxprs",
    "region": "op_groups",
    "rematerialized": "remat",
    "same_dims": "repeats",
    "trace": "tracing",
    "traced": "jaxprs",
    "uncut": "jaxprs",
    "with_bodies": "jaxprs",
}

__all__ = [
    "CALLS",
    "CHEAP",
    "COUNTED",
    "CountedLoop",
    "Dim",
    "Graph",
    "LayerStack",
    "OpGroup",
    "Operator",
    "OperatorKind",
    "POLICIES",
    "Part",
    "REMAT",
    "Value",
    "bodies",
    "find_layers",
    "find_repeats",
    "group_operators",
    "is_var",
    "item_bits",
    "operators",
    "region",
    "rematerialized",
    "same_dims",
    "trace",
    "traced",
    "uncut",
    "with_bodies",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
