"""Tasks of a traced program, and the values that pass between tasks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dtft.placement.kernels import Kernels, check_kernels, check_pins, pinned
from dtft.placement.nodes import Nodes
from dtft.planner.cluster import DeviceType
from dtft.planner.cost import computing_s
from dtft.planner.ir import CHEAP, Graph, Operator, find_repeats, moved_bytes
from dtft.planner.spmd import ShardingAssignment, work_of

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A value that passes between tasks: an argument, or a task's output.

    The value is read by tasks, or is a result of the program (`is_kept`). `producer`
    and `readers` are indices of tasks.
    """

    producer: int
    """Task that makes the value; -1 for an argument. An argument starts on the node of
    its first reader. In every microbatch it is sent to the nodes of its other
    readers."""
    num_bytes: float
    readers: tuple[int, ...]
    is_kept: bool = False
    """Whether the value is a result of the program and stays in memory to the end."""
    has_gradient: bool = True
    """Whether the backward pass makes a gradient of the value. Only floating and
    complex values on a path from the parameters to the loss have one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tasks:
    """Tasks with their seconds on each node, and the values that pass between them.

    A task is an operator, a loop or a layer. The tasks are in an order in which they
    can be run one after another.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each task: an `OperatorKind`, `loop` or `block`."""
    seconds: Floats
    """`[tasks, nodes]`; infinite where a node cannot run a task."""
    passed: tuple[Passed, ...]
    groups: tuple[int, ...] = ()
    """Group number of each task. Tasks of a group must be placed on one node. Default:
    one group per task."""
    gradient_of: Mapping[int, int] = field(default_factory=dict)
    """Map from a part of a gradient (the contribution of one reader) to the value that
    the gradient is of, both as indices into `passed`. Parts made on one node are added
    up there, and the sum is sent."""

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
        """The number of nodes in `seconds`."""
        return self.seconds.shape[1]

    @property
    def together(self) -> list[list[int]]:
        """Indices of the tasks of each group; the tasks of a group must share a node.

        There is one list for each group of `groups`, ordered by the group's first task.
        A task that need not share its node is a group of its own.
        """
        found: dict[int, list[int]] = {}
        for task, group in enumerate(self.groups):
            found.setdefault(group, []).append(task)
        return list(found.values())

    def weighted(self, weights: Sequence[float] | Floats) -> "Tasks":
        """Returns the tasks with their seconds divided by each node's relative speed.

        The relative speeds are `weights`, `[nodes]`. A node of weight 0 has infinite
        seconds.
        """
        with np.errstate(divide="ignore", over="ignore"):
            factors = 1 / np.asarray(weights, float)
        return replace(self, seconds=_product(self.seconds, factors[None, :]))

    def with_backward(self, factors: Sequence[float] | Floats) -> "Tasks":
        """Returns the tasks followed by one backward task for each, in reverse order.

        A backward task runs on the node of its forward task and reads the same values.
        For each value that has a gradient and that a task reads from another task, the
        backward task of the reader sends a gradient of the same size to the backward
        task of the producer. Gradients of arguments stay on the node that makes them.

        Args:
            factors: seconds of each task's backward pass relative to its forward pass,
                `[tasks]`.
        """
        num = len(self.names)
        behind = [2 * num - 1 - task for task in range(num)]
        passed = [replace(v, readers=_again(v, behind)) for v in self.passed]
        # An empty value makes each backward task run after its forward task.
        passed += [
            Passed(producer=task, num_bytes=0.0, readers=(behind[task],))
            for task in range(num)
        ]
        # Each reader of a value makes one part of the value's gradient. The scheduler
        # adds up the parts on one node.
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
    """Returns the readers of a value in a step with a backward pass.

    These are its readers in the forward pass, and their backward tasks. `behind` has
    the backward task of each forward task.
    """
    return (*value.readers, *(behind[reader] for reader in reversed(value.readers)))


def _product(seconds: Floats, factors: Floats) -> Floats:
    """Multiplies seconds by factors; an infinite factor gives infinity.

    0 s times an infinite factor is infinite too, and not NaN.
    """
    with np.errstate(invalid="ignore"):
        found = seconds * factors
    return np.where(np.isinf(factors), np.inf, found)


# Values that pass between the tasks of a program, and which values have a gradient.


def handed(
    graph: Graph, operators: Sequence[tuple[int, int]]
) -> tuple[list[int], list[Passed]]:
    """Finds the values that pass between tasks, including arguments and results.

    Arguments that no task reads are left out. Outputs of tasks are left out if they are
    not results of the program and no other task reads them.

    Args:
        graph: the program.
        operators: first operator of each task, and the operator after its last.

    Returns:
        The values' numbers in `Graph.values`, and a `Passed` for each value.
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
    """Maps each value to the task that makes it, and to the tasks that read it.

    The values inside a loop belong to the loop's task. Arguments are not in the first
    map. `operators` has the first operator of each task, and the operator after its
    last.
    """
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
    """Returns `passed` with `has_gradient` False for values that have no gradient.

    `handed` sets `has_gradient` of every floating or complex value to True. A value has
    a gradient if it is also on a path from the parameters to the loss (the program's
    first result).

    Args:
        graph: the program.
        values: numbers of the values in `Graph.values`.
        passed: the values, as `handed` returns them.
        params: path of the argument that is differentiated; default: the first one.

    Raises:
        ValueError: the program has no such argument; the message lists its arguments.
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


# Tasks of a traced program. A task is an operator or a whole loop, because a loop stays
# on one node. Operators that the executor cannot separate are one task
# (`together`). With grain `block` each of a run of equal layers is one task.


Grain = Literal["operator", "block"]
_TWICE = ("matmul", "convolution")
"""Kinds of operators whose forward pass computes one product, and whose backward pass
computes two."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGraph:
    """The tasks of a program, their operators, and the values between tasks."""

    tasks: Tasks
    operators: tuple[tuple[int, int], ...]
    """First operator of each task, and the operator after its last."""
    values: tuple[int, ...]
    """Number in `Graph.values` of each value that passes between tasks."""
    backward: tuple[float, ...]
    """Seconds of each task's backward pass relative to its forward pass."""
    notes: tuple[str, ...] = ()
    """Notes on pins of operators that the program lacks."""


