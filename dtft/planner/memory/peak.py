"""Bytes at the fullest moment of a step, for many meshes at once.

`Timeline` lists what a program keeps in the order in which that happens,
`LivenessTrace` counts it by kind of array before anything is divided, `PeakModel`
evaluates that for sizes of mesh axes.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from dtft.planner.ir import Graph, Operator, region
from dtft.planner.memory.liveness import Event, Lifetimes, follow
from dtft.planner.memory.schedule import scheduled
from dtft.planner.spmd import (
    MICRO,
    ZERO_AXIS,
    Axes,
    Instance,
    ShardingAssignment,
    Sizes,
    flat,
    instance,
    parts,
    rest_place,
)
from dtft.planner.types import Spec

# Timeline: the memory events of a program, with gradients told apart and the changes of
# ZeRO levels. `PeakModel` turns it into bytes.


RESERVE = 0.08
"""Share of a device's memory that no plan may count on: what the count of bytes misses
where XLA runs what the plan says, fragmentation, the runtime. Of 200 compiled steps the
count was more than this too low in 4, by 13 % at most (`experiments/results/
plan_memory.md`): most where XLA keeps a softmax that it computes again for long.
Verification finds those; a reserve that covers them too (14 %) would refuse twice as
many plans that fit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """What comes into memory and goes during one step of a program."""

    graph: Graph
    gathers: bool = False
    """Whether at ZeRO level 3 the step is one of `dtft.parallel.fsdp`, which keeps all
    of the forward pass but gathered parameters."""
    below: "Timeline | None" = None
    """If this is the timeline of that: the one of the levels below."""
    alias: Mapping[int, int] = field(default_factory=dict)
    """Dim to the dim that stands for it in equal layers: what is alike in them is
    counted together."""

    @cached_property
    def at_level_3(self) -> "Timeline":
        """That of the same program at ZeRO level 3."""
        again = any(operator.again for operator in self.graph.operators)
        if not self.gathers or again or self.below is not None:
            return self
        return replace(self, below=self)

    def root(self, dim: int) -> int:
        """The dim that stands for a dim."""
        return self.alias.get(dim, dim)

    @cached_property
    def scheduled(self) -> Graph:
        """The program in the order in which XLA runs it."""
        return scheduled(self.graph) if self.below is None else self.below.scheduled

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return follow(self.scheduled, keeps_all=self.below is not None)

    def read_from(self, index: int) -> frozenset[int]:
        """The values in memory from which readers of a value have it."""
        return self._lifetimes.roots.get(index, frozenset((index,)))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """In the order in which they happen; of gradients also when they are made."""
        return tuple(
            event
            for event in self._lifetimes.events
            if event.kind != "complete" or event.value in self.gradients
        )

    @cached_property
    def gradients(self) -> frozenset[int]:
        """Values that the backward pass makes and the update reads."""
        made: set[int] = set()
        read: set[int] = set()
        for operator in self.graph.operators:
            where = region(operator)
            if where == "backward":
                made.update(operator.outputs)
            elif where == "update":
                for index in operator.inputs:
                    read |= self._lifetimes.roots.get(index, frozenset())
        for loop in self.graph.loops:
            made |= {outer for inner, outer in loop.stacked if inner in made}
            made |= {after for _, _, out, after in loop.carried if out in made}
        return frozenset(made & read)

    @cached_property
    def of_gradients(self) -> frozenset[int]:
        """Gradients, and those of one turn of a loop."""
        turns = {
            inner
            for loop in self.graph.loops
            for inner, outer in loop.stacked
            if outer in self.gradients
        }
        return self.gradients | turns

    @cached_property
    def from_loops(self) -> frozenset[int]:
        """Values that a loop makes part by part."""
        loops = self.graph.loops
        found = {outer for loop in loops for _, outer in loop.stacked}
        return frozenset(found | {v for loop in loops for *_, v in loop.carried})

    @cached_property
    def loop_dims(self) -> frozenset[int]:
        """Dims that a loop goes along."""
        return frozenset(n for n, dim in enumerate(self.graph.dims) if dim.loop)


# Liveness by kind of array. A sharding changes which axes divide a kind, never when its
# arrays are allocated or freed. So the trace is made once, for all shardings that
# `PeakModel` evaluates.


