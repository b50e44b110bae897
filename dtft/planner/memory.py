"""Bytes on each device, term by term, for many candidates at once.

What is there throughout a step (parameters, optimizer state, the batch) and the most
that is alive at any time beside it (activations, gradients), from lifetimes of values
and how each is divided. Pure; must not know seconds or how candidates are found.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dtft.planner.amounts import Sizes, parts
from dtft.planner.graph import Graph
from dtft.planner.groups import region
from dtft.planner.lifetimes import Event, Lifetimes, follow
from dtft.planner.partition import Division
from dtft.planner.plan import Spec

RESERVE = 0.04
"""Share of a device's memory that no plan may count on: fragmentation, the runtime."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """What comes into memory and goes during one step of a program."""

    graph: Graph

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return follow(self.graph)

    @property
    def events(self) -> tuple[Event, ...]:
        """In the order of the program."""
        return self._lifetimes.events

    def divisors(self, division: Division) -> set[tuple[str, ...]]:
        """The axes that divide its values, together: what their bytes depend on."""
        values = {event.value for event in self.events}
        return {_flat(division.spec(self.graph.values[index])) for index in values}

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
        made |= {o for loop in self.graph.loops for i, o in loop.stacked if i in made}
        return frozenset(made & read)


@dataclass(frozen=True, kw_only=True, eq=False)
class Peak:
    """The most that is alive at one time, by term; bytes, one entry per candidate."""

    activations: Any
    gradients: Any


def peak(
    timeline: Timeline,
    division: Division,
    sizes: Sizes,
    gradient_specs: Mapping[int, Spec],
) -> Peak:
    """The fullest moment between the first operator and the last.

    Args:
        timeline: of the program.
        division: which axes divide which dims; `MICRO` among them.
        sizes: axis to size, one entry per candidate.
        gradient_specs: gradients that are divided otherwise.
    """
    alive: Any = 0.0
    gradients: Any = 0.0
    most: Any = 0.0
    of_gradients: Any = 0.0
    known: dict[int, Any] = {}
    for event in timeline.events:
        num_bytes = known.get(event.value)
        if num_bytes is None:
            spec = gradient_specs.get(event.value)
            value = timeline.graph.values[event.value]
            axes = _flat(division.spec(value) if spec is None else spec)
            num_bytes = known[event.value] = value.num_bytes / parts(axes, sizes)
        sign = 1 if event.comes else -1
        alive = alive + sign * num_bytes
        if event.value in timeline.gradients:
            gradients = gradients + sign * num_bytes
        if event.comes:
            higher = alive > most
            of_gradients = np.where(higher, gradients, of_gradients)
            most = np.where(higher, alive, most)
    return Peak(activations=most - of_gradients, gradients=of_gradients)


def _flat(spec: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(axis for part in spec for axis in part)
