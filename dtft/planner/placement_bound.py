"""What no placement can be faster than.

Pure arithmetic on seconds; must not know links, memory or how placements are found.
"""

import numpy as np
from numpy.typing import NDArray

from dtft.planner.problem import Problem

Floats = NDArray[np.float64]
_ROUNDS = 60


def bound_s(problem: Problem, microbatches: int = 1) -> float:
    """Seconds that a step takes at least.

    The longest way through the tasks, each where it is fastest and nothing sent; for
    each further microbatch, and for the first too where that is more, what the fullest
    node has to do if tasks could be cut into any parts (`shared_s`).
    """
    least = problem.array.min(axis=1)
    ends = np.zeros(len(least))
    ready = np.zeros(len(least))
    for task in range(len(least)):
        ends[task] = ready[task] + least[task]
        for value in problem.made[task]:
            for reader in problem.tasks.passed[value].readers:
                ready[reader] = max(ready[reader], ends[task])
    shared = shared_s(problem.array)
    longest = float(ends.max(initial=0.0))
    slowest = max(shared, float(least.max(initial=0.0)))
    return max(longest, shared) + (microbatches - 1) * slowest


def shared_s(seconds: Floats) -> float:
    """A lower bound of what the fullest node does, however tasks are shared out.

    For any shares y of nodes, adding up to 1, the fullest node takes at least the sum
    over tasks of min over nodes of y seconds (the dual of sharing out tasks that can
    be cut). Shares follow loads: a node that is chosen more than others costs more.

    Args:
        seconds: `[tasks, nodes]`, infinite where a node cannot have a task.

    >>> round(shared_s(np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])), 2)
    1.5
    """
    num = seconds.shape[1]
    finite = np.isfinite(seconds)
    if not len(seconds):
        return 0.0
    # Start from shares of nodes by speed: exact where all tasks see the same speeds.
    least = seconds.min(axis=1, keepdims=True).clip(1e-300)
    ratio = np.where(finite, seconds, 0.0) / least
    pace = np.maximum(ratio.sum(axis=0) / np.maximum(finite.sum(axis=0), 1), 1.0)
    shares = (1 / pace) / (1 / pace).sum()
    best = 0.0
    for number in range(_ROUNDS):
        priced = np.where(finite, seconds * shares, np.inf)
        best = max(best, float(priced.min(1).sum()))
        chosen = priced.argmin(1)
        load = np.bincount(chosen, seconds[np.arange(len(chosen)), chosen], num)
        step = 1.0 / (number + 1) ** 0.5
        shares = shares * np.exp(step * (load / max(load.max(), 1e-300) - 0.5))
        shares = shares / shares.sum()
    return best
