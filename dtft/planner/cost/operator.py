"""Seconds of an operator from what each device does and sends for it; of optimizer
state in host memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.planner.cluster import DeviceType, Link, Pool
from dtft.planner.cost.collectives import collective_s, hidden, sync_skew_s
from dtft.planner.cost.compute import (
    convolution_factor,
    element_s,
    matmul_s,
    memory_s,
    unfused_s,
)
from dtft.planner.cost.mesh_topology import group_of
from dtft.planner.ir import CHEAP, Graph
from dtft.planner.spmd import (
    MICRO,
    Bundle,
    CollectiveOp,
    OperatorWork,
    Sizes,
    messages,
    parts,
)

_ELEMENT_BY_ELEMENT = ("reduction", "gather", "scatter", "sort")
"""Kinds that matmul units do not compute."""


@dataclass(frozen=True, kw_only=True)
class MeshSpeeds:
    """A pool, and how a mesh lies on it."""

    pool: Pool
    mesh: Mapping[str, int]
    """Axis to size, slowest-varying first."""

    def axes(self, sent: CollectiveOp | Bundle) -> tuple[str, ...]:
        """Axes of the mesh along which a collective is."""
        return tuple(axis for axis in sent.axes if self.mesh.get(axis, 1) > 1)

    def sending_s(
        self, sent: CollectiveOp, sizes: Sizes, *, ahead: bool = False
    ) -> Any:
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

    def sync_skew_s(self, sent: CollectiveOp | Bundle) -> float:
        """Seconds until the devices have met for a collective."""
        axes = self.axes(sent)
        return sync_skew_s(group_of(self.pool, self.mesh, axes)) if axes else 0.0

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
        met = 0.0 if bundle.ahead else float(times * self.sync_skew_s(bundle))
        if not bundle.is_one:
            return met
        num = messages(self.pool.device.platform, bundle.kind, num_bytes / times)
        group = group_of(self.pool, self.mesh, axes)
        each = collective_s(bundle.kind, num_bytes / times / float(num), group)
        return float(times * num * each) + met


def computing_s(
    graph: Graph,
    device: DeviceType,
    work: OperatorWork,
    sizes: Sizes,
    *,
    cold: bool = False,
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


def _across(work: OperatorWork, sizes: Sizes) -> Any:
    """Elements that one device reads across the order in which they lie.

    A transposed product is in order unless it is a partial sum (`strided`).
    """
    read = work.strided.at(sizes)
    if work.turned_by:
        read = read + work.turned.at(sizes) * (parts(work.turned_by, sizes) > 1)
    return read


def _copying_s(device: DeviceType, work: OperatorWork, sizes: Sizes) -> Any:
    """Seconds to copy the left operand of a product into the order that it wants."""
    if not work.operator.strided:
        return 0.0
    part = work.reads[0].at(sizes) / work.reads[0].total
    return work.operator.strided * part * device.efficiency.strided_s


def runs(work: OperatorWork, sizes: Sizes) -> Any:
    """Executions of an operator for each of its own: once per microbatch, if it reads
    examples, otherwise once.
    """
    return parts((MICRO,), sizes) if MICRO in work.divided_by else 1


# Optimizer state in host memory travels to the device before each update and back after
# it, over the link to host memory (PCIe, CXL).
#
# XLA's GPU compiler (jax 0.10.2, H100 target) copies these arrays asynchronously, up to
# about a dozen at once. A copied array occupies the device as a whole. A few large
# arrays, such as the stacks of a scan over layers, therefore free no memory; many small
# arrays free nearly all of theirs.


LEAST_OFFLOADED_BYTES = 2**16
"""Arrays that are smaller on each device stay there: a copy costs a latency."""
NUM_UNDER_WAY = 16
"""Arrays, of the largest, that are on the device at once (compiled: 6 to 14)."""
MOST_UNDER_WAY = 1.25
"""Of all that is kept on the host, the most that is on the device at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Away:
    """What one device keeps in host memory; one entry per candidate, or a number."""

    host_bytes: Any
    """In host memory."""
    device_bytes: Any
    """Of it, the most that is on the device at one time."""
    seconds: Any
    """That an update takes longer: all of it there and back."""


def away(link: Link, arrays: Iterable[tuple[int, Any]]) -> Away:
    """What arrays that rest in host memory take, those that are worth a copy.

    No time is taken to be hidden: what the copies wait for (gradients) comes last.

    Args:
        link: from a device to its host's memory.
        arrays: how many there are alike, and bytes of each on one device.

    >>> from dtft.planner.cluster.hardware import Curve
    >>> pcie = Link(kind="PCIe", curve=Curve(latency_s=0.0, bandwidth=1e10), source="")
    >>> found = away(pcie, [(64, 1e8), (9, 100.0)])
    >>> round(float(found.host_bytes) / 1e9, 2), float(found.device_bytes) / 1e9
    (6.4, 1.6)
    >>> round(float(found.seconds), 3)
    1.28
    """
    host: Any = 0.0
    largest: Any = 0.0
    seconds: Any = 0.0
    for count, num_bytes in arrays:
        there = np.where(
            np.asarray(num_bytes) >= LEAST_OFFLOADED_BYTES, num_bytes, 0.0
        )[()]
        host = host + count * there
        largest = np.maximum(largest, there)
        copy_s = link.curve.seconds(there * link.shared_by)
        seconds = seconds + 2 * count * np.where(there > 0, copy_s, 0.0)[()]
    on_device = np.minimum(MOST_UNDER_WAY * host, NUM_UNDER_WAY * largest)
    return Away(host_bytes=host, device_bytes=on_device, seconds=seconds)
