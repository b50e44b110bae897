"""The placement problem as numbers, and a lower bound on the seconds of a step."""

from copy import copy

import numpy as np
from numpy.typing import NDArray

from dtft.placement.nodes import Nodes
from dtft.placement.tasks import Tasks

Floats = NDArray[np.float64]


class Problem:
    """Tasks and nodes as plain lists, which are fast to read in many simulations."""

    def __init__(
        self, tasks: Tasks, nodes: Nodes, *, frees: bool = True, copies: int = 1
    ) -> None:
        """Builds the lists.

        Args:
            tasks: the tasks to run.
            nodes: the nodes that run the tasks.
            frees: whether the memory of a value that a task makes is freed after the
                value's last reader. Arguments and results of the program always stay.
            copies: the number of microbatches in flight: memory holds this many copies
                of each value that a task makes.
        """
        self.tasks, self.nodes, self.frees = tasks, nodes, frees
        num = len(tasks.names)
        seconds = tasks.seconds.copy()
        for members in tasks.together:
            if len(members) > 1:
                lacking = np.isinf(seconds[members]).any(axis=0)
                seconds[members] = np.where(lacking, np.inf, seconds[members])
        self.seconds: list[list[float]] = seconds.tolist()
        self.array = seconds
        self.read: list[list[int]] = [[] for _ in range(num)]
        self.made: list[list[int]] = [[] for _ in range(num)]
        for place, value in enumerate(tasks.passed):
            if value.producer >= 0:
                self.made[value.producer].append(place)
            for reader in dict.fromkeys(value.readers):
                self.read[reader].append(place)
        self.num_bytes = [value.num_bytes for value in tasks.passed]
        self.producer = [value.producer for value in tasks.passed]
        self.readers = [len(set(value.readers)) for value in tasks.passed]
        self.sum_of = [
            tasks.gradient_of.get(value, -1) for value in range(len(tasks.passed))
        ]
        """For each value that is a part of a gradient (the contribution of one
        reader), the index of the value that the gradient is of; -1 for other values."""
        self.adds = [any(self.sum_of[v] >= 0 for v in read) for read in self.read]
        """For each task, whether it reads a part of a gradient."""
        self.stays = [
            value.is_kept or value.producer < 0 or not frees for value in tasks.passed
        ]
        self.held_bytes = [
            value.num_bytes * (copies if value.producer >= 0 else 1)
            for value in tasks.passed
        ]
        self.made_bytes = [sum(self.held_bytes[v] for v in made) for made in self.made]
        self.empty_s: list[list[float]] = nodes.empty_s.tolist()
        self.byte_s: list[list[float]] = nodes.byte_s.tolist()
        self.ports: list[list[list[int]]] = nodes.ports.tolist()
        self.num_ports = int(nodes.ports.max(initial=0)) + 1
        self.capacity: list[float] = nodes.memory_bytes.tolist()

    def send_s(self, value: int, source: int, target: int) -> float:
        """Computes the seconds of sending a value between two nodes through free ports.

        The result is 0 from a node to itself.
        """
        if source == target:
            return 0.0
        each = self.byte_s[source][target]
        return self.empty_s[source][target] + each * self.num_bytes[value]

    def roomy(self) -> "Problem":
        """Returns the same problem on nodes with unlimited memory."""
        made = copy(self)
        made.capacity = [np.inf] * len(self.capacity)
        return made

    def with_seconds(self, seconds: Floats) -> "Problem":
        """Returns the same problem with other seconds of the tasks, `[tasks, nodes]`.

        A node cannot run a task for which its seconds are infinite.
        """
        made = copy(self)
        made.array, made.seconds = seconds, seconds.tolist()
        return made


_ROUNDS = 60


def bound_s(problem: Problem, microbatches: int = 1) -> float:
    """Computes a lower bound on the seconds of a step.

    `shared_s` is a lower bound on the seconds of the busiest node in one microbatch.
    The first microbatch takes at least the larger of `shared_s` and the longest path
    through the tasks, with each task on its fastest node and without transfers. Each
    further microbatch adds at least the larger of `shared_s` and the longest single
    task, on its fastest node.

    Args:
        problem: tasks and nodes.
        microbatches: the number of microbatches of a step.
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
    """Computes a lower bound on the busiest node's seconds in any assignment of tasks.

    Let y be factors of 0 or more, one for each node, that add up to 1. Every y gives a
    bound: the sum over the tasks of the least y[node] * seconds[task, node]. (This is
    the dual of a linear program in which tasks may be divided.) Of 60 iterations
    (`_ROUNDS`), each raises the factors of the nodes with more load than others. The
    largest bound found is returned. The example divides three tasks of 1 s between two
    nodes.

    Args:
        seconds: `[tasks, nodes]`, infinite where a node cannot run a task.

    >>> round(shared_s(np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])), 2)
    1.5
    """
    num = seconds.shape[1]
    finite = np.isfinite(seconds)
    if not len(seconds):
        return 0.0
    # Start from the nodes' speeds: exact if all tasks have the same speed ratios.
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
