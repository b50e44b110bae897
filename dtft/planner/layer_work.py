"""Unequal layers over the stages of a pipeline on unlike nodes: which stage has which.

The split of a row of layers that is exactly best for a 1F1B step: its seconds are
(m - 1) max t + sum t (`stages.pipeline_s`). Of all splits none of whose stages takes
longer than a limit the least sum is found by dynamic programming; the limit then goes
down to the next lower slowest stage, until no split keeps to it. Pure; must not know
programs or who measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtft.planner.arguments import check_whole, numbers
from dtft.planner.load_shares import check_division

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
_ARRAYS = ("layer_s", "state_bytes", "activation_bytes", "capacity_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """Layers of a step as something to divide (`balance.Work`); stage s is on node s.

    A division is the number of layers of each stage, `[stages]`.
    """

    layer_s: Floats
    """Seconds of each layer, forward and backward of one microbatch, by the cost model;
    `[layers, stages]`, infinite where a node has no kernel for it."""
    microbatches: int
    """Of one step."""
    low: int = 1
    """Fewest layers of a stage; 0: a node may be left idle."""
    state_bytes: Floats | None = None
    """Of each layer's parameters, gradients and optimizer, `[layers]`."""
    activation_bytes: Floats | None = None
    """What each layer keeps of one microbatch for its backward, `[layers]`."""
    capacity_bytes: Floats | None = None
    """Of each node, `[stages]`."""

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, _array(value))
        shape = np.shape(self.layer_s)
        if len(shape) != 2:
            raise ValueError(f"layer_s has shape {shape}. Allowed: [layers, stages].")
        layers, stages = shape
        self._check("layer_s", (layers, stages))
        self._check("state_bytes", (layers,))
        self._check("activation_bytes", (layers,))
        self._check("capacity_bytes", (stages,))
        check_whole("microbatches", self.microbatches, 1)
        check_whole("low", self.low, 0)
        if self.low * stages > layers:
            raise ValueError(
                f"low={self.low} with {layers} layers and {stages} stages. Allowed: "
                f"at most {layers // stages}, so that each stage has as many."
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuses a field that is no array of a shape, of numbers of 0 or more."""
        value = getattr(self, name)
        if value is None:
            return
        is_array = isinstance(value, np.ndarray) and value.shape == shape
        if not is_array or not (value >= 0).all():
            raise ValueError(
                f"{name}={np.asarray(value).tolist()!r:.80}. Allowed: an array "
                f"{list(shape)} of numbers of 0 or more."
            )

    @property
    def num_nodes(self) -> int:
        """Stages."""
        return self.layer_s.shape[1]

    def by_weight(self, weights: Floats) -> Counts:
        """The best split if each node is as fast as its weight says."""
        each = f"each of {self.num_nodes} stages"
        given = np.array(numbers("weights", weights, each))
        with np.errstate(divide="ignore", over="ignore"):
            return self.best(1 / given)

    def best(self, unit_s: Floats, fixed_s: Floats | None = None) -> Counts:
        """The split whose step is shortest if a nominal second takes `unit_s`.

        Args:
            unit_s: `[stages]`; infinite where one can have no layer.
            fixed_s: what a stage that has layers needs more for a step, `[stages]`.

        Raises:
            ValueError: `unit_s` is no number above 0 for each stage, or no split keeps
                to memory and kernels.
        """
        unit = np.asarray(unit_s, float)
        if unit.shape != (self.num_nodes,) or not (unit > 0).all():
            raise ValueError(
                f"unit_s={unit.tolist()!r:.80}. Allowed: a number above 0 for each of "
                f"{self.num_nodes} stages; infinite where one can have no layer."
            )
        costs = self._with(fixed_s, self._costs(unit))
        best, best_s, limit = None, np.inf, np.inf
        while (found := _least_sum(np.where(costs < limit, costs, np.inf))) is not None:
            stage_s = _of_stages(costs, found)
            limit = stage_s.max()
            step_s = self._step_s(stage_s)
            if step_s < best_s:
                best, best_s = found, step_s
        if best is None:
            raise ValueError(
                f"no split of {len(self.layer_s)} layers over {self.num_nodes} stages "
                f"with at least {self.low} each fits into capacity_bytes="
                f"{self.capacity_bytes} and has all kernels, with "
                f"unit_s={unit.tolist()}. Use more stages or memory, or low=0."
            )
        return best

    def load(self, division: Counts) -> Floats:
        """Nominal seconds of each stage in a step."""
        nominal = self._sums(np.ones(self.num_nodes))
        counts = check_division(division, self.num_nodes, len(self.layer_s))
        return self.microbatches * _of_stages(nominal, counts)

    def seconds(
        self, division: Counts, unit_s: Floats, fixed_s: Floats | None = None
    ) -> float:
        """Of a 1F1B step."""
        sums = self._with(fixed_s, self._sums(np.asarray(unit_s, float)))
        counts = check_division(division, self.num_nodes, len(self.layer_s))
        return self._step_s(_of_stages(sums, counts))

    def _step_s(self, stage_s: Floats) -> float:
        return float((self.microbatches - 1) * stage_s.max() + stage_s.sum())

    def _sums(self, unit_s: Floats) -> Floats:
        """Seconds of layers `[start, stop)` on each stage, `[stages, start, stop]`."""
        can = np.isfinite(self.layer_s) & np.isfinite(unit_s)
        upto = _upto(np.where(can, self.layer_s, 0.0) * np.where(can, unit_s, 1.0))
        lacking = _upto((~can).astype(float))
        sums = upto[None, :] - upto[:, None]
        sums = np.where(lacking[None, :] > lacking[:, None], np.inf, sums)
        return np.moveaxis(sums, 2, 0)

    def _with(self, fixed_s: Floats | None, sums: Floats) -> Floats:
        """With a microbatch's part of what each stage with layers needs for a step."""
        if fixed_s is None:
            return sums
        places = np.arange(len(self.layer_s) + 1)
        has = (places[None, :] > places[:, None])[None]
        each = np.asarray(fixed_s, float)[:, None, None] / self.microbatches
        return sums + np.where(has, each, 0.0)

    def _costs(self, unit_s: Floats) -> Floats:
        """The same, infinite for what a stage may not have."""
        costs = self._sums(unit_s)
        places = np.arange(len(self.layer_s) + 1)
        number = places[None, :] - places[:, None]
        costs = np.where(number >= self.low, costs, np.inf)
        if self.capacity_bytes is None:
            return costs
        stages = np.arange(self.num_nodes)
        in_flight = np.minimum(self.microbatches, self.num_nodes - stages)
        zeros = np.zeros(len(self.layer_s))
        state = zeros if self.state_bytes is None else self.state_bytes
        kept = zeros if self.activation_bytes is None else self.activation_bytes
        held = _upto(state[:, None] + kept[:, None] * in_flight)
        held = np.moveaxis(held[None, :] - held[:, None], 2, 0)
        fits = held <= np.asarray(self.capacity_bytes, float)[:, None, None]
        return np.where(fits, costs, np.inf)


def _array(rows: Sequence[Any]) -> Any:
    """Rows of numbers as an array; what is none stays, to be refused by name."""
    try:
        return np.array(rows, float)
    except (TypeError, ValueError):
        return rows


def _upto(rows: Floats) -> Floats:
    """Sums of the first 0, 1, ... rows."""
    return np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])


def _of_stages(sums: Floats, division: Counts) -> Floats:
    ends = np.cumsum(division)
    return sums[np.arange(len(ends)), ends - division, ends]


def _least_sum(costs: Floats) -> Counts | None:
    """Layers of each stage that take least in all; None where there is no way."""
    num_stages, num_places, _ = costs.shape
    least = np.full(num_places, np.inf)
    least[0] = 0.0
    begins = np.zeros((num_stages, num_places), np.int64)
    for stage in range(num_stages):
        ways = least[:, None] + costs[stage]
        begins[stage] = ways.argmin(axis=0)
        least = ways.min(axis=0)
    if np.isinf(least[-1]):
        return None
    counts, end = np.zeros(num_stages, np.int64), num_places - 1
    for stage in reversed(range(num_stages)):
        counts[stage] = end - begins[stage, end]
        end = int(begins[stage, end])
    return counts
