"""The control plane under random faults, `make simulation` has more; a seed replays."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtft.elastic.store.api import Delete, Put
from dtft.elastic.store.membership import Membership
from dtft.elastic.store.view import View
from tests.simulation.faults import OF_PAIRS, Fault
from tests.simulation.found import FOUND
from tests.simulation.runs import run, run_seed
from tests.simulation.store import STORE
from tests.simulation.world import Settings, World

ROOT = Path(__file__).parents[2]
SEED = 1_000_000
"""Seeds from here on are those of `make test`."""


def simulate(*arguments: str) -> str:
    """What the command says; it runs by itself because sets must keep their order."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def test_a_job_without_faults_ends_with_its_last_step_stored() -> None:
    outcome = run(7, {"slots": 3, "spares": 1, "last_step": 20}, [])
    assert not outcome.violations
    assert '"status": "done", "step": 20' in outcome.result
    assert outcome.commits == 20


def test_a_seed_replays_event_by_event() -> None:
    for seed in (2, 5, 8):
        first, second = run_seed(seed, trace=True), run_seed(seed, trace=True)
        assert first.trace_hash == second.trace_hash != ""
        assert first == second


def test_a_host_tells_what_its_leader_lacks_and_nothing_more() -> None:
    world = World(Settings(seed=1, slots=3, spares=0, last_step=1000))
    told: list[dict[str, Any]] = []
    world.start_all()
    world.run(30.0)
    host = world.nodes["h1"].agent._follower
    host._report = lambda op, **fields: told.append(fields)
    newest, before = commits = list(host._commits)
    assert newest.step > before.step and set(newest.holders) == {"h0", "h1", "h2"}
    epoch = newest.generation, newest.attempt
    for counter, known in enumerate(((0, 0), epoch), start=1):
        for step in (-1, before.step, newest.step):
            told.clear()
            host.reform((1 << 60, counter), epoch=known, step=step)
            world.run(world.now + 1.0)
            (answer,) = [fields for fields in told if "holdings" in fields]
            expected = [it.to_json() for it in commits if it.step > step]
            assert answer["commits"] == expected
            assert ("assignment" in answer) == (known < epoch)


def test_a_host_remembers_each_step_once_though_it_is_released_twice() -> None:
    world = World(Settings(seed=1, slots=3, spares=0, last_step=1000))
    world.start_all()
    world.run(30.0)
    host = world.nodes["h1"].agent._follower
    newest = host._commits[0]
    late = [replace(newest, step=newest.step + more) for more in (1, 2, 3)]
    expected = [[late[0], newest], [late[1], late[0]], [late[2], late[1]]]
    for commit, kept in zip(late, expected, strict=True):  # the store is away
        host.release(commit.step, committed=False, commit=commit.to_json())
        assert host._commits == kept
    for commit in late:
        host.release(commit.step, committed=True, commit=commit.to_json())
        assert host._commits == [late[2], late[1]]


def test_a_killed_trainer_is_named_though_its_peers_are_heard_before() -> None:
    world = World(Settings(seed=1, slots=3, spares=0, last_step=1000))
    world.start_all()
    world.run(30.0)
    before = len(world.events)
    victim = world.nodes["h1"].trainers.trainer
    assert victim is not None and victim._formation is not None
    # It is dead, and its agent has not been told so yet.
    victim.alive, victim.code = False, -9
    victim._formation.lost(victim)
    world.run(world.now + 5.0)
    told = {kind: it for _, _, kind, it in world.events[before:] if "reason" in it}
    assert "failed at step" in told["forming"]["reason"]
    death = "trainer of slot 1 on h1 killed by signal 9"
    assert told["assignment"]["reason"] == death and not world.violations


def training_world(**settings: Any) -> World:
    """Three hosts train for 30 s; one is a spare in their world."""
    world = World(Settings(seed=1, slots=3, spares=1, last_step=1000, **settings))
    world.start_all()
    world.run(30.0)
    return world


def spare_of(world: World) -> str:
    (spare,) = [it.host for it in world.live if not it.agent._follower.has_slot]
    return spare


def last(world: World, kind: str) -> dict[str, Any]:
    return [it for _, _, name, it in world.events if name == kind][-1]


