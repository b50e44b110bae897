"""How many microbatches each node takes, so that the last ends as early as can be.

Pure integer arithmetic over seconds per microbatch. It must not know how the seconds
were measured (`unit_times`), nor when shares may change (`balance`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtft.planner.arguments import check_whole, numbers

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


def allocate(
    unit_s: ArrayLike,
    total: int,
    *,
    fixed_s: ArrayLike | None = None,
    cap: ArrayLike | None = None,
    low: int = 1,
) -> Counts:
    """The shares that end first: they minimise `max(fixed_s + shares * unit_s)`.

    Exact: handing out one microbatch after the other, each to the node that would end
    first with it, is optimal for this objective; all but the last few are handed out at
    once. Equal finishing times go to the earlier node, so that equal input gives equal
    shares everywhere.

    Args:
        unit_s: Seconds per microbatch, `[n]`, each finite and above 0.
        total: Microbatches of a step, over all nodes.
        fixed_s: Seconds of each node whatever its share, `[n]`, 0 or more; None: 0.
        cap: Most that each node can take, `[n]` (its memory); None: `total`.
        low: Fewest that each node takes.

    Returns:
        `[n]` integers with sum `total`.

    Raises:
        ValueError: seconds that are none, or no shares keep to `low` and `cap`.

    >>> allocate([1.0, 2.0, 4.0], 7)
    array([4, 2, 1])
    >>> allocate([1.0, 1.0, 8.0], 4, low=0)
    array([2, 2, 0])
    >>> allocate([1.0, 1.0], 8, fixed_s=[2.0, 0.0])
    array([3, 5])
    """
    seconds = _checked_seconds(unit_s)
    fixed = _checked_fixed(fixed_s, seconds.size)
    check_whole("total", total, 0)
    most = np.full(seconds.size, total) if cap is None else np.asarray(cap, np.int64)
    _check_bounds(total, most, low, seconds.size)
    shares = _before_makespan(seconds, fixed, total, most, low)
    return _hand_out(shares, seconds, fixed, total, most)


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A step's microbatches as something to divide (`balance.Work`)."""

    num_nodes: int
    total: int
    cap: tuple[int, ...] | None = None
    low: int = 1

    def __post_init__(self) -> None:
        check_whole("num_nodes", self.num_nodes, 1)
        check_whole("total", self.total, 1)
        most = [self.total] * self.num_nodes if self.cap is None else self.cap
        _check_bounds(self.total, np.array(most), self.low, self.num_nodes)

    def by_weight(self, weights: Floats) -> Counts:
        """Shares in proportion to weights; a cap passes on what is above it."""
        if self.cap is None:
            return by_weight(weights, self.total, low=self.low)
        return allocate(1 / np.asarray(weights), self.total, cap=self.cap, low=self.low)

    def best(self, unit_s: Floats, fixed_s: Floats | None = None) -> Counts:
        """The shares that end first."""
        return allocate(unit_s, self.total, fixed_s=fixed_s, cap=self.cap, low=self.low)

    def load(self, division: Counts) -> Floats:
        """Microbatches of each node."""
        return check_division(division, self.num_nodes, self.total).astype(float)

    def seconds(
        self, division: Counts, unit_s: Floats, fixed_s: Floats | None = None
    ) -> float:
        """Until the last node is done."""
        shares = check_division(division, self.num_nodes, self.total)
        return makespan(shares, unit_s, fixed_s)


def check_division(division: ArrayLike, num_nodes: int, total: int) -> Counts:
    """A division as an array; refuses one that does not divide all there is.

    Raises:
        ValueError: names what it has to add up to.

    >>> check_division([2, 1], 2, 4)
    Traceback (most recent call last):
    ...
    ValueError: division=[2, 1]. Allowed: a number for each of 2 nodes, 4 in all.
    """
    shares = np.asarray(division)
    if shares.shape != (num_nodes,) or shares.sum() != total:
        raise ValueError(
            f"division={shares.tolist()!r:.80}. Allowed: a number for each of "
            f"{num_nodes} nodes, {total} in all."
        )
    return shares


def makespan(
    shares: ArrayLike, unit_s: ArrayLike, fixed_s: ArrayLike | None = None
) -> float:
    """Seconds until the last node has worked through its share."""
    fixed = np.zeros(()) if fixed_s is None else np.asarray(fixed_s, float)
    return float(np.max(fixed + np.asarray(shares) * np.asarray(unit_s, float)))


def waits(busy_s: ArrayLike) -> Floats:
    """Seconds that each node waits for the slowest; the last dim is nodes."""
    busy = np.asarray(busy_s, float)
    return busy.max(-1, keepdims=True) - busy


def even(total: int, num_nodes: int) -> Counts:
    """Equal shares; the first nodes take what is left over.

    >>> even(10, 4)
    array([3, 3, 2, 2])
    """
    check_whole("num_nodes", num_nodes, 1)
    return allocate(np.ones(num_nodes), total, low=0)


