"""Divides microbatches between replicas, and layers between pipeline stages.

Both are divisible work (`balance.Work`). `operators` has the operators of a placement
as divisible work; it needs JAX, this module does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """Divides the microbatches of a step over nodes, for the shortest step.

    A node is a worker that takes microbatches, such as a replica. The shares minimise
    `max(fixed_s + shares * unit_s)`. The result is exact: for this objective, the best
    rule is to give each microbatch in turn to the node that would finish it first. A
    bisection assigns all but the last few microbatches at once. At equal finishing
    times the node with the lower index gets the microbatch, so equal input gives equal
    shares on every host.

    Args:
        unit_s: Seconds per microbatch, `[n]`, each finite and above 0.
        total: Microbatches of a step, over all nodes.
        fixed_s: Seconds of each node that do not depend on its share, `[n]`, 0 or more;
            None: 0.
        cap: Largest share of each node, `[n]`, limited by memory; None: `total`.
        low: Smallest share of each node.

    Returns:
        `[n]` integers with sum `total`.

    Raises:
        ValueError: an argument has a value that is not allowed, or no shares with sum
            `total` are within `low` and `cap`.

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
    """The microbatches of a step as work to divide between nodes (`balance.Work`).

    A node is a replica. A division is the number of microbatches of each node (the
    shares), `[n]`. `total` is the number of microbatches of a step. A node takes at
    least `low` microbatches, and at most its entry of `cap` (None: no limit).
    """

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
        """Returns shares in proportion to the nodes' relative speeds, the weights.

        Each share lies between the fields `low` (least microbatches of a node) and
        `cap` (most of each node). A node of weight 0 takes `low` microbatches. It takes
        more only if the caps of the other nodes are too small for all microbatches.
        """
        if self.cap is None:
            return by_weight(weights, self.total, low=self.low)
        parts = _checked_weights(weights)
        least = parts[parts > 0].min()
        unit_s = 1 / np.where(parts > 0, parts / least, 1 / (2 * self.total))
        return allocate(unit_s, self.total, cap=self.cap, low=self.low)

    def best(self, unit_s: Floats, fixed_s: Floats | None = None) -> Counts:
        """Returns the shares with the fewest seconds until the last node is done.

        A node takes `fixed_s + share * unit_s` seconds in a step, its share being a
        number of microbatches; `[n]` each. `fixed_s` of None means 0.
        """
        return allocate(unit_s, self.total, fixed_s=fixed_s, cap=self.cap, low=self.low)

    def load(self, division: Counts) -> Floats:
        """Returns the number of microbatches of each node, `[n]`, as floats."""
        return check_division(division, self.num_nodes, self.total).astype(float)

    def seconds(
        self, division: Counts, unit_s: Floats, fixed_s: Floats | None = None
    ) -> float:
        """Returns the seconds until the last node has done its microbatches.

        `division` has the microbatches of each node, `unit_s` the seconds that a node
        takes for one of them, and `fixed_s` its other seconds per step (by default 0).
        """
        shares = check_division(division, self.num_nodes, self.total)
        return makespan(shares, unit_s, fixed_s)


