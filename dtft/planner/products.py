"""Sizes of matmuls: rows, columns, depth and batch of each device's part.

Pure; must not know how the division was found or what a matmul costs.
"""

from collections.abc import Mapping, Sequence

from dtft.planner.amounts import Amount
from dtft.planner.graph import Operator, Value


def product_sizes(
    operator: Operator,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    divides: Mapping[str, tuple[str, ...]],
) -> tuple[Amount, ...]:
    """Rows (m), columns (n), depth (k) and batch (b) of one matmul.

    Args:
        operator: gives the operations, 2 b m n k.
        inputs: its operands.
        outputs: its results.
        divides: axes along each of m, n, k and b; empty for what is no matmul.
    """
    if not divides:
        return ()
    left, right, made = inputs[0].size, inputs[1].size, outputs[0].size
    depth = operator.flops / (2 * made) if made else 0.0
    if not depth:
        return ()
    rows, columns = left / depth, right / depth
    batch = max(1.0, rows * columns / made)
    totals = {"m": rows / batch, "n": columns / batch, "k": depth, "b": batch}
    return tuple(
        Amount(total=total, axes=divides[name]) for name, total in totals.items()
    )
