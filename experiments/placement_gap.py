"""Placements of small random task graphs beside the best there is, by brute force.

420 graphs of three to seven tasks on two or three nodes of unlike speed, with missing
kernels, values to send, and in a third of them little memory: how much slower a step is
than with the best nodes for all tasks, of all that there are. Of a quarter of them
every order in which tasks can take their places is tried too. Also: how long it takes
to place 2,000 operators on 16 nodes.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtft.planner.list_schedule import schedule
from dtft.planner.nodes import Nodes
from dtft.planner.placement import place_tasks
from dtft.planner.placement_result import Placement
from dtft.planner.placing import Order, Search, find
from dtft.planner.problem import Problem
from dtft.planner.ranks import TAKEN, as_they_come, by_rank
from dtft.planner.tasks import Passed, Tasks
from experiments import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("one pass", "forward and backward", "8 microbatches")
HEADER = ("step", "rule", "graphs", "optimal", "mean", "p95", "worst")
HEADER += ("worse than a baseline", "none found")
RULES = ("placed", "without moves", "program's order, no moves", "best baseline")
NUM_GRAPHS = 420
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
        """As `place_tasks` makes it; made tasks' memory counts once."""
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


def main() -> None:
    """Places all graphs and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="30 graphs, no files")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    num = 30 if options.quick else NUM_GRAPHS
    gaps = [gap for seed in range(num) for gap in Case.random(seed).gaps()]
    large_s, program_s = large_seconds(), program_seconds()
    if options.json:
        figures = {"large_s": large_s, "program_s": program_s}
        text = json.dumps({**figures, "gaps": [asdict(gap) for gap in gaps]})
        options.json.write_text(text)
    rows = list(_rows(gaps))
    if options.quick:
        print("\n".join(report.table(HEADER, rows)))
        return
    exact = [g.ratio for g in gaps if g.all_orders and g.rule == "placed"]
    report.write(
        "placement_gap",
        title="Placements of small random task graphs beside brute force",
        command="python -m experiments.placement_gap",
        header=HEADER,
        rows=rows,
        figure=_figure(gaps),
        notes=(
            "Seconds of a step over the best's: of all ways to lay tasks on nodes, "
            "each scheduled in four orders of upward rank and in the program's. Of the graphs of up to "
            f"{MOST_FOR_ORDERS} tasks in all ({len(exact)}) every order was tried: "
            f"there {np.mean(np.array(exact) < 1 + 1e-9):.1%} of placements are "
            f"optimal, the worst is {max(exact):.3f} of the optimum.",
            "A third of the graphs have nodes on which not everything fits. Baselines "
            "are everything on one node, stretches of the program, a random node for "
            "each task; the best of those that can run counts.",
            f"2,000 random tasks on 16 unlike nodes are placed in {large_s:.2f} s; a "
            "traced program of 2,000 operators on 8 H100 and 8 A100 in "
            f"{program_s:.2f} s, pricing included (processor time, medians of 5).",
        ),
    )


def large_seconds() -> float:
    """Seconds to place 2,000 random tasks on 16 nodes of unlike speed."""
    tasks = random_tasks(np.random.default_rng(0), 2000, 16)
    nodes = Nodes.joined(np.full(16, 1e12), latency_s=0.05, bandwidth=1e6)
    return _median_s(lambda: find(Problem(tasks, nodes)))


def program_seconds() -> float:
    """Seconds to place a traced program of 2,000 operators on 16 devices."""
    import jax
    import jax.numpy as jnp

    from dtft.planner.placement import place
    from dtft.planner.trace import trace

    def towers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        one, other = x, x
        for left, right in zip(weights[::2], weights[1::2], strict=True):
            one, other = (
                jnp.tanh(one @ left) * 0.5 + one,
                jnp.tanh(other @ right) * 0.5 + other + one,
            )
        return (one + other).sum()

    shapes = [jax.ShapeDtypeStruct((512, 512), "float32")] * 444
    graph = trace(towers, shapes, jax.ShapeDtypeStruct((4096, 512), "float32"))
    assert 1995 <= len(graph.operators) <= 2005, len(graph.operators)
    return _median_s(lambda: place(graph, "8xh100+8xa100"))


def _median_s(run: Callable[[], object]) -> float:
    took = []
    for _ in range(5):
        began = time.process_time()
        run()
        took.append(time.process_time() - began)
    return float(np.median(took))


def _rows(gaps: Sequence[Gap]) -> Iterable[Sequence[object]]:
    for kind in (*KINDS, "all"):
        for rule in RULES:
            some = [
                gap for gap in gaps if gap.rule == rule and kind in ("all", gap.kind)
            ]
            ratios = np.array([gap.ratio for gap in some])
            none = np.isinf(ratios)
            ratios = ratios[~none]
            if some:
                yield (
                    kind,
                    rule,
                    len(some),
                    f"{np.mean(ratios < 1 + 1e-9):.1%}",
                    f"{ratios.mean():.4f}",
                    f"{np.percentile(ratios, 95):.3f}",
                    f"{ratios.max():.3f}",
                    sum(gap.worse for gap in some),
                    int(none.sum()),
                )


def _figure(gaps: Sequence[Gap]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    edges = np.array([1, 1.0001, 1.02, 1.05, 1.1, 1.2, 1.5, np.inf])
    labels = ["0", "2", "5", "10", "20", "50", "more"]
    axes = figure.subplots(1, len(KINDS), sharey=True)
    for ax, kind in zip(axes, KINDS, strict=True):
        for place, rule in enumerate(RULES):
            some = [g.ratio for g in gaps if (g.kind, g.rule) == (kind, rule)]
            shares = np.histogram(some, edges)[0] / max(len(some), 1)
            at = np.arange(len(labels)) + 0.2 * (place - 1.5)
            ax.bar(at, shares, 0.2, label=rule)
        ax.set_xticks(range(len(labels)), labels)
        ax.set(title=kind, xlabel="% over the optimum, up to")
    axes[0].set_ylabel("share of graphs")
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
