"""When each value of a program takes memory: from where it is made to its last reader.

Decides which values a compiler keeps in memory at all (results of matmuls, what they
read, what loops stack; not what it fuses into its readers), and in which order they
come and go. Pure; must not know shardings, devices or bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dtft.planner.graph import Graph, Operator
from dtft.planner.groups import CHEAP

ALIASES = ("reshape", "squeeze", "transpose", "copy", "optimization_barrier")
"""Operators whose result is their operand by another name, or folded into readers."""
_READS_FUSED = (*CHEAP, "reduction")
"""Kinds that compute their operands where they need them, if those are cheap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A value comes into memory, or goes."""

    value: int
    comes: bool


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """What takes memory in a program, and when."""

    events: tuple[Event, ...]
    """In the order of the program. Arguments are there throughout and are not among it;
    nor are results that have an argument of the same path: they take its place."""
    roots: Mapping[int, frozenset[int]]
    """For each value that operators make: the values in memory that readers read."""


def follow(graph: Graph) -> Lifetimes:
    """Lifetimes of a program's values."""
    walk = _Walk(graph)
    return Lifetimes(events=tuple(walk.walk()), roots=walk.roots)


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.roots: dict[int, frozenset[int]] = {}
        self._outer = set(graph.inputs.values())
        self._outer |= {v for p, v in graph.outputs.items() if p in graph.inputs}
        self._kept = self._find_kept()
        self._resolve()
        self._last = self._find_last()

    def walk(self) -> Iterable[Event]:
        yield from self._scope((), 0, len(self.graph.operators))

    def _find_kept(self) -> set[int]:
        """Values that have memory of their own wherever they are made."""
        kept = set(self.graph.outputs.values())
        for operator in self.graph.operators:
            if operator.kind not in CHEAP:
                kept.update(operator.outputs)
            if operator.kind not in _READS_FUSED:
                kept.update(operator.inputs)
        for loop in self.graph.loops:
            kept.update(outer for _, outer in loop.stacked)
            kept.update(inner for _, inner in loop.sliced)
            for before, _, _, after in loop.carried:
                kept.update((before, after))
        return kept

    def _resolve(self) -> None:
        """For every value those in memory from which readers have it."""
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

    def _roots_of(self, operator: Operator, value: int) -> frozenset[int]:
        if operator.primitive in ALIASES and operator.inputs:
            return self.root(operator.inputs[0])
        if value in self._kept:
            return frozenset((value,))
        return frozenset(r for index in operator.inputs for r in self.root(index))

    def root(self, value: int) -> frozenset[int]:
        return self.roots.get(value, frozenset((value,)))

    def _find_last(self) -> dict[int, int]:
        """Number of the last operator that reads each value, loops to their end."""
        last: dict[int, int] = defaultdict(int)
        made: dict[int, tuple[int, ...]] = {}
        ends = [loop.operators[1] - 1 for loop in self.graph.loops]
        for operator in self.graph.operators:
            made.update(dict.fromkeys(operator.outputs, operator.within))
        for number, loop in enumerate(self.graph.loops):
            for _, inner in loop.sliced:
                made[inner] = self._within(number)
        for number, operator in enumerate(self.graph.operators):
            for index in operator.inputs:
                for root in self.root(index):
                    where = made.get(root, ())
                    inside = [n for n in operator.within if n not in where]
                    read = ends[inside[0]] if inside else number
                    last[root] = max(last[root], read)
        for loop in self.graph.loops:
            for before, _, _, _ in loop.carried:
                for root in self.root(before):
                    last[root] = max(last[root], loop.operators[0])
        for value in self.graph.outputs.values():
            for root in self.root(value):
                last[root] = len(self.graph.operators)
        return last

    def _within(self, number: int) -> tuple[int, ...]:
        first = self.graph.loops[number].operators[0]
        within = self.graph.operators[first].within
        return within[: within.index(number) + 1]

    def _scope(self, within: tuple[int, ...], start: int, stop: int) -> Iterable[Event]:
        """The operators of one body; loops inside come as one after what they make."""
        going: dict[int, list[int]] = defaultdict(list)
        number = start
        if within:
            loop = self.graph.loops[within[-1]]
            for _, inner in loop.sliced:
                yield from self._come(inner, start, going)
        while number < stop:
            operator = self.graph.operators[number]
            if len(operator.within) > len(within):
                inner = operator.within[len(within)]
                loop = self.graph.loops[inner]
                for _, outer in loop.stacked:
                    yield from self._come(outer, number, going)
                for before, _, _, after in loop.carried:
                    if self._takes_place(before, loop.operators[0]):
                        _forget(going, before)
                        yield Event(value=before, comes=False)
                    yield from self._come(after, number, going)
                yield from self._scope((*within, inner), *loop.operators)
                number = loop.operators[1] - 1
            else:
                for value in operator.outputs:
                    if self.roots[value] == frozenset((value,)):
                        yield from self._come(value, number, going)
            for value in going.pop(number, ()):
                yield Event(value=value, comes=False)
            number += 1
        for values in going.values():
            for value in values:
                yield Event(value=value, comes=False)

    def _takes_place(self, before: int, first: int) -> bool:
        """Whether what a loop starts with is not read afterwards: reused in place."""
        alone = self.root(before) == frozenset((before,))
        return alone and before not in self._outer and self._last[before] <= first

    def _come(
        self, value: int, number: int, going: dict[int, list[int]]
    ) -> Iterable[Event]:
        if value in self._outer:
            return
        yield Event(value=value, comes=True)
        going[max(number, self._last.get(value, number))].append(value)


def _forget(going: dict[int, list[int]], value: int) -> None:
    """A value that has gone already: what takes its place has its memory."""
    for values in going.values():
        if value in values:
            values.remove(value)
