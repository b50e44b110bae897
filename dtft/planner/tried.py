"""What nodes took with each division that was tried, and what they would with others.

What a unit takes depends on the division: a node needs something for each step whatever
it holds (an update, sending), and what it sends depends on what its neighbours hold. So
whether a node drifted is asked of rounds with one division only; a division that was
tried is known for what it took; and for all others a node is taken to need `fixed_s`
and `unit_s` for each unit, as near to what was measured as can be. Pure; it must not
know when a division changes (`balance`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtft.planner.unit_times import FLOOR, UnitTimes, drifted, shared_level

Floats = NDArray[np.float64]
Load = tuple[float, ...]
"""Units of each node: divisions with the same load count as the same."""

MOST = 6
"""So many divisions are remembered, the newest: commits hold them."""

OTHERWISE = 0.01
"""What a node takes with another division than the newest may be off by this share for
reasons that are not its load."""

LIKELY_FIXED = 0.15
"""A node's fixed part is about this share of its step or less, before it is measured
with unlike loads."""

MOST_FIXED = 0.5
"""The fixed part is at most this share of the shortest time measured."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What nodes need for a step: `fixed_s + load * unit_s`, each `[n]`."""

    fixed_s: Floats
    unit_s: Floats
    error: float
    """Largest standard error of what a node was measured to take, as a share of it;
    infinite before anything was."""

    def needed(self, load: ArrayLike) -> Floats:
        """Seconds of each node with a load, `[n]`."""
        return self.fixed_s + np.asarray(load, float) * self.unit_s

    def weights(self, load: Floats) -> Floats:
        """How fast nodes are beside each other with about this load, `[n]`."""
        loaded = np.where(load > 0, load, np.inf)
        each = self.unit_s + self.fixed_s / loaded
        return each.mean() / each


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Unit times by division, the newest divisions that were tried."""

    num_nodes: int
    times: Mapping[Load, UnitTimes] = field(default_factory=dict)
    """The newest comes last."""
    level: float = 1.0
    """By how much everything took longer in the newest round than before."""

    def measured(self, load: Floats) -> Speeds | None:
        """What nodes took with this load; None if it was not tried, or if one of them
        is not known with it any more."""
        found = self.times.get(key_of(load))
        if found is None or (found.num_steps[load > 0] == 0).any():
            return None
        return Speeds(
            fixed_s=np.zeros(self.num_nodes),
            unit_s=np.where(load > 0, found.mean_s, self.speeds().unit_s),
            error=float(found.error.max()),
        )

    def after(self, busy_s: ArrayLike, load: Floats) -> tuple["Tried", tuple[int, ...]]:
        """With another round, and the nodes that drifted while the load was the same.

        What was known of these nodes is forgotten, for all divisions.

        Args:
            busy_s: Seconds of local work, `[steps, n]`.
            load: Units that each node worked on, `[n]`.

        Raises:
            ValueError: see `UnitTimes.after`.
        """
        before = self.times.get(key_of(load), UnitTimes.unknown(self.num_nodes))
        here = before.after(busy_s, load)
        gone = drifted(before, here, load)
        level = self._level(here, load)
        kept = [it for it in self.times.items() if it[0] != key_of(load)][-(MOST - 1) :]
        others = {other: took.scaled(level).without(gone) for other, took in kept}
        times = {**others, key_of(load): here}
        return Tried(num_nodes=self.num_nodes, times=times, level=level), gone

    def _level(self, here: UnitTimes, load: Floats) -> float:
        """By how much all nodes are slower than what other divisions let expect."""
        known = (load > 0) & self.known
        expected = self.speeds().needed(load)
        return shared_level(here.mean_s[known] * load[known] / expected[known])

    @property
    def known(self) -> NDArray[np.bool_]:
        """Nodes of which something was measured, `[n]`."""
        steps = [took.num_steps > 0 for took in self.times.values()]
        return np.any(steps, axis=0) if steps else np.zeros(self.num_nodes, bool)

    def speeds(self) -> Speeds:
        """What fits best; a node never measured is taken for a middling one.

        Per node the least squares of `(busy - fixed - load * unit) / error` over the
        divisions, with `fixed / likely` as one more term. What is likely is asked of
        all nodes: where units take the same in all divisions, nothing is fixed.
        """
        known = self.known
        if not known.any():
            ones = np.ones(self.num_nodes)
            return Speeds(fixed_s=0 * ones, unit_s=ones, error=np.inf)
        rows = _Rows(*(it[:, known] for it in self._rows()))
        fixed, unit, error = rows.fitted()
        fixed_s, unit_s = np.zeros(known.size), np.full(known.size, np.median(unit))
        fixed_s[known], unit_s[known] = fixed, unit
        return Speeds(fixed_s=fixed_s, unit_s=unit_s, error=float(error.max()))

    def _rows(self) -> tuple[Floats, Floats, Floats]:
        """Load, seconds and their relative error, `[divisions, n]`; the error is
        infinite where a node was not measured."""
        load = np.array([list(it) for it in self.times])
        took = list(self.times.values())
        measured = np.array([it.num_steps > 0 for it in took]) & (load > 0)
        newest = measured & (np.cumsum(measured[::-1], axis=0)[::-1] == 1)
        squared = np.array([it.error for it in took]) ** 2 + FLOOR**2
        error = np.sqrt(squared + np.where(newest, 0.0, OTHERWISE**2))
        busy = load * np.array([it.mean_s for it in took])
        return load, busy, np.where(measured, error, np.inf)


class _Rows:
    """Measured seconds as sums that least squares need; all `[n]`."""

    def __init__(self, load: Floats, busy: Floats, error: Floats) -> None:
        """Of `[divisions, n]`; each node was measured at least once."""
        seen = np.isfinite(error)
        off_s = np.where(seen, busy, 1.0) * np.where(seen, error, 1.0)
        sure = np.where(seen, 1 / off_s**2, 0.0)
        self.ones, self.load = sure.sum(0), (sure * load).sum(0)
        self.squared = (sure * load**2).sum(0)
        self.busy, self.both = (sure * busy).sum(0), (sure * load * busy).sum(0)
        self.shortest = np.where(seen, busy, np.inf).min(0)
        last = seen.shape[0] - 1 - np.argmax(seen[::-1], axis=0)
        nodes = np.arange(seen.shape[1])
        self.newest, self.newest_s = load[last, nodes], busy[last, nodes]

    def fitted(self) -> tuple[Floats, Floats, Floats]:
        """Fixed seconds, those of a unit, and the relative standard error of both
        together with the newest load."""
        ones = self.ones + 1 / np.maximum(self._likely(), 1e-9 * self.shortest) ** 2
        area = ones * self.squared - self.load**2
        fixed = (self.busy * self.squared - self.load * self.both) / area
        fixed = np.clip(fixed, 0.0, MOST_FIXED * self.shortest)
        x = self.newest
        variance = (self.squared - 2 * x * self.load + x**2 * ones) / area
        unit = (self.both - fixed * self.load) / self.squared
        return fixed, unit, np.sqrt(variance) / self.newest_s

    def _likely(self) -> Floats:
        """How large fixed seconds may be: by moments, as shares of the shortest time,
        of nodes that were measured with unlike loads."""
        area = self.ones * self.squared - self.load**2
        unlike = area > 1e-6 * self.ones * self.squared
        if not unlike.any():
            return LIKELY_FIXED * self.shortest
        area = np.where(unlike, area, 1.0)
        alone = (self.busy * self.squared - self.load * self.both) / area
        share = (alone / self.shortest)[unlike]
        noise = (self.squared / area / self.shortest**2)[unlike]
        found = np.sum((share**2 - noise) / noise**2) / np.sum(1 / noise**2)
        return np.sqrt(np.clip(found, 0.0, MOST_FIXED**2)) * self.shortest


def key_of(load: Floats) -> Load:
    """A division's load, to find it by."""
    return tuple(load.tolist())
