"""The cases of `placement_gap.py`: small random task graphs, and the best there is.

Tries all nodes for all tasks, and of the smallest graphs all orders. Must not know what
becomes of the figures.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dtft.placement import (
    TAKEN,
    Nodes,
    Order,
    Passed,
    Placement,
    Problem,
    Search,
    Tasks,
    as_they_come,
    by_rank,
    place_tasks,
    schedule,
)

KINDS = ("one pass", "forward and backward", "8 microbatches")
RULES = ("placed", "without moves", "program's order, no moves", "best baseline")
MOST_FOR_ORDERS = 5
"""Tasks up to which all orders are tried."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """One graph: seconds of a step over the best's."""

    kind: str
    rule: str
    ratio: float
    worse: bool
    """Than the best of its baselines."""
    all_orders: bool
    """Whether the best is one of all orders too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A random graph on random nodes."""

    tasks: Tasks
    nodes: Nodes
    kind: str
    microbatches: int

    @classmethod
    def random(cls, seed: int) -> "Case":
        """Speeds are log-uniform over a factor of 8, and differ by task too."""
        rng = np.random.default_rng(seed)
        kind = KINDS[seed % len(KINDS)]
        num_nodes = int(rng.integers(2, 4))
        num_tasks = int(rng.integers(3, 8 if num_nodes == 2 else 7))
        tasks = random_tasks(rng, num_tasks, num_nodes)
        memory = np.full(num_nodes, 1e12)
        if rng.random() < 1 / 3:
            total = sum(value.num_bytes for value in tasks.passed)
            memory[: num_nodes - 1] = total * rng.uniform(0.3, 1.0, num_nodes - 1)
        if kind == "forward and backward":
            tasks = tasks.with_backward([2.0] * num_tasks)
        return cls(
            tasks=tasks,
            nodes=Nodes.joined(memory, latency_s=0.05, bandwidth=1e6),
            kind=kind,
            microbatches=8 if kind == "8 microbatches" else 1,
        )

    @property
    def problem(self) -> Problem:
        """As `place_tasks` makes it first: memory that nothing reads is used again."""
        copies = min(self.microbatches, self.nodes.num)
        return Problem(self.tasks, self.nodes, copies=copies)

    def best_s(self) -> tuple[float, bool]:
        """Seconds of the best step, and whether all orders were tried.

        Infinite where memory does not suffice for any.
        """
        problem = self.problem
        search = Search(problem, "rank", self.microbatches)
        small = len(self.tasks.names) <= MOST_FOR_ORDERS
        orders = [by_rank(problem, taken) for taken in TAKEN]
        orders.append(as_they_come(problem))
        if small:
            orders = list(all_orders(self.tasks))
        found = []
        for node_of in self.all_nodes():
            found.append(search.on(node_of))
            found += [schedule(problem, order, node_of) for order in orders]
        seconds = (search.step_s(one) for one in found if one is not None)
        return min(seconds, default=np.inf), small

    def all_nodes(self) -> Iterator[list[int]]:
        """Every way to lay tasks on nodes that have kernels."""
        groups = self.tasks.together
        can = np.isfinite(self.problem.array)
        each = [np.flatnonzero(can[group[0]]).tolist() for group in groups]
        for nodes in itertools.product(*each):
            node_of = [0] * len(self.tasks.names)
            for group, node in zip(groups, nodes, strict=True):
                for task in group:
                    node_of[task] = node
            yield node_of

    def gaps(self) -> Iterator[Gap]:
        """Every rule beside the best."""
        best, all_orders = self.best_s()
        if np.isinf(best):
            return
        placed = self._placed()
        found = (placed, self._placed(moves=0), self._placed("traversal", moves=0))
        seconds = [np.inf if one is None else one.step_s for one in found]
        known = [{} if one is None else one.baselines for one in found]
        best_known = [min(one.values(), default=np.inf) for one in known]
        rows = zip(RULES, (*seconds, best_known[0]), (*best_known, np.inf), strict=True)
        for rule, step_s, baseline in rows:
            yield Gap(
                kind=self.kind,
                rule=rule,
                ratio=step_s / best,
                worse=step_s > baseline * (1 + 1e-9),
                all_orders=all_orders,
            )

    def _placed(
        self, order: Order = "rank", moves: int | None = None
    ) -> Placement | None:
        try:
            return place_tasks(
                self.tasks,
                self.nodes,
                order=order,
                microbatches=self.microbatches,
                moves=moves,
            )
        except ValueError:
            return None


def random_tasks(rng: np.random.Generator, num_tasks: int, num_nodes: int) -> Tasks:
    """Tasks of unlike seconds, values between them, and kernels that are missing."""
    speed = np.exp(rng.uniform(0, np.log(8), num_nodes))
    own = np.exp(rng.uniform(-1, 1, num_tasks))
    seconds = own[:, None] * speed * np.exp(rng.normal(0, 0.4, (num_tasks, num_nodes)))
    missing = rng.random(seconds.shape) < 0.15
    missing[missing.all(axis=1), rng.integers(num_nodes)] = False
    seconds[missing] = np.inf
    much = float(rng.choice([0.2, 1.0, 5.0]))
    passed = []
    for task in range(num_tasks - 1):
        near = np.arange(task + 1, min(num_tasks, task + 6))
        readers = near[rng.random(len(near)) < 0.35].tolist()
        if readers:
            size = float(rng.integers(1, 2_000_000) * much)
            passed.append(Passed(producer=task, num_bytes=size, readers=tuple(readers)))
    if num_tasks > 1:
        shared = tuple(sorted({0, int(rng.integers(1, num_tasks))}))
        passed.append(Passed(producer=-1, num_bytes=5e5, readers=shared))
    return Tasks(
        names=tuple(f"task {number}" for number in range(num_tasks)),
        kinds=tuple(rng.choice(["matmul", "convolution"], num_tasks).tolist()),
        seconds=seconds,
        passed=tuple(passed),
    )


def all_orders(tasks: Tasks) -> Iterator[list[int]]:
    """Every order in which tasks can run."""
    before: list[set[int]] = [set() for _ in tasks.names]
    for value in tasks.passed:
        for reader in value.readers:
            before[reader] |= {value.producer} - {-1}

    def further(done: list[int]) -> Iterator[list[int]]:
        if len(done) == len(before):
            yield done
        for task, needed in enumerate(before):
            if task not in done and needed <= set(done):
                yield from further([*done, task])

    return further([])
