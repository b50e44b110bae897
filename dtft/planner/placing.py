"""Finds where tasks run: several greedy rules, the baselines, moves of single tasks.

Earliest finish in the order of upward ranks (HEFT), with all nodes and without the
slower ones; everything on one node, stretches of the program, and a random choice are
candidates too, so that nothing is worse than these. The best is then changed task by
task while that helps. Pure and deterministic. Must not know programs or clusters
(`placement` does).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dtft.planner.contiguous import split
from dtft.planner.list_schedule import Schedule, schedule
from dtft.planner.moving import Climb
from dtft.planner.node_speeds import Speeds, faster, speed_table
from dtft.planner.problem import Problem
from dtft.planner.ranks import TAKEN, as_they_come, by_rank, by_rank_on

Order = Literal["rank", "traversal"]
BASELINES = ("one node", "contiguous", "random")
_TASKS_LOOKED_AT = 20_000
"""Tasks that may be scheduled again while moves are tried, in all: about 0.5 s."""
_SMALL = 30
"""Tasks up to which every move is looked at in all orders."""
_FEW = 20
"""Fewer tries to move a task than this are not worth their time."""
_DRAWS = 10
_TRAVERSAL = "earliest finish in the order of the program"
_STARTS = 6
"""Candidates from which moves are tried."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The best schedule, and how good the baselines are."""

    schedule: Schedule
    how: str
    """Which rule found it."""
    baselines: dict[str, float]
    """Seconds of a step of those that can be run."""
    dropped: dict[str, float]
    """Seconds of a step of earliest finish without the slower nodes, by their names."""
    speeds: Speeds


