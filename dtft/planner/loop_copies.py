"""What loops copy: slices of stacked arrays on the way in, results on the way out.

A scan over layers keeps weights, residuals and gradients as stacks. XLA fills a stack
with zeros before the loop, copies each turn's result into it, and copies each turn's
part out where an operator that is no fused loop reads it. No equation of the program
says so, but it is as much memory traffic as many element-wise operators: two fifths of
a step of a small scanned transformer on CPU. Pure; must not know devices or meshes.
"""

from collections.abc import Container, Iterator

from dtft.planner.graph import Graph, Operator


def loop_copies(graph: Graph, fused: Container[str]) -> Iterator[tuple[Operator, int]]:
    """Stand-ins for the copies, each as an operator that reads and writes a part.

    Args:
        graph: the program.
        fused: kinds of operators that read a part in place.

    Yields:
        An operator, and how often it reads or writes the part's bytes in one run.
    """
    copied = {
        index
        for operator in graph.operators
        if operator.kind not in fused
        for index in operator.inputs
    }
    for loop in graph.loops:
        start, end = loop.operators
        if start == end:
            continue
        first = graph.operators[start]
        for _, part in loop.sliced:
            if part in copied:
                yield _copy(first, part, "dynamic_slice"), 2
        for part, _ in loop.stacked:  # filled, read, written
            yield _copy(first, part, "dynamic_update_slice"), 3


def _copy(first: Operator, part: int, primitive: str) -> Operator:
    """In the loop that begins with an operator: of its trips, in its pass."""
    return Operator(
        primitive=primitive,
        kind="layout",
        inputs=(part,),
        outputs=(part,),
        flops=0.0,
        trips=first.trips,
        within=first.within,
        name=first.name,
    )
