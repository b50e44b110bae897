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
from dtft.planner.problem import Problem
from dtft.planner.ranks import TAKEN, as_they_come, by_rank, by_rank_on

Order = Literal["rank", "traversal"]
BASELINES = ("one node", "contiguous", "random")
_TASKS_LOOKED_AT = 10_000
"""Tasks that may be scheduled again while moves are tried, in all: about 0.3 s."""
_DRAWS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The best schedule, and how good the baselines are."""

    schedule: Schedule
    how: str
    """Which rule found it."""
    baselines: dict[str, float]
    """Seconds of a step of those that can be run."""
    dropped: dict[str, float]
    """Seconds of a step of HEFT by the nodes that are left out: names, in words."""


class Search:
    """Candidates of one problem, the best of them at hand."""

    def __init__(self, problem: Problem, order: Order, microbatches: int) -> None:
        """Nothing is looked at yet."""
        self.problem, self.order, self.microbatches = problem, order, microbatches
        self.best: Schedule | None = None
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
            return None
        if self.best is None or self.step_s(found) < self.step_s(self.best):
            self.best, self.how = found, how
        return self.step_s(found)

    def on(self, node_of: Sequence[int]) -> Schedule | None:
        """The schedule of tasks on given nodes."""
        problem = self.problem
        if self.order == "traversal":
            return schedule(problem, as_they_come(problem), node_of)
        return schedule(problem, by_rank_on(problem, node_of), node_of)

    def greedy(self, nodes: Sequence[int], words: str) -> float | None:
        """Each task where it ends first, of some nodes: seconds of the best order."""
        found = []
        for name, order in self._orders():
            some = schedule(self.problem, order, among=nodes)
            found.append(self.see(some, f"{name}{words}"))
        return min((s for s in found if s is not None), default=None)

    def _orders(self) -> Iterator[tuple[str, list[int]]]:
        if self.order == "traversal":
            yield (
                "earliest finish in the order of the program",
                as_they_come(self.problem),
            )
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

    def improve(self, moves: int) -> None:
        """Moves single tasks to other nodes while the step gets faster."""
        problem, groups = self.problem, self.problem.tasks.together
        rng, left = np.random.default_rng(0), moves
        if self.best is None:
            return
        node_of, helped = list(self.best.node_of), True
        while helped and left > 0:
            helped = False
            for number in rng.permutation(len(groups)).tolist():
                group = groups[number]
                here = node_of[group[0]]
                for node in np.flatnonzero(np.isfinite(problem.array[group[0]])):
                    if node == here or left <= 0:
                        continue
                    left -= 1
                    before = self.best
                    for task in group:
                        node_of[task] = int(node)
                    self.see(self.on(node_of), _moved(self.how))
                    if self.best is not before:
                        helped, here = True, int(node)
                    for task in group:
                        node_of[task] = here


def _moved(how: str) -> str:
    return how if how.endswith("moved") else f"{how}, then tasks moved"


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
    search = Search(problem, order, microbatches)
    dropped = {}
    for nodes, words in subsets(problem):
        seconds = search.greedy(nodes, words)
        if words and seconds is not None:
            dropped[words] = seconds
    found = (search.one_node(), search.contiguous(), search.random())
    named = zip(BASELINES, found, strict=True)
    baselines = {name: seconds for name, seconds in named if seconds is not None}
    if search.best is None:
        return None
    if moves is None:
        moves = _TASKS_LOOKED_AT // max(len(problem.seconds), 1)
    search.improve(moves)
    return Found(
        schedule=search.best, how=search.how, baselines=baselines, dropped=dropped
    )


def subsets(problem: Problem) -> Iterator[tuple[list[int], str]]:
    """All nodes, and all but the slower ones: types, and halves of unlike nodes."""
    num = len(problem.capacity)
    yield list(range(num)), ""
    pace = _pace(problem)
    distinct = sorted(set(pace), reverse=True)
    cuts = distinct[:-1] if len(distinct) <= 4 else [distinct[len(distinct) // 2 - 1]]
    for cut in cuts:
        kept = [node for node in range(num) if pace[node] < cut]
        if kept and np.isfinite(problem.array[:, kept]).any(1).all():
            names = [problem.nodes.names[n] for n in range(num) if n not in kept]
            yield kept, f" without {', '.join(names)}"


def _pace(problem: Problem) -> list[float]:
    """How many times as long as the fastest node each takes, for what it can run."""
    best = problem.array.min(axis=1, keepdims=True).clip(1e-300)
    ratio = np.where(np.isfinite(problem.array), problem.array / best, np.nan)
    weights = np.where(np.isfinite(problem.array), best, 0.0)
    total = weights.sum(0)
    pace = np.nansum(ratio * weights, axis=0) / np.where(total > 0, total, 1.0)
    return [round(p, 9) if t > 0 else np.inf for p, t in zip(pace, total, strict=True)]
