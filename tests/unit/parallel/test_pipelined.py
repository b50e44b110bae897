"""A mesh with stages: the schedule, and the undivided model's losses and gradients."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

from dtft.config.experiment import Experiment, MeshConfig, PipelineConfig
from dtft.config.optimizers import SGDConfig
from dtft.data.datasets import CharsConfig
from dtft.data.rows import make_datasets
from dtft.models.base import Batch, EqualLayers, ModelConfig, TransformerConfig
from dtft.models.losses import classification
from dtft.models.transformer import Transformer
from dtft.parallel.feed import Feed
from dtft.parallel.pipeline import (
    STAGE_AXIS,
    Pipeline,
    own_part,
    shared_out,
    stack,
    through_layers,
)
from dtft.planner.aot.hlo import collectives
from dtft.train.loop import train_step_of
from dtft.train.state_layout import layout_of
from tests.support.tiny_experiment import MemoryRuntime, tiny

WEIGHT_B = np.arange(16, dtype=np.float32)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    stages, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    number = st.integers(1, 3)
    count = stages * chunks
    layers = draw(st.lists(number, min_size=count, max_size=count))
    parts = draw(st.integers(1, 7)) if chunks == 1 else stages * draw(number)
    return Pipeline(stages=stages, microbatches=parts, layers=tuple(layers))


@given(pipelines())
def test_each_microbatch_passes_all_layers_in_order(pipeline: Pipeline) -> None:
    done: dict[int, list[tuple[int, int, int]]] = {}
    busy = 0
    for tick in range(pipeline.num_ticks):
        for stage in range(pipeline.stages):
            works, chunk, microbatch = pipeline.at_work(np.int64(tick), stage)
            if works:
                busy += 1
                done.setdefault(int(microbatch), []).append((tick, stage, int(chunk)))
    assert sorted(done) == list(range(pipeline.microbatches))
    for microbatch, path in done.items():
        assert [stage for _, stage, _ in path] == [*range(pipeline.stages)] * (
            pipeline.chunks
        )
        first = path[0][0]  # at once from stage to stage: nothing has to be kept
        assert [tick for tick, *_ in path] == [first + at for at in range(len(path))]
        assert pipeline.left_at_M[microbatch] == path[-1][0]
        places = [pipeline.places_SCL[stage, chunk] for _, stage, chunk in path]
        passed = [layer for place in places for layer in place if layer >= 0]
        assert passed == list(range(sum(pipeline.layers)))
    idle = pipeline.num_ticks * pipeline.stages - busy
    assert idle == pipeline.stages * (pipeline.stages - 1)


@pytest.mark.parametrize(
    ("stages", "microbatches", "layers"),
    [
        (4, 3, (3, 1, 2, 1)),
        (2, 4, (1, 2, 1, 1)),
        (3, 6, (1,) * 9),
    ],
)
def test_gradients_are_those_of_the_layers_in_a_row(
    stages: int, microbatches: int, layers: tuple[int, ...]
) -> None:
    pipeline = Pipeline(stages=stages, microbatches=microbatches, layers=layers)
    devices = np.array(jax.devices()[:stages])
    mesh = Mesh(devices, (STAGE_AXIS,), axis_types=(AxisType.Auto,))
    generator = np.random.default_rng(0)
    kernels_NDD = 0.5 * generator.normal(size=(sum(layers), 3, 3)).astype(np.float32)
    rows = stages * microbatches
    rows_BD = generator.normal(size=(rows, 3)).astype(np.float32)

    def layer(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ kernel)

    def in_stages(kernels_SCLDD: jax.Array, rows_BD: jax.Array) -> jax.Array:
        rows_BD = jax.lax.pcast(rows_BD, (STAGE_AXIS,), to="varying")
        last_BD = through_layers(pipeline, layer, kernels_SCLDD[0], rows_BD)
        return shared_out(pipeline, last_BD) * own_part(pipeline, rows_BD)

    staged = jax.shard_map(
        in_stages,
        mesh=mesh,
        in_specs=(PartitionSpec(STAGE_AXIS), PartitionSpec()),
        out_specs=PartitionSpec(STAGE_AXIS),
    )

    def stage_loss(kernels: Any, rows: Any) -> jax.Array:
        return jnp.sum(staged(stack(pipeline, list(kernels)), rows))

    def plain_loss(kernels: Any, rows: Any) -> jax.Array:
        x = rows
        for kernel in kernels:
            x = layer(kernel, x)
        return jnp.sum(x * rows)

    found, expected = (
        jax.jit(jax.value_and_grad(loss, (0, 1)))(kernels_NDD, rows_BD)
        for loss in (stage_loss, plain_loss)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5 * abs(b).max()),
        *(found, expected),
    )


class _Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.mix(x))


class _Row(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(128, 8, rngs=rngs)
        self.blocks = nnx.List([_Layer(rngs) for _ in range(3)])
        self.logits = nnx.Linear(8, 128, rngs=rngs)


class _RowConfig(ModelConfig):
    """Small, so that it is soon compiled; drills have stages of a transformer."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return _Row(rngs)

    @property
    def layers(self) -> EqualLayers:
        return EqualLayers(name="blocks", count=3)

    def before_layers(self, model: Any, batch: Batch) -> jax.Array:
        return model.tokens(batch["tokens"][:, :-1])

    def after_layers(self, model: Any, last: jax.Array, batch: Batch) -> Any:
        return classification(model.logits(last), batch["tokens"][:, 1:])

    def loss(self, model: Any, batch: Batch) -> Any:
        x = self.before_layers(model, batch)
        for block in model.blocks:
            x = block(x)
        return self.after_layers(model, x, batch)


