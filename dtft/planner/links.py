"""Links between devices: what kind they are, how long a transfer takes.

A value only. Must not know devices, meshes or which collective uses a link
(`collective_cost`); where the figures come from is `catalog_links` or `calibration`.
"""

import math
from collections.abc import Iterable, Mapping
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

    def meeting_s(self, num_devices: float) -> float:
        """Seconds of `meeting` among some devices, interpolated as curves are.

        >>> port = Curve(latency_s=1e-6, bandwidth=1e9)
        >>> seconds = {2: 1.0, 8: 2.0}
        >>> link = Link(kind="loopback", curve=port, source="", meeting=seconds)
        >>> [link.meeting_s(n) for n in (1, 2, 4, 16)]
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
