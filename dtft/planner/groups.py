"""Operators that cost alike, counted once: what the search goes through.

A step of thousands of operators has some dozens of different ones: layers repeat, and
elementwise operators over the same dims differ only in their bytes, which add up. Pure;
must not know meshes or seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtft.planner.combining import awaited, nobody_waits
from dtft.planner.graph import Graph, Operator
from dtft.planner.loop_copies import loop_copies
from dtft.planner.strided import strided

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
    last: bool = False
    """Whether it sums, and only the update, or nobody, waits for the sums."""
    copies: bool = False
    """Whether it stands for what loops copy (`loop_copies`)."""

    @property
    def cold(self) -> bool:
        """Whether its bytes were not used just now: state, and stacks of loops."""
        return self.copies or self.region == "update"


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
    across = strided(graph)
    times: Counter[object] = Counter()
    first: dict[object, Operator] = {}
    cheap: dict[object, list[Operator]] = defaultdict(list)
    known = awaited(graph, {n: _waits(op) for n, op in enumerate(graph.operators)})
    last: dict[object, bool] = {}
    for number, operator in enumerate(graph.operators):
        key = _key(graph, operator, alias)
        operator = across.get(number, operator)
        if operator.kind in CHEAP:
            cheap[key].append(operator)
            continue
        is_last = nobody_waits(operator, known)
        key = key, operator.within if is_last else None
        first.setdefault(key, operator)
        last[key] = is_last
        times[key] += operator.trips
    found = [
        Group(operator=first[k], times=count, region=region(first[k]), last=last[k])
        for k, count in times.items()
    ]
    readers = Counter(index for op in graph.operators for index in set(op.inputs))
    readers.update(graph.outputs.values())
    found += [
        _merged(graph, operators, _moved(graph, operators, readers))
        for operators in cheap.values()
    ]
    return (*found, *_copied(graph, alias))


def _copied(graph: Graph, alias: Mapping[int, int]) -> list[Group]:
    """What loops copy, in parts with the same dims."""
    alike: dict[object, list[tuple[Operator, int]]] = defaultdict(list)
    for operator, passes in loop_copies(graph, CHEAP):
        alike[_key(graph, operator, alias)].append((operator, passes))
    found = []
    for copies in alike.values():
        moved = sum(passes * op.trips * graph.bytes_of(op) / 2 for op, passes in copies)
        merged = _merged(graph, [operator for operator, _ in copies], moved)
        found.append(replace(merged, copies=True))
    return found


def _waits(operator: Operator) -> bool:
    """Whether the passes of the model go on only when it has its operands.

    A sum of sums, as of a bias that was broadcast in two steps, is none of these.
    """
    passing = (*CHEAP, "reduction")
    return operator.kind not in passing and region(operator) != "update"


def _moved(
    graph: Graph, operators: list[Operator], readers: Mapping[int, int]
) -> float:
    """Bytes that cheap operators over the same dims read and write, all together.

    An update is one fused loop per array: only what comes from outside of it and what
    is used outside is moved. Elsewhere others stand between, so that each operator
    counts by itself (`Efficiency.fuse`).
    """
    if region(operators[0]) != "update":
        return sum(graph.bytes_of(op) * op.trips for op in operators)
    made = {index for op in operators for index in op.outputs}
    read = Counter(index for op in operators for index in set(op.inputs))
    kept = {index for index in made if readers[index] > read[index]}
    outside = (read.keys() - made) | kept
    return float(sum(graph.values[index].num_bytes for index in outside))


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


def _merged(graph: Graph, operators: list[Operator], total: float) -> Group:
    """The largest of them, with the bytes (`total`) and operations of all."""
    largest = max(operators, key=graph.bytes_of)
    own = graph.bytes_of(largest)
    flops = sum(operator.flops * operator.trips for operator in operators)
    times = total / own if own else float(sum(op.trips for op in operators))
    special = sum(operator.special * operator.trips for operator in operators)
    across = sum(operator.strided * operator.trips for operator in operators)
    turned = sum(operator.turned * operator.trips for operator in operators)
    over = {dim for operator in operators for dim in operator.turned_over}
    each = times or 1.0
    stands = replace(
        largest,
        flops=flops / each,
        special=special / each,
        strided=across / each,
        turned=turned / each,
        turned_over=tuple(sorted(over)),
    )
    return Group(operator=stands, times=times, region=region(largest))
