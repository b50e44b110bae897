"""`dtft calibrate`: measures this machine in under a minute, writes the planner's file.

With the logs of past runs it also corrects the terms of predictions by what steps
really took. What is measured is in `measuring`, what it means in `planner.calibration_fit`; here is
which sizes, and the table. Sets no target.
"""

import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from dtft.planner.calibration import Calibration, link_key
from dtft.planner.calibration_fit import (
    CollectiveTime,
    ConvolutionTime,
    ElementTime,
    Fit,
    MatmulTime,
    MemoryTime,
    OverlapTime,
    fit_convolutions,
    fit_elements,
    fit_link,
    fit_matmuls,
    fit_memory,
    fit_overlap,
    fit_peak,
)
from dtft.planner.cluster import Cluster, DeviceType, Level, Link
from dtft.planner.links import CollectiveKind
from dtft.planner.past_runs import PastRun, learn, read_log
from dtft.train import measuring
from dtft.train.heap import keep_freed
from dtft.train.measuring import Pace


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured on a platform."""

    dtypes: tuple[str, ...]
    """Of matmuls; the first decides the efficiency."""
    rows: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]
    """(n, k) of matmuls."""
    streams: tuple[int, ...]
    """Bytes read and written."""
    convolutions: tuple[tuple[int, int, int], ...]
    """Rows, side and channels of convolutions."""
    elements: int
    """Side of a square array, small enough to stay at hand."""
    collectives: tuple[int, ...]
    """Bytes."""
    overlap: tuple[int, tuple[int, ...]] | None
    """Side of a matmul, and bytes of the all-reduces beside it; None: nothing overlaps,
    a device computes and communicates in one thread."""
    pace: Pace = Pace()


def _powers(first: int, last: int, num: int) -> tuple[int, ...]:
    """Sizes evenly spaced as logarithms, multiples of 1024."""
    ratio = (last / first) ** (1 / (num - 1))
    return tuple(round(first * ratio**n / 1024) * 1024 for n in range(num))


CPU = Sizes(
    dtypes=("float32",),
    rows=(8, 32, 128, 512),
    dims=((64, 64), (256, 256), (128, 512), (512, 512), (1024, 256)),
    streams=_powers(2**18, 2**27, 7),
    convolutions=((8, 16, 8), (8, 8, 32), (4, 8, 128)),
    elements=128,
    collectives=_powers(2**12, 2**24, 8),
    overlap=None,
)
ACCELERATOR = Sizes(
    dtypes=("bfloat16", "float32"),
    rows=(128, 512, 2048, 8192),
    dims=((512, 512), (1024, 4096), (2048, 2048), (4096, 4096), (8192, 4096)),
    streams=_powers(2**22, 2**30, 5),
    convolutions=((64, 32, 32), (64, 32, 128), (64, 16, 512)),
    elements=2048,
    collectives=_powers(2**14, 2**28, 8),
    overlap=(4096, (2**20, 2**24, 2**26)),
)


def run(options: Namespace) -> int:
    """Runs the command.

    Raises:
        ValueError: more devices than there are, no folder for the file, or a file that
            is no calibration or no log of runs.
    """
    if options.out and not Path(options.out).absolute().parent.is_dir():
        raise ValueError(
            f"--out {options.out}: the folder {Path(options.out).parent} does not "
            "exist. Make it, or name another."
        )
    runs = [run for path in options.runs for run in _runs(Path(path))]
    begin = time.perf_counter()
    found = Calibration.read(options.given) if options.given else _measured(options)
    learnt = learn(found, runs)
    print(table(learnt))
    if not options.given:
        print(f"measured in {time.perf_counter() - begin:.0f} s")
    if options.runs:
        print(f"{learnt.num_runs} of {len(runs)} past runs are of this cluster")
    found = learnt
    if options.out:
        Path(options.out).write_text(found.to_json() + "\n")
        print(f"written to {options.out}")
    return 0


def _measured(options: Namespace) -> Calibration:
    devices = _devices(options.devices)
    if devices[0].platform == "cpu":  # as trainers do
        keep_freed()
    return measure(devices)


def _runs(path: Path) -> list[PastRun]:
    try:
        return read_log(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--runs {path}: {error}") from None


def _devices(number: int | None) -> list[Any]:
    """The devices to measure; on CPU as many as wanted are made."""
    import jax

    if number is not None and number < 1:
        raise ValueError(f"--devices {number}: give 1 or more.")
    settings: Any = jax.config
    given = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if number is not None and not given and settings.jax_num_cpu_devices < 1:
        jax.config.update("jax_num_cpu_devices", number)
    devices = jax.devices()
    if number is not None and number > len(devices):
        raise ValueError(
            f"--devices {number}: this machine has {len(devices)}. Allowed: 1 to "
            f"{len(devices)}; CPU devices are made with JAX_PLATFORMS=cpu."
        )
    return devices[:number]


def measure(devices: Sequence[Any], sizes: Sizes | None = None) -> Calibration:
    """Measures devices, all at once, and fits the planner's scalars.

    In a job of several processes all of them call it, with `jax.devices()`.

    Args:
        devices: of one type; see `Cluster.from_devices`.
        sizes: default: by the platform.
    """
    import jax

    pool = Cluster.from_devices(devices).uniform
    sizes = sizes or (CPU if pool.device.platform == "cpu" else ACCELERATOR)
    device, fits = _compute(devices, pool.device, sizes)
    links: dict[str, Link] = {}
    inner = 1
    for level in pool.levels:
        key = link_key(level.link)
        _say(f"collectives on {key} ...")
        times = _collectives(devices, inner, level, sizes)
        links[key], found = fit_link(level.link, times)
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
            num_bytes=size, seconds=measuring.stream_s(mesh, size, sizes.pace).seconds
        )
        for size in sizes.streams
    ]
    fits: dict[str, Fit] = {}
    device, fits["memory"] = fit_memory(device, streams)
    _say("element-wise operators ...")
    device, fits["elements"] = fit_elements(device, _elements(mesh, sizes))
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
    return [
        ConvolutionTime(
            flops=2.0 * rows * side**2 * 9 * channels**2,
            channels=channels,
            seconds=measuring.convolution_s(mesh, rows, side, channels, sizes.pace),
        )
        for rows, side, channels in sizes.convolutions
    ]


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
    """Every kind and size, among each number of devices of `_group_sizes`."""
    times = []
    for members in _group_sizes(level.size):
        mesh = measuring.make_mesh(devices, inner, members)
        for kind in get_args(CollectiveKind):
            for size in sizes.collectives:
                found = measuring.collective_s(mesh, kind, size, sizes.pace)
                times.append(
                    CollectiveTime(
                        kind=kind,
                        num_bytes=size,
                        num_devices=members,
                        seconds=found.seconds,
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
            collective_s=measuring.collective_s(mesh, "all_reduce", size, pace).seconds,
            together_s=measuring.overlap_s(mesh, side, size, dtype, pace).seconds,
        )
        for size in all_bytes
    ]
    efficiency, off = fit_overlap(device.efficiency, times)
    return replace(device, efficiency=efficiency), off


def table(found: Calibration) -> str:
    """What was found, with errors, for people."""
    efficiency = found.efficiency
    lines = [f"{found.num_devices} x {found.device}, {found.software}", ""]
    lines += [f"{'scalar':<44}{'value':>16}{'error':>9}"]

    def row(name: str, value: str, error: str = "") -> None:
        of = found.errors.get(error)
        lines.append(f"{name:<44}{value:>16}{'' if of is None else f'{of:>8.1%}'}")

    for dtype, peak in found.peak_flops.items():
        row(f"peak {dtype}", f"{peak / 1e9:.1f} GFLOP/s")
    row("e0, share of the peak", f"{efficiency.e0:.3f}", "matmul: e0")
    row("x0, rows at half of it", f"{efficiency.x0:.1f}", "matmul: x0")
    row("c0, channels at half of it", f"{efficiency.c0:.1f}", "convolutions: c0")
    row("start of an operator", _us(efficiency.launch_s), "matmul: launch_s")
    row("start of a step", _us(efficiency.dispatch_s))
    reached = found.memory_bandwidth * efficiency.memory
    row("memory", f"{reached / 1e9:.1f} GB/s", "memory: bandwidth")
    cached = reached * efficiency.cache_gain
    row("cache", f"{cached / 1e9:.1f} GB/s", "memory: cache_gain")
    row("    up to", f"{efficiency.cache_bytes / 2**20:.2f} MiB")
    row("element-wise operation", _ns(efficiency.simple_s), "elements: simple_s")
    row("    one like exp", _ns(efficiency.special_s), "elements: special_s")
    for key, link in found.links.items():
        for kind, curves in link.measured.items():
            for n, curve in curves.items():
                of = f"collectives on {key}, {kind} of {n}"
                row(
                    f"{kind} of {n}, {key}: latency",
                    _us(curve.latency_s),
                    f"{of}: latency_s",
                )
                rate = f"{curve.bandwidth / 1e9:.3f} GB/s"
                row("    bandwidth", rate, f"{of}: bandwidth")
    if found.links:
        row("overlap: computing slowed by", f"{efficiency.overlap_kappa:.2f}")
        row("overlap: share of computing", f"{efficiency.overlap_fraction:.2f}")
    for term, factor in found.scales.items():
        row(f"past runs: {term} takes", f"{factor:.3f} times", f"scale {term}")
    lines += ["", f"{'fit':<44}{'median error':>16}"]
    lines += [f"{name:<44}{off:>16.1%}" for name, off in found.residuals.items()]
    return "\n".join(lines)


def _ns(seconds: float) -> str:
    return f"{seconds * 1e9:.3f} ns"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us"
