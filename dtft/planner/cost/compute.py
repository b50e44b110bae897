"""How long one device computes: matmuls, bytes through memory, launches; and a bound
for any plan.

Formulas of reference section 7. Every argument that is a number may be an array (numpy
broadcasting).
"""

import math
from typing import Any

import numpy as np

from dtft.planner.cluster import DeviceType, Efficiency, Pool
from dtft.planner.ir import item_bits
from dtft.planner.workload import Workload

# No plan of a step is faster than this: what the devices must do at the least.


def lower_bound_s(question: Workload, pool: Pool) -> float:
    """Seconds that all devices together need for the operations and arrays of a step.

    The larger of two floors: matmuls and convolutions at the peak of their dtype,
    divided evenly; and every parameter and optimizer value read and written once, each
    by one device. Nothing is said of communication: one device needs none.

    Args:
        question: the step.
        pool: the devices.
    """
    graph, device = question.graph, pool.device
    computing = 0.0
    for operator in graph.operators:
        if operator.kind in ("matmul", "convolution") and operator.inputs:
            dtype = graph.values[operator.inputs[0]].dtype
            computing += operator.flops * operator.trips / device.peak(dtype)
    paths = (*question.paths("parameter"), *question.paths("optimizer"))
    num_bytes = sum(graph.values[graph.inputs[path]].num_bytes for path in paths)
    moving = 2 * num_bytes / device.memory_bandwidth
    return max(computing, moving) / pool.num_devices


_TILES_OF_A_PART = 4
"""Steps along k below which splitting a sum does not pay: parts are added up again."""


