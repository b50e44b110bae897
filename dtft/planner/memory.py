"""Bytes on each device, term by term, for many candidates at once.

What is there throughout a step (parameters, optimizer state, the batch) and the most
that is alive at any time beside it (activations, gradients), from lifetimes of values
and how each is divided. Pure; must not know seconds or how candidates are found.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dtft.planner.amounts import Sizes, parts
from dtft.planner.graph import Graph, Operator, Value
from dtft.planner.groups import region
from dtft.planner.lifetimes import Event, Lifetimes, follow
from dtft.planner.partition import MICRO, Division, flat, work
from dtft.planner.run_order import scheduled

RESERVE = 0.04
"""Share of a device's memory that no plan may count on: fragmentation, the runtime."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """What comes into memory and goes during one step of a program."""

    graph: Graph
    gathers: bool = False
    """Whether at ZeRO level 3 the step is one of `dtft.train.gathered`, which keeps all
    of the forward pass but gathered parameters."""
    keeps_all: bool = False

    @cached_property
    def at_level_3(self) -> "Timeline":
        """That of the same program at ZeRO level 3."""
        again = any(operator.again for operator in self.graph.operators)
        if not self.gathers or again or self.keeps_all:
            return self
        return Timeline(graph=self.graph, gathers=True, keeps_all=True)

    @cached_property
    def scheduled(self) -> Graph:
        """The program in the order in which XLA runs it."""
        return scheduled(self.graph)

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return follow(self.scheduled, keeps_all=self.keeps_all)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """In the order in which they happen; of gradients also when they are made."""
        return tuple(
            event
            for event in self._lifetimes.events
            if event.kind != "made" or event.value in self.gradients
        )

    @cached_property
    def gradients(self) -> frozenset[int]:
        """Values that the backward pass makes and the update reads."""
        made: set[int] = set()
        read: set[int] = set()
        for operator in self.graph.operators:
            where = region(operator)
            if where == "backward":
                made.update(operator.outputs)
            elif where == "update":
                for index in operator.inputs:
                    read |= self._lifetimes.roots.get(index, frozenset())
        for loop in self.graph.loops:
            made |= {outer for inner, outer in loop.stacked if inner in made}
            made |= {after for _, _, out, after in loop.carried if out in made}
        return frozenset(made & read)

    @cached_property
    def of_gradients(self) -> frozenset[int]:
        """Gradients, and those of one turn of a loop."""
        turns = {
            inner
            for loop in self.graph.loops
            for inner, outer in loop.stacked
            if outer in self.gradients
        }
        return self.gradients | turns

    @cached_property
    def from_loops(self) -> frozenset[int]:
        """Values that a loop makes part by part."""
        loops = self.graph.loops
        found = {outer for loop in loops for _, outer in loop.stacked}
        return frozenset(found | {v for loop in loops for *_, v in loop.carried})


@dataclass(frozen=True, kw_only=True, eq=False)
class Peak:
    """The most that is alive at one time, by term; bytes, one entry per candidate."""

    activations: Any
    gradients: Any


def peak(timeline: Timeline, division: Division, sizes: Sizes, zero: Any) -> Peak:
    """The fullest moment between the first operator and the last.

    Args:
        timeline: of the program.
        division: which axes divide which dims; `MICRO` among them.
        sizes: axis to size, one entry per candidate.
        zero: the ZeRO level, one per candidate.
    """
    found = _Count(timeline, division, sizes, zero).peak()
    third, other = np.asarray(zero) == 3, timeline.at_level_3
    if other is timeline or not np.any(third):
        return found
    there = _Count(other, division, sizes, zero).peak()
    return Peak(
        activations=np.where(third, there.activations, found.activations),
        gradients=np.where(third, there.gradients, found.gradients),
    )


