"""Kills real processes; `make test` runs two of these drills, `make drills` the rest.

In `make test` one of the two has programs that are compiled as users compile them.
"""

import random
import re

import pytest

from dtft.elastic.faults.schedule import PHASES
from dtft.elastic.leader.events import read_events
from tests.support.certificates import certificate
from tests.support.harness import (
    DIGITS,
    FSDP,
    HYBRID,
    REPOSITORY,
    SMALL_FSDP,
    STAGES,
    drill,
    dtft,
    is_rung,
)

pytestmark = [pytest.mark.drill, pytest.mark.timeout(450)]
every = pytest.mark.drill_all
as_users_compile = pytest.mark.usefixtures("default_flags")
DEMO = "digits_cnn --hosts 3 --spares 1 --fault kill-host:1@150"


def only(record: dict) -> dict:
    (recovery,) = record["recoveries"]
    return recovery


@every
def test_the_demo(tmp_path):
    assert f"dtft drill {DEMO} " in (REPOSITORY / "Makefile").read_text()
    recovery = only(record := drill(tmp_path, *DEMO.split()))
    assert recovery["rung"] == 0 and recovery["bytes_from_storage"] == 0
    assert recovery["survivors"] == 2 and recovery["survivors_restarted"] == 0
    assert recovery["steps_lost"] <= 1 and record["final_step"] == 300
    assert record["test_accuracy"] > 0.95


@as_users_compile
def test_a_dead_trainers_slot_goes_to_a_spare_and_its_host_is_the_next_spare(
    tmp_path, control
):
    """Each host has a half of the state, and a copy of the other."""
    record = drill(
        *(tmp_path, *SMALL_FSDP, *control("small-fsdp"), "--spares", "1"),
        *("--fault", "kill-trainer:1@10", "--fault", "kill-host:0@20"),
    )
    trainer, host = record["recoveries"]
    assert is_rung(trainer, 2) and trainer["generation"] == 2
    assert trainer["bytes_from_peers"] > 0 and trainer["bytes_from_storage"] == 0
    assert trainer["survivors"] == 1 and trainer["survivors_restarted"] == 0
    # Which of the three hosts is the spare is decided by who registers first.
    moved = r"trainer of slot 1 on (\S+) killed by signal 9; (\S+) has slot 1 of \1"
    hosts = re.fullmatch(moved, trainer["cause"])
    assert hosts and hosts[1] != hosts[2], trainer["cause"]
    assert is_rung(host, 2) and host["generation"] == 3
    assert host["bytes_from_peers"] > 0 and host["bytes_from_storage"] == 0
    assert host["survivors"] == 1 and host["survivors_restarted"] == 0
    assert host["steps_lost"] <= 1 and record["final_step"] == 30
    assert "training again after" in record["output"]


@every
@pytest.mark.parametrize("slot", [0, 2])
def test_a_lost_host_is_replaced_from_a_peers_memory(tmp_path, control, slot):
    fault = f"kill-host:{slot}@30"
    record = drill(
        tmp_path, *DIGITS, *control("digits"), "--spares", "1", "--fault", fault
    )
    recovery = only(record)
    assert is_rung(recovery, 2) and recovery["generation"] == 2
    assert recovery["bytes_from_peers"] > 0 and recovery["bytes_from_storage"] == 0
    assert recovery["steps_lost"] <= 1 and record["test_accuracy"] > 0.9
    assert "training again after" in record["output"]


@every
def test_a_dead_trainer_costs_no_network_without_a_spare(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits")),
        *("--spares", "0", "--fault", "kill-trainer:1@30"),
    )
    recovery = only(record)
    assert is_rung(recovery, 1) and recovery["generation"] == 1
    assert recovery["bytes_from_peers"] == recovery["bytes_from_storage"] == 0
    assert "trainer of slot 1" in recovery["cause"]


@every
@pytest.mark.parametrize(
    ("fault", "rung", "restarted"),
    [
        # Without a spare not kill-trainer: gloo, unlike NCCL, makes no mesh twice.
        ("kill-host:1@20", 0, 0),
        ("kill-trainer:1@20", 0, 0),
        ("kill-host:0@20", 2, 1),  # it served the processes of all
    ],
)
def test_processes_of_one_service_stay(tmp_path, monkeypatch, fault, rung, restarted):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # otherwise as on GPUs
    record = drill(
        *(tmp_path, "digits_cnn", "--hosts", "2", "--spares", "1"),
        *("--cluster.devices_per_host", "-1", "--stop.steps", "40", "--fault", fault),
    )
    recovery = only(record)
    assert (recovery["rung"], recovery["survivors_restarted"]) == (rung, restarted)
    assert recovery["bytes_from_storage"] == 0 and record["bit_identical"]


