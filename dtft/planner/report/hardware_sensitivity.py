"""Sensitivity to hardware: the best plans for clusters that differ in one figure.

Each change doubles one figure: the bandwidth of a kind of link, the memory capacity,
the memory bandwidth, the peak flops, or the size of the outermost level of the fabric,
such as the number of hosts. One more change halves this size, if it is above 1. A
`Decision` is a selected plan, with its workload, cluster, pins and all candidates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtft.planner import wording
from dtft.planner.cluster import Cluster, Curve, Level, Link, Pool
from dtft.planner.plan import Plan
from dtft.planner.report.text import knobs_text
from dtft.planner.search import Decision, best_of
from dtft.planner.wording import Section, seconds, signed


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A change of the cluster, and the best plan for the changed cluster."""

    change: str
    plan: Plan | None
    """Best plan for the changed cluster; None if no plan exists or fits."""
    reason: str = ""
    """Reason why there is no plan; '' if there is a plan."""


def effects(decision: Decision) -> tuple[Effect, ...]:
    """Finds the best plan for each changed cluster, with the decision's pins.

    Pins are settings that the user has fixed. Each change doubles one figure of the
    cluster, such as the memory of a device; one more change halves the size of the
    outermost level of the fabric, such as the number of hosts.
    """
    return tuple(
        _effect(decision, change, pool)
        for change, pool in _changes(decision.cluster.uniform)
    )


def sensitivity(decision: Decision) -> str:
    """Tabulates the step time and best plan for each changed cluster, as text."""
    return wording.text([sensitivity_section(decision.plan, effects(decision))])


def sensitivity_section(plan: Plan, found: tuple[Effect, ...]) -> Section:
    """Tabulates the best plan for each changed cluster, compared with this plan.

    Args:
        plan: the plan for the unchanged cluster.
        found: the changes, each with its best plan.
    """
    columns = ("change", "step", "difference", "", "best plan then")
    error = plan.prediction.relative_error
    now = seconds(plan.prediction.step_s, error)
    rows = [("none", now, "", "", _shown(plan))]
    for effect in found:
        if effect.plan is None:
            rows.append((effect.change, "", "", "", effect.reason))
            continue
        here, there = plan.prediction.step_s, effect.plan.prediction.step_s
        same = (plan.mesh, plan.knobs) == (effect.plan.mesh, effect.plan.knobs)
        rows.append(
            (
                effect.change,
                seconds(there, error),
                signed(seconds(there - here, error)),
                wording.change(there, here, error),
                "the same" if same else _shown(effect.plan),
            )
        )
    return Section(title="What would change", columns=columns, rows=tuple(rows))


def _effect(decision: Decision, change: str, pool: Pool) -> Effect:
    cluster = Cluster(pools=(pool,), name=f"{decision.cluster.words}, {change}")
    try:
        plan = _planned(decision, cluster, decision.pins)
    except ValueError as error:
        return Effect(change=change, plan=None, reason=str(error))
    if not plan.fits:
        return Effect(change=change, plan=None, reason="the model does not fit")
    if decision.idle:
        plan = _unless_slower(plan, decision, cluster)
    return Effect(change=change, plan=plan)


def _planned(decision: Decision, cluster: Cluster, pins: Mapping[str, Any]) -> Plan:
    return best_of(decision.question, cluster, pins, what_if=decision.what_if).plan


def _unless_slower(plan: Plan, decision: Decision, cluster: Cluster) -> Plan:
    """Returns the faster of two plans for the changed cluster.

    The one is `plan`, the other the best plan with the mesh that was selected for the
    unchanged cluster, if such a plan exists and fits. The comparison is for decisions
    in which some devices of this mesh repeat the work of others. The ranking prefers
    meshes without such devices, even if they are up to 4 times as slow (`IDLE`). So
    without the comparison, a step on a faster cluster could be reported to take longer.

    Args:
        plan: the best plan for the changed cluster.
        decision: the decision for the unchanged cluster.
        cluster: the changed cluster.
    """
    try:
        same = _planned(decision, cluster, {**decision.pins, **decision.plan.mesh})
    except ValueError:
        return plan
    faster = same.prediction.step_s < plan.prediction.step_s
    return same if same.fits and faster else plan


def _changes(pool: Pool) -> Iterator[tuple[str, Pool]]:
    """Yields each change of the cluster: its text, and the changed pool of devices."""
    for kind in dict.fromkeys(level.link.kind for level in pool.levels):
        text, levels = f"{kind}: twice the bandwidth", []
        for level in pool.levels:
            same = level.link.kind == kind
            levels.append(replace(level, link=_faster(level.link)) if same else level)
            if same and level.link.shared_by > 1:
                text = f"a second {kind} port for every {level.link.shared_by} devices"
        yield text, replace(pool, levels=tuple(levels))
    device = pool.device
    yield (
        "twice the memory",
        replace(pool, device=replace(device, memory_bytes=2 * device.memory_bytes)),
    )
    yield (
        "twice the memory's bandwidth",
        replace(
            pool, device=replace(device, memory_bandwidth=2 * device.memory_bandwidth)
        ),
    )
    peaks = {dtype: 2 * peak for dtype, peak in device.peak_flops.items()}
    yield "twice the peak", replace(pool, device=replace(device, peak_flops=peaks))
    yield from _sizes(pool)


def _faster(link: Link) -> Link:
    measured = {
        kind: {n: _double(curve) for n, curve in curves.items()}
        for kind, curves in link.measured.items()
    }
    return replace(link, curve=_double(link.curve), measured=measured)


def _double(curve: Curve) -> Curve:
    """Returns a curve with twice the bandwidth for all sizes, and the same latency."""
    return replace(curve, bandwidth=2 * curve.bandwidth)


def _sizes(pool: Pool) -> Iterator[tuple[str, Pool]]:
    """Yields pools with twice and with half the members of the outermost level.

    The members are, for example, hosts. Yields nothing for a single device. If the
    level has one member, only the pool with two is yielded. Each pool comes after a
    text of the change.
    """
    if not pool.levels:
        return
    *inner, outer = pool.levels
    what = outer.name or ("hosts" if inner else "devices")
    for text, number in (("twice", 2 * outer.size), ("half", outer.size // 2)):
        if number:
            levels = (*inner, Level(size=number, link=outer.link, name=outer.name))
            yield f"{text} the {what} ({number})", replace(pool, levels=levels)


def _shown(plan: Plan) -> str:
    return f"{wording.mesh(plan.mesh)}; {knobs_text(plan.knobs)}"
