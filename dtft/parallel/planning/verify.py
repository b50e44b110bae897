"""Verifies plans: compiles the best few, for devices that this machine need not have.

The compiled programs are those that `make_step` and `jit_plan` would run. If no
compiled plan fits, plans that need less memory are compiled. The best plan that fits as
compiled is selected. Tables compare predicted with compiled memory and collectives.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from dtft._jax_internals import is_cudnn_installed
from dtft.parallel.planning.planned_step import step_of
from dtft.planner import wording
from dtft.planner.aot import (
    GPU_TARGETS,
    Compiled,
    CompileFailure,
    LoweredStep,
    Verdict,
    candidate,
    compare,
    compile_all,
    gate,
    is_gpu_compiler_installed,
    platform_of,
)
from dtft.planner.cluster import Cluster
from dtft.planner.gc_pause import gc_paused
from dtft.planner.ir import ATTENTION
from dtft.planner.plan import Plan
from dtft.planner.report import knobs_text
from dtft.planner.search import Decision, decide, next_best
from dtft.planner.wording import Section, percent, size

NUM = 4
"""Default number of best plans that `verified` compiles."""
SECONDS_EACH = 30.0
"""Seconds of the default deadline per plan: the compilations of `num` plans share `num`
times these seconds."""
RESERVE = 0.05
"""Fraction of a device's memory that is left to the allocator and libraries."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A plan with the result of its compilation."""

    decision: Decision
    """The plan as the planner selected it, with all candidates."""
    compiled: Compiled | CompileFailure
    verdict: Verdict
    held_back: float = 0.0
    """Memory that had to stay free when the plan was searched, as a fraction of the
    plan's predicted bytes. 0 for the plans that are compiled first. For later plans it
    is the largest fraction by which an earlier plan's compiled bytes exceeded its
    predicted bytes."""

    @property
    def needed_bytes(self) -> int | None:
        """Bytes on each device as counted by the compiler; None if compilation failed.

        A plan for a GPU may have been compiled for fake CPU devices. Then arguments,
        outputs and constants are counted, but no temporaries, because those of the CPU
        backend are not those of a GPU.
        """
        if isinstance(self.compiled, CompileFailure):
            return None
        memory = self.compiled.memory
        return memory.total if self.compiled.exact_memory else memory.floor

    @property
    def predicted_bytes(self) -> int:
        """Predicted bytes on each device, without the bytes that must stay free.

        These bytes (the plan's reserve) are for the allocator and libraries.
        """
        plan = self.decision.plan
        return plan.memory_bytes - plan.memory.get("reserve", 0)


def verified(
    decision: Decision,
    asked: Mapping[str, Any],
    *,
    num: int = NUM,
    deadline_s: float | None = None,
) -> tuple[Verified, ...]:
    """Compiles the best plans, and if none fits, plans that need less memory.

    The target is the cluster's GPU if XLA can compile for it here (extra `aot`),
    otherwise as many fake CPU devices as the plan uses. With CPU devices the
    collectives are those of XLA's CPU backend, and only the memory of arguments and
    outputs is known.

    Args:
        decision: the planner's selection, with all candidates; its best plans are
            compiled.
        asked: the arguments of `dtft.plan`: `step`, `state` and `batch`, or `loss`,
            `optimizer`, `params` and `batch`.
        num: the largest number of plans in the first round of compilations and in each
            further round, at least 1. Plans that cannot be run (`Plan.runnable`) are
            not compiled.
        deadline_s: seconds for all compilations, above 0; by default `num` times
            `SECONDS_EACH`.

    Returns:
        The plans with the results of compilation: first the best plans, best first,
        then plans that need less memory.

    Raises:
        ValueError: `num` is below 1, `deadline_s` is not above 0, or the step has
            attention of cuDNN, which is not installed here.
    """
    if num < 1:
        raise ValueError(f"num={num} plans cannot be compiled. Allowed: 1 or more.")
    if deadline_s is None:
        deadline_s = num * SECONDS_EACH
    if deadline_s <= 0:
        raise ValueError(
            f"deadline_s={deadline_s} leaves no time to compile. Allowed: above 0, or "
            f"None for {SECONDS_EACH:g} s for each plan."
        )
    primitives = {one.primitive for one in decision.question.graph.operators}
    if not primitives.isdisjoint(ATTENTION) and not is_cudnn_installed():
        raise ValueError(
            f"verify={num} cannot compile this step here: its attention is cuDNN's "
            "(implementation='cudnn'), and this machine has no cuDNN. Plan without "
            "verify, or verify on a machine with the GPU and jax[cuda]."
        )
    end = time.monotonic() + deadline_s
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

    def lowered() -> Iterator[LoweredStep]:
        for number, one in enumerate(known):
            yield candidate_of(one.plan, asked, target=target, name=str(number))

    left = max(0.0, end - time.monotonic())
    coming = [(target, math.prod(one.plan.mesh.values())) for one in known]
    results = list(compile_all(lowered(), deadline_s=left, coming=coming))
    late = CompileFailure(name="", reason=f"not compiled within {left:g} s")
    results += [late] * (len(known) - len(results))
    return tuple(
        Verified(
            decision=one,
            compiled=result,
            verdict=gate(one.plan, result, one.plan.capacity_bytes, reserve=RESERVE),
        )
        for one, result in zip(known, results, strict=True)
    )


