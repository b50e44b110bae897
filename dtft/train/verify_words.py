"""What verification found, in words: tables, the plan that is taken, or why none is.

Decides only which of the compiled plans is taken: the fastest that fits. Must not
compile anything, or know how plans are found.
"""

import math
from collections.abc import Iterator, Sequence

from dtft.planner import wording
from dtft.planner.aot import Compiled, compare
from dtft.planner.report import knobs_text
from dtft.planner.wording import Section, percent, size
from dtft.train.plan_verify import RESERVE, Verified


def first_fitting(found: Sequence[Verified]) -> Verified:
    """The fastest plan that fits as compiled.

    Raises:
        ValueError: none does; says by how much, and what would make it fit.
    """
    for one in found:
        if one.verdict.fits:
            return one
    compiled = [one for one in found if one.needed_bytes is not None]
    if not compiled:
        reasons = {one.verdict.reason for one in found}
        raise ValueError(
            f"none of the {len(found)} best plans could be verified: "
            f"{'; '.join(sorted(reasons))}. Verify fewer, or none."
        )
    raise ValueError(_unfit(compiled))


def _unfit(found: Sequence[Verified]) -> str:
    """Says what the leanest of the compiled programs lacks, and what would help."""
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


def sections(found: Sequence[Verified]) -> tuple[Section, ...]:
    """What was compiled, and the collectives of the plan that is taken."""
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
    """What became of the plan that was predicted best, if another one is taken."""
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
        f"{wording.signed(wording.seconds(more))} per step"
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