@every
def test_trainers_restart_where_they_may_not_stay(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits"), "--spares", "1"),
        *("--fault", "kill-host:1@20", "--cluster.hot_swap", "False"),
    )
    recovery = only(record)
    assert recovery["rung"] == 2 and recovery["bytes_from_storage"] == 0
    assert recovery["survivors_restarted"] == recovery["survivors"] == 2
    assert "cluster.hot_swap" in recovery["restarted_because"]


@every
def test_both_holders_of_a_slice_lost_falls_to_storage(tmp_path, control):
    record = drill(
        *(tmp_path, *FSDP, *control("fsdp")),
        *("--spares", "2", "--fault", "kill-host:2+3@45:stored"),
    )
    recovery = only(record)
    assert recovery["rung"] == 3 and recovery["bytes_from_storage"] > 0
    assert recovery["restored_step"] > 0
    assert "the 2 holders of" in record["output"]
    assert "written every 10 steps" in record["output"]


def test_a_corrupt_copy_is_refused_and_another_taken(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits"), "--spares", "1"),
        *("--fault", "corrupt:0@30", "--fault", "kill-host:1@30"),
    )
    recovery = only(record)
    assert is_rung(recovery, 2) and recovery["corrupt_copies"]
    assert recovery["bytes_from_storage"] == 0


@every
def test_a_spare_of_the_lost_rack_is_taken_and_copies_are_pushed_again(
    tmp_path, control
):
    racks = {0: "a", 1: "a", 2: "b", 3: "b", 4: "b", 5: "a"}
    domains = tmp_path / "domains"
    domains.write_text("".join(f"host-{i} rack={r}\n" for i, r in racks.items()))
    tls = certificate(tmp_path, "job")
    record = drill(
        *(tmp_path, *FSDP, *control("fsdp"), "--spares", "2"),
        *("--checkpoint.interval", "5", "--domain-file", str(domains)),
        *("--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)),
        *("--fault", "kill-host:1@32"),
    )
    recovery = only(record)
    assert is_rung(recovery, 2) and recovery["healthy"]
    assert recovery["bytes_re_replicated"] > 0
    assert "healthy again: every slice has 2 copies" in record["output"]
    formed = [
        event["slots"]
        for event in read_events(tmp_path / "faulted")
        if event["event"] == "assignment"
    ]
    (taken,) = set(formed[-1]) - set(formed[0])
    (gone,) = set(formed[0]) - set(formed[-1])
    rack = {f"host-{number}": name for number, name in racks.items()}
    assert rack[taken] == rack[gone]


@every
def test_no_good_copy_left_falls_to_storage(tmp_path, control):
    record = drill(
        *(tmp_path, *FSDP, *control("fsdp"), "--spares", "1"),
        *("--fault", "corrupt:1@45", "--fault", "kill-host:0@45:stored"),
    )
    assert only(record)["rung"] == 3 and only(record)["corrupt_copies"]


@every
def test_the_leader_is_an_ordinary_host(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits")),
        *("--spares", "1", "--fault", "kill-leader@30"),
    )
    assert (
        any(is_rung(only(record), rung) for rung in (1, 2))
        and only(record)["bytes_from_storage"] == 0
    )


@every
def test_two_hosts_one_after_the_other(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits"), "--spares", "2"),
        *("--fault", "kill-host:0@20", "--fault", "kill-host:1@40"),
    )
    assert [is_rung(it, 2) for it in record["recoveries"]] == [True, True]


@every
def test_two_hosts_at_once_with_three_copies(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits"), "--checkpoint.copies", "3"),
        *("--spares", "2", "--fault", "kill-host:0+1@30"),
    )
    assert is_rung(only(record), 2) and only(record)["bytes_from_storage"] == 0


@every
@pytest.mark.parametrize("name, job", [("fsdp", FSDP), ("hybrid", HYBRID)])
def test_sharded_state_survives_a_host(tmp_path, control, name, job):
    record = drill(
        *(tmp_path, *job, *control(name)),
        *("--spares", "2", "--fault", "kill-host:1@45"),
    )
    assert is_rung(only(record), 2) and only(record)["bytes_from_storage"] == 0


@every
def test_a_spare_has_the_frozen_part_of_a_slot(tmp_path):
    """A sixth of the state changes with each step: only that comes from the peer."""
    recovery = only(
        drill(
            tmp_path,
            *("tests/support/frozen_base.py", "--hosts", "2", "--spares", "1"),
            *("--mesh.replica", "1", "--mesh.fsdp", "2"),
            *("--fault", "kill-host:0@900"),
        )
    )
    assert is_rung(recovery, 2) and recovery["rung"] == 0
    whole = recovery["bytes_from_own_memory"] + recovery["bytes_from_peers"]
    assert 0 < recovery["bytes_from_peers"] < whole / 10


@every
def test_an_automatic_interval_survives_a_host(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, "--stop.steps", "150", *control("automatic")),
        *("--checkpoint.interval", "auto", "--checkpoint.max_interval", "16"),
        *("--spares", "1", "--fault", "kill-host:1@90"),
    )
    recovery = only(record)
    assert is_rung(recovery, 2) and recovery["bytes_from_storage"] == 0
    assert recovery["steps_lost"] <= 32 and record["final_step"] == 150
    assert "a snapshot every 16 steps" in record["output"]
    commits = [
        event["step"]
        for event in read_events(tmp_path / "faulted")
        if event["event"] == "commit"
    ]
    assert {48, 96, 112, 128, 144, 150} <= set(commits) and len(commits) < 75