@gc_paused()
def candidate_of(
    plan: Plan, given: Mapping[str, Any], *, target: str = "cpu", name: str = ""
) -> LoweredStep:
    """Lowers the step that `make_step` or `jit_plan` would run.

    Args:
        plan: a plan for the arguments in `given`.
        given: the arguments of `dtft.plan`: `step`, `state`, `batch`; or `loss`,
            `optimizer`, `params`, `batch`. Arrays may be ShapeDtypeStructs.
        target: `cpu`, or the name of the GPU type to compile for.
        name: name of the plan in the results of compilation.

    Raises:
        ValueError: the plan does not fit the arguments, or cannot be run on the
            target's platform.
    """
    platform, sizes = platform_of(target), tuple(plan.mesh.values())
    # A mesh without devices is enough for shardings and for lowering.
    mesh = AbstractMesh(
        sizes, tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(sizes)
    )
    step, start = step_of(plan, given, mesh, platform)
    lowered = step.trace(start, given["batch"]).lower(lowering_platforms=(platform,))
    return candidate(lowered, mesh=plan.mesh, target=target, name=name)


def _excess(found: Sequence[Verified]) -> float:
    """Returns the largest ratio of compiled to predicted bytes on a device.

    Plans of `found` that failed to compile do not count. Returns 0.0 if all plans
    failed.
    """
    ratios = [
        one.needed_bytes / one.predicted_bytes for one in found if one.needed_bytes
    ]
    return max(ratios, default=0.0)


def leaner(
    decision: Decision, found: Sequence[Verified], num: int
) -> tuple[Decision, ...]:
    """Searches for plans that need less memory, after no compiled plan has fitted.

    The search is for devices with less memory: the real memory without the fraction
    `RESERVE`, which allocator and libraries need, divided by the largest ratio of
    compiled to predicted bytes. So the new plans fit the real devices even if a program
    exceeds its prediction by this ratio. The difference to the real memory is added to
    the reserve of the plans, the bytes that must stay free.

    Args:
        decision: the planner's selection, with all candidates, whose best plans were
            compiled first.
        found: compiled plans, none of which fits.
        num: the largest number of plans to return.

    Returns:
        Plans (as decisions of the planner) that were not compiled yet, best first.
        Empty if no compiled program exceeded its prediction, if no plan fits the
        reduced memory, or if all plans found were compiled already.
    """
    pool, excess = decision.cluster.uniform, _excess(found)
    if excess <= 1:  # the plans do not fit for another reason
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
    """Converts a decision, made for devices with less memory, to the real devices.

    The result has the plan and the candidates of `one`, and the cluster of `original`.
    The plan's reserve (the bytes that must stay free) grows by the difference in bytes
    between the memory of a real device and of a device of `one`.

    Args:
        one: the decision (a plan with the candidates) for devices with less memory.
        original: the decision for the same training step on the real devices.
        capacity: bytes of memory of a real device.
    """
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
    """Returns the target of the compilation: the name of a GPU type, or `cpu`.

    It is the cluster's GPU type if XLA can compile for this type here.
    """
    name = decision.cluster.uniform.device.name
    return name if name in GPU_TARGETS and is_gpu_compiler_installed() else "cpu"


def first_fitting(found: Sequence[Verified]) -> Verified:
    """Returns the first plan that fits as compiled, which is the best one.

    Raises:
        ValueError: `found` is empty, or no plan fits. If plans were compiled, the
            message gives the missing bytes and the changes that would make a plan fit.
            If no plan could be compiled, the message gives the reasons.
    """
    for one in found:
        if one.verdict.fits:
            return one
    if not found:
        raise ValueError(
            "dtft can run none of the best plans, which what_if allows, so none was "
            "compiled. Verify more plans, or leave what_if or verify out."
        )
    compiled = [one for one in found if one.needed_bytes is not None]
    if not compiled:
        reasons = {one.verdict.reason for one in found}
        raise ValueError(
            f"none of the {len(found)} best plans could be verified: "
            f"{'; '.join(sorted(reasons))}. Verify fewer, or none."
        )
    raise ValueError(_unfit(compiled))


