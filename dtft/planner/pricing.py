"""Time and memory of many candidates at once: the columns that the search sorts by.

Goes through candidates that divide the same dims together, as arrays; only collectives,
whose time depends on how a mesh lies on the fabric, are priced mesh by mesh. Must not
know how candidates are made or which one is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dtft.planner.amounts import Sent, Work
from dtft.planner.cluster import Pool
from dtft.planner.compute_cost import added_s, launch_s
from dtft.planner.cost import Speeds, computing_s, runs
from dtft.planner.groups import CHEAP, Group
from dtft.planner.partition import MICRO, Division, work
from dtft.planner.question import Question


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """Candidates that divide the same dims along the same axes."""

    question: Question
    division: Division

    @cached_property
    def works(self) -> tuple[tuple[Group, Work], ...]:
        """What each group of operators takes."""
        return tuple(
            (group, work(self.question.graph, group.operator, self.division))
            for group in self.question.groups
        )

    @cached_property
    def sends(self) -> tuple[tuple[float, bool, Sent], ...]:
        """Collectives of operators: how often, whether per microbatch, and which."""
        return tuple(
            (group.times, MICRO in done.divided_by, sent)
            for group, done in self.works
            for sent in done.sent
        )


def computing(
    pattern: Pattern, pool: Pool, sizes: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Seconds of compute, optimizer and launch of each candidate.

    Args:
        pattern: what divides what.
        pool: the devices.
        sizes: axis to one size per candidate; `MICRO` and `optimizer` (parts that the
            optimizer's work is divided into, beside these axes) among them.
    """
    graph, device = pattern.question.graph, pool.device
    rows = len(sizes[MICRO])
    totals = {name: np.zeros(rows) for name in ("compute", "optimizer", "started")}
    for group, done in pattern.works:
        times = group.times * runs(done, sizes)
        updates = group.region == "update"
        seconds = times * computing_s(graph, device, done, sizes, cold=updates)
        if updates:
            totals["optimizer"] += seconds / sizes["optimizer"]
        else:
            totals["compute"] += seconds
        if group.operator.kind not in CHEAP:
            totals["started"] += times
    launch = launch_s(device, totals.pop("started"))
    return {**totals, "launch": np.asarray(launch)}


def sending(
    sends: Sequence[tuple[float, bool, Sent]],
    speeds: Speeds,
    microbatches: np.ndarray,
) -> np.ndarray:
    """Seconds of collectives on one mesh, one entry per number of microbatches."""
    sizes: dict[str, Any] = {**speeds.mesh, MICRO: microbatches}
    total = np.zeros(len(microbatches))
    for times, repeated, sent in sends:
        seconds = speeds.sending_s(sent, sizes)
        total += times * (microbatches if repeated else 1) * seconds
    return total


def exposed(pool: Pool, sending_s: np.ndarray, compute_s: np.ndarray) -> np.ndarray:
    """Seconds that collectives add to a step where computing does not hide them."""
    return np.asarray(added_s(pool.device.efficiency, sending_s, compute_s))
