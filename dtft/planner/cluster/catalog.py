"""Catalog of devices, links and machines by name, with uncalibrated figures.

Each device, link and machine names the source of its figures: a data sheet, a published
measurement, or an assumption. Calibration counts these figures as its level 0.
`cost.apply_calibration` replaces the speeds by the measurements of `dtft calibrate`.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from dtft.planner.cluster.hardware import (
    CollectiveKind,
    Curve,
    DeviceType,
    Efficiency,
    Link,
    LinkKind,
    Platform,
)

# Device types. Peaks are dense (no sparsity), and with float32 sums where a card has
# another peak for these. A sheet of a superchip or a rack is divided by its number of
# GPUs. Sizes, cores and bandwidths of most NVIDIA devices come from XLA's target
# descriptions. Where the product differs (MI300X, MI355X), the data sheet counts.
# "Published copies" are tables in public repositories and on pages about the product
# that name the sheet as their source.


_XLA = "openxla/xla backends/gpu/target_config/specs"
_SHEET = "data sheet"
_SCALING = "jax-ml/scaling-book, TPU specs"
_STAS_ACC = "stas00/ml-engineering compute/accelerator/README.md"
_TPU7X = "Google Cloud documentation, TPU7x (Ironwood)"
_COPIES = "in published copies"
_HMC = "hmc-tech.com's table of the GPU"
_LOCKWOOD = "glennklockwood.com/garden/processors"
_GPU = Efficiency(e0=0.75, x0=8.0, memory=0.85, launch_s=4e-6, misaligned=0.5)
"""Efficiency of GPUs. e0 and x0 come from a fit to BigScience runs on A100; the other
figures are assumed. `_efficiency` changes e0 and mma_sync by device. On one H100,
eleven kinds of element-wise work reached 0.37 (softmax) to 0.94 of the bandwidth, 0.82
in the median (`experiments/results/gpu_elementwise.md`)."""
_MATMUL_TFLOPS: Mapping[str, float] = {
    "a100": 271.2, "h100": 794.5, "h200": 794.5, "gh200": 828.6, "b200": 1745.0,
    "gb200": 1822.0, "gb300": 1822.0, "mi300x": 668.4, "mi355x": 1565.0,
}  # fmt: skip
"""Map from a GPU to the TFLOP/s of the fastest bfloat16 matmul that was found on it.
Newer GPUs reach a smaller share of their peak, because their power limit lowers the
clock. Source: table "Maximum Achievable Matmul FLOPS" of stas00/ml-engineering,
compute/accelerator/README.md, commit 744d01e1. By the table, the H200 is as fast as
the H100. The GB300 is assumed to be as fast as the GB200, because the table's B300 is
within 2 % of its B200."""
_HOPPER_MMA_SYNC = 0.569
"""`Efficiency.mma_sync` of Hopper GPUs, and assumed of Blackwell's data center GPUs.

FlashAttention 1 and 2, forward and backward, run 1.666 times as fast on an H100 as on
an A100. Matmuls run 2.930 times as fast (`_MATMUL_TFLOPS`). The 1.666 is the median of
48 ratios: both versions, head dims 64 and 128, with and without causal mask, six
sequence lengths from 512 to 16384. The ratios are 1.49 to 1.79. Source: the A100 and
H100 figures of arXiv 2307.08691, in Dao-AILab/flash-attention, assets/
flash2_a100_fwd_bwd_benchmark.png and flash2_h100_fwd_bwd_benchmark.png. The cause:
FlashAttention-2 does not use Hopper's instructions (arXiv 2407.08608)."""
_MMA_SYNC: Mapping[str, float] = dict.fromkeys(
    ("h100", "h100-pcie", "h200", "gh200", "b200", "gb200", "gb300"), _HOPPER_MMA_SYNC
)
"""Map from a GPU to its `Efficiency.mma_sync`; other GPUs have 1."""
_TPU = Efficiency(e0=0.8, x0=0.0, memory=0.85, launch_s=1e-6)
"""Efficiency of TPUs, assumed. Launches are short, because a TPU program launches its
operators on the device."""
_T = 1e12


def _efficiency(name: str, peak: float) -> Efficiency:
    """Returns the efficiency of a GPU: that of the A100, but for `e0` and `mma_sync`.

    `e0` is the share of the peak that large matmuls reach. The `e0` of the A100 is
    multiplied by a ratio: the share of its peak that the GPU reaches in published
    matmuls, divided by the share that the A100 reaches. Without a published matmul
    speed of the GPU, the ratio is 1. `mma_sync` is the speed of kernels that multiply
    with Ampere's instruction `mma.sync`, relative to large matmuls; 1 if it is unknown.

    Args:
        name: name in the catalog.
        peak: peak of bfloat16 in TFLOP/s.
    """
    e0 = _GPU.e0
    if name in _MATMUL_TFLOPS:
        share = _MATMUL_TFLOPS[name] / peak
        e0 *= share / (_MATMUL_TFLOPS["a100"] / _A100["bfloat16"])
    return replace(_GPU, e0=e0, mma_sync=_MMA_SYNC.get(name, 1.0))


def _gpu(
    name: str,
    peaks: Mapping[str, float],
    memory_bytes: int,
    bandwidth: float,
    cores: int,
    source: str,
    tile: tuple[int, int, int] = (128, 128, 64),
    platform: Platform = "cuda",
) -> DeviceType:
    return DeviceType(
        name=name,
        platform=platform,
        peak_flops={dtype: peak * _T for dtype, peak in peaks.items()},
        memory_bytes=memory_bytes,
        memory_bandwidth=bandwidth,
        cores=cores,
        tile=tile,
        alignment_bytes=16,
        efficiency=_efficiency(name, peaks.get("bfloat16", 0.0)),
        source=source,
    )


