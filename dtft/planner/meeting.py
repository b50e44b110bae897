"""What it takes that members of a group meet, and what of it computing hides.

Times of collectives are measured some behind each other, where all members but those
of the first are there already. In a step they come at unlike times, each from its own
computing, most of all where processes share cores, and who waits has to be woken:
`Link.meeting`. Where a collective waits for nothing, a device computes meanwhile:
`Link.ahead`. Both are measured where they were found to matter. Pure. Must not know
which collectives wait for what (`combining`).
"""

from collections.abc import Sequence

import numpy as np

from dtft.planner.axis_layout import Group, Groups
from dtft.planner.links import Link


def meeting_s(group: Group) -> float:
    """Seconds of a group; of several levels those of the slowest.

    Args:
        group: of `group_of`.
    """
    return _slowest(group.sizes, group.links)


def meetings_s(groups: Groups) -> np.ndarray:
    """The same of each of many groups.

    Args:
        groups: any; one that uses no level takes nothing.

    Returns:
        Seconds; [groups].
    """
    if not any(link.meeting for link in groups.links):
        return np.zeros(len(groups.sizes))
    return np.array([_slowest(sizes, groups.links) for sizes in groups.sizes.tolist()])


def hidden(group: Group) -> float:
    """Share of a gather that computing hides, if it waits for none of it.

    Args:
        group: of `group_of`; of several levels the one that hides least counts.
    """
    return _least(group.sizes, group.links)


def hiddens(groups: Groups) -> np.ndarray:
    """The same of each of many groups; float [groups]."""
    if not any(link.ahead for link in groups.links):
        return np.zeros(len(groups.sizes))
    return np.array([_least(sizes, groups.links) for sizes in groups.sizes.tolist()])


def _slowest(sizes: Sequence[float], links: Sequence[Link]) -> float:
    each = (link.meeting_s(size) for size, link in zip(sizes, links, strict=True))
    return max(each, default=0.0)


def _least(sizes: Sequence[float], links: Sequence[Link]) -> float:
    used = [(n, link) for n, link in zip(sizes, links, strict=True) if n > 1]
    return min((link.hidden(n) for n, link in used), default=0.0)
