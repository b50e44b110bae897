"""Reorders the operators of a step as XLA's scheduler does."""

from collections.abc import Iterator
from dataclasses import replace

from dtft.planner.ir import Graph, Operator, region

_HEAVY = ("matmul", "convolution", "scatter")


def scheduled(graph: Graph) -> Graph:
    """Moves the operators that compute parameter gradients behind the backward pass.

    Returns the reordered program. The moved operators are backward matmuls and
    convolutions on whose results no other matmul, convolution or scatter depends. In
    each loop body, and in the program around the loops, they follow the other operators
    of the backward pass, and operators that read their results follow with them. XLA's
    scheduler delays these matmuls and convolutions to run each during the all-reduce of
    another one. Their operands stay alive until then: in a compiled perceptron, all
    activations and their cotangents are alive at once.
    """
    ends = _ends(graph)
    order = list(_ordered(graph, (), 0, len(graph.operators), ends))
    place = {number: at for at, number in enumerate(order)}
    loops = tuple(
        replace(
            loop,
            operators=(
                min(place[n] for n in range(*loop.operators)),
                max(place[n] for n in range(*loop.operators)) + 1,
            )
            if loop.operators[0] < loop.operators[1]
            else loop.operators,
        )
        for loop in graph.loops
    )
    operators = tuple(graph.operators[number] for number in order)
    return replace(graph, operators=operators, loops=loops)


def _ends(graph: Graph) -> set[int]:
    """Finds the indices of the operators that `scheduled` moves.

    These are backward matmuls and convolutions on whose results no other matmul,
    convolution or scatter depends.
    """
    leads: set[int] = set()  # values that a product reads, directly or indirectly
    ends: set[int] = set()
    size = -1
    while len(leads) > size:  # the next iteration of a loop reads carried values
        size = len(leads)
        ends = set()
        for loop in graph.loops:
            leads.update(inner for inner, outer in loop.stacked if outer in leads)
            for _, inside, out, after in loop.carried:
                if inside in leads or after in leads:
                    leads.add(out)
        for number in range(len(graph.operators) - 1, -1, -1):
            operator = graph.operators[number]
            if region(operator) == "update":
                continue
            heavy = operator.kind in _HEAVY
            if heavy or not leads.isdisjoint(operator.outputs):
                leads.update(operator.inputs)
            if heavy and leads.isdisjoint(operator.outputs) and _backward(operator):
                ends.add(number)
    return ends


def _backward(operator: Operator) -> bool:
    return region(operator) == "backward" and operator.kind != "scatter"


def _ordered(
    graph: Graph, within: tuple[int, ...], start: int, stop: int, ends: set[int]
) -> Iterator[int]:
    """Yields the indices of a loop body's (or program's) operators, in XLA's order.

    An inner loop is ordered in the same way, and its operators stay together.

    Args:
        graph: the program.
        within: indices of the loop and those around it, outermost first; () for the
            program.
        start: index of the first operator.
        stop: index after the last operator.
        ends: indices of the operators to move behind the backward pass (`_ends`).
    """
    units = list(_units(graph, within, start, stop))
    backward = [u for u in units if region(graph.operators[u[0]]) == "backward"]
    last = backward[-1][0] if backward else stop
    waiting: list[int] = []
    late: set[int] = set()
    for number, end in units:
        operator = graph.operators[number]
        if len(operator.within) > len(within):
            inside = operator.within[: len(within) + 1]
            yield from _ordered(graph, inside, number, end, ends)
        elif number <= last and (
            number in ends or not late.isdisjoint(operator.inputs)
        ):
            waiting.append(number)
            late.update(operator.outputs)
        else:
            yield number
        if number == last:
            yield from waiting
            waiting.clear()
    yield from waiting


def _units(
    graph: Graph, within: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Yields each operator and each inner loop of a loop body (or program).

    Each is given by its range of operator indices, as a pair (start, stop).
    """
    number = start
    while number < stop:
        inside = graph.operators[number].within[len(within) :]
        end = graph.loops[inside[0]].operators[1] if inside else number + 1
        yield number, end
        number = end