def check_division(division: ArrayLike, num_nodes: int, total: int) -> Counts:
    """Converts a division (units of each node) to an array; checks length and sum.

    Raises:
        ValueError: the length is not `num_nodes`, or the sum is not `total`.

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
    """Returns the seconds until the last node has done its share of a step.

    A node takes `fixed_s + share * unit_s` seconds, its share being a number of
    microbatches; `[n]` each. `fixed_s` of None means 0.
    """
    fixed = np.zeros(()) if fixed_s is None else np.asarray(fixed_s, float)
    return float(np.max(fixed + np.asarray(shares) * np.asarray(unit_s, float)))


def waits(busy_s: ArrayLike) -> Floats:
    """Returns the seconds that each node waits for the slowest node.

    `busy_s` has the seconds that each node works. The nodes are the last dim of
    `busy_s` and of the result.
    """
    busy = np.asarray(busy_s, float)
    return busy.max(-1, keepdims=True) - busy


def even(total: int, num_nodes: int) -> Counts:
    """Divides `total` into equal shares; the first nodes take the remainder.

    >>> even(10, 4)
    array([3, 3, 2, 2])
    """
    check_whole("num_nodes", num_nodes, 1)
    return allocate(np.ones(num_nodes), total, low=0)


def _checked_weights(weights: ArrayLike) -> Floats:
    """Converts the weights of nodes to an array.

    Raises:
        ValueError: a weight is no finite number of 0 or more, or none is above 0.
    """
    parts = np.array(numbers("weights", weights, "each node"))
    if not parts.any():
        raise ValueError(
            f"weights={parts.tolist()!r:.80}: none is above 0. Give a node one such as "
            "1."
        )
    return parts


def by_weight(weights: ArrayLike, total: int, *, low: int = 1) -> Counts:
    """Divides `total` microbatches over nodes in proportion to the nodes' weights.

    Shares are rounded by largest remainder. No share is below `low`, so nodes of larger
    weight may get less than their proportion.

    >>> by_weight([2.0, 1.0, 1.0], 9)
    array([5, 2, 2])
    >>> by_weight([8.0, 8.0, 1.0], 4)
    array([2, 1, 1])
    """
    parts = _checked_weights(weights)
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
    """Gives each node the microbatches that it finishes before the shortest step ends.

    The shortest step lasts the least time in which all nodes together can finish
    `total` microbatches; this time is found by bisection. A node gets at least `low`
    microbatches, even if it finishes them later, and at most its entry of `most`.
    `_hand_out` divides the few microbatches that are left over.

    Args:
        seconds: seconds per microbatch on each node, `[n]`.
        fixed: seconds of each node that do not depend on its share, `[n]`.
        total: microbatches of a step.
        most: largest share of each node, `[n]`.
        low: smallest share of each node.

    Returns:
        `[n]` shares between `low` and `most`, with a sum of at most `total`.
    """
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
    """Gives each remaining microbatch to the node that would finish it first.

    Args:
        shares: microbatches that each node has already, `[n]`; changed in place.
        seconds: seconds per microbatch on each node, `[n]`.
        fixed: seconds of each node that do not depend on its share, `[n]`.
        total: microbatches of a step.
        most: largest share of each node, `[n]`.

    Returns:
        `shares`, with the sum `total`.
    """
    while (missing := total - int(shares.sum())) > 0:
        finish = np.where(shares < most, fixed + (shares + 1) * seconds, np.inf)
        # Gives one to several nodes at once, as long as no node would end earlier with
        # two more.
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


# Splits layers over unequal stages, optimally for a 1F1B step of (m - 1) max t + sum t
# seconds (`cost.pipeline_s`) with m microbatches and stage seconds t. Dynamic
# programming finds the split with the least sum t whose stages are all below a limit.
# The limit is then lowered to the max t of this split, until no split is below it.


_ARRAYS = ("layer_s", "state_bytes", "activation_bytes", "capacity_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """The layers of a model as work to divide between pipeline stages (`balance.Work`).

    A node runs one stage: stage s is on node s. A division is the number of layers of
    each stage, `[stages]`. A unit of load is one second of the cost model.
    """

    layer_s: Floats
    """Seconds of each layer by the cost model, forward and backward of one microbatch,
    `[layers, stages]`; infinite where a node has no kernel for a layer."""
    microbatches: int
    """The number of microbatches of a step."""
    low: int = 1
    """Least number of layers of a stage; with 0 a node may be idle."""
    state_bytes: Floats | None = None
    """Bytes of each layer's parameters, gradients and optimizer state, `[layers]`."""
    activation_bytes: Floats | None = None
    """Bytes of one microbatch that each layer keeps for the backward, `[layers]`."""
    capacity_bytes: Floats | None = None
    """Bytes of memory of each node, `[stages]`; None: no limit."""

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
        """Raises a ValueError unless a field is None or a valid array.

        A valid array has the given shape, and only numbers of 0 or more. `name` is the
        field's name.
        """
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
        """The number of stages, each on one node."""
        return self.layer_s.shape[1]

    def by_weight(self, weights: Floats) -> Counts:
        """Finds the division with the shortest step, for given speeds of the nodes.

        `weights` has the relative speed of each stage's node, `[stages]`. A node of
        weight 0 gets no layer.

        Raises:
            ValueError: a weight is not a finite number of 0 or more, or `best` finds no
                division.
        """
        each = f"each of {self.num_nodes} stages"
        given = np.array(numbers("weights", weights, each))
        with np.errstate(divide="ignore", over="ignore"):
            return self.best(1 / given)

    def best(self, unit_s: Floats, fixed_s: Floats | None = None) -> Counts:
        """Finds the division (number of layers of each stage) with the shortest step.

        Args:
            unit_s: Seconds that each stage takes per second of the cost model,
                `[stages]`; infinite for a stage that must have no layer.
            fixed_s: Extra seconds in a step of each stage that has layers, `[stages]`;
                None: 0.

        Raises:
            ValueError: `unit_s` is not a number above 0 for each stage; or there is no
                division in which each stage has at least `low` layers (a field), and
                its node has the kernels and the memory for them.
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
        """Returns the seconds of each stage in a step by the cost model, `[stages]`."""
        nominal = self._sums(np.ones(self.num_nodes))
        counts = check_division(division, self.num_nodes, len(self.layer_s))
        return self.microbatches * _of_stages(nominal, counts)

    def seconds(
        self, division: Counts, unit_s: Floats, fixed_s: Floats | None = None
    ) -> float:
        """Returns the seconds of a step of a 1F1B pipeline.

        Args:
            division: the number of layers of each stage, `[stages]`.
            unit_s: real seconds for each second of the cost model, `[stages]`.
            fixed_s: extra seconds in a step of each stage that has layers, `[stages]`;
                None: 0.
        """
        sums = self._with(fixed_s, self._sums(np.asarray(unit_s, float)))
        counts = check_division(division, self.num_nodes, len(self.layer_s))
        return self._step_s(_of_stages(sums, counts))

    def _step_s(self, stage_s: Floats) -> float:
        return float((self.microbatches - 1) * stage_s.max() + stage_s.sum())

    def _sums(self, unit_s: Floats) -> Floats:
        """Sums the seconds of each range of layers on each stage.

        Returns an array `[stages, start, stop]`: the seconds of one microbatch in the
        layers from `start` to `stop` - 1. The seconds are infinite where a stage cannot
        run one of these layers. `unit_s` has the real seconds of each stage for each
        second of the cost model, `[stages]`.
        """
        can = np.isfinite(self.layer_s) & np.isfinite(unit_s)
        upto = _upto(np.where(can, self.layer_s, 0.0) * np.where(can, unit_s, 1.0))
        lacking = _upto((~can).astype(float))
        sums = upto[None, :] - upto[:, None]
        sums = np.where(lacking[None, :] > lacking[:, None], np.inf, sums)
        return np.moveaxis(sums, 2, 0)

    def _with(self, fixed_s: Floats | None, sums: Floats) -> Floats:
        """Adds the extra seconds of each stage to the seconds of each range of layers.

        A range is the layers from `start` to `stop` - 1. The extra seconds are not
        added to ranges without layers.

        Args:
            fixed_s: extra seconds of each stage in a whole step, `[stages]`, which are
                first divided by the number of microbatches; None: 0.
            sums: seconds of one microbatch in the layers from `start` to `stop` - 1 on
                each stage, `[stages, start, stop]`; the result of `_sums` or `_costs`.
        """
        if fixed_s is None:
            return sums
        places = np.arange(len(self.layer_s) + 1)
        has = (places[None, :] > places[:, None])[None]
        each = np.asarray(fixed_s, float)[:, None, None] / self.microbatches
        return sums + np.where(has, each, 0.0)

    def _costs(self, unit_s: Floats) -> Floats:
        """Computes the seconds of each range of layers that a stage may have.

        The result is `[stages, start, stop]`: seconds of one microbatch in the layers
        from `start` to `stop` - 1. The seconds are infinite if the range has fewer than
        `low` layers, exceeds the stage's memory, or has a layer that the stage cannot
        run. `unit_s` has the real seconds of each stage for each second of the cost
        model, `[stages]`.
        """
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
    """Converts rows of numbers to an array; returns anything else unchanged.

    For a value that is returned unchanged, `Layers._check` raises a ValueError with
    the name of the field.
    """
    try:
        return np.array(rows, float)
    except (TypeError, ValueError):
        return rows


def _upto(rows: Floats) -> Floats:
    """Returns cumulative sums over the rows, `[rows + 1, columns]`.

    Entry n is the sum of the first n rows, so entry 0 is 0.
    """
    return np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0)])


def _of_stages(sums: Floats, division: Counts) -> Floats:
    ends = np.cumsum(division)
    return sums[np.arange(len(ends)), ends - division, ends]


def _least_sum(costs: Floats) -> Counts | None:
    """Divides the layers between the stages, for the least sum of the stages' seconds.

    `costs`, `[stages, start, stop]`, has the seconds of the layers from `start` to
    `stop` - 1 on each stage, infinite where a stage must not have these layers. Returns
    the number of layers of each stage; None if every division has an infinite sum.
    """
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
