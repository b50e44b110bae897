"""The synthetic training state of `memory_tier_vs_orbax.py`, and a step that uses it.

Parameters and two moments, a third of the bytes each, in one of three layouts on a mesh
(replica, fsdp) of four hosts with one device each. Knows JAX; must not know which
memory tier keeps the state.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft._jax_internals import cpu_buffer
from dtft.checkpoint.state import Layout
from dtft.train import layout_of
from experiments.tier_task import (
    COLUMNS,
    KINDS,
    LAYOUTS,
    LEAVES_PER_KIND,
    NUM_HOSTS,
    num_rows,
)

WORK_SIZE = 128
"""Side of the square matrices that the step multiplies to take its time."""
TRIED_TURNS = 500
"""Multiplications that are timed to find out what one costs."""
TRIES = 3
"""Times that the update and the multiplications are timed."""

State = dict[str, jax.Array]


def make_mesh(layout: str) -> Mesh:
    """The mesh over all processes' devices."""
    replica = LAYOUTS[layout].replica
    devices = np.array(jax.devices()).reshape(replica, NUM_HOSTS // replica)
    return Mesh(devices, ("replica", "fsdp"))


def abstract_state(mesh: Mesh, layout: str, mib: int) -> dict[str, Any]:
    """Leaf name to shape, float32 and sharding."""
    shape = (num_rows(mib), COLUMNS)
    found = LAYOUTS[layout]
    axes = {"params": found.params, "mu": found.moments, "nu": found.moments}
    return {
        f"{kind}{number}": jax.ShapeDtypeStruct(
            shape,
            jnp.float32,
            sharding=NamedSharding(mesh, PartitionSpec(axes[kind])),
        )
        for kind in KINDS
        for number in range(LEAVES_PER_KIND)
    }


def make_state(abstract: dict[str, Any]) -> State:
    """Random values (nothing could compress them), equal in all replicas."""

    def leaf(number: int, struct: Any) -> jax.Array:
        height = struct.shape[0] // NUM_HOSTS

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(struct.shape[0])
            blocks = [
                np.random.default_rng([number, row]).standard_normal(
                    (height, COLUMNS), np.float32
                )
                for row in range(start, stop, height)
            ]
            return np.concatenate(blocks)

        return jax.make_array_from_callback(struct.shape, struct.sharding, part)

    return {p: leaf(n, struct) for n, (p, struct) in enumerate(abstract.items())}


def slices_of(abstract: dict[str, Any]) -> Layout:
    """The layout as the memory tier is told of it; slot = process."""
    return layout_of(abstract, {slot: slot for slot in range(NUM_HOSTS)}, "")


def digests(state: State) -> dict[str, str]:
    """Leaf name to a digest of this host's bytes; all arrays must be ready."""
    return {
        path: xxhash.xxh3_128_hexdigest(cpu_buffer(array.addressable_data(0)))
        for path, array in state.items()
    }


class Step:
    """A step that changes every byte, donates its input and takes a chosen time.

    The state is updated, matrices are multiplied until the time is over, and the hosts
    add up a number, as they would add up gradients.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Takes no longer than its update until `calibrate` was called."""
        self._run = _compiled(mesh)
        self._turns = 0

    def __call__(self, state: State) -> State:
        """One step; waits for its end."""
        return jax.block_until_ready(self._run(state, np.int32(self._turns)))

    def calibrate(self, state: State, seconds: float) -> State:
        """Finds the work that makes a step take `seconds`, equal on all hosts.

        The work is timed alone, and the fastest try counts. A difference of two steps
        would not do: the time of a large state's update varies by more than the work.
        """
        work, updates, works = jax.jit(_work), [], []
        for _ in range(1 + TRIES):  # the first one compiles
            begun = time.monotonic()
            state = self(state)
            updates.append(time.monotonic() - begun)
            begun = time.monotonic()
            jax.block_until_ready(work(np.int32(TRIED_TURNS)))
            works.append(time.monotonic() - begun)
        left, each = seconds - min(updates[1:]), min(works[1:]) / TRIED_TURNS
        wanted = np.int32(max(0, round(left / each)))
        self._turns = int(multihost_utils.broadcast_one_to_all(wanted))
        return state


def _work(turns: jax.Array) -> jax.Array:
    matrix = jnp.full((WORK_SIZE, WORK_SIZE), 1 / WORK_SIZE, jnp.float32)
    return jax.lax.fori_loop(0, turns, lambda _, m: m @ matrix, matrix)


def _compiled(mesh: Mesh) -> Callable[..., State]:
    add_up = jax.shard_map(
        lambda number: jax.lax.psum(number, ("replica", "fsdp")),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    def step(state: State, turns: jax.Array) -> State:
        small = add_up(_work(turns)[0, 0]) * jnp.float32(1e-6)
        return {p: x * jnp.float32(0.999) + small for p, x in state.items()}

    return jax.jit(step, donate_argnums=0)
