"""Types of devices: how fast each computes, how much memory it has.

Values only. Must not know how devices are joined (`cluster`) or where figures come
from (`catalog`, `calibration`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Platform = Literal["cpu", "cuda", "rocm", "tpu", "other"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How much of a data sheet a program gets: the scalars that calibration fits.

    A matmul of x rows reaches e0 x / (x + x0) of the peak, less what is lost to whole
    tiles (`compute_cost.shape_factor`). Reference section 7.
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
