"""Jobs that grow and shrink while they train; `make test` runs the first drill."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dtft.checkpoint.storage.step_directories import storage_steps
from dtft.elastic.leader.events import read_events
from dtft.elastic.processes import process_alive
from tests.drills.test_checkpoint_commands import store_and_job
from tests.support.harness import (
    DIGITS,
    HYBRID,
    STAGES,
    TWO,
    drill,
    dtft,
    is_rung,
    launched,
)

pytestmark = [pytest.mark.drill, pytest.mark.timeout(400)]
every = pytest.mark.drill_all
LONG = ("--stop.steps", "600")
"""Time to compile for another size while the job trains: 2 to 5 s here."""
TWICE = ("--stop.steps", "1200")
"""Time for a second size after that; steps of one replica take 9 ms."""


def sizes(record: dict[str, Any]) -> list[list[int]]:
    return [it["hosts"] for it in record["resized"]]


def test_a_job_grows_from_its_peers_memory(tmp_path, control):
    record = drill(
        *(tmp_path, *TWO, *LONG, *control("digits-2-long"), "--spares", "1"),
        *("--fault", "scale:3@20"),
    )
    (recovery,) = record["recoveries"]
    assert is_rung(recovery, 2) and recovery["bytes_from_peers"] > 0
    assert recovery["bytes_from_storage"] == 0 and recovery["steps_lost"] == 0
    (grown,) = record["resized"]
    assert grown["hosts"] == [2, 3] and grown["leaves"] > 30
    assert grown["control_root"] == grown["committed_root"] == grown["restored_root"]
    (asked,) = record["faults"]
    assert (asked["reply"]["before"], asked["reply"]["replicas"]) == (2, 3)


@every
def test_a_job_shrinks_and_grows_again(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *TWICE, *control("digits-twice")),
        *("--fault", "scale:1@20", "--fault", "scale:3@350"),
    )
    assert sizes(record) == [[3, 1], [1, 3]]
    assert [is_rung(it, n) for n, it in enumerate(record["recoveries"], 1)] == [
        True
    ] * 2
    assert record["bytes_from_storage"] == 0


@every
def test_a_job_grows_and_shrinks(tmp_path, control):
    record = drill(
        *(tmp_path, *TWO, *TWICE, *control("digits-2-twice"), "--spares", "1"),
        *("--fault", "scale:3@20", "--fault", "scale:1@350"),
    )
    assert sizes(record) == [[2, 3], [3, 1]] and record["bytes_from_storage"] == 0


@every
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_without_a_spare_the_job_goes_on_with_fewer_replicas(tmp_path, control, slot):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits-min"), "--min-replicas", "2"),
        *("--fault", f"kill-host:{slot}@30"),
    )
    assert sizes(record) == [[3, 2]] and record["bytes_from_storage"] == 0
    assert "2 hosts train instead of 3" in record["output"]


@every
def test_it_grows_back_when_the_host_returns(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits-min-400"), "--min-replicas", "2"),
        *("--stop.steps", "400", "--rejoin", "0.5", "--fault", "kill-host:1@30"),
    )
    assert sizes(record) == [[3, 2], [2, 3]] and record["bytes_from_storage"] == 0


@every
def test_replica_groups_of_two_hosts(tmp_path, control):
    record = drill(
        *(tmp_path, *HYBRID, *control("hybrid-48"), "--spares", "2"),
        *("--data.global_batch", "48", "--model.width", "32", "--stop.steps", "300"),
        *("--fault", "scale:3@20", "--fault", "scale:1@200"),
    )
    assert sizes(record) == [[4, 6], [6, 2]] and record["bytes_from_storage"] == 0


@every
def test_replica_groups_of_two_stages(tmp_path, control):
    record = drill(
        *(tmp_path, *STAGES, *control("stages-600"), "--stop.steps", "600"),
        *("--fault", "scale:1@8", "--fault", "scale:2@200"),
    )
    assert sizes(record) == [[4, 2], [2, 4]] and record["bytes_from_storage"] == 0
    shrunk, grown = record["recoveries"]
    assert is_rung(shrunk, 1) and not shrunk["senders"]
    assert is_rung(grown, 2) and sum(grown["senders"].values()) > 400_000


@every
def test_a_group_that_lost_a_host_is_dissolved(tmp_path, control):
    record = drill(
        *(tmp_path, *HYBRID, *control("hybrid-min"), "--min-replicas", "1"),
        *("--fault", "kill-host:1@30"),
    )
    (recovery,) = record["recoveries"]
    assert sizes(record) == [[4, 2]] and is_rung(recovery, 1)
    assert recovery["bytes_from_storage"] == 0


@every
def test_a_host_lost_while_the_job_grows(tmp_path, control):
    record = drill(
        *(tmp_path, *TWO, *LONG, *control("digits-2-long"), "--spares", "1"),
        *("--fault", "scale:3@20", "--fault", "kill-host:2@20:recovery"),
    )
    reply = record["faults"][0]["reply"]
    assert "the job trains on 2 hosts, not on 3" in reply["error"]
    assert record["bytes_from_storage"] == 0


@every
def test_the_leader_lost_while_the_job_grows(tmp_path, control):
    record = drill(
        *(tmp_path, *TWO, *LONG, *control("digits-2-long"), "--spares", "2"),
        *("--fault", "scale:3@20", "--fault", "kill-leader@20:recovery"),
    )
    assert record["faults"][0]["reply"]["replicas"] == 3
    assert record["resized"][-1]["hosts"][-1] == 3
    assert record["bytes_from_storage"] == 0


def replanned(record: dict[str, Any]) -> list[str]:
    """What the log says of plans that another number of devices changed."""
    return re.findall(r"plan \S+ \((.*?); was .*?\): ", record["output"])


@every
def test_a_files_plan_has_fewer_replicas_and_more_again(tmp_path, control):
    plan = str(tmp_path / "plan.json")
    made = ("plan", "digits_cnn", "--cluster", "3x1xcpu", "--pin", "replica=3")
    done = dtft(*made, "--json", plan, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    record = drill(
        *(tmp_path, *DIGITS, *control("digits-file"), "--plan", plan),
        *("--fault", "scale:1@20", "--fault", "scale:3@40"),
    )
    assert sizes(record) == [[3, 1], [1, 3]] and record["bytes_from_storage"] == 0
    assert replanned(record)[-2:] == [
        "replicas changed for 1 devices",
        "replicas changed for 3 devices",
    ]


@every
def test_the_command_on_a_live_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(run, "--spares", "1") as job:
        end = time.monotonic() + 240
        while not storage_steps(run / "checkpoints"):
            assert time.monotonic() < end and job.runs
            time.sleep(0.1)
        asked = store_and_job(run)
        for replicas, code, hint in (
            ("3", 0, "trains with 3 replicas (3 hosts) instead of 2"),
            ("3", 0, "nothing was changed"),
            ("5", 2, "Nearest allowed: 4 or 6"),
            ("4", 1, "but 3 are here. Start 1 more"),
            ("1", 0, "trains with 1 replicas (1 hosts) instead of 3"),
        ):
            done = dtft("scale", *asked, "--replicas", replicas, timeout=200)
            assert done.returncode == code, done.stdout + done.stderr
            assert hint in done.stdout + done.stderr
        done = dtft("scale", *asked, "--replicas", "2", "--json", timeout=200)
        assert json.loads(done.stdout)["replicas"] == 2
    assert not [e for e in read_events(run) if e.get("bytes_from_storage")]


@every
def test_a_drained_host_leaves_and_costs_no_step(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits"), "--spares", "1"),
        *("--fault", "drain:1@20"),
    )
    (fault,), (recovery,) = record["faults"], record["recoveries"]
    assert recovery["rung"] == 0 and recovery["survivors_restarted"] == 0
    assert recovery["steps_lost"] == recovery["bytes_from_storage"] == 0
    assert recovery["bytes_from_peers"] > 0
    assert f"{fault['reply']['host']} (slot 1) leaves the job" in recovery["cause"]
    # With a leader that leaves, the request is repeated to the next one.
    led = "leads from now on" in recovery["cause"]
    assert fault["reply"]["slot"] == 1 and fault["reply"]["asked_again"] == led


def agent_pid(run: Path, host: str) -> int:
    """The process of a host of a launched job."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if {"agent", str(run), host} <= {*words}:
                return int(path.parent.name)
    raise AssertionError(f"no agent of {host}")


