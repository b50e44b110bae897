"""Read order: how early in the forward pass each parameter is first read.

An all-gather of a parameter must end before the parameter is first read. The backward
pass goes through the layers in the opposite order, so the reduction of the parameter's
gradient can start only after the backward pass of the operator of the first read. So
computation between the start of the forward pass and the first read can hide the
all-gather, and the backward pass of this computation can hide the reduction. No other
computation can hide either collective.

Operators that compute from parameters alone do not count as readers: casts, scales,
merged adapters, penalties on weights. These operators can run as late as their results
are needed. The first read is the first operator that combines a parameter, or a result
of these operators, with activations.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from dtft.planner.ir.fusion import PRODUCTS
from dtft.planner.ir.graph import Graph, Operator
from dtft.planner.ir.op_groups import region

ReadPoint = tuple[float, float]
"""A share t of the forward pass, and the share c of the bytes of all parameters that
are first read no later; 0 to 1."""


def find_read_order(
    graph: Graph, parameters: Collection[int], frozen: Container[int] = ()
) -> tuple[ReadPoint, ...]:
    """Finds which share of the parameters is read by which time of the forward pass.

    A point (t, c) says: after the share t of the forward pass, the share c of the bytes
    of all parameters has been read. If collectives of all parameters take S seconds and
    the computation takes K seconds, as many seconds of the collectives cannot be hidden
    as the largest c S - t K of all points.

    Args:
        graph: a training step.
        parameters: indices of the parameters in `graph.values`.
        frozen: the parameters that get no gradient; their bytes do not count.

    Returns:
        The points at which c S - t K may be largest, in the order of t. The forward
        pass is measured in the operations of matmuls, convolutions and kernels. A loop
        over layers reads stacked parameters one layer at a time. If no operator of a
        forward pass reads a parameter, the only point is (1, 1).

    In the example, a third of the bytes is read at the start, and all bytes are read
    after two of the three matmuls. The point (1/3, 2/3) lies on the line between these
    two points, so it is left out.

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
        (at, share * sizes[index])
        for index, at, share in _first_reads(graph, parameters)
        if index not in frozen
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
    graph: Graph, parameters: Collection[int]
) -> Iterator[tuple[int, float, float]]:
    """Yields (parameter, t, share) for the first read of each parameter.

    t is the time of the read, as a share (0 to 1) of the operations of the forward
    pass. `share` is the share of the parameter's bytes that is read then: 1, unless a
    loop slices the parameter. Such a parameter has two entries: one for its first
    slice, and one for all other slices, at the time of the last slice. Yields nothing
    if the forward pass has no matmul, convolution or kernel with operations.
    """
    first: dict[int, tuple[float, int | None]] = {}
    starts, ends, done = dict[int, float](), dict[int, float](), 0.0
    made = set[int]()
    for number, operator, weights in _readers(graph, parameters):
        loop = operator.within[0] if operator.within else None
        begin = done if loop is None else starts.setdefault(loop, done)
        for parameter, sliced in weights.parameters.items():
            first.setdefault(parameter, (begin, sliced))
        products = {*weights.products, number} - made
        made |= products
        done += sum(_product_flops(graph.operators[at]) for at in products)
        if loop is not None:
            ends[loop] = done
    if not done:
        return
    for parameter, (begin, loop) in first.items():
        if loop is None:
            yield parameter, begin / done, 1.0
            continue
        length = graph.loops[loop].length
        if not length:  # the loop takes no slice
            continue
        one = 1 / length
        yield parameter, begin / done, one
        yield parameter, (begin + (ends[loop] - begin) * (1 - one)) / done, 1 - one


def _product_flops(operator: Operator) -> float:
    return operator.flops * operator.trips if operator.kind in PRODUCTS else 0.0


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """Parameters and products from which a batch-independent value is computed.

    Products are matmuls, convolutions and kernels.
    """

    parameters: Mapping[int, int | None]
    """Map from a parameter to the outermost loop that reads it slice by slice; None if
    it is read whole."""
    products: frozenset[int] = frozenset()
    """Numbers of the matmuls and other products among the operators that compute it."""

    def __or__(self, other: Self) -> "_Weights":
        return _Weights(
            parameters={**self.parameters, **other.parameters},
            products=self.products | other.products,
        )


_NOTHING = _Weights(parameters={})


def _readers(
    graph: Graph, parameters: Collection[int]
) -> Iterator[tuple[int, Operator, _Weights]]:
    """Yields the operators of the forward pass that depend on the batch.

    Each is yielded with its number and with the parameters that it reads, directly or
    through operators that do not depend on the batch.
    """
    moved = {inside: outer for loop in graph.loops for outer, inside in loop.sliced}
    origin = {**moved, **_loop_origins(graph)}
    data = _batch_dependent(graph, parameters)
    known = {index: _Weights(parameters={index: None}) for index in parameters}

    def weights_of(index: int, loop: int | None) -> _Weights:
        sliced = False
        while index not in known and index in origin:
            sliced |= index in moved
            index = origin[index]
        found = known.get(index, _NOTHING)
        marks = found.parameters.items()
        # Outside of the loop that slices a parameter, its slices are one whole.
        return _Weights(
            parameters={p: loop if sliced or by == loop else None for p, by in marks},
            products=found.products,
        )

    for number, operator in enumerate(graph.operators):
        if operator.unread:
            continue
        loop = operator.within[0] if operator.within else None
        weights = _NOTHING
        for index in set(operator.inputs) - data:
            weights |= weights_of(index, loop)
        if data.isdisjoint(operator.inputs):
            if operator.kind in PRODUCTS:
                weights |= _Weights(parameters={}, products=frozenset((number,)))
            known |= dict.fromkeys(operator.outputs, weights)
        elif region(operator) == "forward":
            yield number, operator, weights


def _loop_origins(graph: Graph) -> dict[int, int]:
    """Maps the carried and stacked values of loops to the values that they come from.

    A carried value in the body comes from the value before the loop. A value after the
    loop, carried or stacked, comes from a result of the body. Values are given by their
    index in `Graph.values`.
    """
    found = {outer: inside for loop in graph.loops for inside, outer in loop.stacked}
    for loop in graph.loops:
        for before, into, out, after in loop.carried:
            found |= {into: before, after: out}
    return found


def _batch_dependent(graph: Graph, parameters: Collection[int]) -> set[int]:
    """Finds the values that depend on more than parameters and constants.

    These are all values that are computed from arguments other than parameters, or from
    arrays that no operator makes (arrays of a `shard_map`). Values and parameters are
    given by their index in `Graph.values`.
    """
    made = {index for operator in graph.operators for index in operator.outputs}
    made.update(index for some in graph.successors.values() for index in some)
    alone = {n for n, value in enumerate(graph.values) if value.size > 1} - made
    return graph.descendants((alone | set(graph.inputs.values())) - set(parameters))


def _upper_hull(points: Sequence[ReadPoint]) -> tuple[ReadPoint, ...]:
    """Returns the upper convex hull of points, in order of t.

    Leaves out each point on or below a line between two other points.

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
