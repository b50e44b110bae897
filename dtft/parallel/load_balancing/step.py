"""A step with uneven shares of the batch: gradients, batches, and timing.

The numbers of microbatches are an input array, so one compiled step serves all shares.
Each replica sums gradients, metrics and statistics over its microbatches in a `while`
loop, inside a `shard_map` over the axis `replica`. Then the sums are reduced over the
replicas and divided by the number of all microbatches. All microbatches have the same
number of rows, and the loss is a mean over rows. Therefore the result is the same as
with equal shares, up to rounding.
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
from dtft.parallel.state_sharding import state_sharding
from dtft.parallel.step import Arrays, Means, Parallelism, TrainStep, gathering

Sums = dict[str, Any]
"""Sums of each replica over its microbatches, with a leading replica dim: `gradients`,
`statistics`, `metrics`, and the number of microbatches (`count`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedGradients:
    """Function that computes gradients and metrics of a batch with uneven shares.

    A share is the number of microbatches that a replica takes in a step. The arrays of
    a batch have room for the largest share of each replica. A replica uses only its
    first rows, as many as the microbatches of its share have. The array
    `microbatch_counts` of the batch (`row_assignment.COUNTS`) has the shares. Layers
    that normalize over rows normalize within a microbatch, so the shares do not change
    the results of these layers.
    """

    model: FunctionalModel
    mesh: Mesh
    sharing: Sharing
    """The division of a batch into microbatches, and the largest share of a replica."""

    def __call__(self, state: State, batch: dict[str, jax.Array]) -> Means:
        """Returns the means of gradients, running statistics and metrics.

        The means are over all microbatches of the step.
        """
        return self.means(self.local(state, batch))

    def local(self, state: State, batch: dict[str, jax.Array]) -> Sums:
        """Sums gradients, statistics and metrics over each replica's microbatches.

        There is no communication between replicas. Each sum has a leading replica dim.
        The entry `count` has the number of microbatches of each replica.
        """
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
        """Adds the sums of all replicas; divides by the number of all microbatches.

        `sums` is the result of `local`. Returns the means of gradients, running
        statistics and metrics, equal on all replicas.
        """

        is_whole = self.mesh.size == self.mesh.shape[REPLICA_AXIS]

        def mean(sums: Sums) -> Means:
            own = jax.tree.map(lambda leaf: leaf[0], sums)
            # To join arrays with dims divided over `tensor`, XLA would move them first.
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
        """The NamedSharding of every leaf of the sums of each replica (see `local`).

        Dim 0, the replica dim, is divided over the axis `replica`. The further dims of
        gradients and running statistics are divided like those of the state.
        """
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
        """The NamedSharding of every leaf of the means over all replicas.

        Gradients are divided like the parameters of the state, running statistics like
        those of the state. Metrics are whole on every device.
        """
        own = state_sharding(self.model.abstract, self.mesh)
        return {
            "gradients": own["params"],
            "statistics": own["statistics"],
            "metrics": NamedSharding(self.mesh, PartitionSpec()),
        }

    def _own_sums(
        self, params: Any, statistics: Any, rows: Any, counts: jax.Array
    ) -> Sums:
        # The mark as different on every replica makes JAX compute a gradient for each
        # replica. Without the mark JAX would sum gradients over the replicas inside the
        # loop, and replicas with fewer microbatches would miss the last collectives.
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
    """Builds the train step of an experiment with uneven shares of the batch.

    Args:
        experiment: the experiment to run.
        mesh: a mesh from `make_mesh`.

    Raises:
        ValueError: the batch cannot be divided into microbatches for this mesh, the
            model keeps arrays other than parameters and running statistics, or the
            optimizer cannot run on this mesh.
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
    """Returns the function that computes the gradients of a load-balanced step.

    `train_step` must be from `load_balanced_step`; else AssertionError. The function
    has the mesh, and the division of the batch into microbatches, as fields.
    """
    assert isinstance(train_step.gradients, SharedGradients)
    return train_step.gradients


def _added_joined(tree: Any) -> Any:
    """Sums arrays over the replicas, with one reduction for all arrays of a dtype.

    On CPU each reduction waits for the slowest host. Separate reductions of twenty
    small arrays would wait twenty times.
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
    """Marks values as different on every replica, for the type check of `shard_map`."""
    return jax.tree.map(lambda leaf: lax.pcast(leaf, REPLICA_AXIS, to="varying"), tree)


class SharedFeed(Prepared):
    """Feed of batches with the current shares, for a step of `load_balanced_step`.

    Each replica has `Sharing.room` rows in the batch, enough for the largest share (the
    number of microbatches that a replica takes). Rows beyond a replica's share are
    zeros, which the step does not use.
    """

    def __init__(
        self, source: Source, train_step: TrainStep, counts: Sequence[int]
    ) -> None:
        """Sets the shares of the first batch to `counts`; reads nothing yet.

        Args:
            source: the data set whose rows the batches have.
            train_step: a step from `load_balanced_step`.
            counts: for each replica its share, as a number of microbatches.

        Raises:
            ValueError: there is not one count per replica, a count is negative or above
                the largest share, or the counts do not add up to all microbatches.
        """
        super().__init__()
        self._source, self._sharding = source, train_step.batch_sharding
        self._shared: Sharing = shared_by(train_step).sharing
        self.share(counts)

    def share(self, counts: Sequence[int]) -> None:
        """Sets the shares, in microbatches, of all batches that are read afterwards.

        Raises:
            ValueError: there is not one count per replica, a count is negative or above
                the largest share, or the counts do not add up to all microbatches.
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
        """Reads rows from the source, and pads them with zeros.

        The result has as many rows as the largest share that a replica may take.
        Without `rows` all values are zero. Returns a map from the name of each column
        to its array.
        """
        # A replica without a share reads one row, to get names, shapes and dtypes.
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


# The host cannot measure how long a device waits inside a program. So a timed step runs
# as three programs: local sums, reduction, and update. Between the programs the host
# waits for this process's own devices.


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """Times of one step in this process: its start, its end, and busy seconds.

    The busy seconds are those of the local sums and the update of each replica.
    """

    began: float
    """Time when state and batch were ready, in seconds (`time.perf_counter()`)."""
    ended: float
    """Time when the new state was ready, in seconds (`time.perf_counter()`)."""
    busy_s: tuple[float, ...]
    """For each replica of this process, the seconds of its local sums and update."""


class Probe:
    """Runs and times steps, each as three programs: local sums, reduction, update.

    The reduction waits for all replicas. The other two wait for no other replica, so
    their times show the speed of each replica. The compiled programs are kept.
    """

    def __init__(self, train_step: TrainStep) -> None:
        """Jits the three programs of a timed step; compiles nothing yet.

        Args:
            train_step: a step from `load_balanced_step`.
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
        """Compiles the programs of a timed step for a batch, on the first call only."""
        if self._compiled is None:
            local = self._local.lower(self._state, dict(batch)).compile()
            means = self._means.lower(_given_by(local)).compile()
            update = self._update.lower(self._state, _given_by(means)).compile()
            self._compiled = local, means, update

    @property
    def programs(self) -> tuple[Any, Any, Any]:
        """The compiled programs of local sums, reduction and update.

        `prepare` must be called before; else AssertionError.
        """
        assert self._compiled is not None
        return self._compiled

    def idle_at(self, state: State) -> float:
        """Waits until the devices have computed `state`; returns the time then.

        The time is in seconds, by `time.perf_counter()`.
        """
        jax.block_until_ready(state)
        return time.perf_counter()

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics, TimedStep]:
        """Runs and times an optimizer step; `prepare` must be called before.

        `state` is donated, so it cannot be used afterwards. Returns the new state, the
        metrics, and the times of the step.
        """
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
        """Waits for the results of this process's replicas, with a thread per replica.

        Args:
            made: results of a program.
            began: start time of the program, by `time.perf_counter()`.

        Returns:
            For each replica the seconds from `began` until the replica's results were
            ready.
        """
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
    """Returns the numbers of the replicas that have a device of this process."""
    here = jax.process_index()
    return tuple(
        replica
        for replica, devices in enumerate(mesh.devices)
        if any(device.process_index == here for device in devices.flat)
    )


def gathered(mesh: Mesh, values: np.ndarray) -> np.ndarray:
    """Gathers n values for each replica from all processes.

    All processes must call this function together.

    Args:
        mesh: a mesh with the replicas in dim 0.
        values: the n values of each of this process's replicas, `[replicas here, n]`.

    Returns:
        float32 `[replicas, devices of a replica, n]`. A replica has one entry for each
        of its devices: the values that the device's process gave for the replica. The
        devices of a replica may belong to several processes.
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
    """Makes a jitted function that replicates its argument over a mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda rows: rows, out_shardings=everywhere)


def _given_by(compiled: Any) -> Any:
    """Returns the shape, dtype and sharding of each result of a compiled program.

    The return value is a tree of ShapeDtypeStructs.
    """
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        compiled.out_info,
        compiled.output_shardings,
    )