def wait_for(run: Path, kind: str, number: int = 1) -> list[dict[str, Any]]:
    """The job's first events of a kind, once there are so many."""
    end = time.monotonic() + 120
    while True:
        found = [it for it in read_events(run) if it["event"] == kind]
        if len(found) >= number:
            return found
        assert time.monotonic() < end, f"no {kind} in time"
        time.sleep(0.1)


@every
@pytest.mark.parametrize("leads", [True, False])
def test_a_signal_to_an_agent_hands_its_slot_over(tmp_path, leads):
    run = tmp_path / "run"
    with launched(run, "--spares", "1") as job:
        (*_, last) = wait_for(run, "commit", 20)
        (slots,) = [it["slots"] for it in wait_for(run, "assignment")]
        others = [host for host in slots if host != last["by"]]
        host = last["by"] if leads else others[0]
        os.kill(agent_pid(run, host), signal.SIGTERM)
        (recovery,) = wait_for(run, "recovery")
        after = len(wait_for(run, "commit"))
        wait_for(run, "commit", after + 20)
        assert job.runs
    assert recovery["rung"] == 0 and recovery["survivors_restarted"] == 0
    assert recovery["steps_lost"] == recovery["bytes_from_storage"] == 0
    slot = f" (slot {slots.index(host)})" if host in slots else ""
    assert f"{host}{slot} leaves the job" in recovery["fault"]
    assert f"{host} left job" in job.output


@every
@pytest.mark.parametrize("hot_swap", ["True", "False"])
def test_the_command_takes_a_spare_out_of_a_live_job(tmp_path, hot_swap):
    run = tmp_path / "run"
    with launched(run, "--spares", "1", "--cluster.hot_swap", hot_swap) as job:
        wait_for(run, "commit", 20)
        (slots,) = [it["slots"] for it in wait_for(run, "assignment")]
        (spare,) = {"host-0", "host-1", "host-2"} - {*slots}
        pid, asked = agent_pid(run, spare), store_and_job(run)
        done = dtft("drain", spare, *asked, timeout=100)
        assert done.returncode == 0 and "it had no slot" in done.stdout, done.stderr
        end = time.monotonic() + 30
        while process_alive(pid):
            assert time.monotonic() < end, "its agent goes on"
            time.sleep(0.1)
        done = dtft("drain", slots[0], *asked, timeout=100)
        assert done.returncode == 1 and "no host is left" in done.stderr
        assert dtft("drain", "host-9", *asked, timeout=100).returncode == 2
        assert job.runs and len(wait_for(run, "assignment")) == 1
