"""Read order: how early in the forward pass each parameter is first read.

An all-gather of a parameter must end before the parameter is first read. The reduction
of its gradient can start only when the backward pass, which goes through the layers in
the opposite order, is back at this place. So both can run beside the computation
between the start of the forward pass and the first read, and beside no other.
"""

from collections.abc import Iterable, Iterator, Sequence

from dtft.planner.ir.fusion import PRODUCTS
from dtft.planner.ir.graph import Graph
from dtft.planner.ir.op_groups import region

ReadPoint = tuple[float, float]
"""A share t of the forward pass, and the share c of the bytes of all parameters that
are first read no later; 0 to 1."""


def find_read_order(graph: Graph, parameters: Iterable[int]) -> tuple[ReadPoint, ...]:
    """Finds the shares of parameters that are read early in the forward pass.

    If collectives of all parameters take S seconds and computation takes K seconds,
    the computation cannot hide the maximum of c S - t K over all points.

    Args:
        graph: a training step.
        parameters: indices of the parameters in `graph.values`.

    Returns:
        The points at which the maximum may be reached, in the order of t. The forward
        pass is measured in the operations of matmuls, convolutions and kernels. A loop
        over layers reads stacked parameters one layer at a time. If no operator of a
        forward pass reads a parameter, the only point is (1, 1).

    >>> import jax
    >>> from dtft.planner.ir import trace
    >>> def loss(p, x):
    ...     return (x @ p["a"] @ p["b"] @ p["c"]).sum()
    >>> side = jax.ShapeDtypeStruct((8, 8), "f4")
    >>> graph = trace(jax.value_and_grad(loss), dict.fromkeys("abc", side), side)
    >>> points = find_read_order(graph, [graph.inputs[f"0/{name}"] for name in "abc"])
    >>> [(round(t, 2), round(c, 2)) for t, c in points]
    [(0.0, 0.33), (0.67, 1.0)]
    """
    sizes = {index: graph.values[index].num_bytes for index in parameters}
    reads = sorted(
        (at, share * sizes[index]) for index, at, share in _first_reads(graph, sizes)
    )
    total = sum(num_bytes for _, num_bytes in reads)
    if not total:
        return ((1.0, 1.0),)
    points, read = dict[float, float](), 0.0
    for at, num_bytes in reads:
        read += num_bytes
        points[at] = read / total
    return _upper_hull(list(points.items()))


def _first_reads(
    graph: Graph, parameters: Iterable[int]
) -> Iterator[tuple[int, float, float]]:
    """Yields (parameter, t, share): the share of the parameter first read at time t.

    Times are shares of the forward pass. A parameter that a loop slices has two
    entries: its first slice, and all other slices at the time of the last one.
    Operators that only cast or move a parameter do not read it.
    """
    inner = {inside: outer for loop in graph.loops for outer, inside in loop.sliced}
    source: dict[int, tuple[int, int | None]] = {
        index: (index, None) for index in parameters
    }
    first: dict[int, tuple[float, int | None]] = {}
    starts, ends, done = dict[int, float](), dict[int, float](), 0.0
    for operator in graph.operators:
        if region(operator) != "forward":
            continue
        loop = operator.within[0] if operator.within else None
        begin = done if loop is None else starts.setdefault(loop, done)
        for index in operator.inputs:
            outer = index
            while outer in inner:
                outer = inner[outer]
            if outer not in source:
                continue
            parameter, sliced = source[outer]
            sliced = loop if outer != index else sliced
            if operator.kind == "layout":
                source |= dict.fromkeys(operator.outputs, (parameter, sliced))
            else:
                first.setdefault(parameter, (begin, sliced))
        if operator.kind in PRODUCTS:
            done += operator.flops * operator.trips
        if loop is not None:
            ends[loop] = done
    if not done:
        return
    for parameter, (begin, loop) in first.items():
        if loop is None:
            yield parameter, begin / done, 1.0
            continue
        one = 1 / graph.loops[loop].length
        yield parameter, begin / done, one
        yield parameter, (begin + (ends[loop] - begin) * (1 - one)) / done, 1 - one


def _upper_hull(points: Sequence[ReadPoint]) -> tuple[ReadPoint, ...]:
    """Returns the points that no line between two others is above, in order of t.

    Args:
        points: points in ascending order of t and c, each t once.
    """
    found: list[ReadPoint] = []
    for t, c in points:
        while len(found) > 1:
            (t1, c1), (t2, c2) = found[-2:]
            if (c2 - c1) * (t - t1) > (c - c1) * (t2 - t1):
                break
            found.pop()
        found.append((t, c))
    return tuple(found)
