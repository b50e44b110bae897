"""What a unit of load takes on each node: by the divisions tried so far, by the last
rounds, and drift.

What a unit takes depends on the division: a node needs something for each step whatever
it holds (an update, sending). So drift is asked of rounds with one division only, and a
division that was tried is known for what it took.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Unit times under one division. A unit is a microbatch, or one second of predicted work
# on a node of speed 1. Drift is relative between nodes: where all become slower or
# faster together, as on a shared machine, the estimates follow and no node drifts.


Floats = NDArray[np.float64]

TRIM = 0.1
"""Share of a round's steps left out at either end: pauses of a machine are no speed."""

SHARED_STEPS = 20
"""The noise that all nodes show counts as this many steps of each: ten steps of its own
say little about a node's noise, and machines are alike in it."""

LEAST_CHANGE = 0.02
"""A node that changed by less has not drifted, however sure that is."""

SLACK = 0.5
"""Standard errors by which a round may differ without counting towards drift."""

FLOOR = 0.002
"""Least relative standard error of a round: clocks and caches are not finer."""


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """Means per node, for what the newest round was like; all arrays are `[n]`.

    `num_steps` is 0 for a node that was not measured yet.
    """

    num_steps: NDArray[np.int64]
    mean_s: Floats
    variance: Floats
    """Of one step."""
    rise: Floats
    """How surely the node became slower beside the others since its estimate, in
    standard errors."""
    fall: Floats
    """How surely it became faster."""

    @classmethod
    def unknown(cls, num_nodes: int) -> "UnitTimes":
        """Nothing was measured."""
        zeros = np.zeros(num_nodes)
        return cls(
            num_steps=np.zeros(num_nodes, np.int64),
            mean_s=zeros,
            variance=zeros,
            rise=zeros,
            fall=zeros,
        )

    @property
    def error(self) -> Floats:
        """Standard error of each estimate as a share of it, `[n]`; 0 if not known."""
        known = self.num_steps > 0
        if not known.any():
            return np.zeros(known.size)
        steps = np.maximum(self.num_steps, 1)
        own = self.variance / np.where(known, self.mean_s, 1.0) ** 2
        shared = own[known].mean()
        noise = (steps * own + SHARED_STEPS * shared) / (steps + SHARED_STEPS)
        return np.where(known, np.sqrt(noise / steps), 0.0)

    def after(self, busy_s: ArrayLike, load: ArrayLike) -> "UnitTimes":
        """With another round; a node that drifted is known by this round only.

        Args:
            busy_s: Seconds of local work, `[steps, n]`.
            load: Units that each node worked on in each of the steps, `[n]`; a node
                without load keeps its estimate.

        Raises:
            ValueError: shapes that do not fit, or a loaded node that took no time.
        """
        busy, units = _checked(busy_s, load, self.num_steps.size)
        loaded = units > 0
        unit_s = busy / np.where(loaded, units, 1.0)
        mean, variance = _trimmed(unit_s)
        steps = busy.shape[0]
        known = loaded & (self.num_steps > 0)
        now = self.scaled(shared_level(mean[known] / self.mean_s[known]))
        seen = now._compared(mean, variance, steps, loaded)
        return seen._pooled(mean, variance, steps, loaded)

    def scaled(self, level: float) -> "UnitTimes":
        """On a machine that takes so many times as long for everything."""
        return replace(
            self, mean_s=level * self.mean_s, variance=level**2 * self.variance
        )

    def without(self, nodes: Sequence[int]) -> "UnitTimes":
        """With nothing known of some nodes."""
        known = np.ones(self.num_steps.size, bool)
        known[list(nodes)] = False
        return UnitTimes(
            num_steps=np.where(known, self.num_steps, 0),
            mean_s=np.where(known, self.mean_s, 0.0),
            variance=np.where(known, self.variance, 0.0),
            rise=np.where(known, self.rise, 0.0),
            fall=np.where(known, self.fall, 0.0),
        )

    def _compared(
        self, mean: Floats, variance: Floats, steps: int, loaded: NDArray[np.bool_]
    ) -> "UnitTimes":
        """With what the round says about drift; nodes that drifted are forgotten."""
        known = loaded & (self.num_steps > 0)
        estimate = np.where(known, self.mean_s, 1.0)
        counted = np.maximum(self.num_steps, 1)
        error = np.sqrt(
            self.variance / counted + np.maximum(variance, self.variance) / steps
        )
        by = (mean - estimate) / np.maximum(error, FLOOR * estimate)
        rise = np.where(known, np.maximum(0.0, self.rise + by - SLACK), self.rise)
        fall = np.where(known, np.maximum(0.0, self.fall - by - SLACK), self.fall)
        # One false alarm in about e^5 rounds, whatever the number of nodes.
        sure = np.maximum(rise, fall) > 5.0 + np.log(mean.size)
        gone = known & sure & (np.abs(mean / estimate - 1) > LEAST_CHANGE)
        return replace(
            self,
            num_steps=np.where(gone, 0, self.num_steps),
            rise=np.where(gone, 0.0, rise),
            fall=np.where(gone, 0.0, fall),
        )

    def _pooled(
        self, mean: Floats, variance: Floats, steps: int, loaded: NDArray[np.bool_]
    ) -> "UnitTimes":
        total = self.num_steps + steps
        weight = np.where(loaded, steps / total, 0.0)
        return replace(
            self,
            num_steps=np.where(loaded, total, self.num_steps),
            mean_s=self.mean_s + weight * (mean - self.mean_s),
            variance=self.variance + weight * (variance - self.variance),
        )


