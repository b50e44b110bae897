"""Speeds of device types and links, and the accuracy of these figures.

The classes hold values only. Figures come from the catalog (level 0), a calibration
(level 1), or past runs (level 2).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

# Accuracy of predictions in three levels: figures of the catalog (0), measured (1),
# corrected by past runs (2).


INTERVAL_SHARE = 0.8
"""Share of measured step times that prediction intervals are meant to hold."""
UNCALIBRATED: Mapping[str, float] = {"compute": 0.205, "collectives": 0.41}
"""Relative errors of predictions with the catalog's figures (level 0), by term of a
prediction; all terms but `collectives` have the error of `compute`. Derived, like
`CARRIED_OVER`, from the rows of published tables that were not used to fit constants
(`experiments/public_measurements.py`)."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Relative errors of predicted step times, and factors fitted to past runs.

    A step time is predicted as a sum. A term is a part of this sum, such as the seconds
    of `compute` or of `collectives` (`Prediction.terms`).
    """

    source: str = "catalog (uncalibrated)"
    """Origin of the figures, in one line."""
    errors: Mapping[str, float] = field(default_factory=lambda: dict(UNCALIBRATED))
    """Relative errors of a prediction's terms: `collectives`, and `compute` for all
    other terms. With these errors of the terms, the prediction interval holds 80 %
    (`INTERVAL_SHARE`) of measured step times, and half of the other step times are
    above the interval."""
    below: float = 1.0
    """Width of the prediction interval below the prediction, relative to the width
    above."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Map from a term of a prediction to its factor fitted to past runs; other terms
    have the factor 1."""

    def scale(self, term: str) -> float:
        """Returns the factor of a term, such as `compute`, fitted to past runs.

        1 for a term without a fit.

        >>> learnt = Accuracy(scales={"compute": 1.5})
        >>> learnt.scale("compute"), learnt.scale("launch")
        (1.5, 1.0)
        """
        return self.scales.get(term, 1.0)

    def interval_s(self, terms: Mapping[str, float]) -> tuple[float, float]:
        """Computes the prediction interval of a step's time from the terms' errors.

        The error of `collectives` and that of all other terms together are assumed to
        be independent, so the root of the sum of their squares is the width of the
        interval above the prediction. The width below is `below` times that width.

        Args:
            terms: predicted seconds by term, such as `compute`.

        Returns:
            The lower end, at least 0, and the upper end, in seconds.

        In the example, the step takes 4 s. The errors are 0.75 s and 0.5 s: together
        0.9 s. The upper end is 0.9 s above 4 s. `below` is 0.5, so the lower end is
        0.45 s below 4 s.

        >>> known = Accuracy(errors={"compute": 0.25, "collectives": 0.5}, below=0.5)
        >>> low, high = known.interval_s({"compute": 3.0, "collectives": 1.0})
        >>> round(low, 2), round(high, 2)
        (3.55, 4.9)
        """
        total = sum(terms.values())
        common = sum(s for key, s in terms.items() if key != "collectives")
        apart = terms.get("collectives", 0.0)
        off = (common * self.errors["compute"]) ** 2
        off += (apart * self.errors["collectives"]) ** 2
        return max(0.0, total - self.below * off**0.5), total + off**0.5


CATALOG = Accuracy(below=0.307)
"""Accuracy of the catalog's figures, without any measurement. Most published steps took
longer than predicted with the catalog's figures, so the interval is wider above."""
CARRIED_OVER = Accuracy(
    source="scalars of the device, fitted to other clusters and programs",
    errors={"compute": 0.19, "collectives": 0.38},
    below=0.422,
)
"""Accuracy of predictions for a new cluster and program, if only the device's figures
are fitted to measurements."""


# Types of devices: their compute speed and memory.