def _tpu(
    name: str,
    bfloat16: float,
    narrow: Mapping[str, float],
    gib: int,
    bandwidth: float,
    lanes: int,
    source: str = f"{_SCALING}; cloud.google.com/tpu/docs",
) -> DeviceType:
    """Builds a TPU device type.

    Args:
        name: name in the catalog.
        bfloat16: peak of bfloat16 in TFLOP/s; float32 gets the same peak.
        narrow: map from a dtype of one byte to its peak in TFLOP/s.
        gib: GiB of memory.
        bandwidth: bytes per second of the memory.
        lanes: width of the tile of a matmul along n and k.
        source: origin of the figures.
    """
    peaks = {"bfloat16": bfloat16, "float32": bfloat16, **narrow}
    return DeviceType(
        name=name,
        platform="tpu",
        peak_flops={dtype: peak * _T for dtype, peak in peaks.items()},
        memory_bytes=gib * 2**30,
        memory_bandwidth=bandwidth,
        tile=(8, lanes, lanes),
        efficiency=_TPU,
        source=f"{source}; float32: one bfloat16 pass",
    )


# Peaks in TFLOP/s by the dtype that a product is computed in: `float32` is that of CUDA
# cores (of AMD's matrix cores), `tensorfloat32` that of tensor cores. A dtype without a
# figure is left out: `DeviceType.rate` says what counts then, and `Plan.lints` says it.
_A100 = {
    "bfloat16": 312, "float16": 312, "tensorfloat32": 156, "float32": 19.5,
    "float64": 19.5, "int8": 624,
}  # fmt: skip
_H100 = {
    "bfloat16": 989.4, "float16": 989.4, "tensorfloat32": 494.7, "float32": 66.9,
    "float64": 66.9, "int8": 1978.9, "float8_e4m3fn": 1978.9,
}  # fmt: skip
_H100_PCIE = {
    "bfloat16": 756, "float16": 756, "tensorfloat32": 378, "float32": 51.2,
    "float64": 51.2, "int8": 1513, "float8_e4m3fn": 1513,
}  # fmt: skip
_B200 = {
    "bfloat16": 2250, "float16": 2250, "tensorfloat32": 1125, "float32": 75,
    "float64": 37, "int8": 4500, "float8_e4m3fn": 4500, "float4_e2m1fn": 9000,
}  # fmt: skip
_GB200 = {
    "bfloat16": 2500, "float16": 2500, "tensorfloat32": 1250, "float32": 80,
    "float64": 40, "int8": 5000, "float8_e4m3fn": 5000, "float4_e2m1fn": 10000,
}  # fmt: skip
# By its sheet, Blackwell Ultra is slow in int8 and float64.
_GB300 = {
    "bfloat16": 2500, "float16": 2500, "tensorfloat32": 1250, "float32": 80,
    "float64": 1.3, "int8": 165, "float8_e4m3fn": 5000, "float4_e2m1fn": 15000,
}  # fmt: skip
_L4 = {
    "bfloat16": 121, "float16": 121, "tensorfloat32": 60, "float32": 30.3,
    "float64": 0.5, "int8": 242.5, "float8_e4m3fn": 242.5,
}  # fmt: skip
_L40S = {
    "bfloat16": 362.05, "float16": 362.05, "tensorfloat32": 183, "float32": 91.6,
    "float64": 1.4, "int8": 733, "float8_e4m3fn": 733,
}  # fmt: skip
_5090 = {
    "bfloat16": 209.5, "float16": 209.5, "tensorfloat32": 104.8, "float32": 104,
    "float64": 1.637, "int8": 838, "float8_e4m3fn": 419, "float4_e2m1fn": 1676,
}  # fmt: skip
_PRO_6000 = {
    "bfloat16": 503.8, "float16": 503.8, "tensorfloat32": 251.9, "float32": 125,
    "float64": 1.97, "int8": 1010, "float8_e4m3fn": 1010, "float4_e2m1fn": 2020,
}  # fmt: skip
_4090 = {
    "bfloat16": 165.2, "float16": 165.2, "tensorfloat32": 82.6, "float32": 82.6,
    "float64": 1.29, "int8": 660.6, "float8_e4m3fn": 330.3,
}  # fmt: skip
_MI300X = {
    "bfloat16": 1307.4, "float16": 1307.4, "float32": 163.4, "float64": 163.4,
    "int8": 2614.9, "float8_e4m3fnuz": 2614.9,
}  # fmt: skip
_MI355X = {
    "bfloat16": 2500, "float16": 2500, "float32": 157.3, "float64": 78.6, "int8": 5000,
    "float8_e4m3fn": 5000, "float4_e2m1fn": 10100,
}  # fmt: skip

