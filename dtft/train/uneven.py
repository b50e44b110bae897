"""The training step in which each replica has a number of microbatches of its own.

The numbers are data: one compiled step serves all shares. A replica adds up gradients,
metrics and statistics over its microbatches in a `while` loop, manual over the
`replica` axis; then the sums are reduced and divided by the number of microbatches, so
that the result is that of equal shares up to rounding: all microbatches have as many
rows, and a loss is a mean over rows, whatever a model makes of the tokens of one. The
same in three programs, up to the reduction, the reduction, and the update, is what a
probe times. Must not know which rows there are, how shares are found, or hosts (pattern
and traps: reference/planner.md, section 8).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.train.experiment import Experiment
from dtft.train.replicas import AXIS
from dtft.train.sharing import COUNTS, Sharing, sharing_of
from dtft.train.step import Arrays, Metrics, Program, State, state_sharding

Sums = dict[str, Any]
"""Of each replica over its microbatches, with a leading replica dim: `gradients`,
`statistics`, `metrics`, and how many microbatches they are (`count`)."""
Means = dict[str, Any]
"""`gradients`, `statistics` and `metrics` of a step's batch."""


class UnevenProgram(Program):
    """As `Program`, for batches with room for uneven shares.

    The arrays of a batch have `sharing.room` rows for each replica, of which the first
    `rows_each * counts[replica]` count; the counts are the array `sharing.COUNTS`.
    Layers that normalize over rows do so within a microbatch, which is the same for all
    shares.
    """

    def __init__(self, experiment: Experiment, mesh: Mesh) -> None:
        """Traces the model; allocates nothing.

        Raises:
            ValueError: the batch cannot be shared on this mesh.
        """
        batch = experiment.data.global_batch
        self.sharing: Sharing = sharing_of(experiment.balance, batch, mesh.shape)
        super().__init__(experiment, mesh)
        sums, means = self._sums_shardings(), self._means_shardings()
        everywhere = NamedSharding(mesh, PartitionSpec())
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self._jitted_local = jax.jit(
            self._local,
            in_shardings=(shardings, self.batch_sharding),
            out_shardings=sums,
        )
        self._jitted_means = jax.jit(
            self._means, in_shardings=(sums,), out_shardings=means
        )
        self._jitted_update = jax.jit(
            self._update,
            donate_argnums=0,
            in_shardings=(shardings, means),
            out_shardings=(shardings, everywhere),
        )
        self._gather = jax.jit(lambda rows: rows, out_shardings=everywhere)
        self._apart: tuple[Any, Any, Any] | None = None

    def compile_apart(self, batch: Arrays) -> None:
        """Compiles `local`, `means` and `update`, once: calls of them only run."""
        if self._apart is None:
            state = self.abstract_state
            local = self._jitted_local.lower(state, dict(batch)).compile()
            means = self._jitted_means.lower(_given_by(local)).compile()
            update = self._jitted_update.lower(state, _given_by(means)).compile()
            self._apart = local, means, update

    def local(self, state: State, batch: Arrays) -> Sums:
        """What each replica does by itself; `compile_apart` comes first."""
        assert self._apart is not None
        return self._apart[0](state, dict(batch))

    def means(self, sums: Sums) -> Means:
        """The reduction: all replicas take part."""
        assert self._apart is not None
        return self._apart[1](sums)

    def update(self, state: State, means: Means) -> tuple[State, Metrics]:
        """The rest of the step, each replica by itself. `state` is donated."""
        assert self._apart is not None
        return self._apart[2](state, means)

    def gathered(self, values: np.ndarray) -> np.ndarray:
        """What all processes know of their replicas; they call it together.

        Args:
            values: a row for each of this process's replicas, `[replicas here, n]`.

        Returns:
            `[replicas, devices of a replica, n]`: devices of one replica may be of
            several processes.
        """
        mesh = self.mesh
        each = mesh.size // mesh.shape[AXIS]
        place = {replica: row for row, replica in enumerate(self.own_replicas)}

        def row(index: Any) -> np.ndarray:
            replica = (index[0].start or 0) // each
            return np.asarray(values[place[replica]], np.float32)[None]

        found = self._gather(
            jax.make_array_from_callback(
                (mesh.size, values.shape[1]),
                NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
                row,
            )
        )
        return np.asarray(found).reshape(-1, each, values.shape[1])

    @property
    def own_replicas(self) -> tuple[int, ...]:
        """The replicas of which this process has devices."""
        here = jax.process_index()
        return tuple(
            replica
            for replica, devices in enumerate(self.mesh.devices)
            if any(device.process_index == here for device in devices.flat)
        )

    def _step(self, state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        return self._update(state, self._means(self._local(state, batch)))

    def _update(self, state: State, means: Means) -> tuple[State, Metrics]:
        gradients = means["gradients"]
        parts = self._updated(state, gradients, means["statistics"])
        return self._after(state, parts, means["metrics"], gradients)

    def _local(self, state: State, batch: dict[str, jax.Array]) -> Sums:
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

    def _own_sums(
        self, params: Any, statistics: Any, rows: Any, counts: jax.Array
    ) -> Sums:
        # Parameters that are marked as different on every replica get gradients of
        # their own. Without the mark jax would add up over the replicas in the loop,
        # where those with fewer microbatches do not come any more.
        params, statistics = _varying((params, statistics))
        gradient = jax.grad(self.mean_loss, has_aux=True)
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

    def _means(self, sums: Sums) -> Means:
        """Over all microbatches of the step."""

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

    def _sums_shardings(self) -> Any:
        own = state_sharding(self._plain, self.mesh)

        def rows(sharding: NamedSharding) -> NamedSharding:
            return NamedSharding(self.mesh, PartitionSpec(AXIS, *sharding.spec))

        by_replica = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return {
            "gradients": jax.tree.map(rows, own["params"]),
            "statistics": jax.tree.map(rows, own["statistics"]),
            "metrics": by_replica,
            "count": by_replica,
        }

    def _means_shardings(self) -> Any:
        own = state_sharding(self._plain, self.mesh)
        return {
            "gradients": own["params"],
            "statistics": own["statistics"],
            "metrics": NamedSharding(self.mesh, PartitionSpec()),
        }


def _given_by(compiled: Any) -> Any:
    """What a compiled program returns, as the next one is compiled for it."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        compiled.out_info,
        compiled.output_shardings,
    )


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
