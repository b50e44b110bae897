"""Runs the tasks of a placed step (`PlacedStep`) on its nodes, and times the tasks.

A task is a program that one node runs, for one microbatch or once in a step. A node
runs its tasks in order and waits for arrays from other nodes. A node is a thread with a
device or a separate process; in both cases arrays pass through an `Exchange`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import SingleDeviceSharding

from dtft.parallel.mpmd.schedule import Key, NodeCall, Task

# One node. Every wait for an array has a deadline, and its error names the array.


_KEPT = ("param", "state", "constant")
"""Kinds of arrays that belong to the caller. Other arrays are dropped from the store
after their last use."""


class Exchange(Protocol):
    """Interface that sends arrays from node to node."""

    def send(self, key: Key, array: Any, node: int) -> None:
        """Starts to send an array, named `key`, to a node; does not block."""
        ...

    def receive(self, key: Key, deadline: float) -> Any:
        """Waits for the array `key` sent to this node; returns it on the node's device.

        Raises:
            TimeoutError: the array has not arrived by `deadline`, a time of
                `time.monotonic()`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Span:
    """The measured times of one task (a program on one node, for one microbatch).

    Times are in seconds since the step began. `microbatch` is None for a task that runs
    once in a step.
    """

    node: int
    name: str
    microbatch: int | None
    ready_s: float
    """Time when the node began to wait for the inputs, after its previous task."""
    start_s: float
    """Time when all inputs were on the device."""
    end_s: float


