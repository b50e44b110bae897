"""Links between devices: what kind they are, how long a transfer takes.

A value only. Must not know devices, meshes or which collective uses a link
(`collective_cost`); where the figures come from is `catalog_links` or `calibration`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

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
        low = max((n for n in curves if n <= num_devices), default=min(curves))
        high = min((n for n in curves if n >= num_devices), default=max(curves))
        if low >= high:
            return curves[high]
        share = math.log(num_devices / low) / math.log(high / low)
        return _between(curves[low], curves[high], share)


def _between(low: Curve, high: Curve, share: float) -> Curve:
    """Seconds per byte, not bytes per second, are what adds up."""

    def mean(a: float, b: float) -> float:
        return a + (b - a) * share

    return Curve(
        latency_s=mean(low.latency_s, high.latency_s),
        bandwidth=1 / mean(1 / low.bandwidth, 1 / high.bandwidth),
        half_bytes=mean(low.half_bytes, high.half_bytes),
    )
