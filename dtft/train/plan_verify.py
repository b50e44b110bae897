"""Verifies plans: compiles the best few for the cluster's devices, none of which exist.

Takes the first of them whose compiled memory fits, and says what the compiler made of
each: bytes of memory and of collectives beside those that were predicted. Must not know
how plans are found, or how programs are compiled (`dtft.planner.compiling`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optax

from dtft.planner import gpu_targets, wording
from dtft.planner.compiling import Candidate, compile_all
from dtft.planner.deciding import Decision, next_best
from dtft.planner.explain import knobs_text
from dtft.planner.verify import Compiled, Failure, Verdict, compare, gate
from dtft.planner.wording import Section, percent, size
from dtft.train.planned_step import without_devices

NUM = 4
"""Plans that are compiled."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A plan as it was compiled."""

    decision: Decision
    """Of this plan."""
    compiled: Compiled | Failure
    verdict: Verdict


def verified(
    decision: Decision,
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    num: int = NUM,
    deadline_s: float = 60.0,
) -> tuple[Verified, ...]:
    """The best plans, fastest first, compiled.

    For a GPU that XLA can compile for here (extra `aot`), otherwise for as many fake
    CPU devices: then collectives are those of XLA's CPU backend, and of memory only
    what goes in and out is known.

    Args:
        decision: of entry loss.
        loss: what was planned, and with it the next three.
        optimizer: an optax transformation.
        params: arrays or shapes.
        batch: arrays or shapes.
        num: how many are compiled.
        deadline_s: seconds for all of them.
    """
    known = [one for one in next_best(decision, num) if one.plan.runnable]
    target = target_of(decision)

    def lowered() -> Iterator[Candidate]:
        for number, one in enumerate(known):
            step = without_devices(loss, optimizer, one.plan)
            yield step.candidate(params, batch, target=target, name=str(number))

    results = list(compile_all(lowered(), deadline_s=deadline_s))
    late = Failure(name="", reason=f"not compiled within {deadline_s:g} s")
    results += [late] * (len(known) - len(results))
    return tuple(
        Verified(
            decision=one,
            compiled=result,
            verdict=gate(one.plan, result, one.plan.capacity_bytes),
        )
        for one, result in zip(known, results, strict=True)
    )


def target_of(decision: Decision) -> str:
    """What programs are compiled for: the cluster's GPU if that is possible here."""
    name = decision.cluster.uniform.device.name
    return name if name in gpu_targets.TARGETS and gpu_targets.installed() else "cpu"


def first_fitting(found: tuple[Verified, ...]) -> Verified:
    """The fastest plan that fits as compiled.

    Raises:
        ValueError: none does; says what each lacks.
    """
    for one in found:
        if one.verdict.fits:
            return one
    reasons = "; ".join(
        f"{wording.mesh(one.decision.plan.mesh)}: {one.verdict.reason}" for one in found
    )
    raise ValueError(
        f"none of the {len(found)} best plans is verified to fit ({reasons}). Take "
        "more devices, a smaller batch, or pin remat=full or zero=3; what was only too "
        "late compiles on a machine with less to do."
    )


def sections(found: tuple[Verified, ...]) -> tuple[Section, ...]:
    """What was compiled, and the collectives of the plan that is taken."""
    rows = tuple(_row(one) for one in found)
    columns = ("mesh", "knobs", "compiled for", "predicted", "compiled", "verdict")
    memory = Section(title="Verified: memory of a device", columns=columns, rows=rows)
    chosen = next((one for one in found if one.verdict.fits), None)
    return (memory,) if chosen is None else (memory, _collectives(chosen))


def _row(one: Verified) -> tuple[str, ...]:
    plan = one.decision.plan
    target, needs = "-", "-"
    if isinstance(one.compiled, Compiled):
        memory = one.compiled.memory
        target = one.compiled.target
        needs = size(memory.total if one.compiled.exact_memory else memory.floor)
    predicted = size(plan.memory_bytes - plan.memory.get("reserve", 0))
    verdict = "fits" if one.verdict.fits else one.verdict.reason
    mesh = wording.mesh(plan.mesh)
    return (mesh, knobs_text(plan.knobs), target, predicted, needs, verdict)


def _collectives(one: Verified) -> Section:
    """Bytes of a step predicted and found, by kind and axes."""
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
