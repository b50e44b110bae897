"""Probability that the state survives the simultaneous loss of several hosts.

The state is divided over N hosts, with m copies of every slice. Hosts form groups of m,
and the hosts of a group have copies of each other's slices. If N is not a multiple of
m, the remaining hosts and the last whole group form a ring, on which each host's slice
is copied to the next m - 1 hosts (see `copy_placement`). The module computes the exact
probability and GEMINI's lower bound, and simulates losses on the placements of
`place_copies`.
"""

import math
from collections.abc import Sequence

import numpy as np

from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state import Layout, Leaf, MeshLayout

TRIALS = 20_000


def survival(num_hosts: int, copies: int, losses: int) -> float:
    """Computes the exact probability that k losses leave a copy of every slice.

    All sets of k hosts are equally likely. Hosts form groups of m that keep copies of
    each other's slices. If N is not a multiple of m, the remaining hosts and the last
    group form a ring, in which each host's slices are copied to the next m - 1 hosts.
    The state survives the loss of a set that contains no whole group and no m
    neighbours on the ring. The sets that the state survives are counted by
    inclusion-exclusion, separately for groups and ring, and summed over the number of
    losses on the ring.

    In the second example, 8 of the 120 pairs of hosts are a whole group.

    >>> survival(16, 2, 1), round(survival(16, 2, 2), 3)
    (1.0, 0.933)

    Args:
        num_hosts: N, the number of hosts, each with slices of its own.
        copies: m, the copies of every slice, the owner's included; N if m is larger.
        losses: k, the number of hosts lost at once.

    Raises:
        ValueError: N or m is below 1, or k is not between 0 and N.
    """
    _check(num_hosts, copies, losses)
    groups, ring, size = _shape(num_hosts, copies)
    survived = sum(
        _ring_sets(ring, size, lost) * _group_sets(groups, size, losses - lost)
        for lost in range(min(ring, losses) + 1)
    )
    return survived / math.comb(num_hosts, losses)


def gemini_bound(num_hosts: int, copies: int, losses: int) -> float:
    """Computes GEMINI's lower bound of `survival`: 1 - N C(N-m, k-m) / (m C(N, k)).

    N is the number of hosts, m the copies of every slice, k the hosts lost at once.
    Source: GEMINI (SOSP 2023), for N a multiple of m. A negative bound is replaced by
    0. The bound adds the probabilities of losing each of the N / m groups as if no two
    groups could be lost together. So the bound is exact for k < 2m, and too low for
    larger k. If N is not a multiple of m, the remaining hosts and the last group form a
    ring, and the probabilities of losing each run of m hosts on the ring are added,
    too. Runs overlap, so the bound is then exact for k <= m only.

    In the example, each of the 512 groups is lost with probability 5.3e-5.

    >>> round(gemini_bound(1024, 2, 8), 3)
    0.973

    Raises:
        ValueError: N or m is below 1, or k is not between 0 and N.
    """
    _check(num_hosts, copies, losses)
    groups, ring, size = _shape(num_hosts, copies)
    if losses < size:
        return 1.0
    hit = (groups + ring) * math.comb(num_hosts - size, losses - size)
    return max(0.0, 1 - hit / math.comb(num_hosts, losses))


def simulate(
    num_hosts: int,
    copies: int,
    losses: int,
    *,
    domains: Sequence[str] | None = None,
    trials: int = TRIALS,
    seed: int = 0,
) -> float:
    """Estimates `survival` by random losses on the placement of `place_copies`.

    Args:
        num_hosts: N, the number of hosts.
        copies: m, the copies of every slice.
        losses: k, the number of hosts lost at once.
        domains: the failure domain of each host, as for `place_copies`; affects only
            the placement, as hosts are lost independently of their domains.
        trials: number of random sets of lost hosts.
        seed: seed of the random sets.

    Returns:
        Fraction of the trials in which the state survives.

    Raises:
        ValueError: N or m is below 1, k is not between 0 and N, or `domains` does not
            have one entry per host.
    """
    _check(num_hosts, copies, losses)
    holders = _holders(num_hosts, copies, domains)
    random = np.random.default_rng(seed)
    survived = 0
    for _ in range(trials):
        lost = np.zeros(num_hosts, bool)
        lost[random.choice(num_hosts, losses, replace=False, shuffle=False)] = True
        survived += not lost[holders].all(axis=1).any()
    return survived / trials


