"""What happens when: time that is taken of a node or a port, bytes that a node holds.

Arithmetic on moments; must not know tasks or links.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Line:
    """What takes a node or a port, by time; nothing overlaps."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @property
    def taken_s(self) -> float:
        """Seconds for which it is taken in all."""
        return sum(self.ends) - sum(self.starts)

    def free(self, ready: float, seconds: float) -> float:
        """The first moment from which on it is free for so long."""
        ends = self.ends
        if not ends or ready >= ends[-1]:
            return ready
        starts = self.starts
        for place in range(bisect_right(ends, ready), len(ends)):
            if starts[place] >= ready + seconds:
                break
            ready = ends[place]
        return ready

    def take(self, begin: float, end: float) -> None:
        """Takes it for a time in which it is free, longer than nothing."""
        starts, ends = self.starts, self.ends
        place = (
            len(ends) if not ends or begin >= ends[-1] else bisect_right(ends, begin)
        )
        # What follows without a gap is one with what it follows: fewer are looked at.
        if place and ends[place - 1] == begin:
            place -= 1
            ends[place] = end
        else:
            starts.insert(place, begin)
            ends.insert(place, end)
        if place + 1 < len(starts) and starts[place + 1] == end:
            ends[place] = ends[place + 1]
            del starts[place + 1], ends[place + 1]

    def leave(self, begin: float, end: float) -> None:
        """Gives back a time for which it was taken."""
        place = bisect_right(self.starts, begin) - 1
        first, last = self.starts[place], self.ends[place]
        parts = [(a, b) for a, b in ((first, begin), (end, last)) if b > a]
        self.starts[place : place + 1] = [a for a, _ in parts]
        self.ends[place : place + 1] = [b for _, b in parts]


class Held:
    """From when until when nodes hold values."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, value: int, node: int, begin: float, end: float) -> None:
        """A node holds a value at least for this time, and for all between two."""
        first, last = self._times.get((value, node), (begin, end))
        self._times[value, node] = min(first, begin), max(last, end)

    def peaks(
        self, num_nodes: int, num_bytes: Sequence[float], stays: Sequence[bool]
    ) -> list[float]:
        """Most bytes that each node holds at one time.

        Args:
            num_nodes: there are.
            num_bytes: of each value.
            stays: whether a value, once it is there, is held to the end.
        """
        changes: list[list[tuple[float, float]]] = [[] for _ in range(num_nodes)]
        for (value, node), (begin, end) in self._times.items():
            changes[node].append((begin, num_bytes[value]))
            if not stays[value]:
                changes[node].append((end, -num_bytes[value]))
        return [_peak(some) for some in changes]


def _peak(changes: list[tuple[float, float]]) -> float:
    """The highest sum of changes up to any moment; what goes then goes first."""
    if not changes:
        return 0.0
    changes.sort()
    return float(max(0.0, np.cumsum([change for _, change in changes]).max()))
