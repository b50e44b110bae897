"""Places the operators of a program on nodes of different types.

`place` divides a traced program into tasks, and computes the seconds of each task on
every node of a cluster. Heuristics then make candidate placements
(`find_placement`), and `place` returns the best candidate.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.placement.heuristics import Found, Order, find_placement
from dtft.placement.kernels import Kernels
from dtft.placement.list_scheduler import Schedule
from dtft.placement.nodes import Nodes
from dtft.placement.problem import Problem, bound_s
from dtft.placement.result import Placement, ScheduledTask, Transfer
from dtft.placement.tasks import Grain, TaskGraph, Tasks, tasks_of
from dtft.planner.arguments import check_choice, check_flag, check_whole, numbers
from dtft.planner.cluster import Cluster
from dtft.planner.ir import Graph
from dtft.planner.memory import RESERVE


def check_program(graph: Any, cluster: Any) -> None:
    """Checks that the arguments are a traced program and a cluster or its text.

    Raises:
        ValueError: an argument has another type; the message says how to make the
            argument.
    """
    if not isinstance(graph, Graph):
        raise ValueError(
            f"graph={graph!r:.80} is no program, but a {type(graph).__name__}. Trace "
            "it first: dtft.planner.trace(loss, params, batch)."
        )
    if not isinstance(cluster, Cluster | str):
        raise ValueError(
            f"cluster={cluster!r:.80} is no cluster, but a {type(cluster).__name__}. "
            "Allowed: its text, such as 'h100+fpga-u280' or the path of a cluster "
            "file, or a Cluster (Cluster.parse, Cluster.from_devices)."
        )


def check_together(together: Any) -> Sequence[tuple[int, int]]:
    """Converts the argument `together` of `place` to pairs of operator numbers.

    Each pair is a range of operators that must stay on one node: the first operator,
    and the operator after the last.

    Raises:
        ValueError: the argument has another form; the message shows the allowed form.

    >>> check_together([[2, 5]])
    [(2, 5)]
    >>> check_together([5])
    Traceback (most recent call last):
    ...
    ValueError: together=[5]. Allowed: pairs of the first operator and the one after \
