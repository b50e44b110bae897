"""Steps of optimizers that communicate between replicas.

The config of an optimizer that communicates has `OptimConfig.reduces_itself` True.

A step for one replica becomes a step for all replicas by a `shard_map` over the axis
`replica`. The optimizer gets the gradient of the replica's own rows and communicates
with an explicit axis name. Outside of the `shard_map`, state that differs between
replicas has a leading replica dim.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.config import OptimConfig
from dtft.optim import per_replica
from dtft.optim.per_replica import PerReplica

REPLICA_AXIS = "replica"
Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


def lift(state: dict[str, Any], optim: OptimConfig, num_replicas: int) -> Any:
    """Adds the replica dim to leaves of the state that may differ between replicas.

    All replicas start with the same values. Parameters get the replica dim if replicas
    average them less often than they update them (`optim.params_drift`). Leaves of
    optimizer state get the replica dim if they are marked as `PerReplica`.
    `num_replicas` is the size of the replica dim.
    """
    params = state["params"]
    marked = PerReplica(params) if optim.params_drift else params
    return per_replica.lift({**state, "params": marked}, num_replicas)


def shardings(
    abstract: Any, mesh: Mesh, spec_of: Callable[[tuple[int, ...]], PartitionSpec]
) -> Any:
    """Returns a NamedSharding per leaf; replica dims are divided over `replica`.

    Args:
        abstract: the abstract state, with the replica dims that `lift` adds.
        mesh: a mesh with the axis `replica`.
        spec_of: function from an array's shape, without the replica dim, to its spec.
    """

    def of_rows(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(
            mesh, PartitionSpec(REPLICA_AXIS, *spec_of(leaf.shape[1:]))
        )

    def of(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, spec_of(leaf.shape))

    return per_replica.map_rows(of_rows, abstract, of)


def over(step: Step, optim: OptimConfig, mesh: Mesh, abstract: Any) -> Step:
    """Makes a step for all replicas from a step for one replica.

    The loss and the model's metrics are means over the replicas, which is the mean over
    the batch. `grad_norm` is the root mean square of the norms of the replicas'
    gradients, because no device has the mean gradient. `optim.clip` clips each
    replica's gradient separately. Normalization layers normalize over a replica's own
    rows; their new running statistics are means over the replicas.

    Args:
        step: `(state, batch) -> (state, metrics)` with a replica's own rows and state.
        optim: config of an optimizer that communicates between replicas, built for the
            axis `replica`.
        mesh: the mesh; axes other than `replica` stay automatic.
        abstract: the abstract state, with the replica dims that `lift` adds.

    Raises:
        ValueError: the optimizer cannot communicate on this mesh, because `tensor` is
            above 1.
    """
    optim.check_mesh(mesh.shape["tensor"])

    def own(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        mine = per_replica.squeeze(state)
        if optim.params_drift:
            mine = {**mine, "params": mine["params"].rows}
        after, metrics = step(mine, batch)
        params = optim.reconcile(after["params"], after["step"], REPLICA_AXIS)
        after["params"] = PerReplica(params) if optim.params_drift else params
        after["statistics"] = _mean(after["statistics"])
        return per_replica.expand(after), _combined(metrics)

    specs = per_replica.specs(abstract, REPLICA_AXIS)
    # With check_vma the gradient with respect to replicated parameters would be the sum
    # over all replicas. tests/unit/optim/test_sync.py shows with check_vma that updates
    # are equal on all replicas.
    return jax.shard_map(
        own,
        mesh=mesh,
        axis_names={REPLICA_AXIS},
        in_specs=(specs, PartitionSpec(REPLICA_AXIS)),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )


def evaluated(params: Any) -> Any:
    """Returns the parameters for evaluation, which are the same for all replicas.

    These are the means over the replicas if `params` is marked as `PerReplica`, else
    `params` itself.
    """
    if not isinstance(params, PerReplica):
        return params
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), params.rows)


def here(sharding: Any) -> Any:
    """Makes NamedShardings usable in `with_sharding_constraint` in a `shard_map` too.

    While a `shard_map` is traced, JAX accepts only PartitionSpecs. Then this function
    returns a tree of PartitionSpecs, else the tree of NamedShardings unchanged.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return sharding
    return jax.tree.map(lambda s: s.spec, sharding)


def _combined(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    means = {
        k: v for k, v in metrics.items() if k not in ("grad_norm", "learning_rate")
    }
    square = jax.lax.pmean(jnp.square(metrics["grad_norm"]), REPLICA_AXIS)
    return {
        **metrics,  # includes the learning rate, which is equal on all replicas
        **_mean(means),
        "grad_norm": jnp.sqrt(square),
    }


def _mean(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, REPLICA_AXIS), tree)
