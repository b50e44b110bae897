"""The jitted training step, the state it works on, and where each part of it lives.

Decides the shardings from the mesh alone and compiles init, step and evaluation; what
runs a plan (`planned_program`) builds on it. The state is a pure pytree `{"params",
"statistics", "opt_state", "step"}`; `statistics` are the running means of normalization
layers, empty (so without leaves) for models that have none. Must not know hosts, slots,
checkpoints or the loop.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dtft.checkpoint import tree
from dtft.planner.plan import Plan
from dtft.train import replicas
from dtft.train.experiment import Experiment, MeshConfig
from dtft.train.fitting import resolve_mesh

State = dict[str, Any]
Metrics = dict[str, jax.Array]
Arrays = Mapping[str, jax.Array | np.ndarray]
"""Global arrays by name; numpy arrays are divided by the jitted call."""
AXES = ("replica", "stage", "fsdp", "tensor")
BATCH_AXES = ("replica", "fsdp")
_READ = ("params", "statistics")
"""The parts of the state that the model reads."""


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """A mesh over `devices`, which are in slot order.

    Raises:
        ValueError: the sizes do not fit the devices.
    """
    sizes = resolve_mesh(config, 1, len(devices))
    shape = tuple(getattr(sizes, name) for name in AXES)
    grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec_of(shape: tuple[int, ...], fsdp: int, tensor: int) -> PartitionSpec:
    """Where one array of the state is divided.

    The last dim of matrices goes to `tensor`, the largest other dim to `fsdp`, each
    where it can be divided evenly; the rest is replicated.

    >>> tuple(spec_of((6, 8), fsdp=2, tensor=4))
    ('fsdp', 'tensor')
    >>> tuple(spec_of((7,), fsdp=2, tensor=1))
    ()
    """
    spec: list[str | None] = [None] * len(shape)
    if tensor > 1 and len(shape) >= 2 and shape[-1] % tensor == 0:
        spec[-1] = "tensor"
    free = [dim for dim, axis in enumerate(spec) if axis is None]
    fitting = [dim for dim in free if shape[dim] and shape[dim] % fsdp == 0]
    if fsdp > 1 and fitting:
        spec[max(fitting, key=lambda dim: (shape[dim], -dim))] = "fsdp"
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def state_sharding(abstract: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of an abstract state."""

    def of(shape: tuple[int, ...]) -> PartitionSpec:
        return spec_of(shape, mesh.shape["fsdp"], mesh.shape["tensor"])

    return replicas.shardings(abstract, mesh, of)


