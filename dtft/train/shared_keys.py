"""Copies keys between the coordination services of a world's processes.

A world is the set of a job's JAX processes. On CPU each of these processes has a JAX
coordination service of its own, so that the loss of a host does not end the service of
other hosts. Processes find each other through keys in the service: gloo writes its
addresses under the directory `cpu:gloo` (`GLOO`), and dtft writes keys under the
directory `dtft` (`OWN`). JAX does not report when gloo has written a key, so a thread
polls for gloo's keys and publishes new keys. The same thread sets the keys that other
processes have published. A key of dtft is published by the thread that writes the key.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

import jax

from dtft import _jax_internals

logger = logging.getLogger(__name__)

GLOO = "cpu:gloo"
OWN = "dtft"
"""Directories of the keys that are shared."""
HURRIED_S = 0.005
"""Seconds between two polls for new keys while a formation's first step runs.

Each poll is a call to the service. With shorter waits the polls of all trainers on a
machine delay the step for longer than late keys do (`benchmarks/recovery_gap.py`).
"""
CALM_S = 0.05
"""Seconds between two polls at other times. New keys can appear then, too: evaluation,
for example, is another program, which can have collectives between other devices."""


class SharedKeys:
    """Copies keys of JAX's coordination service between this process and others.

    Each process has a coordination service of its own. A thread publishes this
    process's keys and sets the keys of other processes; it runs until the process ends.
    """

    def __init__(self, publish: Callable[[Mapping[str, str]], None]) -> None:
        """Stores `publish`; `start` starts the thread.

        Args:
            publish: function that sends keys of this process, with values in
                hexadecimal, to the other processes. It is called on several threads,
                and must not block.
        """
        self._publish = publish
        self._known: set[str] = set()
        self._received: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        self._calm_at = 0.0

    def start(self) -> None:
        """Starts the thread that publishes and sets keys.

        This process must be connected to its coordination service.
        """
        _jax_internals.tell_of_keys(self._written)
        threading.Thread(target=self._run, daemon=True).start()

    def hurry(self, seconds: float) -> None:
        """Looks for new keys of gloo often, for the next `seconds` s.

        Looks every 5 ms (`HURRIED_S`) in this time, afterwards every 50 ms (`CALM_S`).
        """
        self._calm_at = time.monotonic() + seconds
        self._received.put({})

    def calm(self) -> None:
        """Looks for new keys of gloo every 50 ms (`CALM_S`) from now on."""
        self._calm_at = 0.0

    def forget(self) -> None:
        """Deletes gloo's keys from this process's service, so that polls read few keys.

        Call it when this process has left all collectives; gloo writes other keys for
        the next ones.
        """
        _jax_internals.delete_service_keys(GLOO)
        self._known.clear()

    def take(self, keys: Mapping[str, str]) -> None:
        """Queues keys of another process for the thread to set; does not block.

        `keys` maps a key to its value in hexadecimal.
        """
        self._received.put(keys)

    def _run(self) -> None:
        told = ""
        while True:
            try:
                self._share()
                self._receive()
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                # A wrong value from elsewhere, or a call to the service that failed.
                if str(error) != told:
                    logger.warning(
                        "keys of JAX's coordination service could not be exchanged "
                        "with other hosts; collectives with these hosts may fail: %s",
                        error,
                    )
                told = str(error)
                time.sleep(CALM_S)

    def _receive(self) -> None:
        """Waits for keys that another process has published, and sets them.

        If no keys arrive, returns when the next look for gloo's keys is due: after 5 ms
        (`HURRIED_S`) in the time that `hurry` has set, otherwise after 50 ms
        (`CALM_S`). Keys that are neither gloo's nor dtft's are ignored.
        """
        hurried = time.monotonic() < self._calm_at
        try:
            keys = self._received.get(timeout=HURRIED_S if hurried else CALM_S)
        except queue.Empty:
            return
        for key, value in keys.items():
            if key.startswith((f"{GLOO}/", f"{OWN}/")):
                self._known.add(key)
                _jax_internals.set_service_key(key, bytes.fromhex(value))

    def _share(self) -> None:
        found = {
            key: value.hex()
            for key, value in _jax_internals.service_keys(GLOO).items()
            if key not in self._known
        }
        if found:
            self._known |= found.keys()
            self._publish(found)

    def _written(self, key: str, value: bytes) -> None:
        self._publish({key: value.hex()})