the last, such as [(2, 5)], or list(dtft.planner.ir.uncut(program)).
    """
    try:
        pairs = [tuple(map(operator.index, pair)) for pair in together]
        return [(start, stop) for start, stop in pairs]
    except (TypeError, ValueError):
        raise ValueError(
            f"together={together!r:.80}. Allowed: pairs of the first operator and the "
            "one after the last, such as [(2, 5)], or "
            "list(dtft.planner.ir.uncut(program))."
        ) from None


_NOTHING_MORE = Kernels()


def place(
    graph: Graph,
    cluster: Cluster | str,
    weights: Sequence[float] | None = None,
    *,
    kernels: Kernels = _NOTHING_MORE,
    affinity: Mapping[str, str] | None = None,
    order: Order = "rank",
    grain: Grain = "operator",
    together: Sequence[tuple[int, int]] = (),
    backward: bool = False,
    params: str | None = None,
    microbatches: int = 1,
    moves: int | None = None,
) -> Placement:
    """Places the operators of a program on the nodes of a cluster.

    Args:
        graph: the program (`dtft.planner.trace`), of one microbatch.
        cluster: the cluster whose devices are the nodes, or its text (`Cluster.parse`).
        weights: speed of each node relative to the cluster's figures: 0.5 is half as
            fast, and a node of weight 0 gets no task. Default: all 1.
        kernels: kernels of devices for operators, in addition to those that
            `DeviceType.kernels` lists.
        affinity: pins: map from an operator (a primitive, a kind, or `dense`, `conv`,
            `activation`) to the node, device type or platform that must run it. A
            primitive's pin takes precedence over its kind's pin. A pin of an operator
            that the program lacks only adds a note.
        order: order in which tasks are placed. `rank` tries orders by upward rank (the
            longest path in seconds from a task to the end of the program) and the order
            of the program; `traversal` tries only the order of the program.
        grain: `operator`: each operator is a task; or `block`: each of several
            consecutive equal layers is a task, and so is each operator outside these
            layers. A loop is never split.
        together: operators that stay on one node, as pairs of the first operator and
            the operator after the last.
        backward: whether the step also has the backward pass of this program. Each task
            then has a backward task on the same node. For a value on a path from
            `params` to the first result, each node that reads the value sends one
            summand of the value's gradient to the node that made the value.
        params: path of the argument that is differentiated; default: the first one, as
            in `loss(params, batch)`.
        microbatches: the number of microbatches of a step, which follow each other
            through the nodes.
        moves: the number of tries to move tasks to other nodes; by default 20,000
            divided by the number of tasks, or 0 if this is below 20.

    Returns:
        The best placement found, at least as fast as each of its baselines.

    Raises:
        ValueError: an argument is not allowed, an operator has no kernel, a pin cannot
            be met, or memory does not suffice.
    """
    asked = PricedTasks.of(
        graph,
        cluster,
        kernels=kernels,
        affinity=affinity,
        grain=grain,
        together=together,
        backward=backward,
        params=params,
    )
    return place_tasks(
        asked.tasks,
        asked.nodes,
        weights,
        of=asked.made,
        order=order,
        microbatches=microbatches,
        moves=moves,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedTasks:
    """Tasks of a program, with their seconds (their price) on each node of a cluster.

    `tasks` includes the backward tasks, if they were asked for. `nodes` are the devices
    of the cluster. `made` has the operators of each forward task.
    """

    tasks: Tasks
    nodes: Nodes
    made: TaskGraph

    @classmethod
    def of(
        cls,
        graph: Graph,
        cluster: Cluster | str,
        *,
        kernels: Kernels = _NOTHING_MORE,
        affinity: Mapping[str, str] | None = None,
        grain: Grain = "operator",
        together: Sequence[tuple[int, int]] = (),
        backward: bool = False,
        params: str | None = None,
    ) -> "PricedTasks":
        """Makes the tasks of a program, and computes their seconds on each node.

        Args:
            graph: the program (`dtft.planner.trace`), of one microbatch.
            cluster: the cluster whose devices are the nodes, or its text
                (`Cluster.parse`).
            kernels: kernels of devices for operators, in addition to those that
                `DeviceType.kernels` lists.
            affinity: pins: map from an operator (a primitive, a kind, or `dense`,
                `conv`, `activation`) to the node, device type or platform that must run
                it.
            grain: `operator`: each operator is a task; or `block`: each of several
                consecutive equal layers is a task, and so is each operator outside
                these layers. A loop is never split.
            together: operators that stay on one node, as pairs of the first operator
                and the operator after the last.
            backward: whether each task also has a backward task on the same node.
            params: path of the argument that is differentiated; default: the first one.

        Raises:
            ValueError: an argument is not allowed, a task has no node with its kernels,
                or a pin cannot be met.
        """
        check_program(graph, cluster)
        check_choice("grain", grain, Grain)
        if not graph.operators:
            raise ValueError(
                "graph has no operators: there is nothing to place. Trace a function "
                "that computes something from its arguments."
            )
        check_flag("backward", backward)
        found = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        nodes = Nodes.of(found, reserve=RESERVE)
        made = tasks_of(
            graph,
            nodes,
            kernels=kernels,
            affinity=affinity,
            grain=grain,
            together=check_together(together),
            params=params,
        )
        tasks = made.tasks.with_backward(made.backward) if backward else made.tasks
        return cls(tasks=tasks, nodes=nodes, made=made)


def place_tasks(
    tasks: Tasks,
    nodes: Nodes,
    weights: Sequence[float] | None = None,
    *,
    of: TaskGraph | None = None,
    order: Order = "rank",
    microbatches: int = 1,
    moves: int | None = None,
) -> Placement:
    """Places tasks, whose seconds on each node are `tasks.seconds`, on nodes.

    Args:
        tasks: the tasks of one microbatch.
        nodes: the nodes.
        weights: speed of each node relative to `tasks.seconds`: 0.5 is half as fast,
            and a node of weight 0 gets no task. Default: all 1.
        of: maps the tasks to the operators of a program; None if there is no program.
        order: order in which tasks are placed. `rank` tries orders by upward rank (the
            longest path in seconds from a task to the end) and the order of `tasks`;
            `traversal` tries only the order of `tasks`.
        microbatches: the number of microbatches of a step.
        moves: the number of tries to move tasks to other nodes; by default 20,000
            divided by the number of tasks, or 0 if this is below 20.

    Raises:
        ValueError: an argument is not allowed, all nodes that can run a task have
            weight 0, or memory does not suffice.
    """
    check_choice("order", order, Order)
    check_whole("microbatches", microbatches, 1)
    if moves is not None:
        check_whole("moves", moves, 0)
    each = f"each of {nodes.num} nodes ({', '.join(nodes.names)})"
    given = numbers(
        "weights", [1.0] * nodes.num if weights is None else weights, each, nodes.names
    )
    weighted = tasks if weights is None else tasks.weighted(given)
    if (idle := np.isinf(weighted.seconds).all(axis=1)).any():
        name = tasks.names[int(np.argmax(idle))]
        raise ValueError(
            f"weights={list(given)}: every node that can run task {name!r} has weight "
            "0, or next to it. Give one of them a weight such as 0.1."
        )
    copies = min(microbatches, nodes.num)
    for frees in (True, False):
        problem = Problem(weighted, nodes, frees=frees, copies=copies)
        found = find_placement(
            problem, order=order, microbatches=microbatches, moves=moves
        )
        if found is not None:
            bound = bound_s(problem, microbatches)
            return _result(problem, found, given, of, microbatches, bound)
    raise ValueError(_no_room(tasks, nodes, copies))


def _no_room(tasks: Tasks, nodes: Nodes, copies: int) -> str:
    arguments = sum(v.num_bytes for v in tasks.passed if v.producer < 0)
    made = copies * sum(v.num_bytes for v in tasks.passed if v.producer >= 0)
    each = zip(nodes.names, nodes.memory_bytes, strict=True)
    return (
        "no placement was found for which memory suffices: arguments of "
        f"{arguments:.4g} bytes, and what {len(tasks.names)} tasks make, up to "
        f"{made:.4g} bytes, on {', '.join(f'{n} ({b:.4g} bytes)' for n, b in each)}. "
        "Add nodes, or use a smaller batch, or grain='operator'."
    )


def _result(
    problem: Problem,
    found: Found,
    weights: tuple[float, ...],
    of: TaskGraph | None,
    microbatches: int,
    bound: float,
) -> Placement:
    tasks, nodes, schedule = problem.tasks, problem.nodes, found.schedule
    fullest = max(*schedule.busy_s, schedule.port_s)
    return Placement(
        nodes=nodes.names,
        types=tuple(nodes.alike()),
        platforms=tuple(device.platform for device in nodes.devices),
        tasks=tasks.names,
        kinds=tasks.kinds,
        node_of=schedule.node_of,
        operators=of.operators if of else (),
        schedule=_runs(schedule),
        transfers=_transfers(problem, schedule, of),
        makespan_s=schedule.makespan_s,
        step_s=schedule.makespan_s + (microbatches - 1) * fullest,
        bound_s=bound,
        microbatches=microbatches,
        weights=weights,
        baselines=found.baselines,
        dropped=found.dropped,
        speeds=found.speeds,
        memory_bytes=tuple(round(most) for most in schedule.memory_bytes),
        capacity_bytes=tuple(int(has) for has in problem.capacity),
        how=found.how,
        notes=of.notes if of else (),
    )


def _runs(schedule: Schedule) -> tuple[ScheduledTask, ...]:
    rows = zip(schedule.node_of, schedule.starts, schedule.ends, strict=True)
    runs = [
        ScheduledTask(task=task, node=node, start_s=start, end_s=end)
        for task, (node, start, end) in enumerate(rows)
    ]
    return tuple(sorted(runs, key=lambda run: (run.start_s, run.task)))


def _transfers(
    problem: Problem, schedule: Schedule, of: TaskGraph | None
) -> tuple[Transfer, ...]:
    values = of.values if of else tuple(range(len(problem.num_bytes)))
    behind = problem.tasks.gradient_of
    made = [
        Transfer(
            value=values[behind.get(value, value)],
            source=source,
            target=target,
            num_bytes=problem.num_bytes[value],
            start_s=begin,
            end_s=end,
            is_gradient=value in behind,
        )
        for value, source, target, begin, end in schedule.sent
    ]
    return tuple(sorted(made, key=lambda one: (one.start_s, one.value, one.target)))
