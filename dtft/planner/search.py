"""The search: every candidate priced, what fits ranked, the best one returned.

Lays the axes of each mesh on the dims of the program (`choosing`), prices all of them
(`pricing`, `resting`, `memory`) and sorts. Exhaustive over what `space` holds, exact
per mesh and number of microbatches; so the result is the best of all that can be said
in these knobs. Pure; must not compile or run anything.

Where a knob enters: an axis that divides examples, positions or dims of its own is laid
in `_base`; a knob that changes what operators do on a device is a column of `Columns`;
one that changes only what is kept, gathered or updated is read from the space in
`_terms` and `_memory`. Its values come from `enumeration`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dtft.planner import pricing, shards
from dtft.planner.amounts import Work
from dtft.planner.choosing import Chooser, candidates
from dtft.planner.cluster import Pool
from dtft.planner.columns import Columns
from dtft.planner.compute_cost import added_s, launch_s
from dtft.planner.cost import Moved
from dtft.planner.groups import Group
from dtft.planner.memory import RESERVE, Timeline
from dtft.planner.moments import Moments
from dtft.planner.partition import MICRO, Division
from dtft.planner.pricing import Prices
from dtft.planner.question import Question, Role
from dtft.planner.resting import Resting
from dtft.planner.space import MemoryFloor, Space
from dtft.planner.works import works_of

TERMS = ("compute", "collectives", "optimizer", "launch")
MEMORY = ("parameters", "gradients", "optimizer", "activations", "batch", "reserve")


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """Every candidate of a space with its time and memory."""

    space: Space
    terms: Mapping[str, np.ndarray]
    """Seconds by term; each one entry per candidate."""
    memory: Mapping[str, np.ndarray]
    """Bytes of a device by term."""
    divisions: Sequence[Division]
    """Which axes divide which dims, for all candidates."""
    division: np.ndarray
    """For each candidate which of the divisions it has."""
    capacity: int

    def division_of(self, at: int) -> Division:
        """Which axes divide which dims in a candidate."""
        return self.divisions[self.division[at]]

    @cached_property
    def step_s(self) -> np.ndarray:
        """Seconds of a step; of a rounded-up batch the part that was asked for."""
        return np.sum([self.terms[name] for name in TERMS], axis=0)

    @cached_property
    def memory_bytes(self) -> np.ndarray:
        """Bytes of a device."""
        return np.sum([self.memory[name] for name in MEMORY], axis=0)

    @cached_property
    def fits(self) -> np.ndarray:
        """Which candidates have room."""
        return self.memory_bytes <= self.capacity

    @cached_property
    def ranking(self) -> np.ndarray:
        """Candidates that fit before those that do not; faster before slower.

        What does not fit is ordered by how little it lacks. Ties: fewer bytes, then
        fewer microbatches, then the order of the space.
        """
        first = np.where(self.fits, self.step_s, self.memory_bytes)
        keys = (
            np.arange(len(first)),
            self.space.columns["microbatches"],
            np.round(self.memory_bytes),
            _rounded(first),
            ~self.fits,
        )
        return np.lexsort(keys)


def _rounded(values: np.ndarray) -> np.ndarray:
    """To nine digits: sums in another order must not decide a ranking."""
    with np.errstate(divide="ignore"):
        digits = np.floor(np.log10(np.maximum(values, 1e-300)))
    scale = 10.0 ** (digits - 9)
    return np.round(values / scale) * scale


def memory_floor(question: Question, pool: Pool) -> MemoryFloor:
    """What the state of a question takes, whatever is divided how."""
    graph = question.graph

    def total(role: Role) -> int:
        paths = question.paths(role)
        return sum(graph.values[graph.inputs[path]].num_bytes for path in paths)

    return MemoryFloor(
        parameters=total("parameter"),
        gradients=0,  # how many are there at a time depends on the program
        optimizer=total("optimizer"),
        capacity=int(pool.device.memory_bytes * (1 - RESERVE)),
    )


class Search:
    """Prices the candidates of one question on one pool."""

    def __init__(self, question: Question, pool: Pool, *, scatters: bool) -> None:
        """Nothing is priced yet.

        Args:
            question: what is asked.
            pool: like devices.
            scatters: whether the backend has reduce-scatter (`Division.scatters`).
        """
        self.question, self.pool, self.scatters = question, pool, scatters
        self._timeline = Timeline(
            graph=question.graph, gathers=question.entry == "loss"
        )

    def price(self, space: Space, columns: Columns | None = None) -> Priced:
        """Time and memory of every candidate.

        Args:
            space: the candidates.
            columns: of this space, or of the same candidates with another remat.
        """
        columns = columns or Columns(self.pool, space)
        prices = Prices(self.question, columns)
        resting = Resting(prices)
        terms = {name: np.zeros(len(space)) for name in TERMS}
        memory = {name: np.zeros(len(space)) for name in MEMORY}
        memory["reserve"][:] = RESERVE * self.pool.device.memory_bytes
        divisions: list[Division] = []
        which = np.zeros(len(space), np.int64)
        for layout, rows in self._layouts(prices, space):
            _put(memory, rows, self._memory(resting, layout, space, rows))
            for division, part in _with_sums(resting, layout, space, rows):
                _put(terms, part, self._terms(resting, division, space, part))
                which[part] = len(divisions)
                divisions.append(division)
        return Priced(
            space=space,
            terms=terms,
            memory=memory,
            divisions=divisions,
            division=which,
            capacity=self.pool.device.memory_bytes,
        )

    def works(self, division: Division) -> tuple[tuple[Group, Work], ...]:
        """What each group of operators takes under a division."""
        known = works_of(self.question)
        return tuple(
            (group, known.of(number, division))
            for number, group in enumerate(self.question.groups)
        )

    def moved(
        self, division: Division, mesh: Mapping[str, int], zero: int
    ) -> list[Moved]:
        """Collectives that bring divided arrays together."""
        question = self.question
        parameters = self.leaves("parameter", division, mesh, zero > 0)
        times = {
            leaf.path: shards.times_gathered(
                question.passes[leaf.path], question.changes(leaf.path), zero
            )
            for leaf in parameters
        }
        return shards.gathers(parameters, times)

    def leaves(
        self, role: Role, division: Division, mesh: Mapping[str, int], divides: bool
    ) -> tuple[shards.Leaf, ...]:
        """Arrays of a role, and how each is divided."""
        graph, loops = self.question.graph, self.question.loop_dims
        values = {
            path: graph.values[graph.inputs[path]] for path in self.question.paths(role)
        }
        return shards.leaves(values, division, mesh, divides, loops)

    def _base(self, space: Space) -> Division:
        """What all axes but `tensor` divide."""
        question = self.question
        axes = dict.fromkeys(question.batch_dims, ("replica", "fsdp", MICRO))
        if (space.columns["sequence"] > 1).any():
            axes |= dict.fromkeys(question.sequence_dims, ("sequence",))
        return Division(axes=axes, scatters=self.scatters, alias=question.alias)

    def _layouts(
        self, prices: Prices, space: Space
    ) -> list[tuple[Division, np.ndarray]]:
        """Divisions with `tensor` where it costs least, and the candidates of each."""
        chooser = Chooser(prices, self._base(space), "tensor")
        found, which = chooser.choose(candidates(self.question))
        of = which[prices.columns.of]
        return [(one, np.flatnonzero(of == n)) for n, one in enumerate(found)]

    def _terms(
        self, resting: Resting, division: Division, space: Space, rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Seconds of some candidates of one division."""
        prices = resting.prices
        points, zero = prices.columns.of[rows], space.columns["zero"][rows]
        sums = pricing.summed(prices.ways(division))
        sending = sums.sending.at(points)
        for level in np.unique(zero):
            some = zero == level
            gathers = resting.gathers_s(division, int(level))
            sending[some] += gathers.at(points[some])
        compute, device = sums.compute.at(points), self.pool.device
        parts = np.where(zero > 0, space.columns["fsdp"][rows], 1)
        terms = {
            "compute": compute,
            "collectives": np.asarray(added_s(device.efficiency, sending, compute)),
            "optimizer": sums.optimizer.at(points) / parts,
            "launch": np.asarray(launch_s(device, sums.starts.at(points))),
        }
        trust = self.pool.trust
        return {name: seconds * trust.scale(name) for name, seconds in terms.items()}

    def _memory(
        self, resting: Resting, division: Division, space: Space, rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Bytes of some candidates of one layout."""
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
        found |= {name: np.zeros(len(rows)) for name in ("activations", "gradients")}
        known: dict[Timeline, Moments] = {}
        for level in np.unique(zero):
            timeline = self._timeline if level < 3 else self._timeline.at_level_3
            if timeline not in known:
                known[timeline] = Moments(timeline, division)
            moments, some = known[timeline], np.flatnonzero(zero == level)
            alike = columns.divided(moments.divisors())
            cases, of = np.unique(alike.of[points[some]], return_inverse=True)
            sizes = {axis: column[cases] for axis, column in alike.sizes.items()}
            highest = moments.peak(sizes, int(level))
            found["activations"][some] = highest.activations[of]
            found["gradients"][some] = highest.gradients[of]
        return found


def _with_sums(
    resting: Resting, layout: Division, space: Space, rows: np.ndarray
) -> list[tuple[Division, np.ndarray]]:
    """Divisions of a layout, by how gradients are divided; and the candidates of each.

    From ZeRO 2 on they are divided as their parameters are kept.
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
