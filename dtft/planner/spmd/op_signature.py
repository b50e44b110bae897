"""Operators that differ in nothing but which dims they have: their work is found once.

Layers, passes and programs with another remat are made of the same few operators over
other dims. What a device does and sends depends on the shapes, on which dims are the
same and on the axes of each, so operators of one pattern share their works.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from dtft.planner.ir import Graph, Operator, Value
from dtft.planner.spmd.partitioner import (
    Axes,
    OperatorWork,
    ShardingAssignment,
    flat,
    work_of,
)

PatternKey = tuple[
    tuple[Axes, ...], bool, tuple[int | None, ...], tuple[Axes, ...], Axes
]
"""What of a division matters to an operator: axes of each of its dims; `scatters`; of
each array the dim that comes first; axes that divide each result further; `spare`."""

_KNOWN: WeakValueDictionary[Hashable, "Pattern"] = WeakValueDictionary()
"""Patterns that some program at hand has."""


class Pattern:
    """What operators have in common that are alike but for their dims."""

    def __init__(self, operator: Operator, values: tuple[Value, ...]) -> None:
        """No division is looked at yet.

        Args:
            operator: one of them; its dims are numbered by rank among its own.
            values: its operands, then its results; their dims alike.
        """
        self._operator, self._values = operator, values
        self._graph = Graph(
            values=values, operators=(operator,), dims=(), loops=(), inputs={},
            outputs={},
        )  # fmt: skip
        self._known: dict[PatternKey, OperatorWork] = {}

    def work(self, key: PatternKey) -> OperatorWork:
        """What one execution takes under a division, of an operator of the pattern."""
        if key not in self._known:
            division = self._division(*key)
            self._known[key] = work_of(self._graph, self._operator, division)
        return self._known[key]

    def _division(
        self,
        axes: tuple[Axes, ...],
        scatters: bool,
        first: tuple[int | None, ...],
        further: tuple[Axes, ...],
        spare: Axes,
    ) -> ShardingAssignment:
        sets = [frozenset(value.dims) for value in self._values]
        made = sets[len(self._operator.inputs) :]
        return ShardingAssignment(
            axes={rank: found for rank, found in enumerate(axes) if found},
            first={
                dims: rank
                for dims, rank in zip(sets, first, strict=False)
                if rank is not None
            },
            rest={
                dims: {min(dims): found}
                for dims, found in zip(made, further, strict=False)
                if found
            },
            scatters=scatters,
            spare=spare,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Instance:
    """An operator of a program, as one of a pattern."""

    operator: Operator
    pattern: Pattern
    dims: tuple[int, ...]
    """Its dims, ascending; those that stand for others."""
    arrays: tuple[frozenset[int], ...]
    """Dims of each operand and result."""

    def key(self, division: ShardingAssignment) -> PatternKey:
        """What of a division matters: equal keys, equal work."""
        axes = division.axes
        own = tuple([axes.get(dim, ()) for dim in self.dims])
        first: tuple[int | None, ...] = ()
        further: tuple[Axes, ...] = ()
        used = flat(own)
        if division.first and len(set(used)) < len(used):  # some want the same axis
            found = map(division.first.get, self.arrays)
            first = tuple(None if d is None else self.dims.index(d) for d in found)
        if division.rest:
            made = self.arrays[len(self.operator.inputs) :]
            wanted = [division.rest.get(dims, {}).values() for dims in made]
            further = tuple(flat(tuple(axes)) for axes in wanted)
        if not any(further):
            return own, division.scatters, first, (), ()
        return own, division.scatters, first, further, division.spare

    def work(self, key: PatternKey) -> OperatorWork:
        """What one execution takes under divisions with a key."""
        return replace(self.pattern.work(key), operator=self.operator)


def instance(graph: Graph, operator: Operator, root: Callable[[int], int]) -> Instance:
    """An operator of a program as one of a pattern.

    Args:
        graph: the program.
        operator: one of it, or made of some of it.
        root: dim to the dim that stands for it.

    >>> square = Value(shape=(8, 8), dtype="float32", dims=(4, 9))
    >>> other = Value(shape=(8, 8), dtype="float32", dims=(5, 7))
    >>> graph = Graph(values=(square, other), operators=(), dims=(), loops=(),
    ...     inputs={}, outputs={})
    >>> made = [Operator(primitive="tanh", kind="elementwise", inputs=(index,),
    ...     outputs=(index,), flops=64.0, trips=1) for index in (0, 1)]
    >>> one, two = (instance(graph, op, lambda dim: dim) for op in made)
    >>> one.pattern is two.pattern, one.dims, two.dims
    (True, (4, 9), (5, 7))
    """
    values = [graph.values[index] for index in (*operator.inputs, *operator.outputs)]
    arrays = [tuple(map(root, value.dims)) for value in values]
    summed, whole = tuple(map(root, operator.summed)), tuple(map(root, operator.whole))
    over = sorted({root(dim) for dim in operator.turned_over})
    dims = tuple(sorted({*itertools.chain(*arrays), *summed, *whole, *over}))
    rank = {dim: place for place, dim in enumerate(dims)}

    def ranks(some: Iterable[int]) -> tuple[int, ...]:
        return tuple(rank[dim] for dim in some)

    one = replace(
        operator,
        inputs=tuple(range(len(operator.inputs))),
        outputs=tuple(range(len(operator.inputs), len(values))),
        # Of a product they give the depth; of others only a price depends on them.
        flops=operator.flops if operator.kind == "matmul" else 0.0,
        special=0.0,
        strided=0.0,
        turned=0.0,
        trips=1,
        summed=ranks(summed),
        whole=ranks(whole),
        turned_over=ranks(over),
        again=False,
        within=(),
        name="",
    )
    local = tuple(
        Value(shape=value.shape, dtype=value.dtype, dims=ranks(found))
        for value, found in zip(values, arrays, strict=True)
    )
    pattern = _KNOWN.get((one, local)) or Pattern(one, local)
    return Instance(
        operator=operator,
        pattern=_KNOWN.setdefault((one, local), pattern),
        dims=dims,
        arrays=tuple(map(frozenset, arrays)),
    )
