"""Elements that are read across the order in which they lie.

The gradient of a weight comes out of its product transposed: JAX asks for the product
and a transpose. A compiler that keeps every array in the order of its dims, as XLA's
CPU backend does, leaves the transpose to whoever reads it: an update that keeps two
moments reads every element twice, a cache line for each, which is more than half of a
step of a small MLP whose weights are not divided. Where the product sums over several
dims (examples and positions), XLA copies its left operand so that these come last, and
has the result in order: every array that the operand is computed of is read so (for
the gradient of GELU six). A convolution wants channels last: the gradient of a kernel,
whose channels are the examples, copies what came in. Pure; must not know devices or
meshes.
"""

from collections import defaultdict
from collections.abc import Mapping

from dtft.planner.flops import SPECIAL
from dtft.planner.graph import Graph, Operator

_SAME = ("convert_element_type", "copy", "name", "optimization_barrier")
"""Operators that leave elements where they lie, and are fused with what reads them."""
_KEPT = SPECIAL | {"div", "rem", "sqrt", "rsqrt"}
"""Functions that XLA computes once, however many read them (`IsExpensive`)."""


def strided(graph: Graph) -> Mapping[int, float]:
    """Elements of one execution, by the number of the operator that reads them.

    Each element-wise operator that reads what was transposed has all of its elements;
    of what only leaves its loop or the program, the transpose itself. Products read
    both orders as fast, unless they sum over several dims: then all elements of the
    left operand are theirs, times the arrays that it is computed of there. What keeps
    the last dim is copied line by line.

    >>> from dtft.planner.graph import Value
    >>> values = tuple(Value(shape=s, dtype="float32", dims=d) for s, d in
    ...     (((2, 8), (0, 1)), ((8, 2), (1, 0)), ((8, 2), (1, 0))))
    >>> turned, scaled = (Operator(primitive=p, kind=k, inputs=(n,), outputs=(n + 1,),
    ...     flops=0.0, trips=1) for n, (p, k) in
    ...     enumerate((("transpose", "layout"), ("mul", "elementwise"))))
    >>> strided(Graph(values=values, operators=(turned, scaled), dims=(), loops=(),
    ...     inputs={}, outputs={}))
    {1: 16.0}
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for number, operator in enumerate(graph.operators):
        for index in set(operator.inputs):
            readers[index].append(number)
    makers = {i: op for op in graph.operators for i in op.outputs}
    found: dict[int, float] = defaultdict(float)
    in_order: set[int] = set()
    for number, operator in enumerate(graph.operators):
        if _copies_left(graph, operator):
            found[number] += float(
                graph.values[operator.inputs[0]].size
                * len(_fused(graph, operator.inputs[0], makers))
            )
            in_order.update(operator.outputs)
        if not _turns(graph, operator) or operator.inputs[0] in in_order:
            continue
        size = float(graph.values[operator.outputs[0]].size)
        fused = _readers(graph, operator.outputs[0], readers)
        for reader in [number] if fused is None else fused:
            found[reader] += size
    return dict(found)


def _copies_left(graph: Graph, operator: Operator) -> bool:
    """Whether a product needs the summed dims of its left operand where they are not:
    all of them last. A matmul that sums over a single dim takes it anywhere.
    """
    places = operator.contracted[0]
    least = {"matmul": 2, "convolution": 1}.get(operator.kind)
    if least is None or len(places) < least:
        return False
    last = len(graph.values[operator.inputs[0]].shape)
    return sorted(places) != list(range(last - len(places), last))


def _fused(graph: Graph, index: int, makers: Mapping[int, Operator]) -> set[int]:
    """Arrays that are read where a value is copied into another order: what makes it
    element by element is computed in the copy, anew where others need it in order. Only
    functions that cost more than a few operations are not.
    """
    size, read, seen, open_ = graph.values[index].size, set[int](), {index}, [index]
    while open_:
        one = open_.pop()
        maker = makers.get(one)
        if maker is None or not _is_fused(maker):
            read.add(one)
            continue
        large = {i for i in maker.inputs if graph.values[i].size == size}
        open_ += large - seen
        seen |= large
    return read or {index}


def _is_fused(maker: Operator) -> bool:
    if maker.kind == "elementwise":
        return maker.primitive not in _KEPT
    return maker.primitive in (*_SAME, "broadcast_in_dim")  # what it reads is small


def _turns(graph: Graph, operator: Operator) -> bool:
    """Whether another dim than before has its elements side by side."""
    if operator.primitive != "transpose":
        return False
    before, after = (
        [dim for dim, size in zip(value.dims, value.shape, strict=True) if size > 1]
        for value in (
            graph.values[operator.inputs[0]],
            graph.values[operator.outputs[0]],
        )
    )
    return before[-1:] != after[-1:]


def _readers(
    graph: Graph, index: int, readers: Mapping[int, list[int]]
) -> list[int] | None:
    """Element-wise operators that read a value as it lies; None: nothing reads it."""
    if not readers.get(index):
        return None
    found = []
    for number in readers[index]:
        operator = graph.operators[number]
        if operator.kind == "elementwise":
            found.append(number)
        elif operator.primitive in _SAME:
            further = _readers(graph, operator.outputs[0], readers)
            found += [number] if further is None else further
    return found
