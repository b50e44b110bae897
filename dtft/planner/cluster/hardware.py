"""Device types and links: how fast each computes or sends, and how far these figures
are trusted.

Values only. Figures come from the catalog (level 0), a calibration (1), or past runs
(2).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

# Accuracy of predictions. The levels of reference section 5: catalog (0), measured (1),
# corrected by past runs (2).


UNCALIBRATED: Mapping[str, float] = {"compute": 0.25, "collectives": 0.5}
"""Relative errors expected of the catalog (level 0), by term; `other` as compute."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What a prediction says of the figures it is made of."""

    source: str = "catalog (uncalibrated)"
    """Where they come from, in a line."""
    errors: Mapping[str, float] = field(default_factory=lambda: dict(UNCALIBRATED))
    """Relative errors of a prediction's terms: `compute` (and all others) and
    `collectives`."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Term to the factor that past runs gave; terms without one are taken as they
    are."""

    def scale(self, term: str) -> float:
        """What a term of a prediction is multiplied by.

        >>> learnt = Accuracy(scales={"compute": 1.5})
        >>> learnt.scale("compute"), learnt.scale("launch")
        (1.5, 1.0)
        """
        return self.scales.get(term, 1.0)

    def interval_s(self, terms: Mapping[str, float]) -> tuple[float, float]:
        """The interval of a step's time that the figures support.

        Errors of different terms are taken as independent, those within a term as
        common.

        Args:
            terms: seconds by term.

        >>> low, high = Accuracy().interval_s({"compute": 3.0, "collectives": 1.0})
        >>> round(low, 2), round(high, 2)
        (3.1, 4.9)
        """
        total = sum(terms.values())
        common = sum(s for key, s in terms.items() if key != "collectives")
        apart = terms.get("collectives", 0.0)
        off = (common * self.errors["compute"]) ** 2
        off += (apart * self.errors["collectives"]) ** 2
        return max(0.0, total - off**0.5), total + off**0.5


CATALOG = Accuracy()
"""Of figures that nothing was measured for."""


# Types of devices: how fast each computes, how much memory it has.


