"""Times of collectives on the devices at hand: alone, behind and beside computing.

Timed as `measuring` does, with bytes as the planner counts them. Decides nothing about
models or plans.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from dtft.planner.cluster import CollectiveKind
from dtft.train.measuring import Body, Pace, Timed, make_loop, timed

_COMPUTED = (256, 512), (512, 512)
"""Operands of the matmuls that collectives are timed behind."""
_MATMULS, _TURNS = 4, 5
"""Of a turn, some milliseconds as between the collectives of a step; and turns."""
_LAYERS, _OF_LAYER, _FEW = 4, 2, 4
"""Gathers of a turn that computing needs one after another; matmuls before each; and
turns."""


def collective_s(mesh: Mesh, kind: CollectiveKind, num_bytes: int, pace: Pace) -> Timed:
    """One collective of float32 along `group`; bytes as the planner counts them."""
    members = mesh.shape["group"]
    local = _local(kind, num_bytes, members)

    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        return (collective(kind, x, members),)

    return timed(mesh, body, [(local,)], jnp.float32, pace)


def _local(kind: CollectiveKind, num_bytes: int, members: int) -> int:
    """Numbers that a device has, of so many bytes as the planner counts them."""
    size = num_bytes // 4 // members * members
    return size // members if kind == "all_gather" else size


def collective(kind: CollectiveKind, x: jax.Array, members: int) -> jax.Array:
    """A collective whose result has the operand's shape again, at little more cost."""
    if kind == "all_reduce":
        return lax.psum(x, "group")
    if kind == "permute":
        return lax.ppermute(
            x, "group", [(i, (i + 1) % members) for i in range(members)]
        )
    if kind == "all_to_all":
        parts = lax.all_to_all(x.reshape(members, -1), "group", 0, 0)
        return parts.reshape(x.shape)
    if kind == "reduce_scatter":
        part = lax.psum_scatter(x, "group", tiled=True)
        return lax.dynamic_update_slice(x, part, (0,))
    whole = lax.all_gather(x, "group", tiled=True)
    # The next member's part: taking back one's own would undo the gathering.
    other = (lax.axis_index("group") + 1) % members
    return lax.dynamic_slice(whole, (other * x.shape[0],), x.shape)


def overlap_s(mesh: Mesh, side: int, num_bytes: int, dtype: Any, pace: Pace) -> Timed:
    """A square matmul, and an all-reduce that does not need it, in one turn."""
    members = mesh.shape["group"]

    def body(x: jax.Array, by: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return x @ by, by, collective("all_reduce", y, members)

    size = num_bytes // jnp.dtype(dtype).itemsize
    return timed(mesh, body, [(side, side), (side, side), (size,)], dtype, pace)


def behind_s(
    mesh: Mesh,
    all_bytes: Sequence[int],
    rounds: int,
    kind: CollectiveKind = "all_reduce",
    num: int = 1,
) -> list[float]:
    """What collectives add to matmuls that they wait for, and that wait for them.

    A loop with matmuls alone and one with each size of a collective, in turns: they
    are compared while the machine is equally fast.

    Args:
        mesh: of `make_mesh`.
        all_bytes: of the collectives.
        rounds: times that each is timed; the median counts.
        kind: of all of them.
        num: collectives behind each other, as of gradients; of one size.

    Returns:
        Seconds of one collective, for each size.
    """
    members = mesh.shape["group"]

    def computed(x: jax.Array, by: jax.Array) -> jax.Array:
        for _ in range(_MATMULS):
            x = jnp.tanh(x @ by)
        return x

    def alone(x: jax.Array, by: jax.Array) -> tuple[jax.Array, ...]:
        return computed(x, by), by

    def behind(x: jax.Array, by: jax.Array, *ys: jax.Array) -> tuple[jax.Array, ...]:
        x = computed(x, by)
        after = [collective(kind, y + x[0, 0], members) / members for y in ys]
        return sum((y[0] for y in after), x), by, *after

    sizes = [_local(kind, size, members) for size in all_bytes]
    loops = [make_loop(mesh, alone, _COMPUTED, jnp.float32)]
    loops += [
        make_loop(mesh, behind, [*_COMPUTED, *[(n,)] * num], jnp.float32) for n in sizes
    ]
    found: list[list[float]] = [[] for _ in all_bytes]
    for _ in range(rounds):
        without, *others = [run(_TURNS) for run in loops]
        for seconds, own in zip(others, found, strict=True):
            own.append((seconds - without) / _TURNS / num)
    return [median(own) for own in found]


def ahead_s(
    mesh: Mesh, all_bytes: Sequence[int], rounds: int
) -> tuple[float, float, float]:
    """Layers whose parameters are gathered, which waits for nothing that they compute.

    In turns, as in `behind_s`: only the layers, only the gathers, and both.

    Args:
        mesh: of `make_mesh`.
        all_bytes: of the parameters of layers, which have them by turns.
        rounds: times that each is timed; the median counts.

    Returns:
        Seconds of each.
    """
    members = mesh.shape["group"]
    some = [all_bytes[n % len(all_bytes)] for n in range(_LAYERS)]
    shapes = [*_COMPUTED, *[(_local("all_gather", n, members),) for n in some]]
    loops = [
        make_loop(mesh, _layers(members, *parts), shapes, jnp.float32)
        for parts in ((True, False), (False, True), (True, True))
    ]
    found = [[run(_FEW) / _FEW for run in loops] for _ in range(rounds)]
    computing, gathers, together = map(median, zip(*found, strict=True))
    return computing, gathers, together


def _layers(members: int, computes: bool, gathers: bool) -> Body:
    """One turn of `ahead_s`."""

    def body(x: jax.Array, by: jax.Array, *parts: jax.Array) -> tuple[jax.Array, ...]:
        after = []
        for part in parts:
            whole = collective("all_gather", part, members) if gathers else part
            for _ in range(_OF_LAYER if computes else 0):
                x = jnp.tanh(x @ by)
            x = x + 1e-3 * whole[0] if computes else x
            after.append(0.999 * whole)  # or it would be gathered before the loop
        return x, by, *after

    return body
