"""One run: a job, a schedule of faults, the invariants, and what came of it."""

import gc
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.faults import (
    Fault,
    FaultInjector,
    may_end_with_error,
    random_schedule,
)
from tests.simulation.invariants import COMMIT_S, Invariants
from tests.simulation.world import Settings, World

LONGEST_S = 400.0
LEAVE_S = 40.0
"""Agents that live and reach the store have ended so long after the job."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one run."""

    seed: int
    faults: tuple[str, ...]
    violations: tuple[str, ...]
    virtual_s: float
    events: int
    commits: int
    result: str
    trace_hash: str = ""


def run(
    seed: int,
    sizes: dict[str, Any],
    faults: list[Fault],
    *,
    trace: bool = False,
    show: Callable[[str], None] | None = None,
) -> Outcome:
    """Runs one schedule until the job has ended, or has had time enough."""
    known = tuple(filter(None, os.environ.get("DTFT_SIMULATION_KNOWN", "").split(";")))
    # A quarter of the seeds is of trainers with accelerators; in half of these all
    # trainers restart.
    cpu_devices = 0 if seed % 4 == 3 else 16
    # Half of the hosts have memory for one arena only.
    memory = {"arenas": seed // 8 % 2}
    sizes = {"cpu_devices": cpu_devices, "hot_swap": seed % 8 != 3, **memory, **sizes}
    world = World(Settings(seed=seed, trace=trace, known=known, **sizes))
    world.print = show
    lies = any(fault.what == "lie" for fault in faults)
    invariants = Invariants(
        world, trusting=not lies, may_fail=may_end_with_error(faults)
    )
    injector = FaultInjector(world, faults)
    world.start_all()
    over_at: list[float] = []

    def stop() -> bool:
        if world.ended:
            return True
        if world.result is not None:
            if not over_at:
                over_at.append(world.now)
            return world.now > over_at[0] + LEAVE_S
        idle_s = world.now - max(injector.last_at, invariants.idle_since)
        return idle_s > COMMIT_S + 25.0

    try:
        world.run(LONGEST_S, stop)
    except Exception as error:
        world.clockwork.failed("simulation", "an event", error)
    invariants.finish(over_at[0] if over_at else None)
    return Outcome(
        seed=seed,
        faults=tuple(fault.text() for fault in faults),
        violations=tuple(world.violations),
        virtual_s=world.now,
        events=world.scheduler.count,
        commits=invariants.commits,
        result=world.result or "",
        trace_hash=world.trace_hash if trace else "",
    )


def run_seed(
    seed: int, *, trace: bool = False, show: Callable[[str], None] | None = None
) -> Outcome:
    """The random schedule of a seed."""
    sizes, faults = random_schedule(seed)
    return run(seed, sizes, faults, trace=trace, show=show)


_runs = itertools.count(1)


def tidy() -> None:
    """Worlds are full of circles: they are collected now and then, not all the time."""
    if next(_runs) % 20 == 0:
        gc.collect()
