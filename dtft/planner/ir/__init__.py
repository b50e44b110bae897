"""The planner's intermediate representation of a training step, and its analyses.

* `graph`: values, operators, loops and dims of a traced step, without JAX types.
* `tracing`: traces a Python function to a graph. `jaxprs`: walks and rebuilds jaxprs.
* `dim_propagation`: derives the dims of an operator's results from its operands' dims.
  `flops`: classifies operators and counts their operations.
* `fusion`: finds the kernels of a compiled step, and the bytes that they move.
* `repeats`: finds equal blocks. `layers`: finds the layers that a pipeline divides.
  `op_groups`: groups operators of equal cost. `read_order`: how early the forward pass
  reads each parameter. `remat`: wraps parts of a loss in `jax.checkpoint`. `ragged`:
  how XLA compiles `jax.lax.ragged_dot`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.ir.flops import (
        ATTENTION,
        COUNTED,
        MMA_SYNC,
        RUNS_ON,
        multiply_add_flops,
        register_kernel,
    )
    from dtft.planner.ir.fusion import (
        CHEAP,
        LONGEST_ROW,
        PRODUCTS,
        RELABELS,
        moved_bytes,
        relabelled,
        unfused_bytes,
    )
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
    from dtft.planner.ir.layers import PARTS, LayerStack, Part, find_layers
    from dtft.planner.ir.op_groups import OpGroup, group_operators, region
    from dtft.planner.ir.ragged import (
        has_ragged_matmul,
        num_groups,
        operands_by_group,
    )
    from dtft.planner.ir.read_order import ReadPoint, find_read_order
    from dtft.planner.ir.remat import POLICIES, rematerialized
    from dtft.planner.ir.repeats import find_repeats, same_dims
    from dtft.planner.ir.tracing import trace

_PUBLIC = {
    "ATTENTION": "flops",
    "CALLS": "jaxprs",
    "CHEAP": "fusion",
    "COUNTED": "flops",
    "CountedLoop": "graph",
    "Dim": "graph",
    "Graph": "graph",
    "LONGEST_ROW": "fusion",
    "LayerStack": "layers",
    "MMA_SYNC": "flops",
    "OpGroup": "op_groups",
    "Operator": "graph",
    "OperatorKind": "graph",
    "PARTS": "layers",
    "POLICIES": "remat",
    "PRODUCTS": "fusion",
    "Part": "layers",
    "RELABELS": "fusion",
    "REMAT": "jaxprs",
    "RUNS_ON": "flops",
    "ReadPoint": "read_order",
    "Value": "graph",
    "bodies": "jaxprs",
    "find_layers": "layers",
    "find_repeats": "repeats",
    "group_operators": "op_groups",
    "has_ragged_matmul": "ragged",
    "is_var": "jaxprs",
    "item_bits": "graph",
    "moved_bytes": "fusion",
    "multiply_add_flops": "flops",
    "num_groups": "ragged",
    "operands_by_group": "ragged",
    "operators": "jaxprs",
    "find_read_order": "read_order",
    "region": "op_groups",
    "register_kernel": "flops",
    "relabelled": "fusion",
    "rematerialized": "remat",
    "same_dims": "repeats",
    "trace": "tracing",
    "traced": "jaxprs",
    "uncut": "jaxprs",
    "unfused_bytes": "fusion",
    "with_bodies": "jaxprs",
}

__all__ = [
    "ATTENTION",
    "CALLS",
    "CHEAP",
    "COUNTED",
    "CountedLoop",
    "Dim",
    "Graph",
    "LONGEST_ROW",
    "LayerStack",
    "MMA_SYNC",
    "OpGroup",
    "Operator",
    "OperatorKind",
    "PARTS",
    "POLICIES",
    "PRODUCTS",
    "Part",
    "RELABELS",
    "REMAT",
    "RUNS_ON",
    "ReadPoint",
    "Value",
    "bodies",
    "find_layers",
    "find_repeats",
    "group_operators",
    "has_ragged_matmul",
    "is_var",
    "item_bits",
    "moved_bytes",
    "multiply_add_flops",
    "num_groups",
    "operands_by_group",
    "operators",
    "find_read_order",
    "region",
    "register_kernel",
    "relabelled",
    "rematerialized",
    "same_dims",
    "trace",
    "traced",
    "uncut",
    "unfused_bytes",
    "with_bodies",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
