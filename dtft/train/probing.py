"""A step that is timed, and what replicas tell each other of it.

Inside of one program nobody sees a device wait. So the step runs as three programs, up
to the reduction, the reduction, and the update, with waits between them for this
process's own devices. It must not know what the times are for, nor which steps are
timed.
"""

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.train.functional_model import Metrics, State
from dtft.train.replicas import AXIS
from dtft.train.step import Arrays, TrainStep
from dtft.train.uneven import shared_by


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
    """Runs timed steps. They are compiled once: keep it as long as the step."""

    def __init__(self, train_step: TrainStep) -> None:
        """Runs nothing yet.

        Args:
            train_step: of `uneven.load_balanced_step`.
        """
        shared, state = shared_by(train_step), train_step.abstract_state
        self._mesh, self._state = train_step.mesh, state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        everywhere = NamedSharding(train_step.mesh, PartitionSpec())
        self._local = jax.jit(
            shared.local,
            in_shardings=(shardings, train_step.batch_sharding),
            out_shardings=shared.of_sums,
        )
        self._means = jax.jit(
            shared.means, in_shardings=(shared.of_sums,), out_shardings=shared.of_means
        )
        self._update = jax.jit(
            train_step.update,
            donate_argnums=0,
            in_shardings=(shardings, shared.of_means),
            out_shardings=(shardings, everywhere),
        )
        self._compiled: tuple[Any, Any, Any] | None = None

    def prepare(self, batch: Arrays) -> None:
        """Compiles what a timed step runs, for batches like this one; once."""
        if self._compiled is None:
            local = self._local.lower(self._state, dict(batch)).compile()
            means = self._means.lower(_given_by(local)).compile()
            update = self._update.lower(self._state, _given_by(means)).compile()
            self._compiled = local, means, update

    @property
    def programs(self) -> tuple[Any, Any, Any]:
        """The compiled sums, reduction and update; `prepare` comes first."""
        assert self._compiled is not None
        return self._compiled

    def idle_at(self, state: State) -> float:
        """Waits until the state is there; the time then, as in `Timed`."""
        jax.block_until_ready(state)
        return time.perf_counter()

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics, Timed]:
        """One optimizer step; `prepare` comes first. `state` is donated: it cannot be
        used afterwards."""
        local, reduce, update = self.programs
        jax.block_until_ready((state, dict(batch)))
        began = time.perf_counter()
        sums = local(state, dict(batch))
        alone = self._until_ready(sums, began)
        means = jax.block_until_ready(reduce(sums))
        reduced = time.perf_counter()
        state, metrics = update(state, means)
        updated = self._until_ready(state, reduced)
        jax.block_until_ready((state, metrics))
        busy = tuple(map(sum, zip(alone, updated, strict=True)))
        ended = time.perf_counter()
        return state, metrics, Timed(began=began, ended=ended, busy_s=busy)

    def _until_ready(self, made: Any, began: float) -> tuple[float, ...]:
        """Seconds until each replica was done; they are waited for at the same time."""
        replicas = own_replicas(self._mesh)

        def wait(replica: int) -> float:
            devices = set(self._mesh.devices[replica].flat)
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


def own_replicas(mesh: Mesh) -> tuple[int, ...]:
    """The replicas of which this process has devices."""
    here = jax.process_index()
    return tuple(
        replica
        for replica, devices in enumerate(mesh.devices)
        if any(device.process_index == here for device in devices.flat)
    )


def gathered(mesh: Mesh, values: np.ndarray) -> np.ndarray:
    """What all processes know of their replicas; they call it together.

    Args:
        mesh: has the replicas in dim 0.
        values: a row for each of this process's replicas, `[replicas here, n]`.

    Returns:
        `[replicas, devices of a replica, n]`: devices of one replica may be of several
        processes.
    """
    each = mesh.size // mesh.shape[AXIS]
    place = {replica: row for row, replica in enumerate(own_replicas(mesh))}

    def row(index: Any) -> np.ndarray:
        replica = (index[0].start or 0) // each
        return np.asarray(values[place[replica]], np.float32)[None]

    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.size, values.shape[1])
    found = _gather(mesh)(jax.make_array_from_callback(shape, by_device, row))
    return np.asarray(found).reshape(-1, each, values.shape[1])


@functools.cache
def _gather(mesh: Mesh) -> Any:
    """Compiled once for a mesh and each shape."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda rows: rows, out_shardings=everywhere)


def _given_by(compiled: Any) -> Any:
    """What a compiled program returns, as the next one is compiled for it."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        compiled.out_info,
        compiled.output_shardings,
    )
