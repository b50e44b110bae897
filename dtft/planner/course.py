"""What is alive at each moment of a step, by kind of array, before anything is divided.

A division changes which axes divide a kind, never when its arrays come and go: so that
is counted once here, for all divisions that `moments` is asked for. Must not know axes,
seconds or how large meshes are.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from dtft.planner.lifetimes import Event
from dtft.planner.memory import Timeline
from dtft.planner.patterns import Instance, instance

What = Literal["plain", "gradient", "kept", "waiting", "sums", "part"]
"""What bytes are of: an array; a gradient while it is made, the same in a loop, and
until it is used; the sum of one over microbatches; of an argument what a microbatch
works on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Arrays that every division divides alike."""

    what: What
    value: int
    """One of them."""
    divides: bool
    """Whether it is divided further where gradients are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """An operator that may need operands gathered."""

    moment: int
    instance: int
    """Its place in `Course.instances`."""
    beside: bool
    """Whether it runs beside the one before it."""


class Course:
    """The moments of a program that may be the fullest."""

    def __init__(self, timeline: Timeline) -> None:
        """Follows the program.

        Args:
            timeline: of the program.
        """
        self.timeline, self._graph = timeline, timeline.scheduled
        self.kinds: list[Kind] = []
        """What the columns of `alive` are of."""
        self._numbers: dict[object, int] = {}
        self._arrays: dict[int, int] = {}
        self._unlike: dict[object, int] = {}
        self._instances: dict[object, int] = {}
        self._changes: list[tuple[int, float]] = []
        self._at: list[int] = []
        self._tops: list[int] = []
        self.instances: list[Instance] = []
        """Operators that may need operands gathered, each with its own dims."""
        self.runs: list[Run] = []
        self.copied: list[tuple[int, int]] = []
        """Moments at which there is a copy of an array; which."""
        self._begin()
        for event in timeline.events:
            self._follow(event)
        self.alive = self._moments()
        """Bytes; float [moments, kinds]."""
        self.full = self._full()
        """Moments at which more is alive than just before and after."""

    @cached_property
    def gradients(self) -> tuple[tuple[int, int], ...]:
        """Gradients unlike in division or bytes, and how many there are of each."""
        first: dict[object, int] = {}
        counts: Counter[int] = Counter()
        for index in self.timeline.gradients:
            num_bytes = self._graph.values[index].num_bytes
            key = self._gradient(index, "sums"), num_bytes
            counts[first.setdefault(key, index)] += 1
        return tuple(counts.items())

    def _begin(self) -> None:
        """With microbatches: a sum of each gradient, and the part of the batch that is
        worked on, taken out of it.
        """
        for index in self.timeline.gradients:
            self._change(self._gradient(index, "sums"), index)
        for index in self._graph.inputs.values():
            self._change(self._kind(index, "part"), index)
        self._tops.append(self._note())

    def _follow(self, event: Event) -> None:
        if event.kind == "runs":
            self._run(event.value)
        elif event.kind == "copied":
            self.copied.append((self._note(), event.value))
        elif event.value in self.timeline.gradients:
            self._follow_gradient(event)
        elif event.kind == "comes":
            self._change(self._kind(event.value), event.value)
            self._tops.append(self._note())
        else:
            self._change(self._kind(event.value), event.value, -1)

    def _follow_gradient(self, event: Event) -> None:
        """A gradient is whole until it is made, then as it is kept (ZeRO 2 and 3).

        A microbatch's own goes into the sum as soon as it is made.
        """
        index = event.value
        part_by_part = index in self.timeline.from_loops
        first = self._gradient(index, "kept" if part_by_part else "gradient")
        after = self._gradient(index, "waiting")
        if event.kind == "comes":
            self._change(first, index)
            self._tops.append(self._note())
        elif event.kind == "made":
            self._change(first, index, -1)
            self._change(after, index)
        else:
            self._change(after, index, -1)

    def _run(self, number: int) -> None:
        operator = self._graph.operators[number]
        # Those of products that make gradients all run beside each other.
        beside = not self.timeline.of_gradients.isdisjoint(operator.outputs)
        arrays = [self._array(i) for i in (*operator.inputs, *operator.outputs)]
        over = self._roots(operator.summed), self._roots(operator.whole)
        key = operator.primitive, tuple(arrays), over, operator.contracted
        place = self._instances.setdefault(key, len(self.instances))
        if place == len(self.instances):
            root = self.timeline.root
            self.instances.append(instance(self._graph, operator, root))
        self.runs.append(Run(moment=self._note(), instance=place, beside=beside))

    def _gradient(self, index: int, what: What) -> int:
        # A step of the user's own has no constraint that divides what no loop makes.
        timeline = self.timeline
        divides = timeline.gathers or index in timeline.from_loops
        return self._kind(index, what, divides and what != "gradient")

    def _kind(self, index: int, what: What = "plain", divides: bool = False) -> int:
        kind = what, self._array(index), divides
        place = self._numbers.setdefault(kind, len(self.kinds))
        if place == len(self.kinds):
            self.kinds.append(Kind(what=what, value=index, divides=divides))
        return place

    def _array(self, index: int) -> int:
        """The same number for arrays that every division divides alike."""
        if index not in self._arrays:
            value = self._graph.values[index]
            key = value.shape, value.dtype, self._roots(value.dims)
            self._arrays[index] = self._unlike.setdefault(key, len(self._unlike))
        return self._arrays[index]

    def _roots(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(self.timeline.root, dims))

    def _change(self, kind: int, index: int, sign: int = 1) -> None:
        num_bytes = self._graph.values[index].num_bytes
        self._changes.append((kind, sign * num_bytes))

    def _note(self) -> int:
        """A moment that may be the fullest; its number."""
        self._at.append(len(self._changes))
        return len(self._at) - 1

    def _moments(self) -> np.ndarray:
        changes = np.zeros((len(self._changes) + 1, len(self.kinds)))
        if self._changes:
            kinds, num_bytes = zip(*self._changes, strict=True)
            changes[np.arange(1, len(changes)), kinds] = num_bytes
        return changes.cumsum(axis=0)[self._at]

    def _full(self) -> list[int]:
        """Of moments after something came: those that no neighbour has all of."""
        alive = self.alive[self._tops]
        fewer = (alive[:-1] <= alive[1:]).all(axis=1)
        more = (alive[:-1] >= alive[1:]).all(axis=1) & ~fewer
        kept = ~(np.append(fewer, False) | np.insert(more, 0, False))
        return np.asarray(self._tops)[kept].tolist()
