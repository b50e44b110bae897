"""Seconds of a step, term by term, from what each device does and sends.

Prices the work of operators (`partition`) with the speed of devices and links
(`compute_cost`, `collective_cost`) and adds it up. Pure; must not know how divisions
are found or whether they fit into memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dtft.planner.amounts import Sent, Sizes, Work, parts
from dtft.planner.cluster import Pool
from dtft.planner.collective_cost import collective_s, group_of
from dtft.planner.compute_cost import (
    added_s,
    launch_s,
    matmul_s,
    memory_s,
    unfused_s,
)
from dtft.planner.graph import Graph
from dtft.planner.groups import CHEAP, Group
from dtft.planner.partition import MICRO


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """A pool, and how a mesh lies on it."""

    pool: Pool
    mesh: Mapping[str, int]
    """Axis to size, slowest-varying first."""

    def computing_s(self, graph: Graph, work: Work, sizes: Sizes) -> Any:
        """Seconds that one device computes one execution of an operator."""
        device, operator = self.pool.device, work.operator
        moved = sum(amount.at(sizes) for amount in (*work.reads, *work.writes))
        dtype = graph.values[operator.inputs[0]].dtype if operator.inputs else "float32"
        if work.sizes:
            rows, columns, depth, batch = (amount.at(sizes) for amount in work.sizes)
            return matmul_s(device, rows, columns, depth, batch, dtype)
        if operator.kind in CHEAP:
            return unfused_s(device, moved)
        if operator.kind == "convolution":
            speed = device.peak(dtype) * device.efficiency.e0
            return work.flops.at(sizes) / speed + memory_s(device, moved)
        return memory_s(device, moved)

    def sending_s(self, sent: Sent, sizes: Sizes) -> Any:
        """Seconds of one collective."""
        group = group_of(self.pool, self.mesh, sent.axes)
        return collective_s(sent.kind, sent.amount.at(sizes), group)

    def alone_s(self, graph: Graph, work: Work, sizes: Sizes) -> Any:
        """Seconds of one execution, its collectives after it."""
        sending = sum(self.sending_s(sent, sizes) for sent in work.sent)
        return self.computing_s(graph, work, sizes) + sending


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A collective that belongs to an array, not to an operator: a gathered shard."""

    sent: Sent
    times: float
    where: str
    per_microbatch: bool


def terms(
    graph: Graph,
    works: Iterable[tuple[Group, Work]],
    moved: Iterable[Moved],
    speeds: Speeds,
    sizes: Sizes,
) -> dict[str, Any]:
    """Seconds of a step: compute, collectives (exposed), optimizer, launch.

    Args:
        graph: the program.
        works: its groups, each with what one execution takes.
        moved: collectives beside them.
        speeds: the pool and the mesh.
        sizes: axis to size, and `MICRO` to the number of microbatches (or an array).
    """
    compute: Any = 0.0
    optimizer: Any = 0.0
    sending: Any = 0.0
    started: Any = 0.0
    for group, work in works:
        times = group.times * runs(work, sizes)
        seconds = times * speeds.computing_s(graph, work, sizes)
        if group.region == "update":
            optimizer = optimizer + seconds
        else:
            compute = compute + seconds
        for sent in work.sent:
            sending = sending + times * speeds.sending_s(sent, sizes)
        if group.operator.kind not in CHEAP:
            started = started + times
    for one in moved:
        times = one.times * (sizes.get(MICRO, 1) if one.per_microbatch else 1)
        sending = sending + times * speeds.sending_s(one.sent, sizes)
    device = speeds.pool.device
    return {
        "compute": compute,
        "collectives": added_s(device.efficiency, sending, compute),
        "optimizer": optimizer,
        "launch": launch_s(device, started),
    }


def runs(work: Work, sizes: Sizes) -> Any:
    """Executions of an operator for each of its own: once per microbatch, if it reads
    examples, otherwise once.
    """
    return parts((MICRO,), sizes) if MICRO in work.divided_by else 1
