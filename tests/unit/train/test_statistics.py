"""Running statistics: trained with, evaluated with, saved, and global over replicas."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from dtft.config.experiment import CheckpointConfig, Experiment, MeshConfig
from dtft.config.optimizers import MaxAdaBeliefConfig, SGDConfig
from dtft.data.images import ImageFolderConfig
from dtft.data.rows import make_datasets
from dtft.models.base import ModelConfig, ResNetConfig
from dtft.parallel.feed import Feed, evaluate
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import sharded_step
from dtft.train.loop import run
from dtft.train.single_process import LocalRuntime
from dtft.train.state_layout import layout_of
from tests.support.pictures import make_folder
from tests.support.tiny_experiment import as_bytes, tiny


@pytest.fixture(scope="module", name="folder")
def a_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("images"))


def _experiment(run_directory: Path, folder: Path, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "model": ResNetConfig(depths=(1,), width=8, num_classes=3),
        "data": ImageFolderConfig(path=str(folder), global_batch=8, image_size=16),
        "optim": MaxAdaBeliefConfig(learning_rate=5e-3),
        **changes,
    }
    return tiny(run_directory, **settings)


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.more
def test_learns_the_colours_and_storage_has_it_all(
    tmp_path: Path, folder: Path
) -> None:
    experiment = _experiment(
        tmp_path, folder, steps=24, checkpoint=CheckpointConfig(storage_interval=0)
    )
    result = run(experiment, LocalRuntime(experiment))
    losses = _losses(tmp_path)
    assert np.mean(losses[-3:]) < 0.6 * losses[0]
    assert result.summary["test_loss"] < 0.9 * np.log(3)
    abstract = sharded_step(
        experiment, make_mesh(MeshConfig(), jax.devices()[:1])
    ).abstract_state
    restored = LocalRuntime(experiment).restore(abstract)
    assert restored is not None and as_bytes(restored[0]) == as_bytes(result.state)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(restored[0]["statistics"]))


@pytest.mark.slow
def test_statistics_are_those_of_the_global_batch(tmp_path: Path, folder: Path) -> None:
    experiment = _experiment(tmp_path, folder, optim=SGDConfig(learning_rate=0.1))
    ends = []
    for number, sizes in ((1, MeshConfig()), (4, MeshConfig(fsdp=2))):
        program = sharded_step(experiment, make_mesh(sizes, jax.devices()[:number]))
        train = make_datasets(experiment.data, 0).train
        batch = Feed(train, program, 8).take(1)
        ends.append(jax.device_get(program.step(program.init(), batch.arrays)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-5), *ends)


def test_evaluation_reads_them_and_changes_nothing(
    tmp_path: Path, folder: Path
) -> None:
    experiment = _experiment(tmp_path, folder)
    program = sharded_step(experiment, make_mesh(MeshConfig(), jax.devices()[:1]))
    test = make_datasets(experiment.data, 0).test
    state = program.init()
    before = as_bytes(state)
    plain = evaluate(program, state, test, 8)
    # The padded rows of the last batch count for nothing: 12 samples, batches of 5.
    assert evaluate(program, state, test, 5) == pytest.approx(plain, rel=1e-5)
    assert as_bytes(state) == before
    wider = jax.tree.map(lambda x: 4 * x, state["statistics"])
    other = evaluate(program, {**state, "statistics": wider}, test, 8)
    assert other["loss"] != pytest.approx(plain["loss"], rel=1e-5)


def test_layout_names_them(tmp_path: Path, folder: Path) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = sharded_step(_experiment(tmp_path, folder), mesh).abstract_state
    paths = [leaf.path for leaf in layout_of(state, {0: 0}, "{}").leaves]
    assert "statistics/stem/norm/mean" in paths
    assert not jax.tree.leaves(
        sharded_step(tiny(tmp_path), mesh).abstract_state["statistics"]
    )


class _Dropping(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.drop = nnx.Dropout(0.5, rngs=rngs)


@dataclass(frozen=True, kw_only=True)
class _DroppingConfig(ModelConfig):
    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return _Dropping(rngs)


def test_random_state_is_refused(tmp_path: Path) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(ValueError, match="drop/rngs.* Remove layers with random state"):
        sharded_step(tiny(tmp_path, model=_DroppingConfig()), mesh)
