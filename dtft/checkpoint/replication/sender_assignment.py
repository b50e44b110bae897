"""Chooses which hosts send the bytes of a restore, and which bytes each host sends.

`share_out` divides demands (bytes that any of several hosts can send) so that the loads
(bytes per sender) are even. `route` groups the bytes that hosts lack into demands, and
prefers senders in the same or near failure domains.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_SWEEPS = 12
SETTLED = 1e-3
"""`share_out` stops after a sweep that changed no load (bytes of one sender) by more
than this fraction of the greatest load."""
SMALL = 16
"""`_fill` uses plain Python for at most this many candidates: numpy is slower there."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Demand:
    """Bytes that any of several hosts (candidates) can send."""

    nbytes: int
    candidates: np.ndarray
    """[n] int64: distinct senders, at least one."""
    distance: np.ndarray | None = None
    """[n] float64: the fraction of the failure domain levels at which a candidate
    and the host that needs the bytes are in different domains, from 0 (near) to 1
    (far). None if distances do not matter."""


def share_out(
    demands: Sequence[Demand], num_senders: int, slack: float
) -> list[np.ndarray]:
    """Divides every demand over its candidates so that the loads are even.

    A load is the bytes of one sender. With `slack` 0 the sum of squared loads is
    minimized, a convex problem whose optimum also has the least maximum load. The
    solver sweeps over the demands. In each sweep it divides one demand after the other
    anew: bytes go to the candidates with the least load, until their loads are equal.
    It stops when no load changes by more than 0.1 % of the greatest load (`SETTLED`),
    or after 12 sweeps (`MAX_SWEEPS`).

    Args:
        demands: bytes to be sent, each with the hosts that can send them.
        num_senders: number of senders; senders are numbered from 0.
        slack: how far the load of a sender at distance 0 (near) may exceed that of a
            sender at distance 1 (far), as a fraction of the mean load. The distances
            are those in `Demand.distance`.

    Returns:
        For each demand, the bytes of each candidate, [n] int64; their sum is the
        demand.

    In the example, sender 0 alone can send the second demand of 30 bytes. So senders 1
    and 2 send the first demand, and every load is 30.

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
    # Demands with few candidates go first; the others adapt to their loads.
    order = sorted(range(len(demands)), key=lambda i: len(demands[i].candidates))
    for sweep in range(MAX_SWEEPS):
        before = load.copy()
        for index in order:
            demand = demands[index]
            level = load[demand.candidates] - shares[index]
            base = level
            if demand.distance is not None and penalty:
                # The first sweep uses near senders only; later sweeps even the loads.
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
    """Divides bytes over candidates, those with the lowest `base` first.

    For each candidate that gets bytes, the sum of `base` and its bytes is the same. A
    candidate whose `base` is above this sum gets none.

    Args:
        base: [n] bytes that each candidate sends already for other demands, plus a
            penalty in bytes that grows with the candidate's distance.
        amount: the bytes to divide.

    Returns:
        [n] float64: bytes of each candidate.
    """
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
    """Scales parts of a demand to the sum `nbytes`, and rounds them to whole bytes.

    The parts with the largest fractions are rounded up, the others down.

    >>> _whole_bytes(np.array([0.5, 2.25, 1.25]), 4).tolist()
    [1, 2, 1]
    """
    exact = share / float(share.sum()) * nbytes
    whole = np.floor(exact).astype(np.int64)
    left = nbytes - int(whole.sum())
    if 0 <= left <= len(whole):
        whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    else:  # above 2^53 bytes float64 is not exact
        whole[whole.argmax()] += left
    return whole


SLACKS = (0.15, 0.05)
"""Values of `share_out`'s `slack` that `_shares` tries in order, until the greatest
load is within the limit that `MAX_UNEVEN` sets."""
MAX_UNEVEN = 1.2
"""Greatest load (bytes of one sender) allowed if near senders are preferred, as a
multiple of the greatest load without preference."""
MAX_SOURCES = 16
"""Approximate limit of the number of hosts from which one host fetches in a restore.
More senders are no faster, and small shares from all hosts would need thousands of
connections."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Needs:
    """Byte ranges that hosts lack and must fetch.

    A cell is the overlap of an old and a new slice. A need is a pair of a host and a
    cell that it lacks; the arrays have one entry for each need. Hosts are numbered
    from 0.
    """

    target: np.ndarray
    """[needs] int64: the host that lacks the cell."""
    nbytes: np.ndarray
    """[needs] int64: bytes of the cell, above 0."""
    candidates: np.ndarray
    """[needs] int64: position in `senders` of the set of hosts that hold the cell."""
    senders: Sequence[np.ndarray]
    """Sets of hosts, each ascending and not empty."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Routes:
    """Byte ranges of needs (entries of `Needs`) and the host that sends each range.

    Each byte of every need is in exactly one range.
    """

    need: np.ndarray
    """[routes] int64: position of the need in `Needs`."""
    source: np.ndarray
    """[routes] int64: the host that sends."""
    start: np.ndarray
    """[routes] int64: offset of the first byte inside the need."""
    stop: np.ndarray
    """[routes] int64: one past the offset of the last byte inside the need."""


def route(needs: Needs, domains: np.ndarray) -> Routes:
    """Chooses the host that sends each byte of all needs, with vectorised operations.

    Needs form a group if they have the same candidates (hosts that can send), at the
    same distances (`Demand.distance`). `share_out` divides each group's bytes over the
    candidates; if these are so many that a host would fetch from more than about 16
    senders, only over the nearest. The group's needs are laid end to end, and each
    sender in turn takes the next bytes, as many as `share_out` gave it.

    Args:
        needs: the byte ranges that hosts lack; at least one.
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
    # Rounded up, except for floating-point errors of the sum.
    limits = np.ceil(np.bincount(group, weights=_streams(needs)) - 1e-6)
    if len(np.unique(np.concatenate(needs.senders))) <= MAX_SOURCES:
        limits[:] = MAX_SOURCES  # a target may use all senders
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
    """Groups needs that have the same candidates at the same distances.

    Candidates are the hosts that can send, and the target is the host that lacks the
    bytes. A distance is the fraction of the failure domain levels at which candidate
    and target have different domains.

    Args:
        needs: the byte ranges that hosts lack.
        domains: [hosts, levels] int64: the failure domain of every host, widest level
            first, numbered so that equal numbers mean the same domain.

    Returns:
        The group of each need, [needs] int64, and the first need of each group,
        [groups] int64.
    """
    key = needs.candidates.copy()
    members = np.concatenate(needs.senders)
    lengths = [len(found) for found in needs.senders]
    owner = np.repeat(np.arange(len(needs.senders)), lengths)
    for level in domains.T:
        span = int(level.max()) + 1
        near = needs.candidates * span + level[needs.target]
        # Domains without a sender are equivalent.
        some = np.isin(near, owner * span + level[members])
        domain = np.where(some, level[needs.target], -1)
        key = np.unique(key * (span + 1) + domain + 1, return_inverse=True)[1]
    used = np.zeros(int(key.max()) + 1, bool)
    used[key] = True
    group = (np.cumsum(used) - 1)[key]
    firsts = np.zeros(int(used.sum()), np.int64)
    # The rows are written in reverse, so the first row of each group remains.
    firsts[group[::-1]] = np.arange(len(group))[::-1]
    return group, firsts


