"""Computes how much memory each of many candidate plans needs, in bytes per device.

A device's memory holds the state, the batch, and activations and gradients at the peak.
State that is offloaded to the host's memory is counted apart, as bytes of the host.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dtft.planner.cluster import Link
from dtft.planner.cost import Away, away, strided_s
from dtft.planner.ir import Value
from dtft.planner.memory import LivenessTrace, PeakModel, Timeline
from dtft.planner.search.price_table import (
    Cases,
    Columns,
    Message,
    Prices,
    Total,
    distinct,
)
from dtft.planner.search.ranking import MEMORY, Priced
from dtft.planner.search.space import Space
from dtft.planner.spmd import (
    MICRO,
    ZERO_AXIS,
    ZERO_BESIDE,
    Axes,
    Bundle,
    CollectiveOp,
    Gathered,
    ShardedSize,
    ShardingAssignment,
    flat,
    further_division,
    gather_bundle,
    loop_slices,
    parts,
    rest_place,
    times_gathered,
    turned_place,
    zero_leaves,
)
from dtft.planner.workload import Role, Workload

OnStages = Callable[
    [Space, np.ndarray, dict[str, np.ndarray]], Mapping[str, np.ndarray]
]
"""A function that computes the bytes on a device of a pipeline, by term.

Each term is that of the stage with the most bytes of it. The arguments are the space,
the indices of candidates, and the bytes by term as if each stage had all layers. The
function is `pipeline.Staged.memory`.
"""

# State between uses. Equal arrays of equal layers are evaluated once. `spmd.zero`
# selects the dim that `fsdp` divides, here for all sizes of axes together.


@dataclass(frozen=True, kw_only=True)
class Alike:
    """A group of arrays, such as the same parameter of equal layers.

    The arrays have one role (parameter, optimizer state or batch), equal shapes and
    dtypes, and dims that are divided by the same axes.
    """

    value: Value
    passes: int
    """The number of passes (forward, backward) that read each array."""
    changes: bool
    """Whether a step changes the arrays."""


class Resting:
    """Computes the bytes of state and batch, and the costs of gathering parameters.

    Each result has a number for each of many points; a point is a mesh and a number of
    microbatches. State is parameters and optimizer state. While an array is not used
    (at rest), ZeRO may divide it by one more axis, `fsdp`. For a use, an all-gather
    collects the pieces; its costs are seconds and bytes.
    """

    def __init__(self, prices: Prices) -> None:
        """Computes nothing yet; bytes and seconds are computed when first needed.

        Args:
            prices: computes the seconds of the workload's operators and collectives;
                `prices.columns` has the points.
        """
        self.prices = prices
        self._question: Workload = prices.question
        self._columns: Columns = prices.columns
        self._loops = self._question.loop_dims
        self._flat = self._question.software.flat_state
        self._gathers: dict[object, tuple[Cases, np.ndarray]] = {}
        self._places: dict[object, tuple[Cases, Axes, np.ndarray]] = {}

    @cached_property
    def arrays(self) -> Mapping[Role, Counter[Alike]]:
        """Map from a role to its groups of equal arrays, counted.

        The role is parameter, optimizer state or batch. The count of a group is the
        number of its arrays.
        """
        question, graph = self._question, self._question.graph
        found: dict[Role, Counter[Alike]] = {
            "parameter": Counter(), "optimizer": Counter(), "batch": Counter()
        }  # fmt: skip
        for path, role in question.roles.items():
            value = graph.values[graph.inputs[path]]
            dims = tuple(map(question.root, value.dims))
            alike = Alike(
                value=Value(shape=value.shape, dtype=value.dtype, dims=dims),
                passes=question.passes[path],
                changes=question.changes(path),
            )
            found[role][alike] += 1
        return found

    def num_bytes(
        self, role: Role, division: ShardingAssignment, divided: bool
    ) -> Total:
        """Computes the bytes on each device of all arrays of a role, for each point.

        A point is a mesh and a number of microbatches. For role `batch` the bytes are
        of all microbatches, because all are in memory from the start of a step.

        Args:
            role: which arrays: parameters, optimizer state or batch.
            division: which axes divide which dims while computing.
            divided: whether `fsdp` divides the arrays between uses.
        """
        total = Total()
        for cases, count, each in self.each(role, division, divided):
            total.add(cases, count * each)
        return total

    def each(
        self, role: Role, division: ShardingAssignment, divided: bool
    ) -> Iterator[tuple[Cases, int, np.ndarray]]:
        """Yields the bytes that `num_bytes` adds up, for each group of equal arrays.

        Each entry has a partition of the points (meshes with a number of microbatches)
        into cases that divide the arrays in the same way, the number of arrays in the
        group, and for each case the bytes of one array on a device.

        Args:
            role: which arrays: parameters, optimizer state or batch.
            division: which axes divide which dims while computing.
            divided: whether `fsdp` divides the arrays between uses.
        """
        for alike, count in self.arrays[role].items():
            cases, used, place = self._placed(alike.value, division)
            axes = tuple(axis for axis in used if axis != MICRO)
            there = parts(axes, cases.sizes) * np.ones(len(cases.first))
            if divided:
                there = there * np.where(place >= 0, cases.sizes[ZERO_AXIS], 1)
            yield cases, count, alike.value.num_bytes / there

    def gathers(
        self, division: ShardingAssignment, zero: int
    ) -> tuple[Total, dict[Bundle, Total]]:
        """Computes seconds or bytes of all-gathers of the parameters that ZeRO divides.

        Args:
            division: which axes divide which dims while computing.
            zero: ZeRO level.

        Returns:
            Two results, for each point (mesh and number of microbatches). The seconds
            per step of the all-gathers that are sent one by one. And for each bundle
            (all-gathers that the compiler may combine), the bytes of its gathered
            arrays on a device, each time that the bundle is sent. All-gathers in a
            bundle whose arrays are sent one by one are in both.
        """
        alone, together = Total(), dict[Bundle, Total]()
        platform = self._columns.pool.device.platform
        for alike, count in self.arrays["parameter"].items():
            num_slices = loop_slices(alike.value, self._loops)
            how = times_gathered(alike.passes, alike.changes, zero, num_slices)
            if not how.times:
                continue
            cases, used, place = self._placed(alike.value, division)
            part = ShardedSize(total=alike.value.num_bytes / how.slices, axes=used)
            sent = CollectiveOp(kind="all_gather", axes=(ZERO_AXIS,), amount=part)
            found = gather_bundle(platform, sent, how)
            if found is None or not found.is_one:
                alone.add(*self._gather(alike, division, sent, count, how))
            if found is not None:
                num_bytes = count * (place >= 0) * part.at(cases.sizes)
                together.setdefault(found, Total()).add(cases, num_bytes)
        return alone, together

    def copying_s(
        self, division: ShardingAssignment, points: np.ndarray, zero: np.ndarray
    ) -> np.ndarray:
        """Computes the seconds per step of copies that transpose gathered parameters.

        After an all-gather along the last dim, the elements of a row are apart in
        memory. A compiler that stores every array in the order of its dims then copies
        the array. The seconds are 0 if the device's figures have no time for an element
        that is read with a stride (`Efficiency.strided_s`).

        Args:
            division: which axes divide which dims while computing.
            points: index of each candidate's point (mesh and number of microbatches).
            zero: ZeRO level of each candidate.

        Returns:
            Float [candidates].
        """
        found = np.zeros(len(points))
        known = self._columns.pool.device.efficiency
        is_slower = known.strided_s > 0 or known.strided_large_s > 0
        for level in np.unique(zero).tolist() if is_slower else ():
            some = points[zero == level]
            often = self._columns.parts((MICRO,))[some] if level == 3 else 1
            found[zero == level] = often * self._turning_s(division, level).at(some)
        return found

    def _turning_s(self, division: ShardingAssignment, zero: int) -> Total:
        """Computes the seconds in which a device transposes gathered parameters.

        These are the parameters that ZeRO divides along their last dim of more than one
        element: an all-gather writes the pieces one after another, so the elements of a
        row are apart. The seconds, for each point (mesh and number of microbatches),
        are per microbatch at ZeRO level 3, and per step at other levels.
        """
        total, device = Total(), self._columns.pool.device
        for alike, count in self.arrays["parameter"].items():
            value = alike.value
            num_slices = loop_slices(value, self._loops)
            how = times_gathered(alike.passes, alike.changes, zero, num_slices)
            if not how.times:
                continue
            cases, used, place = self._placed(value, division)
            turned = turned_place(value)
            part = ShardedSize(total=value.size, axes=used).at(cases.sizes)
            array_bytes = part * value.num_bytes / max(value.size, 1) / num_slices
            seconds = strided_s(device, count * how.times * part, array_bytes)
            total.add(cases, seconds * ((place == turned) & (place >= 0)))
        return total

    def _gather(
        self,
        alike: Alike,
        division: ShardingAssignment,
        sent: CollectiveOp,
        count: int,
        how: Gathered,
    ) -> tuple[Cases, np.ndarray]:
        """Computes the seconds per step of gathering equal arrays one by one.

        Sync skew is left out. The seconds are 0 where ZeRO does not divide the arrays.
        The result has a partition of the points (meshes with a number of microbatches)
        into cases, and the seconds of all arrays together for each case.

        Args:
            alike: the group of equal arrays.
            division: which axes divide which dims while computing.
            sent: the all-gather of one array, or of one of the parts of `how`.
            count: the number of arrays in the group.
            how: how often each array is gathered, and in how many parts (one for each
                iteration of a loop that slices it).
        """
        key = alike, division.spec(alike.value), how
        if key not in self._gathers:
            placed, _, place = self._placed(alike.value, division)
            repeats: tuple[Axes, ...] = ((MICRO,),) if how.per_microbatch else ()
            message = Message(sent=sent, repeats=repeats, meets=False, ahead=how.ahead)
            sending, seconds = self.prices.rates.sending([message])[0]
            seconds = count * how.messages * seconds
            if not (place >= 0).all():
                both = self._columns.together([placed, sending])
                there = place[placed.of[both.first]] >= 0
                seconds = seconds[sending.of[both.first]] * there
                sending = both
            self._gathers[key] = sending, seconds
        return self._gathers[key]

    def sums(
        self, division: ShardingAssignment
    ) -> tuple[list[ShardingAssignment], np.ndarray]:
        """Finds how gradients are divided at ZeRO levels 2 and 3, for each point.

        A gradient is divided as level 3 divides its parameter between uses. The dim
        that `fsdp` divides depends on the point (mesh and number of microbatches).

        Args:
            division: which axes divide which dims while computing.

        Returns:
            The distinct results, and for each point the index of its result, int
            [points]. A result is a copy of `division` in which two fields are set.
            `rest` has the axes that divide gradients, but not their parameters in use.
            `spare` has `tensor` if it is larger than one: along it devices repeat
            operators that it does not divide.
        """
        values = {str(n): one.value for n, one in enumerate(self.arrays["parameter"])}
        placed = [self._placed(value, division) for value in values.values()]
        if not placed:
            return [division], np.zeros(len(self._columns), np.int64)
        by_weights = self._columns.sizes[ZERO_BESIDE] > 1
        places = [place[cases.of] + 1 for cases, _, place in placed]
        first, of = distinct([by_weights.astype(np.int64), *places])
        divisions = []
        for point in first:
            sizes = {axis: int(c[point]) for axis, c in self._columns.sizes.items()}
            leaves = zero_leaves(
                values, division, sizes, True, self._loops, flat=self._flat
            )
            rest = further_division(leaves, division, self._loops)
            spare = (ZERO_BESIDE,) if by_weights[point] else ()
            divisions.append(replace(division, rest=rest, spare=spare))
        return divisions, of

    def _placed(
        self, value: Value, division: ShardingAssignment
    ) -> tuple[Cases, Axes, np.ndarray]:
        """Finds the axes that divide an array in use, and the dim that ZeRO divides.

        ZeRO divides this dim by the axis `fsdp` between uses of the array.

        Returns:
            A partition of the points (meshes with a number of microbatches) into cases,
            the axes, and for each case the position of the dim, -1 if `fsdp` can divide
            no dim. In all points of a case, each dim of the array is divided into
            equally many pieces, and `fsdp` has the same size.
        """
        spec = division.spec(value)
        key = value, spec
        if key not in self._places:
            divisors, used = {axes for axes in spec if axes}, flat(spec)
            whole = tuple(axis for axis in used if axis != MICRO)
            cases = self._columns.divided({*divisors, used, whole, (ZERO_AXIS,)})
            place = rest_place(value, spec, cases.sizes, self._loops, flat=self._flat)
            self._places[key] = cases, used, place
        return self._places[key]


# Offload. Operators do not depend on the place of the optimizer state. So an offloaded
# candidate has the price of its twin with the state on the device, plus the transfers
# of its arrays.


def offloaded(
    priced: Priced, resting: Resting, link: Link, on_stages: OnStages | None = None
) -> Priced:
    """Returns candidates with their optimizer state moved to host memory.

    Recomputes their bytes on the device, their bytes in host memory, and the seconds
    that the copies between host and device add to a step.

    Args:
        priced: candidates that keep their optimizer state on the device.
        resting: bytes of the workload's arrays, for the meshes of these candidates.
        link: the link from a device to its host's memory.
        on_stages: the function that computes the bytes of pipeline stages; needed if a
            candidate has several stages.
    """
    space = priced.space.with_offload()
    host, seconds, less = (np.zeros(len(space)) for _ in range(3))
    for number, division in enumerate(priced.divisions):
        rows = np.flatnonzero(priced.division == number)
        if len(rows):
            moved = _away(space, resting, link, division, rows)
            host[rows], seconds[rows] = moved.host_bytes, moved.seconds
            less[rows] = moved.host_bytes - moved.device_bytes
    if on_stages is not None:
        every = np.arange(len(space))
        whole = {name: less if name == "optimizer" else 0.0 * less for name in MEMORY}
        less = on_stages(space, every, whole)["optimizer"]
    memory = {**priced.memory, "optimizer": priced.memory["optimizer"] - less}
    return replace(
        priced,
        space=space,
        terms={**priced.terms, "offload": seconds},
        memory=memory,
        host=host,
    )


def _away(
    space: Space,
    resting: Resting,
    link: Link,
    division: ShardingAssignment,
    rows: np.ndarray,
) -> Away:
    """Computes what offload costs candidates that share one division.

    Offload keeps the optimizer state in host memory, and copies it to the device during
    the update. The result (`Away`) has the bytes in host memory, the bytes on the
    device for the copies, and the seconds that the copies add to a step; [rows] each.

    Args:
        space: the candidates.
        resting: bytes of the workload's arrays, for the meshes of the candidates.
        link: the link from a device to its host's memory.
        division: which axes divide which dims while computing.
        rows: indices of the candidates that share the division.
    """
    points = resting.prices.columns.of[rows]
    divided = space.columns["zero"][rows] >= 1

    def arrays() -> Iterator[tuple[int, np.ndarray]]:
        whole, parts = (
            resting.each("optimizer", division, part) for part in (False, True)
        )
        for (cases, count, each), (_, _, part) in zip(whole, parts, strict=True):
            at = cases.of[points]
            yield count, np.where(divided, part[at], each[at])

    return away(link, arrays())


# Peak memory. The ZeRO level selects the liveness trace (`LivenessTrace`). One
# `PeakModel` serves all candidates with the same sharding.


class Peaks:
    """Peak memory of one program, under any division of its dims by mesh axes."""

    def __init__(self, timeline: Timeline) -> None:
        """Stores the timeline; the lifetimes of arrays are traced when first needed.

        Args:
            timeline: the allocations, frees and copies of one step of the program.
        """
        self._timeline = timeline

    def of(
        self,
        division: ShardingAssignment,
        columns: Columns,
        points: np.ndarray,
        zero: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Computes the bytes of activations and gradients on a device at peak memory.

        Args:
            division: which axes divide which dims, for all candidates.
            columns: the sizes of axes of each point (mesh and number of microbatches).
            points: the index of each candidate's point; int [candidates].
            zero: the ZeRO level of each candidate; int [candidates].

        Returns:
            Map with the keys `activations` and `gradients`; float [candidates] each.
        """
        traces = {self._trace: zero < 3}
        if (zero == 3).any():
            last = self._trace_at_level_3
            traces[last] = traces.get(last, False) | (zero == 3)
        found = {name: np.zeros(len(points)) for name in ("activations", "gradients")}
        for trace, some in traces.items():
            peaks = _peaks(
                PeakModel(trace, division), columns, points[some], zero[some]
            )
            found["activations"][some], found["gradients"][some] = peaks
        return found

    @cached_property
    def _trace(self) -> LivenessTrace:
        return LivenessTrace(self._timeline)

    @cached_property
    def _trace_at_level_3(self) -> LivenessTrace:
        timeline = self._timeline.at_level_3
        return self._trace if timeline is self._timeline else LivenessTrace(timeline)


def _peaks(
    moments: PeakModel, columns: Columns, points: np.ndarray, zero: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the bytes of activations and of gradients on a device at peak memory.

    Args:
        moments: the model of the program's memory, under one division of dims by axes.
        columns: the sizes of axes of each point (mesh and number of microbatches).
        points: the index of each candidate's point; int [candidates].
        zero: the ZeRO level of each candidate; int [candidates].

    Returns:
        Bytes of activations, and bytes of gradients; float [candidates] each.
    """
    alike = columns.divided(moments.divisors()).of[points]
    first, of = distinct([alike])
    sizes = {axis: column[points[first]] for axis, column in columns.sizes.items()}
    highest = moments.on(sizes)
    found = np.zeros((2, len(points)))
    for level in np.unique(zero).tolist():
        some, peak = zero == level, highest.peak(level)
        found[:, some] = peak.activations[of[some]], peak.gradients[of[some]]
    return found[0], found[1]
