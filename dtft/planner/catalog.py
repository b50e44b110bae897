"""Names to device types and machines: what one finds in which host, joined by what.

Level 0 of calibration: data sheets and published measurements, each with its source.
Must not know how a shorthand is written (`shorthand`) or what anything costs.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from dtft.planner.catalog_devices import ALIASES, DEVICES, KINDS
from dtft.planner.catalog_links import LINKS
from dtft.planner.device import DeviceType
from dtft.planner.links import Link

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host as it is commonly sold, or a TPU pod."""

    device: str
    per_host: int
    """Devices of one host; 0: any number."""
    inside: str
    """Link of the devices of a host; of a torus: along each of its dimensions."""
    outside: str
    """Link between hosts; of a torus: between slices."""
    host_link: str
    """From a device to host memory; empty: its memory is the host's."""
    host_memory_bytes: int
    """Of a host."""
    torus_dims: int = 0
    """Dimensions of a torus; 0: hosts in a network."""
    ring: int = 0
    """A torus' dimension is closed to a ring if its size is a multiple of this."""
    pod: int = 0
    """Devices of the largest torus."""
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
"""Name to machine; a device type's name is the machine that it is mostly sold in."""


def device_type(name: str) -> DeviceType:
    """A device type of the catalog, by its name or another that people use.

    Raises:
        ValueError: unknown; lists what is known, the closest first.

    >>> device_type("H100_SXM").name
    'h100'
    """
    if (known := canonical(name)) in DEVICES:
        return DEVICES[known]
    unknown("device type", name, DEVICES, [*DEVICES, *ALIASES])


def machine(name: str) -> Machine:
    """A machine of the catalog.

    Raises:
        ValueError: unknown; lists what is known, the closest first.
    """
    if (known := canonical(name)) in MACHINES:
        return MACHINES[known]
    unknown("device type or machine", name, MACHINES, [*MACHINES, *ALIASES])


def link(name: str) -> Link:
    """A link of the catalog.

    Raises:
        ValueError: unknown; lists what is known, the closest first.
    """
    if (known := name.strip().lower().replace("_", "-")) in LINKS:
        return LINKS[known]
    unknown("link", name, LINKS, LINKS)


def torus_link(of: Machine, size: int) -> Link:
    """The link along a dimension of a torus of some size.

    One that is no ring has half the bandwidth: its ends send one way only.
    """
    port = link(of.inside)
    if size % of.ring == 0:
        return port
    half = replace(port.curve, bandwidth=port.curve.bandwidth / 2)
    return replace(port, curve=half, source=f"{port.source}; no ring: half of it")


def canonical(name: str) -> str:
    """The catalog's spelling of a name.

    >>> canonical(" A100 80GB"), canonical("v5e")
    ('a100', 'tpu-v5e')
    """
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    return ALIASES.get(plain, plain)


def device_type_of_kind(kind: str) -> DeviceType | None:
    """The device type that JAX calls `device_kind`; None if the catalog has none.

    >>> device_type_of_kind("NVIDIA H100 80GB HBM3").name
    'h100'
    """
    found = (name for part, name in KINDS if part.lower() in kind.lower())
    name = next(found, "cpu" if kind.lower() == "cpu" else None)
    return None if name is None else DEVICES[name]


def unknown(
    what: str, name: str, known: Iterable[str], near: Iterable[str]
) -> NoReturn:
    """Raises a ValueError that lists what is known and names the closest."""
    close = difflib.get_close_matches(canonical(name), list(near), n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"{what} {name!r} is not in the catalog.{hint} Known: "
        f"{', '.join(sorted(known))}. Others: describe them in a file "
        "(`dtft.planner.cluster_file`) and give its path."
    )
