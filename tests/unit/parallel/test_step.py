"""Where the state lives, and that init does not depend on it."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtft.config.experiment import MeshConfig
from dtft.config.optimizers import (
    AdamWConfig,
    MaxAdaBeliefConfig,
    OptimConfig,
    ScheduleConfig,
    SGDConfig,
)
from dtft.data.datasets import CharsConfig
from dtft.data.rows import make_datasets
from dtft.models.base import TransformerConfig
from dtft.parallel.feed import Feed
from dtft.parallel.state_sharding import make_mesh, spec_of
from dtft.parallel.step import TrainStep, sharded_step
from dtft.train.state_layout import layout_of
from tests.support.tiny_experiment import as_bytes, tiny

_COSINE = ScheduleConfig(kind="warmup_cosine", warmup_steps=2, decay_steps=9)


def _program(tmp_path: Path, devices: int, mesh: MeshConfig) -> TrainStep:
    experiment = tiny(
        tmp_path,
        mesh=mesh,
        model=TransformerConfig(context=8, width=16, num_layers=1, num_heads=2),
        data=CharsConfig(global_batch=8, context=8),
    )
    return sharded_step(experiment, make_mesh(mesh, jax.devices()[:devices]))


@given(
    st.lists(st.integers(0, 24), max_size=4),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_specs_always_divide_evenly(shape: list[int], fsdp: int, tensor: int) -> None:
    spec = spec_of(tuple(shape), fsdp, tensor)
    sizes = {"fsdp": fsdp, "tensor": tensor}
    named = [axis for axis in spec if axis is not None]
    assert len(set(named)) == len(named) and len(spec) <= len(shape)
    for dim, axis in zip(shape, spec, strict=False):
        assert axis is None or (sizes[axis] > 1 and dim % sizes[axis] == 0)
    if fsdp > 1 and tensor == 1 and any(dim and dim % fsdp == 0 for dim in shape):
        fitting = max(dim for dim in shape if dim % fsdp == 0)
        assert shape[list(spec).index("fsdp")] == fitting


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What one device begins with."""
    folder = tmp_path_factory.mktemp("one")
    return as_bytes(_program(folder, 1, MeshConfig()).init())


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        (4, MeshConfig(replica=1, fsdp=4)),
        (8, MeshConfig(replica=2, fsdp=2, tensor=2)),
        (3, MeshConfig(replica=3)),
    ],
)
def test_init_is_the_same_on_every_mesh(
    tmp_path: Path, begun: list[bytes], devices: int, mesh: MeshConfig
) -> None:
    assert as_bytes(_program(tmp_path, devices, mesh).init()) == begun


def _after_a_step(tmp_path: Path, devices: int, mesh: MeshConfig) -> Any:
    """Parameters less the gradient."""
    experiment = tiny(tmp_path, optim=SGDConfig(learning_rate=1.0, momentum=0.0))
    program = sharded_step(experiment, make_mesh(mesh, jax.devices()[:devices]))
    train = make_datasets(experiment.data, 0).train
    batch = Feed(train, program, 16).take(1)
    state, _ = program.step(program.init(), batch.arrays)
    return jax.device_get(state["params"])


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Parameters on one device after a step."""
    return _after_a_step(tmp_path_factory.mktemp("one"), 1, MeshConfig())


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [(8, MeshConfig(replica=2, fsdp=2, tensor=2)), (4, MeshConfig(tensor=2))],
)
def test_gradient_is_the_same_on_every_mesh(
    tmp_path: Path, moved: Any, devices: int, mesh: MeshConfig
) -> None:
    found = _after_a_step(tmp_path, devices, mesh)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), moved, found
    )


def test_layout_names_what_each_device_holds(tmp_path: Path) -> None:
    mesh = MeshConfig(replica=1, fsdp=4)
    program = _program(tmp_path, 4, mesh)
    layout = layout_of(program.abstract_state, {0: 0}, "{}")
    state = program.init()
    kernel = next(leaf for leaf in layout.leaves if leaf.path == "params/logits/kernel")
    assert kernel.shape == (16, 128) and kernel.spec == ((), ("fsdp",))
    assert layout.mesh.axis_sizes == (1, 1, 4, 1) and layout.config == "{}"
    held = {
        tuple((s.start or 0, s.stop) for s in shard.index)
        for shard in state["params"]["logits"]["kernel"].addressable_shards
    }
    pieces = [p for p in layout.slices(0) if p.path == kernel.path]
    assert {tuple(zip(p.start, p.stop, strict=True))[1] for p in pieces} == {
        bounds[1] for bounds in held
    }


@pytest.mark.parametrize("optim", [MaxAdaBeliefConfig, AdamWConfig, SGDConfig])
def test_options_do_not_change_the_state(
    tmp_path: Path, optim: type[OptimConfig]
) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    plain = sharded_step(tiny(tmp_path, optim=optim()), mesh).abstract_state
    full = optim(clip=1.0, weight_decay=0.1, schedule=_COSINE, guard=10.0)
    program = sharded_step(tiny(tmp_path, optim=full), mesh)
    assert program.abstract_state == plain
    batch = {
        "image": jax.numpy.ones((16, 8, 8, 1)),
        "label": jax.numpy.zeros(16, "int32"),
    }
    batch = jax.device_put(batch, program.batch_sharding)
    state, metrics = program.step(program.init(), batch)
    assert metrics["learning_rate"] == 0 and state["step"] == 1
    _, metrics = program.step(state, batch)
    np.testing.assert_allclose(metrics["learning_rate"], full.learning_rate / 2)
