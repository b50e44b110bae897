"""One exchange between replicas: whether it is due, and what comes of it.

Knows arrays and an axis name; must not know optimizers or meshes.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from dtft.collectives import Algorithm, all_reduce
from dtft.optim import checks

Reduction = Literal["mean", "max"]


def average_params(
    params: Any,
    count: jax.Array,
    axis_name: str | None,
    every: int,
    *,
    algorithm: Algorithm = "native",
    sync: jax.Array | None = None,
) -> Any:
    """Parameters, or at the updates that `every` divides their mean over the replicas.

    Applied after the update, because an optax transform can only add to parameters.

    Args:
        params: this replica's, after the update.
        count: number of updates made, int32, equal on all replicas.
        axis_name: the replica axis; None for a single replica.
        every: the period; 1 for always, 0 for only on command.
        algorithm: how arrays are reduced, see `dtft.collectives`.
        sync: other than 0 commands the exchange, see `sync_moments`.

    Raises:
        ValueError: `every` is no whole number of 0 or more, or an axis is not bound.
    """
    period = checks.whole("every", every)
    if period is None or period < 0:
        raise ValueError(
            f"every={every!r} is not a period. Allowed: a Python int, 1 or more, or 0 "
            "for only on command. Set every=1 to average at each update."
        )
    if every == 1:
        return all_reduce(params, axis_name, op="mean", algorithm=algorithm)
    now = due(count, every, sync)
    return where_due(now, params, axis_name, "mean", algorithm)


def due(count: jax.Array, every: int, sync: jax.Array | None) -> jax.Array:
    """Whether `count` is at the end of a period of `every` (0: never), or commanded."""
    now = count % every == 0 if every else jnp.zeros([], bool)
    return now if sync is None else now | (jnp.asarray(sync) != 0)


def where_due(
    now: jax.Array,
    tree: Any,
    axis_name: str | None,
    op: Reduction,
    algorithm: Algorithm,
) -> Any:
    """The reduction of `tree` where `now`, the tree itself where not."""

    def exchange(own: Any) -> Any:
        reduced = all_reduce(own, axis_name, op=op, algorithm=algorithm)
        # To shard_map a reduced array is of another type than the replica's own one,
        # and both branches need one type: the choice of both has it.
        return jax.tree.map(lambda r, x: jnp.where(True, r, x), reduced, own)

    return jax.lax.cond(now, exchange, lambda own: own, tree)