def _unfit(found: Sequence[Verified]) -> str:
    """Makes the error text if no compiled plan fits.

    The text gives the missing bytes of the plan that needs the least memory, and the
    changes that would make the plan fit.
    """
    leanest = min(found, key=lambda one: one.verdict.needed_bytes)
    plan, verdict = leanest.decision.plan, leanest.verdict
    has, over = plan.capacity_bytes, verdict.needed_bytes - verdict.capacity_bytes
    there = math.prod(plan.mesh.values())
    devices = math.ceil(there * (leanest.needed_bytes or 0) / (has * (1 - RESERVE)))
    return (
        f"the model does not fit on {plan.cluster}: of the {len(found)} plans that "
        f"were compiled the leanest ({wording.mesh(plan.mesh)}, "
        f"{knobs_text(plan.knobs)}) needs "
        f"{size(verdict.needed_bytes)} on each device, {size(over)} more than "
        f"the {size(has)} there are. What would help: about {max(devices, there + 1)} "
        f"devices of this type instead of {there}, a smaller batch, or devices with "
        f"{size(verdict.needed_bytes)}."
    )


def verify_sections(found: Sequence[Verified]) -> tuple[Section, ...]:
    """Makes the report sections: memory of all plans, collectives of the selected plan.

    Without a plan that fits, the second section is left out.
    """
    columns = ("mesh", "knobs", "compiled for", "predicted", "compiled", "verdict")
    chosen = next((one for one in found if one.verdict.fits), None)
    memory = Section(
        title="Verified: memory of a device",
        columns=columns,
        rows=tuple(_row(one) for one in found),
        notes=tuple(_notes(found, chosen)),
    )
    return (memory,) if chosen is None else (memory, _collectives(chosen))


def _notes(found: Sequence[Verified], chosen: Verified | None) -> Iterator[str]:
    """Yields notes for the table of memory, none to three.

    * If all plans were compiled for CPU: which bytes were counted by the compiler, and
      which are predicted.
    * How many better plans than `chosen` did not fit, and the additional seconds per
      step of `chosen`; left out if there is no such plan.
    * The largest fraction by which compiled bytes exceeded predicted bytes, if `chosen`
      is from a search for plans that need less memory. The search kept this fraction
      free.

    `chosen` is None if no plan fits; then only the first note is possible.
    """
    compiled = [one for one in found if one.needed_bytes is not None]
    if compiled and not any(
        isinstance(one.compiled, Compiled) and one.compiled.exact_memory
        for one in compiled
    ):
        yield (
            "compiled for CPU: what goes in and out of a step; activations and buffers "
            "are those predicted"
        )
    if chosen is None or chosen is found[0]:
        return
    before = list(found).index(chosen)
    plan, first = chosen.decision.plan, found[0].decision.plan
    more = plan.prediction.step_s - first.prediction.step_s
    yield (
        f"{before} faster {'plan' if before == 1 else 'plans'} did not fit as "
        f"compiled; {wording.mesh(plan.mesh)} ({knobs_text(plan.knobs)}) is taken, "
        "predicted "
        f"{wording.signed(wording.seconds(more, plan.prediction.relative_error))} per "
        "step"
    )
    if chosen.held_back:
        yield (
            "those that were compiled first needed up to "
            f"{percent(chosen.held_back)} more than predicted; so much is kept free"
        )


def _row(one: Verified) -> tuple[str, ...]:
    plan, needs = one.decision.plan, one.needed_bytes
    target = one.compiled.target if isinstance(one.compiled, Compiled) else "-"
    verdict = "fits" if one.verdict.fits else one.verdict.reason
    return (
        wording.mesh(plan.mesh),
        knobs_text(plan.knobs),
        target,
        size(one.predicted_bytes),
        "-" if needs is None else size(needs),
        verdict,
    )


def _collectives(one: Verified) -> Section:
    """Makes a table of the bytes of a step's collectives, as predicted and as compiled.

    A line of the table has all collectives of one kind, such as all-reduce, over the
    same axes.
    """
    if not isinstance(one.compiled, Compiled):
        return Section(title="Verified: collectives", notes=("nothing was compiled",))
    rows = tuple(
        (
            each.kind,
            wording.axes(each.axes),
            size(each.predicted_bytes),
            size(each.found_bytes),
            percent(each.difference) if each.found_bytes else "not there",
            ", ".join(each.exceptions),
        )
        for each in compare(one.decision.plan, one.compiled)
    )
    return Section(
        title="Verified: collectives of the plan, bytes of a step",
        columns=("kind", "axes", "predicted", "compiled", "difference", ""),
        rows=rows,
        notes=() if rows else ("none, as predicted",),
    )