def by_weight(weights: ArrayLike, total: int, *, low: int = 1) -> Counts:
    """Shares in proportion to weights, rounded by largest remainder, none below `low`.

    >>> by_weight([2.0, 1.0, 1.0], 9)
    array([5, 2, 2])
    >>> by_weight([8.0, 8.0, 1.0], 4)
    array([2, 1, 1])
    """
    parts = np.array(numbers("weights", weights, "each node"))
    if not parts.any():
        raise ValueError(
            f"weights={parts.tolist()!r:.80}: none is above 0. Give a node one such as "
            "1."
        )
    check_whole("total", total, 0)
    _check_bounds(total, np.full(parts.size, total), low, parts.size)
    ideal = parts / parts.sum() * total
    shares = np.maximum(np.floor(ideal).astype(np.int64), low)
    while (missing := total - int(shares.sum())) > 0:
        shares[np.argsort(shares - ideal, kind="stable")[:missing]] += 1
    while (surplus := int(shares.sum()) - total) > 0:
        above = np.where(shares > low, ideal - shares, np.inf)
        order = np.argsort(above, kind="stable")
        shares[order[: min(surplus, int((shares > low).sum()))]] -= 1
    return shares


def _before_makespan(
    seconds: Floats, fixed: Floats, total: int, most: Counts, low: int
) -> Counts:
    """What all are done with shortly before the best makespan: at most `total`."""
    early, late = 0.0, float(fixed.max() + seconds.max() * total)
    for _ in range(60):
        middle = (early + late) / 2
        if _done_by(middle - fixed, seconds, most, low).sum() >= total:
            late = middle
        else:
            early = middle
    return _done_by(early - fixed, seconds, most, low)


def _done_by(left: Floats, seconds: Floats, most: Counts, low: int) -> Counts:
    return np.clip(np.floor(left / seconds), low, most).astype(np.int64)


def _hand_out(
    shares: Counts, seconds: Floats, fixed: Floats, total: int, most: Counts
) -> Counts:
    """The rest, one by one, to the node that would end first with one more."""
    while (missing := total - int(shares.sum())) > 0:
        finish = np.where(shares < most, fixed + (shares + 1) * seconds, np.inf)
        # No more than one each at a time: a node's second would come after its first.
        first = np.argsort(finish, kind="stable")[:missing]
        ends = fixed[first] + (shares[first] + 2) * seconds[first]
        kept = finish[first] <= ends.min()
        shares[first[kept]] += 1
    return shares


def _checked_seconds(unit_s: ArrayLike) -> Floats:
    seconds = np.asarray(unit_s, float)
    if seconds.ndim != 1 or not seconds.size:
        raise ValueError(
            f"unit_s has shape {seconds.shape}: one finite number per node is needed."
        )
    if not np.isfinite(seconds).all():
        node = int(np.argmin(np.isfinite(seconds)))
        raise ValueError(
            f"unit_s[{node}] is {seconds[node]}: one finite number per node is needed. "
            "Leave out nodes that were not measured."
        )
    if (seconds <= 0).any():
        node = int(np.argmin(seconds))
        raise ValueError(
            f"unit_s[{node}] is {seconds[node]}: seconds per microbatch are above 0. "
            "Measure this node again."
        )
    return seconds


def _checked_fixed(fixed_s: ArrayLike | None, num_nodes: int) -> Floats:
    if fixed_s is None:
        return np.zeros(num_nodes)
    fixed = np.asarray(fixed_s, float)
    if fixed.shape != (num_nodes,) or not (np.isfinite(fixed) & (fixed >= 0)).all():
        raise ValueError(
            f"fixed_s is {fixed.tolist()!r:.80}. Allowed: a finite number of 0 or more "
            f"for each of {num_nodes} nodes."
        )
    return fixed


def _check_bounds(total: int, most: Counts, low: int, num_nodes: int) -> None:
    check_whole("low", low, 0)
    if low * num_nodes > total:
        raise ValueError(
            f"total is {total}: {num_nodes} nodes with at least {low} each need "
            f"{low * num_nodes}. Use more microbatches, or low=0."
        )
    if most.shape != (num_nodes,):
        raise ValueError(
            f"cap is {_short(most)}. Allowed: a number for each of {num_nodes} nodes."
        )
    if (most < low).any():
        raise ValueError(
            f"cap is {_short(most)} and low is {low}: every node needs a cap of at "
            "least low."
        )
    if most.sum() < total:
        raise ValueError(
            f"total is {total}, but all nodes together can take {most.sum()} "
            f"(cap {_short(most)}). Use fewer microbatches or larger caps."
        )


def _short(values: Sequence[int] | Counts) -> str:
    shown = [str(value) for value in values[:8]]
    return "[" + ", ".join(shown) + (", ...]" if len(values) > 8 else "]")
