"""The training step in which each replica has a number of microbatches of its own.

The numbers are data: one compiled step serves all shares. A replica adds up gradients,
metrics and statistics over its microbatches in a `while` loop, manual over the
`replica` axis; then the sums are reduced and divided by the number of microbatches, so
that the result is that of equal shares up to rounding: all microbatches have as many
rows, and a loss is a mean over rows, whatever a model makes of the tokens of one. Must
not know which rows there are, how shares are found, or hosts (pattern and traps:
reference/planner.md, section 8).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.train.experiment import Experiment
from dtft.train.functional_model import FunctionalModel, State, functional
from dtft.train.replicas import AXIS
from dtft.train.sharing import COUNTS, Sharing, sharing_of
from dtft.train.step import Means, Parallelism, TrainStep, gathering, state_sharding

Sums = dict[str, Any]
"""Of each replica over its microbatches, with a leading replica dim: `gradients`,
`statistics`, `metrics`, and how many microbatches they are (`count`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedGradients:
    """Gradients of batches with room for uneven shares.

    The arrays of a batch have `sharing.room` rows for each replica, of which the first
    `rows_each * counts[replica]` count; the counts are the array `sharing.COUNTS`.
    Layers that normalize over rows do so within a microbatch, which is the same for all
    shares.
    """

    model: FunctionalModel
    mesh: Mesh
    sharing: Sharing
    """How a batch is cut, and how much of it a replica has room for."""

    def __call__(self, state: State, batch: dict[str, jax.Array]) -> Means:
        """The means over all microbatches of the step."""
        return self.means(self.local(state, batch))

    def local(self, state: State, batch: dict[str, jax.Array]) -> Sums:
        """Sums of each replica; no replica waits for another."""
        rows = {name: array for name, array in batch.items() if name != COUNTS}
        divided = PartitionSpec(AXIS)
        return jax.shard_map(
            self._own_sums,
            mesh=self.mesh,
            axis_names={AXIS},
            in_specs=(PartitionSpec(), PartitionSpec(), divided, divided),
            out_specs=divided,
        )(state["params"], state["statistics"], rows, batch[COUNTS])

    def means(self, sums: Sums) -> Means:
        """The reduction over all microbatches of the step: all replicas take part."""

        is_whole = self.mesh.size == self.mesh.shape[AXIS]

        def mean(sums: Sums) -> Means:
            own = jax.tree.map(lambda leaf: leaf[0], sums)
            # Joined arrays whose dims are divided over `tensor` would be moved first.
            total = _added_joined(own) if is_whole else lax.psum(own, AXIS)
            count = total.pop("count")
            return jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), total)

        return jax.shard_map(
            mean,
            mesh=self.mesh,
            axis_names={AXIS},
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
        )(sums)

    @property
    def of_sums(self) -> Any:
        """A NamedSharding for every leaf of what `local` returns."""
        own = state_sharding(self.model.abstract, self.mesh)

        def rows(sharding: NamedSharding) -> NamedSharding:
            return NamedSharding(self.mesh, PartitionSpec(AXIS, *sharding.spec))

        by_replica = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return {
            "gradients": jax.tree.map(rows, own["params"]),
            "statistics": jax.tree.map(rows, own["statistics"]),
            "metrics": by_replica,
            "count": by_replica,
        }

    @property
    def of_means(self) -> Any:
        """A NamedSharding for every leaf of what `means` returns."""
        own = state_sharding(self.model.abstract, self.mesh)
        return {
            "gradients": own["params"],
            "statistics": own["statistics"],
            "metrics": NamedSharding(self.mesh, PartitionSpec()),
        }

    def _own_sums(
        self, params: Any, statistics: Any, rows: Any, counts: jax.Array
    ) -> Sums:
        # Parameters that are marked as different on every replica get gradients of
        # their own. Without the mark jax would add up over the replicas in the loop,
        # where those with fewer microbatches do not come any more.
        params, statistics = _varying((params, statistics))
        gradient = jax.grad(self.model.mean_loss, has_aux=True)
        each = self.sharing.rows_each

        def one(index: jax.Array) -> Sums:
            part = jax.tree.map(
                lambda array: lax.dynamic_slice_in_dim(array, index * each, each), rows
            )
            gradients, (metrics, after) = gradient(params, statistics, part)
            return {"gradients": gradients, "metrics": metrics, "statistics": after}

        def add(carry: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
            index, sums = carry
            return index + 1, jax.tree.map(jnp.add, sums, one(index))

        like = jax.eval_shape(one, jnp.int32(0))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        begin = _varying((jnp.int32(0), zeros))
        _, sums = lax.while_loop(lambda carry: carry[0] < counts[0], add, begin)
        sums["count"] = counts[0].astype(jnp.float32)
        return jax.tree.map(lambda leaf: leaf[None], sums)


def load_balanced_step(experiment: Experiment, mesh: Mesh) -> TrainStep:
    """The step of an experiment whose replicas take uneven shares of a batch.

    Args:
        experiment: what is to run.
        mesh: of `step.make_mesh`.

    Raises:
        ValueError: the batch cannot be shared on this mesh.
    """
    batch = experiment.data.global_batch
    sharing = sharing_of(experiment.balance, batch, mesh.shape)
    model = gathering(functional(experiment.model, experiment.seed), mesh)
    gradients = SharedGradients(model=model, mesh=mesh, sharing=sharing)

    def parallelize(abstract: State) -> Parallelism:
        return Parallelism(
            state=state_sharding(abstract, mesh), gradients=gradients, evaluated=model
        )

    return TrainStep(experiment.optim, model, mesh, parallelize)


def shared_by(train_step: TrainStep) -> SharedGradients:
    """The gradients of a step of `load_balanced_step`."""
    assert isinstance(train_step.gradients, SharedGradients)
    return train_step.gradients


def _added_joined(tree: Any) -> Any:
    """Sums over the replicas, in one reduction for all arrays of a dtype.

    On CPU each array would wait for its own: twenty small ones, for twenty times the
    slowest host's turn.
    """
    leaves, structure = jax.tree.flatten(tree)
    found: list[Any] = [None] * len(leaves)
    for dtype in {leaf.dtype: None for leaf in leaves}:
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        joined = lax.psum(jnp.concatenate([leaves[i].ravel() for i in places]), AXIS)
        sizes = np.cumsum([leaves[i].size for i in places])[:-1]
        for i, part in zip(places, jnp.split(joined, sizes), strict=True):
            found[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, found)


def _varying(tree: Any) -> Any:
    """Marks values as different on every replica."""
    return jax.tree.map(lambda leaf: lax.pcast(leaf, AXIS, to="varying"), tree)
