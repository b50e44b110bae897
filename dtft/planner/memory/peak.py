"""Computes the peak memory of a step for many meshes at once.

`Timeline` lists the memory events of a program in order. `LivenessTrace` counts the
bytes alive by kind of array, before division by mesh axes. `PeakModel` sums these bytes
by the axes that divide them. `PeakEval` divides the sums by the sizes of the axes.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from dtft.planner.ir import Graph, Operator, num_groups, operands_by_group, region
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

# Timeline: the memory events of a program, with gradients marked, and with the changes
# of ZeRO level 3. `PeakModel` turns the events into bytes.


RESERVE = 0.08
"""Share of a device's memory that plans must leave free.

It covers errors of the byte count, fragmentation and the runtime. In 4 of 200 compiled
steps the count was too low by more than this share, by 15 % at most
(`experiments/results/plan_memory.md`). The largest of these errors arise where XLA
keeps a recomputed softmax alive for long. Verification (`dtft plan --verify`) finds
plans with such errors. A reserve that covers these errors too (15 %) would reject about
twice as many plans that fit.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """The memory events of one step of a program: allocations, frees and copies."""

    graph: Graph
    gathers: bool = False
    """Whether ZeRO level 3 runs the step of `dtft.parallel.fsdp`, which keeps all
    values of the forward pass that the backward pass reads, except gathered
    parameters."""
    below: "Timeline | None" = None
    """The timeline of the lower ZeRO levels, if this is the timeline of level 3."""
    alias: Mapping[int, int] = field(default_factory=dict)
    """Map from a dim to the dim that represents it in all equal layers; the arrays of
    equal layers are counted together."""
    flat_state: bool = False
    """Whether ZeRO divides flat buffers of all arrays, so that `fsdp` divides an array
    of any size. It is `Software.flat_state`."""
    has_ragged_matmul: bool = False
    """Whether XLA has kernels for ragged matmuls on the platform. Otherwise it copies
    the rows of a ragged matmul once for each group."""

    @cached_property
    def at_level_3(self) -> "Timeline":
        """The timeline of the same program at ZeRO level 3.

        It differs from this one if level 3 runs another step, that of
        `dtft.parallel.fsdp` (field `gathers`), which keeps other values for the
        backward pass. It is this object if `gathers` is false, if parts of the program
        are rematerialized, or if this is the timeline of level 3 already.
        """
        again = any(operator.again for operator in self.graph.operators)
        if not self.gathers or again or self.below is not None:
            return self
        return replace(self, below=self)

    def root(self, dim: int) -> int:
        """Returns the dim that represents the given dim in all equal layers.

        The arrays of equal layers are counted together, so dims at the same position of
        equal layers have one representative (map `alias`). Any other dim represents
        itself. Dims are given by their index in `Graph.dims`.
        """
        return self.alias.get(dim, dim)

    @cached_property
    def scheduled(self) -> Graph:
        """The program in the order in which XLA runs its operators."""
        return scheduled(self.graph) if self.below is None else self.below.scheduled

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return follow(self.scheduled, keeps_all=self.below is not None)

    def read_from(self, index: int) -> frozenset[int]:
        """Finds the values whose buffers the readers of a given value read.

        This is the value itself if it has a buffer. A value without a buffer is an
        alias of another value, or is fused: its readers compute it from other values.
        Values are given by their index in `Graph.values`.

        Args:
            index: the index of the value.
        """
        return self._lifetimes.roots.get(index, frozenset((index,)))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The memory events of the step in order.

        Events that say that a value is computed (kind `complete`) are included for
        gradients only.
        """
        return tuple(
            event
            for event in self._lifetimes.events
            if event.kind != "complete" or event.value in self.gradients
        )

    @cached_property
    def gradients(self) -> frozenset[int]:
        """Numbers of the values that the backward pass makes and the update reads."""
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
        """The gradients and their parts, by their index in `Graph.values`.

        A part belongs to a gradient that a loop stacks, such as that of all layers'
        weights. It is the value that one iteration computes.
        """
        turns = {
            inner
            for loop in self.graph.loops
            for inner, outer in loop.stacked
            if outer in self.gradients
        }
        return self.gradients | turns

    @cached_property
    def from_loops(self) -> frozenset[int]:
        """Values that a loop computes part by part: stacked and carried results.

        Values are given by their index in `Graph.values`.
        """
        loops = self.graph.loops
        found = {outer for loop in loops for _, outer in loop.stacked}
        return frozenset(found | {v for loop in loops for *_, v in loop.carried})

    @cached_property
    def loop_dims(self) -> frozenset[int]:
        """Dims along which loops slice or stack arrays; indices into `Graph.dims`."""
        return frozenset(n for n, dim in enumerate(self.graph.dims) if dim.loop)


# Liveness by kind of array. A sharding changes which axes divide a kind, but not when
# its arrays are allocated or freed. So one trace serves all shardings that `PeakModel`
# evaluates.


SOON = 5
"""Number of following matmuls for which a gathered operand stays in memory, because
one of them may read it too.

