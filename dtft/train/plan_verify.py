"""Verifies plans: compiles the best few for the cluster's devices, none of which exist.

Where none of them fits as compiled, plans that need less are looked for. Which of them
is taken, and what is said of it, is in `verify_words`. Must not know how plans are
found, or how programs are compiled (`dtft.planner.aot.compile`).
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtft.planner.aot import (
    GPU_TARGETS,
    Candidate,
    Compiled,
    Failure,
    Verdict,
    compile_all,
    gate,
    is_gpu_compiler_installed,
)
from dtft.planner.cluster import Cluster
from dtft.planner.plan import Plan
from dtft.planner.search import Decision, decide, next_best
from dtft.train import verifying

NUM = 4
"""Plans that are compiled, if nothing else is asked for."""
SECONDS_EACH = 30.0
"""What compiling a plan may take on average."""
RESERVE = 0.05
"""Of a device's memory, left to allocator and libraries beside what is compiled."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A plan as it was compiled."""

    decision: Decision
    """Of this plan."""
    compiled: Compiled | Failure
    verdict: Verdict
    held_back: float = 0.0
    """How much more than predicted the plan was chosen to have room for, a share,
    because those before needed it."""

    @property
    def needed_bytes(self) -> int | None:
        """Bytes of a device as compiled; None if it was not. For CPU only what goes in
        and out, because temporaries are not those of another backend."""
        if isinstance(self.compiled, Failure):
            return None
        memory = self.compiled.memory
        return memory.total if self.compiled.exact_memory else memory.floor

    @property
    def predicted_bytes(self) -> int:
        """The same as predicted."""
        plan = self.decision.plan
        return plan.memory_bytes - plan.memory.get("reserve", 0)


def verified(
    decision: Decision,
    asked: Mapping[str, Any],
    *,
    num: int = NUM,
    deadline_s: float | None = None,
) -> tuple[Verified, ...]:
    """The best plans, fastest first, compiled; then leaner ones if none of them fits.

    For a GPU that XLA can compile for here (extra `aot`), otherwise for as many fake
    CPU devices: then collectives are those of XLA's CPU backend, and of memory only
    what goes in and out is known.

    Args:
        decision: what is verified.
        asked: what was planned: `step`, `state` and `batch`, or `loss`, `optimizer`,
            `params` and `batch`.
        num: how many are compiled at a time, at least 1.
        deadline_s: seconds for all of them; by default `SECONDS_EACH` for each.

    Raises:
        ValueError: `num` is below 1.
    """
    if num < 1:
        raise ValueError(f"num={num} plans cannot be compiled. Allowed: 1 or more.")
    end = time.monotonic() + (deadline_s or num * SECONDS_EACH)
    target = target_of(decision)
    found = _compiled(next_best(decision, num), asked, target, end)
    while not any(one.verdict.fits for one in found) and time.monotonic() < end:
        more = leaner(decision, found, num)
        if not more:
            break
        share = _excess(found) - 1
        again = _compiled(more, asked, target, end)
        found += tuple(replace(one, held_back=share) for one in again)
    return found


def _compiled(
    decisions: Sequence[Decision], asked: Mapping[str, Any], target: str, end: float
) -> tuple[Verified, ...]:
    known = [one for one in decisions if one.plan.runnable]

    def lowered() -> Iterator[Candidate]:
        for number, one in enumerate(known):
            yield _candidate(one.plan, asked, target, str(number))

    left = max(0.0, end - time.monotonic())
    coming = [(target, math.prod(one.plan.mesh.values())) for one in known]
    results = list(compile_all(lowered(), deadline_s=left, coming=coming))
    late = Failure(name="", reason=f"not compiled within {left:g} s")
    results += [late] * (len(known) - len(results))
    return tuple(
        Verified(
            decision=one,
            compiled=result,
            verdict=gate(one.plan, result, one.plan.capacity_bytes, reserve=RESERVE),
        )
        for one, result in zip(known, results, strict=True)
    )


def _candidate(
    plan: Plan, asked: Mapping[str, Any], target: str, name: str
) -> Candidate:
    make = verifying.of_step if "step" in asked else verifying.of_loss
    return make(plan, **asked, target=target, name=name)


def _excess(found: Sequence[Verified]) -> float:
    """How many times what was predicted the compiled programs needed at most."""
    ratios = [
        one.needed_bytes / one.predicted_bytes for one in found if one.needed_bytes
    ]
    return max(ratios, default=0.0)


def leaner(
    decision: Decision, found: Sequence[Verified], num: int
) -> tuple[Decision, ...]:
    """The best plans that would fit if all programs exceeded predictions alike.

    Asked of a cluster whose devices have so much less memory; what is held back counts
    to the reserve of the plans.

    Args:
        decision: what was verified first.
        found: what was compiled, and does not fit.
        num: how many at most.

    Returns:
        Plans that were not compiled yet, fastest first; none if nothing could help.
    """
    pool, excess = decision.cluster.uniform, _excess(found)
    if excess <= 1:  # they do not fit for another reason
        return ()
    has = pool.device.memory_bytes
    less = math.floor(has * (1 - RESERVE) / excess)
    device = replace(pool.device, memory_bytes=less)
    small = Cluster(pools=(replace(pool, device=device),), name=decision.cluster.name)
    try:
        again = decide(
            decision.question, small, decision.pins, what_if=decision.what_if
        )
    except ValueError:
        return ()
    tried = {_identity(one.decision.plan) for one in found}
    whole = (_with_capacity(one, decision, has) for one in next_best(again, num))
    return tuple(one for one in whole if _identity(one.plan) not in tried)


def _identity(plan: Plan) -> Any:
    return tuple(plan.mesh.items()), plan.knobs


def _with_capacity(one: Decision, original: Decision, capacity: int) -> Decision:
    """What was decided for devices with less memory, for those that there are."""
    plan, held = one.plan, capacity - one.plan.capacity_bytes
    memory = {**plan.memory, "reserve": plan.memory.get("reserve", 0) + held}
    alternatives = tuple(
        replace(other, memory_bytes=other.memory_bytes + held)
        for other in plan.alternatives
    )
    plan = replace(
        plan,
        memory=memory,
        capacity_bytes=capacity,
        alternatives=alternatives,
        cluster_hash=original.plan.cluster_hash,
        cluster=original.plan.cluster,
    )
    return replace(one, plan=plan, cluster=original.cluster)


def target_of(decision: Decision) -> str:
    """What programs are compiled for: the cluster's GPU if that is possible here."""
    name = decision.cluster.uniform.device.name
    return name if name in GPU_TARGETS and is_gpu_compiler_installed() else "cpu"
