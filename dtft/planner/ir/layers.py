"""Finds the layers of a step that a pipeline divides.

A pipeline divides the layers of a program over its stages. Embedding and head stay on
the first and the last stage. The layers are either the iterations of a loop (a scan
that slices the weights of one layer at a time), or equal blocks one after another. If a
program has several such loops or runs of blocks, the one with the most operations has
the layers.

Weights are parameters, and values that are computed from parameters without the batch,
such as casts, scaled parameters and stacked parameters. A loop of the backward pass may
slice weights that the forward pass has computed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from dtft.planner.ir.graph import CountedLoop, Graph, Operator
from dtft.planner.ir.op_groups import region
from dtft.planner.ir.repeats import Repeat

Part = Literal["first", "layers", "last"]
PARTS: tuple[Part, ...] = ("first", "layers", "last")


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """The layers of a step, and the parts before and after the layers.

    Part `first` lies before the layers of the forward pass, and after the layers of the
    backward pass. Part `last` lies between the layers of the forward pass and the
    layers of the backward pass.
    """

    count: int
    """The number of layers."""
    shares: Mapping[Part, float]
    """Each part's share of the time of the forward and backward pass."""
    boundary: tuple[int, ...]
    """Numbers of the values that one layer passes to the next layer."""
    readers: Mapping[int, frozenset[Part]]
    """Map from the number of a parameter's value to the parts whose forward pass reads
    the parameter, or weights computed from it. For a parameter that only the backward
    pass reads, the parts are those of the backward pass. Parameters that neither pass
    reads are left out."""
    parts: Mapping[int, Part]
    """Map from the number of each operator of the forward and backward pass to its
    part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerRun:
    """A run of equal layers, one after another, or a loop over layers.

    Its operators have the numbers from `start` to below `stop`.
    """

    count: int
    start: int
    stop: int
    flops: float
    period: int = 0
    """The number of operators of one layer; 0 for a loop."""
    loop: CountedLoop | None = None


def find_layers(
    graph: Graph,
    repeats: tuple[Repeat, ...],
    seconds: Callable[[int], float],
    *,
    parameters: Iterable[int],
    batch: Iterable[int],
) -> LayerStack | None:
    """Finds the layers of a step; None if forward or backward pass has no layers.

    Args:
        graph: the step, with its backward pass.
        repeats: its equal blocks, which `find_repeats` finds.
        seconds: function from the number of an operator to the seconds of all its
            executions in a step.
        parameters: numbers of the values that are parameters.
        batch: numbers of the values of the batch.
    """
    parameters, batch = frozenset(parameters), frozenset(batch)
    weights = graph.descendants(parameters) - graph.descendants(batch)
    examples = {dim for index in batch for dim in graph.values[index].dims}
    runs = [*_loops(graph, weights, examples), *_repeats(graph, repeats)]
    best: dict[str, _LayerRun] = {}
    for run in runs:
        where = _region(graph, run)
        if where not in best or run.flops > best[where].flops:
            best[where] = run
    if not {"forward", "backward"} <= best.keys():
        return None
    forward, backward = best["forward"], best["backward"]
    parts = dict(_parts(graph, forward, backward))
    parts |= _parts_of_weights(graph, parts, weights)
    parts |= dict.fromkeys(_of_gradients(graph, parts, backward, examples), "layers")
    totals = dict.fromkeys(PARTS, 0.0)
    for number, part in parts.items():
        totals[part] += seconds(number)
    every = sum(totals.values())
    return LayerStack(
        count=forward.count,
        shares={part: total / every for part, total in totals.items()},
        boundary=_boundary(graph, forward),
        readers=_readers(graph, parts, weights, parameters),
        parts=parts,
    )


def _loops(
    graph: Graph, weights: AbstractSet[int], examples: AbstractSet[int]
) -> Iterator[_LayerRun]:
    """Yields the loops that may be loops over layers.

    These are outermost loops with two or more iterations that slice weights. Loops over
    a dim of the batch, such as time, are no loops over layers.

    Args:
        graph: the step.
        weights: numbers of the values that are weights.
        examples: the dims of the batch.
    """
    for number, loop in enumerate(graph.loops):
        start, stop = loop.operators
        if start == stop or graph.operators[start].within[0] != number:
            continue
        sliced = (outer for outer, _ in loop.sliced if outer in weights)
        along = {graph.values[outer].dims[0] for outer in sliced}
        if loop.length > 1 and along and along.isdisjoint(examples):
            flops = _flops(graph, start, stop)
            yield _LayerRun(
                count=loop.length, start=start, stop=stop, flops=flops, loop=loop
            )


def _repeats(graph: Graph, repeats: tuple[Repeat, ...]) -> Iterator[_LayerRun]:
    for one in repeats:
        if not graph.operators[one.start].within:
            start, stop = one.start, one.start + one.period * one.count
            flops = _flops(graph, start, stop)
            yield _LayerRun(
                count=one.count, start=start, stop=stop, flops=flops, period=one.period
            )


def _flops(graph: Graph, start: int, stop: int) -> float:
    return sum(op.flops * op.trips for op in graph.operators[start:stop])


def _region(graph: Graph, run: _LayerRun) -> str:
    """Returns the part of the step (forward, backward or update) that a run is in.

    If the run is in several parts, returns the part with most of its floating-point
    operations.
    """
    found: dict[str, float] = {}
    for operator in graph.operators[run.start : run.stop]:
        where = region(operator)
        found[where] = found.get(where, 0.0) + operator.flops * operator.trips
    return max(found, key=lambda where: found[where])


def _parts(
    graph: Graph, forward: _LayerRun, backward: _LayerRun
) -> Iterator[tuple[int, Part]]:
    """Yields the number and the part of each operator of the forward and backward pass.

    Part `layers` has the layers of both passes (`forward` and `backward`), `last` the
    operators between both, and `first` the operators before and after them.
    """
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


def _boundary(graph: Graph, run: _LayerRun) -> tuple[int, ...]:
    """Returns the numbers of the values that cross from one layer to the next.

    For a loop, these are the final values of its carry, without carried values that the
    body returns unchanged. For other layers, a layer is cut where the fewest bytes
    cross, and these are the values that cross the cut.
    """
    if run.loop is not None:
        return tuple(after for _, into, out, after in run.loop.carried if out != into)
    cuts = (run.start + run.period + offset for offset in range(run.period))
    ways = [_crossing(graph, cut, run.period) for cut in cuts]
    return min(ways, key=lambda values: sum(graph.values[v].num_bytes for v in values))


def _crossing(graph: Graph, cut: int, period: int) -> tuple[int, ...]:
    before = graph.operators[cut - period : cut]
    after = graph.operators[cut : cut + period]
    made = dict.fromkeys(value for op in before for value in op.outputs)
    read = {value for op in after for value in op.inputs}
    return tuple(value for value in made if value in read)


def _forward_readers(graph: Graph) -> dict[int, list[int]]:
    """Maps each value to the numbers of the forward operators that read the value.

    An operator in a loop that reads a slice of a value counts as a reader of the value.
    """
    outer = {inside: outside for loop in graph.loops for outside, inside in loop.sliced}
    found: dict[int, list[int]] = defaultdict(list)
    for number, operator in enumerate(graph.operators):
        if region(operator) == "forward":
            for index in operator.inputs:
                found[_outermost(outer, index)].append(number)
    return found


def _outermost(outer: Mapping[int, int], index: int) -> int:
    while index in outer:
        index = outer[index]
    return index


def _parts_of_weights(
    graph: Graph, parts: Mapping[int, Part], weights: AbstractSet[int]
) -> dict[int, Part]:
    """Finds the parts of the operators that compute weights, such as casts.

    Returns a map from the number of each such operator to the part that reads its
    results, wherever the program has the operator. Operators in loops, and operators
    whose results no part or several parts read, are left out.

    Args:
        graph: the step.
        parts: map from the number of an operator to the part (`first`, `layers` or
            `last`) that it lies in by its position in the program.
        weights: numbers of the values that are weights.
    """
    readers = _forward_readers(graph)
    found: dict[int, Part] = {}
    for number in reversed(range(len(graph.operators))):
        operator = graph.operators[number]
        if operator.within or not _computes_weights(operator, weights):
            continue
        read: set[Part] = {
            found.get(reader, parts[reader])
            for index in operator.outputs
            for reader in readers.get(index, ())
        }
        if len(read) == 1:
            found[number] = read.pop()
    return found


def _computes_weights(operator: Operator, weights: AbstractSet[int]) -> bool:
    """Whether an operator of the forward pass computes weights and nothing else."""
    is_forward = region(operator) == "forward"
    return is_forward and all(index in weights for index in operator.outputs)


def _of_gradients(
    graph: Graph,
    parts: Mapping[int, Part],
    backward: _LayerRun,
    examples: AbstractSet[int],
) -> Iterator[int]:
    """Yields the operators that read only gradients of the layers' weights.

    These are operators, such as casts and sums, that the program has after the layers
    of the backward pass. They are given by their numbers.

    Args:
        graph: the step.
        parts: the part of each operator of the forward and backward pass.
        backward: the layers of the backward pass.
        examples: the dims of the batch, which gradients of weights do not have.
    """
    outer = {
        inside: outside for loop in graph.loops for inside, outside in loop.stacked
    }
    outer |= {out: after for loop in graph.loops for _, _, out, after in loop.carried}
    known: set[int] = set()
    for number, operator in enumerate(graph.operators):
        if number < backward.start or number not in parts:
            continue
        after = number >= backward.stop
        if after and not (operator.inputs and known.issuperset(operator.inputs)):
            continue
        if after:
            yield number
        known |= {
            made
            for index in operator.outputs
            for made in (index, _outermost(outer, index))
            if examples.isdisjoint(graph.values[made].dims)
        }


def _readers(
    graph: Graph,
    parts: Mapping[int, Part],
    weights: AbstractSet[int],
    parameters: AbstractSet[int],
) -> dict[int, frozenset[Part]]:
    """Maps each parameter to the parts of the step that read it (`LayerStack.readers`).

    An operator that computes weights from a parameter does not count as a reader: the
    parts that read its results count as readers of the parameter.

    Args:
        graph: the step.
        parts: map from the number of an operator of the forward or backward pass to its
            part (`first`, `layers` or `last`).
        weights: numbers of the values that are weights.
        parameters: numbers of the values that are parameters.
    """
    outer = {inside: outside for loop in graph.loops for outside, inside in loop.sliced}
    source = {index: frozenset((index,)) for index in parameters}
    found: dict[str, dict[int, set[Part]]] = {
        "forward": defaultdict(set), "backward": defaultdict(set)
    }  # fmt: skip
    for number, operator in enumerate(graph.operators):
        if number not in parts:
            continue
        inputs = (_outermost(outer, index) for index in operator.inputs)
        read = {one for index in inputs for one in source.get(index, ())}
        if not _computes_weights(operator, weights):
            for index in read:
                found[region(operator)][index].add(parts[number])
            continue
        # A number, such as a sum of squares in the loss, is no parameter to keep.
        wide = (index for index in operator.outputs if graph.values[index].size > 1)
        source |= dict.fromkeys(wide, frozenset(read))
    return {
        index: frozenset(where)
        for index, where in (found["backward"] | found["forward"]).items()
    }
