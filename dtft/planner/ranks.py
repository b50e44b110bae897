"""In which order tasks take their places: by what depends on them, or as they come.

Upward rank (HEFT, Topcuoglu, Hariri and Wu 2002): seconds from the begin of a task to
the end of the program along the longest way. What a task takes before its node is known
is the mean, the least or the most of its nodes. Pure; must not know schedules.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from dtft.planner.problem import Problem

Taken = Literal["mean", "max", "min"]
TAKEN: tuple[Taken, ...] = ("mean", "max", "min")


def by_rank(problem: Problem, taken: Taken) -> list[int]:
    """Tasks, highest upward rank first, before nodes are known."""
    seconds = np.where(np.isfinite(problem.array), problem.array, np.nan)
    reduce = {"mean": np.nanmean, "max": np.nanmax, "min": np.nanmin}[taken]
    num = len(problem.capacity)
    pairs = max(num * (num - 1), 1)
    empty_s = float(problem.nodes.empty_s.sum()) / pairs
    byte_s = float(problem.nodes.byte_s.sum()) / pairs
    sending = [empty_s + byte_s * num_bytes for num_bytes in problem.num_bytes]
    return _ordered(problem, reduce(seconds, axis=1).tolist(), lambda v, _: sending[v])


def by_rank_on(problem: Problem, node_of: Sequence[int]) -> list[int]:
    """Tasks, highest upward rank first, on nodes that are known."""
    seconds = [row[node] for row, node in zip(problem.seconds, node_of, strict=True)]

    def sending_s(value: int, reader: int) -> float:
        source = node_of[problem.producer[value]]
        return problem.send_s(value, source, node_of[reader])

    return _ordered(problem, seconds, sending_s)


def as_they_come(problem: Problem) -> list[int]:
    """Tasks in the order of the program: the seeds' plain traversal."""
    return list(range(len(problem.seconds)))


def _ordered(
    problem: Problem, seconds: Sequence[float], sending_s: Callable[[int, int], float]
) -> list[int]:
    passed = problem.tasks.passed
    ranks = [0.0] * len(seconds)
    for task in reversed(range(len(seconds))):
        behind = 0.0
        for value in problem.made[task]:
            for reader in passed[value].readers:
                behind = max(behind, sending_s(value, reader) + ranks[reader])
        ranks[task] = seconds[task] + behind
    return sorted(range(len(ranks)), key=lambda task: -ranks[task])
