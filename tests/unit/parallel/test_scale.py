"""More or fewer replicas: meshes, the layouts that leaders foresee, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from dtft.checkpoint.state.slices import Layout
from dtft.cli.dispatch import main
from dtft.config.experiment import BalanceConfig, ClusterConfig, Experiment, MeshConfig
from dtft.elastic.assignment import SizeLimits, resized, size_for
from dtft.parallel.state_sharding import make_mesh
from dtft.parallel.step import sharded_step
from dtft.parallel.validation import check_experiment, scaled_mesh
from dtft.train.state_layout import layout_of
from tests.support.tiny_experiment import tiny

LIMITS = SizeLimits(global_batch=24, batch_axes=("replica", "fsdp"))


def job(folder: Path, hosts: int, mesh: MeshConfig, **changes: Any) -> Experiment:
    made = tiny(folder, cluster=ClusterConfig(hosts=hosts), mesh=mesh, **changes)
    return replace(made, data=replace(made.data, global_batch=24))


def announced(experiment: Experiment, slots: int, per_host: int = 1) -> Layout:
    """The layout that trainers on so many slots announce, with this process's devices
    as the devices of all of them."""
    devices = jax.devices()[: slots * per_host]
    mesh = make_mesh(scaled_mesh(experiment, slots, per_host), devices)
    layout = layout_of(sharded_step(experiment, mesh).abstract_state, {0: 0}, "{}")
    places = tuple(at // per_host for at in range(len(devices)))
    return replace(layout, mesh=replace(layout.mesh, slots=places))


@pytest.mark.parametrize(
    "mesh, hosts, per_host, replicas",
    [
        (MeshConfig(), 2, 1, [1, 3, 4]),
        (MeshConfig(replica=2, fsdp=2), 4, 1, [1, 3]),
        (MeshConfig(replica=2, fsdp=-1), 4, 1, [1, 3]),
        (MeshConfig(fsdp=2), 2, 2, [1, 3]),
        (MeshConfig(), 1, 2, [4, 6]),
    ],
)
def test_the_leader_foresees_what_trainers_announce(
    tmp_path, mesh, hosts, per_host, replicas
):
    experiment = job(tmp_path, hosts, mesh)
    before = announced(experiment, hosts, per_host)
    for number in replicas:
        size = size_for(number, before, LIMITS)
        foreseen = resized(before, number)
        assert foreseen.digest == announced(experiment, size.slots, per_host).digest


def test_state_that_belongs_to_one_replica_is_refused_by_name(tmp_path):
    made = job(tmp_path, 2, MeshConfig())
    sync = replace(made.optim.sync, moments="operands")  # type: ignore[attr-defined]
    experiment = replace(made, optim=replace(made.optim, sync=sync))  # type: ignore[call-arg]
    before = announced(experiment, 2)
    with pytest.raises(ValueError, match=r"leaf 'opt_state/.*committed"):
        size_for(3, before, LIMITS)


def test_the_least_number_of_replicas_must_be_possible(tmp_path):
    made = job(tmp_path, 6, MeshConfig(fsdp=2))
    for least in (0, 1, 2, 3):
        check_experiment(
            replace(made, cluster=replace(made.cluster, min_replicas=least)),
            memory_tier=False,
        )
    with pytest.raises(ValueError, match="Allowed: 1, 2, 3, or 0"):
        check_experiment(replace(made, cluster=replace(made.cluster, min_replicas=4)))
    with pytest.raises(ValueError, match="--min-replicas 1 or more"):
        ClusterConfig(min_replicas=-1)


def test_the_least_number_of_replicas_must_have_room_for_all_microbatches(tmp_path):
    balance = BalanceConfig(policy="exact", microbatches=24, most=8)
    made = replace(job(tmp_path, 4, MeshConfig()), balance=balance)
    check_experiment(replace(made, cluster=replace(made.cluster, min_replicas=3)))
    with pytest.raises(ValueError, match="--balance.most 12 or more"):
        check_experiment(replace(made, cluster=replace(made.cluster, min_replicas=2)))


def test_the_command_says_what_is_wrong(tmp_path, capsys, free_port):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    asked = ["scale", "--job", "j", "--store", f"127.0.0.1:{free_port}"]
    asked += ["--secret-file", str(secret)]
    for more, hint in (
        (["--replicas", "3"], f"--store 127.0.0.1:{free_port}"),
        (["--replicas", "0"], "--replicas 0"),
        (["--replicas", "3", "--timeout", "0"], "--timeout 0"),
        (["--replicas", "3", "--secret-file", "/none"], "--secret-file /none"),
    ):
        assert main([*asked, *more]) == 2
        error = capsys.readouterr().err
        assert hint in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        main(asked)
    assert ended.value.code == 2 and "--replicas" in capsys.readouterr().err
