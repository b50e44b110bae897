"""Groups operators that differ only in the numbers of their dims.

A `Pattern` is an operator with its dims renumbered from 0. The work and collectives of
a device depend only on the pattern and on the mesh axes that divide its dims, so they
are computed once for all operators of a pattern. Layers, passes and the programs of all
remat policies have few patterns.
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
"""The part of a division (`ShardingAssignment`) that an operator's work depends on.

In this order: axes of each dim of the operator; `scatters`; the dim of each array that
takes its axes first; axes that divide each result further (`rest`); `spare`.
"""

_KNOWN: WeakValueDictionary[Hashable, "Pattern"] = WeakValueDictionary()
"""Patterns by their operator and values, while an `Instance` refers to them."""


class Pattern:
    """An operator with its dims renumbered from 0; stands for all equal ones.

    Caches the work of a device for each division of the dims by mesh axes.
    """

    def __init__(self, operator: Operator, values: tuple[Value, ...]) -> None:
        """Starts with an empty cache.

        Args:
            operator: an operator of the pattern, with its dims renumbered from 0.
            values: its operands, then its results, with the same numbers of dims.
        """
        self._operator, self._values = operator, values
        self._graph = Graph(
            values=values, operators=(operator,), dims=(), loops=(), inputs={},
            outputs={},
        )  # fmt: skip
        self._known: dict[PatternKey, OperatorWork] = {}

    def work(self, key: PatternKey) -> OperatorWork:
        """Returns the work of a device in one execution of the pattern's operator.

        Equal keys give the same object.

        Args:
            key: which mesh axes divide each dim, and whatever else the work depends on
                in a division (`Instance.key` makes it).
        """
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
    """An operator of a program, with the pattern that it shares with others."""

    operator: Operator
    pattern: Pattern
    dims: tuple[int, ...]
    """Dims of the operator's arrays, and the dims in `Operator.summed`,
    `Operator.whole` and `Operator.turned_over`; ascending. Each dim represents its
    class: all dims that are divided alike."""
    arrays: tuple[frozenset[int], ...]
    """The dims of each operand, then of each result; each dim represents its class."""

    def key(self, division: ShardingAssignment) -> PatternKey:
        """Returns what the work of a device depends on in a division.

        The key is a tuple. It has the axes of each dim, and whether the backend has
        reduce-scatter. If one axis divides several dims, it also has the dim of each
        array that gets its axes first. If axes divide a result further, as those of
        gradients at ZeRO levels 2 and 3, it has these axes, and the spare axes
        (`ShardingAssignment.spare`). Two operators with the same pattern and equal keys
        have equal work.

        Args:
            division: which mesh axes divide which dims.
        """
        axes = division.axes
        own = tuple([axes.get(dim, ()) for dim in self.dims])
        first: tuple[int | None, ...] = ()
        further: tuple[Axes, ...] = ()
        used = flat(own)
        if division.first and len(set(used)) < len(used):  # two dims want the same axis
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
        """Returns the work of a device in one execution of this operator.

        Args:
            key: what the work depends on in a division; made by the method `key`.
        """
        return replace(self.pattern.work(key), operator=self.operator)


def instance(graph: Graph, operator: Operator, root: Callable[[int], int]) -> Instance:
    """Returns an operator of a program with its pattern.

    Operators that differ only in the numbers of their dims get the same `Pattern`
    object.

    Args:
        graph: the program.
        operator: an operator of the program, or an operator merged from several.
        root: maps a dim to the one that represents it and the equal dims of other
            layers (`ShardingAssignment.root`).

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
        # The depth of a matmul follows from its flops; for other operators only the
        # price depends on flops.
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
