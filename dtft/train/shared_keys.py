"""The keys of this process's coordination service, the same as in other processes.

On CPU each process of a world has a JAX coordination service of its own, so that no
host's loss ends that of others. Processes find each other through keys: gloo writes its
addresses in the directory `GLOO`, and dtft writes in the directory `OWN`. JAX calls
nobody when gloo has written a key, so a thread looks for gloo's keys and passes them
on. It sets the keys of other processes, too. dtft's own keys are passed on by the
thread that writes them.
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
HURRIED_S = 0.002
"""Seconds between two looks for new keys while a formation's first step runs. Each look
is a call to the service."""
CALM_S = 0.05
"""Seconds between two looks at other times: a program of another kind, such as that of
an evaluation, can begin with collectives between other devices."""


class SharedKeys:
    """Passes keys on in both directions, until the process ends."""

    def __init__(self, publish: Callable[[Mapping[str, str]], None]) -> None:
        """Does nothing yet.

        Args:
            publish: passes keys of this process to the others, with values in
                hexadecimal; called on several threads; must not block.
        """
        self._publish = publish
        self._known: set[str] = set()
        self._received: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        self._calm_at = 0.0

    def start(self) -> None:
        """Starts the thread; this process must be connected to its service."""
        _jax_internals.tell_of_keys(self._written)
        threading.Thread(target=self._run, daemon=True).start()

    def hurry(self, seconds: float) -> None:
        """Looks for new keys often, for some seconds from now on."""
        self._calm_at = time.monotonic() + seconds
        self._received.put({})

    def calm(self) -> None:
        """Looks for new keys rarely from now on."""
        self._calm_at = 0.0

    def forget(self) -> None:
        """Deletes gloo's keys, so that looks stay cheap: this process has left all
        collectives, and the next formation's processes write other keys."""
        _jax_internals.delete_service_keys(GLOO)
        self._known.clear()

    def take(self, keys: Mapping[str, str]) -> None:
        """Handles keys of another process; returns at once."""
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
                    logger.warning("keys could not be shared: %s", error)
                told = str(error)
                time.sleep(CALM_S)

    def _receive(self) -> None:
        """Sets the next keys of other processes, if some come before the next look."""
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
