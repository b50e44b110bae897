"""Splits a plan's compute seconds by kind of work, and finds the slowest operators.

The kinds (`ComputeKind`) are matmuls and convolutions, attention, operators that XLA
fuses, and all others.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import get_args

from dtft.planner.cluster import DeviceType
from dtft.planner.cost import at_peak_s, computing_s, runs
from dtft.planner.ir import ATTENTION, CHEAP, PRODUCTS, Graph, OpGroup, region
from dtft.planner.plan import ComputeKind, ComputeShare
from dtft.planner.search.search import PlanSearch
from dtft.planner.search.space import SearchCandidate
from dtft.planner.spmd import MICRO, OperatorWork, ShardingAssignment, Sizes
from dtft.planner.types import Remat
from dtft.planner.wording import layered
from dtft.planner.workload import Workload, gradients, sources

NUM_DEAREST = 5
"""Number of operators that a plan lists with their seconds."""


def attention_scores(question: Workload) -> dict[frozenset[int], tuple[int, ...]]:
    """Finds the arrays of a program that are attention scores.

    Scores are the result of a batched matmul, and larger than both of its operands. A
    softmax reduces the rows of the scores, and another batched matmul reads the scores.

    Returns:
        Map from the set of the scores' dims to the sizes of these dims, ascending,
        without dims of size 1.
    """
    graph = question.graph
    made: dict[frozenset[int], tuple[int, ...]] = {}
    reduced: set[frozenset[int]] = set()
    contracted: set[frozenset[int]] = set()
    for operator in graph.operators:
        if operator.unread or not operator.inputs:
            continue
        first = graph.values[operator.inputs[0]]
        if operator.kind == "reduction" and len(operator.summed) == 1:
            reduced.add(_roots(question, first.dims))
        if operator.kind != "matmul":
            continue
        inputs = [graph.values[index] for index in operator.inputs[:2]]
        result = graph.values[operator.outputs[0]]
        ranks = sum(len(one.shape) for one in inputs) - 2 * len(operator.contracted[0])
        if ranks == len(result.shape):  # no matmul of a batch: a projection
            continue
        contracted |= {_roots(question, one.dims) for one in inputs}
        if result.size > max(one.size for one in inputs):
            shape = (size for size in result.shape if size > 1)
            made[_roots(question, result.dims)] = tuple(sorted(shape))
    return {
        dims: shape
        for dims, shape in made.items()
        if dims in reduced and dims in contracted and len(dims) > 2
    }


def without_scores(question: Workload) -> Workload:
    """Returns a workload whose attention scores take no memory.

    So the workload costs as much as with a fused kernel of attention, which keeps
    scores on the chip. Its matmuls and the operations of its softmax stay. The scores
    get JAX's dtype `float0`, whose elements have no bytes.
    """

    def hidden(one: Workload) -> Graph:
        graph, scores = one.graph, attention_scores(one)
        found = {
            index
            for index, value in enumerate(graph.values)
            if _roots(one, value.dims) in scores
        }
        for loop in graph.loops:
            found.update(outer for inner, outer in loop.stacked if inner in found)
        values = tuple(
            replace(value, dtype="float0") if index in found else value
            for index, value in enumerate(graph.values)
        )
        return replace(graph, values=values)

    def again(remat: Remat) -> Graph:
        return hidden(question.rematerialized(remat))

    return replace(
        question,
        graph=hidden(question),
        again=None if question.again is None else again,
    )


def _roots(question: Workload, dims: Iterable[int]) -> frozenset[int]:
    """Replaces each dim by the one dim that represents its like in all equal layers."""
    return frozenset(map(question.root, dims))


def arrays_of(question: Workload, group: OpGroup) -> set[frozenset[int]]:
    """Returns the arrays of a group's operator, each as the set of its dims.

    These are the arrays that the operator reads or writes. A dim is a number, and the
    same dim has the same number in every array of the program. A dim of a repeated
    layer is replaced by the one that stands for it in all equal layers
    (`Workload.root`), so an array of one layer and the same array of an equal layer
    give the same set.
    """
    values, operator = question.graph.values, group.operator
    indices = (*operator.inputs, *operator.outputs)
    return {_roots(question, values[index].dims) for index in indices}


def group_s(
    graph: Graph, device: DeviceType, group: OpGroup, work: OperatorWork, sizes: Sizes
) -> float:
    """Computes the seconds per step that a device spends on a group of operators.

    Args:
        graph: the program.
        device: the device type.
        group: operators of equal cost, or operators that XLA fuses (`OpGroup`).
        work: the work of one device in one execution of the operator that represents
            the group.
        sizes: sizes of the mesh axes, and the number of microbatches.
    """
    once_s = computing_s(
        graph, device, work, sizes, cold=group.uncached, moved=group.moved
    )
    return float(once_s) * group.times * runs(work, sizes)


def compute_split(
    search: PlanSearch,
    candidate: SearchCandidate,
    division: ShardingAssignment,
    total_s: float,
) -> tuple[dict[ComputeKind, float], tuple[ComputeShare, ...]]:
    """Splits the compute seconds of a candidate by kind of work (`ComputeKind`).

    The operators of the optimizer update are left out.

    Args:
        search: the search, with the program and the devices.
        candidate: the mesh and the values of the knobs (other settings).
        division: which mesh axes divide which dims.
        total_s: the candidate's predicted seconds of compute; the kinds of work are
            scaled to this sum.

    Returns:
        Seconds per step by kind of work, and the 5 operators (`NUM_DEAREST`) that take
        most seconds.
    """
    question, device = search.question, search.pool.device
    sizes = {**candidate.mesh, MICRO: candidate.knobs.microbatches}
    scores = attention_scores(question).keys()
    source = sources(question.graph)
    paths = {index: path for path, index in question.graph.inputs.items()}
    made = gradients(question)
    kinds: dict[ComputeKind, float] = defaultdict(float)
    each: dict[str, float] = defaultdict(float)
    for group, done in search.works(division):
        if group.region == "update":
            continue
        seconds = group_s(question.graph, device, group, done, sizes)
        is_attention = not scores.isdisjoint(arrays_of(question, group))
        kinds[_kind(group, is_attention)] += seconds
        path = made.get(group.operator.outputs[0]) if group.operator.outputs else None
        if path is not None and group.operator.kind in PRODUCTS:
            each[f"gradient of {layered(path)}"] += seconds
        else:
            name = _name(question.graph, group, source, paths, is_attention)
            each[name] += seconds
    known_s = sum(kinds.values())
    scale = total_s / known_s if known_s else 0.0
    dearest = sorted(each.items(), key=lambda item: -item[1])[:NUM_DEAREST]
    return (
        {kind: kinds[kind] * scale for kind in get_args(ComputeKind) if kinds[kind]},
        tuple(
            ComputeShare(where=where, seconds=seconds * scale)
            for where, seconds in dearest
            if seconds
        ),
    )


def _kind(group: OpGroup, is_attention: bool) -> ComputeKind:
    operator = group.operator
    if is_attention or operator.primitive in ATTENTION:
        return "attention"
    if operator.kind in PRODUCTS:
        return "products" if operator.kind != "kernel" else "other"
    return "element-wise" if operator.kind in CHEAP else "other"


def _name(
    graph: Graph,
    group: OpGroup,
    source: Mapping[int, int],
    paths: Mapping[int, str],
    is_attention: bool,
) -> str:
    """Names an operator and its part of the step, such as `params/w, forward`.

    A matmul, convolution or kernel that reads a parameter gets the parameter's path,
    unless it is attention. Other operators get their primitive (or `element-wise`) and
    the shape of their result.

    Args:
        graph: the program.
        group: the group of operators to name.
        source: map from the index of a value to the index of the program's argument
            that it is a copy or a part of.
        paths: map from the index of an argument to its path.
        is_attention: whether the operator reads or writes attention scores.
    """
    operator = group.operator
    if operator.kind in PRODUCTS and not is_attention:
        for index in operator.inputs:
            path = paths.get(source.get(index, index), "")
            if path.startswith(("params/", "state/")):
                return f"{path}, {group.region}"
    outputs = operator.outputs  # a callback may have none
    shape = graph.values[outputs[0]].shape if outputs else ()
    sides = "x".join(map(str, shape)) or "scalar"
    what = operator.primitive if operator.kind not in CHEAP else "element-wise"
    part = "attention " if is_attention else ""
    return f"{part}{what} {sides}, {group.region}"


def model_at_peak_s(search: PlanSearch) -> float:
    """Computes the seconds of forward and backward pass at the devices' peak speed.

    Counts matmuls, convolutions and kernels such as attention, but no operators that
    rematerialization computes again.
    """
    graph = search.question.graph
    model = (
        operator
        for operator in graph.operators
        if not (operator.again or operator.unread) and region(operator) != "update"
    )
    return at_peak_s(graph, search.pool, model)