def tasks_of(
    graph: Graph,
    nodes: Nodes,
    *,
    kernels: Kernels,
    affinity: Mapping[str, str] | None = None,
    grain: Grain = "operator",
    together: Sequence[tuple[int, int]] = (),
    params: str | None = None,
) -> TaskGraph:
    """Makes the tasks of a program, with their seconds on each node.

    Args:
        graph: the program.
        nodes: the nodes of a cluster, with device types.
        kernels: kernels of devices, in addition to those of the device types.
        affinity: pins: map from an operator (a primitive, a kind, or `dense`, `conv`,
            `activation`) to the node, device type or platform that must run it.
        grain: `operator`: each operator is a task; or `block`: each of several
            consecutive equal layers is a task, and so is each operator outside these
            layers. A loop is never split.
        together: operators that stay on one node, as pairs of the first operator and
            the operator after the last; such as those that `dtft.planner.ir.uncut`
            lists, because a placed step cannot separate them.
        params: path of the argument that is differentiated; default: the first one.

    Raises:
        ValueError: no node has the kernels of a task, a pin cannot be met, a pair of
            `together` is not within the program, or a name is unknown.
    """
    pins = {} if affinity is None else affinity
    check_kernels(kernels, nodes, graph.operators)
    notes = check_pins(pins, nodes, graph.operators)
    operators = tuple(_intervals(graph, grain, together))
    seconds = _Seconds(graph, nodes, kernels, pins)
    rows = [seconds.of(start, stop) for start, stop in operators]
    values, passed = handed(graph, operators)
    passed = with_gradients(graph, values, passed, params)
    return TaskGraph(
        tasks=Tasks(
            names=tuple(_name(graph, *some) for some in operators),
            kinds=tuple(_kind(graph, *some) for some in operators),
            seconds=np.array(rows).reshape(len(rows), nodes.num),
            passed=tuple(passed),
        ),
        operators=operators,
        values=tuple(values),
        backward=tuple(seconds.backward(*some) for some in operators),
        notes=notes,
    )


