"""Candidates whose optimizer state rests in host memory, from the same without.

Operators do the same with it: so a candidate has the price of the same whose state
stays on the device, and on top what its arrays take (`offload`). Must not know how
candidates are made or which one is taken.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dtft.planner.links import Link
from dtft.planner.offload import Away, away
from dtft.planner.partition import Division
from dtft.planner.priced import MEMORY, Priced
from dtft.planner.resting import Resting
from dtft.planner.space import Space
from dtft.planner.staged import Staged


def offloaded(
    priced: Priced, resting: Resting, link: Link, staged: Staged | None = None
) -> Priced:
    """The same candidates with their optimizer state in host memory.

    Args:
        priced: candidates that have it on the device.
        resting: arrays of the question, on the points of these candidates.
        link: from a device to its host's memory.
        staged: the layers, if there are candidates with stages.
    """
    space = priced.space.with_offload()
    host, seconds, less = (np.zeros(len(space)) for _ in range(3))
    for number, division in enumerate(priced.divisions):
        rows = np.flatnonzero(priced.division == number)
        if len(rows):
            moved = _away(space, resting, link, division, rows)
            host[rows], seconds[rows] = moved.host_bytes, moved.seconds
            less[rows] = moved.host_bytes - moved.device_bytes
    if staged is not None:
        every = np.arange(len(space))
        whole = {name: less if name == "optimizer" else 0.0 * less for name in MEMORY}
        less = staged.memory(space, every, whole)["optimizer"]
    memory = {**priced.memory, "optimizer": priced.memory["optimizer"] - less}
    return replace(
        priced,
        space=space,
        terms={**priced.terms, "offload": seconds},
        memory=memory,
        host=host,
    )


def _away(
    space: Space, resting: Resting, link: Link, division: Division, rows: np.ndarray
) -> Away:
    """Of some candidates of one division."""
    points = resting.prices.columns.of[rows]
    divided = space.columns["zero"][rows] >= 1

    def arrays() -> Iterator[tuple[int, np.ndarray]]:
        whole, parts = (
            resting.each("optimizer", division, part) for part in (False, True)
        )
        for (cases, count, each), (_, _, part) in zip(whole, parts, strict=True):
            at = cases.of[points]
            yield count, np.where(divided, part[at], each[at])

    return away(link, arrays())
