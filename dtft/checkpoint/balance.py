"""Shares a demand for bytes over those who can send it, evenly.

Pure numbers: who the senders are, what is sent and why some are preferred is not known
here. The shares are those of the convex problem "least sum of squared loads", whose
optimum also has the least maximum; it is solved by filling one demand after the other
to a common level, as with water, until nothing changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_SWEEPS = 12
SETTLED = 1e-3
"""Change of a load, relative to the greatest, below which a sweep changed nothing."""
SMALL = 16
"""Up to this many candidates plain Python is faster than numpy."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Demand:
    """Bytes that any of some candidates can send."""

    nbytes: int
    candidates: np.ndarray
    """[n] int64: senders, none twice, at least one."""
    distance: np.ndarray | None = None
    """[n] float64, 0 near to 1 far; None where it does not matter."""


def share_out(
    demands: Sequence[Demand], num_senders: int, slack: float
) -> list[np.ndarray]:
    """Divides every demand over its candidates.

    Args:
        demands: what is to be sent.
        num_senders: candidates are below this.
        slack: load, as a fraction of the even one, that a near sender may take on
            before one at distance 1 is used.

    Returns:
        Per demand [n] int64 bytes of each candidate, which add up to the demand.

    >>> all_of, first = np.array([0, 1, 2]), np.array([0])
    >>> demands = [
    ...     Demand(nbytes=60, candidates=all_of),
    ...     Demand(nbytes=30, candidates=first),
    ... ]
    >>> [share.tolist() for share in share_out(demands, 3, slack=0.0)]
    [[0, 30, 30], [30]]
    """
    useful = np.zeros(num_senders, bool)
    for demand in demands:
        useful[demand.candidates] = True
    total = sum(demand.nbytes for demand in demands)
    penalty = slack * total / max(1, int(useful.sum()))
    load = np.zeros(num_senders)
    shares = [np.zeros(len(demand.candidates)) for demand in demands]
    # Those with few candidates go first: the others then flow around them.
    order = sorted(range(len(demands)), key=lambda i: len(demands[i].candidates))
    for sweep in range(MAX_SWEEPS):
        before = load.copy()
        for index in order:
            demand = demands[index]
            level = load[demand.candidates] - shares[index]
            base = level
            if demand.distance is not None and penalty:
                # At first all is near; later sweeps hand on what is too much.
                weight = penalty if sweep else 10.0 * total
                base = level + weight * demand.distance
            shares[index] = _fill(base, demand.nbytes)
            load[demand.candidates] = level + shares[index]
        if np.abs(load - before).max(initial=0.0) <= SETTLED * load.max(initial=0.0):
            break
    return [
        _whole_bytes(share, demand.nbytes)
        for share, demand in zip(shares, demands, strict=True)
    ]


def _fill(base: np.ndarray, amount: int) -> np.ndarray:
    """Water on uneven ground: what lies on each column when `amount` is poured."""
    if len(base) == 1:
        return np.array([float(amount)])
    if len(base) <= SMALL:
        columns = sorted(base.tolist())
        level, below = columns[0] + amount, columns[0]
        for count, column in enumerate(columns[1:], start=1):
            if column >= level:
                break
            below += column
            level = (amount + below) / (count + 1)
    else:
        ascending = np.sort(base)
        levels = (amount + np.cumsum(ascending)) / np.arange(1, len(base) + 1)
        level = levels[np.append(levels[:-1] <= ascending[1:], True).argmax()]
    return np.maximum(0.0, level - base)


def _whole_bytes(share: np.ndarray, nbytes: int) -> np.ndarray:
    """Rounded up or down so that the sum is exact: the largest fractions go up.

    >>> _whole_bytes(np.array([0.5, 2.25, 1.25]), 4).tolist()
    [1, 2, 1]
    """
    exact = share / float(share.sum()) * nbytes
    whole = np.floor(exact).astype(np.int64)
    left = nbytes - int(whole.sum())
    if 0 <= left <= len(whole):
        whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    else:  # so many bytes that a float does not count them one by one
        whole[whole.argmax()] += left
    return whole
