"""Measures the local devices, and fits the planner's cost model to the times.

The fit determines constants such as bandwidths, latencies and the efficiency of
matmuls.

The measurements are in `microbenchmarks`, the fits in `dtft.planner.cost`.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax

from dtft.calibration import microbenchmarks
from dtft.calibration.microbenchmarks import BenchmarkPace
from dtft.planner.cluster import Cluster, CollectiveKind, DeviceType, Level, Link
from dtft.planner.cost import (
    Calibration,
    CalibrationFit,
    CollectiveTime,
    ConvolutionTime,
    ElementTime,
    MatmulTime,
    MemoryTime,
    OverlapTime,
    PrefetchTime,
    SyncSkewTime,
    fit_convolutions,
    fit_elements,
    fit_link,
    fit_matmuls,
    fit_memory,
    fit_overlap,
    fit_peak,
    fit_prefetch_overlap,
    fit_sync_skew,
    link_key,
)

_LONG = BenchmarkPace(budget_s=0.08, repeats=3)
"""`BenchmarkSizes.shared` if processes share cores: each loop is long enough to span
many time slices of the scheduler."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkSizes:
    """Sizes of the operations that are timed on a platform, and lengths of timings."""

    dtypes: tuple[str, ...]
    """Dtypes of matmuls; the efficiency is fitted to the first dtype."""
    rows: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]
    """Pairs (n, k) of matmuls (m, k) by (k, n); `rows` has the sizes m."""
    streams: tuple[int, ...]
    """Bytes that the memory benchmark reads and writes on each device."""
    convolutions: tuple[tuple[int, int, int], ...]
    """For each convolution: the number of images (rows), the side of an image, and the
    number of channels."""
    images: tuple[int, int, int] | None
    """Number of images, side of an image, and number of output channels, for a first
    convolution of images with three channels. Pooling is timed on arrays shaped like
    the output of this convolution. None: not measured, because first convolutions and
    pooling are not slow on the platform."""
    elements: int
    """Side of the square array on which element-wise operations are timed. The array
    fits into cache."""
    strided: tuple[int, int] | None
    """Sides of two square arrays whose transposed reads are timed: of 1 MiB, and of 4
    MiB, which is more than the cache of a core has. None: not measured, because the
    compiler stores arrays in the order in which they are read."""
    kinds: tuple[CollectiveKind, ...]
    """Kinds of collectives to measure. The other kinds use the curve that is fitted to
    all measured kinds."""
    collectives: tuple[int, ...]
    """Sizes in bytes at which each kind of collective is timed."""
    meeting: tuple[int, ...]
    """Bytes of all-reduces timed after matmuls, in jobs of several processes."""
    ahead: tuple[int, ...]
    """Bytes of parameters gathered before the layers that need them, in jobs of several
    processes."""
    overlap: tuple[int, tuple[int, ...]] | None
    """Side of a matmul, and bytes of the all-reduces that run beside it. None: not
    measured, because a device computes and communicates in one thread."""
    pace: BenchmarkPace = BenchmarkPace()
    shared: BenchmarkPace = BenchmarkPace()
    """Pace of the benchmarks of memory and of transposed reads, in which all devices
    share the memory bandwidth."""
    behind: int = 0
    """Number of equal collectives that are timed in a row after matmuls, for the kinds
    in `_OFTEN` and in jobs of several processes. 0: each collective is timed alone,
    because processes do not share cores."""

    def among(self, num_processes: int) -> "BenchmarkSizes":
        """Returns the sizes that a job of `num_processes` processes measures.

        One process measures all sizes. Several processes measure with longer loops
        (`BenchmarkPace.among`). If these processes share cores, as on CPU (`behind` is
        above 0), there are two more differences. Only every third size of collectives
        is measured, because each size is compiled separately. The loops of the
        benchmarks of memory and of transposed reads take 0.08 s (`_LONG`).

        In the example, four processes measure 3 of the 8 sizes of collectives on CPU,
        and all 8 on accelerators.

        >>> [len(sizes.among(4).collectives) for sizes in (CPU, ACCELERATOR)]
        [3, 8]
        """
        pace, shared = (one.among(num_processes) for one in (self.pace, self.shared))
        if num_processes == 1 or not self.behind:
            return replace(self, pace=pace, shared=shared)
        some = self.collectives[::3]
        return replace(self, collectives=some, pace=pace, shared=_LONG)


