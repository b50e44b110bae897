"""Elements that are read across the order in which they lie.

The gradient of a weight comes out of its product transposed: JAX asks for the product
and a transpose. XLA makes one product of both, with its operands exchanged, unless
something stands between them: the all-reduce of a partial sum, where a mesh divides
what the product sums over. Then a compiler that keeps every array in the order of its
dims, as XLA's CPU backend does, leaves the transpose to whoever reads it: an update
that keeps two moments reads every element twice, a cache line for each, which is more
than half of a step of a small MLP that replicas train. Where the product sums over
several dims (examples and positions), XLA copies its left operand so that these come
last, and has the result in order: every array that the operand is computed of is read
so (for the gradient of GELU six). A convolution wants channels last: the gradient of a
kernel, whose channels are the examples, copies what came in. Pure; must not know
devices or meshes.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from dtft.planner.flops import SPECIAL
from dtft.planner.graph import Graph, Operator, item_bits

_SAME = ("convert_element_type", "copy", "name", "optimization_barrier")
"""Operators that leave elements where they lie, and are fused with what reads them."""
_KEPT = SPECIAL | {"div", "rem", "sqrt", "rsqrt"}
"""Functions that XLA computes once, however many read them (`IsExpensive`)."""


_NATIVE_BITS = 32
"""Narrower numbers are converted behind a product, before the transpose."""


def strided(graph: Graph) -> Mapping[int, Operator]:
    """The operators that read elements across, by number, with how many they read.

    `turned` counts those that are in order unless a product is a partial sum, `strided`
    all others, as of products in bfloat16, which are converted before the transpose.
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
    >>> found = strided(Graph(values=values, operators=(turned, scaled), dims=(),
    ...     loops=(), inputs={}, outputs={}))
    >>> {number: (one.strided, one.turned) for number, one in found.items()}
    {1: (16.0, 0.0)}
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for number, operator in enumerate(graph.operators):
        for index in set(operator.inputs):
            readers[index].append(number)
    makers = {i: op for op in graph.operators for i in op.outputs}
    found: dict[int, Operator] = {}
    in_order: set[int] = set()
    for number, operator in enumerate(graph.operators):
        if _copies_left(graph, operator):
            arrays = _fused(graph, operator.inputs[0], makers)
            size = graph.values[operator.inputs[0]].size
            found[number] = replace(operator, strided=float(size * len(arrays)))
            in_order.update(operator.outputs)
        if not _turns(graph, operator) or operator.inputs[0] in in_order:
            continue
        size = float(graph.values[operator.outputs[0]].size)
        alone = len(readers[operator.inputs[0]]) == 1
        product = makers.get(operator.inputs[0]) if alone else None
        over = _folded(graph, operator, product)
        fused = _readers(graph, operator.outputs[0], readers)
        for reader in [number] if fused is None else fused:
            known = found.get(reader, graph.operators[reader])
            found[reader] = _reading(known, size, over)
    return found


def _reading(operator: Operator, size: float, over: tuple[int, ...]) -> Operator:
    """An operator that reads more elements: across, or where `over` is divided."""
    if not over:
        return replace(operator, strided=operator.strided + size)
    dims = tuple(sorted({*operator.turned_over, *over}))
    return replace(operator, turned=operator.turned + size, turned_over=dims)


def _folded(
    graph: Graph, turned: Operator, product: Operator | None
) -> tuple[int, ...]:
    """What the product before a transpose sums over, if XLA makes one of both.

    It exchanges the operands of a product of matrices, or of stacks of them, whose rows
    become columns and that nothing else reads.

    Args:
        graph: the program.
        turned: the transpose.
        product: what makes its operand, if nothing else reads it.
    """
    if product is None or product.kind != "matmul" or len(product.contracted[0]) != 1:
        return ()
    made, after = (graph.values[op.outputs[0]] for op in (product, turned))
    ranks = {len(graph.values[index].shape) for index in product.inputs}
    if ranks != {len(made.dims)} or item_bits(made.dtype) < _NATIVE_BITS:
        return ()
    *stack, rows, columns = made.dims
    return product.summed if after.dims == (*stack, columns, rows) else ()


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
