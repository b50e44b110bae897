"""Where to cut a stretch of operators into blocks of which only the inputs are kept.

Pure arithmetic on bytes; must not know programs, devices or why blocks are wanted.
"""

import itertools
from collections.abc import Sequence

_FINER = 2**0.25
"""Limits that are tried on the largest block are this factor apart."""


def best_cuts(inside: Sequence[float], crossing: Sequence[float]) -> tuple[int, ...]:
    """Where to cut a stretch of operators into blocks.

    Minimizes the bytes that cross all cuts plus the bytes inside the largest block, to
    within a factor of 1.19.

    Args:
        inside: bytes that each operator writes.
        crossing: for each place between two operators the bytes written before and
            read after it, so one less than `inside`.

    Returns:
        Places, ascending; place p is before operator p + 1.

    >>> best_cuts([9, 1, 9, 1, 9, 1], [9, 1, 9, 1, 9])
    (1, 3)
    >>> best_cuts([4, 4], [8])
    ()
    """
    if not inside:
        return ()
    upto = [0.0, *itertools.accumulate(inside)]
    places = _narrow(crossing)
    best: tuple[float, tuple[int, ...]] = (upto[-1], ())
    limit = upto[-1]
    while limit > 0:
        limit /= _FINER
        found = _cheapest(places, crossing, upto, limit)
        if found is None:
            break
        cost, cuts = found
        ends = [0, *(cut + 1 for cut in cuts), len(inside)]
        widest = max(upto[b] - upto[a] for a, b in itertools.pairwise(ends))
        if cost + widest < best[0]:
            best = (cost + widest, cuts)
        limit = min(limit, widest)
    return best[1]


def _narrow(crossing: Sequence[float]) -> list[int]:
    """Places where no fewer bytes cross beside them; other cuts can be moved there."""
    padded = [float("inf"), *crossing, float("inf")]
    return [
        place
        for place in range(len(crossing))
        if padded[place] >= padded[place + 1] <= padded[place + 2]
    ]


def _cheapest(
    places: Sequence[int],
    crossing: Sequence[float],
    upto: Sequence[float],
    limit: float,
) -> tuple[float, tuple[int, ...]] | None:
    """The cuts that fewest bytes cross, with blocks of at most `limit` bytes."""
    ends = [-1, *places, len(upto) - 2]
    costs, before, first = [0.0], [-1], 0
    for index in range(1, len(ends)):
        while first < index and upto[ends[index] + 1] - upto[ends[first] + 1] > limit:
            first += 1
        if first == index:
            return None
        at = min(range(first, index), key=lambda other: costs[other])
        own = crossing[ends[index]] if index < len(ends) - 1 else 0.0
        costs.append(costs[at] + own)
        before.append(at)
    cuts: list[int] = []
    index = before[-1]
    while index > 0:
        cuts.append(ends[index])
        index = before[index]
    return costs[-1], tuple(reversed(cuts))