_ALL = (
    _gpu(
        "t4",
        {"float16": 65, "float32": 8.1, "float64": 0.25, "int8": 130},
        15_828_254_720, 320e9, 40,
        f"{_SHEET} T4 {_COPIES}; float64, 320 GB/s: Google Cloud's table of GPUs; "
        "cores, 15095 MiB: as CUDA reports them; no tensor cores for bfloat16",
        tile=(128, 128, 32),
    ),
    _gpu(
        "v100", {"float16": 125, "float32": 15.7, "float64": 7.8},
        16_935_682_048, 898.048e9, 80,
        f"{_XLA}/v100.txtpb; peaks: {_SHEET} V100 SXM2; no tensor cores for "
        "bfloat16",
        tile=(128, 128, 32),
    ),
    _gpu(
        "a100-40gb", _A100, 42_331_013_120, 1555.2e9, 108,
        f"{_XLA}/a100_sxm_40.txtpb; peaks: {_SHEET} A100 SXM; float32: {_HMC}",
    ),
    _gpu(
        "a100", _A100, 85_100_068_864, 2039.04e9, 108,
        f"{_XLA}/a100_sxm_80.txtpb; peaks: {_SHEET} A100 SXM 80 GB; float32: {_HMC}",
    ),
    _gpu(
        "h100", _H100, 84_929_347_584, 3352.32e9, 132,
        f"{_XLA}/h100_sxm.txtpb; peaks: {_SHEET} H100 SXM; float32: {_LOCKWOOD}/h100",
    ),
    _gpu(
        "h100-pcie", _H100_PCIE, 84_942_979_072, 2039.04e9, 114,
        f"{_XLA}/h100_pcie.txtpb; peaks: {_SHEET} H100 PCIe; float32: {_HMC}",
    ),
    _gpu(
        "h200", _H100, 141_000_000_000, 4800e9, 132,
        f"{_SHEET} H200 SXM: 141 GB, and its peaks; float32: {_HMC}",
    ),
    _gpu(
        "b200", _B200, 191_514_411_008, 7672.32e9, 148,
        f"{_XLA}/b200.txtpb; peaks: {_SHEET} HGX B200; float32: the same {_COPIES}",
    ),
    _gpu(
        "gh200", _H100, 96_000_000_000, 4000e9, 132,
        "JUPITER Booster configuration, Juelich: 96 GB HBM3, 4 TB/s, 132 SMs; peaks of "
        f"the H100 SXM: {_STAS_ACC}, float32 {_LOCKWOOD}/h100",
    ),
    _gpu(
        "gb200", _GB200, 197_897_748_480, 7928.064e9, 152,
        f"{_XLA}/gb200.txtpb; peaks: {_SHEET} GB200 NVL72 {_COPIES}, and {_STAS_ACC}",
    ),
    _gpu(
        "gb300", _GB300, 297_021_079_552, 7928.064e9, 152,
        f"{_XLA}/gb300.txtpb; peaks: {_SHEET} Blackwell Ultra {_COPIES}, and "
        f"{_STAS_ACC}; float32: verda.com/blog/gb300-nvl72-architecture",
    ),
    _gpu(
        "l4", _L4, 24_000_000_000, 300e9, 58,
        f"{_SHEET} L4 {_COPIES}: 24 GB, 300 GB/s, 7424 CUDA cores, 128 in an SM; peaks "
        "half of those with sparsity; float32: fpsbench.com's table of the GPU",
    ),
    _gpu(
        "l40s", _L40S, 48_000_000_000, 864e9, 142,
        f"{_SHEET} L40S {_COPIES}: 48 GB, 864 GB/s, 18176 CUDA cores, 128 in an SM; "
        f"float32: {_HMC}",
    ),
    # Its peaks for int8, float64 and full float32 are left out: no source was at hand.
    _gpu(
        "a10g", {"bfloat16": 70, "float16": 70, "tensorfloat32": 35},
        23_684_186_112, 600e9, 80,
        f"{_SHEET} NVIDIA A10G of AWS {_COPIES}: peaks, 600 GB/s; cores and 22587 MiB: "
        "as CUDA reports them",
    ),
    _gpu(
        "rtx5090", _5090, 34_100_000_000, 1792e9, 170,
        f"whitepaper NVIDIA RTX Blackwell, table 3, {_COPIES}: 32 GB, 1792 GB/s, 170 "
        "SMs, peaks with float32 sums; float64: TechPowerUp; float32: Linux Format, "
        "May 2025; 31.8 GiB: as CUDA reports them",
    ),
    _gpu(
        "rtx-pro-6000", _PRO_6000, 103_079_215_104, 1792e9, 188,
        f"{_XLA}/rtx6000pro.txtpb; Workstation Edition; peaks: whitepaper NVIDIA RTX "
        f"PRO Blackwell, table 4, {_COPIES} (bfloat16), hmc-tech's table of the GPU "
        "(others); float32: NVIDIA's figure in topcpu.net's news of the GPU",
    ),
    _gpu(
        "rtx4090", _4090, 25_200_000_000, 1008e9, 128,
        f"{_SHEET} RTX 4090 (Ada): 24 GB, peaks with float32 sums; float32 and "
        "tensorfloat32: waredb.com's table of the GPU",
    ),
    _gpu(
        "mi300x", _MI300X, 205_000_000_000, 5300e9, 304,
        f"{_SHEET} MI300X: 192 GB; float32 without its xf32", platform="rocm",
    ),
    _gpu(
        "mi355x", _MI355X, 309_000_000_000, 8000e9, 256,
        f"{_SHEET} MI355X {_COPIES}, and {_STAS_ACC}: 288 GB, 8 TB/s; cores: {_XLA}/"
        "mi350.txtpb; it has no xf32", platform="rocm",
    ),
    _tpu("tpu-v4", 275, {"int8": 275}, 32, 1.2e12, 128),
    _tpu("tpu-v5e", 197, {"int8": 394}, 16, 8.19e11, 128),
    _tpu("tpu-v5p", 459, {"int8": 918}, 95, 2.765e12, 128),
    _tpu("tpu-v6e", 918, {"int8": 1836}, 32, 1.638e12, 256),
    # JAX has a device for each half of a chip, with its own memory. The chip has 2307
    # and 4614 TFLOP/s, 192 GiB and 7380 GB/s.
    _tpu(
        "tpu-v7x", 1153.5, {"float8_e4m3fn": 2307}, 96, 3.69e12, 256,
        f"{_TPU7X}, half of a chip; without int8, as JAX's pallas/mosaic/tpu_info.py",
    ),
    DeviceType(
        name="cpu",
        platform="cpu",
        peak_flops={"float32": 5e10, "float64": 2.5e10},
        memory_bytes=8 * 2**30,
        memory_bandwidth=1e10,
        efficiency=Efficiency(launch_s=1e-5, overlap_fraction=0.0),
        source="one core of a server; order of magnitude only, calibrate",
    ),
    DeviceType(
        name="fpga-u280",
        platform="other",
        peak_flops={"int8": 24.5e12, "float32": 1e12},
        memory_bytes=8 * 2**30,
        memory_bandwidth=460e9,
        kernels=frozenset({"convolution", "elementwise", "layout"}),
        source=f"{_SHEET} Alveo U280; float32 and the list of kernels: an example",
    ),
    DeviceType(
        name="asic-activation",
        platform="other",
        peak_flops={"float32": 1e12},
        memory_bytes=16 * 2**30,
        memory_bandwidth=2e12,
        kernels=frozenset({"elementwise", "reduction", "layout"}),
        source="an example, not a product: element-wise work at memory speed",
    ),
    DeviceType(
        name="dpu-bluefield3",
        platform="other",
        peak_flops={"float32": 0.5e12},
        memory_bytes=32 * 2**30,
        memory_bandwidth=80e9,
        kernels=frozenset({"elementwise", "reduction", "layout", "gather", "scatter"}),
        source=f"{_SHEET} BlueField-3: 16 Arm A78 cores, 32 GB DDR5; the list of "
        "kernels: an example",
    ),
)  # fmt: skip