Fitted to compiled steps.
"""
What = Literal["plain", "gradient", "kept", "waiting", "sums", "part"]
"""The category of bytes.

* `plain`: an array.
* `gradient`: a gradient while it is computed in one piece, not in a loop.
* `kept`: a gradient while a loop computes it part by part.
* `waiting`: a gradient from its completion until its use, in a step without
  microbatches.
* `sums`: the sum of a gradient over microbatches.
* `part`: the part of an argument for one microbatch.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Arrays of one category that every sharding divides in the same way.

    The category (`What`) is `plain` for most arrays. For gradients it is `gradient`
    while they are computed in one piece, `kept` while a loop computes them part by
    part, and `waiting` once they are complete. `sums` are the sums of gradients over
    microbatches, and `part` is the part of an argument for one microbatch.
    """

    what: What
    value: int
    """The index of one of the arrays."""
    divides: bool
    """Whether ZeRO divides the arrays further than the sharding, from some level on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRun:
    """One execution in a step of an operator whose operands may have to be gathered.

    Operands are gathered if mesh axes divide dims that the operator needs undivided.
    `moment` is the row of `LivenessTrace.alive` that counts the bytes at the execution.
    """

    moment: int
    instance: int
    """The operator's position in `LivenessTrace.instances`."""
    beside: bool
    """Whether the gathers of the operator's operands run concurrently with those of the
    previous run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reread:
    """Two matmuls that read the same array, and share its gather if both need one."""

    instances: tuple[int, int]
    """Positions of the two matmuls in `LivenessTrace.instances`."""
    num_bytes: int
    """Bytes of the whole array."""
    moments: range
    """The moments (rows of `LivenessTrace.alive`) between the matmuls at which the
    array stays gathered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReusedBuffer:
    """An array whose buffer is used again for the result of an operator that reads it.

    This is so only if a mesh axis divides a dim in `rows`: the dims along which a
    reduction sums, such as the last dim of a softmax. `kind` is the column of
    `LivenessTrace.alive` that counts the array.
    """

    moment: int
    """The moment (row of `LivenessTrace.alive`) when the result is allocated. If the
    result takes the buffer, the array is not alive at this moment."""
    kind: int
    num_bytes: int
    rows: tuple[int, ...]


