"""The step of optimizers that reduce by themselves: each replica on its own.

Makes of a step that is written for one replica a step for all of them: manual over the
`replica` axis, where the optimizer gets the gradient of the replica's own rows and
communicates with an explicit axis name. State that differs per replica has a leading
replica dim outside.
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
    """The state at step 0, equal on all replicas, in its global form."""
    params = state["params"]
    marked = PerReplica(params) if optim.params_drift else params
    return per_replica.lift({**state, "params": marked}, num_replicas)


def shardings(
    abstract: Any, mesh: Mesh, spec_of: Callable[[tuple[int, ...]], PartitionSpec]
) -> Any:
    """A NamedSharding per leaf; rows are divided over the replicas in dim 0.

    Args:
        abstract: the state's global form.
        mesh: has the replica axis.
        spec_of: how an array that has no replica dim is divided.
    """

    def of_rows(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(
            mesh, PartitionSpec(REPLICA_AXIS, *spec_of(leaf.shape[1:]))
        )

    def of(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, spec_of(leaf.shape))

    return per_replica.map_rows(of_rows, abstract, of)


def over(step: Step, optim: OptimConfig, mesh: Mesh, abstract: Any) -> Step:
    """A step of one replica as a step of all.

    The loss and the model's metrics are means over the replicas, so over the batch.
    `grad_norm` is the root mean square of the norms of the replicas' own gradients:
    the mean gradient exists nowhere. `optim.clip`, too, acts on own gradients. A model
    with running statistics normalizes over a replica's own rows; what it keeps is the
    mean over the replicas.

    Args:
        step: `(state, batch) -> (state, metrics)` with a replica's own rows and state.
        optim: an optimizer that reduces itself, built for the axis `replica`.
        mesh: the mesh; its other axes stay automatic.
        abstract: the state's global form.

    Raises:
        ValueError: the optimizer cannot communicate on this mesh.
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
    # Types that track what varies (check_vma) would make the gradient with respect to
    # replicated parameters the sum over all replicas. That updates are equal on all of
    # them is what tests/unit/optim/test_sync.py proves with such types.
    return jax.shard_map(
        own,
        mesh=mesh,
        axis_names={REPLICA_AXIS},
        in_specs=(specs, PartitionSpec(REPLICA_AXIS)),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )


def evaluated(params: Any) -> Any:
    """The parameters to evaluate: the mean over the replicas, where they differ."""
    if not isinstance(params, PerReplica):
        return params
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), params.rows)


def here(sharding: Any) -> Any:
    """Shardings for constraints at this place of a trace.

    Manual over an axis, jax takes only partition specs, without it only shardings.
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
        **metrics,  # the learning rate is a function of the step, which is equal
        **_mean(means),
        "grad_norm": jnp.sqrt(square),
    }


def _mean(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, REPLICA_AXIS), tree)
