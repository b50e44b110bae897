"""Which nodes are fast for what, by classes of tasks, and which are slow altogether.

Arithmetic on seconds; must not know schedules.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from dtft.planner.problem import Problem

Speeds = Mapping[str, Mapping[str, float]]
"""Class of tasks to type of node to seconds."""


def speed_table(problem: Problem) -> Speeds:
    """Seconds of all tasks of a class on one node of a type, by class and type.

    A type that has no kernel for one of them is left out, a class that no type has all
    kernels for too.
    """
    types, kinds = problem.nodes.alike(), np.array(problem.tasks.kinds)
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(problem.tasks.kinds):
        sums = problem.array[kinds == kind].sum(axis=0)
        each: dict[str, float] = {}
        for name, seconds in zip(types, sums.tolist(), strict=True):
            if seconds < each.get(name, np.inf):
                each[name] = seconds
        if each:
            found[kind] = each
    return found


def faster(problem: Problem) -> Iterator[list[int]]:
    """All but the slower nodes: type by type, or half of many unlike ones."""
    num, pace = len(problem.capacity), _pace(problem)
    distinct = sorted(set(pace), reverse=True)
    cuts = distinct[:-1] if len(distinct) <= 4 else [distinct[len(distinct) // 2 - 1]]
    for cut in cuts:
        kept = [node for node in range(num) if pace[node] < cut]
        if kept and np.isfinite(problem.array[:, kept]).any(axis=1).all():
            yield kept


def _pace(problem: Problem) -> list[float]:
    """How many times as long as the fastest node each takes, for what it can run."""
    best = problem.array.min(axis=1, keepdims=True).clip(1e-300)
    ratio = np.where(np.isfinite(problem.array), problem.array / best, np.nan)
    weights = np.where(np.isfinite(problem.array), best, 0.0)
    total = weights.sum(0)
    pace = np.nansum(ratio * weights, axis=0) / np.where(total > 0, total, 1.0)
    return [round(p, 9) if t > 0 else np.inf for p, t in zip(pace, total, strict=True)]
