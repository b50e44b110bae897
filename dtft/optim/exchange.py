"""Averages arrays (or takes their maximum) over the replicas, every N updates.

A command can also start the exchange at any other update. Depends on arrays and an axis
name; must not depend on optimizers or meshes.
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
    """Averages parameters over the replicas when `count` is a multiple of `every`.

    At other updates the parameters are returned unchanged, unless `sync` commands the
    average. Call the function after `optax.apply_updates`: it is no optax transform,
    because a transform returns what is added to the parameters.

    Args:
        params: this replica's parameters, after the update.
        count: number of updates made, int32, equal on all replicas.
        axis_name: the replica axis; None for a single replica, whose parameters are
            returned unchanged.
        every: the period in updates; 1 averages at every update, 0 only on command.
        algorithm: all-reduce algorithm of `dtft.collectives`; "native" is XLA's.
        sync: int32 scalar, equal on all replicas; a value other than 0 commands the
            average. None commands nothing.

    Raises:
        ValueError: `every` is not a Python int of 0 or more, the algorithm is unknown,
            or an axis is not bound.
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
    """Whether replicas exchange arrays at update `count`; a scalar bool array.

    They do if `every` (the period in updates) is not 0 and divides `count`, or if
    `sync`, which commands an exchange, is given and is not 0.
    """
    now = count % every == 0 if every else jnp.zeros([], bool)
    return now if sync is None else now | (jnp.asarray(sync) != 0)


def where_due(
    now: jax.Array,
    tree: Any,
    axis_name: str | None,
    op: Reduction,
    algorithm: Algorithm,
) -> Any:
    """Reduces `tree` over the axis if `now` is true; else returns `tree` unchanged.

    Args:
        now: scalar bool array. It must be equal on all replicas, because a replica
            enters the collective only if `now` is true.
        tree: this replica's arrays.
        axis_name: the replica axis; None for a single replica.
        op: "mean" or "max" over the replicas.
        algorithm: all-reduce algorithm of `dtft.collectives`; "native" is XLA's.
    """

    def exchange(own: Any) -> Any:
        reduced = all_reduce(own, axis_name, op=op, algorithm=algorithm)
        # Both branches of `cond` need one type. In shard_map a reduced array is typed
        # as replicated, and `where` gives it the type of the replica's array.
        return jax.tree.map(lambda r, x: jnp.where(True, r, x), reduced, own)

    return jax.lax.cond(now, exchange, lambda own: own, tree)