def _powers(first: int, last: int, num: int) -> tuple[int, ...]:
    """Returns `num` sizes in bytes, `first` to `last`, evenly spaced on a log scale.

    Sizes are rounded to multiples of 1024.
    """
    ratio = (last / first) ** (1 / (num - 1))
    return tuple(round(first * ratio**n / 1024) * 1024 for n in range(num))


CPU = BenchmarkSizes(
    dtypes=("float32",),
    rows=(8, 32, 128, 512),
    dims=((64, 64), (256, 256), (128, 512), (512, 512), (1024, 256)),
    streams=_powers(2**18, 2**27, 7),
    convolutions=((8, 16, 8), (8, 8, 32), (4, 8, 128)),
    images=(8, 16, 32),
    elements=128,
    strided=(512, 1024),
    kinds=("all_reduce", "all_gather", "all_to_all", "permute"),  # XLA:CPU has no more
    collectives=_powers(2**12, 2**23, 8),
    meeting=(2**16,),
    ahead=(2**16, 2**21),
    overlap=None,
    behind=4,
)
ACCELERATOR = BenchmarkSizes(
    dtypes=("bfloat16", "float32"),
    rows=(128, 512, 2048, 8192),
    dims=((512, 512), (1024, 4096), (2048, 2048), (4096, 4096), (8192, 4096)),
    streams=_powers(2**22, 2**30, 5),
    convolutions=((64, 32, 32), (64, 32, 128), (64, 16, 512)),
    images=None,
    elements=2048,
    strided=None,
    kinds=get_args(CollectiveKind),
    collectives=_powers(2**14, 2**28, 8),
    meeting=(),
    ahead=(),
    overlap=(4096, (2**20, 2**24, 2**26)),
)


_OFTEN: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
"""Kinds of collectives that nearly every step runs, many in a row."""
_OF_SIZES = 3
"""Number of timings of each size of a kind in `_OFTEN`, in multi-process jobs."""
_ROUNDS = 5
"""Number of timings of all-reduces after matmuls (`_behind`) and of gathers beside
layers (`_ahead`)."""


