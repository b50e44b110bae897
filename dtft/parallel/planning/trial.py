"""A trial: the planner's best few run on the devices at hand, the fastest is taken.

A prediction ranks plans within some percent; running the first three removes most of
what is left (reference section 3). Measures whole steps as `make_step` and `plan.jit`
run them, in turns, so that a slow moment of the machine meets all alike. In a job of
several processes all of them call this together. Decides by time alone.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtft.calibration import agreed
from dtft.parallel.planning.planned_step import step_of
from dtft.parallel.sharding import mesh_of
from dtft.planner import wording
from dtft.planner.plan import Plan
from dtft.planner.report import knobs_text
from dtft.planner.search import PLATFORMS, Decision, next_best
from dtft.planner.wording import Section

ROUNDS = 5
"""Turns of each plan; the median counts."""
TURN_S = 0.3
"""Least duration of a turn: as many whole steps as it takes."""


@dataclass(frozen=True, kw_only=True)
class TriedPlan:
    """One plan, and what a step of it took."""

    decision: Decision
    step_s: float
    """Seconds, median of the turns."""

    @property
    def plan(self) -> Plan:
        """What was run."""
        return self.decision.plan


class Runner:
    """One plan's step on the devices here; compiled once, with a state or without."""

    def __init__(self, plan: Plan, given: Mapping[str, Any]) -> None:
        """Nothing is compiled yet.

        Args:
            plan: made for what is given.
            given: `step`, `state`, `batch`; or `loss`, `optimizer`, `params`, `batch`,
                as for `dtft.plan`. Shapes are filled with numbers.
        """
        self.plan, self._state = plan, None
        mesh = mesh_of(plan.mesh)
        platform = mesh.devices.flat[0].platform
        self._step, self._start = step_of(plan, given, mesh, platform)
        shardings = self._step.batch_shardings(given["batch"])
        self._batch = jax.tree.map(_placed, _filled(given["batch"]), shardings)

    def start(self) -> None:
        """Makes the state, and runs a step that is not timed; compiles if needed."""
        self._state = self._step.init(_filled(self._start))
        self.step_s(1)

    def stop(self) -> None:
        """Frees the state."""
        self._state = None

    def step_s(self, num: int) -> float:
        """Mean seconds of some steps, each waited for; the same in every process."""
        begin = time.perf_counter()
        for _ in range(num):
            self._state, result = self._step(self._state, self._batch)
            jax.block_until_ready((self._state, result))
        return agreed((time.perf_counter() - begin) / num)

    def num_steps(self, seconds: float) -> int:
        """Steps that take at least so long; the same in every process."""
        return max(1, math.ceil(seconds / self.step_s(1)))


def in_turns(
    runners: Sequence[Runner], rounds: int = ROUNDS, turn_s: float = TURN_S
) -> list[list[float]]:
    """Seconds of a step of each, one entry per round; every round runs all of them.

    Each round has an order of its own, the same in every process: a machine that is
    slow for some seconds is not so for the same ones each time.

    Args:
        runners: started here; all of their states must fit at once.
        rounds: entries of each.
        turn_s: least seconds of a turn.
    """
    for runner in runners:
        runner.start()
    nums = [runner.num_steps(turn_s) for runner in runners]
    times: list[list[float]] = [[] for _ in runners]
    for turn in range(rounds):
        order = np.random.default_rng(turn).permutation(len(runners))
        for place in order:
            times[place].append(runners[place].step_s(nums[place]))
    for runner in runners:
        runner.stop()
    return times


def try_plans(
    decision: Decision, given: Mapping[str, Any], num: int
) -> tuple[TriedPlan, ...]:
    """Runs the best few plans of a decision; the fastest measured is the first.

    Args:
        decision: what they are chosen from.
        given: as in `Runner`.
        num: plans to run, those predicted fastest.

    Raises:
        ValueError: less than one plan; or the cluster has other devices than there are
            here.
    """
    if num < 1:
        raise ValueError(f"trial={num}: give the number of plans to run, 1 or more.")
    there = jax.devices()[0].platform
    planned = decision.cluster.uniform.device
    if PLATFORMS.get(there) != PLATFORMS.get(planned.platform):
        raise ValueError(
            f"trial={num} runs plans on the devices here ({there}), and these are for "
            f"{planned.name} ({planned.platform}). Plan for the devices here "
            "(cluster=None), or leave the trial out; verify= needs no devices."
        )
    candidates = next_best(decision, num)
    runners = [Runner(one.plan, given) for one in candidates]
    tried = [
        TriedPlan(decision=one, step_s=median(times))
        for one, times in zip(candidates, in_turns(runners), strict=True)
    ]
    return tuple(sorted(tried, key=lambda one: one.step_s))


def trial_section(tried: Sequence[TriedPlan]) -> Section:
    """What was measured, for people."""
    rows = [
        (
            " ".join(f"{axis}={size}" for axis, size in one.plan.mesh.items()),
            knobs_text(one.plan.knobs),
            wording.seconds(one.plan.prediction.step_s),
            wording.seconds(one.step_s),
        )
        for one in tried
    ]
    return Section(
        title="Trial",
        columns=("mesh", "knobs", "predicted", "measured"),
        rows=tuple(rows),
        notes=("Run on the devices here, in turns; the first is taken.",),
    )


def _filled(tree: Any) -> Any:
    """Shapes with numbers in them: small floats, and 0 and 1, which index anything."""
    values = 0.02 * np.random.default_rng(0).standard_normal(1021)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return np.resize(values if floating else [0, 1], leaf.shape).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def _placed(array: Any, sharding: Any) -> jax.Array:
    """An array that every process has, each device with its part."""
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])
