"""Ragged matmuls (`jax.lax.ragged_dot`), as XLA compiles them.

A ragged matmul multiplies each group of rows by its own matrix, such as the tokens of
each expert. XLA compiles it to a matmul of this kind for TPUs only. Otherwise it copies
the rows once for each group, with zeros for the rows of other groups, and multiplies
all copies. So memory and time grow with the number of groups.

Source: programs that XLA compiled for H100 and CPU (jax 0.10.2). On GPU the copies are
`[rows, groups x width]`, and the partitioner gathers rows and matrices that a mesh axis
divides by row or by group: each device then computes all of the product
(`tests/compiled/test_gpu_ragged.py`).
"""

from dtft.planner.ir.graph import Graph, Operator

RAGGED = "ragged_dot_general"


def has_ragged_matmul(platform: str) -> bool:
    """Whether XLA compiles a ragged matmul without a copy of its rows for each group.

    Args:
        platform: JAX's name of the platform, such as `tpu`.
    """
    return platform == "tpu"


def num_groups(graph: Graph, operator: Operator) -> int:
    """Returns the number of groups of a ragged matmul; 1 for any other operator.

    >>> import jax
    >>> from dtft.planner.ir import trace
    >>> rows, matrices = (jax.ShapeDtypeStruct(s, "f4") for s in ((6, 2), (3, 2, 4)))
    >>> sizes = jax.ShapeDtypeStruct((3,), "i4")
    >>> graph = trace(jax.lax.ragged_dot, rows, matrices, sizes)
    >>> num_groups(graph, graph.operators[-1])
    3
    """
    if operator.primitive != RAGGED:
        return 1
    return graph.values[operator.inputs[-1]].shape[-1]


def operands_by_group(graph: Graph, operator: Operator) -> tuple[int, ...]:
    """Returns the positions of the operands that are copied for each group.

    These are the rows. In the gradient of the matrices, whose result has a dim of
    groups, both operands have rows. () for operators that are no ragged matmul.
    """
    if operator.primitive != RAGGED:
        return ()
    rows, made = (
        graph.values[index].shape for index in (operator.inputs[0], *operator.outputs)
    )
    return (0, 1) if len(made) > len(rows) else (0,)
