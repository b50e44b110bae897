"""From times of collectives behind computing to what meeting for them takes.

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
