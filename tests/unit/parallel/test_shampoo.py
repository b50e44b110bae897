"""The step of an experiment with Shampoo, statistics exchanged and not."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dtft.config.experiment import Experiment, MeshConfig
from dtft.config.optimizers import ShampooConfig
from dtft.models.base import CNNConfig
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import sharded_step
from tests.support import tiny_experiment

SMALL = CNNConfig(channels=(4,), hidden=8)
"""Matrices of one block and of several."""


def tiny(tmp_path: Path, **changes: Any) -> Experiment:
    return tiny_experiment.tiny(tmp_path, model=SMALL, **changes)


def _trained(experiment: Experiment, num_devices: int, steps: int = 3) -> Any:
    program = sharded_step(
        experiment, make_mesh(experiment.mesh, jax.devices()[:num_devices])
    )
    generator = np.random.default_rng(0)
    state = program.init()
    for _ in range(steps):
        batch = {
            "image": generator.normal(size=(16, 8, 8, 1)).astype(np.float32),
            "label": generator.integers(0, 10, 16).astype(np.int32),
        }
        placed = jax.device_put(batch, program.batch_sharding)
        state, metrics = program.step(state, placed)
        assert np.isfinite(metrics["loss"])
    return state


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["packed", "cholesky"])
def test_exchanged_statistics_train_on_a_mesh(tmp_path: Path, wire: Any) -> None:
    optim = ShampooConfig(wire=wire, precondition_frequency=2, block_size=16)
    experiment = tiny(tmp_path, optim=optim)
    found = _trained(experiment, 2)
    for leaf in jax.tree.leaves(found):  # replicated: every device has the same bits
        first, second = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        np.testing.assert_array_equal(first, second)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state on one device, nothing exchanged."""
    optim = ShampooConfig(precondition_frequency=2, block_size=16)
    return _trained(tiny(tmp_path_factory.mktemp("whole"), optim=optim), 1)


@pytest.mark.slow
def test_one_replica_needs_no_exchange(tmp_path: Path, whole: Any) -> None:
    """With one replica its own gradient is the mean: the wire changes nothing."""
    optim = ShampooConfig(wire="packed", precondition_frequency=2, block_size=16)
    found = _trained(tiny(tmp_path, optim=optim), 1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        *(whole["params"], found["params"]),
    )


@pytest.mark.slow
def test_statistics_can_be_divided_over_fsdp(tmp_path: Path, whole: Any) -> None:
    optim = ShampooConfig(precondition_frequency=2, block_size=16)
    divided = _trained(tiny(tmp_path, optim=optim, mesh=MeshConfig(fsdp=2)), 2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3),
        whole["params"],
        divided["params"],
    )
