"""Which part of a program is its layers, what is before and after, what crosses a cut.

A pipeline divides the layers of a program; embedding and head stay at its ends. Finds
the layers as the loop over them (a scan that parameters are sliced for) or as the run
of equal blocks with most operations. Pure; must not know meshes or schedules.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dtft.planner.blocks import Repeat
from dtft.planner.graph import Graph, Operator
from dtft.planner.groups import region

Part = Literal["first", "layers", "last"]
PARTS: tuple[Part, ...] = ("first", "layers", "last")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a step."""

    count: int
    """How many there are."""
    shares: Mapping[Part, float]
    """Of what forward and backward pass take: before, in and after the layers."""
    boundary: tuple[int, ...]
    """Values that one layer hands to the next."""
    readers: Mapping[int, frozenset[Part]]
    """For each argument which parts read it; those that none reads are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Equal layers, one after the other."""

    count: int
    start: int
    stop: int
    period: int
    """Operators of one, 0 for a loop."""
    flops: float


def find(
    graph: Graph, repeats: tuple[Repeat, ...], seconds: Callable[[Operator], float]
) -> Layers | None:
    """The layers of a step; None if it has none.

    Args:
        graph: the step, with its backward pass.
        repeats: its equal blocks (`blocks.find`).
        seconds: what an operator takes, all its executions together.
    """
    runs = [*_loops(graph), *_repeats(graph, repeats)]
    best: dict[str, _Run] = {}
    for run in runs:
        where = _region(graph, run)
        if where not in best or run.flops > best[where].flops:
            best[where] = run
    if not {"forward", "backward"} <= best.keys():
        return None
    forward, backward = best["forward"], best["backward"]
    parts = dict(_parts(graph, forward, backward))
    totals = dict.fromkeys(PARTS, 0.0)
    for number, part in parts.items():
        totals[part] += seconds(graph.operators[number])
    every = sum(totals.values())
    return Layers(
        count=forward.count,
        shares={part: total / every for part, total in totals.items()},
        boundary=_boundary(graph, forward),
        readers=_readers(graph, parts),
    )


def _loops(graph: Graph) -> Iterator[_Run]:
    """Loops that slice something as long as they are, and are in no other."""
    for loop in graph.loops:
        start, stop = loop.operators
        if start == stop or len(graph.operators[start].within) != 1:
            continue
        arguments = set(graph.inputs.values())
        if any(outer in arguments for outer, _ in loop.sliced) and loop.length > 1:
            yield _run(graph, loop.length, start, stop, 0)


def _repeats(graph: Graph, repeats: tuple[Repeat, ...]) -> Iterator[_Run]:
    for one in repeats:
        if not graph.operators[one.start].within:
            stop = one.start + one.period * one.count
            yield _run(graph, one.count, one.start, stop, one.period)


def _run(graph: Graph, count: int, start: int, stop: int, period: int) -> _Run:
    flops = sum(op.flops * op.trips for op in graph.operators[start:stop])
    return _Run(count=count, start=start, stop=stop, period=period, flops=flops)


def _region(graph: Graph, run: _Run) -> str:
    """Where most of its operations are."""
    found: dict[str, float] = {}
    for operator in graph.operators[run.start : run.stop]:
        where = region(operator)
        found[where] = found.get(where, 0.0) + operator.flops * operator.trips
    return max(found, key=lambda where: found[where])


def _parts(graph: Graph, forward: _Run, backward: _Run) -> Iterator[tuple[int, Part]]:
    """For each operator of both passes, by its number, the part that it is of."""
    for number, operator in enumerate(graph.operators):
        if region(operator) == "update":
            continue
        inside = forward.start <= number < forward.stop
        if inside or backward.start <= number < backward.stop:
            yield number, "layers"
        elif forward.stop <= number < backward.start:
            yield number, "last"
        else:
            yield number, "first"


def _boundary(graph: Graph, run: _Run) -> tuple[int, ...]:
    """What crosses from one layer to the next, where that is least."""
    if not run.period:
        (loop,) = (x for x in graph.loops if x.operators == (run.start, run.stop))
        made = {v for op in graph.operators[run.start : run.stop] for v in op.outputs}
        return tuple(after for *_, out, after in loop.carried if out in made)
    cuts = (run.start + run.period + offset for offset in range(run.period))
    ways = [_crossing(graph, cut, run.period) for cut in cuts]
    return min(ways, key=lambda values: sum(graph.values[v].num_bytes for v in values))


def _crossing(graph: Graph, cut: int, period: int) -> tuple[int, ...]:
    before = graph.operators[cut - period : cut]
    after = graph.operators[cut : cut + period]
    made = dict.fromkeys(value for op in before for value in op.outputs)
    read = {value for op in after for value in op.inputs}
    return tuple(value for value in made if value in read)


def _readers(graph: Graph, parts: Mapping[int, Part]) -> dict[int, frozenset[Part]]:
    inner = {inside: outer for loop in graph.loops for outer, inside in loop.sliced}
    arguments = set(graph.inputs.values())
    source = {index: index for index in arguments}
    found: dict[int, set[Part]] = {}
    for number, operator in enumerate(graph.operators):
        for index in operator.inputs:
            while index in inner:
                index = inner[index]
            if index not in source:
                continue
            if operator.kind == "layout":
                source |= dict.fromkeys(operator.outputs, source[index])
            elif number in parts:
                found.setdefault(source[index], set()).add(parts[number])
    return {index: frozenset(where) for index, where in found.items()}
