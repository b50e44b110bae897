"""Placements of small random task graphs beside the best there is, by brute force.

420 graphs of three to seven tasks on two or three nodes of unlike speed, with missing
kernels, values to send, and in a third of them little memory: how much slower a step is
than with the best nodes for all tasks, of all that there are. Of 36 graphs no way to
lay tasks fits into memory; the other 384 are in the table. Of a quarter of them every
order in which tasks can take their places is tried too. Also: how long it takes to
place 2,000 operators on 16 nodes.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtft.placement import Nodes, Problem, find_placement
from experiments import report
from experiments.placement_cases import (
    KINDS,
    MOST_FOR_ORDERS,
    RULES,
    Case,
    Gap,
    random_tasks,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("step", "rule", "graphs", "optimal", "mean", "p95", "worst")
HEADER += ("worse than a baseline", "none found")
NUM_GRAPHS = 420


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
            "each scheduled in four orders of upward rank and in the program's. Of the "
            f"graphs of up to {MOST_FOR_ORDERS} tasks in all ({len(exact)}) every "
            f"order was tried: there {np.mean(np.array(exact) < 1 + 1e-9):.1%} of "
            f"placements are optimal, the worst is {max(exact):.3f} of the optimum.",
            f"Of {NUM_GRAPHS} graphs {sum(g.rule == RULES[0] for g in gaps)} are in "
            "the table; of the others no way to lay tasks fits into memory. A third of "
            "the graphs have nodes on which not everything fits. Baselines are "
            "everything on one node, stretches of the program, a random node for "
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
    return _median_s(lambda: find_placement(Problem(tasks, nodes)))


def program_seconds() -> float:
    """Seconds to place a traced program of 2,000 operators on 16 devices."""
    import jax
    import jax.numpy as jnp

    from dtft.placement import place
    from dtft.planner.ir import trace

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