Platform = Literal["cpu", "cuda", "rocm", "tpu", "other"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How fast a device is relative to its data sheet, in measured or assumed figures.

    The catalog has typical values; calibration fits most of them to measured times. A
    matmul of x rows that fills all tiles and cores reaches the share e0 x / (x + x0) of
    the peak: half of `e0` if it has `x0` rows. `cost.matmul_s` has the formula for
    other sizes.
    """

    e0: float = 0.75
    """Share of the peak that large matmuls reach."""
    x0: float = 0.0
    """The number of rows with which a matmul reaches half of the share `e0`."""
    mma_sync: float = 1.0
    """Speed of kernels that multiply with `mma.sync`, the instruction of Ampere GPUs,
    relative to large matmuls; for example, FlashAttention 1 and 2. GPUs since Hopper
    reach their peak only with newer instructions, which their matmuls use (`wgmma`)."""
    c0: float = 0.0
    """Number of output channels at which a convolution has half the speed of a matmul.
    The cause: the windows of the input are first copied into the rows of a matrix. More
    output channels share the cost of this copy."""
    odd: float = 1.0
    """Factor on the time of a convolution whose number of input channels is odd and
    above 1, such as 3 colors: XLA's CPU backend multiplies channels in pairs."""
    memory: float = 0.85
    """Share of the memory bandwidth that a stream reaches."""
    cache_bytes: float = 0.0
    """Bytes that a cache holds. Of an operator's recently used bytes, at most this many
    come from the cache instead of memory."""
    cache_gain: float = 1.0
    """Ratio of the cache's bandwidth to the memory's bandwidth."""
    simple_s: float = 0.0
    """Seconds of one addition or product of an element-wise operator; if 0, only moving
    its bytes costs time."""
    special_s: float = 0.0
    """Seconds of one exponential or similar function, in addition to `simple_s`."""
    strided_s: float = 0.0
    """Extra seconds to read one element with a stride, not in the order of memory; for
    example, an element of a transposed gradient. Holds for arrays of up to 1 MiB."""
    strided_large_s: float = 0.0
    """Like `strided_s`, for arrays of 4 MiB and more, of which a cache loses a line
    before all its elements are read; if less than `strided_s`, that takes its place."""
    window_s: float = 0.0
    """Seconds of one element of one window of `reduce_window`, as in max pooling; if 0,
    `simple_s` takes its place."""
    window_back_s: float = 0.0
    """Seconds of one operation of `select_and_scatter_add`, the backward pass of max
    pooling; if 0, `simple_s` takes its place."""
    fuse: float = 0.5
    """On CPU: the bytes of element-wise operators after fusion, as a share of their
    bytes without fusion. Without effect on other devices, for which the planner counts
    the bytes of each fused kernel (`planner.ir.fusion`)."""
    launch_s: float = 5e-6
    """Seconds to launch one operator."""
    dispatch_s: float = 0.0
    """Seconds of the host to dispatch a step, before its first operator."""
    misaligned: float = 1.0
    """Speed of a matmul with unaligned rows, relative to a matmul with aligned rows."""
    overlap_kappa: float = 1.1
    """Factor on the time of computation that runs during a collective."""
    overlap_fraction: float = 1.0
    """Share of the computation that collectives can overlap; 0 means no overlap."""

    def __post_init__(self) -> None:
        shares = (self.e0, self.mma_sync, self.memory, self.fuse, self.misaligned)
        fine = all(0 < share <= 1 for share in shares)
        from_0 = (self.x0, self.c0, self.launch_s, self.dispatch_s, self.cache_bytes)
        from_0 += (self.simple_s, self.special_s, self.strided_s, self.strided_large_s)
        from_0 += (self.window_s, self.window_back_s)
        fine = fine and all(figure >= 0 for figure in from_0)
        from_1 = (self.overlap_kappa, self.cache_gain, self.odd)
        fine = fine and all(figure >= 1 for figure in from_1)
        if not (fine and 0 <= self.overlap_fraction <= 1):
            raise ValueError(
                f"{self}: no device is so. Allowed: e0, mma_sync, memory, fuse and "
                "misaligned above 0 and at most 1; x0, c0, cache_bytes and all seconds "
                "0 or more; odd, overlap_kappa and cache_gain 1 or more; "
                "overlap_fraction 0 to 1."
            )


@dataclass(frozen=True, kw_only=True)
class ProductRate:
    """Peak FLOP/s of matmuls and convolutions of a dtype, and where it comes from.

    A product of high precision may need several passes: products of a narrower dtype
    that are summed. The peak is that of one pass (an entry of `DeviceType.peak_flops`),
    divided by the number of passes.
    """

    flops: float
    """Peak FLOP/s of the product."""
    wanted: str
    """The dtype that the product is computed in, such as `tensorfloat32` for operands
    of float32; `DeviceType.computed_in` finds it."""
    priced_as: str
    """The dtype in `DeviceType.peak_flops` whose peak is used."""
    listed: bool
    """Whether `DeviceType.peak_flops` has a peak for `wanted`; formats of float8, or of
    float4, share one."""


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """A type of device. The planner treats devices of the same type as equal."""

    name: str
    platform: Platform
    peak_flops: Mapping[str, float]
    """Map from the dtype in which products (matmuls, convolutions) are computed to
    FLOP/s. In `tensorfloat32` NVIDIA's GPUs since Ampere compute products of float32 at
    JAX's default precision; `float32` is full precision. On TPU, `float32` is one pass
    in bfloat16. `rate` says which peak is used for a dtype that is not listed."""
    memory_bytes: int
    memory_bandwidth: float
    """Bytes per second, reads and writes together."""
    cores: int = 1
    """The number of units that compute a matmul's tiles in parallel (SMs)."""
    tile: tuple[int, int, int] = (1, 1, 1)
    """Tile (m, n, k) of matmuls; dims are padded to multiples of the tile."""
    alignment_bytes: int = 1
    """Alignment of rows in bytes; matmuls with other rows run at
    `Efficiency.misaligned`."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    kernels: frozenset[str] | None = None
    """Names of the operators that the device can run: names of primitives, of kinds
    (`planner.ir.OperatorKind`), or words such as `dense`, for which
    `dtft.placement.kernels.CLASSES` lists the operators. None means all operators; on
    the platform `other`, no operators."""
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
        if not self.peak_flops or not all(figure > 0 for figure in figures):
            raise ValueError(
                f"device {self.name!r}: peak_flops={dict(self.peak_flops)}, "
                f"memory_bytes={self.memory_bytes}, memory_bandwidth="
                f"{self.memory_bandwidth}, cores={self.cores}, tile={self.tile}, "
                f"alignment_bytes={self.alignment_bytes}. Allowed: at least one dtype "
                "with its peak, and figures above 0."
            )

    def peak(self, dtype: str, precision: str = "") -> float:
        """Returns the peak FLOP/s of matmuls and convolutions of a dtype.

        For a dtype without a listed peak, this is the peak of the listed dtype that the
        method `rate` selects; in the example, of float32 for bfloat16.

        Args:
            dtype: dtype of the operands.
            precision: JAX's precision of the product: `high`, `highest` or the name of
                a `jax.lax.DotAlgorithmPreset`; '' for the default.

        >>> peaks = {"float16": 125.0, "float32": 15.7}
        >>> device = DeviceType(name="d", platform="cuda", memory_bytes=1,
        ...     memory_bandwidth=1.0, source="", peak_flops=peaks)
        >>> device.peak("float16"), device.peak("bfloat16")
        (125.0, 15.7)
        """
        return self.rate(dtype, precision).flops

    def rate(self, dtype: str, precision: str = "") -> ProductRate:
        """Looks up the peak of matmuls and convolutions of a dtype.

        `computed_in` finds the dtype in which the operands are multiplied, and the
        number of passes. The result is the peak of this dtype in `peak_flops`, divided
        by the number of passes. All formats of float8 share one peak, and so do those
        of float4. If `peak_flops` lacks the dtype, the first of its substitutes that
        has a peak is used. Substitutes are dtypes in which XLA computes instead, or
        that are no faster. Without any, the lowest peak in `peak_flops` is used.

        Args:
            dtype: dtype of the operands.
            precision: JAX's precision of the product: `high`, `highest` or the name of
                a `jax.lax.DotAlgorithmPreset`; '' for the default.
        """
        if (known := self._rates.get((dtype, precision))) is None:
            known = self._rates[dtype, precision] = self._rate(dtype, precision)
        return known

    @cached_property
    def _rates(self) -> dict[tuple[str, str], ProductRate]:
        return {}

    def _rate(self, dtype: str, precision: str) -> ProductRate:
        wanted, passes = self.computed_in(dtype, precision)
        family = _family(wanted)
        alike = (name for name in self.peak_flops if _family(name) == family)
        found = wanted if wanted in self.peak_flops else next(alike, None)
        is_listed = found is not None
        if found is None:
            others = _SUBSTITUTES.get(family, ("float32",))
            slowest = min(self.peak_flops, key=lambda name: self.peak_flops[name])
            found = next((n for n in others if n in self.peak_flops), slowest)
        return ProductRate(
            flops=self.peak_flops[found] / passes,
            wanted=wanted,
            priced_as=found,
            listed=is_listed,
        )

    def unlisted_text(self, rate: ProductRate) -> str:
        """Describes which peak is used for a dtype that has no listed peak.

        Args:
            rate: what the method `rate` returned for a dtype without a listed peak.

        >>> device = DeviceType(name="t4", platform="cuda", memory_bytes=1, source="",
        ...     memory_bandwidth=1.0, peak_flops={"float16": 65e12, "float32": 8e12})
        >>> print(device.unlisted_text(device.rate("bfloat16")))
        bfloat16 has no known peak on t4: priced as float32, 8 TFLOP/s. float16 has 65
        """
        text = (
            f"{rate.wanted} has no known peak on {self.name}: priced as "
            f"{rate.priced_as}, {rate.flops / 1e12:.4g} TFLOP/s"
        )
        if rate.priced_as not in _SUBSTITUTES.get(_family(rate.wanted), ("float32",)):
            text += ", which it cannot exceed"
        if rate.wanted == "bfloat16" and "float16" in self.peak_flops:
            text += f". float16 has {self.peak_flops['float16'] / 1e12:.4g}"
        return text

    def computed_in(self, dtype: str, precision: str = "") -> tuple[str, int]:
        """Returns the dtype that a matmul is computed in, and the number of passes.

        `dtype` is that of the operands, and each pass is a matmul of the returned
        dtype. The same holds for convolutions. JAX's levels of `precision` matter for
        float32 only (`jax.lax.Precision`). On a GPU with TensorFloat-32, all levels but
        `highest` use TensorFloat-32. On TPU, `high` takes 3 and `highest` 6 passes in
        bfloat16. The default level on TPU is returned as one pass in float32, because
        the listed float32 peak of TPUs is that of one bfloat16 pass.

        `precision` may also name an algorithm (`jax.lax.DotAlgorithmPreset`). The first
        part of the name gives the dtype, and `_X3` at its end means 3 passes.

        >>> peaks = {"bfloat16": 312.0, "tensorfloat32": 156.0, "float32": 19.5}
        >>> a100 = DeviceType(name="d", platform="cuda", memory_bytes=1,
        ...     memory_bandwidth=1.0, source="", peak_flops=peaks)
        >>> [a100.computed_in("float32", how) for how in ("", "highest")]
        [('tensorfloat32', 1), ('float32', 1)]
        >>> a100.computed_in("float32", "BF16_BF16_F32_X3")
        ('bfloat16', 3)
        """
        short, _, rest = precision.partition("_")
        if short in _ALGORITHMS:
            passes = rest.rpartition("_X")[2]
            return _ALGORITHMS[short], int(passes) if passes.isdigit() else 1
        dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        if dtype != "float32":
            return dtype, 1
        if self.platform == "tpu" and precision in _TPU_PASSES:
            return "bfloat16", _TPU_PASSES[precision]
        if precision != "highest" and "tensorfloat32" in self.peak_flops:
            return "tensorfloat32", 1
        return "float32", 1


_ALGORITHMS: Mapping[str, str] = {
    "F16": "float16", "BF16": "bfloat16", "TF32": "tensorfloat32", "F32": "float32",
    "F64": "float64",
}  # fmt: skip
"""Map from the first part of a `jax.lax.DotAlgorithmPreset`'s name to the dtype that
operands are rounded to. `_X3` at its end means 3 passes."""
_TPU_PASSES: Mapping[str, int] = {"high": 3, "highest": 6}
"""Passes in bfloat16 of a float32 product on TPU, by `jax.lax.Precision`."""
_SUBSTITUTES: Mapping[str, tuple[str, ...]] = {
    "float4": ("float16", "bfloat16", "float32"),
    "float8": ("float16", "bfloat16", "float32"),
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float32",),
    "tensorfloat32": ("float32",),
    "float64": (),
    "int2": ("int8", "float32"), "int4": ("int8", "float32"),
    "uint2": ("int8", "float32"), "uint4": ("int8", "float32"),
    "uint8": ("int8", "float32"),
}  # fmt: skip
"""Map from a family of dtypes without a listed peak to the dtypes whose peak is used
instead, best first. Families that are not in the map use float32. No dtype replaces
float64. XLA's compiler for GPUs widens float8 and float4 to float16, and integers of 4
bits to 8 (`float_normalization` in openxla/xla gpu_compiler.cc). Units that multiply
bfloat16 multiply float16 as fast, but not the other way round: V100 and T4 have no unit
for bfloat16."""


def _family(dtype: str) -> str:
    """Returns `float8` or `float4` for any format of these, and other dtypes unchanged.

    Data sheets have one peak for all formats of float8, and one for float4.

    >>> _family("float8_e5m2"), _family("bfloat16")
    ('float8', 'bfloat16')
    """
    return dtype[:6] if dtype.startswith(("float8", "float4")) else dtype


LinkKind = Literal[
    "NVLink", "PCIe", "CXL", "UPI", "InfiniBand", "Ethernet", "ICI", "loopback"
]
"""`loopback` joins devices or processes of one machine through its own memory."""

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"
]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Time of a transfer of S bytes in one direction: latency_s + S / B(S).

    B(S) = bandwidth * S / (S + half_bytes) is the bandwidth that S bytes reach.
    """

    latency_s: float
    """Latency of a message in seconds, per hop (alpha)."""
    bandwidth: float
    """Bytes per second of large messages."""
    half_bytes: float = 0.0
    """Message size in bytes that reaches half of the bandwidth, through one port."""

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.half_bytes >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"latency_s={self.latency_s}, bandwidth={self.bandwidth}, "
                f"half_bytes={self.half_bytes}: no link is so. Allowed: bandwidth "
                "above 0 bytes per second, the others 0 or more."
            )

    def seconds(self, num_bytes: Any) -> Any:
        """Computes the seconds of one message of a size in bytes, a number or an array.

        The message of the example has `half_bytes` bytes, so it reaches half of the
        bandwidth: it takes 2 us, in addition to 1 us of latency.

        >>> Curve(latency_s=1e-6, bandwidth=1e9, half_bytes=1e3).seconds(1e3)
        3e-06
        """
        return self.latency_s + (num_bytes + self.half_bytes) / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Link:
    """A port through which a device reaches the other devices of its level.

    A device that shares its port with `shared_by - 1` other devices gets
    1 / `shared_by` of the bandwidth, because all devices of an SPMD program communicate
    at once. Shared ports are PCIe switches, UPI, CXL switches, and network cards of
    several devices.
    """

    kind: LinkKind
    curve: Curve
    """Transfer times of one port."""
    shared_by: int = 1
    """The number of devices that share one port."""
    source: str
    """Origin of the figures."""
    measured: Mapping[CollectiveKind, Mapping[int, Curve]] = field(default_factory=dict)
    """Map from a kind of collective to its measured curves, by number of devices. An
    all-reduce, for example, is faster where the switch computes the sums. Kinds that
    are not in the map use `curve`."""
    meeting: Mapping[int, float] = field(default_factory=dict)
    """Sync skew: extra seconds of a collective after computation, by number of devices.
    Participants arrive at different times, and waiting threads must be woken. Empty
    means no skew."""
    ahead: Mapping[int, float] = field(default_factory=dict)
    """Map from a number of devices to the share (0 to 1) of a gather's seconds that
    computation hides, for gathers that wait for no computation. Empty means a share of
    0."""

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
        if not all(seconds >= 0 for seconds in self.meeting.values()):
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
        """Returns the transfer times of a collective among a number of devices.

        Between two measured numbers of devices, their curves are interpolated by the
        logarithm of the number. Outside the measured range the nearest measured curve
        counts. A kind without measured curves has the link's `curve`.
        """
        curves = self.measured.get(kind)
        if not curves:
            return self.curve
        low, high, share = _beside(num_devices, curves)
        return _between(curves[low], curves[high], share) if share else curves[low]

    def sync_skew_s(self, num_devices: float) -> float:
        """Returns the seconds that devices wait for each other at a collective.

        Interpolated from `meeting` (seconds by number of devices) by the logarithm of
        the number of devices. Outside the range of `meeting`, its nearest entry counts.
        0 for one device, or if `meeting` is empty.

        >>> port = Curve(latency_s=1e-6, bandwidth=1e9)
        >>> seconds = {2: 1.0, 8: 2.0}
        >>> link = Link(kind="loopback", curve=port, source="", meeting=seconds)
        >>> [link.sync_skew_s(n) for n in (1, 2, 4, 16)]
        [0.0, 1.0, 1.5, 2.0]
        """
        return _known(num_devices, self.meeting)

    def hidden(self, num_devices: float) -> float:
        """Returns the share (0 to 1) of a prefetched gather's seconds that is hidden.

        A prefetched gather is a collective that waits for no computation, such as an
        all-gather of parameters. Computation runs at the same time and hides it.

        Interpolated from `ahead` (shares by number of devices) by the logarithm of the
        number of devices. Outside the range of `ahead`, its nearest entry counts. 0 for
        one device, or if `ahead` is empty.
        """
        return _known(num_devices, self.ahead)


