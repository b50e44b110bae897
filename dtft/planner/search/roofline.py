"""Roofline of a plan: the seconds that its work keeps each resource busy, at the peak.

A step takes at least as long as its busiest resource. The roofline model (Williams,
Waterman and Patterson, CACM 2009) has two resources, compute and memory; here each
level of links is one more, as in the roofline chapter of jax-ml/scaling-book.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dtft.planner.cluster import Level, Pool
from dtft.planner.cost import (
    computing_s,
    group_of,
    hidden,
    levels_used,
    links_at_peak_s,
    memory_bound,
    runs,
)
from dtft.planner.ir import PRODUCTS
from dtft.planner.search.search import PlanSearch
from dtft.planner.search.space import SearchCandidate
from dtft.planner.spmd import MICRO, CollectiveOp, ShardingAssignment


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective, and how often a device sends it in a step."""

    op: CollectiveOp
    times: float
    ahead: bool = False
    """Whether the collective waits for no computation, as a prefetched gather."""


def roofline(
    search: PlanSearch,
    candidate: SearchCandidate,
    division: ShardingAssignment,
    sent: Iterable[Sent],
    host_bytes: float,
) -> dict[str, float]:
    """Computes the seconds per step that each resource of a device is busy at its peak.

    `compute` has the matmuls, convolutions and custom kernels of the plan at the peak
    FLOP/s of their dtype, including operators that rematerialization computes again.
    `memory bandwidth` has the bytes that the plan's kernels read and write in memory,
    at the peak bandwidth; bytes from a cache are left out. Each level of links has the
    bytes that the plan's collectives send through the level, at the links' peak
    bandwidth. The link to host memory has the offloaded optimizer state. Latency,
    launches and the bubble of a pipeline are left out; a pipeline has the work of an
    average stage.

    The prediction of a step multiplies its seconds by factors that were fitted to past
    runs. Factors below 1 multiply the seconds here, too, except those of the link to
    host memory, so that no resource takes longer than the predicted step.

    Args:
        search: the search, with the program and the devices.
        candidate: the mesh and the values of the knobs (other settings).
        division: which axes divide which dims.
        sent: the collectives of a step.
        host_bytes: bytes of optimizer state that a device keeps in host memory.

    Returns:
        Map from a resource to seconds. Links without traffic are left out.
    """
    pool = search.pool
    factors = {
        term: min(1.0, pool.trust.scale(term))
        for term in ("compute", "collectives", "optimizer")
    }
    found = _of_device(search, candidate, division, factors)
    links = _of_links(pool, candidate, sent)
    factor = min(factors["compute"], factors["collectives"])
    found |= {name: factor * seconds for name, seconds in links.items()}
    if host_bytes and pool.host_link is not None:
        link = pool.host_link
        # To the device and back at the same time: links have both directions.
        busy_s = host_bytes * link.shared_by / link.curve.bandwidth
        found[f"{link.kind} to host memory"] = busy_s
    return found


def _of_device(
    search: PlanSearch,
    candidate: SearchCandidate,
    division: ShardingAssignment,
    factors: dict[str, float],
) -> dict[str, float]:
    """Computes the seconds per step of a device's compute and of its memory.

    Args:
        search: the search, with the program and the devices.
        candidate: the mesh and the values of the knobs (other settings).
        division: which axes divide which dims.
        factors: map to the factors on the seconds of forward and backward pass (key
            `compute`) and of the update (key `optimizer`), fitted to past runs.
    """
    graph, device = search.question.graph, search.pool.device
    sizes = {**candidate.mesh, MICRO: candidate.knobs.microbatches}
    bare = memory_bound(device)
    stages = sizes.get("stage", 1)
    fsdp = sizes.get("fsdp", 1) if candidate.knobs.zero > 0 else 1
    found = {"compute": 0.0, "memory bandwidth": 0.0}
    for group, work in search.works(division):
        operator = group.operator
        times = group.times * runs(work, sizes) / stages
        if group.region == "update":
            times *= factors["optimizer"] / fsdp  # ZeRO divides the update
        else:
            times *= factors["compute"]
        if operator.kind in PRODUCTS and operator.inputs:
            peak = device.peak(graph.operand_dtype(operator), operator.precision)
            found["compute"] += times * float(work.flops.at(sizes)) / peak
        once_s = computing_s(
            graph, bare, work, sizes, cold=group.uncached, moved=group.moved
        )
        found["memory bandwidth"] += times * float(once_s)
    return found


def _of_links(
    pool: Pool, candidate: SearchCandidate, sent: Iterable[Sent]
) -> dict[str, float]:
    """Computes the seconds per step that the links of each level are busy.

    Of collectives that wait for no computation, the share that computation hides on
    measured links is left out, as in the prediction of a step.

    Returns:
        Map from the name of a level's links to seconds. Of levels with equal names, the
        busiest counts.
    """
    busy = [0.0] * len(pool.levels)
    sizes = {**candidate.mesh, MICRO: candidate.knobs.microbatches}
    for one in sent:
        # `MICRO` is no axis of the mesh: microbatches run one after another.
        axes = tuple(a for a in one.op.axes if candidate.mesh.get(a, 1) > 1)
        if not axes:
            continue
        group = group_of(pool, candidate.mesh, axes)
        times = one.times * (1 - hidden(group) if one.ahead else 1.0)
        num_bytes = float(one.op.amount.at(sizes))
        at_peak_s = links_at_peak_s(one.op.kind, num_bytes, group)
        used = levels_used(pool, candidate.mesh, axes)
        for level, seconds in zip(used, at_peak_s, strict=True):
            busy[level] += times * seconds
    found: dict[str, float] = {}
    for number, (level, seconds) in enumerate(zip(pool.levels, busy, strict=True), 1):
        name = _name(level, number)
        if seconds:
            found[name] = max(found.get(name, 0.0), seconds)
    return found


def _name(level: Level, number: int) -> str:
    """Names the links of a level, such as `InfiniBand between hosts`.

    Args:
        level: the level.
        number: the number of the level from 1, innermost first, for a level without
            name.
    """
    kind = level.link.kind
    if not level.name:
        return f"{kind} of level {number}"
    return f"{kind} ({level.name})" if kind == "ICI" else f"{kind} between {level.name}"
