"""Batches near the one that was asked for, and fewer devices: what each would take.

Where the devices do not divide the batch (five devices, a prime batch) a plan leaves
some of them idle or divides something else; says what the nearest batches that they do
divide take, so that both have a price. And where a step is so small that one device
alone is faster, says that. Searches like `deciding`; must not compile or run anything.
"""

import math
from dataclasses import dataclass, replace

from dtft.planner import wording
from dtft.planner.cluster import Cluster
from dtft.planner.deciding import Decision, best_of
from dtft.planner.plan import Plan
from dtft.planner.wording import percent, seconds

_SMALL = 0.5
"""Share of a step that starts and collectives take from which one device is tried."""


@dataclass(frozen=True, kw_only=True)
class Nearby:
    """A batch, and the best plan for it."""

    batch: int
    plan: Plan
    step_s: float
    """Seconds of a step of this batch."""

    @property
    def sample_s(self) -> float:
        """Seconds for each example."""
        return self.step_s / self.batch


def batches(decision: Decision) -> tuple[Nearby, ...]:
    """The next smaller and larger batch that all devices divide.

    None where as many devices as there are examples, or all, divide it; nor those for
    which the pins leave no mesh of all devices.

    What is computed is taken to grow with the batch, all else to stay as it is.
    """
    asked, there = decision.question.batch_size, decision.cluster.num_devices
    if math.gcd(asked, there) == min(asked, there):
        return ()
    near = (asked // there * there, -(-asked // there) * there)
    found = (_at(decision, asked, batch) for batch in near if batch)
    return tuple(one for one in found if one is not None)


def _at(decision: Decision, asked: int, batch: int) -> Nearby | None:
    try:
        found = best_of(
            decision.question,
            decision.cluster,
            decision.pins,
            what_if=decision.what_if,
            batch=batch,
        ).plan
    except ValueError:  # pins that need fewer devices
        return None
    more = found.prediction.terms["compute"] * (batch / asked - 1)
    return Nearby(batch=batch, plan=found, step_s=found.prediction.step_s + more)


def batch_text(decision: Decision) -> tuple[str, float]:
    """What nearby batches would take, and the seconds of a step that the best saves.

    Empty where the devices divide the batch; and where all of them have work of their
    own and no nearby batch is faster for each of its examples.
    """
    asked, there = max(1, decision.question.batch_size), decision.cluster.num_devices
    plan, rows = decision.plan, decision.candidate.batch
    if rows > asked:  # a pin leaves no mesh that divides it
        more_s = plan.prediction.step_s * (rows / asked - 1)
        return (
            f"the mesh does not divide the batch of {asked}: give it {rows} rows, "
            f"{rows - asked} of them padding that the loss leaves out (by a mask in "
            f"the batch). They take up to {seconds(more_s)} of a step "
            f"({percent(rows / asked - 1)}) on top of what is predicted. Or plan "
            f"without the pin, or for a batch of {rows}"
        ), more_s
    known = batches(decision)
    used = math.prod(plan.mesh.values())
    if not known:
        return (_fewer_text(decision) if used < there else ""), 0.0
    here_s = plan.prediction.step_s / asked
    faster = [one for one in known if one.plan.fits and one.sample_s < here_s]
    if used == there and not faster and not decision.idle:
        return "", 0.0
    saved = max((here_s - one.sample_s for one in faster), default=0.0) * asked
    stands = "they repeat work of each other" if decision.idle else "the plan stands"
    used_text = f"{used} of {there} devices are used" if used < there else stands
    text = (
        f"{there} devices do not divide the batch of {asked}: {used_text}, at "
        f"{seconds(here_s)} per example{_on_all(decision)}"
    )
    return (
        f"{text}. Nearest that they divide: {_listed(known)}. To use all, make the "
        "batch one of these and plan again"
    ), saved


def _fewer_text(decision: Decision) -> str:
    """That devices are left idle, though a batch near would not use them better."""
    plan, there = decision.plan, decision.cluster.num_devices
    used = math.prod(plan.mesh.values())
    return (
        f"{used} of {there} devices are used ({wording.mesh(plan.mesh)}), at "
        f"{seconds(plan.prediction.step_s)} per step{_on_all(decision)}"
    )


def _on_all(decision: Decision) -> str:
    """What the best plan on all devices takes, of those that were looked at."""
    there, least_s = decision.cluster.num_devices, math.inf
    for one in decision.found.values():
        space, priced = one.priced.space, one.priced
        rows = priced.fits & (space.columns["devices_used"] == there)
        least_s = min(least_s, priced.step_s.min(initial=math.inf, where=rows))
    used = math.prod(decision.plan.mesh.values())
    if used == there or math.isinf(least_s):
        return ""
    return f" (all {there} take {seconds(least_s)} per step)"


def _listed(known: tuple[Nearby, ...]) -> str:
    return ", ".join(
        f"{one.batch} takes {seconds(one.step_s)} per step, {seconds(one.sample_s)} "
        f"per example ({wording.mesh(one.plan.mesh)})"
        if one.plan.fits
        else f"{one.batch} does not fit"
        for one in known
    )


def alone_text(decision: Decision) -> tuple[str, float]:
    """What one device alone would take, if that is less; and the seconds it saves."""
    terms, step_s = decision.plan.prediction.terms, decision.plan.prediction.step_s
    used = math.prod(decision.plan.mesh.values())
    waited = terms["launch"] + terms["collectives"]
    if used == 1 or waited < _SMALL * step_s:
        return "", 0.0
    pool = replace(decision.cluster.uniform, levels=())
    alone = best_of(decision.question, Cluster(pools=(pool,))).plan
    saved = step_s - alone.prediction.step_s
    if not alone.fits or saved <= 0:
        return "", 0.0
    return (
        f"one device alone takes {seconds(alone.prediction.step_s)} per step, "
        f"{seconds(saved)} ({percent(saved / step_s)}) less than {used}: the step is "
        "mostly starts and messages, which more devices do not shorten"
    ), saved
