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

from dtft.planner.graph import Operator
from dtft.planner.groups import region
from dtft.planner.lifetimes import Event
from dtft.planner.memory import Timeline
from dtft.planner.patterns import Instance, instance

SOON = 5
"""Products after one for which a gather made for it is kept for another: with so many
the compiled steps that the rules were made with agree best."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reread:
    """Two products that read one array: where both need it gathered, it is so once."""

    instances: tuple[int, int]
    """Their places in `Course.instances`."""
    num_bytes: int
    """Of the whole array."""
    moments: range
    """Those between them at which it stays gathered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Yielded:
    """An array that is gone a moment sooner where an axis divides a dim of `rows`."""

    moment: int
    """The moment at which it is gone then."""
    kind: int
    num_bytes: int
    rows: tuple[int, ...]


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
        self.full: list[int] = []
        """Moments after something came."""
        self.instances: list[Instance] = []
        """Operators that may need operands gathered, each with its own dims."""
        self.runs: list[Run] = []
        self.rereads: list[Reread] = []
        self._reads: dict[int, int] = {}
        self._products: list[Run] = []
        self.copied: list[tuple[int, int]] = []
        """Moments at which there is a copy of an array; which."""
        self.yielded: list[Yielded] = []
        """Arrays whose place others may take; at most one for each moment."""
        self._yields: Event | None = None
        self._begin()
        for event in timeline.events:
            self._follow(event)
        self.alive = self._moments()
        """Bytes; float [moments, kinds]."""

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
        self.full.append(self._note())

    def _follow(self, event: Event) -> None:
        if event.kind == "runs":
            self._run(event.value)
        elif event.kind == "copied":
            self.copied.append((self._note(), event.value))
        elif event.kind == "yields":
            self._yields = event
        elif event.value in self.timeline.gradients:
            self._follow_gradient(event)
        elif event.kind == "comes":
            self._change(self._kind(event.value), event.value)
            self.full.append(self._note())
            if self._yields:
                self._note_yielded(self._yields)
        else:
            self._change(self._kind(event.value), event.value, -1)

    def _note_yielded(self, event: Event) -> None:
        """What has come takes the place of another array, which goes only after it."""
        yielded = Yielded(
            moment=self.full[-1],
            kind=self._kind(event.value),
            num_bytes=self._graph.values[event.value].num_bytes,
            rows=event.rows,
        )
        self.yielded.append(yielded)
        self._yields = None

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
            self.full.append(self._note())
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
        run = Run(moment=self._note(), instance=place, beside=beside)
        self.runs.append(run)
        if operator.kind == "matmul":
            self._note_reads(operator, run)

    def _note_reads(self, operator: Operator, run: Run) -> None:
        """What the last product of the forward pass and all of the backward pass read.

        XLA shares a gather between products that come soon after each other (its pass
        `ScheduleAwareCollectiveOpsCSE`): of a cotangent by the two products that read
        it, and of what the last layer reads by that and by the gradient of its weights.
        """
        if region(operator) == "forward":
            self._reads.clear()
        number = len(self._products)
        self._products.append(run)
        for index in operator.inputs:
            for root in self.timeline.read_from(index):
                before = self._reads.get(root)
                self._reads[root] = number
                if before is not None:
                    first, end = self._products[before], min(before + SOON, number)
                    reread = Reread(
                        instances=(first.instance, run.instance),
                        num_bytes=self._graph.values[index].num_bytes,
                        moments=range(first.moment + 1, self._products[end].moment),
                    )
                    self.rereads.append(reread)

    def _gradient(self, index: int, what: What) -> int:
        return self._kind(index, what, divides=what != "gradient")

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
