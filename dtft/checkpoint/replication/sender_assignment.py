"""Who sends which part of what is lacking: even over senders, near ones preferred.

`share_out` minimizes the sum of squared loads, which also has the least maximum: it
fills one demand after the other to a common level until nothing changes. `route`
applies it to the needs of a restore, given as numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Shares a demand for bytes over those who can send it, evenly.
#
# Pure numbers: who the senders are, what is sent and why some are preferred is not
# known here. The shares are those of the convex problem "least sum of squared loads",
# whose optimum also has the least maximum; it is solved by filling one demand after the
# other to a common level, as with water, until nothing changes.


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


# Who sends which part of what is lacking to whom. Vectorised.
#
# Decides, from needs given as numbers, the bytes that each sender gives to each need:
# even over senders, near ones preferred.


SLACKS = (0.15, 0.05)
"""Extra load of near senders, as a fraction of the even one; the first that fits."""
MAX_UNEVEN = 1.2
"""Greatest load allowed for the sake of nearness, as a multiple of the least possible.
"""
MAX_SOURCES = 16
"""Hosts that one target fetches from, about, if more could send. More streams are no
faster, and small shares of everybody would be thousands of connections.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Needs:
    """What is lacking, one row for each target and cell."""

    target: np.ndarray
    """[needs] int64: the host that lacks it."""
    nbytes: np.ndarray
    """[needs] int64, above 0."""
    candidates: np.ndarray
    """[needs] int64: position in `senders`."""
    senders: Sequence[np.ndarray]
    """The sets of hosts that can send something, each ascending and not empty."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Routes:
    """Spans of needs and who sends them; together all of every need, once."""

    need: np.ndarray
    """[routes] int64: row of the need."""
    source: np.ndarray
    """[routes] int64: the host that sends."""
    start: np.ndarray
    """[routes] int64: first byte inside the need."""
    stop: np.ndarray
    """[routes] int64: one past the last byte inside the need."""


def route(needs: Needs, domains: np.ndarray) -> Routes:
    """Chooses the senders.

    Needs that the same hosts can meet, at the same distances, are laid in a line, and
    so are the shares of those hosts: what lies side by side is sent.

    Args:
        needs: what is lacking.
        domains: [hosts, levels] int64: the failure domain of every host, widest level
            first, numbered so that equal numbers mean the same domain.
    """
    num_hosts = len(domains)
    group, firsts = _groups(needs, domains)
    order = np.lexsort((needs.target, group))
    sizes = needs.nbytes[order]
    need_ends = np.cumsum(sizes)
    group_ends = need_ends[
        np.searchsorted(group[order], np.arange(len(firsts)) + 1) - 1
    ]
    # Rounded up, but not for what the sum of fractions is off.
    limits = np.ceil(np.bincount(group, weights=_streams(needs)) - 1e-6)
    if len(np.unique(np.concatenate(needs.senders))) <= MAX_SOURCES:
        limits[:] = MAX_SOURCES  # there are not too many to be asked by one
    demands = [
        _demand(needs, row, int(nbytes), max(1, int(limit)), domains)
        for row, nbytes, limit in zip(
            firsts, np.diff(group_ends, prepend=0), limits, strict=True
        )
    ]
    shares = _shares(demands, num_hosts)
    source = np.concatenate([demand.candidates for demand in demands])
    source_ends = np.cumsum(np.concatenate(shares))
    ends = np.union1d(need_ends, source_ends[source_ends > 0])
    starts = np.concatenate([[0], ends[:-1]])
    at = np.searchsorted(need_ends, starts, side="right")
    begun = (need_ends - sizes)[at]
    return Routes(
        need=order[at],
        source=source[np.searchsorted(source_ends, starts, side="right")],
        start=starts - begun,
        stop=ends - begun,
    )


def _groups(needs: Needs, domains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([needs] group, [groups] a need of each): same senders at the same distances."""
    key = needs.candidates.copy()
    members = np.concatenate(needs.senders)
    lengths = [len(found) for found in needs.senders]
    owner = np.repeat(np.arange(len(needs.senders)), lengths)
    for level in domains.T:
        span = int(level.max()) + 1
        near = needs.candidates * span + level[needs.target]
        # A domain in which nobody can send is as far as any other.
        some = np.isin(near, owner * span + level[members])
        domain = np.where(some, level[needs.target], -1)
        key = np.unique(key * (span + 1) + domain + 1, return_inverse=True)[1]
    used = np.zeros(int(key.max()) + 1, bool)
    used[key] = True
    group = (np.cumsum(used) - 1)[key]
    firsts = np.zeros(int(used.sum()), np.int64)
    # Of several rows of a group the last one written stays: the first.
    firsts[group[::-1]] = np.arange(len(group))[::-1]
    return group, firsts


def _streams(needs: Needs) -> np.ndarray:
    """[needs]: the sources that each may have; a target's are shared by its bytes."""
    of_target = np.bincount(needs.target, weights=needs.nbytes)[needs.target]
    return MAX_SOURCES * needs.nbytes / of_target


def _demand(
    needs: Needs, row: int, nbytes: int, limit: int, domains: np.ndarray
) -> Demand:
    candidates, target = needs.senders[needs.candidates[row]], needs.target[row]
    distance = None
    if domains.shape[1] and len(candidates) > 1:
        distance = (domains[candidates] != domains[target]).mean(axis=1)
    if len(candidates) > limit:
        # The nearest, and of these the next ones: each target starts elsewhere.
        places = np.arange(len(candidates)) - np.searchsorted(candidates, target)
        turn = places % len(candidates)
        far = np.zeros(len(candidates)) if distance is None else distance
        kept = np.sort(np.lexsort((turn, far))[:limit])
        candidates = candidates[kept]
        distance = None if distance is None else distance[kept]
    return Demand(nbytes=nbytes, candidates=candidates, distance=distance)


def _shares(demands: Sequence[Demand], num_hosts: int) -> list[np.ndarray]:
    """Even shares, leaning to near senders as far as the greatest load permits."""
    even = share_out(demands, num_hosts, slack=0.0)
    if all(demand.distance is None for demand in demands):
        return even
    least = _greatest_load(demands, even, num_hosts)
    for slack in SLACKS:
        leaning = share_out(demands, num_hosts, slack)
        if _greatest_load(demands, leaning, num_hosts) <= MAX_UNEVEN * least:
            return leaning
    return even


def _greatest_load(
    demands: Sequence[Demand], shares: Sequence[np.ndarray], num_hosts: int
) -> int:
    load = np.zeros(num_hosts, np.int64)
    for demand, share in zip(demands, shares, strict=True):
        load[demand.candidates] += share
    return int(load.max())