def shape_factor(
    device: DeviceType, m: Any, n: Any, k: Any, batch: Any = 1, dtype: str = "bfloat16"
) -> Any:
    """Share of its speed that a matmul keeps, being made of whole tiles.

    q of reference section 7: dims are padded to the tile, the last wave of tiles does
    not fill all cores, and rows that are not aligned are slower. Where the result has
    fewer tiles than half the cores, several cores share each sum (split-K of cuBLAS).

    >>> from dtft.planner.cluster.catalog import device_type
    >>> a100 = device_type("a100")
    >>> full, padded = (shape_factor(a100, 8192, n, 4096) for n in (6912, 6914))
    >>> float(full) > float(padded)
    True
    """
    sizes = [np.asarray(size, float) for size in (m, n, k)]
    tiles = [np.ceil(s / tile) for s, tile in zip(sizes, device.tile, strict=True)]
    padded = math.prod(tiles) * math.prod(device.tile)
    used = math.prod(sizes) / padded
    results = tiles[0] * tiles[1] * batch
    most = np.maximum(tiles[2] / _TILES_OF_A_PART, 1)
    parts = np.clip(device.cores // results, 1, most)
    waves = results * parts / device.cores
    used = used * waves / np.ceil(waves)
    return used * _aligned(device, n, k, dtype)


def _aligned(device: DeviceType, n: Any, k: Any, dtype: str) -> Any:
    """Share of its speed that rows keep which may not be aligned.

    Sizes below one aligned part count as that: a tile pads them anyway.
    """
    row = max(device.alignment_bytes * 8 // item_bits(dtype), 1)
    odd = [(np.asarray(size) > row) & (np.asarray(size) % row > 0) for size in (n, k)]
    return np.where(odd[0] | odd[1], device.efficiency.misaligned, 1.0)


def matmul_s(
    device: DeviceType, m: Any, n: Any, k: Any, batch: Any = 1, dtype: str = "bfloat16"
) -> Any:
    """Seconds of `batch` matmuls (m, k) by (k, n), at least what their bytes take.

    The start of the operator (`launch_s`) is not counted. A matrix by a vector is not
    made of tiles: kernels for it read the matrix once, as fast as memory gives it.
    What `x0` stands for is that many rows more, not a share of what padding takes: so
    no smaller matmul of aligned rows takes longer than a larger one.

    Args:
        device: its peak, tile and efficiency.
        m: rows of what one device holds.
        n: columns.
        k: dim that is summed over.
        batch: matmuls of this shape.
        dtype: of operands and result.

    Returns:
        Seconds, of the arguments' shape.

    >>> from dtft.planner.cluster.catalog import device_type
    >>> one = matmul_s(device_type("h100"), 8192, 8192, 8192)
    >>> bool(1.1e12 / 989e12 < one < 2 * 1.1e12 / 989e12)
    True
    """
    efficiency = device.efficiency
    flops = 2.0 * m * n * k * batch
    tiled = flops / shape_factor(device, m, n, k, batch, dtype)
    tiled += 2.0 * efficiency.x0 * n * k / _aligned(device, n, k, dtype)
    padded = np.where(np.minimum(m, n) == 1, flops, tiled)
    item_bytes = item_bits(dtype) / 8
    num_bytes = (1.0 * m * k + 1.0 * k * n + 1.0 * m * n) * batch * item_bytes
    computing = padded / (device.peak(dtype) * efficiency.e0)
    return np.maximum(computing, memory_s(device, num_bytes))


def convolution_factor(device: DeviceType, columns: Any, depth: Any) -> Any:
    """How many times as long a convolution takes as a large matmul of its operations.

    Args:
        device: its `c0` and `odd`.
        columns: channels that each patch makes, on one device.
        depth: channels of a patch, on one device.

    >>> device = DeviceType(name="d", platform="cpu", memory_bytes=1, source="",
    ...     memory_bandwidth=1.0, peak_flops={"float32": 1},
    ...     efficiency=Efficiency(c0=32.0, odd=4.0))
    >>> [float(convolution_factor(device, 32, n)) for n in (1, 3, 4)]
    [2.0, 8.0, 2.0]
    """
    deep = np.asarray(depth)
    longer = np.where((deep % 2 == 1) & (deep > 1), device.efficiency.odd, 1.0)
    return (1 + device.efficiency.c0 / columns) * longer


def element_s(efficiency: Efficiency, primitive: str) -> float:
    """Seconds of one operation of what matmul units do not compute: of reductions,
    sorts, and what is gathered or scattered.

    >>> element_s(Efficiency(simple_s=1e-9, window_s=5e-9), "reduce_window_max")
    5e-09
    >>> element_s(Efficiency(simple_s=1e-9, window_s=5e-9), "reduce_max")
    1e-09
    """
    own = 0.0
    if primitive.startswith("reduce_window"):
        own = efficiency.window_s
    elif primitive == "select_and_scatter_add":
        own = efficiency.window_back_s
    return own or efficiency.simple_s


def memory_s(device: DeviceType, num_bytes: Any, *, cold: bool = False) -> Any:
    """Seconds in which bytes pass through the device's memory, read or written.

    The first `cache_bytes` of an operator come from a cache that is faster.

    Args:
        device: its memory and cache.
        num_bytes: of one operator.
        cold: whether they were not used just now, so that no cache has them.

    >>> device = DeviceType(name="d", platform="cpu", memory_bytes=1, source="",
    ...     memory_bandwidth=1e9, peak_flops={"float32": 1}, efficiency=Efficiency(
    ...     memory=1.0, cache_bytes=1e6, cache_gain=10.0))
    >>> [round(float(1e3 * memory_s(device, n)), 3) for n in (1e6, 3e6)]
    [0.1, 2.1]
    """
    efficiency = device.efficiency
    moved = np.asarray(num_bytes, float)[()]
    near = 0.0 if cold else np.minimum(moved, efficiency.cache_bytes)
    moved = moved - near * (1 - 1 / efficiency.cache_gain)
    return moved / (device.memory_bandwidth * efficiency.memory)


def unfused_s(
    device: DeviceType,
    num_bytes: Any,
    simple: Any = 0.0,
    special: Any = 0.0,
    *,
    cold: bool = False,
) -> Any:
    """Seconds of element-wise operators: their bytes, or what they compute.

    Args:
        device: its memory, and the share of bytes that fusion leaves.
        num_bytes: what each operator by itself reads and writes, added up; of an
            update, what all of it together does.
        simple: operations of one step each.
        special: of these, functions such as exp.
        cold: whether it is an update: its state was not used just now.
    """
    efficiency = device.efficiency
    share = 1.0 if cold else efficiency.fuse
    moving = memory_s(device, num_bytes * share, cold=cold)
    computing = simple * efficiency.simple_s + special * efficiency.special_s
    return np.maximum(moving, computing)


def launch_s(device: DeviceType, num_operators: Any) -> Any:
    """Seconds to start a step and its operators, one after another."""
    return device.efficiency.dispatch_s + device.efficiency.launch_s * num_operators


def added_s(efficiency: Efficiency, collective_s: Any, compute_s: Any) -> Any:
    """Seconds that collectives add to computing beside which they may run.

    max(0, m - c) of reference section 7, and what computing is slowed down by. The
    planner never hides what does not pay: the sum is at most `collective_s`.

    Args:
        efficiency: how much can overlap, and how much that slows computing.
        collective_s: the collectives alone.
        compute_s: the computing that does not need them, alone.

    >>> half = Efficiency(overlap_kappa=1.25, overlap_fraction=1.0)
    >>> [round(float(added_s(half, m, 8.0)), 3) for m in (2.0, 9.0)]
    [0.5, 3.0]
    """
    hidden = np.minimum(collective_s, efficiency.overlap_fraction * compute_s)
    slowed = np.minimum(efficiency.overlap_kappa - 1.0, 1.0) * hidden
    return collective_s - hidden + slowed
