"""What is handed to `place` as a program, nodes and stretches: refused early, by name.

Decides what they may be. Must not know how operators are placed.
"""

import operator
from collections.abc import Sequence
from typing import Any

from dtft.planner.cluster import Cluster
from dtft.planner.graph import Graph


def check_program(graph: Any, cluster: Any) -> None:
    """Refuses what is no traced program, or no cluster.

    Raises:
        ValueError: says how one is made.
    """
    if not isinstance(graph, Graph):
        raise ValueError(
            f"graph={graph!r:.80} is no program, but a {type(graph).__name__}. Trace "
            "it first: dtft.planner.trace.trace(loss, params, batch)."
        )
    if not isinstance(cluster, Cluster | str):
        raise ValueError(
            f"cluster={cluster!r:.80} is no cluster, but a {type(cluster).__name__}. "
            "Allowed: its text, such as 'h100+fpga-u280' or the path of a cluster "
            "file, or a Cluster (Cluster.parse, Cluster.from_devices)."
        )


def check_together(together: Any) -> Sequence[tuple[int, int]]:
    """The stretches of operators that stay together.

    Raises:
        ValueError: says what form one has.

    >>> check_together([[2, 5]])
    [(2, 5)]
    >>> check_together([5])
    Traceback (most recent call last):
    ...
    ValueError: together=[5]. Allowed: pairs of the first operator and the one after \
the last, such as [(2, 5)], or list(jaxprs.uncut(program)).
    """
    try:
        pairs = [tuple(map(operator.index, pair)) for pair in together]
        return [(start, stop) for start, stop in pairs]
    except (TypeError, ValueError):
        raise ValueError(
            f"together={together!r:.80}. Allowed: pairs of the first operator and the "
            "one after the last, such as [(2, 5)], or list(jaxprs.uncut(program))."
        ) from None