SOON = 5
"""Products after one for which a gather made for it is kept for another: with so many
the compiled steps that the rules were made with agree best."""
What = Literal["plain", "gradient", "kept", "waiting", "sums", "part"]
"""What bytes are of: an array; a gradient while it is made, the same in a loop, and
until it is used; the sum of one over microbatches; of an argument what a microbatch
works on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Arrays that every division divides alike."""

    what: What
    value: int
    """One of them."""
    divides: bool
    """Whether it is divided further where gradients are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRun:
    """An operator that may need operands gathered."""

    moment: int
    instance: int
    """Its place in `LivenessTrace.instances`."""
    beside: bool
    """Whether it runs beside the one before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reread:
    """Two products that read one array: where both need it gathered, it is so once."""

    instances: tuple[int, int]
    """Their places in `LivenessTrace.instances`."""
    num_bytes: int
    """Of the whole array."""
    moments: range
    """Those between them at which it stays gathered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReusedBuffer:
    """An array that is gone a moment sooner where an axis divides a dim of `rows`."""

    moment: int
    """The moment at which it is gone then."""
    kind: int
    num_bytes: int
    rows: tuple[int, ...]


class LivenessTrace:
    """The moments of a program that may be the fullest."""

    def __init__(self, timeline: Timeline) -> None:
        """Follows the program.

        Args:
            timeline: of the program.
        """
        self.timeline, self._graph = timeline, timeline.scheduled
        self.kinds: list[Kind] = []
        """What the columns of `alive` are of."""
        self._numbers: dict[object, int] = {}
        self._arrays: dict[int, int] = {}
        self._unlike: dict[object, int] = {}
        self._instances: dict[object, int] = {}
        self._changes: list[tuple[int, float]] = []
        self._at: list[int] = []
        self.full: list[int] = []
        """Moments after something came."""
        self.instances: list[Instance] = []
        """Operators that may need operands gathered, each with its own dims."""
        self.runs: list[OperatorRun] = []
        self.rereads: list[Reread] = []
        self._reads: dict[int, int] = {}
        self._products: list[OperatorRun] = []
        self.copied: list[tuple[int, int]] = []
        """Moments at which there is a copy of an array; which."""
        self.reused: list[ReusedBuffer] = []
        """Arrays whose place others may take; at most one for each moment."""
        self._reuses: Event | None = None
        self._begin()
        for event in timeline.events:
            self._follow(event)
        self.alive = self._moments()
        """Bytes; float [moments, kinds]."""

    @cached_property
    def gradients(self) -> tuple[tuple[int, int], ...]:
        """Gradients unlike in division or bytes, and how many there are of each."""
        first: dict[object, int] = {}
        counts: Counter[int] = Counter()
        for index in self.timeline.gradients:
            num_bytes = self._graph.values[index].num_bytes
            key = self._gradient(index, "sums"), num_bytes
            counts[first.setdefault(key, index)] += 1
        return tuple(counts.items())

    def _begin(self) -> None:
        """With microbatches: a sum of each gradient, and the part of the batch that is
        worked on, taken out of it.
        """
        for index in self.timeline.gradients:
            self._change(self._gradient(index, "sums"), index)
        for index in self._graph.inputs.values():
            self._change(self._kind(index, "part"), index)
        self.full.append(self._note())

    def _follow(self, event: Event) -> None:
        if event.kind == "runs":
            self._run(event.value)
        elif event.kind == "copied":
            self.copied.append((self._note(), event.value))
        elif event.kind == "reuse":
            self._reuses = event
        elif event.value in self.timeline.gradients:
            self._follow_gradient(event)
        elif event.kind == "alloc":
            self._change(self._kind(event.value), event.value)
            self.full.append(self._note())
            if self._reuses:
                self._note_reused(self._reuses)
        else:
            self._change(self._kind(event.value), event.value, -1)

    def _note_reused(self, event: Event) -> None:
        """What has come takes the place of another array, which goes only after it."""
        reused = ReusedBuffer(
            moment=self.full[-1],
            kind=self._kind(event.value),
            num_bytes=self._graph.values[event.value].num_bytes,
            rows=event.rows,
        )
        self.reused.append(reused)
        self._reuses = None

    def _follow_gradient(self, event: Event) -> None:
        """A gradient is whole until it is made, then as it is kept (ZeRO 2 and 3).

        A microbatch's own goes into the sum as soon as it is made.
        """
        index = event.value
        part_by_part = index in self.timeline.from_loops
        first = self._gradient(index, "kept" if part_by_part else "gradient")
        after = self._gradient(index, "waiting")
        if event.kind == "alloc":
            self._change(first, index)
            self.full.append(self._note())
        elif event.kind == "complete":
            self._change(first, index, -1)
            self._change(after, index)
        else:
            self._change(after, index, -1)

    def _run(self, number: int) -> None:
        operator = self._graph.operators[number]
        # Those of products that make gradients all run beside each other.
        beside = not self.timeline.of_gradients.isdisjoint(operator.outputs)
        arrays = [self._array(i) for i in (*operator.inputs, *operator.outputs)]
        over = self._roots(operator.summed), self._roots(operator.whole)
        key = operator.primitive, tuple(arrays), over, operator.contracted
        place = self._instances.setdefault(key, len(self.instances))
        if place == len(self.instances):
            root = self.timeline.root
            self.instances.append(instance(self._graph, operator, root))
        run = OperatorRun(moment=self._note(), instance=place, beside=beside)
        self.runs.append(run)
        if operator.kind == "matmul":
            self._note_reads(operator, run)

    def _note_reads(self, operator: Operator, run: OperatorRun) -> None:
        """What the last product of the forward pass and all of the backward pass read.

        XLA shares a gather between products that come soon after each other (its pass
        `ScheduleAwareCollectiveOpsCSE`): of a cotangent by the two products that read
        it, and of what the last layer reads by that and by the gradient of its weights.
        """
        if region(operator) == "forward":
            self._reads.clear()
        number = len(self._products)
        self._products.append(run)
        for index in operator.inputs:
            for root in self.timeline.read_from(index):
                before = self._reads.get(root)
                self._reads[root] = number
                if before is not None:
                    first, end = self._products[before], min(before + SOON, number)
                    reread = Reread(
                        instances=(first.instance, run.instance),
                        num_bytes=self._graph.values[index].num_bytes,
                        moments=range(first.moment + 1, self._products[end].moment),
                    )
                    self.rereads.append(reread)

    def _gradient(self, index: int, what: What) -> int:
        return self._kind(index, what, divides=what != "gradient")

    def _kind(self, index: int, what: What = "plain", divides: bool = False) -> int:
        kind = what, self._array(index), divides
        place = self._numbers.setdefault(kind, len(self.kinds))
        if place == len(self.kinds):
            self.kinds.append(Kind(what=what, value=index, divides=divides))
        return place

    def _array(self, index: int) -> int:
        """The same number for arrays that every division divides alike."""
        if index not in self._arrays:
            value = self._graph.values[index]
            key = value.shape, value.dtype, self._roots(value.dims)
            self._arrays[index] = self._unlike.setdefault(key, len(self._unlike))
        return self._arrays[index]

    def _roots(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(self.timeline.root, dims))

    def _change(self, kind: int, index: int, sign: int = 1) -> None:
        num_bytes = self._graph.values[index].num_bytes
        self._changes.append((kind, sign * num_bytes))

    def _note(self) -> int:
        """A moment that may be the fullest; its number."""
        self._at.append(len(self._changes))
        return len(self._at) - 1

    def _moments(self) -> np.ndarray:
        changes = np.zeros((len(self._changes) + 1, len(self.kinds)))
        if self._changes:
            kinds, num_bytes = zip(*self._changes, strict=True)
            changes[np.arange(1, len(changes)), kinds] = num_bytes
        return changes.cumsum(axis=0)[self._at]


# Peaks. The bytes alive at a moment are a sum of totals, each divided by the sizes of
# some axes. The moments are a matrix; its product with the reciprocal divisors of many
# meshes gives the bytes of all these meshes.


_Beside = tuple[int, Sequence[tuple[int, float]]]
"""A moment, and totals of which so many bytes more are there."""
_Total = tuple[What, Axes, int]
"""What bytes are of, the axes that divide them, and of gradients that are kept divided
further a value that stands for all that are so alike; otherwise -1."""
_MOST_ALONE = 2**17
"""Multiplications that OpenBLAS does on one thread; it may use more from 2**18 on."""
_OF_GRADIENTS = ("gradient", "kept", "waiting", "sums")


@dataclass(frozen=True, kw_only=True, eq=False)
class Peak:
    """The most that is alive at one time, by term; bytes, one entry per candidate."""

    activations: np.ndarray
    gradients: np.ndarray


class PeakModel:
    """The moments that may be the fullest, under one division."""

    def __init__(self, trace: LivenessTrace, division: ShardingAssignment) -> None:
        """Divides what is alive.

        Args:
            trace: of the program.
            division: which axes divide which dims; `MICRO` among them.
        """
        self.trace, self.division = trace, division
        self._graph = trace.timeline.scheduled
        self.totals: dict[_Total, int] = {}
        """The number of each."""
        self._gathers = [list(self._gathered(one)) for one in trace.instances]
        self.matrix = self._moments(self._columns(), list(self._beside()))
        """Bytes before division; float [moments, totals]."""

    def divisors(self) -> set[Axes]:
        """Axes that divide something together: what the bytes depend on."""
        found: set[Axes] = {(ZERO_AXIS,), (MICRO,)}
        for _, axes, index in self.totals:
            found.add(axes)
            if index >= 0:
                found.update(self.division.spec(self._graph.values[index]))
        return found - {()}

    def on(self, sizes: Sizes) -> "PeakEval":
        """The same on some meshes.

        Args:
            sizes: axis to size, one entry per mesh.
        """
        return PeakEval(self, sizes)

    def _columns(self) -> list[int]:
        """For each kind of array its total; -1 for what is not there."""
        found: list[int] = []
        alike: dict[object, int] = {}
        loops = self.trace.timeline.loop_dims
        for kind in self.trace.kinds:
            value = self._graph.values[kind.value]
            spec = self.division.spec(value)
            axes, stands = flat(spec), -1
            if kind.divides:
                key = value.shape, spec, tuple(dim in loops for dim in value.dims)
                stands = alike.setdefault(key, kind.value)
            there = kind.what != "part" or MICRO in axes
            found.append(self._total((kind.what, axes, stands)) if there else -1)
        return found

    def _beside(self) -> Iterator[_Beside]:
        """Moments at which something is there beside what is alive: totals and bytes.

        Copies, and what operands are brought together in.
        """
        for moment, index in self.trace.copied:
            value = self._graph.values[index]
            axes = flat(self.division.spec(value))
            yield moment, [(self._total(("plain", axes, -1)), value.num_bytes)]
        before: list[tuple[int, float]] = []
        for run in self.trace.runs if any(self._gathers) else ():
            before = self._gathers[run.instance] + (before if run.beside else [])
            if before:
                yield run.moment, before

    def _gathered(self, operator: Instance) -> Iterator[tuple[int, float]]:
        for sent in operator.pattern.work(operator.key(self.division)).sent:
            if sent.kind in ("all_gather", "all_to_all"):
                yield self._total(("plain", sent.amount.axes, -1)), sent.amount.total

    def _moments(self, columns: Sequence[int], beside: Sequence[_Beside]) -> np.ndarray:
        """Bytes before division; float [moments, totals]."""
        into = np.zeros((len(columns), len(self.totals)))
        for kind, total in enumerate(columns):
            if total >= 0:
                into[kind, total] = 1
        full = [(moment, ()) for moment in self.trace.full]
        rows = sorted([*full, *beside], key=lambda row: row[0])
        at = np.array([moment for moment, _ in rows])
        moments = _product(self.trace.alive[at], into)
        for row, (_, more) in enumerate(rows):
            for total, num_bytes in more:
                moments[row, total] += num_bytes
        for within, total, num_bytes in self._shared():
            rows_of = slice(*np.searchsorted(at, (within.start, within.stop)))
            moments[rows_of, total] += num_bytes
        for one in self.trace.reused:
            if any(map(self.division.of, one.rows)):
                moments[at == one.moment, columns[one.kind]] -= one.num_bytes
        return moments

    def _shared(self) -> Iterator[tuple[range, int, float]]:
        """Moments at which something stays gathered for another product, its total and
        bytes.
        """
        for reread in self.trace.rereads if any(self._gathers) else ():
            one, other = (self._gathers[instance] for instance in reread.instances)
            for total, num_bytes in one:
                if num_bytes == reread.num_bytes and (total, num_bytes) in other:
                    yield reread.moments, total, num_bytes

    def _total(self, total: _Total) -> int:
        return self.totals.setdefault(total, len(self.totals))


class PeakEval:
    """The fullest moment on some meshes, at each ZeRO level."""

    def __init__(self, moments: PeakModel, sizes: Sizes) -> None:
        """Nothing is looked at yet.

        Args:
            moments: of the program, under one division.
            sizes: axis to size, one entry per mesh.
        """
        self._moments, self._sizes = moments, sizes
        self._trace, self._division = moments.trace, moments.division
        self._values = moments.trace.timeline.scheduled.values
        self._places: dict[int, tuple[Spec, np.ndarray]] = {}

    def peak(self, zero: int) -> Peak:
        """The fullest moment between the first operator and the last.

        Args:
            zero: the ZeRO level.
        """
        most, held = (self._whole, self._sums_divided, self._divided)[min(zero, 2)]
        if zero in (1, 2):
            update = self._update
            held = np.where(update > most, update, held)
            most = np.maximum(most, update)
        if zero == 3:
            most = most + self._laid_anew()
        return Peak(activations=most - held, gradients=held)

    @cached_property
    def _whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the fullest moment, and of gradients then, at ZeRO level 0."""
        return self._fullest(self._shares)

    @cached_property
    def _sums_divided(self) -> tuple[np.ndarray, np.ndarray]:
        """The same at level 1, at which sums over microbatches are divided.

        No constraint says so: XLA keeps what a loop carries divided as the optimizer
        state is that reads it.
        """
        return self._fullest(self._shares_divided(("sums",)))

    @cached_property
    def _divided(self) -> tuple[np.ndarray, np.ndarray]:
        """The same from level 2 on."""
        return self._fullest(self._shares_divided(_OF_GRADIENTS))

    def _shares_divided(self, kinds: Container[What]) -> np.ndarray:
        """What each device has of a byte, of some kinds divided as at rest."""
        shares, fsdp = self._shares.copy(), np.asarray(self._sizes[ZERO_AXIS])
        for (kind, _, index), row in self._moments.totals.items():
            if index >= 0 and kind in kinds:
                place = self._place(index)[1]
                shares[row] = np.where(place >= 0, shares[row] / fsdp, shares[row])
        return shares

    def _fullest(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        matrix = self._moments.matrix
        alive = _product(matrix, shares)
        fullest, most = alive.argmax(axis=0), alive.max(axis=0)
        ours = [kind in _OF_GRADIENTS for kind, *_ in self._moments.totals]
        return most, np.einsum("cd,dc->c", matrix[fullest][:, ours], shares[ours])

    @cached_property
    def _shares(self) -> np.ndarray:
        """What each device has of a byte of each total; float [totals, meshes]."""
        sizes, totals = self._sizes, self._moments.totals
        number = np.asarray(sizes[MICRO])
        left = {
            axes: 1 / np.asarray(parts(axes, sizes), float)
            for axes in {axes for _, axes, _ in totals}
        }
        shares = np.ones((len(totals), len(number)))
        for (kind, axes, _), row in totals.items():
            shares[row] = left[axes]
            if kind == "waiting":
                shares[row] *= number == 1
            elif kind in ("sums", "part"):
                shares[row] *= number > 1
        return shares

    @cached_property
    def _update(self) -> Any:
        """Where each device updates a part: new parameters beside old ones, gathered.

        Old parameters are read until the last part is updated, so what is gathered
        has memory of its own; what is being updated is there thrice, laid out for it.
        """
        total: Any = 0.0
        largest: Any = 0.0
        for index, count in self._trace.gradients:
            value = self._values[index]
            one = value.num_bytes / parts(flat(self._division.spec(value)), self._sizes)
            total, largest = total + count * one, np.maximum(largest, one)
        divides = np.asarray(self._sizes[ZERO_AXIS])
        return np.where(divides > 1, total + 3 * largest / divides, 0.0)

    def _laid_anew(self) -> Any:
        """Parameters to be gathered along a dim that is not their first: XLA keeps a
        copy of a device's part with that dim first, from the first gather to the last.
        """
        total: Any = 0.0
        for index, count in self._trace.gradients:
            spec, place = self._place(index)
            part = self._values[index].num_bytes / parts(
                (*flat(spec), ZERO_AXIS), self._sizes
            )
            total = total + count * np.where(place > 0, part, 0.0)
        return total

    def _place(self, index: int) -> tuple[Spec, np.ndarray]:
        """How a gradient is divided where it is used, and the dim of it for `fsdp`."""
        if index not in self._places:
            value, loops = self._values[index], self._trace.timeline.loop_dims
            spec = self._division.spec(value)
            self._places[index] = spec, rest_place(value, spec, self._sizes, loops)
        return self._places[index]


def _product(matrix: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """matrix @ shares, in parts for which BLAS starts no threads.

    Of a product so small they take longer than it does, where others keep the cores
    busy a hundred times so long.
    """
    found = np.empty((len(matrix), shares.shape[1]))
    step = max(1, _MOST_ALONE // max(1, matrix.size))
    for start in range(0, shares.shape[1], step):
        found[:, start : start + step] = matrix @ shares[:, start : start + step]
    return found
