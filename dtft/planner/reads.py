"""Which arguments the model reads, and in how many of its passes.

Follows an argument through loops and through what only lays it out anew. Pure; must not
know what an argument is for.
"""

from dtft.planner.graph import Graph
from dtft.planner.groups import region


def passes(graph: Graph) -> dict[int, int]:
    """For each argument, by how many passes (forward, backward) it is read.

    Reading it converted, transposed or slice by slice counts as reading it. What a loop
    reads as it is, in every turn, is kept for the loop of the backward pass.

    Args:
        graph: of a step.

    Returns:
        Number of each argument's value to that of the passes.
    """
    source = {index: index for index in graph.inputs.values()}
    sliced = {inner: outer for loop in graph.loops for outer, inner in loop.sliced}
    carried = {inside: a for loop in graph.loops for a, inside, _, _ in loop.carried}
    stacked = {inner: outer for loop in graph.loops for inner, outer in loop.stacked}
    read: dict[int, set[str]] = {index: set() for index in source}
    by_turns: set[int] = set()
    for operator in graph.operators:
        for index in operator.inputs:
            outer = index
            while outer in sliced or outer in carried:
                outer = sliced.get(outer, carried.get(outer, outer))
            if outer not in source:
                continue
            source[index] = source[outer]
            if outer != index:
                by_turns.add(index)
            if operator.kind == "layout":
                made = {v for o in operator.outputs for v in (o, stacked.get(o, o))}
                source |= dict.fromkeys(made, source[outer])
                by_turns |= made if index in by_turns else set()
            elif region(operator) != "update":
                kept = operator.within and index not in by_turns
                read[source[outer]].add("forward" if kept else region(operator))
    return {index: len(regions) for index, regions in read.items()}


def read_by_model(graph: Graph) -> set[int]:
    """Arguments that the forward or backward pass reads as they are, or in slices."""
    inner = {inside: outer for loop in graph.loops for outer, inside in loop.sliced}
    found: set[int] = set()
    for operator in graph.operators:
        if region(operator) != "update":
            for index in operator.inputs:
                while index in inner:
                    index = inner[index]
                found.add(index)
    return found & set(graph.inputs.values())
