"""Seconds of an operator on a mesh, and of optimizer state in host memory.

The seconds are computed from the work of each device and the collectives between
devices (`dtft.planner.spmd`).
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
    elementwise_s,
    matmul_s,
    memory_s,
    strided_s,
)
from dtft.planner.cost.mesh_topology import group_of
from dtft.planner.ir import (
    CHEAP,
    MMA_SYNC,
    PRODUCTS,
    Graph,
    has_ragged_matmul,
    num_groups,
    operands_by_group,
)
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
"""Kinds of operators whose time is the number of their operations times `element_s`, or
that of memory if longer."""


@dataclass(frozen=True, kw_only=True)
class MeshSpeeds:
    """A mesh on a pool, with the seconds of collectives along the axes of the mesh."""

    pool: Pool
    mesh: Mapping[str, int]
    """Map from axis to size, slowest-varying first."""

    def axes(self, sent: CollectiveOp | Bundle) -> tuple[str, ...]:
        """Returns the mesh axes larger than 1 along which a collective communicates."""
        return tuple(axis for axis in sent.axes if self.mesh.get(axis, 1) > 1)

    def sending_s(
        self, sent: CollectiveOp, sizes: Sizes, *, ahead: bool = False
    ) -> Any:
        """Computes the seconds of one collective; 0 for one device.

        The wait until all devices have entered it (`sync_skew_s`) is left out.

        Args:
            sent: the collective.
            sizes: sizes of the axes, and the number of microbatches.
            ahead: whether the collective waits for no computation, so that computation
                hides a share of it.
        """
        axes = self.axes(sent)
        if not axes:
            return 0.0
        group = group_of(self.pool, self.mesh, axes)
        left = 1 - hidden(group) if ahead else 1.0
        return left * collective_s(sent.kind, sent.amount.at(sizes), group)

    def sync_skew_s(self, sent: CollectiveOp | Bundle) -> float:
        """Returns the seconds until all devices have entered a collective (sync skew).

        It is 0 for one device.
        """
        axes = self.axes(sent)
        return sync_skew_s(group_of(self.pool, self.mesh, axes)) if axes else 0.0

    def together_s(self, bundle: Bundle, num_bytes: float, sizes: Sizes) -> float:
        """Computes the seconds per step of a bundle: collectives sent together.

        Devices wait for each other once (sync skew) each time that the bundle is sent,
        unless the bundle depends on no computation (`Bundle.ahead`). The seconds of
        sending are included only if the backend combines the bundle into one message
        (`Bundle.is_one`). Otherwise the caller adds `sending_s` of each collective.

        Args:
            bundle: the collectives.
            num_bytes: bytes of all the bundle's collectives in all executions of a
                step.
            sizes: sizes of the axes, and the number of microbatches.
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
    moved: float = 1.0,
) -> Any:
    """Computes the seconds of one execution of an operator on one device.

    Args:
        graph: the graph with the operator.
        device: the device type.
        work: the part of the operator on one device.
        sizes: sizes of the axes.
        cold: whether the operator's bytes were not used recently, as the state in an
            optimizer update.
        moved: bytes that kernels read and write for the operator, divided by the bytes
            of its operands and results (`OpGroup.moved`). On CPU it holds only for
            operators that XLA fuses (`CHEAP`, such as elementwise ones), and only if
            `cold`. Otherwise the ratio on CPU is `Efficiency.fuse` for these operators,
            and 1 for all others.
    """
    operator = work.operator
    on_cpu = device.platform == "cpu"
    own = sum(amount.at(sizes) for amount in (*work.reads, *work.writes))
    dtype, precision = graph.operand_dtype(operator), operator.precision
    if work.sizes:
        shape, by_group = _multiplied(graph, device, work, sizes)
        seconds = matmul_s(device, *shape, dtype, precision)
        copied = memory_s(device, by_group + (0.0 if on_cpu else own * moved))
        return seconds + copied + _copying_s(device, work, sizes)
    simple, special = work.flops.at(sizes), work.special.at(sizes)
    if operator.kind in CHEAP:
        across = strided_s(device, _across(work, sizes), work.writes[0].at(sizes))
        share = device.efficiency.fuse if on_cpu and not cold else moved
        return elementwise_s(device, own * share, simple, special, cold=cold) + across
    each = 1 / (device.peak(dtype, precision) * device.efficiency.e0)
    if operator.primitive in MMA_SYNC:
        each = each / device.efficiency.mma_sync
    if work.sides is not None:
        each = each * convolution_factor(device, *(s.at(sizes) for s in work.sides))
    if operator.kind in _ELEMENT_BY_ELEMENT:
        each = element_s(device.efficiency, operator.primitive)
    share = 1.0 if on_cpu or operator.kind in PRODUCTS else moved
    seconds = np.maximum(simple * each, memory_s(device, own * share, cold=cold))
    return seconds + _copying_s(device, work, sizes)