def _streams(needs: Needs) -> np.ndarray:
    """Computes how many hosts may send the bytes of each need in `Needs`.

    A host may fetch from `MAX_SOURCES` (16) senders in all. This number is divided over
    the needs of the host, in proportion to their bytes.

    Returns:
        [needs] float64, with fractions; `route` adds those of a group and rounds up.
    """
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
        # The nearest candidates, and among equals those that follow the target.
        places = np.arange(len(candidates)) - np.searchsorted(candidates, target)
        turn = places % len(candidates)
        far = np.zeros(len(candidates)) if distance is None else distance
        kept = np.sort(np.lexsort((turn, far))[:limit])
        candidates = candidates[kept]
        distance = None if distance is None else distance[kept]
    return Demand(nbytes=nbytes, candidates=candidates, distance=distance)


def _shares(demands: Sequence[Demand], num_hosts: int) -> list[np.ndarray]:
    """Divides the demands over senders, with preference for near senders.

    Even shares are those of `share_out` without this preference (`slack` 0). Tries each
    `slack` in `SLACKS` (0.15, then 0.05), the strongest preference first. Returns the
    first shares whose greatest load (bytes of one sender) is at most `MAX_UNEVEN` (1.2)
    times that of even shares. If there are none, or if no demand has distances, returns
    even shares.

    Args:
        demands: bytes to be sent, each with the hosts that can send them.
        num_hosts: number of hosts; hosts are numbered from 0.

    Returns:
        For each demand, the bytes that each of its candidates sends, [n] int64.
    """
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
