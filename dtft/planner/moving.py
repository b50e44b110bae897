"""Changes where tasks run while that makes a step faster: one task, or two neighbours.

Climbs from several placements, the best first, and ends at one that no single move,
and no move of two tasks of which one reads what the other makes, improves, or when its
tries are used up. Deterministic. Must not know why a placement was a candidate.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from dtft.planner.problem import Problem

_MOST_ENDS = 6

Step = Callable[[Sequence[int]], float]
"""Seconds of a step with tasks on given nodes; infinite where memory does not do."""


class Climb:
    """Tries left, and the best that was seen."""

    def __init__(self, problem: Problem, step: Step, tries: int) -> None:
        """Nothing is tried yet.

        Args:
            problem: tasks and nodes.
            step: asked about every placement that is looked at.
            tries: how many may be looked at.
        """
        self.groups, self.step, self.left = problem.tasks.together, step, tries
        can = np.isfinite(problem.array)
        self.nodes = [np.flatnonzero(can[group[0]]).tolist() for group in self.groups]
        self.problem = problem

    def best_from(self, starts: Sequence[Sequence[int]]) -> list[int]:
        """The best placement that is reached; `starts` have to be ones that work."""
        best, best_s = list(starts[0]), np.inf
        for start in starts:
            self.left -= 1
            found, seconds = self._singly(list(start), self.step(start))
            if seconds < best_s:
                best, best_s = found, seconds
            if self.left <= 0:
                return best
        while self.left > 0:
            found, seconds = self._first(best, best_s, self._of_pairs(best))
            if seconds >= best_s:
                break
            best, best_s = self._singly(found, seconds)
        return best

    def _singly(self, node_of: list[int], seconds: float) -> tuple[list[int], float]:
        """Single moves, group after group, until none of a round of them helps."""
        idle = 0
        for number in itertools.cycle(range(len(self.groups))):
            if idle == len(self.groups) or self.left <= 0:
                break
            before = seconds
            moves = [{number: node} for node in self.nodes[number]]
            node_of, seconds = self._first(node_of, seconds, moves)
            idle = idle + 1 if seconds >= before else 0
        return node_of, seconds

    def _of_pairs(self, node_of: Sequence[int]) -> Iterator[dict[int, int]]:
        for one, other in _neighbours(self.problem, self.groups):
            here = node_of[self.groups[one][0]], node_of[self.groups[other][0]]
            for there in itertools.product(self.nodes[one], self.nodes[other]):
                if there[0] != here[0] and there[1] != here[1]:
                    yield {one: there[0], other: there[1]}

    def _first(
        self, node_of: list[int], seconds: float, moves: Iterable[dict[int, int]]
    ) -> tuple[list[int], float]:
        """The placement after the first of some moves that helps, or as it was."""
        for move in moves:
            if self.left <= 0:
                break
            tried = list(node_of)
            for number, node in move.items():
                for task in self.groups[number]:
                    tried[task] = node
            if tried == node_of:
                continue
            self.left -= 1
            if (found := self.step(tried)) < seconds * (1 - 1e-12):
                return tried, found
        return node_of, seconds


def _neighbours(
    problem: Problem, groups: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Groups of which one reads what the other makes, or both read the same.

    What many read says little about two of them.
    """
    of = {task: number for number, group in enumerate(groups) for task in group}
    found: dict[tuple[int, int], None] = {}
    for value in problem.tasks.passed:
        ends = [of[task] for task in (value.producer, *value.readers) if task >= 0]
        if len(ends) <= _MOST_ENDS:
            pairs = itertools.combinations(sorted(set(ends)), 2)
            found |= dict.fromkeys(pairs)
    return list(found)
