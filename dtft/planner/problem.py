"""Tasks on nodes as lists of plain numbers: looked at often by everything that places.

Must not know schedules or how nodes are chosen.
"""

from copy import copy

import numpy as np
from numpy.typing import NDArray

from dtft.planner.nodes import Nodes
from dtft.planner.tasks import Tasks

Floats = NDArray[np.float64]


class Problem:
    """Tasks on nodes, as simulating needs them: made once, for many schedules."""

    def __init__(
        self, tasks: Tasks, nodes: Nodes, *, frees: bool = True, copies: int = 1
    ) -> None:
        """Prepares lists.

        Args:
            tasks: to be run.
            nodes: to run them on.
            frees: whether memory of what nothing reads any more is used again.
            copies: of what tasks make, that are in memory at a time (microbatches).
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
        """Of each value the one that it is a part of the gradient of; or -1."""
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
        """Seconds that a value takes between two nodes that have nothing else to do."""
        if source == target:
            return 0.0
        each = self.byte_s[source][target]
        return self.empty_s[source][target] + each * self.num_bytes[value]

    def roomy(self) -> "Problem":
        """The same on nodes that have room for everything."""
        made = copy(self)
        made.capacity = [np.inf] * len(self.capacity)
        return made

    def with_seconds(self, seconds: Floats) -> "Problem":
        """The same with other seconds: nodes are closed to tasks with infinite ones."""
        made = copy(self)
        made.array, made.seconds = seconds, seconds.tolist()
        return made
