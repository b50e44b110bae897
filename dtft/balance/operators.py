"""Divides the operators of a program between nodes: a division is a placement.

With `Operators`, `balance.Balance` moves operators between nodes by measured seconds. A
unit of load is one second of the cost model. The seconds per unit are the ratio of
measured to modelled seconds of a node.
"""

from dataclasses import dataclass

import numpy as np

from dtft.balance.load_shares import Floats
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
"""Number of further placements that `Operators.best` tries if a node has fixed seconds
(which do not depend on its load)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Operators:
    """The tasks of a step as work to divide between nodes (`balance.Work`).

    A task is an operator, a loop or a layer of a program; a node is a device. A
    division is a `Placement`: the node of each task. The fields `order`, `microbatches`
    and `moves` are the arguments of the same names of the method `of`.
    """

    tasks: Tasks
    nodes: Nodes
    made: TaskGraph | None = None
    """The tasks with the operators that they consist of; None without a program."""
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
        """Returns the tasks of a program as divisible work.

        Args:
            priced: the tasks, and their seconds on each node by the cost model.
            order: order in which tasks are placed. `rank` tries orders by upward rank
                (the longest path in seconds from a task to the end of the program) and
                the order of the program; `traversal` tries only the order of the
                program.
            microbatches: the number of microbatches of a step.
            moves: the number of tries to move tasks to other nodes; by default 20,000
                divided by the number of tasks, or 0 if this is below 20.
        """
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
        """The number of nodes that share the tasks."""
        return self.nodes.num

    def by_weight(self, weights: Floats) -> Placement:
        """Returns the best placement that `place_tasks` finds for these node speeds.

        `weights` are the relative speeds of the nodes, `[n]`.
        """
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
        """Makes one or four placements; returns the one with the shortest step.

        The first placement is that of `by_weight` for the relative speeds `1 / unit_s`.
        If no node has a `fixed_s` above 0, this placement is returned. Otherwise a
        node's seconds per unit depend on its load, and three more placements are made
        (`TURNS`). Each takes as a node's relative speed the geometric mean of two
        speeds: the one with which the last placement was made, and the one that the
        node has under the load of that placement, with `fixed_s` included.

        Args:
            unit_s: seconds of each node per second of the cost model, `[n]`.
            fixed_s: further seconds of each node with load, per step, `[n]`; None: 0.
        """
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
        """Returns each node's seconds in a step, by the cost model, `[n]`."""
        each = self.tasks.seconds[np.arange(len(self.tasks.names)), division.node_of]
        sums = np.bincount(division.node_of, each, minlength=self.num_nodes)
        return self.microbatches * sums.astype(float)

    def seconds(
        self, division: Placement, unit_s: Floats, fixed_s: Floats | None = None
    ) -> float:
        """Returns the seconds of a step with a placement, waits for transfers included.

        Args:
            division: the placement.
            unit_s: seconds of each node per second of the cost model, `[n]`.
            fixed_s: further seconds of each node with load, per step, `[n]`; None: 0.

        Returns:
            The seconds; infinite if the placement exceeds a node's memory.
        """
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
        """Returns each node's seconds per unit of load, fixed seconds included, `[n]`.

        These are `unit_s` plus `fixed_s` divided by the node's load in the placement
        `division`. For a node without load they are its `unit_s`.
        """
        if fixed_s is None:
            return unit_s
        load = self.load(division)
        loaded = np.where(load > 0, load, np.inf)
        return unit_s + np.asarray(fixed_s, float) / loaded