class LivenessTrace:
    """Counts the bytes in memory at each moment of a step that may be the peak.

    The bytes are counted by kind of array (`Kind`), before division by mesh axes.
    """

    def __init__(self, timeline: Timeline) -> None:
        """Counts the bytes alive after each event of a program.

        Args:
            timeline: the timeline of the program.
        """
        self.timeline, self._graph = timeline, timeline.scheduled
        self.kinds: list[Kind] = []
        """The kinds of arrays that the columns of `alive` count."""
        self._numbers: dict[object, int] = {}
        self._arrays: dict[int, int] = {}
        self._unlike: dict[object, int] = {}
        self._instances: dict[object, int] = {}
        self._changes: list[tuple[int, float]] = []
        self._at: list[int] = []
        self.full: list[int] = []
        """Moments (rows of `alive`) after an allocation."""
        self.instances: list[Instance] = []
        """Operators whose operands may have to be gathered, each with its own dims."""
        self.runs: list[OperatorRun] = []
        self.rereads: list[Reread] = []
        self._reads: dict[int, int] = {}
        self._products: list[OperatorRun] = []
        self.copied: list[tuple[int, int]] = []
        """Pairs of a moment and the array that is copied at this moment."""
        self.reused: list[ReusedBuffer] = []
        """Arrays whose buffer may be reused; at most one for each moment."""
        self._reuses: Event | None = None
        self._begin()
        for event in timeline.events:
            self._follow(event)
        self.alive = self._moments()
        """Bytes alive, before division; float [moments, kinds]."""

    @cached_property
    def gradients(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a gradient's index and the number of gradients that it represents.

        Gradients of equal bytes have one pair if every sharding divides them in the
        same way.
        """
        first: dict[object, int] = {}
        counts: Counter[int] = Counter()
        for index in self.timeline.gradients:
            num_bytes = self._graph.values[index].num_bytes
            key = self._gradient(index, "sums"), num_bytes
            counts[first.setdefault(key, index)] += 1
        return tuple(counts.items())

    def _begin(self) -> None:
        """Allocates the buffers that only a step with microbatches has.

        These are the sum of each gradient, and the current microbatch's part of each
        argument. The buffers stay allocated throughout the step.
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
        """Records the array whose buffer the value allocated last may take.

        Args:
            event: the event of kind `reuse`: the array with the buffer, and the dims of
                which a mesh axis must divide one for the reuse.
        """
        reused = ReusedBuffer(
            moment=self.full[-1],
            kind=self._kind(event.value),
            num_bytes=self._graph.values[event.value].num_bytes,
            rows=event.rows,
        )
        self.reused.append(reused)
        self._reuses = None

    def _follow_gradient(self, event: Event) -> None:
        """Counts the bytes of a gradient after one of its memory events, by category.

        Until a gradient is complete, its category is `kept` if a loop computes it part
        by part, else `gradient`. From then on its category is `waiting`. In a step with
        microbatches this category has no bytes, because the gradient is added to a sum.
        At ZeRO levels 2 and 3, `kept` and `waiting` are divided like the parameter
        between steps, and `gradient` is not. `What` lists all categories.
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
        # The gathers of all products that compute gradients run concurrently.
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
        """Records the operands of a matmul that an earlier matmul has read, too.

        XLA shares the gather of an operand between matmuls that run soon after each
        other (its pass `ScheduleAwareCollectiveOpsCSE`): the operand stays gathered for
        at most five further matmuls. Matmuls of the forward pass share no gather with
        each other. Matmuls of the backward pass share gathers with earlier ones of the
        backward pass, and with the last one of the forward pass.

        Args:
            operator: the matmul.
            run: the matmul's execution in the step.
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
        """Returns one number for all arrays that any sharding divides in the same way.

        Such arrays have equal shapes and dtypes. Numbers are given in the order of the
        calls, from 0.

        Args:
            index: the index of the array in `Graph.values`.
        """
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
        """Records that the bytes alive now may be the peak.

        Returns the number of this moment (a row of `alive`).
        """
        self._at.append(len(self._changes))
        return len(self._at) - 1

    def _moments(self) -> np.ndarray:
        changes = np.zeros((len(self._changes) + 1, len(self.kinds)))
        if self._changes:
            kinds, num_bytes = zip(*self._changes, strict=True)
            changes[np.arange(1, len(changes)), kinds] = num_bytes
        return changes.cumsum(axis=0)[self._at]


# Peaks. The bytes alive at a moment are a sum of totals, each divided by the sizes of
# some axes. All moments form a matrix. Its product with the reciprocal divisors of many
# meshes gives the bytes on all these meshes.


_Beside = tuple[int, Sequence[tuple[int, float]]]
"""A moment, and pairs: a total (column of `PeakModel.matrix`), and the bytes to add to
this total at the moment."""
_Total = tuple[What, Axes, int]
"""The key of a total, a sum of bytes: their category, the axes that divide them, and
the index of a value.

The value represents equal gradients that ZeRO divides further; -1 for other arrays.
"""
_MOST_ALONE = 2**17
"""Limit of the multiplications of one matrix product in `_product`. OpenBLAS uses one
thread for so few; from 2**18 it may use more."""
_OF_GRADIENTS = ("gradient", "kept", "waiting", "sums")


@dataclass(frozen=True, kw_only=True, eq=False)
class Peak:
    """Bytes of activations and of gradients at peak memory; one entry per mesh."""

    activations: np.ndarray
    gradients: np.ndarray


class PeakModel:
    """Sums the bytes in memory at each moment of a step that may be the peak.

    Bytes that the same mesh axes divide have one sum, a total. `matrix` has the bytes
    of each total at each moment, before division by the axes. The totals are those of
    one assignment of axes to dims (`division`), and are the same for all meshes.
    """

    def __init__(self, trace: LivenessTrace, division: ShardingAssignment) -> None:
        """Sums the trace's bytes by the axes that divide them.

        Args:
            trace: the liveness trace of the program.
            division: which axes divide which dims. The split of the batch into
                microbatches counts as an axis (`MICRO`).
        """
        self.trace, self.division = trace, division
        self._graph = trace.timeline.scheduled
        self.totals: dict[_Total, int] = {}
        """Map from a total (bytes that the same axes divide) to a `matrix` column."""
        self._gathers = [list(self._gathered(one)) for one in trace.instances]
        self._copies = [list(self._copied_rows(one)) for one in trace.instances]
        self.matrix = self._moments(self._columns(), list(self._beside()))
        """Bytes before division; float [moments, totals]."""

    def divisors(self) -> set[Axes]:
        """Returns the sets of axes that the peak depends on.

        Meshes for which each of these sets has an equal product of axis sizes have
        equal peaks.
        """
        found: set[Axes] = {(ZERO_AXIS,), (MICRO,)}
        for _, axes, index in self.totals:
            found.add(axes)
            if index >= 0:
                found.update(self.division.spec(self._graph.values[index]))
        return found - {()}

    def on(self, sizes: Sizes) -> "PeakEval":
        """Returns the object that computes the peak memory on the given meshes.

        Args:
            sizes: map from an axis to an array of its size on each mesh. The number of
                microbatches counts as the size of an axis (`MICRO`).
        """
        return PeakEval(self, sizes)

    def _columns(self) -> list[int]:
        """Lists for each kind of array the column of `matrix` that counts its bytes.

        A column counts one total. It is -1, which means that the kind is not counted,
        for the part of an argument for one microbatch if microbatches do not divide the
        argument.
        """
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
        """Yields the bytes of copies and gathered operands that `alive` does not count.

        Each entry has a moment (row of `LivenessTrace.alive`), and pairs of a column of
        `matrix` and the bytes to add there, before division by mesh axes. The copies
        are those of transposed arrays and of the rows of ragged matmuls.
        """
        for moment, index in self.trace.copied:
            value = self._graph.values[index]
            axes = flat(self.division.spec(value))
            yield moment, [(self._total(("plain", axes, -1)), value.num_bytes)]
        before: list[tuple[int, float]] = []
        for run in self.trace.runs if any(self._gathers) or any(self._copies) else ():
            before = self._gathers[run.instance] + (before if run.beside else [])
            if before or self._copies[run.instance]:
                yield run.moment, before + self._copies[run.instance]

    def _gathered(self, operator: Instance) -> Iterator[tuple[int, float]]:
        for sent in operator.pattern.work(operator.key(self.division)).sent:
            if sent.kind in ("all_gather", "all_to_all"):
                yield self._total(("plain", sent.amount.axes, -1)), sent.amount.total

    def _copied_rows(self, operator: Instance) -> Iterator[tuple[int, float]]:
        """Yields the copies that a ragged matmul makes of its rows for each group.

        A copy is given by the column of `matrix` that counts it, and its bytes before
        division by axes. Axes that divide the rows do not divide the copies, because
        the rows are gathered.
        """
        op, graph = operator.operator, self._graph
        if self.trace.timeline.has_ragged_matmul:
            return
        for place in operands_by_group(graph, op):
            value = graph.values[op.inputs[place]]
            axes = tuple(
                axis
                for dim, part in zip(value.dims, self.division.spec(value), strict=True)
                for axis in part
                if dim not in op.whole or axis == MICRO
            )
            copied = num_groups(graph, op) * value.num_bytes
            yield self._total(("plain", axes, -1)), copied

    def _moments(self, columns: Sequence[int], beside: Sequence[_Beside]) -> np.ndarray:
        """Computes `matrix`, the bytes of each total at each moment.

        The result is float [moments, totals]. A total is a sum of bytes that the same
        mesh axes divide; the bytes are those before the division.

        Args:
            columns: the total (column of `matrix`) of each kind of array; -1 for kinds
                that are not counted.
            beside: bytes of copies and gathered operands, which the trace does not
                count, by moment and column.
        """
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
        """Yields the moments at which an operand stays gathered for a later matmul.

        The moments are a range. With each range, yields the column of `matrix` that
        counts the operand, and the bytes of the operand before division by axes.
        """
        for reread in self.trace.rereads if any(self._gathers) else ():
            one, other = (self._gathers[instance] for instance in reread.instances)
            for total, num_bytes in one:
                if num_bytes == reread.num_bytes and (total, num_bytes) in other:
                    yield reread.moments, total, num_bytes

    def _total(self, total: _Total) -> int:
        return self.totals.setdefault(total, len(self.totals))


class PeakEval:
    """Computes the peak memory of a program on many meshes, at any ZeRO level."""

    def __init__(self, moments: PeakModel, sizes: Sizes) -> None:
        """Keeps its arguments; peaks are evaluated when they are first needed.

        Args:
            moments: the model of the program, under one division of dims by axes.
            sizes: map from an axis to an array of its size on each mesh. The number of
                microbatches counts as the size of an axis (`MICRO`).
        """
        self._moments, self._sizes = moments, sizes
        self._trace, self._division = moments.trace, moments.division
        self._values = moments.trace.timeline.scheduled.values
        self._places: dict[int, tuple[Spec, np.ndarray]] = {}

    def peak(self, zero: int) -> Peak:
        """Computes the bytes of activations and gradients when their sum is largest.

        The program's arguments are not counted, except their parts for one microbatch.

        Args:
            zero: ZeRO level.
        """
        most, held = (self._whole, self._sums_divided, self._divided)[min(zero, 2)]
        if zero in (1, 2):
            update = self._update
            held = np.where(update > most, update, held)
            most = np.maximum(most, update)
        if zero == 3 and not self._trace.timeline.flat_state:
            most = most + self._laid_anew()
        return Peak(activations=most - held, gradients=held)

    @cached_property
    def _whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Peak bytes, and bytes of gradients at that moment, at ZeRO level 0.

        Both arrays have one entry per mesh.
        """
        return self._fullest(self._shares)

    @cached_property
    def _sums_divided(self) -> tuple[np.ndarray, np.ndarray]:
        """Peak bytes, and bytes of gradients at that moment, at ZeRO level 1.

        Both arrays have one entry per mesh. The axis `fsdp` divides the sums of
        gradients over microbatches. No constraint of a plan asks for this: the loop
        over microbatches carries the sums, and XLA divides them like the optimizer
        state with which the update combines them.
        """
        return self._fullest(self._shares_divided(("sums",)))

    @cached_property
    def _divided(self) -> tuple[np.ndarray, np.ndarray]:
        """Peak bytes, and bytes of gradients at that moment, at ZeRO levels 2 and 3.

        Both arrays have one entry per mesh. The axis `fsdp` divides all gradients but
        those that are still being computed in one piece. Gradients that a loop computes
        part by part are divided.
        """
        return self._fullest(self._shares_divided(_OF_GRADIENTS))

    def _shares_divided(self, kinds: Container[What]) -> np.ndarray:
        """Computes the fraction of each total that is on one device, [totals, meshes].

        A total is a sum of bytes that the same axes divide. Gradients of the given
        categories are also divided by the axis `fsdp`, as ZeRO divides the parameters
        while no operator uses them. The result is float.

        Args:
            kinds: the categories, such as `sums`, the sums over microbatches (`What`
                lists all).
        """
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
        """The share of each total that one device has; float [totals, meshes].

        A total is a sum of bytes that the same axes divide (`PeakModel.totals`). Its
        share is 1 divided by the sizes of these axes, with three exceptions. Sums of
        gradients over microbatches (category `sums`), and parts of arguments for one
        microbatch (`part`), have share 0 on meshes with one microbatch. Complete
        gradients that wait for their use (`waiting`) have share 0 on meshes with
        several.
        """
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
        """Bytes of new parameters during the update of ZeRO levels 1 and 2, by mesh.

        Each device updates one part of every parameter, and then gathers the other
        parts. Old parameters are read until the last part is updated, so the gathered
        new parameters have buffers of their own. The part that is being updated has
        three buffers, counted as large as the part of the largest parameter. The result
        has one entry per mesh; it is 0 on meshes without `fsdp`.
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
        """Computes the bytes of transposed copies of gathered parameters.

        The bytes have one entry per mesh. If `fsdp` divides another dim than the first,
        XLA keeps a copy of a device's part with that dim first, from the first gather
        to the last. Flat buffers (`Timeline.flat_state`) have no such copies.
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
        """Finds the spec of a gradient, and the dim that ZeRO divides by `fsdp`.

        The spec is that of the gradient before ZeRO divides it. The dim is given by its
        position, as an array with one entry per mesh; -1 for a mesh where `fsdp`
        divides no dim.

        Args:
            index: the index of the gradient in `Graph.values`.
        """
        if index not in self._places:
            value, timeline = self._values[index], self._trace.timeline
            spec = self._division.spec(value)
            self._places[index] = (
                spec,
                rest_place(
                    value,
                    spec,
                    self._sizes,
                    timeline.loop_dims,
                    flat=timeline.flat_state,
                ),
            )
        return self._places[index]


def _product(matrix: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Computes matrix @ shares in parts that are so small that BLAS uses one thread.

    Several threads slow down a product of this size, up to a hundred times if other
    processes keep the cores busy.
    """
    found = np.empty((len(matrix), shares.shape[1]))
    step = max(1, _MOST_ALONE // max(1, matrix.size))
    for start in range(0, shares.shape[1], step):
        found[:, start : start + step] = matrix @ shares[:, start : start + step]
    return found
