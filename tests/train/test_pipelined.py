"""A mesh with stages: the undivided model's losses and gradients, on every schedule."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dtft.models.base import TransformerConfig
from dtft.train.data import make_datasets
from dtft.train.datasets import CharsConfig
from dtft.train.experiment import Experiment, MeshConfig
from dtft.train.feed import Feed
from dtft.train.optimizers import SGDConfig
from dtft.train.pipeline_config import PipelineConfig
from dtft.train.pipelined_program import PipelinedProgram
from dtft.train.step import Program, make_mesh
from tests.train.helpers import tiny

WEIGHT_B = np.arange(16, dtype=np.float32)
CIRCULAR = {"schedule": "circular", "virtual_stages": 2}


def _experiment(tmp_path: Path, mesh: MeshConfig, layers: int, **changes: Any) -> Any:
    return tiny(
        tmp_path,
        model=TransformerConfig(context=8, width=8, num_layers=layers, num_heads=2),
        data=CharsConfig(global_batch=16, context=8),
        mesh=mesh,
        **changes,
    )


def _programs(experiment: Experiment) -> tuple[Program, PipelinedProgram]:
    mesh = experiment.mesh
    devices = jax.devices()[: mesh.replica * mesh.stage * mesh.fsdp]
    alone = replace(experiment, mesh=MeshConfig(), pipeline=PipelineConfig())
    return (
        Program(alone, make_mesh(MeshConfig(), devices[:1])),
        PipelinedProgram(experiment, make_mesh(mesh, devices)),
    )


def _in_a_row(program: PipelinedProgram, stacked: Any) -> Any:
    """Stacked layers one after the other; padding must be zero."""
    places = program._pipeline.places_SCL

    def layer(number: int) -> Any:
        at = tuple(np.argwhere(places == number)[0])
        return jax.tree.map(lambda leaf: leaf[at], stacked)

    for leaf in jax.tree.leaves(stacked):
        assert not np.any(leaf[places < 0])
    return {number: layer(number) for number in range(places.max() + 1)}


@pytest.mark.parametrize(
    ("sizes", "layers", "pipeline"),
    [
        ((2, 2, 1), 2, {"microbatches": 4}),
        ((2, 2, 1), 3, {"microbatches": 2, "layers": (1, 2)}),
        ((1, 4, 2), 4, {"microbatches": 1}),
        ((2, 2, 2), 5, {"microbatches": 2, **CIRCULAR}),
        ((1, 4, 1), 8, {"microbatches": 8, **CIRCULAR}),
    ],
)
def test_stages_train_as_the_undivided_model(
    tmp_path: Path, sizes: tuple[int, int, int], layers: int, pipeline: dict[str, Any]
) -> None:
    mesh = MeshConfig(replica=sizes[0], stage=sizes[1], fsdp=sizes[2])
    experiment = _experiment(
        tmp_path,
        mesh,
        layers,
        optim=SGDConfig(learning_rate=1.0, momentum=0.9),
        pipeline=PipelineConfig(**pipeline),
    )
    alone, staged = _programs(experiment)
    assert alone.num_parameters == staged.num_parameters
    train = make_datasets(experiment.data, 0).train
    ends, metrics = [], []
    for program in (alone, staged):
        state, seen = program.init(), {}
        feed = Feed(train, program, 16)
        for step in (1, 2):
            state, seen = program.step(state, feed.take(step).arrays)
        arrays = feed.take(3).arrays
        weight_B = jax.device_put(WEIGHT_B, program.batch_sharding)
        sums = program.sums(state, arrays, weight_B)
        ends.append(jax.device_get(state["params"]))
        metrics.append(jax.device_get((seen, sums)))
    ends[1]["blocks"] = _in_a_row(staged, ends[1]["blocks"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), *ends)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4), *metrics)
