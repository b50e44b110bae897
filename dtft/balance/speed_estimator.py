"""Estimates the seconds of a unit of load on each node, and detects drift of nodes.

Drift is a change of a node's seconds relative to the other nodes. The seconds of a unit
depend on the division (the units of each node), because a node has fixed work in each
step (an update, transfers). So drift is tested only between rounds with the same
division (a round is a series of measured steps). For a division that was measured, the
measured seconds are kept and used in place of the estimate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Unit times under one division. A unit is a microbatch, or one second of predicted work
# on a node of speed 1. Drift is relative between nodes: if all nodes become slower or
# faster together, as on a shared machine, all estimates are scaled and no node drifts.


Floats = NDArray[np.float64]

TRIM = 0.1
"""Fraction of a round's steps, the slowest, that a node's mean leaves out, to exclude
pauses of the machine. The mean leaves out as many of the fastest steps."""

SHARED_STEPS = 20
"""Weight of the mean noise of all nodes in the estimate of one node's noise. The weight
of the node's own noise is the node's number of steps. A few steps give a poor estimate
of a node's noise, and nodes have similar noise."""

LEAST_CHANGE = 0.02
"""Least relative change of a node's seconds per unit that counts as drift. A smaller
change does not count, even if it is significant."""

SLACK = 0.5
"""Standard errors by which a round's mean may differ from the estimate without adding
to `UnitTimes.rise` or `UnitTimes.fall`."""