@every
def test_moments_of_a_lost_replica_come_from_a_peers_memory(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("operands"), "--spares", "1"),
        *("--fault", "kill-host:1@40", "--optim.sync.moments", "operands"),
    )
    assert is_rung(only(record), 2) and only(record)["bytes_from_storage"] == 0


@every
def test_hybrid_sharding_without_both_holders_falls_to_storage(tmp_path, control):
    record = drill(
        *(tmp_path, *HYBRID, *control("hybrid")),
        *("--spares", "2", "--fault", "kill-host:1+3@45:stored"),
    )
    assert only(record)["rung"] == 3 and only(record)["bytes_from_storage"] > 0


@every
def test_without_a_spare_the_job_waits_for_a_host(tmp_path, control):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits")),
        *("--spares", "0", "--rejoin", "3", "--fault", "kill-host:1@30"),
    )
    assert "no spare is left for slot 1 (was host-1): the job waits" in record["output"]
    assert is_rung(only(record), 2)


@every
def test_training_goes_on_while_the_store_is_away(tmp_path, control):
    record = drill(
        # The store is away for 5 s and its start: some 300 steps on a fast machine.
        *(tmp_path, "digits_cnn", "--hosts", "3", "--stop.steps", "900"),
        *("--checkpoint.storage_interval", "100", *control("digits-900")),
        *("--spares", "1", "--fault", "kill-store@30"),
    )
    (fault,) = record["faults"]
    assert fault["steps_during_outage"] > 1 and fault["commits_during_outage"] == 0
    assert fault["commits_after_outage"] > 1


def seeded(seed: int) -> list[str]:
    """Random step, slot and phase; every phase comes three times in 20."""
    generator = random.Random(seed)
    slot, step = generator.randrange(3), generator.randrange(10, 45)
    phases = [phase for phase in PHASES if phase not in ("stored", "healed")]
    phase = phases[seed % len(phases)] if seed < 18 else None
    faults = [f"kill-host:{slot}@{step}" + (f":{phase}" if phase else "")]
    if phase == "recovery":
        first = (slot + 1 + generator.randrange(2)) % 3
        faults.insert(0, f"kill-host:{first}@{max(1, step - 1)}")
    return [part for fault in faults for part in ("--fault", fault)]


@every
@pytest.mark.parametrize("seed", range(20))
def test_any_moment(tmp_path, control, seed):
    record = drill(
        *(tmp_path, *DIGITS, *control("digits"), "--spares", "2"),
        *("--seed", str(seed), *seeded(seed)),
    )
    assert record["recoveries"], record["output"]
    assert record["bytes_from_storage"] == 0


@every
@pytest.mark.parametrize("given", ["auto", "file"])
def test_a_planned_job_replays_its_plan(tmp_path, control, given):
    plan = "auto"
    if given == "file":
        plan = str(tmp_path / "plan.json")
        pins = ("--pin", "replica=3", "--pin", "microbatches=2")
        made = ("plan", "digits_cnn", "--cluster", "3x1xcpu", *pins, "--json", plan)
        done = dtft(*made, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    record = drill(
        *(tmp_path, *DIGITS, *control(f"digits-plan-{given}"), "--plan", plan),
        *("--spares", "1", "--fault", "kill-host:1@30"),
    )
    assert is_rung(only(record), 2) and only(record)["bytes_from_storage"] == 0
    said = re.findall(r"plan \S+: (.*); predicted", record["output"])
    assert len(said) >= 2 and len(set(said)) == 1


@every
def test_a_lost_stage_comes_from_the_same_stage_of_the_other_replica(tmp_path, control):
    record = drill(
        *(tmp_path, *STAGES, *control("stages")),
        *("--spares", "1", "--fault", "kill-host:1@10"),
    )
    recovery = only(record)
    assert is_rung(recovery, 2) and recovery["bytes_from_storage"] == 0
    first, last = [
        event["slots"]
        for event in read_events(tmp_path / "faulted")
        if event["event"] == "assignment"
    ]
    (spare,) = {f"host-{number}" for number in range(5)} - {*first}
    assert last == [first[0], spare, *first[2:]]
    senders = recovery["senders"]
    # The spare may have prefetched scalars that training does not change.
    prefetched = sum(senders.values()) - recovery["bytes_from_peers"]
    assert recovery["bytes_from_peers"] > 200_000 and 0 <= prefetched < 100
    # Scalars, such as the step, are the same on all hosts; anybody may send those.
    assert senders[first[3]] > 0.999 * recovery["bytes_from_peers"]
