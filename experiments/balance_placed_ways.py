"""What `balance_placed.py` divides between nodes: layers in a row, or operators.

Decides what the planner is told about model and nodes, and what a division is called.
Must not know processes, quotas or waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any

import numpy as np

from dtft.balance import Layers, Operators, Work
from dtft.placement import PricedTasks
from dtft.planner.cluster import Cluster, Curve, Level, Link, Pool, device_type
from experiments.balance_placed_worker import (
    HIDDEN,
    MICROBATCHES,
    Form,
    nodes_of_layers,
    traced_loss,
)

NUM_NODES = 3
FLOPS = 2e10
"""What the cost model takes a node for, before anything is measured."""
LATENCY_S, BANDWIDTH = 2e-3, 2e8
"""Of a socket between two processes that wait for their part of a core now and then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """One way to divide the model."""

    name: str
    work: Work[Any]
    form: Callable[[Any], Form]
    """Of a division: what nodes make their step of."""
    nodes: Callable[[Any], tuple[int, ...]]
    """Of a division: the node of each operator."""
    words: Callable[[Any], str]
    """Of a division: what it is called."""


def by_layers() -> Way:
    """Whole layers, as many of the row to each node as balance says."""
    return Way(
        name="layers",
        work=Layers(layer_s=layer_s(), microbatches=MICROBATCHES),
        form=counts,
        nodes=lambda division: nodes_of_layers(counts(division)),
        words=lambda division: " + ".join(map(str, counts(division))),
    )


def by_operators() -> Way:
    """Operators, each where a placement has it: nodes need not have stretches."""
    priced = PricedTasks.of(traced_loss(), cluster(), backward=True)
    return Way(
        name="operators",
        work=Operators.of(priced, microbatches=MICROBATCHES),
        form=lambda placement: placement.to_json(),
        nodes=lambda placement: placement.of_operator,
        words=lambda placement: stretches(placement.of_operator),
    )


def cluster() -> Cluster:
    """Nodes that are alike, as nothing is known about them yet."""
    core = replace(device_type("cpu"), peak_flops={"float32": FLOPS})
    socket = Link(
        kind="loopback",
        curve=Curve(latency_s=LATENCY_S, bandwidth=BANDWIDTH),
        source="order of magnitude",
    )
    return Cluster(
        pools=(Pool(device=core, levels=(Level(size=NUM_NODES, link=socket),)),)
    )


def counts(division: Any) -> tuple[int, ...]:
    """Layers of each node, as plain numbers."""
    return tuple(map(int, division))


def splits(num_layers: int, num_nodes: int) -> list[tuple[int, ...]]:
    """All ways to cut a row of layers, none of the parts empty."""
    cuts = combinations(range(1, num_layers), num_nodes - 1)
    return [counts(np.diff((0, *places, num_layers))) for places in cuts]


def layer_s() -> np.ndarray:
    """Seconds of each layer, forward and backward, by its operations."""
    flops = np.zeros(len(HIDDEN))
    for op in traced_loss().operators:
        for part in op.name.split("/"):
            if part.startswith("layer"):
                flops[int(part.removeprefix("layer"))] += op.flops
    return np.repeat((3 * flops / FLOPS)[:, None], NUM_NODES, axis=1)


def operator_names() -> list[str]:
    """Such as `layer3 tanh`."""
    return [
        f"{op.name.split('/')[0]} {op.primitive}".strip()
        for op in traced_loss().operators
    ]


def stretches(nodes: Sequence[int]) -> str:
    """Nodes of operators in few words.

    >>> stretches([0, 0, 0, 2, 1])
    '0: 0-2, 2: 3, 1: 4'
    """
    parts, start = [], 0
    for node, some in groupby(nodes):
        stop = start + len(list(some))
        parts.append(f"{node}: {_range(start, stop)}")
        start = stop
    return ", ".join(parts)


def moved(before: Sequence[int], after: Sequence[int]) -> str:
    """Which operators went from which node to which.

    >>> moved([0, 0, 0, 1], [0, 2, 2, 0])
    '1-2 (0 to 2), 3 (1 to 0)'
    """
    parts, start = [], 0
    for (old, new), some in groupby(zip(before, after, strict=True)):
        stop = start + len(list(some))
        if old != new:
            parts.append(f"{_range(start, stop)} ({old} to {new})")
        start = stop
    return ", ".join(parts)


def _range(start: int, stop: int) -> str:
    return f"{start}-{stop - 1}" if stop - start > 1 else f"{start}"
