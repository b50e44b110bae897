"""The schedule of a pipeline: which stage has which layers, and works on what when.

One program for all stages (SPMD): at every tick each stage applies one chunk of its
layers to one microbatch and hands the result to the next stage (`ppermute`). JAX's
transpose of that is the backward pass: the same ticks the other way round. For the
inside of a `jax.shard_map` over the axis `stage`. Must not know models, optimizers or
where the state is.

Legend: S stages, C chunks of a stage, L layers of a chunk, M microbatches, B rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "stage"
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
    stage = lax.axis_index(AXIS)
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
        return lax.ppermute(rows, AXIS, _routes(pipeline)), rows

    nothing = jnp.zeros_like(rows_MB[0])
    _, after = lax.scan(tick, nothing, (jnp.asarray(ticks), rows_MB[entering]))
    return after[pipeline.left_at_M].reshape(rows_B.shape)


def shared_out(pipeline: Pipeline, rows_B: jax.Array) -> jax.Array:
    """The last stage's rows, to each stage its part [B / S] in the order of stages."""
    is_last = lax.axis_index(AXIS) == pipeline.stages - 1
    only_B = jnp.where(is_last, rows_B, jnp.zeros_like(rows_B))
    return lax.psum_scatter(only_B, AXIS, scatter_dimension=0, tiled=True)


def own_part(pipeline: Pipeline, rows_B: jax.Array) -> jax.Array:
    """The part of rows that all stages have which `shared_out` gives this stage."""
    size = rows_B.shape[0] // pipeline.stages
    return lax.dynamic_slice_in_dim(rows_B, lax.axis_index(AXIS) * size, size)


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
