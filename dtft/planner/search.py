"""The search: every candidate priced, what fits ranked, the best one returned.

Lays the axes of each mesh on the dims of the program (`choosing`), prices all of them
(`pricing`, `memory`) and sorts. Exhaustive over what `space` holds, exact per mesh; so
the result is the best of all that can be said in these knobs. Pure; must not compile or
run anything.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dtft.planner import pricing, shards
from dtft.planner.amounts import Work
from dtft.planner.choosing import Chooser, candidates
from dtft.planner.cluster import Pool
from dtft.planner.cost import Moved, Speeds
from dtft.planner.groups import Group
from dtft.planner.memory import RESERVE, Timeline, peak
from dtft.planner.partition import MICRO, Division
from dtft.planner.pricing import Pattern
from dtft.planner.question import Question
from dtft.planner.space import Candidate, Space

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
    patterns: Sequence[Pattern]
    pattern: np.ndarray
    """For each candidate its pattern."""
    capacity: int

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
        self._timeline = Timeline(graph=question.graph)
        self._loops = {n for n, dim in enumerate(question.graph.dims) if dim.loop}
        self._patterns: dict[object, int] = {}
        self._found: list[Pattern] = []
        self._choosers: dict[bool, Chooser] = {}
        self._chosen: dict[object, Division] = {}

    def price(self, space: Space) -> Priced:
        """Time and memory of every candidate."""
        pattern = np.array([self._pattern(space[i]) for i in range(len(space))], int)
        terms = {name: np.zeros(len(space)) for name in TERMS}
        memory = {name: np.zeros(len(space)) for name in MEMORY}
        for number in np.unique(pattern):
            rows = np.flatnonzero(pattern == number)
            part = space.where(rows)
            for name, values in self._terms(part, self._found[number]).items():
                terms[name][rows] = values
            for name, values in self._memory(part, self._found[number]).items():
                memory[name][rows] = values
        memory["reserve"][:] = RESERVE * self.pool.device.memory_bytes
        return Priced(
            space=space,
            terms=terms,
            memory=memory,
            patterns=tuple(self._found),
            pattern=pattern,
            capacity=self.pool.device.memory_bytes,
        )

    def _pattern(self, candidate: Candidate) -> int:
        division = self.division(candidate)
        rest = [(dims, *extra.items()) for dims, extra in division.rest.items()]
        key = frozenset(division.axes.items()), frozenset(rest)
        if key not in self._patterns:
            self._patterns[key] = len(self._found)
            self._found.append(Pattern(question=self.question, division=division))
        return self._patterns[key]

    def division(self, candidate: Candidate) -> Division:
        """Which axes divide which dims in a candidate."""
        mesh, zero = candidate.mesh, candidate.knobs.zero
        key = tuple(mesh.items())
        if key not in self._chosen:
            self._chosen[key] = self._divide(mesh)
        division = self._chosen[key]
        if zero < 2:
            return division
        parameters = self.leaves("parameter", division, mesh, True)
        return replace(division, rest=shards.further(parameters, division, self._loops))

    def works(self, division: Division) -> tuple[tuple[Group, Work], ...]:
        """What each group of operators takes under a division."""
        return Pattern(question=self.question, division=division).works

    def _divide(self, mesh: Mapping[str, int]) -> Division:
        """The division by data axes, with `tensor` where it costs least."""
        question, tensor = self.question, mesh.get("tensor", 1)
        chooser = self._chooser(mesh.get("sequence", 1) > 1)
        if tensor == 1:
            return chooser.base
        speeds = Speeds(pool=self.pool, mesh=mesh)
        sizes = {**mesh, MICRO: 1}
        dims = candidates(question.graph, question.groups, question.alias, tensor)
        dims = [dim for dim in dims if dim not in question.sequence_dims]
        return chooser.choose(
            dims,
            lambda done: float(speeds.alone_s(question.graph, done, sizes)),
        )

    def _chooser(self, by_sequence: bool) -> Chooser:
        """Lays `tensor` beside the axes that divide examples."""
        if by_sequence not in self._choosers:
            question = self.question
            axes = dict.fromkeys(question.batch_dims, ("replica", "fsdp", MICRO))
            if by_sequence:
                axes |= dict.fromkeys(question.sequence_dims, ("sequence",))
            base = Division(axes=axes, scatters=self.scatters, alias=question.alias)
            self._choosers[by_sequence] = Chooser(
                question.graph, question.groups, base, "tensor"
            )
        return self._choosers[by_sequence]

    def _terms(self, space: Space, pattern: Pattern) -> dict[str, np.ndarray]:
        sizes = _sizes(space)
        sizes["optimizer"] = np.where(space.columns["zero"] > 0, sizes["fsdp"], 1)
        found = pricing.computing(pattern, self.pool, sizes)
        sending = np.zeros(len(space))
        for mesh, zero, rows in _by_mesh(space):
            speeds = Speeds(pool=self.pool, mesh=mesh)
            moved = self.moved(pattern.division, mesh, zero)
            sends = [*pattern.sends]
            sends += [(one.times, one.per_microbatch, one.sent) for one in moved]
            sending[rows] = pricing.sending(sends, speeds, sizes[MICRO][rows])
        found["collectives"] = pricing.exposed(self.pool, sending, found["compute"])
        trust = self.pool.trust
        return {name: seconds * trust.scale(name) for name, seconds in found.items()}

    def moved(
        self, division: Division, mesh: Mapping[str, int], zero: int
    ) -> list[Moved]:
        """Collectives that bring divided arrays together."""
        parameters = self.leaves("parameter", division, mesh, zero > 0)
        if zero == 3:  # the backward pass gathers again: see `dtft.train.gathered`
            return shards.gathers(parameters, self.question.passes, True)
        graph, once = self.question.graph, dict.fromkeys(self.question.roles, 1)
        # A parameter that the step leaves as it was is still whole everywhere.
        changed = [
            leaf
            for leaf in parameters
            if graph.outputs.get(leaf.path) != graph.inputs[leaf.path]
        ]
        return shards.gathers(changed, once, False)

    def leaves(
        self, role: Any, division: Division, mesh: Mapping[str, int], divides: bool
    ) -> tuple[shards.Leaf, ...]:
        """Arrays of a role, and how each is divided."""
        graph = self.question.graph
        values = {
            path: graph.values[graph.inputs[path]] for path in self.question.paths(role)
        }
        return shards.leaves(values, division, mesh, divides, self._loops)

    def _memory(self, space: Space, pattern: Pattern) -> dict[str, np.ndarray]:
        sizes = _sizes(space)
        found = {name: np.zeros(len(space)) for name in MEMORY}
        for mesh, zero, rows in _by_mesh(space):
            for name, role, least in (
                ("parameters", "parameter", 3),
                ("optimizer", "optimizer", 1),
            ):
                arrays = self.leaves(role, pattern.division, mesh, zero >= least)
                found[name][rows] = shards.bytes_at_rest(arrays, mesh)
            batch = self.leaves("batch", pattern.division, mesh, False)
            whole = {**mesh, MICRO: 1}  # all microbatches are there from the start
            found["batch"][rows] = shards.bytes_at_rest(batch, whole)
        highest = peak(self._timeline, pattern.division, sizes, {})
        found["activations"] += highest.activations
        found["gradients"] += highest.gradients
        return found


def _sizes(space: Space) -> dict[str, Any]:
    names = ("replica", "fsdp", "tensor", "sequence", "expert", "stage")
    sizes = {name: space.columns[name] for name in names}
    return {**sizes, MICRO: space.columns["microbatches"]}


def _by_mesh(space: Space) -> list[tuple[dict[str, int], int, np.ndarray]]:
    """Candidates by mesh and ZeRO level: the mesh, the level, their rows."""
    rows: dict[object, list[int]] = defaultdict(list)
    names = (*_sizes(space), "order", "zero")
    names = tuple("microbatches" if name == MICRO else name for name in names)
    columns = [space.columns[name] for name in names if name != "microbatches"]
    for row, key in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        rows[key].append(row)
    found = []
    for places in rows.values():
        candidate = space[places[0]]
        found.append((dict(candidate.mesh), candidate.knobs.zero, np.array(places)))
    return found
