"""Nodes at work: one node, the nodes of one process, and what they did when.

A node makes its calls in order and waits for what others send; arrays come and go
through an `Exchange`, whether it is a thread that has a device or a process of its own.
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

# One node at work: it makes its calls in order, and waits for what others send.
#
# The same for a thread that has a device and for a process of its own: arrays come and
# go through an `Exchange`. Every wait has a deadline and says what it waited for.


_KEPT = ("param", "state", "constant")
"""Belong to the caller; the rest is let go after its last use."""


class Exchange(Protocol):
    """How arrays get from node to node."""

    def send(self, key: Key, array: Any, node: int) -> None:
        """Hands an array over; returns at once."""
        ...

    def receive(self, key: Key, deadline: float) -> Any:
        """An array that was sent here, on this node's device.

        Raises:
            TimeoutError: it was not there at the deadline (`time.monotonic()`).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Span:
    """One task, as it was run; seconds since the step began."""

    node: int
    name: str
    microbatch: int | None
    ready_s: float
    """The node had done its task before: from here on it waits."""
    start_s: float
    """All that it needs has come."""
    end_s: float


class Node:
    """A device and the programs compiled for it."""

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
        """Does all tasks of a step.

        Args:
            tasks: in order.
            store: arrays on the device, by name; what is made and used up comes and
                goes, and `wanted` is in it afterwards.
            exchange: with other nodes.
            deadline: `time.monotonic()` at which waiting ends.
            wanted: names of arrays that stay.
            began: `time.monotonic()` at the start of the step: every task ends before
                the next begins, and is timed. None: the device has a queue.

        Raises:
            TimeoutError: says which task waited for which array of which node.
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
    """How often each array is read or sent; what is wanted once more."""
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
    """Notes when tasks begin and end, or does nothing."""

    def __init__(self, began: float | None) -> None:
        self._began = began
        self.spans: list[Span] = []

    def __call__(self, arrays: Sequence[Any] = ()) -> float:
        """Seconds since the beginning, once the arrays are there."""
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


# The nodes of one process: a thread for each device, arrays handed over between them.


_GRACE_S = 5.0
"""A node that finds the deadline passed gets this long to say what it waited for."""


class Hub:
    """Where arrays lie until the node they were sent to takes them."""

    def __init__(self, devices: Mapping[int, Any]) -> None:
        self._devices = devices
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, Key], Any] = {}
        self._failed: BaseException | None = None

    def exchange(self, node: int) -> Exchange:
        """How one node sends and receives."""
        return _Port(self, node)

    def send(self, key: Key, array: Any, node: int) -> None:
        """Starts the transfer to a node's device."""
        there = jax.device_put(array, self._devices[node])
        with self._changed:
            self._arrived[node, key] = there
            self._changed.notify_all()

    def receive(self, key: Key, node: int, deadline: float) -> Any:
        """What was sent to a node.

        Raises:
            TimeoutError: it was not sent until the deadline.
            InterruptedError: another node failed.
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
        """Runs every node in a thread of its own and waits for all.

        Raises:
            Exception: what went wrong on the node that failed first.
            TimeoutError: a node's device is still at work after the deadline.
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
            thread.daemon = True  # a device that hangs must not keep the process
            thread.start()
        for node, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()) + _GRACE_S)
            if thread.is_alive():
                raise TimeoutError(
                    f"node {node} ({self._devices[node]}) was still computing "
                    f"{_GRACE_S:g} s after the step's deadline. Give the step a later "
                    "deadline (deadline_s) if its programs take that long."
                )
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


# What the nodes of a placed step did when, as it was measured.


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """A measured step."""

    spans: tuple[Span, ...]
    """Every task, by node and in the order in which the node did it."""
    nodes: tuple[int, ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last task was done."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def busy_s(self) -> dict[int, float]:
        """Seconds that each node worked."""
        return {
            node: sum(s.end_s - s.start_s for s in self.spans if s.node == node)
            for node in self.nodes
        }

    @property
    def wait_s(self) -> dict[int, float]:
        """Seconds that each node did not work, until the last one was done."""
        return {node: self.step_s - busy for node, busy in self.busy_s.items()}

    @property
    def order(self) -> dict[int, tuple[tuple[str, int | None], ...]]:
        """Names and microbatches of each node's tasks, by measured start."""
        return {
            node: tuple(
                (span.name, span.microbatch)
                for span in sorted(self.spans, key=lambda span: span.start_s)
                if span.node == node
            )
            for node in self.nodes
        }
