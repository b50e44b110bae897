"""Prices every candidate of a space: seconds and bytes by term, such as compute.

For each mesh and number of microbatches, the dims that `tensor` divides are selected by
an exact solver, but as if each collective were sent separately, without overlap with
computation. The prices then include combined collectives and overlap.

To add a knob (a setting of plans), make `enumerate_space` enumerate its values. Then:

* For an axis of the mesh: add the dims that it divides to `PlanSearch._base`.
* For a knob that changes the work of operators: make it a part of the points of
  `Columns`.
* For a knob that changes only which arrays are kept, gathered or updated: read it from
  the space in `PlanSearch._terms` and `PlanSearch._memory`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dtft.planner.cluster import Pool
from dtft.planner.cost import added_s, launch_s
from dtft.planner.ir import OpGroup, has_ragged_matmul
from dtft.planner.memory import RESERVE, Timeline
from dtft.planner.search import price_table
from dtft.planner.search.memory_table import Peaks, Resting, offloaded
from dtft.planner.search.pipeline import Staged
from dtft.planner.search.price_table import (
    Columns,
    Prices,
    Rates,
    Sums,
    Total,
    works_of,
)
from dtft.planner.search.ranking import MEMORY, TERMS, Priced, joined
from dtft.planner.search.space import MemoryFloor, Space
from dtft.planner.search.step_cost import Scales, StepCost, stack
from dtft.planner.search.tensor_sharding import Chooser, busy_axes, candidates
from dtft.planner.software import XLA
from dtft.planner.spmd import (
    MICRO,
    Bundle,
    Moved,
    OperatorWork,
    ShardingAssignment,
    StateArray,
    loop_slices,
    times_gathered,
    zero_gathers,
    zero_leaves,
)
from dtft.planner.types import AXES
from dtft.planner.workload import Role, Workload

# Collectives of all shardings are priced in one call. Most shardings have few
# candidates, and combined collectives differ between shardings. Pricing each sharding
# separately would take as long as the rest of the search.


Part = tuple[ShardingAssignment, np.ndarray]
"""A division (which mesh axes divide which dims), and the indices of its candidates."""


def sending_s(
    resting: Resting, parts: Sequence[Part], sums: Sequence[Sums], zero: np.ndarray
) -> list[np.ndarray]:
    """Computes the seconds per step of collectives, before overlap with computation.

    Counts the collectives of operators and the all-gathers of parameters, but not the
    sends between pipeline stages. One overlap is already subtracted: all-gathers that
    wait for no computation and are sent one by one count without the share of their
    time that computation hides on measured links. The caller computes all other
    overlap, with `cost.added_s`.

    Args:
        resting: computes the gathers of parameters that ZeRO divides.
        parts: divisions (which axes divide which dims), each with the indices of its
            candidates.
        sums: totals of the operators under each of these divisions.
        zero: ZeRO level of each candidate of the space.

    Returns:
        For each entry of `parts` the seconds of its candidates; float [candidates of
        the entry].
    """
    columns, rates = resting.prices.columns, resting.prices.rates
    found = [np.zeros(len(rows)) for _, rows in parts]
    asked: list[tuple[Mapping[Bundle, Total], np.ndarray]] = []
    places: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for (division, rows), total, seconds in zip(parts, sums, found, strict=True):
        levels = zero[rows]
        some = [(np.arange(len(rows)), total.sending, total.together)]
        for level in np.unique(levels).tolist():
            gathers = resting.gathers(division, level)
            some.append((np.flatnonzero(levels == level), *gathers))
        for at, alone, together in some:
            points = columns.of[rows[at]]
            asked.append((together, points))
            places.append((seconds, at, alone.at(points)))
    for (seconds, at, alone), more in zip(places, rates.together_s(asked), strict=True):
        seconds[at] += alone + more
    return found


def memory_floor(question: Workload, pool: Pool) -> MemoryFloor:
    """Makes the lower bound of the bytes that a workload's state takes on each device.

    The bound counts no gradients. The capacity in the result is that of a device,
    without the 8 % that plans must leave free (`RESERVE`), and without the bytes of
    arrays that the program closes over.
    """
    graph = question.graph

    def total(role: Role) -> int:
        paths = question.paths(role)
        return sum(graph.values[graph.inputs[path]].num_bytes for path in paths)

    return MemoryFloor(
        parameters=total("parameter"),
        gradients=0,  # the number alive at a time depends on the program
        optimizer=total("optimizer"),
        capacity=int(pool.device.memory_bytes * (1 - RESERVE))
        - question.constant_bytes,
    )


class PlanSearch:
    """Predicts the time and memory of candidates, for one workload on one pool.

    The pool has equal devices. A candidate is a mesh with a value for every knob.
    """

    def __init__(self, question: Workload, pool: Pool, *, scatters: bool) -> None:
        """Prepares the model of the workload's memory; `price` does the pricing.

        Args:
            question: the workload.
            pool: a pool of equal devices.
            scatters: whether the backend has reduce-scatter; if not, it all-reduces,
                and each device keeps its part of the sum.
        """
        self.question, self.pool, self.scatters = question, pool, scatters
        timeline = Timeline(
            graph=question.graph,
            gathers=question.entry == "loss",
            alias=question.alias,
            flat_state=question.software.flat_state,
            has_ragged_matmul=has_ragged_matmul(pool.device.platform),
        )
        self._peaks = Peaks(timeline)

    def price(self, space: Space, rates: Rates | None = None) -> Priced:
        """Computes time and memory of every candidate.

        First selects the dims that `tensor` divides so that a step is fastest. Some
        devices of a candidate may then repeat the work of others. Such a candidate is
        also priced with dims that make `tensor` divide matmuls, convolutions or
        kernels, and the better of both is kept.

        Args:
            space: the candidates.
            rates: a cache of prices for these candidates, or for the same candidates
                with another remat policy. By default an empty cache.
        """
        prices = Prices(self.question, rates or Rates(Columns(self.pool, space)))
        resting, chooser = Resting(prices), self._chooser(prices, space)
        of = prices.columns.of
        first = self._priced_as(resting, space, self._layouts(of, *chooser.choose()))
        rows = np.flatnonzero(first.idle & (space.columns["tensor"] > 1))
        if not len(rows):
            return first
        # The least seconds may be those of an axis that divides nothing.
        points = np.unique(of[rows])
        divisions, which = chooser.choose_busy(points)
        at = np.full(len(prices.columns), -1)
        at[points] = which
        layouts = self._layouts(of, divisions, at)
        second = self._priced_as(resting, space, layouts)
        return first.preferring(second, np.flatnonzero(at[of] >= 0))

    def _priced_as(
        self, resting: Resting, space: Space, layouts: Sequence[Part]
    ) -> Priced:
        """Computes time and memory of candidates under given divisions.

        Args:
            resting: bytes of the workload's arrays, for the meshes of the space.
            space: the candidates.
            layouts: divisions (which axes divide which dims), each with the indices of
                its candidates. A candidate of no division gets zero seconds, and only
                the bytes of the reserve.
        """
        prices = resting.prices
        terms = {name: np.zeros(len(space)) for name in TERMS}
        memory = {name: np.zeros(len(space)) for name in MEMORY}
        memory["reserve"][:] = RESERVE * self.pool.device.memory_bytes
        divisions: list[ShardingAssignment] = []
        which = np.zeros(len(space), np.int64)
        idle = np.zeros(len(space), bool)
        staged = self._staged(resting, space)
        for layout, rows in layouts:
            busy = busy_axes(prices.priced_ops(layout))
            for axis in set(AXES) - busy - {"stage"}:
                idle[rows] |= space.columns[axis][rows] > 1
            needs = self._memory(resting, layout, space, rows)
            if (space.columns["stage"][rows] > 1).any():
                assert staged is not None
                needs = staged.memory(space, rows, needs)
            _put(memory, rows, needs)
            parts = _with_sums(resting, layout, space, rows)
            if staged is None:
                terms_of = self._terms(resting, parts, space)
            else:
                terms_of = self._staged_terms(staged, parts, space)
            for (division, part), took in zip(parts, terms_of, strict=True):
                _put(terms, part, took)
                which[part] = len(divisions)
                divisions.append(division)
        priced = Priced(
            space=space,
            terms=terms,
            memory=memory,
            divisions=divisions,
            division=which,
            idle=idle,
            host=np.zeros(len(space)),
            host_capacity=self.pool.host_memory_bytes,
            capacity=self.pool.device.memory_bytes,
        )
        if (space.columns["offload"] > 0).any() and self.pool.host_link is not None:
            on_stages = staged and staged.memory
            return offloaded(priced, resting, self.pool.host_link, on_stages)
        return priced

    def with_offload(self, priced: Priced, best_s: float) -> Priced:
        """Adds copies of candidates, with the optimizer state moved to host memory.

        A candidate is copied if all of this is true:

        * It does not fit. (Offload slows a candidate down, so a copy of a candidate
          that fits is never the best.)
        * It fits without its optimizer state.
        * Its step takes less than `best_s` before offload.
        * None of its devices repeats the work of others (`Priced.idle`).

        Returns `priced` itself if no candidate is copied, or if the pool has no link to
        the host.

        Args:
            priced: candidates priced by this search.
            best_s: seconds by which the best candidate that fits is ranked
                (`Priced.worth_s`); infinity if none fits.
        """
        lean = priced.memory_bytes - priced.memory["optimizer"] <= priced.capacity
        worth = lean & ~priced.fits & ~priced.idle & (priced.step_s < best_s)
        link = self.pool.host_link
        if link is None or not worth.any():
            return priced
        some = priced.where(np.flatnonzero(worth))
        prices = Prices(self.question, Rates(Columns(self.pool, some.space)))
        resting = Resting(prices)
        staged = self._staged(resting, some.space)
        on_stages = staged and staged.memory
        return joined(priced, offloaded(some, resting, link, on_stages))

    def works(
        self, division: ShardingAssignment
    ) -> tuple[tuple[OpGroup, OperatorWork], ...]:
        """Returns the groups of operators of a step, each with the work of one device.

        The work is that in one execution of the operator that represents the group.

        Args:
            division: which mesh axes divide which dims.
        """
        known = works_of(self.question)
        return tuple(
            (group, known.at(known.key(number, division)))
            for number, group in enumerate(self.question.groups)
        )

    def moved(
        self, division: ShardingAssignment, mesh: Mapping[str, int], zero: int
    ) -> list[Moved]:
        """Returns the all-gathers of a step that gather the parameters ZeRO divides.

        Args:
            division: which axes divide which dims while computing.
            mesh: sizes of the axes.
            zero: ZeRO level.
        """
        question = self.question
        parameters = self.leaves("parameter", division, mesh, zero > 0)
        times = {
            leaf.path: times_gathered(
                question.passes[leaf.path],
                question.changes(leaf.path),
                zero,
                loop_slices(leaf.value, question.loop_dims),
            )
            for leaf in parameters
        }
        return zero_gathers(parameters, times)

    def leaves(
        self,
        role: Role,
        division: ShardingAssignment,
        mesh: Mapping[str, int],
        divides: bool,
    ) -> tuple[StateArray, ...]:
        """Returns the arrays of a role, with their specs in use and between uses.

        Args:
            role: which arrays: parameters, optimizer state or batch.
            division: which axes divide which dims while computing.
            mesh: sizes of the axes.
            divides: whether `fsdp` divides the arrays between uses.
        """
        graph, loops = self.question.graph, self.question.loop_dims
        values = {
            path: graph.values[graph.inputs[path]] for path in self.question.paths(role)
        }
        flat = self.question.software.flat_state
        return zero_leaves(values, division, mesh, divides, loops, flat=flat)

    def _base(self, space: Space) -> ShardingAssignment:
        """Returns which dims the axes of data, sequence and experts divide.

        The dims of the axis `tensor` are selected later, separately for each mesh. The
        axis `stage` divides no dims.
        """
        question = self.question
        first = question.weights
        by_expert = bool((space.columns["expert"] > 1).any())
        of_batch = ("replica", "fsdp", *(("expert",) if by_expert else ()), MICRO)
        axes: dict[int, tuple[str, ...]] = dict.fromkeys(question.batch_dims, of_batch)
        if (space.columns["sequence"] > 1).any():
            axes |= dict.fromkeys(question.sequence_dims, ("sequence",))
        if by_expert:
            experts = question.expert_arrays
            first = {**first, **experts}
            axes |= dict.fromkeys(experts.values(), ("expert",))
        return ShardingAssignment(
            axes=axes, scatters=self.scatters, alias=question.alias, first=first
        )

    def _chooser(self, prices: Prices, space: Space) -> Chooser:
        return Chooser(prices, self._base(space), "tensor", candidates(self.question))

    def _layouts(
        self, of: np.ndarray, found: Sequence[ShardingAssignment], which: np.ndarray
    ) -> list[Part]:
        """Pairs each division with the indices of the candidates that use it.

        If the software lets `tensor` divide positions (of tokens), `tensor` divides
        them in the result, too. Candidates whose point has no division are left out.

        Args:
            of: the point (mesh and number of microbatches) of each candidate.
            found: divisions: which axes divide which dims.
            which: the index of the division of each point; -1 for none.
        """
        if self.question.software.splits_positions:
            found = [self._with_positions(one) for one in found]
        at = which[of]
        return [(one, np.flatnonzero(at == n)) for n, one in enumerate(found)]

    def _with_positions(self, division: ShardingAssignment) -> ShardingAssignment:
        """Adds to a division that `tensor` divides positions (of tokens).

        It divides them only in arrays of which it divides no other dim. This is
        sequence parallelism (`Software.splits_positions`).
        """
        question = self.question
        positions = set(question.sequence_dims)
        inner = {dim for dim, axes in division.axes.items() if "tensor" in axes}
        first = dict(division.first)
        for value in question.graph.values:
            roots = frozenset(map(question.root, value.dims))
            if roots & positions and roots & inner:
                first[roots] = min(roots & inner)
        axes = dict(division.axes)
        for dim in positions:
            others = (axis for axis in axes.get(dim, ()) if axis != "tensor")
            axes[dim] = (*others, "tensor")
        return replace(division, axes=axes, first=first)

    def _staged(self, resting: Resting, space: Space) -> Staged | None:
        """Makes the object that prices pipeline stages; None if it is not needed.

        It is needed if a candidate has several stages or the software is not XLA.

        Args:
            resting: computes the seconds of operators, and the bytes and gathers of the
                arrays that ZeRO divides.
            space: the candidates.
        """
        if (space.columns["stage"] > 1).any() or self.question.software != XLA:
            return Staged(resting)
        return None

    def _priced(self, space: Space) -> tuple[Prices, Resting, Staged]:
        """Makes the objects that price operators, state and stages of a space."""
        prices = Prices(self.question, Rates(Columns(self.pool, space)))
        resting = Resting(prices)
        return prices, resting, Staged(resting)

    def step_cost(self, space: Space) -> StepCost:
        """Computes the base seconds of every candidate.

        Base seconds are those by the catalog's figures of devices and links. To predict
        a step, `StepCost.terms` multiplies them by scalars (`Scales`), which are fitted
        to measured steps.

        Args:
            space: the candidates.
        """
        prices, resting, staged = self._priced(space)
        costs, order = [], []
        chosen = self._chooser(prices, space).choose()
        for layout, rows in self._layouts(prices.columns.of, *chosen):
            for division, part in _with_sums(resting, layout, space, rows):
                costs.append(staged.cost(division, space, part))
                order.append(part)
        at = np.argsort(np.concatenate(order), kind="stable")
        return stack(costs).take(at)

    def memory_of(self, space: Space) -> dict[str, np.ndarray]:
        """Computes the bytes on a device of every candidate, by term.

        The terms are parameters, gradients, optimizer, activations, batch and
        constants. The memory that plans leave free is no term here. Offload is ignored:
        the optimizer state counts as if it were on the device.

        Args:
            space: the candidates.
        """
        prices, resting, staged = self._priced(space)
        memory = {name: np.zeros(len(space)) for name in MEMORY if name != "reserve"}
        chosen = self._chooser(prices, space).choose()
        for layout, rows in self._layouts(prices.columns.of, *chosen):
            needs = self._memory(resting, layout, space, rows)
            if (space.columns["stage"][rows] > 1).any():
                needs = staged.memory(space, rows, needs)
            _put(memory, rows, needs)
        return memory

    def _staged_terms(
        self, staged: Staged, parts: Sequence[Part], space: Space
    ) -> Iterator[dict[str, np.ndarray]]:
        """Computes the seconds of each term, for candidates with pipeline stages.

        Also for candidates of one stage whose program other software than XLA runs,
        such as Megatron (`Software`).

        Yields a map for each pair in `parts`, from a term to seconds per step; float
        [candidates of the pair]. The terms are compute, collectives, launch, optimizer
        and bubble (waiting for other stages).

        Args:
            staged: computes the seconds of pipeline stages.
            parts: pairs of a division (which axes divide which dims) and the indices
                of its candidates.
            space: the candidates.
        """
        for division, rows in parts:
            found = staged.cost(division, space, rows).terms(Scales().vector())
            terms = {
                "compute": found["matmul"] + found["elementwise"],
                "collectives": found["tensor"] + found["data"] + found["pipeline"],
                **{name: found[name] for name in ("launch", "optimizer", "bubble")},
            }
            scale = self.pool.trust.scale
            yield {name: seconds * scale(name) for name, seconds in terms.items()}

    def _terms(
        self, resting: Resting, parts: Sequence[Part], space: Space
    ) -> Iterator[dict[str, np.ndarray]]:
        """Computes the seconds of each term of a prediction, division by division.

        Yields a map for each pair in `parts`, from a term (compute, collectives,
        optimizer, launch) to seconds per step; float [candidates of the pair].

        Args:
            resting: computes the seconds of operators, and of the gathers of parameters
                that ZeRO divides.
            parts: pairs of a division (which axes divide which dims) and the indices
                of its candidates.
            space: the candidates.
        """
        ways = resting.prices.priced_ops
        sums = [price_table.sum_prices(ways(division)) for division, _ in parts]
        sent = sending_s(resting, parts, sums, space.columns["zero"])
        device, scale = self.pool.device, self.pool.trust.scale
        for (division, rows), total, sending in zip(parts, sums, sent, strict=True):
            points = resting.prices.columns.of[rows]
            compute = total.compute.at(points)
            zero, fsdp = space.columns["zero"][rows], space.columns["fsdp"][rows]
            (together,) = resting.prices.rates.together_s(
                [(total.waited_together, points)]
            )
            waited = total.waited.at(points) + together
            behind = np.maximum(sending - waited, 0.0)
            added = added_s(
                device.efficiency, behind, compute, self.question.read_order
            )
            terms = {
                "compute": compute + resting.copying_s(division, points, zero),
                "collectives": waited + added,
                "optimizer": total.optimizer.at(points) / np.where(zero > 0, fsdp, 1),
                "launch": np.asarray(launch_s(device, total.starts.at(points))),
            }
            yield {name: seconds * scale(name) for name, seconds in terms.items()}

    def _memory(
        self,
        resting: Resting,
        division: ShardingAssignment,
        space: Space,
        rows: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Computes bytes on a device by term, for candidates that share one division.

        The terms are parameters, optimizer, batch, constants (arrays that the program
        closes over), activations and gradients.

        Args:
            resting: bytes of the workload's arrays, for the meshes of the candidates.
            division: which axes divide which dims while computing.
            space: the candidates.
            rows: indices of the candidates that share the division.
        """
        columns = resting.prices.columns
        points, zero = columns.of[rows], space.columns["zero"][rows]
        found: dict[str, np.ndarray] = {}
        roles: tuple[tuple[str, Role, int], ...] = (
            ("parameters", "parameter", 3),
            ("optimizer", "optimizer", 1),
        )
        for name, role, least in roles:
            whole = resting.num_bytes(role, division, False).at(points)
            divided = resting.num_bytes(role, division, True).at(points)
            found[name] = np.where(zero >= least, divided, whole)
        found["batch"] = resting.num_bytes("batch", division, False).at(points)
        found["constants"] = np.full(len(rows), float(self.question.constant_bytes))
        return found | self._peaks.of(division, columns, points, zero)


def _with_sums(
    resting: Resting, layout: ShardingAssignment, space: Space, rows: np.ndarray
) -> list[tuple[ShardingAssignment, np.ndarray]]:
    """Splits candidates that share a division by how their gradients are divided.

    From ZeRO level 2, gradients are divided as level 3 divides their parameters; how
    depends on the mesh. Returns pairs of a division (which axes divide which dims, of
    gradients too) and the indices of its candidates.

    Args:
        resting: bytes of the workload's arrays, for the meshes of the candidates.
        layout: the division that the candidates share while they compute.
        space: the candidates.
        rows: indices of the candidates that share the division.
    """
    divided = space.columns["zero"][rows] >= 2
    found = [(layout, rows[~divided])]
    rest = rows[divided]
    if len(rest):
        divisions, which = resting.sums(layout)
        of = which[resting.prices.columns.of[rest]]
        found += [(one, rest[of == number]) for number, one in enumerate(divisions)]
    return [(one, some) for one, some in found if len(some)]


def _put(
    columns: Mapping[str, np.ndarray], rows: np.ndarray, values: Mapping[str, Any]
) -> None:
    for name, value in values.items():
        columns[name][rows] = value
