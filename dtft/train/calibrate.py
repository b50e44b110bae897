"""Measures the devices at hand in under a minute, and what that says of them.

Which are in `calibrate_sizes`, how it is measured in `measuring`, `measuring_links` and
`measuring_images`, what it means in `planner.calibration_fit` and `fit_meeting`. Must
not know files or commands (`calibrate_command`).
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from dtft.planner.cluster import Cluster, CollectiveKind, DeviceType, Level, Link
from dtft.planner.cost import (
    AheadTime,
    BehindTime,
    Calibration,
    CollectiveTime,
    ConvolutionTime,
    ElementTime,
    Fit,
    MatmulTime,
    MemoryTime,
    OverlapTime,
    fit_ahead,
    fit_convolutions,
    fit_elements,
    fit_link,
    fit_matmuls,
    fit_meeting,
    fit_memory,
    fit_overlap,
    fit_peak,
    link_key,
)
from dtft.train import measuring, measuring_images, measuring_links
from dtft.train.calibrate_sizes import ACCELERATOR, CPU, Sizes

_OFTEN: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
"""Kinds of which nearly every step has some, many behind each other."""
_OF_SIZES = 3
"""Times that each size of them is timed in jobs of several processes."""
_ROUNDS = 5
"""Times that collectives are timed behind and beside computing."""


def measure(devices: Sequence[Any], sizes: Sizes | None = None) -> Calibration:
    """Measures devices, all at once, and fits the planner's scalars.

    In a job of several processes all of them call it, with `jax.devices()`.

    Args:
        devices: of one type; see `Cluster.from_devices`.
        sizes: default: by the platform.
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
        link = fit_meeting(link, _behind(devices, inner, level, sizes))
        links[key] = fit_ahead(link, _ahead(devices, inner, level, sizes))
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
    devices: Sequence[Any], device: DeviceType, sizes: Sizes
) -> tuple[DeviceType, dict[str, Fit]]:
    """Memory first: it bounds what matmuls of few rows can reach."""
    mesh = measuring.make_mesh(devices, 1, len(devices))
    _say("memory ...")
    streams = [
        MemoryTime(
            num_bytes=size,
            seconds=measuring.stream_s(mesh, size, sizes.shared).seconds,
        )
        for size in sizes.streams
    ]
    fits: dict[str, Fit] = {}
    device, fits["memory"] = fit_memory(device, streams)
    _say("element-wise operators ...")
    device, fits["elements"] = fit_elements(device, _elements(mesh, sizes))
    if sizes.strided is not None:
        _say("transposed arrays ...")
        across = measuring.strided_s(mesh, sizes.strided, sizes.pace)
        made = replace(device.efficiency, strided_s=across)
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
        forward, back = measuring_images.windows_s(mesh, *sizes.images, sizes.pace)
        made = replace(device.efficiency, window_s=forward, window_back_s=back)
        device = replace(device, efficiency=made)
    return device, fits


def _elements(mesh: Any, sizes: Sizes) -> list[ElementTime]:
    """Every function of `measuring.ELEMENT_WISE`."""
    num = sizes.elements**2
    return [
        ElementTime(
            simple=num * simple,
            special=num * special,
            seconds=measuring.element_wise_s(
                mesh, name, sizes.elements, sizes.pace
            ).seconds,
        )
        for name, (_, simple, special) in measuring.ELEMENT_WISE.items()
    ]


def _convolutions(mesh: Any, sizes: Sizes) -> list[ConvolutionTime]:
    """Both passes of some, and those of three channels forward."""
    times = [
        ConvolutionTime(
            flops=2.0 * rows * side**2 * 9 * channels**2,
            channels=channels,
            strided=rows * side**2 * channels * measuring_images.GRADIENTS,
            seconds=measuring_images.convolution_s(
                mesh, rows, side, channels, sizes.pace
            ),
        )
        for rows, side, channels in sizes.convolutions
    ]
    if sizes.images is not None:
        rows, side, channels = sizes.images
        colours = measuring_images.COLOURS
        seconds = measuring_images.first_s(mesh, rows, side, channels, sizes.pace)
        first = ConvolutionTime(
            flops=2.0 * rows * side**2 * 9 * colours * channels,
            channels=channels,
            odd=True,
            seconds=seconds,
        )
        times.append(first)
    return times


def _matmuls(mesh: Any, dtype: str, sizes: Sizes) -> tuple[list[MatmulTime], float]:
    """Times, and the seconds to start a small program."""
    times, dispatch = [], []
    for m in sizes.rows:
        for n, k in sizes.dims:
            found = measuring.matmul_s(mesh, m, n, k, dtype, sizes.pace)
            times.append(MatmulTime(m=m, n=n, k=k, seconds=found.seconds))
            dispatch.append(found.dispatch_s)
    return times, min(dispatch)


