"""The nodes of one process: a thread for each device, arrays handed over between them.

Decides nothing; must not know what nodes compute.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from dtft.train.placed_calls import Key
from dtft.train.placed_node import Exchange, Span

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
