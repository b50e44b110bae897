"""A trial: runs the planner's best few plans on the local devices, to find the fastest.

Predicted step times have errors, so the plan with the shortest predicted step may not
be the fastest. A trial measures whole steps, as `make_step` and `plan.jit` run them.
The plans take turns, so that a slow moment of the machine does not affect one plan
only. If the devices cannot hold the states and batches of all plans, the plans run one
after another. All processes of a job must call these functions together.
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
from dtft.checkpoint.state import (
    from_paths,
    to_paths,
    with_plain_keys,
    with_typed_keys,
)
from dtft.parallel.plan_shardings import mesh_of
from dtft.parallel.planning.planned_step import step_of
from dtft.planner import wording
from dtft.planner.plan import Plan
from dtft.planner.report import knobs_text
from dtft.planner.search import PLATFORMS, Decision, next_best
from dtft.planner.wording import Section

ROUNDS = 5
"""Default number of rounds, in each of which each plan has one turn. A plan's time is
the median of its turns."""
TURN_S = 0.3
"""Default for the least seconds of a turn. One timed step determines how many steps a
turn has."""


@dataclass(frozen=True, kw_only=True)
class TriedPlan:
    """A plan with its measured step time."""

    decision: Decision
    step_s: float
    """Measured seconds of a step, median of the turns."""

    @property
    def plan(self) -> Plan:
        """The plan that was run."""
        return self.decision.plan


class Runner:
    """Runs and times the step of one plan on the devices here.

    The step is compiled once. `start` makes the state, and `stop` frees it.
    """

    def __init__(self, plan: Plan, given: Mapping[str, Any]) -> None:
        """Puts the batch on the devices; does not compile the step yet.

        Args:
            plan: a plan for the arguments in `given`.
            given: the arguments of `dtft.plan`: `step`, `state`, `batch`; or `loss`,
                `optimizer`, `params`, `batch`. ShapeDtypeStructs are replaced by arrays
                of numbers. Integers become zeros and ones, because they may be indices.
                If the integers of the batch are indices, pass arrays instead: on a GPU
                the gradient of an embedding takes much longer if all examples have the
                same tokens.

        Raises:
            ValueError: the plan does not fit the devices here or the arguments.
        """
        self.plan, self._state = plan, None
        mesh = mesh_of(plan.mesh)
        platform = mesh.devices.flat[0].platform
        self._step, self._start = step_of(plan, given, mesh, platform)
        shardings = self._step.batch_shardings(given["batch"])
        self._batch = _placed(_filled(given["batch"]), shardings)

    def start(self) -> None:
        """Makes the state and runs an untimed step, which also compiles the step."""
        given = jax.tree.leaves(self._start)
        leaves, structure = jax.tree.flatten(self._step.init(_filled(self._start)))
        if self.plan.entry == "step":
            # The first step would donate the arrays that `init` shares with the caller.
            for place, leaf in enumerate(given):
                if isinstance(leaf, jax.Array):
                    leaves[place] = leaves[place].copy()
        self._state = jax.tree.unflatten(structure, leaves)
        self.step_s(1)

    def stop(self) -> None:
        """Frees the state."""
        self._state = None

    def step_s(self, num: int) -> float:
        """Runs `num` steps and returns the mean seconds of a step.

        Waits for the results of each step before the next. `start` must be called
        before. Every process returns the seconds that process 0 measured.
        """
        begin = time.perf_counter()
        for _ in range(num):
            self._state, result = self._step(self._state, self._batch)
            jax.block_until_ready((self._state, result))
        return agreed((time.perf_counter() - begin) / num)

    def num_steps(self, seconds: float) -> int:
        """Estimates from one timed step how many steps take at least `seconds`.

        The result is the same in every process.
        """
        return max(1, math.ceil(seconds / self.step_s(1)))


def in_turns(
    runners: Sequence[Runner], rounds: int = ROUNDS, turn_s: float = TURN_S
) -> list[list[float]]:
    """Times the steps of several runners in rounds; each runner has a turn per round.

    The order of turns is shuffled for each round, and is the same in every process.
    Thus a periodic slowdown of the machine does not always hit the same runner.

    Args:
        runners: runners, which this function starts and stops; their states must fit on
            the devices at the same time.
        rounds: number of rounds.
        turn_s: seconds that a turn takes at least, as estimated from one timed step.

    Returns:
        For each runner a list with the mean seconds of a step in each round.
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
    """Runs the planner's best few plans; returns the fastest measured plan first.

    The plans take turns. If the devices cannot hold the states and batches of all
    plans, each plan runs alone, and is freed before the next begins.

    Args:
        decision: the planner's selection, with all candidates.
        given: the arguments of `dtft.plan`: `step`, `state`, `batch`; or `loss`,
            `optimizer`, `params`, `batch`. ShapeDtypeStructs are replaced by arrays.
        num: how many of the best plans that fit are run. Fewer are run if dtft cannot
            run some of them.

    Raises:
        ValueError: `num` is below 1, dtft can run none of these plans, the decision's
            cluster has devices of another platform than JAX has here, or a plan does
            not fit the number of devices here.
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
    candidates = [one for one in next_best(decision, num) if one.plan.runnable]
    if not candidates:
        raise ValueError(
            f"trial={num}: dtft can run none of the best {num} plans, which what_if "
            "allows. Try more plans, or leave what_if out."
        )
    plans = [one.plan for one in candidates]
    if _fit_together(plans):
        times = in_turns([Runner(plan, given) for plan in plans])
    else:
        times = [in_turns([Runner(plan, given)])[0] for plan in plans]
    tried = [
        TriedPlan(decision=one, step_s=median(turns))
        for one, turns in zip(candidates, times, strict=True)
    ]
    return tuple(sorted(tried, key=lambda one: one.step_s))


_HELD = ("parameters", "optimizer", "batch")
"""Keys of `Plan.memory` for the bytes that a `Runner` also holds between its turns."""


def _fit_together(plans: Sequence[Plan]) -> bool:
    """Whether the devices can hold the states and batches of all plans at once.

    The largest memory that any of the plans needs in addition while it runs is
    included. All bytes are predictions of the plans.
    """
    held = [sum(plan.memory.get(term, 0) for term in _HELD) for plan in plans]
    in_step = max(
        plan.memory_bytes - own for plan, own in zip(plans, held, strict=True)
    )
    return sum(held) + in_step <= min(plan.capacity_bytes for plan in plans)


def trial_section(tried: Sequence[TriedPlan]) -> Section:
    """Makes the report section with a table of predicted and measured step times."""
    rows = [
        (
            " ".join(f"{axis}={size}" for axis, size in one.plan.mesh.items()),
            knobs_text(one.plan.knobs),
            wording.seconds(
                one.plan.prediction.step_s, one.plan.prediction.relative_error
            ),
            wording.seconds(one.step_s),
        )
        for one in tried
    ]
    how = "in turns"
    if not _fit_together([one.plan for one in tried]):
        how = "one after another, as their states do not fit together"
    return Section(
        title="Trial",
        columns=("mesh", "knobs", "predicted", "measured"),
        rows=tuple(rows),
        notes=(f"Run on the devices here, {how}; the first is taken.",),
    )


def _filled(tree: Any) -> Any:
    """Replaces ShapeDtypeStructs by arrays of small random floats, or of 0 and 1.

    Integers are 0 and 1 because they may be indices. The words of PRNG keys are 0 and 1
    too.
    """
    values = 0.02 * np.random.default_rng(0).standard_normal(1021)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return np.resize(values if floating else [0, 1], leaf.shape).astype(leaf.dtype)

    leaves = to_paths(tree)
    filled = {path: one(leaf) for path, leaf in with_plain_keys(leaves).items()}
    return from_paths(tree, with_typed_keys(filled, leaves))


def _placed(tree: Any, shardings: Any) -> Any:
    """Makes sharded global arrays from a tree of arrays that every process has whole.

    `shardings` has a sharding for each leaf of the tree.
    """
    leaves, of_leaves = to_paths(tree), to_paths(shardings)

    def one(path: str, leaf: Any) -> jax.Array:
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(
            whole.shape, of_leaves[path], lambda at: whole[at]
        )

    placed = {path: one(path, leaf) for path, leaf in with_plain_keys(leaves).items()}
    return from_paths(tree, with_typed_keys(placed, leaves))
