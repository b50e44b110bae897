"""A step with uneven shares: its gradients, its batches, and how it is timed.

The numbers of microbatches are data: one compiled step serves all shares. A replica
adds up gradients, metrics and statistics over its microbatches in a `while` loop,
manual over the `replica` axis; then the sums are reduced and divided by the number of
microbatches, so that the result is that of equal shares up to rounding: all
microbatches have as many rows, and a loss is a mean over rows, whatever a model makes
of the tokens of one (pattern and traps: reference/planner.md, section 8).
"""

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.config import Experiment
from dtft.data import Source
from dtft.parallel.feed import Batch, Prepared, local_parts, place
from dtft.parallel.functional_model import FunctionalModel, Metrics, State, functional
from dtft.parallel.local_updates import REPLICA_AXIS
from dtft.parallel.row_assignment import COUNTS, Sharing, sharing_of
from dtft.parallel.step import (
    Arrays,
    Means,
    Parallelism,
    TrainStep,
    gathering,
    state_sharding,
)

Sums = dict[str, Any]
"""Of each replica over its microbatches, with a leading replica dim: `gradients`,
`statistics`, `metrics`, and how many microbatches they are (`count`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedGradients:
    """Gradients of batches with room for uneven shares.

    The arrays of a batch have `Sharing.room` rows for each replica, of which the first
    `rows_each * counts[replica]` count; the counts are the array
    `row_assignment.COUNTS`.
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
        divided = PartitionSpec(REPLICA_AXIS)
        return jax.shard_map(
            self._own_sums,
            mesh=self.mesh,
            axis_names={REPLICA_AXIS},
            in_specs=(PartitionSpec(), PartitionSpec(), divided, divided),
            out_specs=divided,
        )(state["params"], state["statistics"], rows, batch[COUNTS])

    def means(self, sums: Sums) -> Means:
        """The reduction over all microbatches of the step: all replicas take part."""

        is_whole = self.mesh.size == self.mesh.shape[REPLICA_AXIS]

        def mean(sums: Sums) -> Means:
            own = jax.tree.map(lambda leaf: leaf[0], sums)
            # Joined arrays whose dims are divided over `tensor` would be moved first.
            total = _added_joined(own) if is_whole else lax.psum(own, REPLICA_AXIS)
            count = total.pop("count")
            return jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), total)

        return jax.shard_map(
            mean,
            mesh=self.mesh,
            axis_names={REPLICA_AXIS},
            in_specs=PartitionSpec(REPLICA_AXIS),
            out_specs=PartitionSpec(),
        )(sums)

    @property
    def of_sums(self) -> Any:
        """A NamedSharding for every leaf of what `local` returns."""
        own = state_sharding(self.model.abstract, self.mesh)

        def rows(sharding: NamedSharding) -> NamedSharding:
            return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS, *sharding.spec))

        by_replica = NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))
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
    """The `SharedGradients` with which a `load_balanced_step` computes gradients."""
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
        joined = lax.psum(
            jnp.concatenate([leaves[i].ravel() for i in places]), REPLICA_AXIS
        )
        sizes = np.cumsum([leaves[i].size for i in places])[:-1]
        for i, part in zip(places, jnp.split(joined, sizes), strict=True):
            found[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, found)


def _varying(tree: Any) -> Any:
    """Marks values as different on every replica."""
    return jax.tree.map(lambda leaf: lax.pcast(leaf, REPLICA_AXIS, to="varying"), tree)


class SharedFeed(Prepared):
    """Makes batches for a step of `load_balanced_step`, by the shares now in force.

    Each replica's buffer has room for the largest share. Rows beyond a replica's share
    are zeros, which the step does not read.
    """

    def __init__(
        self, source: Source, train_step: TrainStep, counts: Sequence[int]
    ) -> None:
        """Reads nothing yet; `counts` are the shares of the first batch."""
        super().__init__()
        self._source, self._sharding = source, train_step.batch_sharding
        self._shared: Sharing = shared_by(train_step).sharing
        self.share(counts)

    def share(self, counts: Sequence[int]) -> None:
        """New shares, in force from the next batch that is made.

        Raises:
            ValueError: they are not shares of this batch.
        """
        self._shared.check(counts)
        self._counts = tuple(int(count) for count in counts)

    def _read(self, step: int) -> Batch:
        shared, counts = self._shared, self._counts
        length = shared.num_replicas * shared.room

        def mine(start: int) -> range:
            return shared.rows(step - 1, counts, start // shared.room)

        starts, owned = local_parts(self._sharding, length)
        parts = {start: self._padded(mine(start)) for start in starts}
        arrays = place(parts, self._sharding, length)
        arrays[COUNTS] = self._placed_counts()
        return Batch(
            arrays=arrays,
            rows=[row for start in owned for row in mine(start)],
            ids=[
                int(i)
                for start in owned
                for i in parts[start]["id"][: len(mine(start))]
            ],
        )

    def _padded(self, rows: range) -> dict[str, np.ndarray]:
        """Columns of these rows, with zeros up to the room of a replica."""
        # A replica without a share still says what its arrays look like.
        found = self._source.batch(rows or range(1))

        def filled(column: np.ndarray) -> np.ndarray:
            whole = np.zeros((self._shared.room, *column.shape[1:]), column.dtype)
            whole[: len(rows)] = column[: len(rows)]
            return whole

        return {name: filled(column) for name, column in found.items()}

    def _placed_counts(self) -> jax.Array:
        values = np.asarray(self._counts, np.int32)

        def part(index: Any) -> np.ndarray:
            return values[index]

        return jax.make_array_from_callback(values.shape, self._sharding, part)


# Nobody sees a device wait inside one program. So a timed step runs as three programs,
# up to the reduction, the reduction, and the update, with waits between them for this
# process's own devices.


@dataclass(frozen=True, kw_only=True)
class TimedStep:
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
            train_step: of `load_balanced_step`.
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

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics, TimedStep]:
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
        return state, metrics, TimedStep(began=began, ended=ended, busy_s=busy)

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
    each = mesh.size // mesh.shape[REPLICA_AXIS]
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
