"""Fits the cost model's figures of devices and links to measured times.

`fit` is a least-squares fit of logarithms with soft-L1 loss: outliers count little, and
short times count as much as long times. Overlap, sync skew and prefetch overlap have
fits of their own, without standard errors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from dtft.planner.cluster import CollectiveKind, Curve, DeviceType, Efficiency, Link
from dtft.planner.cost.collectives import collective_s
from dtft.planner.cost.compute import added_s, matmul_s
from dtft.planner.cost.mesh_topology import DeviceGroup

NOISE = 0.05
"""Relative error above which a measurement counts as an outlier."""
_WEAK = 3.0
"""Prior standard deviation of the logarithm of a fitted figure around its start value.
The prior matters only for figures that the measurements do not determine, such as
`latency_s` and `half_bytes`, which both add a constant time."""


@dataclass(frozen=True, kw_only=True)
class CalibrationFit:
    """Fitted figures by name, their standard errors, and the errors of predictions."""

    values: Mapping[str, float]
    errors: Mapping[str, float]
    """Relative standard error of each figure (of its logarithm)."""
    residual: float
    """Median of |predicted / measured - 1|."""
    worst: float
    """Maximum of |predicted / measured - 1|."""
    num: int
    """The number of measurements."""


def fit(
    predict: Callable[[Mapping[str, float]], Any],
    start: Mapping[str, float],
    measured: Sequence[float],
    bounds: Mapping[str, tuple[float, float]] | None = None,
    spread: float = _WEAK,
) -> CalibrationFit:
    """Fits positive figures so that predictions match the measurements.

    Args:
        predict: function from the figures, by name, to predicted seconds, one per
            measurement.
        start: map from the name of each figure to its start value, above 0; a figure
            that the measurements do not determine stays near its start value.
        measured: measured seconds.
        bounds: least and greatest value of some figures, by name.
        spread: prior standard deviation of the logarithm of each figure around its
            start value.

    Raises:
        ValueError: `measured` is empty, or has a time that is not above 0.
    """
    seconds = np.asarray(measured, float)
    if seconds.size == 0 or not (seconds > 0).all():
        raise ValueError(
            f"measured={list(measured)}. Allowed: one time or more, all above 0 s."
        )
    from scipy.optimize import least_squares  # slow to import; a trainer fits nothing

    names = list(start)
    first = np.array([start[name] for name in names])

    def values(theta: np.ndarray) -> dict[str, float]:
        return dict(zip(names, (first * np.exp(theta)).tolist(), strict=True))

    def residuals(theta: np.ndarray) -> np.ndarray:
        predicted = np.asarray(predict(values(theta)), float)
        return np.concatenate([np.log(predicted / seconds) / NOISE, theta / spread])

    wide = {name: (1e-300, 1e300) for name in names} | dict(bounds or {})
    low, high = (
        np.log([wide[name][end] / start[name] for name in names]) for end in (0, 1)
    )
    begin = np.clip(np.zeros(len(names)), low + 1e-9, high - 1e-9)
    found = least_squares(
        residuals, begin, bounds=(low, high), loss="soft_l1", x_scale=1.0
    )
    off = residuals(found.x)[: seconds.size]
    relative = np.abs(np.expm1(off * NOISE))
    return CalibrationFit(
        values=values(found.x),
        errors=dict(zip(names, _errors(found.jac, off), strict=True)),
        residual=float(np.median(relative)),
        worst=float(relative.max()),
        num=seconds.size,
    )


def _errors(jacobian: np.ndarray, off: np.ndarray) -> list[float]:
    """Computes standard errors of the figures' logarithms from the inverse of J^T J.

    Args:
        jacobian: J, the derivatives of all residuals by the logarithms; [residuals,
            figures].
        off: residuals of the measurements alone; their spread scales the errors.
    """
    spread = max(1.4826 * float(np.median(np.abs(off))), 1e-3)
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * spread**2
    return np.sqrt(np.diag(covariance)).tolist()


# Measured times, and the fits of the cost model's scalars.


_BEYOND = 2
"""This many of the largest measured sizes are never taken as the cache size."""
_PLAIN = 0.2
"""`fit_memory` fits no cache if bandwidth alone predicts all memory times within this
relative error."""


@dataclass(frozen=True, kw_only=True)
class MatmulTime:
    """Seconds of one matmul (m, k) by (k, n), run on every device at once."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MemoryTime:
    """Seconds to read and write bytes on one device, run on every device at once."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ElementTime:
    """Seconds of element-wise operations on an array, run on every device at once."""

    simple: float
    """The number of all operations, special functions included."""
    special: float
    """The number of special functions, such as exp."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ConvolutionTime:
    """Seconds of one convolution, run on every device at once."""

    flops: float
    channels: int
    """Output channels; also the input channels, unless `odd`."""
    odd: bool = False
    """Whether the number of input channels is odd."""
    strided: float = 0.0
    """The number of elements that are first copied into another layout."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """Seconds of one collective, run in all groups of `num_devices` devices at once.

    `num_bytes` is the larger of a device's operand and its result.
    """

    kind: CollectiveKind
    num_bytes: int
    num_devices: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class OverlapTime:
    """Seconds of a computation and an independent collective, alone and together."""

    compute_s: float
    collective_s: float
    together_s: float


def fit_memory(
    device: DeviceType, times: Sequence[MemoryTime]
) -> tuple[DeviceType, CalibrationFit]:
    """Fits a device's memory bandwidth, cache bandwidth and cache size.

    The launch time of an operator is fitted too; it is in the returned fit, but not in
    the returned device. Small arrays that are used repeatedly stay in a cache; other
    bytes are moved through the memory. If bandwidth alone explains the times, there is
    no cache. Otherwise each measured size but the two largest is tried as the cache
    size, and the size whose fit has the smallest worst error is taken. So at least two
    sizes lie beyond the cache: a single slow size could be noise.

    All devices run in the measurement. If devices share a cache or memory, the figures
    are those of one device's share.
    """
    cache_bytes, found = _fit_memory(device, times, 0.0)
    sizes = sorted({float(time.num_bytes) for time in times})[:-_BEYOND]
    if found.worst > _PLAIN and sizes:
        tries = [_fit_memory(device, times, size) for size in sizes]
        cache_bytes, found = min(tries, key=lambda one: one[1].worst)
    reached = found.values["bandwidth"]
    bandwidth = max(device.memory_bandwidth, reached)
    if device.platform == "cpu":  # the catalog's figure is an order of magnitude
        bandwidth = reached
    made = replace(
        device.efficiency,
        memory=reached / bandwidth,
        cache_bytes=cache_bytes,
        cache_gain=found.values["cache_gain"] if cache_bytes else 1.0,
    )
    return replace(device, memory_bandwidth=bandwidth, efficiency=made), found


def _fit_memory(
    device: DeviceType, times: Sequence[MemoryTime], cache_bytes: float
) -> tuple[float, CalibrationFit]:
    """Fits memory and cache bandwidth for a cache of a given size in bytes.

    Returns `cache_bytes` and the fit.
    """
    num_bytes = np.array([time.num_bytes for time in times], float)
    near = np.minimum(num_bytes, cache_bytes)

    def predict(values: Mapping[str, float]) -> Any:
        moved = num_bytes - near * (1 - 1 / values["cache_gain"])
        return values["launch_s"] + moved / values["bandwidth"]

    found = fit(
        predict,
        {
            "bandwidth": min(time.num_bytes / time.seconds for time in times),
            "cache_gain": 4.0,
            "launch_s": device.efficiency.launch_s,
        },
        [time.seconds for time in times],
        {"launch_s": (1e-9, 1.0), "cache_gain": (1.0, 1e3)},
    )
    return cache_bytes, found


def fit_elements(
    device: DeviceType, times: Sequence[ElementTime]
) -> tuple[DeviceType, CalibrationFit]:
    """Fits `simple_s` and `special_s` of `Efficiency` to measured times.

    These are the seconds of one element-wise operation, and the extra seconds of an exp
    or similar function. The time to move the bytes of the operations is not modelled.
    """
    simple, special = np.array([(t.simple, t.special) for t in times], float).T
    found = fit(
        lambda v: simple * v["simple_s"] + special * v["special_s"],
        {"simple_s": 1e-10, "special_s": 1e-9},
        [time.seconds for time in times],
    )
    return replace(device, efficiency=replace(device.efficiency, **found.values)), found


def fit_matmuls(
    device: DeviceType, dtype: str, times: Sequence[MatmulTime]
) -> tuple[DeviceType, CalibrationFit]:
    """Fits a device's matmul efficiency and launch time to measured matmuls.

    Fitted are the share of the peak that large matmuls reach (`Efficiency.e0`), the
    number of rows m with which a matmul reaches half of this share (`x0`), and the
    seconds to launch an operator (`launch_s`).

    On a CPU, or if a matmul was faster than the peak, the best measured speed becomes
    the new peak. The peaks of other dtypes then change by the same factor.

    Here and in `fit_peak`, times of float32 are those of JAX's default precision, so on
    GPUs with TensorFloat-32 the peak is that of `tensorfloat32`.
    """
    reached = max(2.0 * t.m * t.n * t.k / t.seconds for t in times)
    if device.platform == "cpu" or reached > device.peak(dtype):
        growth = reached / device.peak(dtype)
        peaks = {name: peak * growth for name, peak in device.peak_flops.items()}
        computed_in, _ = device.computed_in(dtype)
        device = replace(device, peak_flops={**peaks, computed_in: reached})
    m, n, k = np.array([(t.m, t.n, t.k) for t in times], float).T

    def predict(values: Mapping[str, float]) -> Any:
        made = replace(device, efficiency=replace(device.efficiency, **values))
        return matmul_s(made, m, n, k, dtype=dtype) + values["launch_s"]

    given = device.efficiency
    start = {"e0": given.e0, "x0": max(given.x0, 8.0), "launch_s": given.launch_s}
    bounds = {"e0": (1e-3, 1.0), "x0": (1e-2, 1e5), "launch_s": (1e-9, 1.0)}
    found = fit(predict, start, [t.seconds for t in times], bounds)
    return replace(device, efficiency=replace(given, **found.values)), found


def fit_convolutions(
    device: DeviceType, dtype: str, times: Sequence[ConvolutionTime]
) -> tuple[DeviceType, CalibrationFit]:
    """Fits how much slower convolutions of few channels are than large matmuls.

    This is `Efficiency.c0`, the number of output channels at which a convolution is
    half as fast. If `times` has convolutions of an odd number of input channels, also
    fits `Efficiency.odd`, the slowdown of these convolutions.
    """
    flops, channels = np.array([(t.flops, t.channels) for t in times], float).T
    alone = flops / (device.peak(dtype) * device.efficiency.e0)
    odd = np.array([time.odd for time in times])
    across = np.array([time.strided for time in times]) * device.efficiency.strided_s

    def predict(values: Mapping[str, float]) -> Any:
        longer = np.where(odd, values.get("odd", 1.0), 1.0)
        return alone * (1 + values["c0"] / channels) * longer + across

    found = fit(
        predict,
        {"c0": 32.0, **({"odd": 2.0} if odd.any() else {})},
        [time.seconds for time in times],
        {"c0": (1e-3, 1e5), "odd": (1.0, 100.0)},
    )
    return replace(device, efficiency=replace(device.efficiency, **found.values)), found


def fit_peak(device: DeviceType, dtype: str, times: Sequence[MatmulTime]) -> DeviceType:
    """Fits the peak FLOP/s of one more dtype to measured matmuls of this dtype.

    The peak is stored for the dtype that these matmuls are computed in
    (`DeviceType.computed_in`). The device's efficiency stays unchanged.
    """
    m, n, k = np.array([(t.m, t.n, t.k) for t in times], float).T
    computed_in, _ = device.computed_in(dtype)

    def predict(values: Mapping[str, float]) -> Any:
        peaks = {**device.peak_flops, computed_in: values["peak"]}
        made = replace(device, peak_flops=peaks)
        return matmul_s(made, m, n, k, dtype=dtype) + device.efficiency.launch_s

    found = fit(predict, {"peak": device.peak(dtype)}, [t.seconds for t in times])
    return replace(
        device, peak_flops={**device.peak_flops, computed_in: found.values["peak"]}
    )


def fit_link(
    link: Link, times: Sequence[CollectiveTime]
) -> tuple[Link, dict[str, CalibrationFit]]:
    """Fits `Curve`s of transfer times to the measured collectives of a link.

    One curve is fitted to all collectives (`Link.curve`), and one to those of each kind
    and group size (`Link.measured`).

    Args:
        link: the catalog's link; `kind` and `shared_by` stay unchanged.
        times: times of groups whose devices communicate over this link alone.

    Returns:
        The fitted link, and the fits by name: `all` is the fit of the link's own curve,
        `all_reduce of 8` the fit of the curve for all-reduces among 8 devices.
    """
    begin = {
        "latency_s": link.curve.latency_s,
        "bandwidth": link.curve.bandwidth,
        "half_bytes": max(link.curve.half_bytes, 1e3),
    }
    fits = {"all": _fit_curve(link, begin, times)}
    common = fits["all"].values
    curves: dict[CollectiveKind, dict[int, Curve]] = {}
    pairs: list[tuple[CollectiveKind, int]]
    pairs = [(time.kind, time.num_devices) for time in times]
    for kind, n in dict.fromkeys(pairs):
        own = [time for time in times if (time.kind, time.num_devices) == (kind, n)]
        # At one group size, latency and half_bytes cannot be told apart.
        straight = {name: common[name] for name in ("latency_s", "bandwidth")}
        found = fits[f"{kind} of {n}"] = _fit_curve(link, straight, own)
        curves.setdefault(kind, {})[n] = Curve(**found.values)
    return replace(link, curve=Curve(**common), measured=curves), fits


def _fit_curve(
    link: Link, begin: Mapping[str, float], times: Sequence[CollectiveTime]
) -> CalibrationFit:
    num_bytes = np.array([time.num_bytes for time in times], float)
    places: dict[tuple[CollectiveKind, int], list[int]] = {}
    for place, time in enumerate(times):
        places.setdefault((time.kind, time.num_devices), []).append(place)

    def predict(values: Mapping[str, float]) -> np.ndarray:
        curve = Curve(**values)
        seconds = np.empty(len(times))
        for (kind, n), at in places.items():
            # The fit uses the same path as predictions: a measured curve stands for
            # the backend's own algorithm.
            port = replace(link, curve=curve, measured={kind: {n: curve}})
            group = DeviceGroup(sizes=(n,), links=(port,))
            seconds[at] = collective_s(kind, num_bytes[at], group)
        return seconds

    bounds = {"latency_s": (1e-8, 1.0), "half_bytes": (1.0, 1e9)}
    known = {name: limits for name, limits in bounds.items() if name in begin}
    return fit(predict, begin, [time.seconds for time in times], known)


def fit_overlap(
    given: Efficiency, times: Sequence[OverlapTime]
) -> tuple[Efficiency, float]:
    """Fits how much of the computation can hide collectives, and how it slows down.

    Tries pairs of two figures: the share of the computation that can hide collectives
    (`Efficiency.overlap_fraction`), and the factor on the seconds of computation while
    it hides them (`overlap_kappa`). Keeps the pair with the smallest median error. Of
    about equally good pairs, keeps the pair with the smallest share.

    Args:
        given: the efficiency of the device type before the fit.
        times: the measured computations and collectives.

    Returns:
        The efficiency with both figures, and the median relative error of the predicted
        seconds.
    """
    compute, collective, together = np.array(
        [(t.compute_s, t.collective_s, t.together_s) for t in times]
    ).T
    best, least = given, math.inf
    for fraction in np.linspace(0.0, 1.0, 21):
        for kappa in np.linspace(1.0, 2.0, 21):
            made = replace(
                given, overlap_kappa=float(kappa), overlap_fraction=float(fraction)
            )
            predicted = compute + added_s(made, collective, compute)
            off = float(np.median(np.abs(predicted / together - 1)))
            if off < least - 1e-3:
                best, least = made, off
    return best, least


# Fits of sync skew and prefetch overlap, from collectives run with computation.


@dataclass(frozen=True, kw_only=True)
class SyncSkewTime:
    """Seconds that an all-reduce adds to computation that depends on the all-reduce.

    The all-reduce waits for computation before it, and computation after it waits for
    the all-reduce. `num_bytes` is the size of a device's operand, and `num_devices` the
    number of devices of a group.
    """

    num_bytes: int
    num_devices: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PrefetchTime:
    """Seconds of computation and its prefetched gathers, alone and together.

    The computation needs the gathers; the gathers do not wait for the computation.
    """

    num_devices: int
    computing_s: float
    gathers_s: float
    together_s: float


def fit_sync_skew(link: Link, times: Sequence[SyncSkewTime]) -> Link:
    """Fits how long devices of a link wait for each other, by number of devices.

    From each measured time of an all-reduce, subtracts the seconds that the cost model
    predicts for the all-reduce alone. The sync skew (`Link.meeting`, in seconds) is the
    median of these differences, and at least 0.

    Args:
        link: a link that `fit_link` has fitted.
        times: times of groups whose devices communicate over this link alone; without
            times, `meeting` is empty.
    """
    left: dict[int, list[float]] = {}
    for time in times:
        group = DeviceGroup(sizes=(time.num_devices,), links=(link,))
        alone = collective_s("all_reduce", time.num_bytes, group)
        left.setdefault(time.num_devices, []).append(time.seconds - alone)
    meeting = {n: max(0.0, median(own)) for n, own in left.items()}
    return replace(link, meeting=meeting)


def fit_prefetch_overlap(link: Link, times: Sequence[PrefetchTime]) -> Link:
    """Computes the share of a gather that computation hides, by number of devices.

    Args:
        link: the link that the measured groups communicate over.
        times: one measurement for each number of devices, of groups that use no other
            link.

    Returns:
        The link with these shares, 0 to 1, as `Link.ahead`; empty without `times`.

    In the example, the gathers add 1 s to the 4 s of computation, so computation hides
    1 s of their 2 s.

    >>> from dtft.planner.cluster.hardware import Curve
    >>> port = Curve(latency_s=1e-6, bandwidth=1e9)
    >>> time = PrefetchTime(
    ...     num_devices=2, computing_s=4.0, gathers_s=2.0, together_s=5.0
    ... )
    >>> fit_prefetch_overlap(Link(kind="loopback", curve=port, source=""), [time]).ahead
    {2: 0.5}
    """
    ahead = {
        time.num_devices: 1 - (time.together_s - time.computing_s) / time.gathers_s
        for time in times
    }
    return replace(link, ahead={n: min(max(x, 0.0), 1.0) for n, x in ahead.items()})
