"""One node at work: it makes its calls in order, and waits for what others send.

The same for a thread that has a device and for a process of its own: arrays come and go
through an `Exchange`. Every wait has a deadline and says what it waited for. Decides
nothing; must not know what is computed or who else there is.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import SingleDeviceSharding

from dtft.train.placed_calls import Call, Key, Task

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
        self._compiled: dict[Call, Callable[..., Any]] = {}

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

    def _program(self, call: Call) -> Callable[..., Any]:
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
