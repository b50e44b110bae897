"""Training with an optimizer that communicates by itself, on several devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state import tree
from dtft.config.experiment import ClusterConfig, MeshConfig
from dtft.config.loading import shape_relevant, to_json
from dtft.config.optimizers import AdamWConfig, MaxAdaBeliefConfig, SyncConfig
from dtft.data.rows import make_datasets
from dtft.optim import max_belief_phases
from dtft.parallel.feed import Feed, evaluate
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import TrainStep, sharded_step
from dtft.parallel.validation import check_experiment
from dtft.train.loop import run
from dtft.train.single_process import LocalRuntime, UnreadableCheckpoint
from dtft.train.state_layout import layout_of
from tests.support.tiny_experiment import as_bytes, tiny

OPERANDS = SyncConfig(moments="operands")
ROW = "opt_state/inner_state/1/inner/nu_max/rows/classes/kernel"


def _experiment(tmp_path: Path, sync: SyncConfig, **changes: Any) -> Any:
    optim = MaxAdaBeliefConfig(learning_rate=3e-3, sync=sync)
    return tiny(tmp_path, optim=optim, **changes)


def _train(experiment: Any, mesh: MeshConfig, steps: int) -> tuple[TrainStep, Any, Any]:
    count = mesh.replica * mesh.fsdp
    program = sharded_step(experiment, make_mesh(mesh, jax.devices()[:count]))
    feed = Feed(make_datasets(experiment.data, 0).train, program, 16)
    state, metrics = program.init(), {}
    for step in range(1, steps + 1):
        state, metrics = program.step(state, feed.take(step).arrays)
    return program, state, jax.device_get(metrics)


def _copies(array: jax.Array) -> int:
    return len({np.asarray(s.data).tobytes() for s in array.addressable_shards})


def _by_hand(experiment: Any, program: TrainStep, steps: int) -> tuple[Any, list[Any]]:
    """The patent's flow, one replica after the other on one device."""
    model, phases = experiment.model, max_belief_phases()
    graph = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))), nnx.Param)[0]

    @jax.jit
    def begun() -> Any:
        params = nnx.to_pure_dict(nnx.state(model.build(nnx.Rngs(0)), nnx.Param))
        return params, [phases.init(params)] * 2

    @jax.grad
    def gradient(params: Any, batch: Any) -> jax.Array:
        losses, _ = model.loss(nnx.merge(graph, params), batch)
        return jnp.mean(losses)

    @jax.jit
    def after(params: Any, states: list[Any], halves: list[Any]) -> Any:
        gradients = [gradient(params, half) for half in halves]
        states = [
            phases.accumulate(g, s) for g, s in zip(gradients, states, strict=True)
        ]
        mu, nu_max = (
            jax.tree.map(lambda a, b: (a + b) / 2, *(getattr(s, name) for s in states))
            for name in ("mu", "nu_max")
        )
        used = states[0]._replace(mu=mu, nu_max=nu_max)
        update = phases.direction(gradients[0], used)
        return jax.tree.map(lambda p, u: p - 3e-3 * u, params, update), states

    feed = Feed(make_datasets(experiment.data, 0).train, program, 16)
    params, states = begun()
    for step in range(1, steps + 1):
        batch = jax.device_get(feed.take(step).arrays)
        halves = [{k: v[8 * i : 8 * i + 8] for k, v in batch.items()} for i in (0, 1)]
        params, states = after(params, states, halves)
    return params, states


@pytest.fixture(scope="module", name="two")
def two_replicas(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TrainStep, Any, Any]:
    """After three steps."""
    experiment = _experiment(tmp_path_factory.mktemp("two"), OPERANDS)
    return _train(experiment, MeshConfig(replica=2), 3)


def test_it_is_the_patents_flow(
    tmp_path: Path, two: tuple[TrainStep, Any, Any]
) -> None:
    program, state, metrics = two
    params, states = _by_hand(_experiment(tmp_path, OPERANDS), program, 3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
        state["params"],
        params,
    )
    rows = optax.tree.get(state["opt_state"], "nu_max").rows
    for index in (0, 1):
        jax.tree.map(
            lambda a, b, index=index: np.testing.assert_allclose(
                a[index], b, 1e-3, 1e-9
            ),
            rows,
            states[index].nu_max,
        )
    assert all(_copies(leaf) == 1 for leaf in jax.tree.leaves(state["params"]))
    assert _copies(rows["classes"]["kernel"]) == 2
    assert sorted(metrics) == ["accuracy", "grad_norm", "learning_rate", "loss"]
    assert metrics["learning_rate"] == np.float32(3e-3)


def test_fsdp_inside_a_replica_changes_nothing_but_rounding(
    tmp_path: Path, two: tuple[TrainStep, Any, Any]
) -> None:
    experiment = _experiment(tmp_path, OPERANDS)
    _, whole, first = two
    program, parts, second = _train(experiment, MeshConfig(replica=2, fsdp=2), 3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            jax.device_get(a), jax.device_get(b), atol=2e-6
        ),
        whole,
        parts,
    )
    np.testing.assert_allclose(first["grad_norm"], second["grad_norm"], 1e-4)
    leaf = tree.to_paths(program.abstract_state)[ROW]
    assert tuple(leaf.sharding.spec) == ("replica", "fsdp")