def _intervals(
    graph: Graph, grain: Grain, together: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Divides the program into tasks; yields the range of operators of each task.

    A range is the first operator of the task, and the operator after its last. Each
    loop and each pair of `together` is one task. With grain `block`, each of several
    consecutive equal layers is one task too. If two of these tasks overlap, they are
    merged. Every other operator is a task.

    Raises:
        ValueError: a pair of `together` is not within the program.
    """
    joined = [loop.operators for loop in graph.loops] + [*map(tuple, together)]
    if grain == "block":
        joined += _copies(graph)
    # reach[n]: where the stretches that begin at operator n end.
    reach = list(range(1, len(graph.operators) + 1))
    for start, stop in joined:
        if not 0 <= start <= stop <= len(reach):
            raise ValueError(
                f"together has {(start, stop)}: the program has operators 0 to "
                f"{len(reach) - 1}. Give the first, and the one after the last."
            )
        if start < stop:
            reach[start] = max(reach[start], stop)
    start, stop = 0, 0
    for number, far in enumerate(reach):
        if number == stop:
            if number:
                yield start, stop
            start = number
        stop = max(stop, far)
    if reach:
        yield start, stop


def _copies(graph: Graph) -> list[tuple[int, int]]:
    """Finds equal layers; returns a pair of operator numbers for each layer.

    The pair is the layer's first operator, and the operator after its last. If two
    sequences of equal layers overlap, only the one with more operators counts.
    """
    rows = find_repeats(graph).repeats
    taken = np.zeros(len(graph.operators), bool)
    found = []
    for row in sorted(rows, key=lambda row: -row.count * row.period):
        part = slice(row.start, row.start + row.count * row.period)
        if taken[part].any():
            continue
        taken[part] = True
        starts = range(part.start, part.stop, row.period)
        found += [(start, start + row.period) for start in starts]
    return found


class _Seconds:
    """Seconds of operators on each device type, computed once for equal operators."""

    def __init__(
        self, graph: Graph, nodes: Nodes, kernels: Kernels, pins: Mapping[str, str]
    ) -> None:
        self.graph, self.nodes, self.kernels, self.pins = graph, nodes, kernels, pins
        self.types = {device.name: device for device in nodes.devices}
        self.columns = [list(self.types).index(d.name) for d in nodes.devices]
        self._known: dict[Any, Floats] = {}
        self._moved = moved_bytes(graph)

    def of(self, start: int, stop: int) -> Floats:
        """Returns a task's seconds by node, `[nodes]`; infinite where it cannot run.

        The task has the operators `start` to `stop` - 1 of the program. A node can run
        a task if it has a kernel for each operator and no pin forbids the node. Raises
        ValueError if no node is left.
        """
        numbers = range(start, stop)
        total = sum((self._speeds(n) for n in numbers), np.zeros(len(self.types)))
        has = np.ones(len(self.types), bool)
        for number in numbers:
            has &= self._has(number)
        if not has.any():
            raise ValueError(self._lacking(start, stop))
        found = np.where(has, total, np.inf)[self.columns]
        return self._at_pins(found, numbers) if self.pins else found

    def backward(self, start: int, stop: int) -> float:
        """Returns a task's backward seconds divided by its forward seconds, 1 to 2.

        The task has the operators `start` to `stop` - 1 of the program. In the backward
        pass matrix multiplications and convolutions count twice, other operators once,
        each with its seconds on the fastest device type.
        """
        each = [float(self._speeds(number).min()) for number in range(start, stop)]
        some = self.graph.operators[start:stop]
        twice = sum(s for s, op in zip(each, some, strict=True) if op.kind in _TWICE)
        return 1.0 + (twice / sum(each) if sum(each) else 0.0)

    def _speeds(self, number: int) -> Floats:
        """Returns the seconds of an operator on each device type, `[types]`.

        `number` is the operator's in the program. In a loop the operator runs several
        times; the seconds are the sum.
        """
        op, values = self.graph.operators[number], self.graph.values
        arrays = tuple(
            (values[v].shape, values[v].dtype) for v in (*op.inputs, *op.outputs)
        )
        own = self.graph.bytes_of(op) * op.trips
        moved = self._moved.get(number, 0.0) / own if own else 0.0
        key = op.primitive, op.flops, op.special, op.trips, arrays, moved
        if key not in self._known:
            done = work_of(self.graph, op, ShardingAssignment(axes={}))
            types = self.types.values()
            self._known[key] = np.array(
                [_seconds(self.graph, device, done, moved) for device in types]
            )
        return self._known[key]

    def _has(self, number: int) -> NDArray[np.bool_]:
        op = self.graph.operators[number]
        types = self.types.values()
        return np.array([self.kernels.has(device, op, number) for device in types])

    def _at_pins(self, seconds: Floats, numbers: Sequence[int]) -> Floats:
        for number in numbers:
            op = self.graph.operators[number]
            wanted = pinned(self.pins, op, self.nodes)
            if wanted is None:
                continue
            allowed = np.isin(np.arange(self.nodes.num), list(wanted))
            left = np.where(allowed, seconds, np.inf)
            if np.isinf(left).all():
                raise ValueError(self._unmet(number, numbers, wanted, seconds))
            seconds = left
        return seconds

    def _unmet(
        self,
        number: int,
        task: Sequence[int],
        wanted: frozenset[int],
        seconds: Floats,
    ) -> str:
        names = self.nodes.names
        can = [name for name, s in zip(names, seconds, strict=True) if np.isfinite(s)]
        what = _words(self.graph.operators[number], number)
        text = (
            f"affinity wants {what} on "
            f"{', '.join(names[node] for node in sorted(wanted))}, but "
        )
        if len(task) == 1:
            return text + (
                f"it has kernels only on {', '.join(can)}. Change the pin, or register "
                "the kernel."
            )
        return text + (
            f"the task that it is in (operators {task[0]} to {task[-1]}) has all "
            f"kernels, and is allowed by other pins, only on {', '.join(can)}. Change "
            "the pin, register the kernels, or make a task of its own of it: "
            "grain='operator', and no loop or `together` around it."
        )

    def _lacking(self, start: int, stop: int) -> str:
        devices = [
            f"{device.name} ({', '.join(sorted(device.kernels))})"
            if device.kernels is not None
            else f"{device.name} ({device.platform})"
            for device in self.types.values()
        ]
        worst = next((n for n in range(start, stop) if not self._has(n).any()), None)
        if worst is not None:
            what = _words(self.graph.operators[worst], worst)
        else:
            name = _words(self.graph.operators[start], start)
            what = f"all of operators {start} to {stop - 1}, which begin with {name},"
        return (
            f"no node has a kernel for {what}. The cluster has {', '.join(devices)}; "
            "a kernel that is not registered counts as missing. Add a node that has "
            "it, or register it: "
            "kernels=Kernels(registered={'TYPE': frozenset({'NAME'})})."
        )


def _words(op: Operator, number: int) -> str:
    where = f" at {op.name}" if op.name else ""
    return f"{op.primitive} (operator {number}, {op.kind}{where})"


def _seconds(graph: Graph, device: DeviceType, done: Any, moved: float) -> float:
    op = done.operator
    if op.unread:
        return 0.0
    # A compiler fuses cheap operators with their neighbours, without a launch for each.
    launch = 0.0 if op.kind in CHEAP else device.efficiency.launch_s
    computing = float(computing_s(graph, device, done, {}, moved=moved))
    return op.trips * (computing + launch)


def _name(graph: Graph, start: int, stop: int) -> str:
    """Returns a task's name, such as `12 dot_general`, `3-40 loop`, `41-60 block`.

    The task has the operators `start` to `stop` - 1 of the program.
    """
    if stop - start == 1:
        return f"{start} {graph.operators[start].primitive}"
    return f"{start}-{stop - 1} {_kind(graph, start, stop)}"


def _kind(graph: Graph, start: int, stop: int) -> str:
    if stop - start == 1:
        return graph.operators[start].kind
    is_loop = any(loop.operators == (start, stop) for loop in graph.loops)
    return "loop" if is_loop else "block"