DEVICES: Mapping[str, DeviceType] = {device.name: device for device in _ALL}

ALIASES: Mapping[str, str] = {
    "a100-80gb": "a100", "a100-sxm": "a100", "a100-sxm4-80gb": "a100",
    "a100-sxm4-40gb": "a100-40gb", "h100-sxm": "h100", "h100-80gb": "h100",
    "h100-sxm5": "h100", "v100-16gb": "v100", "4090": "rtx4090", "rtx-4090": "rtx4090",
    "5090": "rtx5090", "rtx-5090": "rtx5090", "rtx-pro-6000-blackwell": "rtx-pro-6000",
    "gb200-nvl72": "gb200", "gb300-nvl72": "gb300", "gh200-96gb": "gh200",
    "v7x": "tpu-v7x", "tpu7x": "tpu-v7x", "ironwood": "tpu-v7x",
    "mi300": "mi300x", "v4": "tpu-v4", "v5e": "tpu-v5e", "v5litepod": "tpu-v5e",
    "v5p": "tpu-v5p", "v6e": "tpu-v6e", "trillium": "tpu-v6e",
}  # fmt: skip
"""Map from other names of device types to the catalog's name."""

KINDS: tuple[tuple[str, str], ...] = (
    ("TPU7x", "tpu-v7x"), ("TPU v6e", "tpu-v6e"), ("TPU v6", "tpu-v6e"),
    ("TPU v5 lite", "tpu-v5e"), ("TPU v5e", "tpu-v5e"), ("TPU v5p", "tpu-v5p"),
    ("TPU v5", "tpu-v5p"), ("TPU v4", "tpu-v4"), ("GB300", "gb300"), ("GB200", "gb200"),
    ("B200", "b200"), ("GH200 480GB", "gh200"), ("GH200 120GB", "gh200"),
    ("H200", "h200"), ("H100 PCIe", "h100-pcie"), ("H100", "h100"),
    ("A100-SXM4-40GB", "a100-40gb"), ("A100-PCIE-40GB", "a100-40gb"), ("A100", "a100"),
    ("A10G", "a10g"), ("L40S", "l40s"), ("L4", "l4"), ("T4", "t4"), ("V100", "v100"),
    ("RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ("RTX 5090", "rtx5090"), ("RTX 4090", "rtx4090"), ("MI300X", "mi300x"),
    ("MI355X", "mi355x"),
)  # fmt: skip
"""Pairs of text in JAX's `device_kind` and a device type; the first pair whose text
occurs counts. The number in the texts of the GH200 is the memory of its CPU; the GPU
has 96 GB with both texts."""

_SLOWER = re.compile(r"laptop|max-q|[45]090 d\b", re.IGNORECASE)
"""Text in the `device_kind` of slower variants, such as laptop GPUs. The catalog lacks
these variants, although their `device_kind` contains the text of a faster device in
`KINDS`."""


# Links. Bandwidths are for one direction. Published measurements of large collectives
# replace the figures of data sheets.


_STAS = "stas00/ml-engineering network/README.md"
_ASSUMED = "assumed"


def _link(
    kind: LinkKind,
    latency_us: float,
    gigabytes: float,
    source: str,
    half_mb: float = 0.0,
    shared_by: int = 1,
    all_reduce: float | None = None,
) -> Link:
    """Builds a link.

    Args:
        kind: kind of the link.
        latency_us: latency of a message in microseconds.
        gigabytes: GB/s of large messages, in one direction.
        source: origin of the figures.
        half_mb: message size in MB that reaches half of the bandwidth.
        shared_by: the number of devices that share a port.
        all_reduce: GB/s of an all-reduce whose sums the switch computes; None if the
            switch computes no sums.
    """

    def curve(bandwidth: float) -> Curve:
        return Curve(
            latency_s=latency_us * 1e-6,
            bandwidth=bandwidth * 1e9,
            half_bytes=half_mb * 1e6,
        )

    measured: dict[CollectiveKind, dict[int, Curve]] = {}
    if all_reduce is not None:
        measured["all_reduce"] = {8: curve(all_reduce)}
    return Link(
        kind=kind,
        curve=curve(gigabytes),
        shared_by=shared_by,
        source=source,
        measured=measured,
    )


LINKS: Mapping[str, Link] = {
    "nvlink-2": _link(
        "NVLink", 4, 117, f"{_SHEET} V100: 150 GB/s per direction; 78 % as on A100", 2
    ),
    "nvlink-3": _link(
        "NVLink", 3, 234.9,
        f"{_STAS}: A100 all-reduce 234.9 GB/s; latency {_ASSUMED}", 2,
    ),
    "nvlink-4": _link(
        "NVLink", 3, 362, f"{_STAS}: 8xH200, all-gather 362 GB/s, all-reduce 482.3 at "
        "16 GiB, latency and half_bytes from its sizes 1 MiB to 1 GiB", 4,
        all_reduce=482.3,
    ),
    "nvlink-5": _link(
        "NVLink", 3, 724, f"{_SHEET} B200: 900 GB/s per direction; shares of nvlink-4 "
        f"{_ASSUMED}", 4, all_reduce=900,
    ),
    "nvlink-4-direct": _link(
        "NVLink", 3, 362, "JUPITER Booster configuration, Juelich: 4 GH200, 150 GB/s "
        "per direction between each two; share, latency and half_bytes of nvlink-4, "
        "without a switch that sums", 4,
    ),
    "nvlink-5-rack": _link(
        "NVLink", 3, 680, f"{_STAS}: all-reduce of 32 GPUs of a GB200 NVL72, 680 GB/s, "
        "850 where the switch sums; latency and half_bytes of nvlink-5", 4,
        all_reduce=850,
    ),
    "nvlink-c2c": _link(
        "NVLink", 5, 359, f"{_STAS}: 359 GB/s measured from the CPU to one GPU, of "
        f"450; latency {_ASSUMED}", 0.1,
    ),
    "nvlink-c2c-half": _link(
        "NVLink", 5, 359, f"nvlink-c2c; {_SHEET} GB200: two GPUs have one Grace CPU, "
        "and share its memory", 0.1, shared_by=2,
    ),
    "infinity-fabric-3": _link(
        "NVLink", 5, 315, f"{_SHEET} MI300X: 7 links of 64 GB/s per direction; 70 % "
        f"{_ASSUMED}; direct links, like NVLink", 4,
    ),
    "infinity-fabric-4": _link(
        "NVLink", 5, 375, f"{_STAS}: MI355X, 7 links of 76.5 GB/s per direction; share "
        "and latency of infinity-fabric-3", 4,
    ),
    "ib-800g": _link(
        "InfiniBand", 6, 96, f"{_SHEET}: ConnectX-8 100 GB/s; share and latency of "
        "ib-400g", 8,
    ),
    "ib-400g": _link(
        "InfiniBand", 6, 48, f"{_STAS}: 4x8 H200, 381.8 GB/s of 400 at 16 GiB, latency "
        "and half_bytes from 16 and 512 MiB", 8,
    ),
    "ib-200g": _link(
        "InfiniBand", 6, 24, f"{_SHEET}: HDR 25 GB/s; share and latency of ib-400g", 4
    ),
    "efa-400g": _link(
        "Ethernet", 15, 42, f"{_SHEET} AWS p5: 3200 Gb/s per host; share and latency "
        f"{_ASSUMED}", 4,
    ),
    "efa-100g-half": _link(
        "Ethernet", 15, 11, f"{_SHEET} AWS p4d: 4 x 100 Gb/s per host of 8; share and "
        f"latency {_ASSUMED}", 2, shared_by=2,
    ),
    "opa-100g-half": _link(
        "InfiniBand", 10, 4.22, "4 Omni-Path 100 Gb/s ports per host of 8, here listed "
        "as InfiniBand; an all-reduce between hosts reaches 135 of the 400 Gb/s: "
        "stas00/ml-engineering network/README.md, and BigScience experiments/README.md "
        f"(measured on Jean Zay); share and latency {_ASSUMED}", 2, shared_by=2,
    ),
    "ethernet-100g": _link(
        "Ethernet", 25, 11, f"{_SHEET}: 12.5 GB/s; share and latency {_ASSUMED}", 1,
        shared_by=8,
    ),
    "ethernet-25g": _link(
        "Ethernet", 30, 2.8, f"{_SHEET}: 3.1 GB/s; share and latency {_ASSUMED}", 1,
        shared_by=8,
    ),
    "pcie-3": _link("PCIe", 5, 12.5, f"{_SHEET}: 16 GB/s raw per direction, x16; 78 % "
        f"{_ASSUMED}", 0.1),
    "pcie-4": _link("PCIe", 5, 25, f"{_SHEET}: 32 GB/s raw per direction, x16; 78 % "
        f"{_ASSUMED}", 0.1),
    "pcie-5": _link("PCIe", 5, 50, f"{_SHEET}: 64 GB/s raw per direction, x16; 78 % "
        f"{_ASSUMED}", 0.1),
    "pcie-4-through-host": _link(
        "PCIe", 12, 12, "RTX 4090 has no peer-to-peer copies: each byte crosses PCIe "
        f"4.0 twice; {_ASSUMED}", 0.5,
    ),
    "pcie-5-through-host": _link(
        "PCIe", 12, 24, "RTX 5090 has no peer-to-peer copies (tinygrad/"
        "open-gpu-kernel-modules issue 29): twice pcie-4-through-host; "
        f"{_ASSUMED}", 0.5,
    ),
    "cxl-2": _link("CXL", 0.5, 50, "assumed: x16 64 GB/s raw, 100-200 ns over DRAM; "
        "78 % " + _ASSUMED, 0.01),
    "upi": _link("UPI", 0.5, 60, "assumed: three links, about 60 GB/s", 0.01,
        shared_by=4),
    "ici-v4": _link("ICI", 1, 90, f"{_SCALING}: 90 GB/s per axis, both directions"),
    "ici-v5e": _link("ICI", 1, 90, f"{_SCALING}: 90 GB/s per axis, both directions"),
    "ici-v5p": _link("ICI", 1, 180, f"{_SCALING}: 180 GB/s per axis, both directions"),
    "ici-v6e": _link("ICI", 1, 180, f"{_SCALING}: 180 GB/s per axis, both directions"),
    "ici-v7x": _link("ICI", 1, 180, f"{_TPU7X}: 200 GB/s per axis and chip, as v5p; "
        "share of ici-v5p; two devices of a chip share it", shared_by=2),
    "chip-v7x": _link("ICI", 1, 540, f"{_TPU7X}: between the devices of a chip, six "
        "times an ICI link of one axis (here 90 GB/s per direction); latency of ICI"),
    "dcn-v5e": _link("Ethernet", 50, 3.125, f"{_SCALING}: per chip; latency assumed"),
    "dcn-v5p": _link("Ethernet", 50, 6.25, f"{_SCALING}: per chip; latency assumed"),
    "dcn-v6e": _link("Ethernet", 50, 12.5, f"{_SCALING}: per chip; latency assumed"),
    "dcn-v7x": _link("Ethernet", 50, 12.5, f"{_TPU7X}: 100 Gb/s per chip, which is two "
        "devices; latency assumed", shared_by=2),
    "pcie-tpu": _link("PCIe", 5, 16, f"{_SCALING}: 16 GB/s per chip"),
    "pcie-v6e": _link("PCIe", 5, 32, f"{_SCALING}: 32 GB/s per chip"),
    "shared-memory": _link(
        "loopback", 30, 2, "CPU devices of one process; order of magnitude, calibrate"
    ),
    "tcp-loopback": _link(
        "loopback", 100, 1, "processes of one machine; order of magnitude, calibrate"
    ),
}  # fmt: skip
"""Map from name to link. Two devices share one port of a link named `...-half`."""


GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of host, such as a DGX H100, or a kind of TPU pod; with its links.

    Device type and links are given by their names in the catalog: `device`, and the
    links `inside` a host, `outside` (between hosts), `host_link` (to host memory) and
    `on_chip` (between the devices of a chip).
    """

    device: str
    per_host: int
    """The number of devices of one host; 0 means any number."""
    inside: str
    """Link between the devices of a host; in a torus, the link along each dimension."""
    outside: str
    """Link between hosts; for a torus, the link between TPU slices."""
    host_link: str
    """Link from a device to host memory; empty if the device uses the host's memory, or
    if its speed is unknown. The planner then keeps all arrays on the device."""
    host_memory_bytes: int
    """Bytes of memory of one host."""
    torus_dims: int = 0
    """The number of torus dimensions; 0 for hosts in a network."""
    ring: int = 0
    """A torus dimension is a closed ring if its size is a multiple of this number; 0
    for hosts in a network."""
    pod: int = 0
    """The number of devices of the largest torus; 0 for hosts in a network."""
    per_chip: int = 1
    """The number of devices of one chip of a torus."""
    on_chip: str = ""
    """Link between the devices of a chip; '' if a chip has one device."""
    source: str


def _hosts(
    device: str,
    inside: str,
    outside: str,
    host_link: str,
    memory_gib: int,
    source: str,
    per_host: int = 8,
) -> Machine:
    return Machine(
        device=device,
        per_host=per_host,
        inside=inside,
        outside=outside,
        host_link=host_link,
        host_memory_bytes=memory_gib * GIB,
        source=source,
    )


def _pod(
    device: str,
    per_host: int,
    memory_gib: int,
    dims: int,
    pod: int,
    host_link: str = "pcie-tpu",
    per_chip: int = 1,
) -> Machine:
    name = device.removeprefix("tpu-")
    network = {"v4": "dcn-v5p"}.get(name, f"dcn-{name}")
    return Machine(
        device=device,
        per_host=per_host,
        inside=f"ici-{name}",
        outside=network,
        host_link=host_link,
        host_memory_bytes=memory_gib * GIB,
        torus_dims=dims,
        ring=16 if dims == 2 else 4,
        pod=pod,
        per_chip=per_chip,
        on_chip=f"chip-{name}" if per_chip > 1 else "",
        source="cloud.google.com/tpu/docs; rings: jax-ml/scaling-book",
    )


MACHINES: Mapping[str, Machine] = {
    "t4": _hosts(
        "t4", "pcie-3", "ethernet-100g", "pcie-3", 512,
        f"a server of 8 cards; its memory and network {_ASSUMED}",
    ),
    "v100": _hosts(
        "v100", "nvlink-2", "efa-100g-half", "pcie-3", 512, "DGX-1; network as p4d"
    ),
    "a100-40gb": _hosts(
        "a100-40gb", "nvlink-3", "ib-200g", "pcie-4", 1024, "DGX A100 320 GB"
    ),
    "a100": _hosts(
        "a100", "nvlink-3", "ib-200g", "pcie-4", 2048, "DGX A100 640 GB: 8 x 200 Gb/s"
    ),
    "h100": _hosts(
        "h100", "nvlink-4", "ib-400g", "pcie-5", 2048, "DGX H100: 8 x 400 Gb/s"
    ),
    "h100-pcie": _hosts(
        "h100-pcie", "pcie-5", "ib-200g", "pcie-5", 1024, "a server without NVLink"
    ),
    "h200": _hosts(
        "h200", "nvlink-4", "ib-400g", "pcie-5", 2048, "DGX H200: 8 x 400 Gb/s"
    ),
    "b200": _hosts(
        "b200", "nvlink-5", "ib-400g", "pcie-5", 2048, "DGX B200: 8 x 400 Gb/s"
    ),
    "gh200": _hosts(
        "gh200", "nvlink-4-direct", "ib-200g", "nvlink-c2c", 447,
        "JUPITER Booster configuration, Juelich: 4 GH200, each 120 GB of its CPU and "
        "200 Gb/s", per_host=4,
    ),
    # One NVLink domain counts as a host.
    "gb200": _hosts(
        "gb200", "nvlink-5-rack", "ib-400g", "nvlink-c2c-half", 15832,
        f"{_SHEET} GB200 NVL72 {_COPIES}: 72 GPUs, 36 Grace CPUs with 17 TB; {_STAS}: "
        "400 Gb/s for each GPU", per_host=72,
    ),
    "gb300": _hosts(
        "gb300", "nvlink-5-rack", "ib-800g", "nvlink-c2c-half", 15832,
        f"{_SHEET} GB300 NVL72 {_COPIES}: 72 GPUs, 36 Grace CPUs with 17 TB, 800 Gb/s "
        "for each GPU", per_host=72,
    ),
    "l4": _hosts(
        "l4", "pcie-4", "ethernet-100g", "pcie-4", 512,
        f"a server of 8 cards; its memory and network {_ASSUMED}",
    ),
    "l40s": _hosts(
        "l40s", "pcie-4", "ethernet-100g", "pcie-4", 1536,
        f"AWS g6e.48xlarge in torchx's named resources: 8 cards; network {_ASSUMED}",
    ),
    "a10g": _hosts(
        "a10g", "pcie-4", "ethernet-100g", "pcie-4", 512, "AWS g5.48xlarge: 8 cards; "
        f"its memory and network {_ASSUMED}",
    ),
    "rtx5090": _hosts(
        "rtx5090", "pcie-5-through-host", "ethernet-100g", "pcie-5", 512,
        f"a server of 8 consumer cards; its memory and network {_ASSUMED}",
    ),
    "rtx-pro-6000": _hosts(
        "rtx-pro-6000", "pcie-5", "ethernet-100g", "pcie-5", 1024,
        f"a server of 8 cards; its memory and network {_ASSUMED}",
    ),
    "rtx4090": _hosts(
        "rtx4090", "pcie-4-through-host", "ethernet-100g", "pcie-4", 512,
        "a server of 8 consumer cards",
    ),
    "mi300x": _hosts(
        "mi300x", "infinity-fabric-3", "ib-400g", "pcie-5", 2048,
        "8 MI300X, fully connected, 8 x 400 Gb/s",
    ),
    "mi355x": _hosts(
        "mi355x", "infinity-fabric-4", "ib-400g", "pcie-5", 2048,
        f"8 MI355X, fully connected; 8 x 400 Gb/s and its memory {_ASSUMED}",
    ),
    "cpu": _hosts(
        "cpu", "shared-memory", "tcp-loopback", "", 64, "JAX's CPU devices", per_host=0
    ),
    "fpga-u280": _hosts(
        "fpga-u280", "pcie-4", "ethernet-100g", "pcie-4", 256, "an example"
    ),
    "asic-activation": _hosts(
        "asic-activation", "pcie-5", "ethernet-100g", "cxl-2", 256, "an example"
    ),
    "dpu-bluefield3": _hosts(
        "dpu-bluefield3", "pcie-5", "ib-400g", "pcie-5", 256, "an example", per_host=1
    ),
    "tpu-v4": _pod("tpu-v4", 4, 407, 3, 4096),
    "tpu-v5e": _pod("tpu-v5e", 8, 512, 2, 256),
    "tpu-v5p": _pod("tpu-v5p", 4, 448, 3, 6144),
    "tpu-v6e": _pod("tpu-v6e", 8, 1536, 2, 256, "pcie-v6e"),
    # Four chips of two devices at a host. No source for its PCIe was at hand.
    "tpu-v7x": _pod("tpu-v7x", 8, 960, 3, 2 * 9216, "", per_chip=2),
    "selene": _hosts(
        "a100", "nvlink-3", "ib-200g", "pcie-4", 2048,
        "arXiv 2104.04473: 8 x A100 80 GB, 8 x HDR 200 Gb/s",
    ),
    "jean-zay": _hosts(
        "a100", "nvlink-3", "opa-100g-half", "pcie-4", 512,
        "BigScience chronicles: 8 x A100 80 GB, 4 x Omni-Path 100 Gb/s",
    ),
    "dgx-h100": _hosts(
        "h100", "nvlink-4", "ib-400g", "pcie-5", 2048, "DGX H100: 8 x 400 Gb/s"
    ),
    "p5": _hosts(
        "h100", "nvlink-4", "efa-400g", "pcie-5", 2048, "AWS p5.48xlarge: 3200 Gb/s"
    ),
    "p4d": _hosts(
        "a100-40gb", "nvlink-3", "efa-100g-half", "pcie-4", 1152,
        "AWS p4d.24xlarge: 400 Gb/s",
    ),
}  # fmt: skip
"""Map from name to machine. The most common machine of a device type has the name of
the device type."""


def device_type(name: str) -> DeviceType:
    """Looks up a device type of the catalog by its name or an alias.

    Raises:
        ValueError: the name is unknown; the message lists the known names.

    >>> device_type("H100_SXM").name
    'h100'
    """
    if (known := canonical_name(name)) in DEVICES:
        return DEVICES[known]
    unknown("device type", name, DEVICES, [*DEVICES, *ALIASES])


def machine(name: str) -> Machine:
    """Looks up a machine of the catalog by its name or an alias.

    Raises:
        ValueError: the name is unknown; the message lists the known names.
    """
    if (known := canonical_name(name)) in MACHINES:
        return MACHINES[known]
    unknown("device type or machine", name, MACHINES, [*MACHINES, *ALIASES])


def link(name: str) -> Link:
    """Looks up a link of the catalog by its name.

    Raises:
        ValueError: the name is unknown; the message lists the known names.
    """
    if (known := name.strip().lower().replace("_", "-")) in LINKS:
        return LINKS[known]
    unknown("link", name, LINKS, LINKS)


def torus_link(of: Machine, size: int) -> Link:
    """Returns the link along a dimension of `size` devices in the torus of a machine.

    The dimension is a closed ring if `size` is a multiple of the number that the
    machine needs for one (`of.ring`, 4 or 16). Otherwise the link has half the
    bandwidth, because the devices at both ends of the dimension send in one direction
    only.
    """
    port = link(of.inside)
    if size % of.ring == 0:
        return port
    half = replace(port.curve, bandwidth=port.curve.bandwidth / 2)
    return replace(port, curve=half, source=f"{port.source}; no ring: half of it")


def canonical_name(name: str) -> str:
    """Returns the catalog's name for a name in any spelling, or for an alias.

    A name that the catalog lacks is returned in the catalog's spelling: in lower case,
    with hyphens for spaces and underscores.

    >>> canonical_name(" A100 80GB"), canonical_name("v5e")
    ('a100', 'tpu-v5e')
    """
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    return ALIASES.get(plain, plain)


def device_type_of_kind(kind: str) -> DeviceType | None:
    """Looks up the device type of JAX's `device_kind`; None if the catalog lacks it.

    >>> device_type_of_kind("NVIDIA H100 80GB HBM3").name
    'h100'
    """
    if kind.lower() == "cpu":
        return DEVICES["cpu"]
    if _SLOWER.search(kind):
        return None
    words = (
        name
        for part, name in KINDS
        if re.search(rf"(?<![a-z\d]){re.escape(part)}(?![a-z\d])", kind, re.IGNORECASE)
    )
    name = next(words, None)
    return None if name is None else DEVICES[name]


def unknown(
    what: str, name: str, known: Iterable[str], near: Iterable[str]
) -> NoReturn:
    """Raises a ValueError that says that a name is not in the catalog.

    The message lists the known names, and suggests one of the names `near`: the longest
    that begins the unknown name, else those that end with it, else the most similar
    one. If the unknown name is a word for many devices, such as `tpu`, the message
    suggests all of these devices. If the unknown name tells its platform, such as
    `cuda`, names of another platform are not suggested.

    Args:
        what: what the name is of, such as `link`.
        name: the unknown name.
        known: the names that the message lists.
        near: the names that may be suggested.
    """
    plain, platform = canonical_name(name), _platform(name)
    fitting = [n for n in near if platform is None or _platform(n) in (platform, None)]
    within = sorted((n for n in fitting if plain.startswith(f"{n}-")), key=len)[-1:]
    around = [n for n in fitting if n.endswith(f"-{plain}")]
    close = difflib.get_close_matches(plain, fitting, n=1, cutoff=0.5)
    meant = " or ".join(map(repr, within or around or close))
    hint = f" Did you mean {meant}?" if meant else ""
    if plain in _FAMILIES:
        members = sorted(n for n in known if _platform(n) in _FAMILIES[plain])
        hint = f" It is a family of devices. Name one: {', '.join(members)}."
    raise ValueError(
        f"{what} {name!r} is not in the catalog.{hint} Known: "
        f"{', '.join(sorted(known))}. Others: describe them in a file "
        "(`dtft.planner.cluster.topology`) and give its path."
    )


_FAMILIES: Mapping[str, tuple[Platform, ...]] = {
    "tpu": ("tpu",), "google": ("tpu",), "gpu": ("cuda", "rocm"), "nvidia": ("cuda",),
    "cuda": ("cuda",), "amd": ("rocm",), "rocm": ("rocm",), "instinct": ("rocm",),
}  # fmt: skip
"""Map from a word for many devices to their platforms."""

_SERIES: tuple[tuple[str, Platform], ...] = (
    (r"(amd-|instinct-|radeon-)*(mi|rx-?|gfx)\d", "rocm"),
    (r"tpu|v\d([a-z-]|$)|ironwood|trillium", "tpu"),
    (r"(nvidia-|geforce-|tesla-)*(rtx|gtx|g[bh]\d|[abhlpv]\d\d|[lt]\d)", "cuda"),
)
"""Pairs of a regular expression for the start of device names, and the platform of
these devices. Used for names that the catalog lacks."""


def _platform(name: str) -> Platform | None:
    """Finds the platform, such as `cuda`, of a device or machine by its name.

    None if the name tells none.
    """
    known = canonical_name(name)
    if known in MACHINES:
        return DEVICES[MACHINES[known].device].platform
    return next((found for part, found in _SERIES if re.match(part, known)), None)
