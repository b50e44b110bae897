"""State that differs per replica: `PerReplica` marks in a pytree, and their conversion.

Inside `jax.shard_map` each replica has its own array for a marked leaf. Outside, the
leaf is one global array with a leading replica dim, divided over the replica axis. A
row of this array is the array of one replica. The rows differ, so a lost row cannot be
restored exactly from another replica's row.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


class PerReplica(NamedTuple):
    """A pytree node whose leaves differ between replicas.

    Outside of `jax.shard_map` the leaves are arrays [replicas, ...], inside the arrays
    of one replica.
    """

    rows: Any
    """Arrays [replicas, ...] outside of shard_map; inside, one replica's arrays."""


def map_rows(
    on_rows: Callable[[Any], Any],
    tree: Any,
    otherwise: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Applies `on_rows` to leaves inside `PerReplica` nodes, `otherwise` to the rest.

    By default all leaves outside of `PerReplica` nodes are returned unchanged.
    """

    def of(node: Any) -> Any:
        if isinstance(node, PerReplica):
            return PerReplica(jax.tree.map(on_rows, node.rows))
        return otherwise(node)

    return jax.tree.map(of, tree, is_leaf=lambda node: isinstance(node, PerReplica))


def lift(tree: Any, num_replicas: int) -> Any:
    """Adds a replica dim to the `PerReplica` leaves: [...] -> [num_replicas, ...].

    All replicas get the same values, as at step 0.

    >>> lift(PerReplica(jnp.arange(3)), 2).rows.shape
    (2, 3)
    """

    def of(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (num_replicas, *leaf.shape))

    return map_rows(of, tree)


def squeeze(tree: Any) -> Any:
    """Drops the replica dim of the `PerReplica` leaves: [1, ...] -> [...].

    For use inside `jax.shard_map`, where the dim has size 1.
    """
    return map_rows(lambda leaf: jnp.squeeze(leaf, 0), tree)


def expand(tree: Any) -> Any:
    """Adds a replica dim of size 1 to the `PerReplica` leaves: [...] -> [1, ...].

    For use inside `jax.shard_map`, on the state that it returns.
    """
    return map_rows(lambda leaf: jnp.expand_dims(leaf, 0), tree)


def specs(tree: Any, axis_name: str) -> Any:
    """Makes a PartitionSpec per leaf, for `in_specs` and `out_specs` of shard_map.

    `PerReplica` leaves are divided over the axis; all other leaves are replicated.

    >>> specs({"own": PerReplica(jnp.ones(2)), "all": jnp.ones(2)}, "replica")
    {'all': P(), 'own': PerReplica(rows=P('replica',))}
    """
    divided, whole = PartitionSpec(axis_name), PartitionSpec()
    return map_rows(lambda _: divided, tree, lambda _: whole)


def assign_groups(tree: Any, sources: Sequence[int]) -> Any:
    """Selects rows of the `PerReplica` leaves [replicas, ...], for new replica groups.

    A replica group is the set of devices of one replica.

    Args:
        tree: the state outside of shard_map, with a leading replica dim.
        sources: for each new group, the old group whose row is copied. A group that was
            lost gets the row of another group: `[0, 0, 2]` restores group 1 from
            group 0.

    Raises:
        ValueError: a source is not a row of a marked leaf.

    >>> assign_groups(PerReplica(jnp.array([5, 6, 7])), [0, 0, 2]).rows.tolist()
    [5, 5, 7]
    """

    def of(leaf: jax.Array) -> jax.Array:
        wrong = [source for source in sources if not 0 <= source < leaf.shape[0]]
        if wrong:
            raise ValueError(
                f"sources={list(sources)} names the groups {wrong}, but the state has "
                f"{leaf.shape[0]}. Allowed: 0 to {leaf.shape[0] - 1}. Name groups "
                "that are in the state."
            )
        return leaf[jnp.asarray(sources, jnp.int32)]

    return map_rows(of, tree)


def add_groups(tree: Any, sources: Sequence[int]) -> Any:
    """Appends rows to the `PerReplica` leaves [replicas, ...], one per added group.

    A tree without `PerReplica` is returned unchanged.

    Args:
        tree: the state outside of shard_map, with a leading replica dim.
        sources: for each added group, the old group whose row is copied.

    Raises:
        ValueError: a source is not a row of a marked leaf.

    >>> add_groups(PerReplica(jnp.array([5, 6])), sources=[1]).rows.tolist()
    [5, 6, 6]
    """
    marked = [
        node
        for node in jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, PerReplica))
        if isinstance(node, PerReplica)
    ]
    if not marked:
        return tree
    rows = jax.tree.leaves(marked)
    if not rows:
        return tree
    present = rows[0].shape[0]
    return assign_groups(tree, [*range(present), *sources])