def _collectives(
    devices: Sequence[Any], inner: int, level: Level, sizes: Sizes
) -> list[CollectiveTime]:
    """Every kind and size, among each number of devices of `_group_sizes`.

    Size by size: seconds in which the machine is slow meet all kinds alike. In jobs of
    several processes those that most steps have are timed as steps have them.
    """
    groups = _group_sizes(level.size)
    meshes = [measuring.make_mesh(devices, inner, members) for members in groups]
    in_step = jax.process_count() > 1 and sizes.behind > 0
    often: list[CollectiveKind] = [k for k in sizes.kinds if in_step and k in _OFTEN]
    times = [
        CollectiveTime(
            kind=kind,
            num_bytes=size,
            num_devices=members,
            seconds=measuring_links.collective_s(mesh, kind, size, sizes.pace).seconds,
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
    mesh: Any, kind: CollectiveKind, members: int, sizes: Sizes
) -> list[CollectiveTime]:
    """Every size of a kind behind computing; alone where noise hides what it takes."""
    found = measuring_links.behind_s(
        mesh, sizes.collectives, _OF_SIZES, kind, sizes.behind
    )
    return [
        CollectiveTime(
            kind=kind,
            num_bytes=size,
            num_devices=members,
            seconds=seconds
            if seconds > 0
            else measuring_links.collective_s(mesh, kind, size, sizes.pace).seconds,
        )
        for size, seconds in zip(sizes.collectives, found, strict=True)
    ]


def _behind(
    devices: Sequence[Any], inner: int, level: Level, sizes: Sizes
) -> list[BehindTime]:
    """All-reduces behind computing, in jobs of several processes only: what the threads
    of one lose so is not priced yet."""
    if jax.process_count() == 1 or not sizes.meeting:
        return []
    times: list[BehindTime] = []
    for members in _group_sizes(level.size):
        mesh = measuring.make_mesh(devices, inner, members)
        found = measuring_links.behind_s(mesh, sizes.meeting, _ROUNDS)
        times += [
            BehindTime(num_bytes=size, num_devices=members, seconds=seconds)
            for size, seconds in zip(sizes.meeting, found, strict=True)
        ]
    return times


def _ahead(
    devices: Sequence[Any], inner: int, level: Level, sizes: Sizes
) -> list[AheadTime]:
    """Gathers beside computing, in jobs of several processes, as `_behind`."""
    if jax.process_count() == 1 or not sizes.ahead:
        return []
    times: list[AheadTime] = []
    for members in _group_sizes(level.size):
        mesh = measuring.make_mesh(devices, inner, members)
        computing, gathers, both = measuring_links.ahead_s(mesh, sizes.ahead, _ROUNDS)
        times.append(
            AheadTime(
                num_devices=members,
                computing_s=computing,
                gathers_s=gathers,
                together_s=both,
            )
        )
    return times


def _group_sizes(size: int) -> list[int]:
    """Two, all, and about their geometric mean, of those that divide a level.

    >>> _group_sizes(8), _group_sizes(2), _group_sizes(6), _group_sizes(256)
    ([2, 4, 8], [2], [2, 3, 6], [2, 32, 256])
    """
    divisors = [n for n in range(2, size + 1) if size % n == 0]
    least, middle = divisors[0], (divisors[0] * size) ** 0.5
    near = min(divisors, key=lambda n: (abs(math.log(n / middle)), n))
    return sorted({least, near, size})


def _overlap(
    devices: Sequence[Any], device: DeviceType, sizes: Sizes
) -> tuple[DeviceType, float]:
    """A matmul beside all-reduces of several sizes."""
    _say("overlap ...")
    mesh = measuring.make_mesh(devices, 1, len(devices))
    assert sizes.overlap is not None
    side, all_bytes = sizes.overlap
    dtype, pace = sizes.dtypes[0], sizes.pace
    compute = measuring.matmul_s(mesh, side, side, side, dtype, pace).seconds
    times = [
        OverlapTime(
            compute_s=compute,
            collective_s=measuring_links.collective_s(
                mesh, "all_reduce", size, pace
            ).seconds,
            together_s=measuring_links.overlap_s(mesh, side, size, dtype, pace).seconds,
        )
        for size in all_bytes
    ]
    efficiency, off = fit_overlap(device.efficiency, times)
    return replace(device, efficiency=efficiency), off