def test_a_host_that_lost_its_slot_ends_once_its_copies_are_not_needed() -> None:
    world = training_world()
    spare = spare_of(world)
    victim = world.nodes["h1" if spare != "h1" else "h2"]
    assert victim.trainers.trainer is not None
    victim.trainers.trainer.end(-9)
    world.run(world.now + 5.0, lambda: spare in last(world, "assignment")["slots"])
    step = last(world, "commit")["step"]
    assert victim.host not in last(world, "assignment")["slots"]
    victim.agent.depart()
    world.run(world.now + 5.0, lambda: not victim.alive)
    assert last(world, "commit")["step"] == step + 1 and not world.violations
    world.run(world.now + 5.0, lambda: last(world, "commit")["step"] > step + 3)
    assert last(world, "commit")["step"] > step + 3 and not world.violations


@pytest.mark.parametrize("sees_store", [True, False])
@pytest.mark.parametrize("arenas", [0, 1])
def test_a_host_that_was_stopped_is_ready_for_a_slot_again(
    arenas: int, sees_store: bool
) -> None:
    """It learns from the store, or from its leader, that it has lost its slot."""
    world = training_world(arenas=arenas)
    leader, spare = world.store_leader(), spare_of(world)
    back = next(it for it in world.live if it.host not in (leader, spare))
    back.loop.pause()
    world.run(world.now + 20.0)
    assert spare in last(world, "assignment")["slots"]
    if not sees_store:
        world.wire.cut(back.host, STORE)
        world.wire.cut(STORE, back.host)
    back.loop.resume()
    world.run(world.now + 20.0)
    ended = next(it for it in world.live if it.host not in (leader, back.host))
    assert ended.trainers.trainer is not None
    ended.trainers.trainer.end(-9)
    world.run(world.now + 3.0)
    assert back.host in last(world, "assignment")["slots"]
    assert "0 of 2 survivors restarted" in last(world, "recovery")["line"]
    assert not world.violations


@pytest.mark.parametrize("slots", [2, 3])
def test_a_job_whose_hosts_have_no_memory_ends_soon(slots: int) -> None:
    for seed in range(20):
        world = World(Settings(seed=seed, slots=slots, spares=0, last_step=10))
        world.memory_full |= {"h0", "h1", "h2"}
        world.start_all()
        world.run(60.0, lambda world=world: world.result is not None)
        assert world.result is not None and "no host can have a slot" in world.result
        kinds = [kind for _, _, kind, _ in world.events]
        assert kinds.count("assignment") == 1, "nothing is tried again in vain"


def test_a_leader_that_writes_without_its_key_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unfenced(self: Membership, view: View, changes: Sequence[Put | Delete]) -> bool:
        del view
        return self._store.txn([], list(changes))

    monkeypatch.setattr(Membership, "fenced", unfenced)
    found = [text for seed in range(60) for text in run_seed(seed).violations]
    assert any("(a)" in text for text in found)


@pytest.mark.parametrize("entry", FOUND, ids=[f"{it[0]}-{it[1]}" for it in FOUND])
def test_what_has_failed_does_not_fail_again(entry: tuple) -> None:
    _, seed, sizes, faults = entry
    for again in range(3):
        outcome = run(seed + again, sizes, faults)
        assert not outcome.violations, (seed + again, outcome.violations)


@pytest.mark.parametrize("what", OF_PAIRS)
def test_two_hosts_that_do_not_reach_each_other(what: str) -> None:
    sizes = {"slots": 3, "last_step": 12, "storage_interval": 5}
    cut = Fault(who="follower", what=what, phase="steady")
    told: list[str] = []
    outcome = run(7, {**sizes, "spares": 1}, [cut], show=told.append)
    assert not outcome.violations and '"status": "done"' in outcome.result
    assert any(" do not reach each other: h" in line for line in told)
    told.clear()
    outcome = run(7, {**sizes, "spares": 0}, [cut], show=told.append)
    assert not outcome.violations and not outcome.result  # and nothing is done in vain
    assert sum("forming" in line for line in told) < 4
    heals = Fault(who="follower", what=what, phase="steady", seconds=45.0)
    told.clear()
    outcome = run(7, {**sizes, "spares": 0}, [heals], show=told.append)
    assert not outcome.violations and '"status": "done"' in outcome.result
    assert any(" reach each other again" in line for line in told)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_random_schedules_and_a_sample_of_the_matrix() -> None:
    """A fixed number, so that every machine runs the same."""
    told = simulate("--random", "240", "--seed", str(SEED))
    told += simulate("--matrix", "--shuffle", "1", "--first", "120")
    assert re.findall(r"^(\d+) schedules", told, re.MULTILINE) == ["240", "120"]
