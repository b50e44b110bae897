"""Which values of a program have memory of their own, and which are only computed.

Decides what XLA's GPU compiler keeps (results of products and sums, what products read,
what loops stack) and what it fuses into its readers. Each rule was read off buffer
assignments of compiled steps (`experiments/plan_memory.py`). Pure; must not know
shardings, bytes or when anything happens.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from dtft.planner.graph import Graph, Operator
from dtft.planner.groups import CHEAP, region

ALIASES = ("reshape", "squeeze", "transpose", "copy", "optimization_barrier")
"""Operators whose result is their operand by another name, or folded into readers."""
_NEVER_SAVED = (*ALIASES, "convert_element_type", "broadcast_in_dim")
"""What the policy of `dtft.train.gathered` does not keep: the operand is."""
_IN_MATMULS = ("max", "min", "neg", "convert_element_type")
"""What XLA computes of an operand while a matmul reads it: a rectifier, a cast."""
_READS_FUSED = (*CHEAP, "reduction")
"""Kinds that compute their operands where they need them, if those are cheap."""


class InMemory:
    """What a program keeps, and from what each reader has what it reads."""

    def __init__(self, graph: Graph, *, keeps_all: bool) -> None:
        """Follows the program.

        Args:
            graph: the program.
            keeps_all: see `lifetimes.follow`.
        """
        self.graph = graph
        self.makers: Mapping[int, Operator] = {
            value: operator
            for operator in graph.operators
            for value in operator.outputs
        }
        self._kept = self._find_kept()
        if keeps_all:
            self._kept |= self._saved()
        self._twins = self._find_twins() if keeps_all else {}
        self.roots: dict[int, frozenset[int]] = {}
        self._resolve()

    def root(self, value: int) -> frozenset[int]:
        """The values in memory from which readers of a value have it."""
        return self.roots.get(value, frozenset((value,)))

    def all_roots(self, operator: Operator) -> frozenset[int]:
        """Those of all its operands."""
        return frozenset(r for index in operator.inputs for r in self.root(index))

    def operands_like(self, index: int) -> list[int]:
        """Arrays as large as a value that it is computed from, element by element."""
        maker, values = self.makers.get(index), self.graph.values
        return [
            operand
            for operand in (maker.inputs if maker else ())
            if values[operand].size == values[index].size
            and values[operand].dtype != "bool"
            and not self._is_broadcast(operand)
        ]

    def _find_kept(self) -> set[int]:
        kept = set(self.graph.outputs.values())
        for operator in self.graph.operators:
            if operator.kind not in CHEAP:
                kept.update(operator.outputs)
            if operator.kind == "matmul":
                kept.update(map(self._read_by_matmul, operator.inputs))
            elif operator.kind not in _READS_FUSED:
                kept.update(operator.inputs)
        kept -= self._folded()
        for loop in self.graph.loops:
            kept.update(outer for _, outer in loop.stacked)
            kept.update(inner for _, inner in loop.sliced)
            for before, _, _, after in loop.carried:
                kept.update((before, after))
        return kept

    def _read_by_matmul(self, index: int) -> int:
        """What has memory when a matmul reads a value.

        A rectifier or a cast of one array is computed while it is read. A cast of what
        several arrays make is, too, but what is cast has memory then.
        """
        maker = self.makers.get(index)
        if maker is None or maker.primitive not in _IN_MATMULS:
            return index
        before = index
        while (one := self.makers.get(before)) and one.kind in CHEAP:
            large = self.operands_like(before)
            if len(large) != 1:
                cast = maker.primitive == "convert_element_type"
                return maker.inputs[0] if cast else index
            before = large[0]
        return before

    def _folded(self) -> set[int]:
        """What is scattered into zeros only to be added to something: not there.

        It is scattered into that.
        """
        readers: dict[int, list[str]] = defaultdict(list)
        for operator in self.graph.operators:
            for index in operator.inputs:
                readers[index].append(operator.primitive)
        found: set[int] = set()
        for operator in self.graph.operators:
            if operator.kind != "scatter" or not operator.inputs:
                continue
            (made,), into = operator.outputs, operator.inputs[0]
            if self._is_broadcast(into) and readers[made] in (["add_any"], ["add"]):
                found |= {made, into}
        return found

    def _saved(self) -> set[int]:
        """What the backward pass reads of the forward pass outside of loops."""
        found: set[int] = set()
        for operator in self.graph.operators:
            if region(operator) != "backward":
                continue
            for index in operator.inputs:
                maker = self.makers.get(index)
                while maker and maker.primitive in _NEVER_SAVED and maker.inputs:
                    index = maker.inputs[0]
                    maker = self.makers.get(index)
                if maker and region(maker) == "forward" and not maker.within:
                    found.add(index)
        return found

    def _find_twins(self) -> dict[int, int]:
        """Values that each layer makes of nothing but numbers, and the first one like.

        XLA computes a mask of positions once and keeps it for all layers.
        """
        first: dict[object, int] = {}
        same: dict[int, int] = {}
        for operator in self.graph.operators:
            if operator.within or not all(index in same for index in operator.inputs):
                continue
            read = tuple(same[index] for index in operator.inputs)
            for place, index in enumerate(operator.outputs):
                value = self.graph.values[index]
                key = operator.primitive, place, value.shape, value.dtype, read
                same[index] = first.setdefault(key, index)
        return {index: one for index, one in same.items() if index != one}

    def _resolve(self) -> None:
        for loop in self.graph.loops:
            for outer, inner in loop.sliced:
                self.roots[inner] = frozenset((inner, outer))
            for _, inside, _, after in loop.carried:
                self.roots[inside] = frozenset((after,))
                self.roots[after] = frozenset((after,))
            for _, outer in loop.stacked:
                self.roots[outer] = frozenset((outer,))
        for operator in self.graph.operators:
            for value in operator.outputs:
                self.roots[value] = self._roots_of(operator, value)
        for value, roots in self.roots.items():
            self.roots[value] = frozenset(self._through(value, roots))

    def _roots_of(self, operator: Operator, value: int) -> frozenset[int]:
        if operator.primitive in ALIASES and operator.inputs:
            return self.root(operator.inputs[0])
        if value in self._twins:
            return self.root(self._twins[value])
        if value in self._kept:
            return frozenset((value,))
        return self.all_roots(operator)

    def _through(self, value: int, roots: Iterable[int]) -> Iterator[int]:
        """What a loop goes through may itself be another array by another name."""
        for root in roots:
            yield from (root,) if root == value else self.root(root)

    def _is_broadcast(self, index: int) -> bool:
        maker = self.makers.get(index)
        return maker is not None and maker.primitive == "broadcast_in_dim"
