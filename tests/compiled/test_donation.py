"""The step's buffers are donated to the outputs of the same leaf, so none is copied.

JAX pairs donated inputs with outputs by shape and dtype, first come first served. A
step that returns its state in another order than it takes it copies whole leaves.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from dtft.config.experiment import Experiment, MeshConfig
from dtft.config.loading import load_experiment
from dtft.config.optimizers import AdamWConfig, OptimConfig
from dtft.data.rows import make_datasets
from dtft.optim import max_adabelief
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import TrainStep, sharded_step
from dtft.planner.aot.hlo import parse
from tests.support import gpu_compiler, hlo


def _compile(experiment: Experiment, mesh: Mesh) -> tuple[str, TrainStep]:
    """The text of the compiled step, and what it is of."""
    program = sharded_step(experiment, mesh)
    columns = make_datasets(experiment.data, experiment.seed).train.batch([0])
    batch = {
        name: jax.ShapeDtypeStruct(
            (experiment.data.global_batch, *column.shape[1:]), column.dtype
        )
        for name, column in columns.items()
        if name != "id"
    }
    return program.lower(batch).compile().as_text() or "", program


def _leaf_copies(compiled: str, abstract: Any) -> int:
    """Copies with the shape of some leaf's part on one device."""
    leaves = [leaf for leaf in jax.tree.leaves(abstract) if leaf.ndim]
    shapes = {leaf.sharding.shard_shape(leaf.shape) for leaf in leaves}
    return sum(
        any(array.shape in shapes for array in operation.arrays)
        for operation in hlo.copies(parse(compiled), 1)
    )


@dataclass(frozen=True, kw_only=True)
class _Amsgrad(OptimConfig):
    """As many leaves of state as ours has."""

    def scale(self, axis_name: str | None = None) -> optax.GradientTransformation:
        del axis_name
        return optax.scale_by_amsgrad()


def _assert_nothing_is_copied(
    experiment: Experiment, mesh: Mesh, other: type[OptimConfig]
) -> None:
    ours, program = _compile(experiment, mesh)
    number = len(jax.tree.leaves(program.abstract_state))
    assert hlo.aliases(ours) == {leaf: leaf for leaf in range(number)}
    params = program.abstract_state["params"]
    copies = _leaf_copies(ours, params)
    if not copies:
        return
    optim = experiment.optim
    same = other(
        learning_rate=optim.learning_rate, schedule=optim.schedule, clip=optim.clip
    )
    theirs, _ = _compile(replace(experiment, optim=same), mesh)
    assert copies <= _leaf_copies(theirs, params)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("digits_cnn", MeshConfig(replica=3)),
        ("chars_transformer", MeshConfig(replica=1, fsdp=4)),
    ],
    ids=str,
)
def test_a_step_copies_no_leaf_that_adam_does_not(
    config: str, sizes: MeshConfig
) -> None:
    devices = jax.devices()[: sizes.replica * sizes.fsdp]
    _assert_nothing_is_copied(
        load_experiment(config, []), make_mesh(sizes, devices), AdamWConfig
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("config", ["digits_cnn", "chars_transformer"])
def test_a_step_for_a_gpu_copies_no_leaf_that_amsgrad_does_not(config: str) -> None:
    # Not adam: XLA stores the kernels of convolutions in another order where they are
    # used, which copies every leaf of their state once, and adam has one leaf less.
    mesh = make_mesh(MeshConfig(), gpu_compiler.devices(1))
    _assert_nothing_is_copied(load_experiment(config, []), mesh, _Amsgrad)


def _crossed(in_order: bool, place: Any) -> tuple[str, Any]:
    """An update that takes (params, state) and returns them so, or the other way.

    Returns:
        Its compiled text, and (params, state).
    """
    solver = max_adabelief(1e-3)
    params = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    params, state = place((params, jax.eval_shape(solver.init, params)))

    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = solver.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state) if in_order else (state, params)

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params)
    return lowered.compile().as_text() or "", (params, state)


def _num_copies(compiled: str, elements: int) -> int:
    return len(hlo.copies(parse(compiled), elements))


def test_a_crossed_step_is_seen_by_its_aliases_and_copies() -> None:
    kept, carried = _crossed(True, lambda tree: tree)
    assert hlo.aliases(kept) == {leaf: leaf for leaf in range(5)}
    crossed, _ = _crossed(False, lambda tree: tree)
    # Out: count, mu, nu, nu_max, params. In: params, count, mu, nu, nu_max.
    assert hlo.aliases(crossed) == {0: 1, 1: 0, 2: 2, 3: 3, 4: 4}
    size = int(np.prod(carried[0].shape))
    assert _num_copies(crossed, size) >= _num_copies(kept, size) + 2


def test_a_crossed_step_copies_leaves_on_a_gpu() -> None:
    kept, carried = _crossed(True, gpu_compiler.on_one)
    size = int(np.prod(carried[0].shape))
    assert _num_copies(kept, size) == 0
    crossed, _ = _crossed(False, gpu_compiler.on_one)
    assert _num_copies(crossed, size) >= 1
