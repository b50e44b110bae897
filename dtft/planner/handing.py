"""What tasks of a program hand to each other, and which of it has a gradient.

Pure; must not know kernels, nodes, links or how long anything takes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from dtft.planner.graph import Graph
from dtft.planner.tasks import Passed


def handed(
    graph: Graph, operators: Sequence[tuple[int, int]]
) -> tuple[list[int], list[Passed]]:
    """Values that go from task to task, with arguments and results.

    Args:
        graph: the program.
        operators: of each task the first, and the one after its last.

    Returns:
        Their numbers in `Graph.values`, and what tasks do with them.
    """
    made, read = _made_and_read(graph, operators)
    kept = set(graph.outputs.values())
    values, passed = [], []
    for value in sorted({*read, *(kept & made.keys())}):
        producer = made.get(value, -1)
        readers = sorted({task for task in read.get(value, ()) if task != producer})
        if not readers and value not in kept:
            continue
        array = graph.values[value]
        values.append(value)
        passed.append(
            Passed(
                producer=producer,
                num_bytes=array.num_bytes,
                readers=tuple(readers),
                is_kept=value in kept,
                has_gradient=array.dtype.startswith(("float", "bfloat", "complex")),
            )
        )
    return values, passed


def _made_and_read(
    graph: Graph, operators: Sequence[tuple[int, int]]
) -> tuple[dict[int, int], dict[int, list[int]]]:
    """For each value the task that makes it, and those that read it."""
    task_of = [
        t for t, (start, stop) in enumerate(operators) for _ in range(start, stop)
    ]
    made: dict[int, int] = {}
    read: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(graph.operators):
        made |= dict.fromkeys(op.outputs, task_of[number])
        for value in op.inputs:
            read[value].append(task_of[number])
    for loop in graph.loops:
        if loop.operators[0] == loop.operators[1]:
            continue
        task = task_of[loop.operators[0]]
        made |= {inner: task for _, inner in loop.sliced}
        made |= {whole: task for _, whole in loop.stacked}
        for before, into, _, after in loop.carried:
            made |= {into: task, after: task}
            read[before].append(task)
        for outer, _ in loop.sliced:
            read[outer].append(task)
    return made, read


def with_gradients(
    graph: Graph, values: Sequence[int], passed: Sequence[Passed], params: str | None
) -> list[Passed]:
    """Gradients only for values between parameters and the loss, the first result.

    Args:
        graph: the program.
        values: numbers of the values.
        passed: what tasks do with them.
        params: path of the argument that is differentiated; default: the first one.

    Raises:
        ValueError: there is no such argument; lists those there are.
    """
    heads = dict.fromkeys(path.split("/")[0] for path in graph.inputs)
    if params is not None and params not in heads:
        raise ValueError(
            f"params={params!r}: the program has no such argument. Allowed: the first "
            f"part of the path of one ({', '.join(heads)})."
        )
    head = next(iter(heads), None) if params is None else params
    given = {v for path, v in graph.inputs.items() if path.split("/")[0] == head}
    moved, tasks = set[int](), set[int]()
    for at in sorted(range(len(passed)), key=lambda at: passed[at].producer):
        one = passed[at]
        starts = values[at] in given if one.producer < 0 else one.producer in tasks
        if starts and one.has_gradient:
            moved.add(at)
            tasks.update(one.readers)
    wanted, ways = set[int](), set[int]()
    loss = next(iter(graph.outputs.values()), None)
    for at in sorted(moved, key=lambda at: -passed[at].producer):
        if values[at] == loss or wanted.intersection(passed[at].readers):
            ways.add(at)
            wanted.add(passed[at].producer)
    return [replace(one, has_gradient=at in ways) for at, one in enumerate(passed)]