def _experiment(tmp_path: Path, **changes: Any) -> Experiment:
    experiment = tiny(
        tmp_path,
        model=TransformerConfig(context=8, width=8, num_layers=3, num_heads=2),
        data=CharsConfig(global_batch=16, context=8),
        mesh=MeshConfig(replica=2, stage=2, fsdp=2),
        optim=SGDConfig(learning_rate=1.0, momentum=0.0),
        pipeline=PipelineConfig(microbatches=2, layers=(1, 2)),
    )
    return replace(experiment, **changes)


def _in_a_row(pipeline: Pipeline, params: Any) -> Any:
    """Stacked layers one after the other; padding must be zero."""
    params = jax.device_get(params)
    stacked, places = params["blocks"], pipeline.places_SCL
    for leaf in jax.tree.leaves(stacked):
        assert not np.any(leaf[places < 0])

    def layer(number: int) -> Any:
        at = tuple(np.argwhere(places == number)[0])
        return jax.tree.map(lambda leaf: leaf[at], stacked)

    layers = {number: layer(number) for number in range(sum(pipeline.layers))}
    return params | {"blocks": layers}


def test_a_step_is_that_of_the_undivided_model(tmp_path: Path) -> None:
    experiment = _experiment(tmp_path, model=_RowConfig())
    program = train_step_of(experiment, MemoryRuntime(tmp_path, num_devices=8))
    pipeline = Pipeline(stages=2, microbatches=2, layers=(1, 2))
    feed = Feed(make_datasets(experiment.data, 0).train, program, 16)
    batch = feed.take(1).arrays
    model = experiment.model
    state = program.init()
    params = _in_a_row(pipeline, state["params"])
    graph = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param)[0]

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def plain(params: Any, batch: Any) -> Any:
        losses, metrics = model.loss(nnx.merge(graph, params), batch)
        return jnp.mean(losses), {"loss": losses, **metrics}

    plainly = jax.device_get(plain(params, jax.device_get(batch)))
    (mean, each), gradient = plainly  # arrays of numpy: nothing more is compiled
    after = jax.tree.map(lambda p, g: p - g, params, gradient)

    assert program.num_parameters == sum(p.size for p in jax.tree.leaves(params))
    weight_B = jax.device_put(WEIGHT_B, program.batch_sharding)
    sums = jax.device_get(program.sums(state, batch, weight_B))
    for name, values in each.items():
        np.testing.assert_allclose(sums[name], values.mean(1) @ WEIGHT_B, 1e-5)
    step = program.lower(batch).compile()
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], mean, 1e-5)
    norm = np.sqrt(sum(np.sum(g * g) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, 1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6),
        *(_in_a_row(pipeline, state["params"]), after),
    )
    text = step.as_text()
    assert text is not None
    _check_what_is_sent(text, pipeline)


def _check_what_is_sent(text: str, pipeline: Pipeline) -> None:
    """Stages hand on at each tick; replicas add up gradients once, after all ticks."""
    sizes = {"replica": 2, "stage": 2, "fsdp": 2, "tensor": 1}
    sent = collectives(text, sizes)
    handed_on = [it for it in sent if it.kind == "permute"]
    assert {it.axes for it in handed_on} == {("stage",)}
    assert sum(it.trips for it in handed_on) == 2 * pipeline.num_ticks
    others = [it for it in sent if it.kind != "permute"]
    assert others and all(it.trips == 1 for it in others)


def test_a_stage_holds_its_own_layers_and_their_optimizer_state(tmp_path: Path) -> None:
    experiment = _experiment(tmp_path, mesh=MeshConfig(replica=2, stage=2))
    program = train_step_of(experiment, MemoryRuntime(tmp_path, num_devices=4))
    layout = layout_of(program.abstract_state, {0: 0}, "{}")
    layout = replace(layout, mesh=replace(layout.mesh, slots=(0, 1, 2, 3)))
    first, second, third, fourth = (
        {piece.key for piece in layout.slices(slot)} for slot in range(4)
    )
    assert first == third and second == fourth  # stages of two replicas
    names = {piece.key: piece.path for piece in layout.slices(0)}
    ends = {path.rpartition("/")[2] for path in names.values() if "/" in path}
    common = {names[key].rpartition("/")[2] for key in first & second}
    assert {"kernel", "embedding", "scale"} <= ends - common  # scalars are common
    stacked = [leaf for leaf in layout.leaves if "/blocks/" in leaf.path]
    assert len(stacked) == 2 * 8
    assert all(leaf.shape[:3] == (2, 1, 2) for leaf in stacked)
    assert all(leaf.spec[0] == ("stage",) for leaf in stacked)


class _Odd(Transformer):
    """Its second block has other parameters."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs)
        self.blocks[1].up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.blocks[1].down.bias = None


class _OddConfig(TransformerConfig):
    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return _Odd(self, rngs)


class _FewConfig(TransformerConfig):
    @property
    def layers(self) -> EqualLayers:
        return EqualLayers(name="blocks", count=2)  # of three


@pytest.mark.parametrize("kind", [_OddConfig, _FewConfig])
def test_layers_that_are_not_equal_are_refused(
    tmp_path: Path, kind: type[TransformerConfig]
) -> None:
    model = kind(context=8, width=8, num_layers=3, num_heads=2)
    experiment = _experiment(tmp_path, model=model, pipeline=PipelineConfig())
    with pytest.raises(ValueError, match=f"{kind.__name__}: its 3 blocks are not the"):
        train_step_of(experiment, MemoryRuntime(tmp_path, num_devices=8))