class Program:
    """Init, step and evaluation of an experiment on a mesh, compiled on first use."""

    def __init__(self, experiment: Experiment, mesh: Mesh) -> None:
        """Traces the model; allocates nothing."""
        self.mesh = mesh
        self._seed, self._model = experiment.seed, experiment.model
        self._optim = experiment.optim
        own = replicas.AXIS if self._optim.reduces_itself else None
        self._optimizer = self._optim.build(own)
        self._learning_rate = experiment.optim.learning_rate_at()
        self._graph = self._trace_model()
        one = jax.eval_shape(self._init_replica)
        self._plain = {name: one[name] for name in _READ}
        abstract = jax.eval_shape(self._init)
        shardings = self._shardings(abstract)
        step = self._step
        if self._optim.reduces_itself:
            step = replicas.over(step, self._optim, mesh, abstract)
        self.abstract_state: State = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            abstract,
            shardings,
        )
        """Shapes, dtypes and shardings of the state."""
        self.batch_sharding = NamedSharding(mesh, self._rows)
        """How every array of a batch is divided."""
        read = {name: shardings[name] for name in _READ}
        self._gathered = jax.tree.map(
            lambda s: NamedSharding(mesh, _without(s.spec, "fsdp")),
            state_sharding(self._plain, mesh),
        )
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._compiled_init = jax.jit(self._init, out_shardings=shardings)
        self._compiled_step = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(shardings, self.batch_sharding),
            out_shardings=(shardings, everywhere),
        )
        self._compiled_sums = jax.jit(
            self._sums,
            in_shardings=(read, *(self.batch_sharding,) * 2),
            out_shardings=everywhere,
        )

    plan: Plan | None = None
    """What it runs as; None for what the config's own mesh says."""
    _rows = PartitionSpec(BATCH_AXES)
    """How the rows of a batch are divided."""

    def _shardings(self, abstract: State) -> State:
        """A NamedSharding for every leaf of the state."""
        return state_sharding(abstract, self.mesh)

    @property
    def num_parameters(self) -> int:
        """Number of trained numbers."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._plain["params"]))

    @property
    def state_bytes_per_device(self) -> int:
        """Bytes of the state on each device."""
        leaves = jax.tree.leaves(self.abstract_state)
        shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
        return sum(
            math.prod(shape) * leaf.dtype.itemsize
            for shape, leaf in zip(shapes, leaves, strict=True)
        )

    def init(self) -> State:
        """The state at step 0; each device makes its own part."""
        return self._compiled_init()

    def step(self, state: State, batch: Arrays) -> tuple[State, Metrics]:
        """One optimizer step. `state` is donated: it cannot be used afterwards."""
        return self._compiled_step(state, dict(batch))

    def sums(self, state: State, batch: Arrays, weight_B: jax.Array) -> Metrics:
        """Weighted sums over the batch of the loss and of each metric.

        The model runs in evaluation mode: with its running statistics.
        """
        read = {name: state[name] for name in _READ}
        return self._compiled_sums(read, dict(batch), weight_B)

    def _trace_model(self) -> Any:
        model = nnx.eval_shape(lambda: self._model.build(nnx.Rngs(self._seed)))
        graph, _, _, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
        others = tree.to_paths(nnx.to_pure_dict(rest))
        if others:
            raise ValueError(
                f"model {type(self._model).__name__} keeps {', '.join(others)} beside "
                "its parameters. Allowed: nnx.Param, and nnx.BatchStat for running "
                "statistics. Remove layers with random state, such as dropout."
            )
        return graph

    def _init(self) -> State:
        return replicas.lift(
            self._init_replica(), self._optim, self.mesh.shape[replicas.AXIS]
        )

    def _init_replica(self) -> State:
        model = self._model.build(nnx.Rngs(self._seed))
        params = self._arranged(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        with jax.numpy_dtype_promotion("standard"):  # stock optax needs it
            opt_state = self._optimizer.init(params)
        return {
            "params": params,
            "statistics": nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
            "opt_state": opt_state,
            "step": jnp.zeros([], jnp.int32),
        }

    def _arranged(self, params: Any) -> Any:
        """The model's parameters as the state has them."""
        return params

    def _losses(
        self, read: State, batch: dict[str, jax.Array], *, training: bool
    ) -> tuple[Metrics, Any]:
        whole = self._whole(read, training=training)
        model = nnx.merge(self._graph, whole["params"], whole["statistics"])
        (model.train if training else model.eval)()
        losses, metrics = self._model.loss(model, batch)
        statistics = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        return {"loss": losses, **metrics}, statistics

    def _whole(self, read: State, *, training: bool) -> State:
        # FSDP: parameters are gathered over `fsdp` where they are used. Left to itself
        # the partitioner of jax 0.10.2 on CPU returned wrong gradients on a mesh with
        # replica, fsdp and tensor all 2 (test_step.py compares them).
        del training
        return jax.lax.with_sharding_constraint(read, replicas.here(self._gathered))

    def mean_loss(
        self, params: Any, statistics: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, tuple[Metrics, Any]]:
        """What is differentiated: the mean over the batch, metrics, new statistics."""
        read = {"params": params, "statistics": statistics}
        values, statistics = self._losses(read, batch, training=True)
        means = {name: jnp.mean(value) for name, value in values.items()}
        return means["loss"], (means, statistics)

    def _descend(
        self, state: State, batch: dict[str, jax.Array]
    ) -> tuple[State, Metrics, Any]:
        """Params, statistics and optimizer state after a step; metrics; gradients."""
        gradients, (metrics, statistics) = jax.grad(self.mean_loss, has_aux=True)(
            state["params"], state["statistics"], batch
        )
        return self._updated(state, gradients, statistics), metrics, gradients

    def _updated(self, state: State, gradients: Any, statistics: Any) -> State:
        """What the optimizer makes of a gradient, beside the new statistics."""
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self._optimizer.update(
                gradients, state["opt_state"], state["params"]
            )
            params = optax.apply_updates(state["params"], updates)
        return {"params": params, "statistics": statistics, "opt_state": opt_state}

    def _step(self, state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        return self._after(state, *self._descend(state, batch))

    def _after(
        self, state: State, parts: State, metrics: Metrics, gradients: Any
    ) -> tuple[State, Metrics]:
        """The next state and all metrics, from what `_descend` found."""
        with jax.numpy_dtype_promotion("standard"):
            metrics["grad_norm"] = optax.tree.norm(gradients)
        rate = jnp.asarray(self._learning_rate(state["step"]), jnp.float32)
        after = {**parts, "step": state["step"] + 1}
        return after, {**metrics, "learning_rate": rate}

    def _sums(
        self, read: State, batch: dict[str, jax.Array], weight_B: jax.Array
    ) -> Metrics:
        def total(values: jax.Array) -> jax.Array:
            values_B = jnp.mean(values.reshape(values.shape[0], -1), axis=1)
            return jnp.sum(values_B * weight_B)

        read = {**read, "params": replicas.evaluated(read["params"])}
        values, _ = self._losses(read, batch, training=False)
        return {name: total(value) for name, value in values.items()}


def _without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    return PartitionSpec(*(None if part == axis else part for part in spec))
