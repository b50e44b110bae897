"""Steps that are compiled ahead: they are found, and compile nothing when they run."""

import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dtft.config.experiment import BalanceConfig, ClusterConfig, Experiment, MeshConfig
from dtft.parallel.planning.choice import choose, recorded_plan
from dtft.parallel.planning.planned_experiment import planned_mesh
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import TrainStep
from dtft.parallel.validation import scaled_mesh
from dtft.planner.plan import Plan
from dtft.train.loop import step_on
from dtft.train.rehearsal import Rehearsals
from dtft.train.world import World
from tests.support.tiny_experiment import compilations, tiny

pytestmark = pytest.mark.timeout(180)  # steps are compiled ahead at low priority


def world() -> World:
    """A world of this process alone, which needs no coordination service."""
    made = World(lambda keys: None)
    made.number = 1
    return made


def mesh_of(experiment: Experiment, turn: int) -> jax.sharding.Mesh:
    devices = world().devices([0], turn, 4)
    return make_mesh(scaled_mesh(experiment, 1, 4), devices)


def rehearsed(
    rehearsals: Rehearsals, mesh: jax.sharding.Mesh, plan: Plan | None = None
) -> TrainStep:
    until = time.monotonic() + 150
    while (found := rehearsals.step_on(mesh, plan)) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def test_a_step_compiled_ahead_runs_without_compiling(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, cluster=ClusterConfig(hosts=1, devices_per_host=4))
    rehearsals = Rehearsals(experiment, world())
    now, after = (mesh_of(experiment, turn) for turn in (0, 1))
    assert not set(now.devices.flat) & set(after.devices.flat)
    rehearsals.begin({"turn": 1, "formations": [[0]], "items": {}})
    step = rehearsed(rehearsals, after)
    assert step.mesh == after and rehearsals.step_on(now, None) is None
    state = step.init()
    rows = np.zeros((16, 8, 8, 1), np.float32), np.zeros((16,), np.int32)
    batch = jax.device_put(
        dict(zip(("image", "label"), rows, strict=True)), step.batch_sharding
    )
    with compilations() as compiled:
        jax.block_until_ready(step.step(state, batch))
    assert not compiled


@pytest.mark.parametrize("sizes", [{"replica": 4}, {"replica": 2, "fsdp": 2}])
def test_a_program_runs_on_other_devices_without_being_lowered_again(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    cluster = ClusterConfig(hosts=1, devices_per_host=4)
    experiment = tiny(tmp_path, cluster=cluster, mesh=MeshConfig(**sizes))
    rehearsals = Rehearsals(experiment, world())
    rows = np.arange(1024, dtype=np.float32).reshape(16, 8, 8, 1), np.arange(16) % 10
    batch = {"image": rows[0] / 1024, "label": rows[1].astype(np.int32)}
    after = list[Any]()
    for turn in (0, 1):
        step = step_on(experiment, mesh_of(experiment, turn), None)
        with compilations() as compiled:
            rehearsals.compile(step, None, batch)
        assert step.program is not None and (turn == 0 or not compiled)
        state, metrics = step.step(step.init(), batch)
        assert {it.id for it in metrics["loss"].devices()} == {
            it.id for it in step.mesh.devices.flat
        }
        assert jax.tree.map(lambda it: it.sharding, state) == jax.tree.map(
            lambda it: it.sharding, step.abstract_state
        )
        after.append(jax.tree.map(np.asarray, (state, metrics)))
    jax.tree.map(np.testing.assert_array_equal, *after)


def test_a_step_that_another_order_names_again_stays(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, cluster=ClusterConfig(hosts=1, devices_per_host=4))
    rehearsals = Rehearsals(experiment, world())
    rehearsals.begin({"turn": 1, "formations": [[0]], "items": {}})
    first = rehearsed(rehearsals, mesh_of(experiment, 1))
    rehearsals.begin({"turn": 1, "formations": [[0]], "items": {}})
    assert rehearsed(rehearsals, mesh_of(experiment, 1)) is first


def test_an_order_replaces_the_one_before(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, cluster=ClusterConfig(hosts=1, devices_per_host=4))
    rehearsals = Rehearsals(experiment, world())
    rehearsals.begin({"turn": 0, "formations": [[0]], "items": {}})
    first = rehearsed(rehearsals, mesh_of(experiment, 0))
    rehearsals.begin({"turn": 1, "formations": [[0]], "items": {}})
    assert rehearsed(rehearsals, mesh_of(experiment, 1)) is not first
    assert rehearsals.step_on(mesh_of(experiment, 0), None) is None


def test_nothing_more_is_compiled_once_a_formation_begins(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, cluster=ClusterConfig(hosts=1, devices_per_host=2))
    rehearsals = Rehearsals(experiment, world())

    def mesh(turn: int) -> jax.sharding.Mesh:
        devices = world().devices([0], turn, 2)
        return make_mesh(scaled_mesh(experiment, 1, 2), devices)

    rehearsals.begin({"turn": 0, "formations": [[0]], "items": {}})
    ready = rehearsed(rehearsals, mesh(0))
    rehearsals.stop()
    assert rehearsals.step_on(mesh(0), None) is ready
    before = set(threading.enumerate())
    rehearsals.begin({"turn": 1, "formations": [[0]] * 50, "items": {}})
    rehearsals.stop()
    assert rehearsals.step_on(mesh(1), None) is None
    for thread in set(threading.enumerate()) - before:  # disturbs no other test
        thread.join(150)


def test_no_device_is_looked_for_before_the_world_is_joined(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, cluster=ClusterConfig(hosts=1, devices_per_host=4))
    before = set(threading.enumerate())
    early = Rehearsals(experiment, World(lambda keys: None))
    early.begin({"turn": 0, "formations": [[0]], "items": {}})
    assert set(threading.enumerate()) <= before


def test_a_balanced_step_is_not_compiled_ahead(tmp_path: Path) -> None:
    cluster = ClusterConfig(hosts=1, devices_per_host=4)
    balance = BalanceConfig(policy="exact")
    experiment = tiny(tmp_path, cluster=cluster, balance=balance)
    rehearsals = Rehearsals(experiment, world())
    rehearsals.begin({"turn": 0, "formations": [[0]], "items": {}})
    assert rehearsals.step_on(mesh_of(experiment, 0), None) is None


def test_the_step_of_a_recorded_plan_is_compiled_ahead(tmp_path: Path) -> None:
    cluster = ClusterConfig(hosts=1, devices_per_host=4)
    experiment = tiny(tmp_path, cluster=cluster, plan="auto")
    choice = choose(experiment, world().devices([0], 0, 4), {})
    assert choice is not None
    rehearsals = Rehearsals(experiment, world())
    rehearsals.begin({"turn": 1, "formations": [[0]], "items": choice.items})
    again = choose(experiment, world().devices([0], 1, 4), choice.items)
    assert again is not None
    mesh = planned_mesh(again.plan, world().devices([0], 1, 4))
    step = rehearsed(rehearsals, mesh, again.plan)
    assert step.mesh == mesh and rehearsals.step_on(mesh, None) is None
    assert recorded_plan(experiment, {}) is None
