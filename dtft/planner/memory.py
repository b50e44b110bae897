"""What a program keeps beside its arguments, in the order in which that happens.

Decides what counts as a gradient and what a ZeRO level changes in what is kept;
`moments` makes bytes of it. Pure; must not know shardings, seconds or how candidates
are found.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dtft.planner.graph import Graph
from dtft.planner.groups import region
from dtft.planner.lifetimes import Event, Lifetimes, follow
from dtft.planner.run_order import scheduled

RESERVE = 0.08
"""Share of a device's memory that no plan may count on: what the count of bytes misses
where XLA runs what the plan says, fragmentation, the runtime. Of 200 compiled steps the
count was more than this too low in 4, by 13 % at most (`experiments/results/
plan_memory.md`): most where XLA keeps a softmax that it computes again for long.
Verification finds those; a reserve that covers them too (14 %) would refuse twice as
many plans that fit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """What comes into memory and goes during one step of a program."""

    graph: Graph
    gathers: bool = False
    """Whether at ZeRO level 3 the step is one of `dtft.train.gathered`, which keeps all
    of the forward pass but gathered parameters."""
    below: "Timeline | None" = None
    """If this is the timeline of that: the one of the levels below."""
    alias: Mapping[int, int] = field(default_factory=dict)
    """Dim to the dim that stands for it in equal layers: what is alike in them is
    counted together."""

    @cached_property
    def at_level_3(self) -> "Timeline":
        """That of the same program at ZeRO level 3."""
        again = any(operator.again for operator in self.graph.operators)
        if not self.gathers or again or self.below is not None:
            return self
        return replace(self, below=self)

    def root(self, dim: int) -> int:
        """The dim that stands for a dim."""
        return self.alias.get(dim, dim)

    @cached_property
    def scheduled(self) -> Graph:
        """The program in the order in which XLA runs it."""
        return scheduled(self.graph) if self.below is None else self.below.scheduled

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return follow(self.scheduled, keeps_all=self.below is not None)

    def read_from(self, index: int) -> frozenset[int]:
        """The values in memory from which readers of a value have it."""
        return self._lifetimes.roots.get(index, frozenset((index,)))

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

    @cached_property
    def loop_dims(self) -> frozenset[int]:
        """Dims that a loop goes along."""
        return frozenset(n for n, dim in enumerate(self.graph.dims) if dim.loop)
