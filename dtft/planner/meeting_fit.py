"""From times of collectives behind and beside computing to what these do to each other.

Pure. Must not know how anything is measured (`dtft.train.measuring_links`) or how
collectives by themselves are fitted (`calibration_fit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from dtft.planner.collective_cost import Group, collective_s
from dtft.planner.links import Link


@dataclass(frozen=True, kw_only=True)
class BehindTime:
    """What an all-reduce adds to computing that it waits for and that waits for it."""

    num_bytes: int
    num_devices: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AheadTime:
    """Computing and gathers that it needs but that do not wait for it, in seconds."""

    num_devices: int
    computing_s: float
    gathers_s: float
    together_s: float


def fit_meeting(link: Link, times: Sequence[BehindTime]) -> Link:
    """The link with what meeting takes, by the number of devices.

    The median of what is left over the collectives by themselves; not below nothing.

    Args:
        link: fitted already (`calibration_fit.fit_link`).
        times: of groups that lie on this level alone; none leave the link as it is.
    """
    left: dict[int, list[float]] = {}
    for time in times:
        group = Group(sizes=(time.num_devices,), links=(link,))
        alone = collective_s("all_reduce", time.num_bytes, group)
        left.setdefault(time.num_devices, []).append(time.seconds - alone)
    meeting = {n: max(0.0, median(own)) for n, own in left.items()}
    return replace(link, meeting=meeting)


def fit_ahead(link: Link, times: Sequence[AheadTime]) -> Link:
    """The link with the share of gathers that computing hides, by number of devices.

    Between none and all.

    Args:
        link: any.
        times: one for each number of devices, of groups that lie on this level alone;
            none leave the link as it is.

    >>> from dtft.planner.links import Curve
    >>> port = Curve(latency_s=1e-6, bandwidth=1e9)
    >>> time = AheadTime(num_devices=2, computing_s=4.0, gathers_s=2.0, together_s=5.0)
    >>> fit_ahead(Link(kind="loopback", curve=port, source=""), [time]).ahead
    {2: 0.5}
    """
    ahead = {
        time.num_devices: 1 - (time.together_s - time.computing_s) / time.gathers_s
        for time in times
    }
    return replace(link, ahead={n: min(max(x, 0.0), 1.0) for n, x in ahead.items()})
