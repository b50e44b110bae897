"""A stock jax.distributed job beside agents that serve: hosts die, all is restarted.

The user's script is `stock_job.py`; real etcd, agents, processes, gloo.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dtft.checkpoint.storage.step_directories import storage_steps
from dtft.cli.commands import HostFlags
from dtft.drills.options import own_certificate
from dtft.elastic.leader.events import read_events
from tests.drills.serving import ServedJob
from tests.support.harness import dtft

pytestmark = [pytest.mark.drill, pytest.mark.timeout(400)]


@pytest.fixture
def job(tmp_path: Path, memory: Path) -> Iterator[ServedJob]:
    with ServedJob(tmp_path, memory) as made:
        yield made


def goes_on(job: ServedJob, step: int, processes: int = 2) -> None:
    """Every process has restored `step`, and has what was saved there, bit for bit."""
    for index in range(processes):
        found = job.heard(index)
        assert found["restored"] == step, job.log(f"process-{index}")
        assert found["digest"] == job.digest(step, index)
        assert found["seen"] == 6 * (step + 1) and found["bare"]


def last_recovery(job: ServedJob) -> dict[str, Any]:
    events = read_events(job.directory / "run")
    return [event for event in events if event["event"] == "recovery"][-1]


def asked(job: ServedJob, action: str, *more: str) -> str:
    done = dtft("checkpoint", action, *job.reached_by, *more, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(job: ServedJob, *more: str) -> str:
    done = dtft("scale", *job.reached_by, *more, timeout=100)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def test_a_lost_host_comes_back_from_a_peers_memory_then_all_from_storage(
    job: ServedJob,
) -> None:
    for name in ("host-0", "host-1", "spare"):
        job.start_agent(name)
    job.start_processes(["host-0", "host-1"], 4, "hang")
    for expected in ({"restored": None}, {"waits": True}):
        for index in range(2):
            assert job.heard(index) == {"index": index, **expected}
    found = json.loads(asked(job, "ls", "--json"))
    assert found["commits"][0]["step"] == 3
    assert found["commits"][0]["health"] == "healthy"
    assert "host-0" in asked(job, "show")
    assert "good copies or more of each" in asked(job, "verify")

    # One host is gone with its memory. The survivor becomes another process.
    job.kill_host("host-0")
    job.kill_process(0)
    job.kill_process(1)
    job.start_processes(["host-1", "spare"], 2)
    goes_on(job, 3)
    recovery = last_recovery(job)
    assert recovery["source"] == "memory" and recovery["bytes_from_storage"] == 0
    assert recovery["bytes_from_peers"] > 0 and recovery["steps_lost"] == 0
    assert 3 not in storage_steps(job.directory / "steps")  # storage cannot have helped
    for index in range(2):
        assert job.heard(index)["closed"]
    job.ended()
    readable(job.directory / "steps", 5)

    # Every holder is gone: storage has what `close` left there.
    for name in ("host-1", "spare"):
        job.kill_host(name)
    for name in ("new-0", "new-1"):
        job.start_agent(name)
    job.start_processes(["new-0", "new-1"], 1)
    goes_on(job, 5)
    assert last_recovery(job)["source"] == "storage"
    for index in range(2):
        assert job.heard(index)["closed"]
    job.ended()


def readable(directory: Path, step: int) -> None:
    """Stock Orbax reads a step of the job's two processes into this one."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)

    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(directory, item_handlers=handler) as stock:
        target = {
            "state": jax.tree.map(struct, stock.item_metadata(step)["state"]),
            "key": jax.random.key(0),
            "seen": 0,
            "table": np.zeros(3, np.int64),
        }
        found = stock.restore(step, args=ocp.args.StandardRestore(target))
    assert found["seen"] == 6 * (step + 1)
    assert found["state"]["0"]["kernel"]["value"].shape == (12, 6)


@pytest.mark.drill_all
def test_memory_serves_other_shardings_after_a_host_was_lost(job: ServedJob) -> None:
    """Three processes by rows become three by columns, in another order; over TLS,
    and with racks, of which two hosts share one."""
    tls = own_certificate(HostFlags(), job.directory)
    racks = {"host-0": "r0", "host-1": "r0", "host-2": "r1", "spare": "r0"}
    for name, rack in racks.items():
        job.start_agent(name, *tls, "--domain", f"rack={rack}")
    job.start_processes(["host-0", "host-1", "host-2"], 3, "hang")
    for _ in range(2):
        for index in range(3):
            job.heard(index)
    shown = json.loads(asked(job, "show", "--json"))
    for piece in shown["slices"]:
        assert {racks[host] for host in piece["hosts"]} == {"r0", "r1"}
    saved = json.loads((job.directory / "digests" / "whole.0").read_text())
    job.kill_host("host-1")
    for index in range(3):
        job.kill_process(index)

    job.start_processes(["spare", "host-2", "host-0"], 2, "turned")
    for index in range(3):
        found = job.heard(index)
        assert found["restored"] == 2 and found["seen"] == 18
        assert found["digest"] != job.digest(2, index)
        assert found["whole"] == saved
    recovery = last_recovery(job)
    assert recovery["source"] == "memory" and recovery["bytes_from_storage"] == 0
    assert 2 not in storage_steps(job.directory / "steps")  # storage cannot have helped
    for index in range(3):
        assert job.heard(index)["closed"]
    job.ended()
    readable(job.directory / "steps", 4)  # saved in the new layout


@pytest.mark.drill_all
def test_processes_that_are_restarted_find_their_steps_in_their_own_hosts(
    job: ServedJob,
) -> None:
    hosts = ["host-0", "host-1", "host-2"]
    for name in hosts:
        job.start_agent(name, "--nixl")  # TCP where NIXL is not installed
    job.start_processes(hosts, 3, "hang")
    for _ in range(2):
        for index in range(3):
            job.heard(index)
    assert "--serve-only" in refused(job, "--replicas", "4")
    assert "step 2 was written" in asked(job, "export")
    for index in range(3):
        job.kill_process(index)
    assert "step 2 was written" in asked(job, "export")  # by agents that nobody uses
    job.start_processes(hosts, 2)
    goes_on(job, 2, processes=3)
    recovery = last_recovery(job)
    assert recovery["rung"] == 1 and recovery["bytes_from_peers"] == 0
    for index in range(3):
        assert job.heard(index)["closed"]
    job.ended()
