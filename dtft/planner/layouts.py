"""Which arrays XLA lays out anew between the loop that keeps them and the next.

Pure; must not know shardings, bytes or when anything happens.
"""

from collections import defaultdict
from collections.abc import Iterator

from dtft.planner.graph import Graph, Loop, Operator
from dtft.planner.groups import CHEAP
from dtft.planner.in_memory import InMemory


def laid_anew(graph: Graph, memory: InMemory, loop: Loop) -> Iterator[int]:
    """Arrays that get another layout before a loop goes along them.

    XLA transposes them once for all turns: what a product reads whose dims of the batch
    are not its first (queries, keys and values of [B, T, N, H]), and what the loop
    before keeps as a product makes it while this one reads it transposed. Each is there
    twice for that moment, one after the other.
    """
    read = {
        index
        for operator in graph.operators[slice(*loop.operators)]
        if operator.kind == "matmul"
        for index in _against_the_grain(graph, operator)
    }
    stacked = {outer: inner for one in graph.loops for inner, outer in one.stacked}
    readers: dict[int, set[str]] = defaultdict(set)
    for operator in graph.operators[slice(*loop.operators)]:
        for index in operator.inputs:
            readers[index].add(operator.primitive)
    for outer, inner in loop.sliced:
        if (
            inner in read
            or readers[inner] == {"transpose"}
            or _is_transposed(memory, stacked.get(outer, outer))
        ):
            yield outer


def _against_the_grain(graph: Graph, product: Operator) -> Iterator[int]:
    """Operands of a matmul whose dims of the batch are not the first ones."""
    made = graph.values[product.outputs[0]]
    rank = sum(len(graph.values[index].shape) for index in product.inputs[:2])
    for index, summed in zip(product.inputs, product.contracted, strict=False):
        dims = graph.values[index].dims
        num_batch = rank - 2 * len(summed) - len(made.dims)
        places = [place for place in range(len(dims)) if place not in summed]
        batch: list[int] = []
        for dim in made.dims[:num_batch]:
            found = [p for p in places if dims[p] == dim and p not in batch]
            batch += found[:1]
        if batch != list(range(num_batch)):
            yield index


def _is_transposed(memory: InMemory, index: int) -> bool:
    """Whether a transpose is between a value and the product that it comes of."""
    seen = False
    while (maker := memory.makers.get(index)) and maker.kind in CHEAP:
        seen = seen or maker.primitive == "transpose"
        large = memory.operands_like(index)
        if not large:
            return False
        index = large[0]
    return seen and maker is not None and maker.kind == "matmul"
