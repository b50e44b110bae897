"""Catalog of devices, links and machines by name, with uncalibrated figures (level 0).

Each device, link and machine has the source of its figures: a data sheet, a published
measurement, or an assumption. `cost.apply_calibration` replaces the speeds by the
measurements of `dtft calibrate`.
"""

import difflib
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

# Device types. Peaks are dense (no sparsity). Sizes, cores and bandwidths of most
# NVIDIA devices come from XLA's target descriptions. Where the product differs
# (MI300X), the data sheet counts.


_XLA = "openxla/xla backends/gpu/target_config/specs"
_SHEET = "data sheet"
_SCALING = "jax-ml/scaling-book, TPU specs"
_GPU = Efficiency(e0=0.75, x0=8.0, memory=0.85, launch_s=4e-6, misaligned=0.5)
"""Efficiency of GPUs. e0 and x0 come from a fit to BigScience runs on A100; the other
scalars are assumed."""
_TPU = Efficiency(e0=0.8, x0=0.0, memory=0.85, launch_s=1e-6)
"""Efficiency of TPUs, assumed. Launches are short, because a TPU program launches its
operators on the device."""
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
        f"{_SHEET} H200 SXM: 141 GB, and its peaks",
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
"""Map from other names of device types to the catalog's name."""

KINDS: tuple[tuple[str, str], ...] = (
    ("TPU v6", "tpu-v6e"), ("TPU v5 lite", "tpu-v5e"), ("TPU v5e", "tpu-v5e"),
    ("TPU v5", "tpu-v5p"), ("TPU v4", "tpu-v4"), ("B200", "b200"), ("H200", "h200"),
    ("H100 PCIe", "h100-pcie"), ("H100", "h100"), ("A100-SXM4-40GB", "a100-40gb"),
    ("A100-PCIE-40GB", "a100-40gb"), ("A100", "a100"), ("V100", "v100"),
    ("RTX 4090", "rtx4090"), ("MI300X", "mi300x"),
)  # fmt: skip
"""Pairs of a part of JAX's `device_kind` and a device type; the first match counts."""


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
    """Builds a link; `all_reduce` is the GB/s of an all-reduce that the switch computes
    (None if it does not)."""

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
    "infinity-fabric-3": _link(
        "NVLink", 5, 315, f"{_SHEET} MI300X: 7 links of 64 GB/s per direction; 70 % "
        f"{_ASSUMED}; direct links, like NVLink", 4,
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
        "InfiniBand", 10, 11.5, "BigScience, Jean Zay: 4 Omni-Path 100 Gb/s ports per "
        f"host of 8, here listed as InfiniBand; share and latency {_ASSUMED}", 2,
        shared_by=2,
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
    "cxl-2": _link("CXL", 0.5, 50, "assumed: x16 64 GB/s raw, 100-200 ns over DRAM; "
        "78 % " + _ASSUMED, 0.01),
    "upi": _link("UPI", 0.5, 60, "assumed: three links, about 60 GB/s", 0.01,
        shared_by=4),
    "ici-v4": _link("ICI", 1, 90, f"{_SCALING}: 90 GB/s per axis, both directions"),
    "ici-v5e": _link("ICI", 1, 90, f"{_SCALING}: 90 GB/s per axis, both directions"),
    "ici-v5p": _link("ICI", 1, 180, f"{_SCALING}: 180 GB/s per axis, both directions"),
    "ici-v6e": _link("ICI", 1, 180, f"{_SCALING}: 180 GB/s per axis, both directions"),
    "dcn-v5e": _link("Ethernet", 50, 3.125, f"{_SCALING}: per chip; latency assumed"),
    "dcn-v5p": _link("Ethernet", 50, 6.25, f"{_SCALING}: per chip; latency assumed"),
    "dcn-v6e": _link("Ethernet", 50, 12.5, f"{_SCALING}: per chip; latency assumed"),
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

    `device` names a device type of the catalog; the link fields name its links.
    """

    device: str
    per_host: int
    """The number of devices of one host; 0 means any number."""
    inside: str
    """Link between the devices of a host; in a torus, the link along each dimension."""
    outside: str
    """Link between hosts; for a torus, the link between slices."""
    host_link: str
    """Link from a device to host memory; empty if the device uses the host's memory."""
    host_memory_bytes: int
    """Bytes of memory of one host."""
    torus_dims: int = 0
    """The number of torus dimensions; 0 for hosts in a network."""
    ring: int = 0
    """A torus dimension is a closed ring if its size is a multiple of this number."""
    pod: int = 0
    """The number of devices of the largest torus."""
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


def _pod(device: str, per_host: int, memory_gib: int, dims: int, pod: int) -> Machine:
    name = device.removeprefix("tpu-")
    network = {"v4": "dcn-v5p"}.get(name, f"dcn-{name}")
    return Machine(
        device=device,
        per_host=per_host,
        inside=f"ici-{name}",
        outside=network,
        host_link="pcie-v6e" if name == "v6e" else "pcie-tpu",
        host_memory_bytes=memory_gib * GIB,
        torus_dims=dims,
        ring=16 if dims == 2 else 4,
        pod=pod,
        source="cloud.google.com/tpu/docs; rings: jax-ml/scaling-book",
    )


MACHINES: Mapping[str, Machine] = {
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
    "rtx4090": _hosts(
        "rtx4090", "pcie-4-through-host", "ethernet-100g", "pcie-4", 512,
        "a server of 8 consumer cards",
    ),
    "mi300x": _hosts(
        "mi300x", "infinity-fabric-3", "ib-400g", "pcie-5", 2048,
        "8 MI300X, fully connected, 8 x 400 Gb/s",
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
    "tpu-v6e": _pod("tpu-v6e", 8, 1536, 2, 256),
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
    """Returns the link along a torus dimension of a given size.

    A dimension that is no ring has half the bandwidth: its end devices send in one
    direction only.
    """
    port = link(of.inside)
    if size % of.ring == 0:
        return port
    half = replace(port.curve, bandwidth=port.curve.bandwidth / 2)
    return replace(port, curve=half, source=f"{port.source}; no ring: half of it")


def canonical_name(name: str) -> str:
    """Normalizes a name to the catalog's spelling and resolves aliases.

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
    found = (name for part, name in KINDS if part.lower() in kind.lower())
    name = next(found, "cpu" if kind.lower() == "cpu" else None)
    return None if name is None else DEVICES[name]


def unknown(
    what: str, name: str, known: Iterable[str], near: Iterable[str]
) -> NoReturn:
    """Raises a ValueError that lists the known names.

    The message also suggests the closest of the names `near`, if one is similar.
    """
    close = difflib.get_close_matches(canonical_name(name), list(near), n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"{what} {name!r} is not in the catalog.{hint} Known: "
        f"{', '.join(sorted(known))}. Others: describe them in a file "
        "(`dtft.planner.cluster.topology`) and give its path."
    )
