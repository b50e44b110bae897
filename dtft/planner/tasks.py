"""Tasks and what they hand to each other: what a placement lays on nodes.

Values only, checked. A task is an operator, a loop, or a layer (`task_graph` makes them
of a traced program); any other graph of tasks will do as well. Must not know programs,
links or schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A value that one task makes and others read."""

    producer: int
    """The task that makes it; -1 for an argument, which lies where it is first read
    and is sent from there to other nodes, as it is another one in every step."""
    num_bytes: float
    readers: tuple[int, ...]
    is_kept: bool = False
    """Whether it stays in memory to the end: a result of the program."""
    has_gradient: bool = True
    """Whether a backward pass sends something back for it: integers have none, nor has
    what is not between parameters and the loss."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tasks:
    """Tasks in an order in which they can be run one after another."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    """Of each task, what it is: `graph.Kind`, `loop` or `block`."""
    seconds: Floats
    """`[tasks, nodes]`; infinite where the node has no kernel for it."""
    passed: tuple[Passed, ...]
    groups: tuple[int, ...] = ()
    """Tasks of one number go to the same node; default: each its own."""
    gradient_of: Mapping[int, int] = field(default_factory=dict)
    """Values of `passed` that are parts of gradients, and of which others: those that
    are made on one node are added up there and sent as one."""

    def __post_init__(self) -> None:
        num = len(self.names)
        if not self.groups:
            object.__setattr__(self, "groups", tuple(range(num)))
        lengths = {len(self.kinds), len(self.seconds), len(self.groups)}
        if lengths != {num} or self.seconds.ndim != 2 or (self.seconds < 0).any():
            raise ValueError(
                f"tasks: {num} names, {len(self.kinds)} kinds, {len(self.groups)} "
                f"groups, seconds {self.seconds.shape}. Allowed: as many of each, and "
                "seconds [tasks, nodes] of 0 or more."
            )
        for value in self.passed:
            if any(not value.producer < reader < num for reader in value.readers):
                raise ValueError(
                    f"tasks: {value} is read before it is made, or by no task. Number "
                    "tasks in an order in which they can run."
                )

    @property
    def num_nodes(self) -> int:
        """Nodes that seconds are known for."""
        return self.seconds.shape[1]

    @property
    def together(self) -> list[list[int]]:
        """Tasks of each group, groups by their first task."""
        found: dict[int, list[int]] = {}
        for task, group in enumerate(self.groups):
            found.setdefault(group, []).append(task)
        return list(found.values())

    def weighted(self, weights: Sequence[float] | Floats) -> "Tasks":
        """Seconds divided by each node's weight; one of 0, or nearly, takes it out."""
        with np.errstate(divide="ignore", over="ignore"):
            factors = 1 / np.asarray(weights, float)
        return replace(self, seconds=_product(self.seconds, factors[None, :]))

    def with_backward(self, factors: Sequence[float] | Floats) -> "Tasks":
        """Also with the backward pass: each task again, on its node, in reverse.

        What a task read from another it gives a gradient of as many bytes back to.
        Gradients of arguments stay where they are made.

        Args:
            factors: seconds of each task's backward over its forward, `[tasks]`.
        """
        num = len(self.names)
        behind = [2 * num - 1 - task for task in range(num)]
        passed = [replace(v, readers=_again(v, behind)) for v in self.passed]
        # A value's gradient comes in one part from each task that read it; a schedule
        # adds up those of one node.
        # A task's backward comes after itself, also where it reads nothing else.
        passed += [
            Passed(producer=task, num_bytes=0.0, readers=(behind[task],))
            for task in range(num)
        ]
        gradient_of = {}
        for number, value in enumerate(self.passed):
            if value.producer < 0 or not value.has_gradient:
                continue
            for reader in value.readers:
                gradient_of[len(passed)] = number
                ends = (behind[value.producer],)
                made = Passed(
                    producer=behind[reader], num_bytes=value.num_bytes, readers=ends
                )
                passed.append(made)
        back = self.seconds * np.asarray(factors, float)[:, None]
        return Tasks(
            names=self.names + tuple(f"{n} backward" for n in reversed(self.names)),
            kinds=self.kinds + self.kinds[::-1],
            seconds=np.concatenate([self.seconds, back[::-1]]),
            passed=tuple(passed),
            groups=self.groups + self.groups[::-1],
            gradient_of=gradient_of,
        )


def _again(value: Passed, behind: Sequence[int]) -> tuple[int, ...]:
    """Readers of a value with the backward pass: it is kept for its own readers'."""
    return (*value.readers, *(behind[reader] for reader in reversed(value.readers)))


def _product(seconds: Floats, factors: Floats) -> Floats:
    """Their product; a task of 0 s on a node without weight takes for ever too."""
    with np.errstate(invalid="ignore"):
        found = seconds * factors
    return np.where(np.isinf(factors), np.inf, found)
