"""Seconds of an operator, from what each device does and sends for it.

Prices the work of operators (`partition`) with the speed of devices and links
(`compute_cost`, `collective_cost`). Pure; must not know how divisions are found or
whether they fit into memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.planner.amounts import Sent, Sizes, Work, parts
from dtft.planner.cluster import Pool
from dtft.planner.collective_cost import collective_s, group_of
from dtft.planner.combining import Bundle, messages
from dtft.planner.compute_cost import (
    convolution_factor,
    element_s,
    matmul_s,
    memory_s,
    unfused_s,
)
from dtft.planner.device import DeviceType
from dtft.planner.graph import Graph
from dtft.planner.groups import CHEAP
from dtft.planner.meeting import hidden, meeting_s
from dtft.planner.partition import MICRO

_ELEMENT_BY_ELEMENT = ("reduction", "gather", "scatter", "sort")
"""Kinds that matmul units do not compute."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """A pool, and how a mesh lies on it."""

    pool: Pool
    mesh: Mapping[str, int]
    """Axis to size, slowest-varying first."""

    def axes(self, sent: Sent | Bundle) -> tuple[str, ...]:
        """Axes of the mesh along which a collective is."""
        return tuple(axis for axis in sent.axes if self.mesh.get(axis, 1) > 1)

    def sending_s(self, sent: Sent, sizes: Sizes, *, ahead: bool = False) -> Any:
        """Seconds of one collective.

        Args:
            sent: what.
            sizes: of the axes, and microbatches.
            ahead: whether it waits for nothing that is computed.
        """
        axes = self.axes(sent)
        if not axes:
            return 0.0
        group = group_of(self.pool, self.mesh, axes)
        left = 1 - hidden(group) if ahead else 1.0
        return left * collective_s(sent.kind, sent.amount.at(sizes), group)

    def meeting_s(self, sent: Sent | Bundle) -> float:
        """Seconds until the devices have met for a collective."""
        axes = self.axes(sent)
        return meeting_s(group_of(self.pool, self.mesh, axes)) if axes else 0.0

    def together_s(self, bundle: Bundle, num_bytes: float, sizes: Sizes) -> float:
        """Seconds of a step of what goes together, beyond what is sent by itself.

        Args:
            bundle: what.
            num_bytes: of a step, all of it.
            sizes: of the axes, and microbatches.
        """
        axes = self.axes(bundle)
        if not axes:
            return 0.0
        times = bundle.times * (sizes[MICRO] if bundle.repeated else 1)
        met = 0.0 if bundle.ahead else float(times * self.meeting_s(bundle))
        if not bundle.is_one:
            return met
        num = messages(self.pool.device.platform, bundle.kind, num_bytes / times)
        group = group_of(self.pool, self.mesh, axes)
        each = collective_s(bundle.kind, num_bytes / times / float(num), group)
        return float(times * num * each) + met


def computing_s(
    graph: Graph, device: DeviceType, work: Work, sizes: Sizes, *, cold: bool = False
) -> Any:
    """Seconds that one device computes one execution of an operator.

    Args:
        graph: has the operator.
        device: computes.
        work: what of it.
        sizes: of the axes.
        cold: whether its bytes were not used just now: the state in an update.
    """
    operator = work.operator
    dtype = graph.values[operator.inputs[0]].dtype if operator.inputs else "float32"
    if work.sizes:
        rows, columns, depth, batch = (amount.at(sizes) for amount in work.sizes)
        seconds = matmul_s(device, rows, columns, depth, batch, dtype)
        return seconds + _copying_s(device, work, sizes)
    moved = sum(amount.at(sizes) for amount in (*work.reads, *work.writes))
    simple, special = work.flops.at(sizes), work.special.at(sizes)
    if operator.kind in CHEAP:
        across = _across(work, sizes) * device.efficiency.strided_s
        return unfused_s(device, moved, simple, special, cold=cold) + across
    each = 1 / (device.peak(dtype) * device.efficiency.e0)
    if work.sides is not None:
        each = each * convolution_factor(device, *(s.at(sizes) for s in work.sides))
    if operator.kind in _ELEMENT_BY_ELEMENT:
        each = element_s(device.efficiency, operator.primitive)
    seconds = np.maximum(simple * each, memory_s(device, moved, cold=cold))
    return seconds + _copying_s(device, work, sizes)


def _across(work: Work, sizes: Sizes) -> Any:
    """Elements that one device reads across the order in which they lie.

    A transposed product is in order unless it is a partial sum (`strided`).
    """
    read = work.strided.at(sizes)
    if work.turned_by:
        read = read + work.turned.at(sizes) * (parts(work.turned_by, sizes) > 1)
    return read


def _copying_s(device: DeviceType, work: Work, sizes: Sizes) -> Any:
    """Seconds to copy the left operand of a product into the order that it wants."""
    if not work.operator.strided:
        return 0.0
    part = work.reads[0].at(sizes) / work.reads[0].total
    return work.operator.strided * part * device.efficiency.strided_s


def runs(work: Work, sizes: Sizes) -> Any:
    """Executions of an operator for each of its own: once per microbatch, if it reads
    examples, otherwise once.
    """
    return parts((MICRO,), sizes) if MICRO in work.divided_by else 1
