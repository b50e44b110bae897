"""What is said where no plan fits: by how much, and what would make one fit.

Each remedy is looked at by planning again, so that it has its figures. Must not compile
or run anything.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtft.planner import shorthand, wording
from dtft.planner.catalog import MACHINES
from dtft.planner.cluster import Cluster, Level, Pool
from dtft.planner.plan import Plan
from dtft.planner.wording import seconds, size

MOST = 64
"""Times as many devices as there are, up to which a cluster that fits is looked for."""
Best = Callable[[Cluster, Mapping[str, Any], bool], Plan]
"""The best plan for a cluster with some pins, also of knobs that cannot be run here; or
what lacks least."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change with which the model fits."""

    change: str
    plan: Plan

    def __str__(self) -> str:
        return (
            f"{self.change}: {seconds(self.plan.prediction.step_s)} per step, "
            f"{size(self.plan.memory_bytes)} on each device "
            f"({wording.mesh(self.plan.mesh)})"
        )


def text(leanest: Plan, cluster: Cluster, pins: Mapping[str, Any], best: Best) -> str:
    """What no plan for a cluster has room for.

    Args:
        leanest: the plan that lacks least.
        cluster: it was looked for here.
        pins: knobs that are given.
        best: plans again.
    """
    over = leanest.memory_bytes - leanest.capacity_bytes
    shown = ", ".join(f"{n} {size(each)}" for n, each in leanest.memory.items() if each)
    lacks = (
        f"{size(over)} more than the {size(leanest.capacity_bytes)} there are"
        if over > 0
        else f"and {size(leanest.host_bytes)} of host memory, which there is not"
    )
    found = [str(one) for one in remedies(cluster, pins, best)]
    help_text = "; ".join(found) or (
        f"nothing that was tried, {_tried_devices(cluster.uniform)}: take a smaller "
        "batch, or an optimizer with less state"
    )
    return (
        f"the model does not fit on {cluster.words}: the leanest plan "
        f"({wording.mesh(leanest.mesh)}, remat={leanest.knobs.remat}, "
        f"zero={leanest.knobs.zero}) needs {size(leanest.memory_bytes)} on each device "
        f"({shown}), {lacks}. What would make it fit: {help_text}."
    )


def remedies(cluster: Cluster, pins: Mapping[str, Any], best: Best) -> Iterator[Remedy]:
    """Changes with which the model fits, each with its best plan."""
    for name in pins:
        rest = {other: value for other, value in pins.items() if other != name}
        plan = _tried(best, cluster, rest, False)
        if plan is not None:
            knob = plan.mesh.get(name, getattr(plan.knobs, name, 1))
            yield Remedy(change=f"{name}={knob} instead of {pins[name]}", plan=plan)
    plan = _tried(best, cluster, pins, True)
    if plan is not None:
        knobs = f"remat={plan.knobs.remat}, zero={plan.knobs.zero}"
        knobs += ", offload" * plan.knobs.offload
        change = f"knobs that this entry point or backend does not run ({knobs})"
        yield Remedy(change=change, plan=plan)
    free = {name: value for name, value in pins.items() if not isinstance(value, int)}
    for more in _larger(cluster.uniform):
        plan = _tried(best, Cluster(pools=(more,)), free, False)
        if plan is not None:
            change = f"{more.num_devices} devices instead of {cluster.num_devices}"
            yield Remedy(change=change, plan=plan)
            return


def _tried(
    best: Best, cluster: Cluster, pins: Mapping[str, Any], what_if: bool
) -> Plan | None:
    """The best plan, if there is one and it fits."""
    try:
        plan = best(cluster, pins, what_if)
    except ValueError:
        return None
    return plan if plan.fits else None


def _larger(pool: Pool) -> Iterator[Pool]:
    """Pools with twice, four times ... as many of the outermost groups.

    Of a single device as many as the catalog joins; none if it is not in there.
    """
    factor = 1
    while (factor := 2 * factor) <= MOST:
        if pool.levels:
            *inner, outer = pool.levels
            level = Level(size=outer.size * factor, link=outer.link, name=outer.name)
            yield replace(pool, levels=(*inner, level))
        elif pool.device.name in MACHINES:
            joined = shorthand.pool(f"{factor}x{pool.device.name}")
            yield replace(pool, levels=joined.levels)


def _tried_devices(pool: Pool) -> str:
    """How many more devices were looked at."""
    if any(_larger(pool)):
        return f"up to {MOST} times as many devices"
    return "more devices not among it, as no link joins them in the cluster's file"
