"""Links of common machines, with sources: level 0 of calibration.

A table; must not know how a figure is used. Bandwidths are what collectives of large
arrays reach, one direction, not the raw figure of the data sheet, wherever somebody
published it; `dtft calibrate` replaces them.
"""

from collections.abc import Mapping

from dtft.planner.links import CollectiveKind, Curve, Link, LinkKind

_STAS = "stas00/ml-engineering network/README.md"
_SHEET = "data sheet"
_SCALING = "jax-ml/scaling-book, TPU specs"
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
    """A link; `all_reduce` in GB/s, where the switch adds up by itself."""

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
    "cxl-2": _link("CXL", 0.5, 50, "planner.md section 5: x16 64 GB/s raw, 100-200 ns "
        "over DRAM [unverified]; 78 % " + _ASSUMED, 0.01),
    "upi": _link("UPI", 0.5, 60, "planner.md section 5: three links, about 60 GB/s "
        "[unverified]", 0.01, shared_by=4),
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
"""Name to link. `-half`: a port for two devices."""