Platform = Literal["cpu", "cuda", "rocm", "tpu", "other"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How much of a data sheet a program gets: the scalars that calibration fits.

    A matmul of x rows reaches e0 x / (x + x0) of the peak, less what is lost to whole
    tiles (`cost.shape_factor`). Reference section 7.
    """

    e0: float = 0.75
    """Share of the peak that large matmuls reach."""
    x0: float = 0.0
    """Rows at which half of that is reached."""
    c0: float = 0.0
    """Channels at which a convolution reaches half the speed of a matmul: patches are
    laid out first, which pays by the channels that they are used for."""
    odd: float = 1.0
    """How many times as long a convolution takes whose channels in are an odd number
    above one, such as colours: XLA's CPU backend multiplies them in pairs."""
    memory: float = 0.85
    """Share of the memory's bandwidth that a stream reaches."""
    cache_bytes: float = 0.0
    """Bytes of an operator that are at hand in a cache, if they were used just now."""
    cache_gain: float = 1.0
    """How many times as fast as the memory that cache is."""
    simple_s: float = 0.0
    """Seconds of one addition or product of an element-wise operator; 0: they cost
    nothing beside moving the bytes."""
    special_s: float = 0.0
    """Seconds of one exponential or similar function, beyond `simple_s`."""
    strided_s: float = 0.0
    """Seconds of one element that is read across the order in which elements lie, such
    as of a transposed gradient, beyond what it takes in that order."""
    window_s: float = 0.0
    """Seconds of one element of one window of `reduce_window`, as of max pooling; 0: an
    operation as any other."""
    window_back_s: float = 0.0
    """Seconds of one where a window's result is given back to the element it came of
    (`select_and_scatter_add`); 0: an operation as any other."""
    fuse: float = 0.5
    """Share of the bytes of unfused element-wise operators that is really moved."""
    launch_s: float = 5e-6
    """Seconds to start one operator."""
    dispatch_s: float = 0.0
    """Seconds in which the host starts a whole step, before any operator."""
    misaligned: float = 1.0
    """Speed of a matmul whose rows are not aligned, relative to one whose are."""
    overlap_kappa: float = 1.1
    """How much longer computing takes while a collective runs beside it."""
    overlap_fraction: float = 1.0
    """Share of the computing beside which collectives can run; 0: none overlap."""

    def __post_init__(self) -> None:
        shares = (self.e0, self.memory, self.fuse, self.misaligned)
        fine = all(0 < share <= 1 for share in shares)
        least = (self.x0, self.c0, self.launch_s, self.dispatch_s, self.cache_bytes)
        least += (self.simple_s, self.special_s, self.strided_s)
        least += (self.window_s, self.window_back_s)
        fine = fine and min(least) >= 0
        fine = fine and min(self.overlap_kappa, self.cache_gain, self.odd) >= 1
        if not (fine and 0 <= self.overlap_fraction <= 1):
            raise ValueError(
                f"{self}: no device is so. Allowed: e0, memory, fuse and misaligned "
                "above 0 and at most 1; x0, c0, cache_bytes and all seconds 0 or more; "
                "odd, overlap_kappa and cache_gain 1 or more; overlap_fraction 0 to 1."
            )


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """One type of device. Two devices of a type are the same to the planner."""

    name: str
    platform: Platform
    peak_flops: Mapping[str, float]
    """Dtype of a matmul's operands to FLOP/s, at JAX's default precision: float32 is
    TF32 on NVIDIA since Ampere and one bfloat16 pass on TPU."""
    memory_bytes: int
    memory_bandwidth: float
    """Bytes per second, reading and writing together."""
    cores: int = 1
    """Units that work on a matmul's tiles side by side (SMs)."""
    tile: tuple[int, int, int] = (1, 1, 1)
    """Tile (m, n, k) that matmuls are made of; smaller dims are padded to it."""
    alignment_bytes: int = 1
    """Rows that are no multiple of this run at `Efficiency.misaligned`."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    kernels: frozenset[str] | None = None
    """Operators that it can run: kinds (`graph.Kind`), primitives, or words such as
    `dense` (`kernels.CLASSES`); None: all, and of platform `other` none."""
    source: str

    def __post_init__(self) -> None:
        if self.platform not in get_args(Platform):
            raise ValueError(
                f"device {self.name!r}: platform={self.platform!r}. Allowed: "
                f"{', '.join(get_args(Platform))}; what JAX cannot run on, such as an "
                "FPGA, is 'other'."
            )
        figures = (self.memory_bytes, self.memory_bandwidth, self.cores)
        figures += (*self.tile, self.alignment_bytes, *self.peak_flops.values())
        if not self.peak_flops or any(figure <= 0 for figure in figures):
            raise ValueError(
                f"device {self.name!r}: peak_flops={dict(self.peak_flops)}, "
                f"memory_bytes={self.memory_bytes}, memory_bandwidth="
                f"{self.memory_bandwidth}, cores={self.cores}, tile={self.tile}, "
                f"alignment_bytes={self.alignment_bytes}. Allowed: at least one dtype "
                "with its peak, and figures above 0."
            )

    def peak(self, dtype: str) -> float:
        """FLOP/s of matmuls of a dtype.

        A float of another layout counts as the listed one of as many bits (float8
        types, bfloat16 for float16). What is not listed at all (int32, say) has no unit
        of its own and counts as the slowest.

        >>> peaks = {"bfloat16": 4.0, "float32": 2}
        >>> device = DeviceType(name="d", platform="cpu", memory_bytes=1,
        ...     memory_bandwidth=1.0, source="", peak_flops=peaks)
        >>> device.peak("float16"), device.peak("int32")
        (4.0, 2)
        """
        for name in (dtype, *_ALIKE.get(dtype[:6], ())):
            if name in self.peak_flops:
                return self.peak_flops[name]
        return min(self.peak_flops.values())


# By the first six letters of the dtype: what stands in for it, best first.
_ALIKE: Mapping[str, tuple[str, ...]] = {
    "float1": ("bfloat16", "float32"),
    "bfloat": ("float16", "float32"),
    "float8": ("float8_e4m3fn", "bfloat16", "float16"),
    "float4": ("float4_e2m1fn", "float8_e4m3fn", "bfloat16"),
    "int4": ("int8",),
    "uint8": ("int8",),
}


LinkKind = Literal[
    "NVLink", "PCIe", "CXL", "UPI", "InfiniBand", "Ethernet", "ICI", "loopback"
]
"""`loopback` joins devices or processes of one machine through its own memory."""

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"
]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Time of a transfer by its size: B(S) = bandwidth * S / (S + half_bytes).

    Reference section 7. All figures are of one direction.
    """

    latency_s: float
    """Seconds of an empty message, per hop (alpha)."""
    bandwidth: float
    """Bytes per second of large messages."""
    half_bytes: float = 0.0
    """Size at which half of that bandwidth is reached, through one port."""

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.half_bytes >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"latency_s={self.latency_s}, bandwidth={self.bandwidth}, "
                f"half_bytes={self.half_bytes}: no link is so. Allowed: bandwidth "
                "above 0 bytes per second, the others 0 or more."
            )

    def seconds(self, num_bytes: Any) -> Any:
        """Seconds of one message; a number or an array of them.

        >>> Curve(latency_s=1e-6, bandwidth=1e9, half_bytes=1e3).seconds(1e3)
        3e-06
        """
        return self.latency_s + (num_bytes + self.half_bytes) / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Link:
    """A port through which a device reaches the others of its level.

    A device that shares its port with `shared_by - 1` others gets that part of its
    bandwidth, as every device of an SPMD program communicates at once (reference
    section 7: a PCIe switch, UPI, a CXL switch, one network card for g devices).
    """

    kind: LinkKind
    curve: Curve
    """Of one port."""
    shared_by: int = 1
    """Devices that share one port."""
    source: str
    """Where the figures come from."""
    measured: Mapping[CollectiveKind, Mapping[int, Curve]] = field(default_factory=dict)
    """Collectives that have curves of their own, such as sums done in the switch: by
    the number of devices that they were measured among."""
    meeting: Mapping[int, float] = field(default_factory=dict)
    """By number of devices: seconds that a collective behind computing takes beyond its
    own. Members come at unlike times, and who waits has to be woken. Empty: none."""
    ahead: Mapping[int, float] = field(default_factory=dict)
    """By number of devices: share of a gather that is hidden beside computing, where it
    waits for nothing that is computed; 0 to 1. Empty: none."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(LinkKind):
            raise ValueError(
                f"kind={self.kind!r} is no kind of link. Allowed: "
                f"{', '.join(get_args(LinkKind))}."
            )
        if self.shared_by < 1:
            raise ValueError(
                f"shared_by={self.shared_by} of a {self.kind} link. Allowed: 1 (a port "
                "for each device) or more."
            )
        if not all(self.measured.values()):
            raise ValueError("measured has a collective without a curve. Leave it out.")
        if any(seconds < 0 for seconds in self.meeting.values()):
            raise ValueError(
                f"meeting={dict(self.meeting)} of a {self.kind} link. Allowed: 0 "
                "seconds or more of each number of devices."
            )
        if not all(0 <= share <= 1 for share in self.ahead.values()):
            raise ValueError(
                f"ahead={dict(self.ahead)} of a {self.kind} link. Allowed: a share of "
                "0 to 1 for each number of devices."
            )
        if unknown := set(self.measured) - set(get_args(CollectiveKind)):
            raise ValueError(
                f"measured={sorted(unknown)} are no collectives. Allowed: "
                f"{', '.join(get_args(CollectiveKind))}."
            )

    def curve_of(self, kind: CollectiveKind, num_devices: float) -> Curve:
        """The curve of a kind of collective among some devices of this link.

        Between the numbers of devices that were measured it is interpolated (by their
        logarithm), beyond them the nearest counts.
        """
        curves = self.measured.get(kind)
        if not curves:
            return self.curve
        low, high, share = _beside(num_devices, curves)
        return _between(curves[low], curves[high], share) if share else curves[low]

    def sync_skew_s(self, num_devices: float) -> float:
        """Seconds of `meeting` among some devices, interpolated as curves are.

        >>> port = Curve(latency_s=1e-6, bandwidth=1e9)
        >>> seconds = {2: 1.0, 8: 2.0}
        >>> link = Link(kind="loopback", curve=port, source="", meeting=seconds)
        >>> [link.sync_skew_s(n) for n in (1, 2, 4, 16)]
        [0.0, 1.0, 1.5, 2.0]
        """
        return _known(num_devices, self.meeting)

    def hidden(self, num_devices: float) -> float:
        """The share of `ahead` among some devices, interpolated as curves are."""
        return _known(num_devices, self.ahead)


def _beside(num_devices: float, known: Iterable[int]) -> tuple[int, int, float]:
    """The numbers below and above, and how far it lies between them (0: at the first).

    Beyond what is known, the nearest.
    """
    numbers = sorted(known)
    low = max((n for n in numbers if n <= num_devices), default=numbers[0])
    high = min((n for n in numbers if n >= num_devices), default=numbers[-1])
    if low >= high:
        return high, high, 0.0
    return low, high, math.log(num_devices / low) / math.log(high / low)


def _known(num_devices: float, figures: Mapping[int, float]) -> float:
    """A figure measured by number of devices; 0 of one device, and if unmeasured."""
    if num_devices <= 1 or not figures:
        return 0.0
    low, high, share = _beside(num_devices, figures)
    return _mean(figures[low], figures[high], share)


def _mean(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _between(low: Curve, high: Curve, share: float) -> Curve:
    """Seconds per byte, not bytes per second, are what adds up."""
    return Curve(
        latency_s=_mean(low.latency_s, high.latency_s, share),
        bandwidth=1 / _mean(1 / low.bandwidth, 1 / high.bandwidth, share),
        half_bytes=_mean(low.half_bytes, high.half_bytes, share),
    )
