"""Seconds that one device computes: matmuls, memory traffic and operator launches.

`lower_bound_s` bounds the step time of every plan from below. `memory_bound` makes a
device type that only its memory slows down, for the roofline of a plan. Numeric
arguments may be numpy arrays and are broadcast.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dtft.planner.cluster import DeviceType, Efficiency, Pool
from dtft.planner.ir import PRODUCTS, Graph, Operator, item_bits, multiply_add_flops
from dtft.planner.workload import Workload

# Lower bound of a step's time: the minimal work of all devices, for any plan.


def lower_bound_s(question: Workload, pool: Pool) -> float:
    """Computes a lower bound in seconds of a step's time on a pool, for any plan.

    The bound is the larger of two times, with the work divided evenly over all devices.
    The first is the time of all matmuls, convolutions and custom kernels at the peak
    FLOP/s of their dtype. The second is the time to read and write all parameters and
    optimizer state once. Communication is not part of the bound: a plan for one device
    has none. Operators that rematerialization computes again are not part of it either:
    a plan without rematerialization has none.

    Args:
        question: the workload with the step's graph.
        pool: the devices.
    """
    graph = question.graph
    once = (one for one in graph.operators if not (one.unread or one.again))
    computing = at_peak_s(graph, pool, once)
    paths = (*question.paths("parameter"), *question.paths("optimizer"))
    num_bytes = sum(graph.values[graph.inputs[path]].num_bytes for path in paths)
    moving = 2 * num_bytes / pool.device.memory_bandwidth
    return max(computing, moving / pool.num_devices)


def at_peak_s(graph: Graph, pool: Pool, operators: Iterable[Operator]) -> float:
    """Computes the seconds of matmuls, convolutions and custom kernels at the peak.

    The peak is the FLOP/s of the operator's dtype. The work is divided evenly over all
    devices.

    Args:
        graph: the graph with the operators.
        pool: the devices.
        operators: the operators; operators of other kinds count as 0 s.
    """
    seconds = 0.0
    for operator in operators:
        if operator.kind in PRODUCTS and operator.inputs:
            dtype = graph.operand_dtype(operator)
            peak = pool.device.peak(dtype, operator.precision)
            seconds += operator.flops * operator.trips / peak
    return seconds / pool.num_devices


def memory_bound(device: DeviceType) -> DeviceType:
    """Returns a device type as if the bandwidth of its memory were its only limit.

    The memory reaches its peak bandwidth, and bytes from a cache take no time. For
    this device type, `cost.computing_s` returns the seconds that an operator keeps the
    memory busy.
    The matmul of the example moves three matrices of 2**27 bytes.

    >>> from dtft.planner.cluster.catalog import device_type
    >>> h100 = device_type("h100")
    >>> matmul_s(memory_bound(h100), 8192, 8192, 8192) * h100.memory_bandwidth / 2**27
    np.float64(3.0)
    """
    known = device.efficiency
    return replace(
        device,
        peak_flops=dict.fromkeys(device.peak_flops, math.inf),
        cores=1,
        tile=(1, 1, 1),
        alignment_bytes=1,
        efficiency=Efficiency(
            e0=1.0,
            memory=1.0,
            cache_bytes=known.cache_bytes,
            cache_gain=math.inf,
            fuse=known.fuse,
        ),
    )


_TILES_OF_A_PART = 4
"""Least number of tiles along k in each part of a matmul's sum. Split-K divides the sum
among cores and then adds up the parts, so smaller parts are slower."""


def shape_factor(
    device: DeviceType, m: Any, n: Any, k: Any, batch: Any = 1, dtype: str = "bfloat16"
) -> Any:
    """Computes the speed of a matmul (m, k) by (k, n) relative to an ideal shape.

    The result is above 0 and at most 1. It is 1 if the matmul consists of whole tiles
    that keep all cores busy, with aligned rows. Otherwise it is less: dims are padded
    to multiples of the tile, the last wave of tiles may leave cores idle, and rows that
    are not aligned are slower. If the result has at most half as many tiles as the
    device has cores, several cores share each sum over a long k (split-K of cuBLAS).

    Args:
        device: the device type, with its cores, tile and alignment.
        m: rows on one device.
        n: columns on one device.
        k: size of the contracted dim.
        batch: the number of matmuls of this shape.
        dtype: dtype of the operands.

    In the example, 6912 is a multiple of the tile's 128 columns, and 6914 is not.

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
    """Returns a matmul's speed relative to the same matmul with aligned rows.

    The rows of the two operands have n and k elements. The result is 1 if both kinds of
    rows are aligned, otherwise `Efficiency.misaligned`, which is at most 1. A row is
    aligned if its bytes are a multiple of `DeviceType.alignment_bytes`. A row of fewer
    bytes counts as aligned, too, because the tile pads it in any case.
    """
    row = max(device.alignment_bytes * 8 // item_bits(dtype), 1)
    odd = [(np.asarray(size) > row) & (np.asarray(size) % row > 0) for size in (n, k)]
    return np.where(odd[0] | odd[1], device.efficiency.misaligned, 1.0)


def matmul_s(
    device: DeviceType,
    m: Any,
    n: Any,
    k: Any,
    batch: Any = 1,
    dtype: str = "bfloat16",
    precision: str = "",
) -> Any:
    """Computes the seconds of `batch` matmuls (m, k) by (k, n).

    The result is at least the time to move operands and results through memory. The
    launch of the operator (`launch_s`) is not counted. A matrix-vector product is not
    tiled: its kernels read the matrix once, at memory bandwidth.

    To slow down matmuls of few rows, the formula adds `Efficiency.x0` rows. These rows
    are not padded to tiles, so a matmul of aligned rows never takes longer than a
    larger matmul.

    Args:
        device: the device type, with its peak flops, tile and efficiency.
        m: rows on one device.
        n: columns on one device.
        k: size of the contracted dim.
        batch: the number of matmuls of this shape.
        dtype: dtype of operands and result.
        precision: JAX's precision of the product: `high`, `highest` or the name of a
            `jax.lax.DotAlgorithmPreset`; '' for the default.

    Returns:
        Seconds, in the broadcast shape of the arguments.

    The matmul of the example has 2 * 8192**3 = 1.1e12 operations, and an H100 has a
    peak of 989e12 FLOP/s.

    >>> from dtft.planner.cluster.catalog import device_type
    >>> one = matmul_s(device_type("h100"), 8192, 8192, 8192)
    >>> bool(1.1e12 / 989e12 < one < 2 * 1.1e12 / 989e12)
    True
    """
    efficiency = device.efficiency
    each = float(multiply_add_flops(dtype))
    flops = each * m * n * k * batch
    tiled = flops / shape_factor(device, m, n, k, batch, dtype)
    tiled += each * efficiency.x0 * n * k / _aligned(device, n, k, dtype)
    padded = np.where(np.minimum(m, n) == 1, flops, tiled)
    item_bytes = item_bits(dtype) / 8
    num_bytes = (1.0 * m * k + 1.0 * k * n + 1.0 * m * n) * batch * item_bytes
    computing = padded / (device.peak(dtype, precision) * efficiency.e0)
    return np.maximum(computing, memory_s(device, num_bytes))


def convolution_factor(device: DeviceType, columns: Any, depth: Any) -> Any:
    """Computes the time of a convolution relative to a large matmul of equal flops.

    The factor is 1 + c0 / columns: with c0 output channels (`Efficiency.c0`), a
    convolution takes twice as long as the matmul. It is multiplied by `Efficiency.odd`
    if the number of input channels is odd and above 1.

    Args:
        device: the device type, with its efficiency.
        columns: the number of output channels on one device.
        depth: the number of input channels on one device.

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
    """Returns the seconds per operation of a reduction, sort, gather or scatter.

    Windows (`reduce_window`, as in max pooling) and their backward pass have figures of
    their own. Other primitives, and windows whose figure is 0, take as long as an
    element-wise operation (`Efficiency.simple_s`).

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
    """Computes the seconds to read or write bytes in the device's memory.

    Unless `cold`, the first `Efficiency.cache_bytes` come from a faster cache.

    Args:
        device: the device type, with its memory and cache.
        num_bytes: bytes that one operator reads and writes.
        cold: whether the bytes were not used recently, so that no cache has the bytes.

    The example is in ms. The cache has 1e6 bytes and ten times the bandwidth: 0.1 ms
    for 1e6 bytes, and 2 ms for the other 2e6 bytes.

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


SMALL_BYTES, LARGE_BYTES = 2**20, 2**22
"""Bytes of an array up to which `Efficiency.strided_s` holds, and from which
`Efficiency.strided_large_s` holds."""


def strided_s(device: DeviceType, num_elements: Any, array_bytes: Any) -> Any:
    """Computes the extra seconds to read elements with a stride.

    With a stride means across the order in memory. Each read then loads a cache line of
    which it needs one element. If a cache holds the lines until the reads of their
    other elements, a line is loaded once; else once for each element. At strides of a
    power of two, as most weights have, a cache holds them if it holds the whole array.

    Args:
        device: the device type, with its seconds for arrays of up to `SMALL_BYTES` and
            from `LARGE_BYTES` on. Between the two, the logarithm of the seconds grows
            with that of the bytes; if the former are 0, all smaller arrays have 0.
        num_elements: the number of elements that are read.
        array_bytes: bytes on the device of the array with these elements.

    >>> device = DeviceType(name="d", platform="cpu", memory_bytes=1, source="",
    ...     memory_bandwidth=1.0, peak_flops={"float32": 1},
    ...     efficiency=Efficiency(strided_s=1e-9, strided_large_s=9e-9))
    >>> [round(float(1e9 * strided_s(device, 1, mib * 2**20))) for mib in (1, 2, 4, 8)]
    [1, 3, 9, 9]
    """
    small, large = device.efficiency.strided_s, device.efficiency.strided_large_s
    num_bytes = np.asarray(array_bytes, float)
    if small == 0:  # nothing to grow from
        return num_elements * large * (num_bytes >= LARGE_BYTES)
    held = np.clip(num_bytes, SMALL_BYTES, LARGE_BYTES) / SMALL_BYTES
    part = np.log(held) / np.log(LARGE_BYTES / SMALL_BYTES)
    return num_elements * small * max(1.0, large / small) ** part


def elementwise_s(
    device: DeviceType,
    num_bytes: Any,
    simple: Any = 0.0,
    special: Any = 0.0,
    *,
    cold: bool = False,
) -> Any:
    """Computes the seconds of element-wise operators.

    This is the time to move their bytes, or the time to compute them if that is longer.

    Args:
        device: the device type, with its memory.
        num_bytes: bytes that are read and written after fusion.
        simple: the number of all operations, special functions included.
        special: the number of special functions, such as exp.
        cold: whether the bytes were not used recently, as the state in an optimizer
            update.
    """
    efficiency = device.efficiency
    moving = memory_s(device, num_bytes, cold=cold)
    computing = simple * efficiency.simple_s + special * efficiency.special_s
    return np.maximum(moving, computing)


def launch_s(device: DeviceType, num_operators: Any) -> Any:
    """Computes the seconds to dispatch a step and launch its operators in sequence.

    These are the seconds to dispatch the step (`Efficiency.dispatch_s`), plus those of
    a launch (`Efficiency.launch_s`) for each operator.

    Args:
        device: the device type, with its efficiency.
        num_operators: the number of launches in a step.
    """
    return device.efficiency.dispatch_s + device.efficiency.launch_s * num_operators


def added_s(
    efficiency: Efficiency,
    collective_s: Any,
    compute_s: Any,
    order: Sequence[tuple[float, float]] = ((1.0, 1.0),),
) -> Any:
    """Computes the seconds that collectives add to the computation that overlaps them.

    The result is the part of `collective_s` that the computation cannot hide, plus the
    slowdown of the computation that hides the rest. It is at most `collective_s`.

    Args:
        efficiency: has the share of the computation that can hide collectives
            (`overlap_fraction`), and the factor on the seconds of computation while it
            hides them (`overlap_kappa`).
        collective_s: seconds of the collectives alone.
        compute_s: seconds of the independent computation alone.
        order: pairs (t, c), such as those of `ir.find_read_order`. For each pair, only
            the share t of the computation can hide the share c of the collectives; both
            are 0 to 1. By default, any computation can hide any collective.

    In the examples, computation that hides a collective becomes slower by a quarter.
    All 2 s of collectives are hidden, which adds 0.5 s. Of 9 s, 8 s are hidden, so 1 s
    and 2 s are added. In the last example 1.5 s of 2 s are hidden: 0.5 s and 0.375 s.

    >>> half = Efficiency(overlap_kappa=1.25, overlap_fraction=1.0)
    >>> [round(float(added_s(half, m, 8.0)), 3) for m in (2.0, 9.0)]
    [0.5, 3.0]
    >>> # For a quarter of the collectives there is no computation that can hide them.
    >>> round(float(added_s(half, 2.0, 8.0, ((0.0, 0.25), (0.75, 1.0)))), 3)
    0.875
    """
    overlapped = efficiency.overlap_fraction * np.asarray(compute_s)
    bare = [np.zeros(()), *(c * collective_s - t * overlapped for t, c in order)]
    hidden = collective_s - np.max(np.broadcast_arrays(*bare), axis=0)
    slowed = np.minimum(efficiency.overlap_kappa - 1.0, 1.0) * hidden
    return collective_s - hidden + slowed
