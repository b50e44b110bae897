"""Which numbers of devices, fewer than there are, are worth a look.

Where the best mesh of all devices leaves some to repeat the work of others (7 devices,
a batch of 512), 4 of them may be faster. Decides which numbers are priced then: those
that a batch and a dim of the weights can share between them. Must not know costs.
"""

import math
from collections.abc import Mapping
from typing import Any

from dtft.planner.choosing import candidates
from dtft.planner.meshes import AXES
from dtft.planner.question import Question

_MOST = 3
"""Numbers that are looked at: each adds its meshes to the search."""


def worthwhile(
    question: Question, pins: Mapping[str, Any], num_devices: int, batch: int
) -> tuple[int, ...]:
    """The largest numbers of devices below all of them that can all work.

    Args:
        question: its weights have dims that `tensor` may divide.
        pins: sizes of axes that are given divide each number.
        num_devices: all there are.
        batch: examples that the data axes divide.
    """
    graph = question.graph
    sizes = {math.gcd(*graph.dims[dim].sizes) for dim in candidates(question)} | {1}
    pinned = math.prod(pins.get(axis, 1) for axis in AXES)
    below = range((num_devices - 1) // pinned * pinned, 0, -pinned)
    shared = (n for n in below if any(batch * size % n == 0 for size in sizes))
    return tuple(n for n, _ in zip(shared, range(_MOST), strict=False))
