"""Pipeline parallelism: the assignment of layers to stages, the schedule, and the step.

All stages run one program (SPMD) in a `jax.shard_map`. The layers run in a loop, whose
iterations are called ticks. At every tick each stage applies one chunk of its layers to
one microbatch and sends the result to the next stage (`ppermute`). JAX transposes this
loop to get the backward pass, which runs the same ticks in reverse.

Metrics and update are the same as in every `TrainStep`. The parameters of layers are
stacked [stages, chunks, layers of a chunk, ...] and divided over `stage` and `fsdp`.
Parameters before and after the layers are divided over both axes, too. Optimizer state
is divided like its parameters. For use, the parameters of layers are gathered over
`fsdp`, the other parameters over both axes. The rows that leave the last stage are
scattered over the stages, so that each stage computes the loss of its part of the rows.

Legend: S stages, C chunks of a stage, L layers of a chunk, M microbatches, B rows.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtft.config import Experiment, MeshConfig
from dtft.models.base import EqualLayers, ModelConfig
from dtft.parallel.functional_model import (
    FunctionalModel,
    Metrics,
    State,
    functional,
    in_mode,
)
from dtft.parallel.state_sharding import BATCH_AXES, spec_of
from dtft.parallel.step import Parallelism, TrainStep, gradients_of
from dtft.parallel.validation import check_stages

STAGE_AXIS = "stage"
_ENDS = (STAGE_AXIS, "fsdp")
"""Mesh axes that divide the parameters outside of the stacked layers."""
Layer = Callable[[Any, jax.Array], jax.Array]
"""Function `(parameters of a layer, rows) -> rows`."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The schedule of a pipeline, by its stages, chunks of layers and microbatches.

    With one chunk per stage the schedule is GPipe (arXiv 1811.06965). With several
    chunks it is circular: microbatches pass the stages several times, in groups of
    `stages` microbatches. The first stage then needs a microbatch right when the last
    stage sends it.

    `layers` has the number of layers of each chunk, in the order of the model. Chunk c
    is on stage c % `stages`.
    """

    stages: int
    microbatches: int
    """Number of microbatches; with several chunks a multiple of `stages`."""
    layers: tuple[int, ...]
    """Number of layers of each chunk, in the order of the model; chunk c is on stage
    c % stages."""

    @property
    def chunks(self) -> int:
        """The number of chunks (groups of consecutive layers) of each stage."""
        return len(self.layers) // self.stages

    @property
    def num_ticks(self) -> int:
        """The number of ticks (iterations of the pipeline's loop) of a forward pass.

        The number is `microbatches * chunks + stages - 1`. Each stage is idle in
        `stages - 1` of the ticks.

        >>> Pipeline(stages=2, microbatches=4, layers=(1, 1)).num_ticks
        5
        """
        return self.microbatches * self.chunks + self.stages - 1

    @property
    def num_layers_SC(self) -> np.ndarray:
        """The number of layers of each chunk, int32 [stages, chunks].

        The chunks of `layers` are in the order of the model, so stage 0 of two stages
        has the first and the third chunk:

        >>> Pipeline(stages=2, microbatches=2, layers=(3, 2, 2, 2)).num_layers_SC
        array([[3, 2],
               [2, 2]], dtype=int32)
        """
        return np.array(self.layers, np.int32).reshape(self.chunks, self.stages).T

    @property
    def places_SCL(self) -> np.ndarray:
        """The index in the model of the layer at each position, an integer array.

        The dims are [stages, chunks of a stage, layers of a chunk]. -1 marks the
        padding of shorter chunks.

        >>> Pipeline(stages=2, microbatches=2, layers=(2, 1)).places_SCL.tolist()
        [[[0, 1]], [[2, -1]]]
        """
        firsts = np.cumsum((0, *self.layers[:-1]))
        firsts_SC1 = firsts.reshape(self.chunks, self.stages).T[..., None]
        within_L = np.arange(max(self.layers))
        there_SCL = within_L < self.num_layers_SC[..., None]
        return np.where(there_SCL, firsts_SC1 + within_L, -1)

    def at_work(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Computes what a stage works on at a tick (iteration of the pipeline's loop).

        Args:
            tick: numbers of ticks, as an array of any shape, which may be traced.
            stage: number of the stage, as an int, or as an array that broadcasts with
                `tick`; may be traced.

        Returns:
            Whether the stage works, the number of its chunk of layers, and the number
            of the microbatch. While the stage is idle, both numbers are in their range
            but meaningless.
        """
        done = tick - stage
        last = self.microbatches * self.chunks - 1
        works = (done >= 0) & (done <= last)
        group, within = divmod(done.clip(0, last), self.stages * self.chunks)
        chunk, member = divmod(within, self.stages)
        return works, chunk, group * self.stages + member

    @property
    def left_at_M(self) -> np.ndarray:
        """The tick in which each microbatch passes the model's last layers.

        A tick is an iteration of the pipeline's loop. An integer array [microbatches].
        """
        ticks = np.arange(self.num_ticks)
        works, chunk, microbatch = self.at_work(ticks, self.stages - 1)
        at_end = works & (chunk == self.chunks - 1)
        return ticks[at_end][np.argsort(microbatch[at_end])]


def stack(pipeline: Pipeline, layers: Sequence[Any]) -> Any:
    """Stacks the parameters of all layers into one tree of arrays.

    The first dims are [stages, chunks of a stage, layers of a chunk]. Padding of
    shorter chunks is zero.

    Args:
        pipeline: the schedule, which has the position of each layer.
        layers: the parameters of each layer; all trees have the same structure.
    """
    places = pipeline.places_SCL

    def stacked(*leaves: jax.Array) -> jax.Array:
        zero = jnp.zeros_like(leaves[0])
        rows = [leaves[at] if at >= 0 else zero for at in places.flat]
        return jnp.stack(rows).reshape(*places.shape, *zero.shape)

    return jax.tree.map(stacked, *layers)


def through_layers(
    pipeline: Pipeline, layer: Layer, params_CL: Any, rows_B: jax.Array
) -> jax.Array:
    """Applies all layers to rows; call it in a `shard_map` over the axis `stage`.

    Padding layers are skipped, so their gradients are exactly zero. A stage skips all
    its layers in a tick (an iteration of the pipeline's loop) in which it has no
    microbatch.

    Args:
        pipeline: the schedule.
        layer: function `(params, rows) -> rows` that applies one layer.
        params_CL: parameters of this stage's layers, [chunks, layers of a chunk, ...].
        rows_B: inputs of the first layer, with rows in dim 0, whose number is a
            multiple of the number of microbatches; marked as varying over `stage`. Only
            stage 0 uses the values.

    Returns:
        The rows after all layers on the last stage; meaningless values on others.
    """
    stage = lax.axis_index(STAGE_AXIS)
    num_layers = jnp.asarray(pipeline.num_layers_SC)[stage]
    ticks = np.arange(pipeline.num_ticks)
    _, _, entering = pipeline.at_work(ticks, 0)
    rows_MB = rows_B.reshape(pipeline.microbatches, -1, *rows_B.shape[1:])

    def tick(came: jax.Array, now: tuple[jax.Array, jax.Array]) -> Any:
        number, entering = now
        works, chunk, _ = pipeline.at_work(number, stage)
        rows = jnp.where((stage == 0) & (chunk == 0), entering, came)
        here_L = jax.tree.map(lambda leaf: _chosen(leaf, chunk), params_CL)
        count = jnp.where(works, num_layers[chunk], 0)
        rows = _through_chunk(layer, here_L, count, rows)
        return lax.ppermute(rows, STAGE_AXIS, _routes(pipeline)), rows

    nothing = jnp.zeros_like(rows_MB[0])
    _, after = lax.scan(tick, nothing, (jnp.asarray(ticks), rows_MB[entering]))
    return after[pipeline.left_at_M].reshape(rows_B.shape)


def shared_out(pipeline: Pipeline, rows_B: jax.Array) -> jax.Array:
    """Scatters the last stage's rows over the stages, in equal parts.

    Stage s gets part s. Must be called in a `shard_map` over the axis `stage`. Only the
    values of `rows_B` on the last stage are used.
    """
    is_last = lax.axis_index(STAGE_AXIS) == pipeline.stages - 1
    only_B = jnp.where(is_last, rows_B, jnp.zeros_like(rows_B))
    return lax.psum_scatter(only_B, STAGE_AXIS, scatter_dimension=0, tiled=True)


def own_part(pipeline: Pipeline, rows_B: jax.Array) -> jax.Array:
    """Returns this stage's part of rows that every stage has, in equal parts.

    Stage s gets part s, as from `shared_out`. Must be called in a `shard_map` over the
    axis `stage`.
    """
    size = rows_B.shape[0] // pipeline.stages
    return lax.dynamic_slice_in_dim(rows_B, lax.axis_index(STAGE_AXIS) * size, size)


def _through_chunk(
    layer: Layer, params_L: Any, count: jax.Array, rows: jax.Array
) -> jax.Array:
    """Applies the first `count` layers of a chunk to rows; skips the padding.

    Args:
        layer: function `(params, rows) -> rows` that applies one layer.
        params_L: parameters of the chunk's layers, [layers of a chunk, ...].
        count: number of layers in the chunk without padding; 0 returns `rows`.
        rows: inputs of the chunk's first layer, the rows of one microbatch.
    """

    def one(rows: jax.Array, it: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
        number, params = it
        return lax.cond(number < count, layer, _skip, params, rows), None

    length = jax.tree.leaves(params_L)[0].shape[0]
    return lax.scan(one, rows, (jnp.arange(length, dtype=count.dtype), params_L))[0]


def _skip(params: Any, rows: jax.Array) -> jax.Array:
    del params
    return rows


def _chosen(leaf_C: jax.Array, chunk: jax.Array) -> jax.Array:
    # A dynamic index would make the backward pass of every tick add to all gradients,
    # and not in place.
    if leaf_C.shape[0] == 1:
        return leaf_C[0]
    return lax.dynamic_index_in_dim(leaf_C, chunk, keepdims=False)


def _routes(pipeline: Pipeline) -> list[tuple[int, int]]:
    """Returns pairs of sending and receiving stage, for `ppermute`.

    Each stage sends to the next stage; with several chunks the last sends to the first.
    """
    routes = [(stage, stage + 1) for stage in range(pipeline.stages - 1)]
    return routes + ([(pipeline.stages - 1, 0)] if pipeline.chunks > 1 else [])


def pipelined_step(experiment: Experiment, mesh: Mesh) -> TrainStep:
    """Builds the train step of an experiment on a mesh with pipeline stages.

    Args:
        experiment: the experiment to run.
        mesh: a mesh from `make_mesh`, with several stages.

    Raises:
        ValueError: the model, optimizer, batch or mesh does not allow stages: the
            model's layers are not equal, or it keeps running statistics, for example.
    """
    check_stages(experiment, MeshConfig(**mesh.shape))
    layers = experiment.model.layers
    assert layers is not None  # `check_stages` checks this
    stages = mesh.shape[STAGE_AXIS]
    pipeline = Pipeline(
        stages=stages,
        microbatches=experiment.pipeline.microbatches,
        layers=experiment.pipeline.chunks(stages, layers.count),
    )
    model = in_stages(experiment.model, experiment.seed, pipeline, mesh)

    def parallelize(abstract: State) -> Parallelism:
        return Parallelism(
            state=_state_sharding(abstract, mesh, layers.name),
            gradients=gradients_of(model),
            evaluated=model,
        )

    return TrainStep(experiment.optim, model, mesh, parallelize)


def in_stages(
    config: ModelConfig, seed: int, pipeline: Pipeline, mesh: Mesh
) -> FunctionalModel:
    """Makes the functions of a model that runs its equal layers as a pipeline.

    The parameters of the layers are stacked and divided over stages.

    Args:
        config: config of a model with `layers`.
        seed: random seed of the parameters at step 0.
        pipeline: the schedule.
        mesh: a mesh with the axis `stage`.

    Raises:
        ValueError: the model's layers are not equal, their number is not what the
            config gives, or the model keeps arrays besides its parameters, such as
            running statistics.
    """
    layers = config.layers
    assert layers is not None
    whole = functional(config, seed)  # raises ValueError for unsupported models
    ends_graph, layer_graph = _graphs(config, seed, layers)

    def stacked(read: State) -> State:
        params = dict(read["params"])
        each = params[layers.name]
        in_order = [each[number] for number in sorted(each)]
        params[layers.name] = stack(pipeline, in_order)
        return {**read, "params": params}

    def on_a_stage(
        layers_SCL: Any, ends: Any, batch: dict[str, jax.Array], training: bool
    ) -> Metrics:
        """Computes losses and metrics of this stage's part of the rows.

        All stages together first run the layers on all rows of the replica. Then each
        stage gets an equal part of the rows after the layers, and computes the losses
        and metrics of this part.

        Args:
            layers_SCL: the parameters of this stage's layers, [1, chunks, layers of a
                chunk, ...].
            ends: the parameters before and after the layers.
            batch: the rows of this stage's replica, the same for all its stages.
            training: whether the model is in training mode.
        """

        def layer(params: Any, rows: jax.Array) -> jax.Array:
            return in_mode(nnx.merge(layer_graph, params), training=training)(rows)

        # Parameters are marked as different on each device before the computation. So
        # gradients are summed over the data axes once after all ticks, not in each
        # tick.
        layers_CL = jax.tree.map(lambda leaf: leaf[0], _varying(layers_SCL, BATCH_AXES))
        ends = _varying(ends, (*BATCH_AXES, STAGE_AXIS))
        batch = _varying(batch, (STAGE_AXIS,))
        model = in_mode(nnx.merge(ends_graph, ends), training=training)
        rows_B = config.before_layers(model, batch)
        rows_B = through_layers(pipeline, layer, layers_CL, rows_B)
        rows_B = shared_out(pipeline, rows_B)
        batch = {name: own_part(pipeline, it) for name, it in batch.items()}
        losses, metrics = config.after_layers(model, rows_B, batch)
        return {"loss": losses, **metrics}

    def losses(
        read: State, batch: dict[str, jax.Array], training: bool
    ) -> tuple[Metrics, Any]:
        ends = dict(read["params"])
        layers_SCL = ends.pop(layers.name)
        ran = jax.shard_map(
            functools.partial(on_a_stage, training=training),
            mesh=mesh,
            in_specs=(
                PartitionSpec(STAGE_AXIS),
                PartitionSpec(),
                PartitionSpec(BATCH_AXES),
            ),
            out_specs=PartitionSpec((*BATCH_AXES, STAGE_AXIS)),
        )
        return ran(layers_SCL, ends, batch), read["statistics"]

    abstract = jax.eval_shape(stacked, whole.abstract)
    numbers = sum(it.size for it in jax.tree.leaves(abstract["params"][layers.name]))
    places = pipeline.places_SCL.size
    return FunctionalModel(
        init=lambda: stacked(whole.init()),
        losses=losses,
        abstract=abstract,
        num_padding=numbers // places * (places - layers.count),
    )


def _graphs(config: ModelConfig, seed: int, layers: EqualLayers) -> tuple[Any, Any]:
    """Returns the NNX graph definitions of a model without its layers, and of a layer.

    Raises:
        ValueError: the layers are not equal, their number is not what the config gives,
            or the model keeps running statistics.
    """
    model = nnx.eval_shape(lambda: config.build(nnx.Rngs(seed)))
    graphs = [nnx.split(layer) for layer in getattr(model, layers.name)]
    kinds = {(graph, _shapes(params)) for graph, params in graphs}
    kind = type(config).__name__
    if len(kinds) != 1 or len(graphs) != layers.count:
        raise ValueError(
            f"model {kind}: its {len(graphs)} {layers.name} are not the "
            f"{layers.count} equal layers that its config names. Allowed: "
            "layers of one class, with parameters of the same shapes. Set "
            "--mesh.stage 1."
        )
    if jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
        raise ValueError(
            f"model {kind} keeps running statistics, which microbatches would "
            "change one after another. Allowed: models without. Set --mesh.stage 1."
        )
    setattr(model, layers.name, nnx.List([]))
    return nnx.split(model)[0], graphs[0][0]


def _state_sharding(abstract: State, mesh: Mesh, layers: str) -> State:
    """Returns a NamedSharding per leaf of the state.

    Stacked layers are divided over `stage` in dim 0, and over `fsdp` in one of the dims
    from dim 3 on. Other arrays are divided over `stage` and `fsdp` together, in one
    dim. This one dim is the largest whose size is a multiple of the number of parts.
    Without such a dim, stacked layers are divided over `stage` only, and other arrays
    stay whole. `layers` is the name of the layers in the state's paths.
    """
    fsdp, stages = mesh.shape["fsdp"], mesh.shape[STAGE_AXIS]

    def of(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if any(getattr(key, "key", None) == layers for key in path):
            spec = (STAGE_AXIS, None, None, *spec_of(leaf.shape[3:], fsdp, 1))
        else:
            parts = spec_of(leaf.shape, fsdp * stages, 1)
            spec = (_ENDS if part == "fsdp" else part for part in parts)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(of, abstract)


def _varying(tree: Any, axes: tuple[str, ...]) -> Any:
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axes, to="varying"), tree)


def _shapes(params: Any) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params))