def _beside(num_devices: float, known: Iterable[int]) -> tuple[int, int, float]:
    """Finds the two of the numbers `known` that are next to a number of devices.

    Also returns the position of `num_devices` between both on a log scale: 0 at the
    lower number, 1 at the upper. Outside the range of `known`, both numbers are the
    nearest one, and the position is 0.
    """
    numbers = sorted(known)
    low = max((n for n in numbers if n <= num_devices), default=numbers[0])
    high = min((n for n in numbers if n >= num_devices), default=numbers[-1])
    if low >= high:
        return high, high, 0.0
    return low, high, math.log(num_devices / low) / math.log(high / low)


def _known(num_devices: float, figures: Mapping[int, float]) -> float:
    """Interpolates a figure for `num_devices` from those of other numbers of devices.

    `figures` maps numbers of devices to figures. 0 for one device or no figures.
    """
    if num_devices <= 1 or not figures:
        return 0.0
    low, high, share = _beside(num_devices, figures)
    return _mean(figures[low], figures[high], share)


def _mean(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _between(low: Curve, high: Curve, share: float) -> Curve:
    """Interpolates the transfer times of two curves, figure by figure.

    `share` is the position between both: 0 gives `low`, 1 gives `high`. The bandwidth
    is interpolated in seconds per byte.
    """
    return Curve(
        latency_s=_mean(low.latency_s, high.latency_s, share),
        bandwidth=1 / _mean(1 / low.bandwidth, 1 / high.bandwidth, share),
        half_bytes=_mean(low.half_bytes, high.half_bytes, share),
    )