class Node:
    """A device with the programs that are compiled for it."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._compiled: dict[NodeCall, Callable[..., Any]] = {}

    def run(
        self,
        tasks: Sequence[Task],
        store: dict[Key, Any],
        exchange: Exchange,
        deadline: float,
        *,
        wanted: Sequence[Key] = (),
        began: float | None = None,
    ) -> list[Span]:
        """Runs the node's tasks (programs, each for one microbatch) of a step.

        Args:
            tasks: the tasks, in order.
            store: map from keys (names) to arrays on the device. Results of tasks and
                received arrays are added. All arrays are dropped after their last use,
                except those of `wanted`, parameters, optimizer state and constants.
            exchange: sends arrays to and receives arrays from other nodes.
            deadline: time (`time.monotonic()`) at which waiting ends.
            wanted: keys of arrays that stay in the store.
            began: time (`time.monotonic()`) at which the step began. With a time, each
                task is timed, and ends before the next task begins. With None, tasks
                are not timed, and the device queues them.

        Returns:
            The times of the tasks; empty if `began` is None.

        Raises:
            TimeoutError: an array has not arrived by the deadline; the message names
                the node, the task and the array.
        """
        left = _uses(tasks, wanted)
        clock = _Clock(began)
        for task in tasks:
            ready = clock()
            read = [
                self._take(key, task, store, exchange, deadline) for key in task.reads
            ]
            start = clock(read)
            if task.call.program is not None:
                written = self._program(task.call)(*read)
                store.update(zip(task.writes, written, strict=True))
            clock.note(task, ready, start, clock([store[k] for k in task.writes]))
            for key, node in task.sends:
                exchange.send(key, store[key], node)
            _let_go(task, store, left)
        return clock.spans

    def _program(self, call: NodeCall) -> Callable[..., Any]:
        if call not in self._compiled:
            assert call.program is not None
            self._compiled[call] = jax.jit(
                jaxpr_as_fun(call.program),
                donate_argnums=call.donated,
                out_shardings=SingleDeviceSharding(self._device),
            )
        return self._compiled[call]

    def _take(
        self,
        key: Key,
        task: Task,
        store: dict[Key, Any],
        exchange: Exchange,
        deadline: float,
    ) -> Any:
        if key not in store:
            try:
                store[key] = exchange.receive(key, deadline)
            except TimeoutError as error:
                raise TimeoutError(
                    f"node {task.call.node} waited for {key}, which {task.call.name} "
                    f"of microbatch {task.microbatch} needs, and it did not come in "
                    "time. The node that makes it is late or stuck; give the step a "
                    "later deadline (deadline_s) if it is only slow."
                ) from error
        return store[key]


def _uses(tasks: Sequence[Task], wanted: Sequence[Key]) -> Counter[Key]:
    """Counts how often the tasks read or send each array, by key.

    A key in `wanted` counts once more, so that its array is not dropped after its last
    use.
    """
    left: Counter[Key] = Counter(wanted)
    for task in tasks:
        left.update(task.reads)
        left.update(key for key, _ in task.sends)
    return left


def _let_go(task: Task, store: dict[Key, Any], left: Counter[Key]) -> None:
    used = [*task.reads, *(key for key, _ in task.sends)]
    left.subtract(used)
    for key in {*used, *task.writes}:
        if left[key] <= 0 and key.kind not in _KEPT:
            store.pop(key, None)


class _Clock:
    """Measures times since the step began, and records the times of tasks.

    Waits for arrays before a measurement. If `began`, the time at which the step began,
    is None, it neither waits nor records.
    """

    def __init__(self, began: float | None) -> None:
        self._began = began
        self.spans: list[Span] = []

    def __call__(self, arrays: Sequence[Any] = ()) -> float:
        """Waits until arrays are ready; returns the seconds since the step began.

        Returns 0.0 without waiting if `began` is None.
        """
        if self._began is None:
            return 0.0
        jax.block_until_ready(list(arrays))
        return time.monotonic() - self._began

    def note(self, task: Task, ready: float, start: float, end: float) -> None:
        if self._began is not None:
            self.spans.append(
                Span(
                    node=task.call.node,
                    name=task.call.name,
                    microbatch=task.microbatch,
                    ready_s=ready,
                    start_s=start,
                    end_s=end,
                )
            )


# The nodes of one process: each node has a thread, and the threads exchange arrays.


_GRACE_S = 5.0
"""Seconds that `Hub.all` still waits for the threads of nodes after the deadline. In
this time a node that waited for an array raises an error, which names the array."""


class Hub:
    """Runs the nodes of a step on one thread each, and passes arrays between them.

    This object keeps an array that was sent to a node, on the node's device, until the
    node receives it. Once a node has failed, every `receive` raises InterruptedError.
    """

    def __init__(self, devices: Mapping[int, Any]) -> None:
        self._devices = devices
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, Key], Any] = {}
        self._failed: BaseException | None = None

    def exchange(self, node: int) -> Exchange:
        """Returns the object by which a node sends and receives arrays."""
        return _Port(self, node)

    def send(self, key: Key, array: Any, node: int) -> None:
        """Starts the transfer of an array to a node's device."""
        # A copy also for a node on the same device: the sender may donate its array.
        there = jax.device_put(array, self._devices[node], may_alias=False)
        with self._changed:
            self._arrived[node, key] = there
            self._changed.notify_all()

    def receive(self, key: Key, node: int, deadline: float) -> Any:
        """Waits for an array that was sent to a node, and returns the array.

        Raises:
            TimeoutError: the array was not sent by `deadline`, a time of
                `time.monotonic()`.
            InterruptedError: a task of any node has raised an error.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (node, key) in self._arrived or self._failed,
                max(0.0, deadline - time.monotonic()),
            )
            if self._failed:
                raise InterruptedError("another node failed") from self._failed
            if (node, key) not in self._arrived:
                raise TimeoutError(f"{key} did not come")
            return self._arrived.pop((node, key))

    def all(self, work: Callable[[int], list[Span]], deadline: float) -> list[Span]:
        """Runs every node in a separate thread, and waits for all threads.

        Args:
            work: function that runs the tasks of a node; its argument is the node's
                number.
            deadline: time (`time.monotonic()`) at which waiting ends.

        Returns:
            The times of the tasks of all nodes.

        Raises:
            Exception: the error of the node that failed first.
            TimeoutError: a node still computes 5 seconds (`_GRACE_S`) or more after the
                deadline.
        """
        found: dict[int, list[Span]] = {}

        def run(node: int) -> None:
            try:
                found[node] = work(node)
            except BaseException as error:
                with self._changed:
                    self._failed = self._failed or error
                    self._changed.notify_all()

        threads = {
            node: threading.Thread(target=run, args=(node,), name=f"node {node}")
            for node in self._devices
        }
        for thread in threads.values():
            thread.daemon = True  # so that a hanging device cannot block process exit
            thread.start()
        for node, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()) + _GRACE_S)
            if thread.is_alive():
                raise TimeoutError(
                    f"node {node} ({self._devices[node]}) was still computing "
                    f"{_GRACE_S:g} s after the step's deadline. Give the step a later "
                    "deadline (deadline_s) if its programs take that long."
                ) from self._failed
        if self._failed:
            raise self._failed
        return [span for node in self._devices for span in found[node]]


@dataclass(frozen=True)
class _Port:
    hub: Hub
    node: int

    def send(self, key: Key, array: Any, node: int) -> None:
        self.hub.send(key, array, node)

    def receive(self, key: Key, deadline: float) -> Any:
        return self.hub.receive(key, self.node, deadline)


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The measured times of all tasks of a step."""

    spans: tuple[Span, ...]
    """Times of all tasks, ordered by node, then by execution."""
    nodes: tuple[int, ...]

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of the last task."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def busy_s(self) -> dict[int, float]:
        """Seconds in which each node ran tasks, by node."""
        return {
            node: sum(s.end_s - s.start_s for s in self.spans if s.node == node)
            for node in self.nodes
        }

    @property
    def wait_s(self) -> dict[int, float]:
        """Seconds in which each node ran no task, by node: `step_s` - `busy_s`."""
        return {node: self.step_s - busy for node, busy in self.busy_s.items()}

    @property
    def order(self) -> dict[int, tuple[tuple[str, int | None], ...]]:
        """Map from a node to its tasks, in order of measured start.

        A task is given by its name and the number of its microbatch, which is None for
        a task that runs once in a step.
        """
        return {
            node: tuple(
                (span.name, span.microbatch)
                for span in sorted(self.spans, key=lambda span: span.start_s)
                if span.node == node
            )
            for node in self.nodes
        }