def test_layout_has_a_slice_per_replica_and_every_slice_gets_a_copy(
    tmp_path: Path,
) -> None:
    mesh = MeshConfig(replica=3)
    experiment = _experiment(tmp_path, OPERANDS)
    program = sharded_step(experiment, make_mesh(mesh, jax.devices()[:3]))
    layout = layout_of(program.abstract_state, {0: 0}, "{}")
    leaf = next(leaf for leaf in layout.leaves if leaf.path == ROW)
    assert leaf.shape == (3, 16, 10) and leaf.spec == (("replica",),)
    on_hosts = replace(layout, mesh=replace(layout.mesh, slots=(0, 1, 2)))
    rows = [piece for piece in on_hosts.owners if piece.path == ROW]
    assert [piece.start[0] for piece in rows] == [0, 1, 2]
    assert all(len(on_hosts.owners[piece]) == 1 for piece in rows)
    holders = place_copies(on_hosts, copies=2).holders
    assert all(len(slots) >= 2 for slots in holders.values())


def test_restored_from_storage_bit_for_bit(tmp_path: Path) -> None:
    cluster = ClusterConfig(devices_per_host=2)
    whole, parts = (
        _experiment(tmp_path / name, OPERANDS, cluster=cluster)
        for name in ("whole", "parts")
    )
    ends = run(whole, LocalRuntime(whole))
    run(
        shorter := replace(parts, stop=replace(parts.stop, steps=3)),
        LocalRuntime(shorter),
    )
    resumed = run(parts, LocalRuntime(parts))
    assert as_bytes(resumed.state) == as_bytes(ends.state)
    other = replace(parts, cluster=ClusterConfig(), stop=replace(parts.stop, steps=9))
    with pytest.raises(UnreadableCheckpoint, match="mu/rows"):
        run(other, LocalRuntime(other))


def test_the_guard_decides_alike_on_all_replicas(tmp_path: Path) -> None:
    experiment = _experiment(tmp_path, OPERANDS)
    guarded = replace(experiment, optim=replace(experiment.optim, guard=10.0))
    program, state, _ = _train(guarded, MeshConfig(replica=2), 2)
    before = as_bytes(state["params"])
    images = jnp.ones((16, 8, 8, 1)).at[0].set(jnp.nan)  # a row of the first replica
    batch = {"image": images, "label": jnp.zeros(16, jnp.int32)}
    batch = jax.device_put(batch, program.batch_sharding)
    after, _ = program.step(state, batch)
    assert as_bytes(after["params"]) == before
    assert all(_copies(leaf) == 1 for leaf in jax.tree.leaves(after["params"]))
    assert optax.tree.get(after["opt_state"], "nonfinite") == 1


def test_parameters_may_drift_between_their_means(tmp_path: Path) -> None:
    sync = SyncConfig(moments="state", every_mu=2, every_nu_max=3, every_params=4)
    experiment = _experiment(tmp_path, sync)
    program, state, _ = _train(experiment, MeshConfig(replica=2), 3)
    data = make_datasets(experiment.data, 0)
    kernel = tree.to_paths(state)["params/rows/classes/kernel"]
    assert kernel.shape == (2, 16, 10) and _copies(kernel) == 2
    state, _ = program.step(state, Feed(data.train, program, 16).take(4).arrays)
    assert _copies(tree.to_paths(state)["params/rows/classes/kernel"]) == 1
    measured = evaluate(program, state, data.test, 16)
    assert 0 < measured["loss"] < 3
    assert program.num_parameters == 2570


def test_parameters_stay_equal_when_averaged_every_step(tmp_path: Path) -> None:
    sync = SyncConfig(moments="state", every_mu=2, algorithm="ring")
    experiment = _experiment(tmp_path, sync)
    _, state, _ = _train(experiment, MeshConfig(replica=2), 3)
    assert all(_copies(leaf) == 1 for leaf in jax.tree.leaves(state["params"]))
    assert (
        _copies(optax.tree.get(state["opt_state"], "mu").rows["classes"]["bias"]) == 2
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_mu": 2}, "no effect"),
        ({"max_op": "max"}, "state or operands"),
        ({"moments": "operands", "every_params": 2}, "no effect"),
        ({"moments": "operands", "every_nu": 2}, "no effect"),
        ({"moments": "state", "every_params": 2}, "every_params=2 has no effect"),
        ({"moments": "state", "every_mu": 0}, "not a period"),
    ],
)
def test_options_without_effect_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyncConfig(**options)


def test_what_cannot_communicate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="AdamWConfig"):
        AdamWConfig(sync=OPERANDS)
    mesh = MeshConfig(replica=2, tensor=2)
    experiment = _experiment(tmp_path, OPERANDS, mesh=mesh)
    with pytest.raises(ValueError, match=r"mesh\.tensor=2"):
        check_experiment(experiment, hosts=4, devices_per_host=1)
    with pytest.raises(ValueError, match=r"mesh\.tensor=2"):
        sharded_step(experiment, make_mesh(mesh, jax.devices()[:4]))


def test_a_checkpoint_belongs_to_what_is_exchanged(tmp_path: Path) -> None:
    plain, synced = (
        shape_relevant(to_json(_experiment(tmp_path, sync)))
        for sync in (SyncConfig(), OPERANDS)
    )
    assert "optim.sync" not in plain and "optim.sync.moments" in synced