def odds_table(
    num_hosts: int, copies: int, *, max_losses: int = 8, trials: int = TRIALS
) -> str:
    """Formats the table that `dtft checkpoint odds` prints.

    There is a line for each number of lost hosts. Each line has the results of
    `survival`, `simulate` and `gemini_bound`.

    Args:
        num_hosts: N, the number of hosts.
        copies: m, the copies of every slice.
        max_losses: the greatest number of lost hosts in the table; at most N is used.
        trials: number of random sets of lost hosts per line, for `simulate`. The table
            shows two standard errors of the simulated fraction.

    Raises:
        ValueError: N or m is below 1.
    """
    _check(num_hosts, copies, 0)
    kept = min(copies, num_hosts)
    fewer = f" ({copies} asked for, but a host keeps one)" if kept < copies else ""
    lines = [
        f"{num_hosts} hosts, {kept} copies of every slice{fewer}, in groups of {kept} "
        "(a ring for the remainder); state divided over all hosts",
        f"{'lost at once':>12}  {'survived':>9}  {'simulated':>17}  {'bound':>8}",
    ]
    for losses in range(1, min(max_losses, num_hosts) + 1):
        exact = survival(num_hosts, copies, losses)
        found = simulate(num_hosts, copies, losses, trials=trials, seed=losses)
        error = 2 * standard_error(exact, trials)
        bound = gemini_bound(num_hosts, copies, losses)
        lines.append(
            f"{losses:>12}  {exact:>9.5f}  {found:>8.5f} ±{error:.5f}  {bound:>8.5f}"
        )
    return "\n".join(lines)


def standard_error(probability: float, trials: int) -> float:
    """Computes the standard error of a fraction estimated from independent trials.

    `probability` is the true or estimated fraction.
    """
    return math.sqrt(probability * (1 - probability) / trials)


def _check(num_hosts: int, copies: int, losses: int) -> None:
    if num_hosts < 1 or copies < 1:
        raise ValueError(
            f"hosts={num_hosts} and copies={copies}: both must be at least 1."
        )
    if not 0 <= losses <= num_hosts:
        raise ValueError(
            f"losses={losses} of {num_hosts} hosts. Allowed: 0 to {num_hosts}."
        )


def _shape(num_hosts: int, copies: int) -> tuple[int, int, int]:
    """Divides hosts into groups and a ring, as `place_copies` does.

    Each host is a failure domain of its own.

    Returns:
        The number of groups, without the group that is part of the ring; the number of
        hosts on the ring; and the number of hosts per group. The ring has the last
        whole group and the hosts that fill no group. Without hosts that fill no group,
        the ring has 0 hosts.
    """
    size = min(copies, num_hosts)
    groups, rest = divmod(num_hosts, size)
    return (groups - 1, size + rest, size) if rest else (groups, 0, size)


def _group_sets(groups: int, size: int, lost: int) -> int:
    """Counts the sets of `lost` hosts that contain no whole group.

    The sets are chosen from the hosts of `groups` groups, each of `size` hosts.
    """
    return sum(
        (-1) ** whole
        * math.comb(groups, whole)
        * math.comb((groups - whole) * size, lost - whole * size)
        for whole in range(min(groups, lost // size) + 1)
    )


def _ring_sets(ring: int, size: int, lost: int) -> int:
    """Counts the sets of `lost` hosts without `size` consecutive hosts of a ring.

    `ring` is the number of hosts of the ring, 0 if there is none.
    """
    left = ring - lost
    if left <= 0:
        return int(ring == 0 and lost == 0)
    # After each remaining host comes a run of lost hosts, which may be empty and is
    # shorter than `size`. The number of ways to choose the lengths of the runs, times
    # the `ring` rotations, counts each set once per remaining host. So it is divided by
    # the number of remaining hosts.
    runs = sum(
        (-1) ** long
        * math.comb(left, long)
        * math.comb(lost - long * size + left - 1, left - 1)
        for long in range(min(left, lost // size) + 1)
    )
    return runs * ring // left


def _holders(num_hosts: int, copies: int, domains: Sequence[str] | None) -> np.ndarray:
    """Returns, for each host's slice, the numbers of the hosts with a copy.

    The placement is that of `place_copies` for a state divided over all hosts.

    Returns:
        [hosts, copies] int: one row for the slice of each host.
    """
    mesh = MeshLayout(
        axis_names=("fsdp",), axis_sizes=(num_hosts,), slots=tuple(range(num_hosts))
    )
    leaf = Leaf(path="state", shape=(num_hosts,), dtype="uint8", spec=(("fsdp",),))
    placement = place_copies(Layout(mesh=mesh, leaves=(leaf,)), copies, domains)
    return np.array(list(placement.holders.values()))
