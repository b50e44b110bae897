"""The training step of an experiment: init, step and evaluation, compiled for a mesh.

A `Parallelism` describes a way to run a step: the sharding of each part of the state,
the function that computes gradients, and the function that applies gradients. This
module has the `Parallelism` of a config's mesh without stages. Others are in `pipeline`
(stages), `load_balancing` (uneven shares of the batch) and `planning` (a plan).

The state is a pytree `{"params", "statistics", "opt_state", "step"}`. `statistics` has
the running statistics of normalization layers; it has no leaves for models without such
layers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.config import Experiment, OptimConfig
from dtft.parallel import local_updates
from dtft.parallel.functional_model import (
    READ,
    FunctionalModel,
    Metrics,
    State,
    functional,
)
from dtft.parallel.state_sharding import BATCH_AXES, state_sharding

Arrays = Mapping[str, jax.Array | np.ndarray]
"""Map from a name to a global array; the jitted call shards numpy arrays."""
Means = dict[str, Any]
"""Dict of `gradients` and `metrics` (means over a step's batch), and `statistics` (the
new running statistics)."""
Gradients = Callable[[State, dict[str, jax.Array]], Means]
"""Function from a state and a batch to means of gradients and metrics over the batch,
and the new running statistics."""
Apply = Callable[[optax.GradientTransformation, Any, Any, Any], tuple[Any, Any]]
"""`(optimizer, gradients, opt_state, params) -> (params, opt_state)`."""


def apply_gradients(
    optimizer: optax.GradientTransformation, gradients: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """Updates parameters with gradients; returns new parameters and optimizer state."""
    with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state


def gradients_of(model: FunctionalModel) -> Gradients:
    """Makes a function that computes the gradients and metrics of a batch.

    The function returns means over the batch (`Means`): of gradients, metrics and new
    running statistics. It calls the model once. If devices divide the batch, XLA's
    partitioner inserts the reductions between devices, except the reductions that the
    model makes itself, as a pipeline does.
    """
    gradient = jax.grad(model.mean_loss, has_aux=True)

    def means(state: State, batch: dict[str, jax.Array]) -> Means:
        gradients, (metrics, statistics) = gradient(
            state["params"], state["statistics"], batch
        )
        return {"gradients": gradients, "statistics": statistics, "metrics": metrics}

    return means


@dataclass(frozen=True, kw_only=True, eq=False)
class Parallelism:
    """How a step runs on a mesh: shardings, and functions for gradients and update."""

    state: State
    """A NamedSharding for every leaf of the state."""
    rows: tuple[str, ...] = BATCH_AXES
    """Mesh axes that divide the rows of a batch."""
    gradients: Gradients
    """Function from a state and a batch to means of gradients and metrics over the
    batch, and the new running statistics."""
    apply: Apply = apply_gradients
    """Function that applies an optimizer to gradients, its state and parameters."""
    evaluated: FunctionalModel
    """The model that evaluation uses."""


class TrainStep:
    """Init, step and evaluation of an experiment on a mesh, compiled on first use."""

    def __init__(
        self,
        optim: OptimConfig,
        model: FunctionalModel,
        mesh: Mesh,
        parallelize: Callable[[State], Parallelism],
    ) -> None:
        """Traces the state at step 0; allocates nothing.

        Args:
            optim: config of the optimizer and its learning rate.
            model: the model; its `init` makes the state's parameters and statistics.
            mesh: a mesh with the axes of `state_sharding.AXES`, and other axes that
                `parallelize` uses.
            parallelize: function from the abstract state to the `Parallelism`.

        Raises:
            ValueError: the optimizer cannot run on this mesh, or `parallelize` raises
                ValueError.
        """
        self.mesh = mesh
        self._optim, self._model = optim, model
        own = local_updates.REPLICA_AXIS if optim.reduces_itself else None
        self._optimizer = optim.build(own)
        self._learning_rate = optim.learning_rate_at()
        abstract = jax.eval_shape(self._first_state)
        how = parallelize(abstract)
        self.gradients: Gradients = how.gradients
        """Function from a state and a batch to means of gradients and metrics over the
        batch, and the new running statistics; not jitted."""
        self._apply, self._evaluated = how.apply, how.evaluated
        self.abstract_state: State = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            abstract,
            how.state,
        )
        """Shapes, dtypes and shardings of the state, as ShapeDtypeStructs."""
        self.batch_sharding = NamedSharding(mesh, PartitionSpec(how.rows))
        """Sharding of every array of a batch."""
        step = self._next_state
        if optim.reduces_itself:
            step = local_updates.over(step, optim, mesh, abstract)
        read = {name: how.state[name] for name in READ}
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._init = jax.jit(self._first_state, out_shardings=how.state)
        self.program: jax.stages.Compiled | None = None
        """The compiled step that `step` runs, for batches of one shape; None until it
        is set. With None `step` compiles at its first call."""
        self._step = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(how.state, self.batch_sharding),
            out_shardings=(how.state, everywhere),
        )
        self._sums = jax.jit(
            self._sums_of_batch,
            in_shardings=(read, *(self.batch_sharding,) * 2),
            out_shardings=everywhere,
        )

    @property
    def num_parameters(self) -> int:
        """The number of trained scalars in the parameters, without padding."""
        leaves = jax.tree.leaves(self._model.abstract["params"])
        return sum(leaf.size for leaf in leaves) - self._model.num_padding

    @property
    def state_bytes_per_device(self) -> int:
        """Bytes of one device's shards of the state, in device and host memory."""
        leaves = jax.tree.leaves(self.abstract_state)
        shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
        return sum(
            math.prod(shape) * leaf.dtype.itemsize
            for shape, leaf in zip(shapes, leaves, strict=True)
        )

    def init(self) -> State:
        """Makes the state at step 0, sharded over the devices."""
        return self._init()

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics]:
        """Runs an optimizer step. `state` is donated, so it cannot be used afterwards.

        Returns the new state and the metrics.
        """
        return (self.program or self._step)(state, dict(batch))

    def sums(self, state: State, batch: Arrays, weight_B: jax.Array) -> Metrics:
        """Returns weighted sums over the batch of the loss and of each metric.

        The model runs in evaluation mode, which uses the running statistics.
        `weight_B` has the weight of each row.
        """
        read = {name: state[name] for name in READ}
        return self._sums(read, dict(batch), weight_B)

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """Lowers the step for a batch, so that it can be compiled without being run.

        Args:
            batch: map from a name to a global array or its ShapeDtypeStruct.
        """
        return self._step.lower(self.abstract_state, dict(batch))

    def update(self, state: State, means: Means) -> tuple[State, Metrics]:
        """Updates a state with the gradients of a batch; not jitted.

        `means` has the means over the batch of gradients, running statistics and
        metrics.

        Returns the next state, and the metrics with `grad_norm` and `learning_rate`
        added.
        """
        gradients, metrics = means["gradients"], means["metrics"]
        params, opt_state = self._apply(
            self._optimizer, gradients, state["opt_state"], state["params"]
        )
        with jax.numpy_dtype_promotion("standard"):
            metrics["grad_norm"] = optax.tree.norm(gradients)
        rate = jnp.asarray(self._learning_rate(state["step"]), jnp.float32)
        after = {
            "params": params,
            "statistics": means["statistics"],
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        return after, {**metrics, "learning_rate": rate}

    def _next_state(
        self, state: State, batch: dict[str, jax.Array]
    ) -> tuple[State, Metrics]:
        return self.update(state, self.gradients(state, batch))

    def _first_state(self) -> State:
        read = self._model.init()
        with jax.numpy_dtype_promotion("standard"):
            opt_state = self._optimizer.init(read["params"])
        state = {**read, "opt_state": opt_state, "step": jnp.zeros([], jnp.int32)}
        return local_updates.lift(
            state, self._optim, self.mesh.shape[local_updates.REPLICA_AXIS]
        )

    def _sums_of_batch(
        self, read: State, batch: dict[str, jax.Array], weight_B: jax.Array
    ) -> Metrics:
        read = {**read, "params": local_updates.evaluated(read["params"])}
        return self._evaluated.sums(read, batch, weight_B)


def sharded_step(experiment: Experiment, mesh: Mesh) -> TrainStep:
    """Builds the train step of an experiment on a mesh without stages.

    Args:
        experiment: the experiment to run.
        mesh: a mesh from `make_mesh`.

    Raises:
        ValueError: the model keeps arrays other than parameters and running statistics,
            or the optimizer cannot run on this mesh.
    """
    model = gathering(functional(experiment.model, experiment.seed), mesh)

    def parallelize(abstract: State) -> Parallelism:
        return Parallelism(
            state=state_sharding(abstract, mesh),
            gradients=gradients_of(model),
            evaluated=model,
        )

    return TrainStep(experiment.optim, model, mesh, parallelize)


def gathering(model: FunctionalModel, mesh: Mesh) -> FunctionalModel:
    """Returns a model that gathers parameters and statistics over `fsdp` before use.

    Outside of the model these arrays stay divided over `fsdp`. The gathers are
    explicit, because without explicit gathers XLA's partitioner (jax 0.10.2 on CPU)
    returned wrong gradients on a mesh with replica, fsdp and tensor of size 2 each
    (test_step.py compares gradients).
    """
    whole = jax.tree.map(
        lambda s: NamedSharding(mesh, _without(s.spec, "fsdp")),
        state_sharding(model.abstract, mesh),
    )
    return model.reading(
        lambda read: jax.lax.with_sharding_constraint(read, local_updates.here(whole))
    )


def _without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    return PartitionSpec(*(None if part == axis else part for part in spec))