class _Count:
    """One division of one program: what is alive, event by event."""

    def __init__(
        self, timeline: Timeline, division: Division, sizes: Sizes, zero: Any
    ) -> None:
        self.timeline, self.graph = timeline, timeline.scheduled
        self.division, self.sizes = division, sizes
        self.alone = np.asarray(sizes.get(MICRO, 1)) == 1
        divides = np.asarray(sizes.get("fsdp", 1)) > 1
        self.gathers = divides & np.isin(zero, (1, 2))
        self.gradients = {index: self._gradient(index) for index in timeline.gradients}
        self.bytes: dict[int, Any] = {}
        self.moved: dict[object, Any] = {}

    def peak(self) -> Peak:
        """The fullest moment."""
        sums = sum((kept for _, kept in self.gradients.values()), 0.0)
        gradients: Any = np.where(self.alone, 0.0, sums)
        alive: Any = gradients + np.where(self.alone, 0.0, self._part_of_batch())
        most, of_gradients = alive, gradients
        before: Any = 0.0
        for event in self.timeline.events:
            if event.kind == "copied":
                there = alive + self._divided(self.graph.values[event.value])
            elif event.kind == "runs":
                operator = self.graph.operators[event.value]
                gathered = self._gathered(operator)
                if not self.timeline.of_gradients.isdisjoint(operator.outputs):
                    gathered = gathered + before
                there, before = alive + gathered, gathered
            else:
                change = self._change(event)
                alive = alive + change
                if event.value in self.gradients:
                    gradients = gradients + change
                if event.kind != "comes":
                    continue
                there = alive
            higher = there > most
            of_gradients = np.where(higher, gradients, of_gradients)
            most = np.where(higher, there, most)
        update = self._update()
        of_gradients = np.where(update > most, update, of_gradients)
        most = np.maximum(most, update)
        return Peak(activations=most - of_gradients, gradients=of_gradients)

    def _gradient(self, index: int) -> tuple[Any, Any]:
        """Bytes of a gradient as its product makes it, and as it is kept.

        At ZeRO levels 2 and 3 it is whole until it is made, and divided then; in a step
        of the user's own, which has no constraint on it, only where a loop makes it.
        """
        value = self.graph.values[index]
        own = flat(self.division.spec(value))
        dims = [dim for dim in value.dims if not self.graph.dims[dim].loop]
        roots = frozenset(map(self.division.root, dims))
        extra = flat(tuple(self.division.rest.get(roots, {}).values()))
        whole = value.num_bytes / parts(own, self.sizes)
        axes = tuple(axis for axis in extra if axis not in own)
        if not self.timeline.gathers and index not in self.timeline.from_loops:
            axes = ()
        return whole, whole / parts(axes, self.sizes)

    def _part_of_batch(self) -> Any:
        """The examples of one microbatch, taken out of the batch."""
        values = [self.graph.values[index] for index in self.graph.inputs.values()]
        return sum(
            self._divided(value)
            for value in values
            if any(MICRO in self.division.of(dim) for dim in value.dims)
        )

    def _change(self, event: Event) -> Any:
        """Bytes that come or, below zero, go.

        With microbatches there is a sum of each gradient all the time, and a
        microbatch's own goes into it as soon as it is made.
        """
        if event.value not in self.gradients:
            if event.value not in self.bytes:
                self.bytes[event.value] = self._divided(self.graph.values[event.value])
            num_bytes = self.bytes[event.value]
            return num_bytes if event.kind == "comes" else -num_bytes
        whole, kept = self.gradients[event.value]
        first = kept if event.value in self.timeline.from_loops else whole
        if event.kind == "comes":
            return first
        after = np.where(self.alone, kept, 0.0)
        return after - first if event.kind == "made" else -after

    def _gathered(self, operator: Operator) -> Any:
        """What its operands are brought together in."""
        values = [self.graph.values[i] for i in (*operator.inputs, *operator.outputs)]
        dims = [tuple(map(self.division.root, value.dims)) for value in values]
        shapes = [value.shape for value in values]
        key = operator.primitive, tuple(dims), tuple(shapes), operator.contracted
        if key not in self.moved:
            done = work(self.graph, operator, self.division)
            self.moved[key] = sum(
                sent.amount.at(self.sizes)
                for sent in done.sent
                if sent.kind in ("all_gather", "all_to_all")
            )
        return self.moved[key]

    def _update(self) -> Any:
        """Where each device updates a part: new parameters beside old ones, gathered.

        Old parameters are read until the last part is updated, so what is gathered
        has memory of its own; what is being updated is there thrice, laid out for it.
        """
        pairs = self.gradients.values()
        whole = sum((whole for whole, _ in pairs), 0.0)
        largest: Any = 0.0
        for one, _ in pairs:
            largest = np.maximum(largest, one)
        parted = 3 * largest / parts(("fsdp",), self.sizes)
        return np.where(self.gathers, whole + parted, 0.0)

    def _divided(self, value: Value) -> Any:
        axes = flat(self.division.spec(value))
        return value.num_bytes / parts(axes, self.sizes)
