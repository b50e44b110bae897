"""Where to cut a stretch of operators into blocks of which only the inputs are kept.

Pure arithmetic on bytes; must not know programs, devices or why blocks are wanted.
"""

import itertools
from collections import deque
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
    best: tuple[float, tuple[int, ...]] = (upto[-1], ())
    limit = upto[-1]
    while limit > 0:
        limit /= _FINER
        found = _cheapest(crossing, upto, limit)
        if found is None:
            break
        cost, cuts = found
        ends = [0, *(cut + 1 for cut in cuts), len(inside)]
        widest = max(upto[b] - upto[a] for a, b in itertools.pairwise(ends))
        if cost + widest < best[0]:
            best = (cost + widest, cuts)
        limit = min(limit, widest)
    return best[1]


def _cheapest(
    crossing: Sequence[float], upto: Sequence[float], limit: float
) -> tuple[float, tuple[int, ...]] | None:
    """The cuts that fewest bytes cross, with blocks of at most `limit` bytes.

    For every end the cheapest begin of its block is kept at the front of a window, so
    that thousands of operators take milliseconds.
    """
    num = len(upto) - 1
    costs, before = [0.0], [0]
    window: deque[int] = deque([0])
    for end in range(1, num + 1):
        while window and upto[end] - upto[window[0]] > limit:
            window.popleft()
        if not window:
            return None
        begin = window[0]
        costs.append(costs[begin] + (crossing[end - 1] if end < num else 0.0))
        before.append(begin)
        while window and costs[window[-1]] >= costs[end]:
            window.pop()
        window.append(end)
    cuts: list[int] = []
    begin = before[num]
    while begin:
        cuts.append(begin - 1)
        begin = before[begin]
    return costs[num], tuple(reversed(cuts))
