"""Sizes of matmuls and convolutions: of each device's part.

Pure; must not know how the division was found or what a matmul costs.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set

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


def convolution_sides(
    operator: Operator,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    root: Callable[[int], int],
    kept: Mapping[str, int | None],
) -> tuple[Amount, Amount] | None:
    """Columns of a convolution, seen as a product of patches (the kernel's results),
    and its depth at each place of the kernel (the channels in).

    In the backward pass the array in the kernel's place counts.

    Args:
        operator: of any kind; None for what is no convolution.
        inputs: its operands.
        outputs: its results.
        root: dim to the dim that stands for it.
        kept: axis to the dim along which it divides the work.
    """
    if operator.kind != "convolution" or len(inputs) < 2:
        return None
    right, made = inputs[1], outputs[0]
    sizes = dict(zip(map(root, right.dims), right.shape, strict=True))
    shared = sizes.keys() & set(map(root, made.dims))

    def along(dims: Set[int | None]) -> tuple[str, ...]:
        return tuple(axis for axis, dim in kept.items() if dim in dims)

    columns = Amount(
        total=math.prod(sizes[dim] for dim in shared), axes=along({*shared})
    )
    places = operator.contracted[1]
    deep = {root(right.dims[place]) for place in places}
    depth = math.prod(right.shape[place] for place in places)
    return columns, Amount(total=depth, axes=along({*deep}))