class Search:
    """Candidates of one problem, the best of them at hand."""

    def __init__(self, problem: Problem, order: Order, microbatches: int) -> None:
        """Nothing is looked at yet."""
        self.problem, self.microbatches = problem, microbatches
        self.order: Order = order
        self.best: Schedule | None = None
        self.seen: dict[tuple[int, ...], float] = {}
        """Nodes of tasks of each candidate, and its seconds of a step."""
        self.orders = [as_they_come(problem), *(some for _, some in self._orders())]
        self.is_tight = False
        """Whether memory did not suffice for a candidate."""
        self.how = ""

    def step_s(self, found: Schedule) -> float:
        """Seconds of a step: microbatches follow each other as the fullest lets them.

        What node or port is taken longest is taken so for each further microbatch.
        """
        fullest = max(*found.busy_s, found.port_s)
        return found.makespan_s + (self.microbatches - 1) * fullest

    def see(self, found: Schedule | None, how: str) -> float | None:
        """Keeps a schedule if it is the best so far; its seconds of a step."""
        if found is None:
            self.is_tight = True
            return None
        seconds = self.step_s(found)
        self.seen[found.node_of] = min(seconds, self.seen.get(found.node_of, seconds))
        if self.best is None or seconds < self.step_s(self.best):
            self.best, self.how = found, how
        return seconds

    def on(self, node_of: Sequence[int]) -> Schedule | None:
        """The schedule of tasks on given nodes."""
        problem = self.problem
        if self.order == "traversal":
            return schedule(problem, as_they_come(problem), node_of)
        return schedule(problem, by_rank_on(problem, node_of), node_of)

    def greedy(self) -> None:
        """Each task where it ends first, in each order and in the program's."""
        for name, order in self._orders():
            self.see(schedule(self.problem, order), name)
        if self.order == "rank":
            self.see(schedule(self.problem, as_they_come(self.problem)), _TRAVERSAL)

    def without_slow(self) -> dict[str, float]:
        """The same without the slower nodes: seconds by those that are left out."""
        problem, found = self.problem, {}
        name, order = next(iter(self._orders()))
        for kept in faster(problem):
            names = problem.nodes.names
            out = ", ".join(names[n] for n in range(len(names)) if n not in kept)
            some = schedule(problem, order, among=kept)
            seconds = self.see(some, f"{name}, without {out}")
            if seconds is not None:
                found[out] = seconds
        return found

    def by_type(self, speeds: Speeds) -> None:
        """Each class of tasks on the type that is fastest for it."""
        types = np.array(self.problem.nodes.alike())
        wanted = {kind: min(s, key=lambda name: s[name]) for kind, s in speeds.items()}
        rows = [
            types == wanted[k] if k in wanted else types == types
            for k in self.problem.tasks.kinds
        ]
        seconds = np.where(np.array(rows), self.problem.array, np.inf)
        if np.isinf(seconds).all(axis=1).any():
            return
        name, order = next(iter(self._orders()))
        some = schedule(self.problem.with_seconds(seconds), order)
        self.see(some, f"{name}, each class on its fastest type")

    def _orders(self) -> Iterator[tuple[str, list[int]]]:
        if self.order == "traversal":
            yield _TRAVERSAL, as_they_come(self.problem)
            return
        for taken in TAKEN:
            words = f"earliest finish by upward rank ({taken} seconds)"
            yield words, by_rank(self.problem, taken)

    def one_node(self) -> float | None:
        """Everything on the node that is fastest, of those that can."""
        sums = self.problem.array.sum(axis=0)
        for node in np.argsort(sums, kind="stable").tolist():
            if np.isfinite(sums[node]):
                found = self.on([node] * len(self.problem.seconds))
                if found is not None:
                    return self.see(found, "everything on one node")
        return None

    def contiguous(self) -> float | None:
        """Stretches of the program, the slowest as fast as can be."""
        groups = self.problem.tasks.together
        rows = np.stack([self.problem.array[group].sum(0) for group in groups])
        num_bytes = np.array([self._bytes_of(group) for group in groups])
        capacity = np.array(self.problem.capacity)
        for most in (np.full(len(capacity), np.inf), capacity):
            found = split(rows, num_bytes=num_bytes, capacity=most)
            if found is None:
                return None
            node_of = [0] * len(self.problem.seconds)
            for one in found:
                for group in groups[one.start : one.stop]:
                    for task in group:
                        node_of[task] = one.node
            seconds = self.see(self.on(node_of), "stretches of the program")
            if seconds is not None:
                return seconds
        return None

    def _bytes_of(self, group: Sequence[int]) -> float:
        """Bytes that a group brings to its node, if nothing is freed."""
        problem, inside = self.problem, set(group)
        values = {v for task in group for v in problem.made[task] + problem.read[task]}
        return sum(
            problem.held_bytes[value]
            for value in values
            if problem.producer[value] < 0 or problem.producer[value] in inside
        )

    def random(self) -> float | None:
        """A random node for each task: the first draw that memory suffices for."""
        rng, problem = np.random.default_rng(0), self.problem
        can = np.isfinite(problem.array)
        for _ in range(_DRAWS):
            node_of = [0] * len(problem.seconds)
            for group in problem.tasks.together:
                node = int(rng.choice(np.flatnonzero(can[group[0]])))
                for task in group:
                    node_of[task] = node
            found = self.on(node_of)
            if found is not None:
                return self.see(found, "a random node for each task")
        return None

    def squeeze(self) -> list[tuple[int, ...]]:
        """Where memory is short: good placements without it, the last moved until it
        suffices, if that is reached.
        """
        roomy = Search(self.problem.roomy(), self.order, self.microbatches)
        roomy.greedy()
        roomy.contiguous()
        capacity = np.array(self.problem.capacity)

        def lacking_bytes(node_of: Sequence[int]) -> float:
            found = roomy.on(node_of)
            if found is None:
                return np.inf
            over = np.maximum(np.array(found.memory_bytes) - capacity, 0.0)
            return float(over.sum())

        tries = max(_TASKS_LOOKED_AT // max(len(self.problem.seconds), 1), _FEW)
        climb = Climb(self.problem, lacking_bytes, tries)
        starts = list(roomy.seen)
        node_of = climb.best_from(starts)
        self.best_on(node_of, "tasks moved until memory sufficed")
        return [*starts, tuple(node_of)]

    def best_on(self, node_of: Sequence[int], how: str) -> float | None:
        """Seconds of a step of the best schedule of tasks on given nodes."""
        found = [self.see(self.on(node_of), how)]
        for order in self.orders:
            found.append(self.see(schedule(self.problem, order, node_of), how))
        return min((s for s in found if s is not None), default=None)

    def improve(self, moves: int) -> None:
        """Moves tasks while the step gets faster, from the best candidates."""
        ranked = sorted(self.seen.items(), key=lambda item: item[1])
        starts = [node_of for node_of, _ in ranked[:_STARTS]]
        if self.is_tight:
            starts += self.squeeze()
        climb = Climb(self.problem, self._step_on, moves)
        node_of = climb.best_from(starts)
        self.best_on(node_of, f"{self.how}, then tasks moved")

    def _step_on(self, node_of: Sequence[int]) -> float:
        found = [self.on(node_of)]
        if len(node_of) <= _SMALL:
            found += [schedule(self.problem, order, node_of) for order in self.orders]
        return min((self.step_s(one) for one in found if one), default=np.inf)


def find(
    problem: Problem,
    *,
    order: Order = "rank",
    microbatches: int = 1,
    moves: int | None = None,
) -> Found | None:
    """The best placement that the rules find; None where nothing fits into memory.

    Args:
        problem: tasks and nodes.
        order: in which tasks take their places: HEFT's, or the program's.
        microbatches: of one step, one after the other.
        moves: single tasks that may be tried on another node; None: as many as take
            less than half a second.
    """
    search, speeds = Search(problem, order, microbatches), speed_table(problem)
    search.greedy()
    dropped = search.without_slow()
    search.by_type(speeds)
    found = (search.one_node(), search.contiguous(), search.random())
    named = zip(BASELINES, found, strict=True)
    baselines = {name: seconds for name, seconds in named if seconds is not None}
    if search.best is None:
        search.squeeze()
    if moves is None:
        moves = _TASKS_LOOKED_AT // max(len(problem.seconds), 1)
        moves = moves if moves >= _FEW else 0
    if moves and search.best is not None:
        search.improve(moves)
    if search.best is None:
        return None
    return Found(
        schedule=search.best,
        how=search.how,
        baselines=baselines,
        dropped=dropped,
        speeds=speeds,
    )
