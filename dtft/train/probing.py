"""A step that is timed: what each replica does by itself, apart from the reduction.

Inside of one program nobody sees a device wait. So the step runs as three programs, up
to the reduction, the reduction, and the update, with waits between them for this
process's own devices. It must not know what the times are for, nor which steps are
timed.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from dtft.train.step import Arrays, Metrics, State
from dtft.train.uneven import UnevenProgram


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of one step in this process."""

    began: float
    """When everything before it was done."""
    ended: float
    """When the new state was there."""
    busy_s: tuple[float, ...]
    """Of each of this process's replicas: its own sums, and its update."""


class Probe:
    """Runs timed steps of a program."""

    def __init__(self, program: UnevenProgram) -> None:
        """Runs nothing yet."""
        self._program = program

    def prepare(self, batch: Arrays) -> None:
        """Compiles what a timed step runs, for batches like this one."""
        self._program.compile_apart(batch)

    def idle_at(self, state: State) -> float:
        """Waits until the state is there; the time then, as in `Timed`."""
        jax.block_until_ready(state)
        return time.perf_counter()

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics, Timed]:
        """One optimizer step; `prepare` comes first. `state` is donated: it cannot be
        used afterwards."""
        jax.block_until_ready((state, dict(batch)))
        began = time.perf_counter()
        sums = self._program.local(state, batch)
        alone = self._until_ready(sums, began)
        means = jax.block_until_ready(self._program.means(sums))
        reduced = time.perf_counter()
        state, metrics = self._program.update(state, means)
        updated = self._until_ready(state, reduced)
        jax.block_until_ready((state, metrics))
        busy = tuple(map(sum, zip(alone, updated, strict=True)))
        ended = time.perf_counter()
        return state, metrics, Timed(began=began, ended=ended, busy_s=busy)

    def _until_ready(self, made: Any, began: float) -> tuple[float, ...]:
        """Seconds until each replica was done; they are waited for at the same time."""
        replicas = self._program.own_replicas

        def wait(replica: int) -> float:
            devices = set(self._program.mesh.devices[replica].flat)
            own = [
                shard.data
                for leaf in jax.tree.leaves(made)
                for shard in leaf.addressable_shards
                if shard.device in devices
            ]
            jax.block_until_ready(own)
            return time.perf_counter() - began

        if len(replicas) == 1:
            return (wait(replicas[0]),)
        with ThreadPoolExecutor(len(replicas)) as pool:
            return tuple(pool.map(wait, replicas))
