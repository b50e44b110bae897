"""The operators of a program as something to divide: a division is a placement.

So that `balance.Balance` moves operators between nodes by what was measured. A unit of
load is a second by the cost model, and what a unit takes is how many times as long the
node really needed.
"""

from dataclasses import dataclass

import numpy as np

from dtft.balance.work import Floats
from dtft.placement import (
    Nodes,
    Order,
    Placement,
    PricedTasks,
    Problem,
    Search,
    TaskGraph,
    Tasks,
    place_tasks,
)

TURNS = 3
"""Further placements for what nodes need per step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Operators:
    """Tasks of a step on unlike nodes (`balance.Work`)."""

    tasks: Tasks
    nodes: Nodes
    made: TaskGraph | None = None
    """What of a program the tasks are."""
    order: Order = "rank"
    microbatches: int = 1
    moves: int | None = None

    @classmethod
    def of(
        cls,
        priced: PricedTasks,
        *,
        order: Order = "rank",
        microbatches: int = 1,
        moves: int | None = None,
    ) -> "Operators":
        """The tasks of a priced program; options as those of `place`."""
        return cls(
            tasks=priced.tasks,
            nodes=priced.nodes,
            made=priced.made,
            order=order,
            microbatches=microbatches,
            moves=moves,
        )

    @property
    def num_nodes(self) -> int:
        """Nodes it is divided between."""
        return self.nodes.num

    def by_weight(self, weights: Floats) -> Placement:
        """The placement if each node is as fast as its weight says."""
        return place_tasks(
            self.tasks,
            self.nodes,
            list(weights),
            of=self.made,
            order=self.order,
            microbatches=self.microbatches,
            moves=self.moves,
        )

    def best(self, unit_s: Floats, fixed_s: Floats | None = None) -> Placement:
        """The best placement found if nodes take so many times as long as planned, and
        each step `fixed_s` more: placed a few times, each time with the weights that
        nodes have with about the load that they got."""
        unit = np.asarray(unit_s, float)
        found = self.by_weight(1 / unit)
        if fixed_s is None or not np.any(fixed_s):
            return found
        ways, weights = [found], 1 / unit
        for _ in range(TURNS):
            weights = np.sqrt(weights / self._with_load(ways[-1], unit, fixed_s))
            ways.append(self.by_weight(weights))
        return min(ways, key=lambda way: self.seconds(way, unit, fixed_s))

    def load(self, division: Placement) -> Floats:
        """Seconds that the cost model gives each node in a step."""
        each = self.tasks.seconds[np.arange(len(self.tasks.names)), division.node_of]
        sums = np.bincount(division.node_of, each, minlength=self.num_nodes)
        return self.microbatches * sums.astype(float)

    def seconds(
        self, division: Placement, unit_s: Floats, fixed_s: Floats | None = None
    ) -> float:
        """Seconds of a step of a placement, with all that it waits for."""
        weights = 1 / self._with_load(division, np.asarray(unit_s, float), fixed_s)
        copies = min(self.microbatches, self.num_nodes)
        for frees in (True, False):
            problem = Problem(
                self.tasks.weighted(weights), self.nodes, frees=frees, copies=copies
            )
            search = Search(problem, self.order, self.microbatches)
            found = search.best_on(division.node_of, "")
            if found is not None:
                return found
        return float("inf")

    def _with_load(
        self, division: Placement, unit_s: Floats, fixed_s: Floats | None
    ) -> Floats:
        """How many times as long as planned nodes take with the load that they have."""
        if fixed_s is None:
            return unit_s
        load = self.load(division)
        loaded = np.where(load > 0, load, np.inf)
        return unit_s + np.asarray(fixed_s, float) / loaded
