"""A traced program as tasks: operators, whole loops, layers; how long each node takes.

Decides what one task is: an operator; a loop with all that is in it, as no node can
take over in the middle of one; what an executor cannot cut (`together`); and with
grain `block` each of a row of equal layers. Pure; must not know links or schedules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dtft.planner import blocks
from dtft.planner.cost import computing_s
from dtft.planner.device import DeviceType
from dtft.planner.graph import Graph, Operator
from dtft.planner.groups import CHEAP
from dtft.planner.handing import handed, with_gradients
from dtft.planner.kernel_names import check_kernels, check_pins
from dtft.planner.kernels import Kernels, pinned
from dtft.planner.nodes import Nodes
from dtft.planner.partition import Division, work
from dtft.planner.tasks import Tasks

Grain = Literal["operator", "block"]
Floats = NDArray[np.float64]
_TWICE = ("matmul", "convolution")
"""Kinds whose backward pass has two products for one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGraph:
    """Tasks, and what of the program each is."""

    tasks: Tasks
    operators: tuple[tuple[int, int], ...]
    """Of each task the first operator, and the one after its last."""
    values: tuple[int, ...]
    """Of each value that tasks pass on its number in `Graph.values`."""
    backward: tuple[float, ...]
    """Seconds of each task's backward pass over its forward."""
    notes: tuple[str, ...] = ()
    """What was asked for and is not in the program."""


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
    """The tasks of a program.

    Args:
        graph: the program.
        nodes: of a cluster, with their types.
        kernels: what is known of kernels beside the types.
        affinity: operator (primitive, kind, or word of `kernels.CLASSES`) to the node,
            type of device or platform that it is wanted on.
        grain: `block`: each of a row of equal layers is one task.
        together: operators that stay on one node, first and after the last: calls that
            the executor cannot cut (`jaxprs.uncut`).
        params: path of the argument that is differentiated; default: the first one.

    Raises:
        ValueError: an operator that no node has a kernel for, a pin that cannot be
            met, or a name of neither; names the operator and what there is.
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
    """Stretches of operators that are one task; they cover the program."""
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
    """Equal layers one by one; where rows of them overlap the longer one counts."""
    rows = blocks.find(graph).repeats
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
    """How long each node takes for operators; alike ones are looked at once."""

    def __init__(
        self, graph: Graph, nodes: Nodes, kernels: Kernels, pins: Mapping[str, str]
    ) -> None:
        self.graph, self.nodes, self.kernels, self.pins = graph, nodes, kernels, pins
        self.types = {device.name: device for device in nodes.devices}
        self.columns = [list(self.types).index(d.name) for d in nodes.devices]
        self._known: dict[Any, Floats] = {}

    def of(self, start: int, stop: int) -> Floats:
        """Of a task, `[nodes]`; infinite where a kernel lacks, or a pin forbids it."""
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
        """Seconds of a task's backward pass over its forward, on the fastest type."""
        each = [float(self._speeds(number).min()) for number in range(start, stop)]
        some = self.graph.operators[start:stop]
        twice = sum(s for s, op in zip(each, some, strict=True) if op.kind in _TWICE)
        return 1.0 + (twice / sum(each) if sum(each) else 0.0)

    def _speeds(self, number: int) -> Floats:
        """Of one operator, by type of device, all its executions."""
        op, values = self.graph.operators[number], self.graph.values
        arrays = tuple(
            (values[v].shape, values[v].dtype) for v in (*op.inputs, *op.outputs)
        )
        key = op.primitive, op.flops, op.special, op.trips, arrays
        if key not in self._known:
            done = work(self.graph, op, Division(axes={}))
            self._known[key] = np.array(
                [_seconds(self.graph, device, done) for device in self.types.values()]
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
            "what is not registered is not there. Add a node that has it, or register "
            "it: kernels=Kernels(registered={'TYPE': frozenset({'NAME'})})."
        )


def _words(op: Operator, number: int) -> str:
    where = f" at {op.name}" if op.name else ""
    return f"{op.primitive} (operator {number}, {op.kind}{where})"


def _seconds(graph: Graph, device: DeviceType, done: Any) -> float:
    op = done.operator
    # What a compiler fuses with its neighbours is not started by itself.
    launch = 0.0 if op.kind in CHEAP else device.efficiency.launch_s
    return op.trips * (float(computing_s(graph, device, done, {})) + launch)


def _name(graph: Graph, start: int, stop: int) -> str:
    """Such as `12 dot_general`, `3-40 scan`, `41-60 block`."""
    if stop - start == 1:
        return f"{start} {graph.operators[start].primitive}"
    return f"{start}-{stop - 1} {_kind(graph, start, stop)}"


def _kind(graph: Graph, start: int, stop: int) -> str:
    if stop - start == 1:
        return graph.operators[start].kind
    is_loop = any(loop.operators == (start, stop) for loop in graph.loops)
    return "loop" if is_loop else "block"