def measure_devices(
    devices: Sequence[Any], sizes: BenchmarkSizes | None = None
) -> Calibration:
    """Measures the local devices and fits the planner's cost model to the times.

    The fit determines constants such as bandwidths, latencies and the efficiency of
    matmuls. All devices run each benchmark at the same time, as in a training step.

    In a job of several processes, every process must call this function with
    `jax.devices()`.

    Args:
        devices: devices of one type; see `Cluster.from_devices`.
        sizes: sizes to measure; default: those of the platform (`CPU` or
            `ACCELERATOR`).

    Raises:
        ValueError: there is no device, the devices or hosts differ, or the catalog
            lacks the device type.
    """
    pool = Cluster.from_devices(devices).uniform
    sizes = sizes or (CPU if pool.device.platform == "cpu" else ACCELERATOR)
    sizes = sizes.among(jax.process_count())
    device, fits = _compute(devices, pool.device, sizes)
    links: dict[str, Link] = {}
    inner = 1
    for level in pool.levels:
        key = link_key(level.link)
        _say(f"collectives on {key} ...")
        times = _collectives(devices, inner, level, sizes)
        link, found = fit_link(level.link, times)
        link = fit_sync_skew(link, _behind(devices, inner, level, sizes))
        links[key] = fit_prefetch_overlap(link, _ahead(devices, inner, level, sizes))
        fits |= {f"collectives on {key}, {name}": f for name, f in found.items()}
        inner *= level.size
    residuals = {name: found.residual for name, found in fits.items()}
    if pool.levels and sizes.overlap is not None:
        device, residuals["overlap"] = _overlap(devices, device, sizes)
    elif sizes.overlap is None:
        alone = replace(device.efficiency, overlap_kappa=1.0, overlap_fraction=0.0)
        device = replace(device, efficiency=alone)
    return Calibration(
        device=device.name,
        fabric=tuple(link_key(level.link) for level in pool.levels),
        num_devices=len(devices),
        software=f"jax {jax.__version__}",
        peak_flops=dict(device.peak_flops),
        memory_bandwidth=device.memory_bandwidth,
        efficiency=device.efficiency,
        links=links,
        errors={
            f"{name}: {scalar}": error
            for name, found in fits.items()
            for scalar, error in found.errors.items()
        },
        residuals=residuals,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compute(
    devices: Sequence[Any], device: DeviceType, sizes: BenchmarkSizes
) -> tuple[DeviceType, dict[str, CalibrationFit]]:
    """Times all operations but collectives, and fits the device's speeds to the times.

    Memory is fitted first, because its bandwidth bounds matmuls of few rows.

    Returns:
        The device with the fitted speeds, and a map from the name of a benchmark, such
        as "matmul", to its fit.
    """
    mesh = microbenchmarks.make_mesh(devices, 1, len(devices))
    _say("memory ...")
    streams = [
        MemoryTime(
            num_bytes=size,
            seconds=microbenchmarks.stream_s(mesh, size, sizes.shared).seconds,
        )
        for size in sizes.streams
    ]
    fits: dict[str, CalibrationFit] = {}
    device, fits["memory"] = fit_memory(device, streams)
    _say("element-wise operators ...")
    device, fits["elements"] = fit_elements(device, _elements(mesh, sizes))
    if sizes.strided is not None:
        _say("transposed arrays ...")
        small, large = (
            microbenchmarks.strided_s(mesh, side, sizes.shared)
            for side in sizes.strided
        )
        made = replace(device.efficiency, strided_s=small, strided_large_s=large)
        device = replace(device, efficiency=made)
    for number, dtype in enumerate(sizes.dtypes):
        _say(f"matmuls of {dtype} ...")
        times, dispatch = _matmuls(mesh, dtype, sizes)
        if number:
            device = fit_peak(device, dtype, times)
            continue
        device, fits["matmul"] = fit_matmuls(device, dtype, times)
        made = replace(device.efficiency, dispatch_s=dispatch)
        device = replace(device, efficiency=made)
    _say("convolutions ...")
    device, fits["convolutions"] = fit_convolutions(
        device, "float32", _convolutions(mesh, sizes)
    )
    if sizes.images is not None:
        _say("windows ...")
        forward, back = microbenchmarks.windows_s(mesh, *sizes.images, sizes.pace)
        made = replace(device.efficiency, window_s=forward, window_back_s=back)
        device = replace(device, efficiency=made)
    return device, fits


def _elements(mesh: Any, sizes: BenchmarkSizes) -> list[ElementTime]:
    """Times element-wise functions: a norm, exp, gelu and softmax.

    The functions are those in `microbenchmarks.ELEMENT_WISE`. The array is square, of
    side `sizes.elements`.
    """
    num = sizes.elements**2
    return [
        ElementTime(
            simple=num * simple,
            special=num * special,
            seconds=microbenchmarks.element_wise_s(
                mesh, name, sizes.elements, sizes.pace
            ).seconds,
        )
        for name, (_, simple, special) in microbenchmarks.ELEMENT_WISE.items()
    ]


def _convolutions(mesh: Any, sizes: BenchmarkSizes) -> list[ConvolutionTime]:
    """Times convolutions, forward and backward, at the sizes in `sizes.convolutions`.

    If `sizes.images` is not None, also times the forward pass of a model's first
    convolution, whose input is images with three channels.
    """
    times = [
        ConvolutionTime(
            flops=2.0 * rows * side**2 * 9 * channels**2,
            channels=channels,
            strided=rows * side**2 * channels * microbenchmarks.GRADIENTS,
            seconds=microbenchmarks.convolution_s(
                mesh, rows, side, channels, sizes.pace
            ),
        )
        for rows, side, channels in sizes.convolutions
    ]
    if sizes.images is not None:
        rows, side, channels = sizes.images
        colours = microbenchmarks.COLOURS
        seconds = microbenchmarks.first_s(mesh, rows, side, channels, sizes.pace)
        first = ConvolutionTime(
            flops=2.0 * rows * side**2 * 9 * colours * channels,
            channels=channels,
            odd=True,
            seconds=seconds,
        )
        times.append(first)
    return times


def _matmuls(
    mesh: Any, dtype: str, sizes: BenchmarkSizes
) -> tuple[list[MatmulTime], float]:
    """Times matmuls (m, k) by (k, n) of a dtype.

    Each m of `sizes.rows` is combined with each (n, k) of `sizes.dims`.

    Returns:
        The times, and the least seconds that the host took to start a program.
    """
    times, dispatch = [], []
    for m in sizes.rows:
        for n, k in sizes.dims:
            found = microbenchmarks.matmul_s(mesh, m, n, k, dtype, sizes.pace)
            times.append(MatmulTime(m=m, n=n, k=k, seconds=found.seconds))
            dispatch.append(found.dispatch_s)
    return times, min(dispatch)


def _collectives(
    devices: Sequence[Any], inner: int, level: Level, sizes: BenchmarkSizes
) -> list[CollectiveTime]:
    """Times each kind of collective at each size, on one level of the fabric.

    A level is one stage of the links, such as those within a host or between hosts.
    Each collective is timed in groups of up to three sizes, from the smallest to all
    devices of the level (`_group_sizes`). In jobs of several processes that share cores
    (`sizes.behind` is above 0), all-reduces, all-gathers and reduce-scatters (`_OFTEN`)
    are timed after matmuls, as in a step. All others are timed alone.

    Args:
        devices: the devices, those of a host after each other.
        inner: distance in `devices` between neighbours in a group.
        level: the level to measure.
        sizes: the sizes to measure.
    """
    groups = _group_sizes(level.size)
    meshes = [microbenchmarks.make_mesh(devices, inner, members) for members in groups]
    in_step = jax.process_count() > 1 and sizes.behind > 0
    often: list[CollectiveKind] = [k for k in sizes.kinds if in_step and k in _OFTEN]
    times = [
        CollectiveTime(
            kind=kind,
            num_bytes=size,
            num_devices=members,
            seconds=microbenchmarks.collective_s(mesh, kind, size, sizes.pace).seconds,
        )
        for size in sizes.collectives
        for members, mesh in zip(groups, meshes, strict=True)
        for kind in sizes.kinds
        if kind not in often
    ]
    for members, mesh in zip(groups, meshes, strict=True):
        for kind in often:
            times += _in_step(mesh, kind, members, sizes)
    return times


def _in_step(
    mesh: Any, kind: CollectiveKind, members: int, sizes: BenchmarkSizes
) -> list[CollectiveTime]:
    """Times one kind of collective after matmuls, at every size in `sizes.collectives`.

    The time of a collective is a difference between two loops: matmuls followed by the
    collective, and matmuls alone. If noise makes the difference 0 or less, the
    collective is timed again without matmuls. `members` is the number of devices in a
    group of `mesh`.
    """
    found = microbenchmarks.behind_s(
        mesh, sizes.collectives, _OF_SIZES, kind, sizes.behind
    )
    return [
        CollectiveTime(
            kind=kind,
            num_bytes=size,
            num_devices=members,
            seconds=seconds
            if seconds > 0
            else microbenchmarks.collective_s(mesh, kind, size, sizes.pace).seconds,
        )
        for size, seconds in zip(sizes.collectives, found, strict=True)
    ]


def _behind(
    devices: Sequence[Any], inner: int, level: Level, sizes: BenchmarkSizes
) -> list[SyncSkewTime]:
    """Times all-reduces that follow matmuls, on one level of the fabric.

    The times show how long processes wait for each other before a collective. Returns
    [] if `sizes.meeting` is empty. Also returns [] in a job of one process, because the
    cost model has no term for waits between the threads of one process.

    Args:
        devices: the devices, those of a host after each other.
        inner: distance in `devices` between neighbours in a group.
        level: the level to measure: one stage of the links, such as those in a host.
        sizes: the sizes; `sizes.meeting` has the bytes of the all-reduces.
    """
    if jax.process_count() == 1 or not sizes.meeting:
        return []
    times: list[SyncSkewTime] = []
    for members in _group_sizes(level.size):
        mesh = microbenchmarks.make_mesh(devices, inner, members)
        found = microbenchmarks.behind_s(mesh, sizes.meeting, _ROUNDS)
        times += [
            SyncSkewTime(num_bytes=size, num_devices=members, seconds=seconds)
            for size, seconds in zip(sizes.meeting, found, strict=True)
        ]
    return times


def _ahead(
    devices: Sequence[Any], inner: int, level: Level, sizes: BenchmarkSizes
) -> list[PrefetchTime]:
    """Times gathers of parameters that run while earlier layers compute.

    For up to three numbers of devices (`_group_sizes`), times layers alone, gathers
    alone, and both together. Returns [] in a job of one process, or if `sizes.ahead` is
    empty.

    Args:
        devices: the devices, those of a host after each other.
        inner: distance in `devices` between neighbours in a group.
        level: the level to measure: one stage of the links, such as those in a host.
        sizes: the sizes; `sizes.ahead` has the bytes of the parameters of a layer.
    """
    if jax.process_count() == 1 or not sizes.ahead:
        return []
    times: list[PrefetchTime] = []
    for members in _group_sizes(level.size):
        mesh = microbenchmarks.make_mesh(devices, inner, members)
        computing, gathers, both = microbenchmarks.ahead_s(mesh, sizes.ahead, _ROUNDS)
        times.append(
            PrefetchTime(
                num_devices=members,
                computing_s=computing,
                gathers_s=gathers,
                together_s=both,
            )
        )
    return times


def _group_sizes(size: int) -> list[int]:
    """Chooses how many devices the measured collectives on a level have.

    A level is one stage of the links, such as those within a host. It joins `size`
    devices or groups of devices. The numbers are the smallest divisor of `size` above
    1, `size` itself, and the divisor nearest to the geometric mean of these two.

    >>> _group_sizes(8), _group_sizes(2), _group_sizes(6), _group_sizes(256)
    ([2, 4, 8], [2], [2, 3, 6], [2, 32, 256])
    """
    divisors = [n for n in range(2, size + 1) if size % n == 0]
    least, middle = divisors[0], (divisors[0] * size) ** 0.5
    near = min(divisors, key=lambda n: (abs(math.log(n / middle)), n))
    return sorted({least, near, size})


def _overlap(
    devices: Sequence[Any], device: DeviceType, sizes: BenchmarkSizes
) -> tuple[DeviceType, float]:
    """Times a matmul that runs at the same time as an all-reduce, and fits the overlap.

    `sizes.overlap` has the size of the matmul and the sizes of the all-reduces; it must
    not be None. The fit determines during which fraction of a computation collectives
    can run, and how much slower the computation then runs. Returns the device with
    these two numbers, and the median relative error of the fitted times.
    """
    _say("overlap ...")
    mesh = microbenchmarks.make_mesh(devices, 1, len(devices))
    assert sizes.overlap is not None
    side, all_bytes = sizes.overlap
    dtype, pace = sizes.dtypes[0], sizes.pace
    compute = microbenchmarks.matmul_s(mesh, side, side, side, dtype, pace).seconds
    times = [
        OverlapTime(
            compute_s=compute,
            collective_s=microbenchmarks.collective_s(
                mesh, "all_reduce", size, pace
            ).seconds,
            together_s=microbenchmarks.overlap_s(mesh, side, size, dtype, pace).seconds,
        )
        for size in all_bytes
    ]
    efficiency, off = fit_overlap(device.efficiency, times)
    return replace(device, efficiency=efficiency), off
