"""A pipeline: which stage has which layers, works on what when, and the step of that.

One program for all stages (SPMD): at every tick each stage applies one chunk of its
layers to one microbatch and hands the result to the next stage (`ppermute`), inside of
a `jax.shard_map` over the axis `stage`. JAX's transpose of that is the backward pass:
the same ticks the other way round.

What is logged and the update are those of every `TrainStep`, but layers are stacked
[stages, chunks, layers of a chunk,..] and divided over `stage`, each with its
optimizer state. Before and after the layers `stage` is one more axis that divides the
data: parameters there rest divided over it and are gathered for use, and the rows that
leave the last stage are shared out, so that no stage waits for another's loss.

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
from dtft.parallel.step import BATCH_AXES, Parallelism, TrainStep, gradients_of, spec_of
from dtft.parallel.validation import check_stages

STAGE_AXIS = "stage"
_ENDS = (STAGE_AXIS, "fsdp")
"""Axes over which parameters before and after the layers rest divided."""
Layer = Callable[[Any, jax.Array], jax.Array]
"""`(its parameters, rows) -> rows`."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages, each with one chunk of layers or several, and microbatches.

    GPipe (arXiv 1811.06965) with one chunk per stage, else circular: microbatches go
    round in groups of as many as there are stages, so that what leaves the last stage
    is at once what the first one needs.
    """

    stages: int
    microbatches: int
    """With several chunks a multiple of `stages`."""
    layers: tuple[int, ...]
    """Of each chunk, in the order of the model; chunk c is on stage c % stages."""

    @property
    def chunks(self) -> int:
        """Chunks of each stage."""
        return len(self.layers) // self.stages

    @property
    def num_ticks(self) -> int:
        """Ticks of a pass; a stage works in all but `stages - 1` of them.

        >>> Pipeline(stages=2, microbatches=4, layers=(1, 1)).num_ticks
        5
        """
        return self.microbatches * self.chunks + self.stages - 1

    @property
    def num_layers_SC(self) -> np.ndarray:
        """Layers of each chunk of each stage, int32.

        >>> Pipeline(stages=2, microbatches=2, layers=(3, 2, 2, 2)).num_layers_SC
        array([[3, 2],
               [2, 2]], dtype=int32)
        """
        return np.array(self.layers, np.int32).reshape(self.chunks, self.stages).T

    @property
    def places_SCL(self) -> np.ndarray:
        """Which layer of the model is where; -1 for padding of shorter chunks.

        >>> Pipeline(stages=2, microbatches=2, layers=(2, 1)).places_SCL.tolist()
        [[[0, 1]], [[2, -1]]]
        """
        firsts = np.cumsum((0, *self.layers[:-1]))
        firsts_SC1 = firsts.reshape(self.chunks, self.stages).T[..., None]
        within_L = np.arange(max(self.layers))
        there_SCL = within_L < self.num_layers_SC[..., None]
        return np.where(there_SCL, firsts_SC1 + within_L, -1)

    def at_work(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """What a stage does at a tick; arrays too, traced or not.

        Returns:
            Whether it works at all; with which of its chunks; on which microbatch.
        """
        done = tick - stage
        last = self.microbatches * self.chunks - 1
        works = (done >= 0) & (done <= last)
        group, within = divmod(done.clip(0, last), self.stages * self.chunks)
        chunk, member = divmod(within, self.stages)
        return works, chunk, group * self.stages + member

    @property
    def left_at_M(self) -> np.ndarray:
        """The tick at which each microbatch has passed all layers."""
        ticks = np.arange(self.num_ticks)
        works, chunk, microbatch = self.at_work(ticks, self.stages - 1)
        at_end = works & (chunk == self.chunks - 1)
        return ticks[at_end][np.argsort(microbatch[at_end])]


def stack(pipeline: Pipeline, layers: Sequence[Any]) -> Any:
    """The parameters of all layers as one tree of [S, C, L, ...]; padding is zero.

    Args:
        pipeline: which layer is where.
        layers: a tree per layer, alike.
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
    """Rows after all layers; on stage `stages - 1`, on others they mean nothing.

    Padding is skipped, not computed, and its gradient is exactly zero; so is what a
    stage has to do before the first microbatch has come and after the last has gone.

    Args:
        pipeline: the schedule.
        layer: one layer.
        params_CL: of the own stage's layers.
        rows_B: what the first layer gets, [B, ...] with B a multiple of M; used on
            stage 0. Marked as varying over `stage`.
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
    """The last stage's rows, to each stage its part [B / S] in the order of stages."""
    is_last = lax.axis_index(STAGE_AXIS) == pipeline.stages - 1
    only_B = jnp.where(is_last, rows_B, jnp.zeros_like(rows_B))
    return lax.psum_scatter(only_B, STAGE_AXIS, scatter_dimension=0, tiled=True)