def shared_level(ratio: Floats) -> float:
    """By how much every node is slower, or faster: 1 where some are either.

    >>> shared_level(np.array([1.5, 1.2])), shared_level(np.array([1.5, 0.9]))
    (1.2, 1.0)
    """
    if not ratio.size:
        return 1.0
    return max(1.0, float(ratio.min())) * min(1.0, float(ratio.max()))


def drifted(before: UnitTimes, after: UnitTimes, load: ArrayLike) -> tuple[int, ...]:
    """Nodes with load whose mean was begun anew between the two."""
    begun = (np.asarray(load) > 0) & (before.num_steps > 0)
    begun &= after.num_steps <= before.num_steps
    return tuple(np.flatnonzero(begun).tolist())


def _trimmed(unit_s: Floats) -> tuple[Floats, Floats]:
    """Mean without the extremes and the variance of one step that goes with it."""
    steps = unit_s.shape[0]
    cut = int(TRIM * steps)
    ordered = np.sort(unit_s, axis=0)
    mean = ordered[cut : steps - cut].mean(0)
    if steps == 1:
        return mean, np.zeros_like(mean)
    # Winsorized variance (Tukey and McLaughlin 1963), as one step's share of the mean.
    ordered[:cut] = ordered[cut]
    ordered[steps - cut :] = ordered[steps - cut - 1]
    return mean, ordered.var(0, ddof=1) / (1 - 2 * cut / steps) ** 2


def _checked(
    busy_s: ArrayLike, load: ArrayLike, num_nodes: int
) -> tuple[Floats, Floats]:
    busy, units = np.asarray(busy_s, float), np.asarray(load, float)
    if busy.ndim != 2 or busy.shape[1:] != (num_nodes,) or not busy.shape[0]:
        raise ValueError(
            f"busy_s has shape {busy.shape}; [steps, {num_nodes}] is needed, a row per "
            "measured step and a column per node."
        )
    if units.shape != (num_nodes,):
        raise ValueError(
            f"load has shape {units.shape}; one number for each of {num_nodes} nodes "
            "is needed."
        )
    idle = (units > 0) & ~(np.isfinite(busy) & (busy > 0)).all(0)
    if idle.any():
        node = int(np.argmax(idle))
        raise ValueError(
            f"busy_s has {busy[:, node].tolist()[:4]} for node {node} with load "
            f"{units[node]:g}: seconds above 0 are needed. Measure the round again."
        )
    return busy, units


# Estimates for other divisions. The seconds per unit depend on the division: a node has
# fixed work for each step (an update, transfers), and its transfers depend on its
# neighbours. So drift is tested on rounds of one division only. A measured division
# keeps its measured seconds. For the others each node has `fixed_s` plus `unit_s` per
# unit, fitted to all measurements.


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
class SpeedEstimator:
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

    def after(
        self, busy_s: ArrayLike, load: Floats
    ) -> tuple["SpeedEstimator", tuple[int, ...]]:
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
        return SpeedEstimator(num_nodes=self.num_nodes, times=times, level=level), gone

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