FLOOR = 0.002
"""Least relative standard error that is assumed of a node's mean seconds in a round,
because clocks and caches limit precision."""


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """Mean seconds per unit of load on each node, in one division of the load.

    A unit is a microbatch, or a second of the cost model. All arrays are `[n]`. If all
    nodes became slower or faster together, the means of earlier rounds (series of
    measured steps) are multiplied by the common factor. `num_steps` is the number of
    measured steps of each node, and `mean_s` has the mean seconds per unit; both are 0
    for a node without measurements.
    """

    num_steps: NDArray[np.int64]
    mean_s: Floats
    variance: Floats
    """Variance between steps of the seconds per unit."""
    rise: Floats
    """Evidence that the node became slower than its estimate, relative to the other
    nodes: a cumulative sum (CUSUM) of deviations, in standard errors."""
    fall: Floats
    """Evidence that the node became faster than its estimate, a cumulative sum like
    `rise`."""

    @classmethod
    def unknown(cls, num_nodes: int) -> "UnitTimes":
        """Makes the value before any measurement: all arrays are zeros."""
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
        """Relative standard error of each node's `mean_s`, `[n]`; 0 if not measured.

        The relative variance between steps is a weighted mean of two: that of the node,
        with the number of its steps as weight, and the mean over all measured nodes,
        with weight 20 (`SHARED_STEPS`). Few steps of one node give a poor estimate.
        """
        known = self.num_steps > 0
        if not known.any():
            return np.zeros(known.size)
        steps = np.maximum(self.num_steps, 1)
        own = self.variance / np.where(known, self.mean_s, 1.0) ** 2
        shared = own[known].mean()
        noise = (steps * own + SHARED_STEPS * shared) / (steps + SHARED_STEPS)
        return np.where(known, np.sqrt(noise / steps), 0.0)

    def after(self, busy_s: ArrayLike, load: ArrayLike) -> "UnitTimes":
        """Returns the unit times with the measurements of one more round included.

        A round is a series of steps with one load. A node that drifted (its seconds
        changed relative to the other nodes) keeps only the measurements of this round.

        Args:
            busy_s: Seconds of local work of each node in each step, `[steps, n]`.
            load: Units of each node in a step, `[n]`; the same as in the earlier
                rounds. A node without load is not measured. Its mean, if it has one, is
                multiplied by the factor by which all other nodes became slower.

        Raises:
            ValueError: shapes do not fit, or a node with load has seconds that are not
                finite and above 0.
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
        """Returns the unit times with all seconds multiplied by `level`."""
        return replace(
            self, mean_s=level * self.mean_s, variance=level**2 * self.variance
        )

    def without(self, nodes: Sequence[int]) -> "UnitTimes":
        """Returns the unit times without the measurements of some nodes.

        `nodes` has the indices of these nodes.
        """
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
        """Tests each node for drift in one more round; returns the updated unit times.

        The deviation of a node is its mean in the round minus its earlier mean, divided
        by the standard error of this difference. Two sums of each node gather the
        deviations: `rise` grows by the deviation minus 0.5 (`SLACK`), and `fall` by the
        negative deviation minus 0.5. Neither sum falls below 0. A node has drifted if a
        sum exceeds 5 + log(n), and if the two means differ by more than 2%
        (`LEAST_CHANGE`). Then its `rise`, `fall` and `num_steps` become 0. The means
        themselves are not changed.

        Args:
            mean: mean seconds per unit in the round, `[n]`.
            variance: variance of these seconds between steps, `[n]`.
            steps: number of steps of the round.
            loaded: whether each node had load in the round, `[n]`; the others keep
                their values.
        """
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
    """Returns the factor by which all nodes became slower; below 1: faster.

    `ratio` is each node's seconds now, relative to its seconds before. If all ratios
    are above 1, the factor is the least of them; if all are below 1, the greatest.
    Otherwise it is 1, also if `ratio` is empty.

    >>> shared_level(np.array([1.5, 1.2])), shared_level(np.array([1.5, 0.9]))
    (1.2, 1.0)
    """
    if not ratio.size:
        return 1.0
    return max(1.0, float(ratio.min())) * min(1.0, float(ratio.max()))


def drifted(
    before: UnitTimes, after: UnitTimes, load: ArrayLike, steps: int
) -> tuple[int, ...]:
    """Returns the indices of the nodes that drifted in a round.

    `UnitTimes.after` drops the earlier measurements of a node that has drifted. So the
    node's `num_steps` in `after` is below that in `before` plus `steps`.

    Args:
        before: the unit times before the round.
        after: the unit times with the measurements of the round included.
        load: units of each node in the round, `[n]`.
        steps: number of steps of the round.
    """
    begun = (np.asarray(load) > 0) & (before.num_steps > 0)
    begun &= after.num_steps < before.num_steps + steps
    return tuple(np.flatnonzero(begun).tolist())


def _trimmed(unit_s: Floats) -> tuple[Floats, Floats]:
    """Returns the trimmed mean of `unit_s` over the steps, and a variance, `[n]` each.

    `unit_s` has the seconds per unit of each node in each step, `[steps, n]`. The mean
    leaves out the slowest tenth of the steps and the fastest tenth (`TRIM`), each
    rounded down. The variance, divided by the number of steps, is the variance of the
    trimmed mean; it is computed from winsorized values. It is 0 if there is only one
    step.
    """
    steps = unit_s.shape[0]
    cut = int(TRIM * steps)
    ordered = np.sort(unit_s, axis=0)
    mean = ordered[cut : steps - cut].mean(0)
    if steps == 1:
        return mean, np.zeros_like(mean)
    # Winsorized variance (Tukey and McLaughlin 1963). Divided by the number of steps it
    # is the variance of the trimmed mean.
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
"""Units of each node. Divisions of the work with the same load count as one."""

MOST = 6
"""Largest number of divisions of the work whose measurements are kept. The divisions
measured last are kept. Each checkpoint stores all kept measurements."""

OTHERWISE = 0.01
"""Relative standard error that is added, in quadrature, to a node's measurements under
other loads than the load that it was measured with last. Since these measurements the
node may have become slower or faster for other reasons than its load."""

LIKELY_FIXED = 0.15
"""Assumed size of a node's fixed seconds (the seconds of a step that do not depend on
load), as a fraction of the node's shortest measured seconds. Used until some node was
measured with different loads."""

MOST_FIXED = 0.5
"""Upper limit of a node's fixed seconds (which do not depend on load), as a fraction of
the node's shortest measured seconds."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds of nodes in a step, measured or estimated: `fixed_s + load * unit_s`.

    `load` has the units of work of each node; all three are `[n]`.
    """

    fixed_s: Floats
    unit_s: Floats
    error: float
    """Largest relative standard error of the seconds of a node; infinite before any
    measurement."""

    def needed(self, load: ArrayLike) -> Floats:
        """Returns the seconds of each node in a step, `[n]`.

        `load` has the units of work of each node, `[n]`.
        """
        return self.fixed_s + np.asarray(load, float) * self.unit_s

    def weights(self, load: Floats) -> Floats:
        """Returns the relative speed of each node under a load (units of each), `[n]`.

        The speed is the mean seconds per unit of all nodes, divided by the seconds per
        unit of the node. The seconds per unit include `fixed_s / load` of a node with
        load.
        """
        loaded = np.where(load > 0, load, np.inf)
        each = self.unit_s + self.fixed_s / loaded
        return each.mean() / each


@dataclass(frozen=True, kw_only=True)
class SpeedEstimator:
    """An estimator of each node's seconds in any division (the units of each node).

    It has the seconds per unit that were measured in the last 6 divisions (`MOST`).
    """

    num_nodes: int
    times: Mapping[Load, UnitTimes] = field(default_factory=dict)
    """Maps a load (the units of each node) to the seconds per unit measured under it.
    The load that was measured last is the last key."""
    level: float = 1.0
    """Factor by which all nodes were slower in the last round than estimated."""

    def measured(self, load: Floats) -> Speeds | None:
        """Returns the measured seconds of nodes under a load (the units of each node).

        A node without load gets estimated seconds. Returns None if the load is not
        among the last 6 measured loads (`times`), or if a node with load has drifted
        since the measurement.
        """
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
        """Returns the estimator with the measurements of one more round included.

        A round is a series of steps with one load. Nodes that drifted (their seconds
        changed relative to the other nodes) keep only the measurements of this round.
        Drift is tested against earlier rounds with the same load. If there are more
        than 6 loads (`MOST`), the load that was measured longest ago is dropped.

        Args:
            busy_s: Seconds of local work of each node in each step, `[steps, n]`.
            load: Units that each node worked on, `[n]`.

        Returns:
            The new estimator, and the indices of the nodes that drifted.

        Raises:
            ValueError: shapes do not fit, or a node with load has seconds that are not
                finite and above 0.
        """
        before = self.times.get(key_of(load), UnitTimes.unknown(self.num_nodes))
        here = before.after(busy_s, load)
        gone = drifted(before, here, load, len(np.asarray(busy_s)))
        level = self._level(here, load)
        kept = [it for it in self.times.items() if it[0] != key_of(load)][-(MOST - 1) :]
        others = {other: took.scaled(level).without(gone) for other, took in kept}
        times = {**others, key_of(load): here}
        return SpeedEstimator(num_nodes=self.num_nodes, times=times, level=level), gone

    def _level(self, here: UnitTimes, load: Floats) -> float:
        """Returns the factor by which all nodes are slower than estimated.

        Below 1: faster. `here` has the unit times measured under `load` (the units of
        each node). The estimate is that of `speeds` for this load. If all nodes are
        slower, the factor is that of the node that is the least slower; likewise if all
        are faster. Returns 1 if no node with load has an estimate, or if some nodes are
        slower and others are not.
        """
        known = (load > 0) & self.known
        expected = self.speeds().needed(load)
        return shared_level(here.mean_s[known] * load[known] / expected[known])

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether each node has measurements under any load in `times`, bool `[n]`."""
        steps = [took.num_steps > 0 for took in self.times.values()]
        return np.any(steps, axis=0) if steps else np.zeros(self.num_nodes, bool)

    def speeds(self) -> Speeds:
        """Estimates each node's fixed seconds and seconds per unit of load.

        The seconds of a node in a step are modelled as fixed seconds, plus load times
        seconds per unit. Both are fitted by least squares to all measured seconds of
        the node; those with a smaller error have a larger weight. A penalty keeps the
        fixed seconds small. It is weaker if the measurements of all nodes suggest
        larger fixed seconds (`_Rows._likely`). If a unit takes the same seconds under
        different loads, the fixed seconds are about 0. A node without measurements gets
        no fixed seconds, and the median seconds per unit of the measured nodes. Without
        any measurement, every unit counts as 1 second.
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
        """Returns the measured loads, busy seconds and errors, `[divisions, n]` each.

        There is a row for each load in `times`. The busy seconds are those of local
        work in a step; the error is their relative standard error. The error is the
        root of a sum of squares: of the error of the node's mean (`UnitTimes.error`),
        of 0.002 (`FLOOR`), and of 0.01 (`OTHERWISE`) unless this is the load with which
        the node was measured last. The error is infinite where a node had no load, or
        has no measurements since its last drift.
        """
        load = np.array([list(it) for it in self.times])
        took = list(self.times.values())
        measured = np.array([it.num_steps > 0 for it in took]) & (load > 0)
        newest = measured & (np.cumsum(measured[::-1], axis=0)[::-1] == 1)
        squared = np.array([it.error for it in took]) ** 2 + FLOOR**2
        error = np.sqrt(squared + np.where(newest, 0.0, OTHERWISE**2))
        busy = load * np.array([it.mean_s for it in took])
        return load, busy, np.where(measured, error, np.inf)


class _Rows:
    """A least-squares fit of each node's busy seconds to its load, from measurements.

    Fits the seconds per unit of load and the fixed seconds of a step. The attributes,
    `[n]` each, are the five sums over the measured divisions that a least-squares line
    needs (such as of load times busy seconds, each term weighted by its accuracy), the
    shortest busy seconds, and the load and busy seconds that were measured last.
    """

    def __init__(self, load: Floats, busy: Floats, error: Floats) -> None:
        """Adds up the measurements of each node, which must have at least one.

        Args:
            load: units of each node in each measured division, `[divisions, n]`.
            busy: measured seconds of local work per step, `[divisions, n]`.
            error: relative standard error of `busy`, `[divisions, n]`; infinite where a
                node was not measured.
        """
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
        """Returns each node's fixed seconds, seconds per unit, and error, `[n]` each.

        The error is the relative standard error of a node's seconds under the load with
        which the node was measured last.
        """
        ones = self.ones + 1 / np.maximum(self._likely(), 1e-9 * self.shortest) ** 2
        area = ones * self.squared - self.load**2
        fixed = (self.busy * self.squared - self.load * self.both) / area
        fixed = np.clip(fixed, 0.0, MOST_FIXED * self.shortest)
        x = self.newest
        variance = (self.squared - 2 * x * self.load + x**2 * ones) / area
        unit = (self.both - fixed * self.load) / self.squared
        return fixed, unit, np.sqrt(variance) / self.newest_s

    def _likely(self) -> Floats:
        """Estimates how large the fixed seconds of each node are likely to be, `[n]`.

        Fixed seconds are those of a step that do not depend on load. The result is one
        fraction, common to all nodes, times the shortest measured busy seconds of the
        node. For each node that was measured with different loads, a line fitted to
        this node alone gives its fixed seconds as a fraction of its shortest busy
        seconds. The common fraction is the root of the weighted mean of the squares of
        these fractions. The variance of each fit is first subtracted from its square; a
        fit with a smaller variance has a larger weight. The common fraction is at most
        0.5 (`MOST_FIXED`), and 0.15 (`LIKELY_FIXED`) if no node was measured with
        different loads.
        """
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
    """Converts a load (units of each node) from an array to a tuple, for dict keys."""
    return tuple(load.tolist())
