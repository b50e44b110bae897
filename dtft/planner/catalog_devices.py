"""Device types of common machines, with sources: level 0 of calibration.

A table; must not know how a figure is used. Peaks are dense, without sparsity. Sizes,
cores and bandwidths of NVIDIA devices are those of XLA's own target descriptions; where
these differ from what is sold (MI300X), the data sheet.
"""

from collections.abc import Mapping

from dtft.planner.device import DeviceType, Efficiency, Platform

_XLA = "openxla/xla backends/gpu/target_config/specs"
_SHEET = "data sheet"
_SCALING = "jax-ml/scaling-book, TPU specs"
_GPU = Efficiency(e0=0.75, x0=8.0, memory=0.85, fuse=0.5, launch_s=4e-6, misaligned=0.5)
"""e0 and x0: BigScience fit on A100, planner.md section 3; the others are assumed."""
_TPU = Efficiency(e0=0.8, x0=0.0, memory=0.85, fuse=0.5, launch_s=1e-6)
"""Assumed; TPU programs start their operators themselves."""
_T = 1e12


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
        efficiency=_GPU,
        source=source,
    )


def _tpu(
    name: str, bfloat16: float, int8: float, gib: int, bandwidth: float, lanes: int
) -> DeviceType:
    peaks = {"bfloat16": bfloat16, "float32": bfloat16, "int8": int8}
    return DeviceType(
        name=name,
        platform="tpu",
        peak_flops={dtype: peak * _T for dtype, peak in peaks.items()},
        memory_bytes=gib * 2**30,
        memory_bandwidth=bandwidth,
        tile=(8, lanes, lanes),
        efficiency=_TPU,
        source=f"{_SCALING}; cloud.google.com/tpu/docs; float32: one bfloat16 pass",
    )


_A100 = {"bfloat16": 312, "float16": 312, "float32": 156, "float64": 19.5, "int8": 624}
_H100 = {
    "bfloat16": 989.4, "float16": 989.4, "float32": 494.7, "float64": 66.9,
    "int8": 1978.9, "float8_e4m3fn": 1978.9,
}  # fmt: skip
_H100_PCIE = {
    "bfloat16": 756, "float16": 756, "float32": 378, "float64": 51.2, "int8": 1513,
    "float8_e4m3fn": 1513,
}  # fmt: skip
_B200 = {
    "bfloat16": 2250, "float16": 2250, "float32": 1125, "float64": 37, "int8": 4500,
    "float8_e4m3fn": 4500, "float4_e2m1fn": 9000,
}  # fmt: skip
_4090 = {
    "bfloat16": 165.2, "float16": 165.2, "float32": 82.6, "float64": 1.29,
    "int8": 660.6, "float8_e4m3fn": 330.3,
}  # fmt: skip
_MI300X = {
    "bfloat16": 1307.4, "float16": 1307.4, "float32": 163.4, "float64": 163.4,
    "int8": 2614.9, "float8_e4m3fnuz": 2614.9, "float8_e4m3fn": 2614.9,
}  # fmt: skip

_ALL = (
    _gpu(
        "v100", {"float16": 125, "float32": 15.7, "float64": 7.8, "bfloat16": 15.7},
        16_935_682_048, 898.048e9, 80,
        f"{_XLA}/v100.txtpb; peaks: {_SHEET} V100 SXM2; it has no bfloat16",
        tile=(128, 128, 32),
    ),
    _gpu(
        "a100-40gb", _A100, 42_331_013_120, 1555.2e9, 108,
        f"{_XLA}/a100_sxm_40.txtpb; peaks: {_SHEET} A100 SXM",
    ),
    _gpu(
        "a100", _A100, 85_100_068_864, 2039.04e9, 108,
        f"{_XLA}/a100_sxm_80.txtpb; peaks: {_SHEET} A100 SXM 80 GB",
    ),
    _gpu(
        "h100", _H100, 84_929_347_584, 3352.32e9, 132,
        f"{_XLA}/h100_sxm.txtpb; peaks: {_SHEET} H100 SXM",
    ),
    _gpu(
        "h100-pcie", _H100_PCIE, 84_942_979_072, 2039.04e9, 114,
        f"{_XLA}/h100_pcie.txtpb; peaks: {_SHEET} H100 PCIe",
    ),
    _gpu(
        "h200", _H100, 141_000_000_000, 4800e9, 132,
        f"planner.md section 10; peaks: {_SHEET} H200 SXM",
    ),
    _gpu(
        "b200", _B200, 191_514_411_008, 7672.32e9, 148,
        f"{_XLA}/b200.txtpb; peaks: {_SHEET} HGX B200",
    ),
    _gpu(
        "rtx4090", _4090, 25_200_000_000, 1008e9, 128,
        f"{_SHEET} RTX 4090 (Ada): 24 GB, peaks with float32 sums",
    ),
    _gpu(
        "mi300x", _MI300X, 205_000_000_000, 5300e9, 304,
        f"{_SHEET} MI300X: 192 GB; float32 without its xf32", platform="rocm",
    ),
    _tpu("tpu-v4", 275, 275, 32, 1.2e12, 128),
    _tpu("tpu-v5e", 197, 394, 16, 8.19e11, 128),
    _tpu("tpu-v5p", 459, 918, 95, 2.765e12, 128),
    _tpu("tpu-v6e", 918, 1836, 32, 1.638e12, 256),
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
    "mi300": "mi300x", "v4": "tpu-v4", "v5e": "tpu-v5e", "v5litepod": "tpu-v5e",
    "v5p": "tpu-v5p", "v6e": "tpu-v6e", "trillium": "tpu-v6e",
}  # fmt: skip
"""Other names of device types."""

KINDS: tuple[tuple[str, str], ...] = (
    ("TPU v6", "tpu-v6e"), ("TPU v5 lite", "tpu-v5e"), ("TPU v5e", "tpu-v5e"),
    ("TPU v5", "tpu-v5p"), ("TPU v4", "tpu-v4"), ("B200", "b200"), ("H200", "h200"),
    ("H100 PCIe", "h100-pcie"), ("H100", "h100"), ("A100-SXM4-40GB", "a100-40gb"),
    ("A100-PCIE-40GB", "a100-40gb"), ("A100", "a100"), ("V100", "v100"),
    ("RTX 4090", "rtx4090"), ("MI300X", "mi300x"),
)  # fmt: skip
"""Part of JAX's `device_kind` to device type; the first that fits counts."""
