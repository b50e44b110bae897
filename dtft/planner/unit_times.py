"""What one unit of load takes on each node with one division of it, and drift.

Pure. A unit is a microbatch, or a second that a placement predicts for a node of speed
1. Only what nodes take beside each other counts: where all become slower or faster
together, as on a machine that others use too, the estimates go along, and nobody has
drifted. It must not know how load is divided (`load_shares`, `placement`), what other
divisions took (`tried`) nor when one may change (`balance`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
