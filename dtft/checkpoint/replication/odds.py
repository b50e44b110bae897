"""How likely the state survives when several hosts are lost at once.

For state that is divided over N hosts with m copies of every slice, placed in groups of
m and a ring for the remainder (`copy_placement`). Counts exactly, gives GEMINI's bound
beside it, and simulates losses on real placements.
"""

import math
from collections.abc import Sequence

import numpy as np

from dtft.checkpoint.replication.copy_placement import place_copies
from dtft.checkpoint.state import Layout, Leaf, MeshLayout

TRIALS = 20_000


def survival(num_hosts: int, copies: int, losses: int) -> float:
    """Probability that k simultaneous losses leave a copy of every slice. Exact.

    All sets of k hosts are equally likely. A set is survived if it contains no whole
    group and no m neighbours on the ring; such sets are counted for the groups by
    inclusion and exclusion and for the ring by enumeration of its losses.

    >>> survival(16, 2, 1), round(survival(16, 2, 2), 3)
    (1.0, 0.933)

    Args:
        num_hosts: N, each with slices of its own.
        copies: m, the owner's included.
        losses: k.

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
    """GEMINI's lower bound of the same: 1 - N C(N-m, k-m) / (m C(N, k)).

    Source: GEMINI (SOSP 2023), for N a multiple of m. It adds the chances of the N / m
    groups as if they excluded each other, so it is exact for k < 2m and below the truth
    beyond. Where there is a remainder, the runs of m on the ring are added as well.

    >>> round(gemini_bound(1024, 2, 8), 3)
    0.973

    Raises:
        ValueError: as `survival`.
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
    """The same by trial: random losses on what `place_copies` really decides.

    Args:
        num_hosts: N.
        copies: m.
        losses: k.
        domains: per host what fails together, as for `place_copies`; hosts are lost
            alone.
        trials: sets of hosts that are tried.
        seed: of the random sets.

    Returns:
        Fraction survived.

    Raises:
        ValueError: as `survival`.
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
    """The text of `dtft checkpoint odds`: a line for each k = 1, 2, ...

    Args:
        num_hosts: N.
        copies: m.
        max_losses: the greatest k shown; not above N.
        trials: of the simulation; its error shown is two standard errors.

    Raises:
        ValueError: as `survival`.
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
    """Of the fraction found in as many independent trials."""
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
    """(groups, hosts on the ring, size of a group) as `place_copies` makes them."""
    size = min(copies, num_hosts)
    groups, rest = divmod(num_hosts, size)
    return (groups - 1, size + rest, size) if rest else (groups, 0, size)


def _group_sets(groups: int, size: int, lost: int) -> int:
    """Sets of `lost` hosts of the groups that contain no whole group."""
    return sum(
        (-1) ** whole
        * math.comb(groups, whole)
        * math.comb((groups - whole) * size, lost - whole * size)
        for whole in range(min(groups, lost // size) + 1)
    )


def _ring_sets(ring: int, size: int, lost: int) -> int:
    """Sets of `lost` hosts of a ring without `size` neighbours in a row.

    Those who are left cut the ring into as many runs of lost hosts, each shorter than
    `size`. Counted from a host that is left: compositions of `lost` into such runs,
    times the ring's turns, each counted once for every host that is left.
    """
    left = ring - lost
    if left <= 0:
        return int(ring == 0 and lost == 0)
    runs = sum(
        (-1) ** long
        * math.comb(left, long)
        * math.comb(lost - long * size + left - 1, left - 1)
        for long in range(min(left, lost // size) + 1)
    )
    return runs * ring // left


def _holders(num_hosts: int, copies: int, domains: Sequence[str] | None) -> np.ndarray:
    """[hosts, copies]: who holds each host's slice, on a mesh that divides it."""
    mesh = MeshLayout(
        axis_names=("fsdp",), axis_sizes=(num_hosts,), slots=tuple(range(num_hosts))
    )
    leaf = Leaf(path="state", shape=(num_hosts,), dtype="uint8", spec=(("fsdp",),))
    placement = place_copies(Layout(mesh=mesh, leaves=(leaf,)), copies, domains)
    return np.array(list(placement.holders.values()))
