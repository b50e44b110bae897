"""One of four trainers of `memory_tier_vs_orbax.py`: saves and trains, or restores.

Arguments: RANK NUM_PROCESSES ADDRESS TASK, the task as JSON. It answers with the times
that it measured and, on the machine's monotonic clock, when it did what. The same code
drives both memory tiers.
"""

import json
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from jax.experimental.multihost_utils import sync_global_devices

from experiments import worlds
from experiments.tier_memory import warm_memory
from experiments.tier_sides import SIDES, Tier
from experiments.tier_state import (
    State,
    Step,
    abstract_state,
    digests,
    make_mesh,
    make_state,
)
from experiments.tier_task import STEPS_PER_BLOCK, TURNS, Task, host_bytes

TOUCHED = 2
"""Times the state on a host that each trainer touches before it restores."""


def saving(task: Task, rank: int, mesh: Any, abstract: dict[str, Any]) -> dict:
    """Trains without the tier, opens it, saves, and trains in turns without and with.

    Every step changes all bytes, so no tier can keep what it has.
    """
    step = Step(mesh)
    state = step.calibrate(make_state(abstract), task.step_s)
    found: dict[str, Any] = {"stall_s": [], "save_s": [], "off_s": [], "on_s": []}
    begun = time.monotonic()
    state, seconds = _train(step, state)
    found |= {"off_window": (begun, time.monotonic()), "off_s": [seconds]}
    tier = SIDES[task.side](Path(task.directory), rank, abstract, task.last)
    tier.settle()
    sync_global_devices("settled")
    last = 0
    for last in range(1, task.saves + 1):
        state = step(state)
        sync_global_devices(f"save {last}")
        begun = time.monotonic()
        tier.save(last, state)
        found["stall_s"].append(time.monotonic() - begun)
        tier.wait()
        found["save_s"].append(time.monotonic() - begun)
    for turn in range(TURNS):
        if turn:
            state, seconds = _train(step, state)
            found["off_s"].append(seconds)
        state, seconds = _train(step, state, tier, last)
        last += STEPS_PER_BLOCK
        found["on_s"].append(seconds)
    tier.wait()
    found["on_window"] = (found["off_window"][1], time.monotonic())
    sync_global_devices("saved")
    return {**found, "step": last, "digests": digests(state)}


def _train(
    step: Step, state: State, tier: Tier | None = None, last: int = 0
) -> tuple[State, float]:
    """Some steps, each saved if there is a tier; and the seconds per step."""
    sync_global_devices("train")
    begun = time.monotonic()
    for number in range(last + 1, last + 1 + STEPS_PER_BLOCK):
        state = step(state)
        if tier is not None:
            tier.await_turn()
            tier.save(number, state)
    seconds = (time.monotonic() - begun) / STEPS_PER_BLOCK
    if tier is not None:
        tier.wait()
    return state, seconds


def restoring(task: Task, rank: int, mesh: Any, abstract: dict[str, Any]) -> dict:
    """Opens the tier and restores; an error is an answer too."""
    del mesh
    warm_memory(TOUCHED * host_bytes(task.layout, task.mib))
    sync_global_devices("restore")
    begun = time.monotonic()
    try:
        tier = SIDES[task.side](Path(task.directory), rank, abstract, task.last)
        opened = time.monotonic()
        state, step = tier.restore()
    except Exception as error:
        traceback.print_exc()
        text = str(error).replace(task.directory, "DIRECTORY").partition("\n")[0]
        return {"error": f"{type(error).__name__}: {text[:200]}"}
    ended = time.monotonic()
    found = {"window": (begun, ended), "constructor_s": opened - begun, "step": step}
    sync_global_devices("restored")
    return {**found, "digests": digests(state)}


def main(rank: int, num: int, address: str, text: str) -> None:
    """Joins, does the task, answers."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    worlds.join(rank, num, address)
    task = Task(**json.loads(text))
    mesh = make_mesh(task.layout)
    abstract = abstract_state(mesh, task.layout, task.mib)
    phases = {"save": saving, "restore": restoring}
    worlds.answer(phases[task.phase](task, rank, mesh, abstract))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
