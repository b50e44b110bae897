"""Operators that cost alike, counted once: what the search goes through.

A step of thousands of operators has some dozens of different ones: layers repeat, and
elementwise operators over the same dims differ only in their bytes, which add up. Pure;
must not know meshes or seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtft.planner.graph import Graph, Operator

CHEAP = ("elementwise", "layout", "random")
"""Kinds that a compiler fuses with what is before or after them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Operators that cost alike."""

    operator: Operator
    """One of them."""
    times: float
    """Executions of all of them in a step."""
    region: str
    """Where in the step: forward, backward or update."""


def region(operator: Operator) -> str:
    """Where in the step an operator is, from JAX's name stack.

    >>> from dtft.planner.graph import Operator
    >>> made = Operator(primitive="mul", kind="elementwise", inputs=(), outputs=(),
    ...     flops=0.0, trips=1, name="transpose(jvp(layer))/mul")
    >>> region(made)
    'backward'
    """
    if "transpose(" in operator.name:
        return "backward"
    return "forward" if "jvp(" in operator.name else "update"


def group(graph: Graph, alias: Mapping[int, int]) -> tuple[Group, ...]:
    """The groups of a program, largest first.

    Args:
        graph: the program.
        alias: dim to the dim that stands for it in equal layers.
    """
    times: Counter[object] = Counter()
    first: dict[object, Operator] = {}
    cheap: dict[object, list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        key = _key(graph, operator, alias)
        if operator.kind in CHEAP:
            cheap[key].append(operator)
        else:
            first.setdefault(key, operator)
            times[key] += operator.trips
    found = [
        Group(operator=first[key], times=count, region=region(first[key]))
        for key, count in times.items()
    ]
    found += [_merged(graph, operators) for operators in cheap.values()]
    return tuple(found)


def _key(graph: Graph, operator: Operator, alias: Mapping[int, int]) -> object:
    values = [graph.values[i] for i in (*operator.inputs, *operator.outputs)]
    if operator.kind in CHEAP:
        dims = {alias.get(d, d) for v in values for d in v.dims}
        whole = {alias.get(d, d) for d in operator.whole}
        return region(operator), frozenset(dims), frozenset(whole)
    shapes = tuple((v.shape, v.dtype, _roots(v.dims, alias)) for v in values)
    summed, whole = _roots(operator.summed, alias), _roots(operator.whole, alias)
    summed = (summed, operator.contracted)
    return operator.primitive, shapes, summed, whole, operator.flops, region(operator)


def _roots(dims: tuple[int, ...], alias: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(alias.get(dim, dim) for dim in dims)


def _merged(graph: Graph, operators: list[Operator]) -> Group:
    """The largest of them, with the bytes and operations of all."""
    largest = max(operators, key=graph.bytes_of)
    own = graph.bytes_of(largest)
    total = sum(graph.bytes_of(operator) * operator.trips for operator in operators)
    flops = sum(operator.flops * operator.trips for operator in operators)
    times = total / own if own else float(sum(op.trips for op in operators))
    stands = replace(largest, flops=flops / times if times else 0.0)
    return Group(operator=stands, times=times, region=region(largest))