def own_part(pipeline: Pipeline, rows_B: jax.Array) -> jax.Array:
    """The part of rows that all stages have which `shared_out` gives this stage."""
    size = rows_B.shape[0] // pipeline.stages
    return lax.dynamic_slice_in_dim(rows_B, lax.axis_index(STAGE_AXIS) * size, size)


def _through_chunk(
    layer: Layer, params_L: Any, count: jax.Array, rows: jax.Array
) -> jax.Array:
    """Rows after the first `count` of the layers."""

    def one(rows: jax.Array, it: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
        number, params = it
        return lax.cond(number < count, layer, _skip, params, rows), None

    length = jax.tree.leaves(params_L)[0].shape[0]
    return lax.scan(one, rows, (jnp.arange(length, dtype=count.dtype), params_L))[0]


def _skip(params: Any, rows: jax.Array) -> jax.Array:
    del params
    return rows


def _chosen(leaf_C: jax.Array, chunk: jax.Array) -> jax.Array:
    if leaf_C.shape[0] == 1:  # or every tick would add to all gradients, not in place
        return leaf_C[0]
    return lax.dynamic_index_in_dim(leaf_C, chunk, keepdims=False)


def _routes(pipeline: Pipeline) -> list[tuple[int, int]]:
    """Who sends to whom: to the next; with several rounds the last to the first."""
    routes = [(stage, stage + 1) for stage in range(pipeline.stages - 1)]
    return routes + ([(pipeline.stages - 1, 0)] if pipeline.chunks > 1 else [])


def pipelined_step(experiment: Experiment, mesh: Mesh) -> TrainStep:
    """The step of an experiment on a mesh with stages.

    Args:
        experiment: what is to run.
        mesh: of `step.make_mesh`, with several stages.

    Raises:
        ValueError: something of the experiment does not go together with stages, or
            the model's layers are not equal, or not all it has.
    """
    check_stages(experiment, MeshConfig(**mesh.shape))
    layers = experiment.model.layers
    assert layers is not None  # was checked
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
    """A model's functions, with its equal layers stacked and divided over stages.

    Args:
        config: of a model with `layers`.
        seed: of its parameters at step 0.
        pipeline: the schedule.
        mesh: has the stages.

    Raises:
        ValueError: its layers are not equal, or not all it has; or it keeps arrays
            that microbatches would change.
    """
    layers = config.layers
    assert layers is not None
    whole = functional(config, seed)  # refuses what no step can run
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
        """Losses and metrics of the rows that this stage is given at the end."""

        def layer(params: Any, rows: jax.Array) -> jax.Array:
            return in_mode(nnx.merge(layer_graph, params), training=training)(rows)

        # Marked as different on each device before anything is computed: gradients are
        # then added up over the data axes once, after all ticks, not at each of them.
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
    """What beside arrays a model without its layers consists of, and one layer.

    Raises:
        ValueError: as `in_stages`.
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
    """A NamedSharding per leaf; those of the layers are divided over `stage`."""
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