def _multiplied(
    graph: Graph, device: DeviceType, work: OperatorWork, sizes: Sizes
) -> tuple[tuple[Any, Any, Any, Any], Any]:
    """Computes the sizes of the matmul that XLA runs for a matmul operator.

    They are the operator's own, except for a ragged matmul on a platform without a
    kernel for it. XLA then copies all rows once for each group (`ir.ragged`), and
    multiplies the copies in one matmul, whose contracted dim is as long as those of all
    groups together. For the gradient of the matrices, each group has a matmul of its
    own over all rows.

    Returns:
        Rows, columns, size of the contracted dim, and number of matmuls; and the bytes
        of the copies, 0 without copies.
    """
    rows, columns, depth, batch = (amount.at(sizes) for amount in work.sizes)
    copied = operands_by_group(graph, work.operator)
    if not copied or has_ragged_matmul(device.platform):
        return (rows, columns, depth, batch), 0.0
    groups = num_groups(graph, work.operator)
    num_bytes = groups * sum(work.reads[at].at(sizes) for at in copied)
    if len(copied) == 1:
        rows, batch = rows * groups, batch / groups
    return (rows, columns, depth * groups, batch), num_bytes


def _across(work: OperatorWork, sizes: Sizes) -> Any:
    """Counts the elements that one device reads with a stride for an operator.

    Elements that are read with a stride are apart in memory. The elements of a matmul's
    transposed result (`OperatorWork.turned`) count only if a mesh axis divides the
    contracted dim: XLA then cannot merge matmul and transpose.
    """
    read = work.strided.at(sizes)
    if work.turned_by:
        read = read + work.turned.at(sizes) * (parts(work.turned_by, sizes) > 1)
    return read


def _copying_s(device: DeviceType, work: OperatorWork, sizes: Sizes) -> Any:
    """Computes the seconds to copy an operand of a matmul or convolution.

    The left operand is copied into the layout that the operator needs; 0 s if it needs
    no copy.
    """
    if not work.operator.strided or not work.reads[0].total:
        return 0.0
    array_bytes = work.reads[0].at(sizes)
    elements = work.operator.strided * array_bytes / work.reads[0].total
    return strided_s(device, elements, array_bytes)


def runs(work: OperatorWork, sizes: Sizes) -> Any:
    """Returns how many times a step runs an operator because of microbatches.

    This is the number of microbatches if the operator has an equal part of its work in
    each of them, else 1.
    """
    return parts((MICRO,), sizes) if MICRO in work.divided_by else 1


# Optimizer state in host memory is copied to the device before each update and back
# after the update, over the link to host memory (PCIe, CXL).
#
# XLA's GPU compiler (jax 0.10.2, H100 target) copies these arrays asynchronously, up to
# about a dozen at once. A copied array occupies the device as a whole. Offloading a few
# large arrays, such as the stacks of a scan over layers, therefore frees no memory.
# Offloading many small arrays frees nearly all of their memory.


LEAST_OFFLOADED_BYTES = 2**16
"""Least bytes per device of an offloaded array. Smaller arrays stay on the device: each
copy costs a latency."""
NUM_UNDER_WAY = 16
"""Largest number of offloaded arrays that are on the device at once, each counted as
large as the largest. XLA's compiled programs have 6 to 14."""
MOST_UNDER_WAY = 1.25
"""Largest ratio of offloaded bytes on the device at once to all offloaded bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Away:
    """Bytes and seconds of the optimizer state that one device keeps in host memory.

    The fields are numbers, or arrays with one entry per candidate.
    """

    host_bytes: Any
    """Bytes in host memory."""
    device_bytes: Any
    """The largest number of bytes that copies of the state occupy on the device."""
    seconds: Any
    """Seconds that an update takes longer: the copies to the device and back."""


def away(link: Link, arrays: Iterable[tuple[int, Any]]) -> Away:
    """Computes bytes and seconds of arrays that are offloaded to host memory.

    Each array is copied to the device and back once per step. The copies add their
    whole time to the step, because they wait for the gradients, which are computed
    last. Several copies are on the device at once: they occupy the bytes of 16 arrays
    (`NUM_UNDER_WAY`) as large as the largest, but at most 1.25 times (`MOST_UNDER_WAY`)
    all offloaded bytes. Arrays below 64 KiB (`LEAST_OFFLOADED_BYTES`) stay on the
    device and are not counted.

    Args:
        link: the link from a device to its host's memory.
        arrays: pairs: the number of equal arrays, and the bytes of each array on one
            device.

    In the example, the bytes are in GB: 64 arrays of 0.1 GB are offloaded, 16 of them
    are on the device at once, and 9 small arrays are not offloaded. To copy 6.4 GB to
    the device and back at 10 GB/s takes 1.28 s.

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
