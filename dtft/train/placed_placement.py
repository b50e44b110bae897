"""What a placement says, in the terms of a placed step.

Reads a placement of `dtft.placement`: seconds of each operator, the device that
a table gives to each node, when segments should begin. Decides nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtft.placement import Placement, words_of_platform
from dtft.planner.ir import Graph
from dtft.train.placed_arguments import check_nodes, node_numbers, operator_seconds
from dtft.train.placed_calls import Task
from dtft.train.placed_cut import Cut
from dtft.train.placed_order import Order


def where(
    nodes: Sequence[int] | Placement,
    table: Mapping[Any, Any],
    seconds: Sequence[float] | None,
    microbatches: int,
) -> tuple[tuple[int, ...], dict[int, Any], tuple[float, ...] | None]:
    """Nodes of operators, devices of nodes, seconds of operators; arguments as those of
    `make_placed_step`, with devices by what they are found by.

    Raises:
        ValueError: see there.
    """
    if isinstance(nodes, Placement):
        check_microbatches(nodes, microbatches)
        seconds = seconds_of(nodes) if seconds is None else seconds
        table = devices_of(nodes, table)
        nodes = nodes.of_operator
    of_operator = node_numbers(nodes)
    check_nodes(of_operator, table)
    if seconds is not None:
        seconds = operator_seconds(seconds, len(of_operator))
    return of_operator, dict(table), seconds


def seconds_of(placement: Placement) -> tuple[float, ...]:
    """Seconds of each operator's forward pass; those of one task share its seconds."""
    took = {run.task: run.end_s - run.start_s for run in placement.schedule}
    return tuple(
        took[task] / (stop - start)
        for task, (start, stop) in enumerate(placement.operators)
        for _ in range(start, stop)
    )


def nodes_of_scopes(graph: Graph, table: Mapping[str, int]) -> tuple[int, ...]:
    """The node of each operator, by the `jax.named_scope` that it is in.

    So layers are divided into stages, as many to each as one likes. An operator in none
    of the scopes goes with the one before it, the first ones with the first scope.

    Args:
        graph: of the loss (`dtft.planner.trace`).
        table: scope to node.

    Raises:
        ValueError: a scope that no operator of the program is in.

    >>> import jax, jax.numpy as jnp
    >>> def loss(x):
    ...     for name in ("low", "high"):
    ...         with jax.named_scope(name):
    ...             x = jnp.sin(x) + 1
    ...     return jnp.sum(x)
    >>> from dtft.planner.ir.tracing import trace
    >>> nodes_of_scopes(trace(loss, jax.ShapeDtypeStruct((2,), "f4")), {"high": 1,
    ...     "low": 0})
    (0, 0, 1, 1, 1)
    """
    scopes = {part: None for op in graph.operators for part in op.name.split("/")}
    if unknown := [scope for scope in table if scope not in scopes]:
        raise ValueError(
            f"table has the scope {unknown[0]!r}, in which the program has no "
            f"operator. Allowed: {', '.join(filter(None, scopes)) or 'it has none'}. "
            "A scope is what jax.named_scope(...) names, or a module of NNX."
        )
    found: list[int | None] = []
    for op in graph.operators:
        inside = [table[part] for part in op.name.split("/") if part in table]
        before = found[-1] if found else None
        found.append(inside[-1] if inside else before)
    first = next((node for node in found if node is not None), 0)
    return tuple(first if node is None else node for node in found)


def devices_of(placement: Placement, table: Mapping[Any, Any]) -> dict[int, Any]:
    """The device of each node.

    Args:
        placement: has nodes with names and types.
        table: number, name (`h100:0`), type (`fpga-u280`, or `fpga`) or platform
            (`cuda`, `gpu`) of a node to its device, so that CPU devices can play types.
            What is said of fewer nodes counts first.

    Raises:
        ValueError: a node that has operators is not in the table, or a word of the
            table is of no node.
    """
    found: dict[int, Any] = {}
    words = [_words(placement, node) for node in range(len(placement.nodes))]
    all_words = dict.fromkeys(word for some in words for word in some)
    # Numbers may go on: devices are often given as all that there are.
    strange = [k for k in table if not isinstance(k, int) and k not in all_words]
    if strange:
        raise ValueError(
            f"devices has {strange[0]!r}, but no node of the placement is called so. "
            f"Allowed: {', '.join(all_words)}, or the number of a node."
        )
    for node, some in enumerate(words):
        known = [key for key in (node, *some) if key in table]
        if known:
            found[node] = table[known[0]]
        elif node in placement.node_of:
            raise ValueError(
                f"devices has no device for node {some[0]!r}, which has operators. "
                f"It has {list(table)}: add the node's number, name, or its type "
                f"or platform ({', '.join(dict.fromkeys(some[1:]))})."
            )
    return found


def check_microbatches(placement: Placement, microbatches: int) -> None:
    """Refuses a placement that was made for another number of microbatches.

    Raises:
        ValueError: names both numbers.
    """
    if placement.microbatches != microbatches:
        raise ValueError(
            f"microbatches={microbatches}, but nodes is a placement for "
            f"{placement.microbatches}: what it predicts is of another step. Give the "
            f"same number, or place(..., microbatches={microbatches}) the program of "
            "one such microbatch."
        )


def _words(placement: Placement, node: int) -> tuple[str, ...]:
    """What a node may be called, what says most of it first."""
    kind = placement.types[node]
    platforms = _platforms(placement, node)
    return (placement.nodes[node], kind, kind.split("-")[0], *platforms)


def _platforms(placement: Placement, node: int) -> tuple[str, ...]:
    if not placement.platforms:
        return ()
    return words_of_platform(placement.platforms[node])


def predicted_starts(
    placement: Placement, cut: Cut, order: Order, active: Collection[int]
) -> dict[Task, float]:
    """When the placement lets the tasks of the first microbatch begin, in seconds.

    A segment begins with the first of its operators.

    Args:
        placement: of one microbatch, forward and backward.
        cut: what was made of it.
        order: of these segments.
        active: numbers of values that are differentiated; the placement has a backward
            pass of every operator.
    """
    starts = {run.task: run.start_s for run in placement.schedule}
    task_of = _tasks(placement.operators)
    last = 2 * len(placement.operators) - 1
    ways = {cut.variables[number] for number in active}
    found: dict[Task, float] = {}
    for task in order.start_s:
        if task.microbatch == 0:
            segment = cut.segments[task.call.segment]
            if task.call.phase == "forward":
                mine = {task_of[number] for number in segment.operators}
            else:
                back = (
                    number
                    for unit in segment.units
                    if ways.intersection(unit.eqn.outvars)
                    for number in range(*unit.operators)
                )
                mine = {last - task_of[number] for number in back}
            known = [starts[number] for number in mine if number in starts]
            if known:
                found[task] = min(known)
    return found


def _tasks(operators: Sequence[tuple[int, int]]) -> list[int]:
    return [t for t, (start, stop) in enumerate(operators) for _ in range(start, stop)]
