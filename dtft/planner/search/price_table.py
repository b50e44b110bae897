"""Prices operators for many candidates at once; equal cases are priced once.

The prices of an operator are its seconds of computing, and the seconds and bytes of its
collectives. A quantity that depends on the sizes of few mesh axes is evaluated once for
all candidates with equal sizes of these axes (a case), and looked up for each
candidate.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from dtft.planner.cluster import CollectiveKind, Pool
from dtft.planner.cost import (
    DeviceGroups,
    collectives_s,
    computing_s,
    hiddens,
    members,
    sync_skews_s,
)
from dtft.planner.ir import CHEAP, Graph, OpGroup
from dtft.planner.search.space import Space
from dtft.planner.software import XLA, Software
from dtft.planner.spmd import (
    MICRO,
    Bundle,
    CollectiveOp,
    Instance,
    OperatorWork,
    Pattern,
    PatternKey,
    ShardingAssignment,
    bundle,
    instance,
    messages,
    parts,
)
from dtft.planner.types import AXES
from dtft.planner.workload import Workload

# Cases. A price depends on few properties of a candidate: the seconds of a matmul on
# the division of its sides, the seconds of a collective on its group and its bytes.
# Candidates with the same price form one case.


Axes = tuple[str, ...]
_FRACTION = 2**20
"""Device groups are equal if their numbers of members, times this factor, round alike.

The number of members of a group on a level of the fabric may be a fraction."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cases:
    """A partition of points into cases, such as points with equal sizes of some axes.

    A point is a mesh (with the order of its axes) and a number of microbatches. The
    points of a case agree in the properties that a quantity depends on.
    """

    first: np.ndarray
    """The first point of each case; int [cases]."""
    of: np.ndarray
    """The case of each point; int [points]."""
    sizes: Mapping[str, np.ndarray]
    """Sizes of the axes, and microbatches, of the first point of each case; int [cases]
    each. Other points of a case share only the properties that define the case."""


class Columns:
    """The points of a space: its distinct pairs of mesh and number of microbatches.

    Meshes that differ only in the order of their axes on the fabric are distinct. The
    work of a device in its operators depends only on the point and on the division of
    dims by axes. A new knob that changes this work must become a part of the point.
    `search` adds the effects of all other knobs.
    """

    def __init__(self, pool: Pool, space: Space) -> None:
        """Finds the points (distinct meshes and numbers of microbatches) of a space.

        Args:
            pool: the devices.
            space: the candidates.
        """
        self.pool = pool
        self.first, self.of = distinct(
            [space.columns["mesh"], space.columns["microbatches"]]
        )
        """`first`: a candidate of each point. `of`: the point of each candidate."""
        known = space.where(self.first)
        self.sizes: dict[str, np.ndarray] = {a: known.columns[a] for a in AXES}
        self.sizes[MICRO] = known.columns["microbatches"]
        self._order, self._orders = known.columns["order"], space.orders
        self._meshes, self._mesh = distinct([known.columns["mesh"]])
        self._parts: dict[Axes, np.ndarray] = {}
        self._lies: dict[Axes, tuple[np.ndarray, DeviceGroups]] = {}
        self._all_lie: dict[
            tuple[Axes, ...], tuple[list[np.ndarray], DeviceGroups]
        ] = {}
        self._cases: dict[object, Cases] = {}

    def __len__(self) -> int:
        return len(self.first)

    def parts(self, axes: Axes) -> np.ndarray:
        """Returns the product of the sizes of several axes by point; int64 [points].

        A point is a mesh and a number of microbatches. The number of microbatches
        counts as the size of an axis (`MICRO`).
        """
        if axes not in self._parts:
            ones = np.ones(len(self), np.int64)
            self._parts[axes] = ones * parts(axes, self.sizes)
        return self._parts[axes]

    def lies(self, axes: Axes) -> tuple[np.ndarray, DeviceGroups]:
        """Finds the device group of a collective over some axes, for each point.

        A point is a mesh and a number of microbatches. A group is given by the number
        of parts that each level of the fabric joins (`DeviceGroup.sizes`).

        Args:
            axes: the axes of the collective.

        Returns:
            The index of each point's group, int [points]; and the distinct groups.
        """
        if axes not in self._lies:
            of, groups = self._groups(axes)
            self._lies[axes] = of[self._mesh], groups
        return self._lies[axes]

    def all_lie(self, several: Iterable[Axes]) -> tuple[list[np.ndarray], DeviceGroups]:
        """Finds the device groups of collectives over each of several sets of axes.

        A group is given by the number of parts that each level of the fabric joins
        (`DeviceGroup.sizes`). The groups of all sets are numbered together.

        Args:
            several: the sets of axes; not empty.

        Returns:
            For each set, the index of each point's group, int [points]; and the groups
            of all sets, to which the indices refer.
        """
        key = tuple(several)
        if key not in self._all_lie:
            number = {axes: at for at, axes in enumerate(dict.fromkeys(key))}
            known = [self.lies(axes) for axes in number]
            sizes = [groups.sizes for _, groups in known]
            starts = np.cumsum([0, *map(len, sizes)])
            of = [one + start for (one, _), start in zip(known, starts, strict=False)]
            groups = DeviceGroups(sizes=np.concatenate(sizes), links=known[0][1].links)
            self._all_lie[key] = [of[number[axes]] for axes in key], groups
        return self._all_lie[key]

    def _groups(self, axes: Axes) -> tuple[np.ndarray, DeviceGroups]:
        """Finds the device groups of a collective over some axes, for each mesh.

        Returns the index of each mesh's group, int [meshes]; and the distinct groups. A
        group is given by the number of parts that each level of the fabric joins.
        """
        levels = tuple(level.size for level in self.pool.levels)
        sizes = np.ones((len(self._meshes), len(levels)))
        for number, order in enumerate(self._orders):
            rows = np.flatnonzero(self._order[self._meshes] == number)
            chosen = [axis in axes for axis in order]
            if len(rows) and any(chosen):
                points = self._meshes[rows]
                mesh = np.stack([self.sizes[axis][points] for axis in order], axis=1)
                sizes[rows] = members(levels, mesh, chosen)
        scaled = np.round(sizes * _FRACTION).astype(np.int64)
        nothing = np.zeros(len(sizes), np.int64)  # a pool of one device
        first, of = distinct([nothing, *scaled.T])
        links = tuple(level.link for level in self.pool.levels)
        return of, DeviceGroups(sizes=sizes[first], links=links)

    def divided(self, divisors: Iterable[Axes]) -> Cases:
        """Partitions the points into cases by products of the sizes of axes.

        A point is a mesh and a number of microbatches. Each entry of `divisors` is a
        set of axes that divide one quantity, such as the rows of an array. They divide
        it by the product of their sizes at the point. Two points are in one case if
        each entry has the same product at both.
        """
        key = frozenset(divisors)
        return self._known(key, lambda: [self.parts(axes) for axes in sorted(key)])

    def sending(self, axes: Axes, divisors: Iterable[Axes]) -> Cases:
        """Partitions the points into cases in which a collective takes equally long.

        A point is a mesh and a number of microbatches. Two points are in one case if a
        collective over `axes` has the same device group at both (`lies`), and if the
        sizes of each set of axes in `divisors` have the same product. One set divides
        the bytes of the collective; another may give the number of its sends.
        """
        key = frozenset(divisors)
        columns = [self.parts(each) for each in sorted(key)]
        return self._known((axes, key), lambda: [self.lies(axes)[0], *columns])

    def together(self, cases: Iterable[Cases]) -> Cases:
        """Computes the common refinement of several partitions of the points.

        Points share a case of the result if they share a case in each partition.
        """
        return self._made(*distinct([one.of for one in cases] or [self.of[:0]]))

    def _known(self, key: object, columns: Callable[[], list[np.ndarray]]) -> Cases:
        if key not in self._cases:
            found = columns() or [np.zeros(len(self), np.int64)]
            self._cases[key] = self._made(*distinct(found))
        return self._cases[key]

    def _made(self, first: np.ndarray, of: np.ndarray) -> Cases:
        sizes = {axis: column[first] for axis, column in self.sizes.items()}
        return Cases(first=first, of=of, sizes=sizes)


class Total:
    """A number for each point (mesh and number of microbatches), as a sum of tables.

    A table has one number for each case of its own partition of the points. In the
    example, point 1 is in case 1 of both partitions, so its number is 1 + 10.

    >>> even, third = (Cases(first=np.arange(n), of=np.arange(6) % n, sizes={})
    ...                for n in (2, 3))
    >>> total = Total()
    >>> total.add(even, np.array([0.0, 1.0]))
    >>> total.add(third, np.array([0.0, 10.0, 20.0]))
    >>> total.at(np.arange(6)).tolist()
    [0.0, 11.0, 20.0, 1.0, 10.0, 21.0]
    """

    def __init__(self) -> None:
        """Starts at zero."""
        self.tables: dict[Cases, np.ndarray] = {}

    def add(self, cases: Cases, values: np.ndarray) -> None:
        """Adds a table: each point's sum grows by the value of the point's case.

        Args:
            cases: a partition of the points into cases.
            values: the value of each case.
        """
        known = self.tables.get(cases)
        self.tables[cases] = values if known is None else known + values

    def at(self, points: np.ndarray) -> np.ndarray:
        """Returns the sums at points with the given indices; float [points]."""
        found = np.zeros(len(points))
        for cases, values in self.tables.items():
            found += values[cases.of[points]]
        return found


def distinct(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the distinct rows of a table, which is given by its columns.

    Returns:
        The index of the first row with each number, and the number of each row.

    In the example, the last row (1, 5) equals the first.

    >>> distinct([np.array([1, 1, 2, 1]), np.array([5, 6, 5, 5])])
    (array([0, 1, 2]), array([0, 1, 2, 0]))
    """
    number, bound = _numbered(columns[0])
    for column in columns[1:]:
        values, size = _numbered(column)
        number, bound = _numbered(number * size + values)
    first = np.zeros(bound, np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]  # the first row is last to stay
    return first, number


def _numbered(column: np.ndarray) -> tuple[np.ndarray, int]:
    """Replaces each value by its rank among the distinct values, from 0.

    Also returns the number of distinct values.
    """
    top = int(column.max(initial=0)) if column.dtype.kind == "i" else 0
    small = 0 < top < _SPARSE * len(column) and column.min() >= 0
    if not small:
        values, number = np.unique(column, return_inverse=True)
        return number, len(values)
    there = np.zeros(top + 1, bool)
    there[column] = True
    number = np.cumsum(there) - 1
    return number[column], int(number[-1]) + 1


_SPARSE = 16
"""A column of non-negative ints is numbered by a lookup table if its largest value is
below this many times the number of rows; other columns are sorted."""


# Rates. Programs with different remat policies share most operators, and many operators
# have equal collectives, so each operator and collective is priced once.


_BITS = (*AXES, MICRO)
Table = tuple[Cases, np.ndarray]
"""A partition of the points into cases, and a number for each case."""
Repeats = tuple[Axes, ...]
"""Axes over which work is repeated: `((MICRO,),)` for each microbatch, () for once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A collective whose seconds are computed.

    `sent` is the collective, `repeats` says how often it is sent: `((MICRO,),)` for
    once per microbatch, () for once per step.
    """

    sent: CollectiveOp
    repeats: Repeats
    meets: bool = True
    """Whether the price includes sync skew (`cost.sync_skews_s`: the time that devices
    wait for each other). Otherwise the price of the collective's bundle includes it."""
    ahead: bool = False
    """Whether the collective depends on no computation; computation then hides a part
    of its time."""


class Rates:
    """A cache that computes the seconds of operators and collectives for each point.

    A point is a mesh and a number of microbatches, an entry of `columns`. Programs with
    different remat policies can share one object.
    """

    def __init__(self, columns: Columns) -> None:
        """Starts with an empty cache.

        Args:
            columns: the points (meshes with a number of microbatches) for which seconds
                are computed.
        """
        self.columns = columns
        self._computing: dict[Hashable, Table] = {}
        self._sending: dict[Message, Table] = {}
        self._axes_used: dict[Axes, np.ndarray] = {}

    def repeats(self, repeats: Repeats) -> Table:
        """Computes how often work is done in a step, for each point.

        This is the number of microbatches, or 1. The result has a partition of the
        points (meshes with a number of microbatches) into cases, and the number of
        executions for each case.

        Args:
            repeats: `((MICRO,),)` for work that is done for each microbatch, () for
                work that is done once in a step.
        """
        cases = self.columns.divided(repeats)
        times = np.ones(len(cases.first))
        for axes in repeats:
            times = times * self.columns.parts(axes)[cases.first]
        return cases, times

    def computing(
        self,
        graph: Graph,
        key: Hashable,
        done: OperatorWork,
        *,
        cold: bool,
        moved: float,
    ) -> Table:
        """Computes the seconds per step of an operator on a device, for each point.

        Counts one execution in a step, or one execution for each microbatch if
        microbatches divide the operator's work. The result has a partition of the
        points (meshes with a number of microbatches) into cases, and the seconds for
        each case.

        Args:
            graph: the program with the operator.
            key: cache key (`Works.pattern`). Operators with equal keys, flops and
                numbers of strided elements must have equal work.
            done: the work of a device in one execution of the operator.
            cold: whether the operator reads bytes that are not in a cache of the
                device; see `computing_s`.
            moved: bytes that the operator's kernels read and write in memory, per byte
                of its operands and results.
        """
        one = done.operator
        key = key, one.flops, one.special, one.strided, one.turned, cold, moved
        if key not in self._computing:
            columns, repeats = self.columns, repeats_of(done)
            amounts = done.sizes or (*done.reads, *done.writes, done.flops)
            amounts += done.sides or ()
            amounts += done.reads[:1] if one.strided else ()
            divisors = {*repeats, *(amount.axes for amount in amounts)}
            divisors |= {done.turned_by} if done.turned_by else set()
            cases = columns.divided(divisors)
            device = columns.pool.device
            seconds = computing_s(
                graph, device, done, cases.sizes, cold=cold, moved=moved
            )
            for axes in repeats:
                seconds = seconds * columns.parts(axes)[cases.first]
            self._computing[key] = cases, seconds * np.ones(len(cases.first))
        return self._computing[key]

    def sending(self, asked: Sequence[Message]) -> list[Table]:
        """Computes the seconds per step of each collective, for each point.

        If a collective is sent for each microbatch (`Message.repeats`), these are the
        seconds of all its sends together; otherwise those of its only send. Each result
        has a partition of the points (meshes with a number of microbatches) into cases,
        and the seconds for each case.
        """
        alike: dict[object, list[Message]] = defaultdict(list)
        for one in dict.fromkeys(asked):
            if one not in self._sending:
                sent = one.sent
                key = sent.kind, sent.axes, sent.amount.axes, one.repeats
                alike[key].append(one)
        for some in alike.values():
            self._sending |= zip(some, self._priced(some), strict=True)
        return [self._sending[one] for one in asked]

    def _priced(self, alike: Sequence[Message]) -> Iterable[Table]:
        """Computes the seconds per step of several collectives, all at once.

        The collectives have one kind, the same axes, bytes divided by the same axes,
        and equal `Message.repeats`. They may differ in their bytes, in whether sync
        skew is included (`Message.meets`), and in whether computation hides a part of
        their time (`Message.ahead`).

        Yields for each collective a partition of the points into cases, and the seconds
        for each case.
        """
        sent, repeats = alike[0].sent, alike[0].repeats
        cases = self.columns.sending(sent.axes, {*repeats, sent.amount.axes})
        of, groups = self.columns.lies(sent.axes)
        which = of[cases.first]
        totals = np.array([[one.sent.amount.total] for one in alike])
        num_bytes = totals / self.columns.parts(sent.amount.axes)[cases.first]
        seconds = collectives_s(sent.kind, num_bytes, groups, which)
        meets = np.array([[one.meets] for one in alike])
        ahead = np.array([[one.ahead] for one in alike])
        seconds = seconds * (1 - ahead * hiddens(groups)[which])
        seconds = seconds + meets * sync_skews_s(groups)[which]
        for axes in repeats:
            seconds *= self.columns.parts(axes)[cases.first]
        for row in seconds:
            yield cases, row

    def together_s(
        self, asked: Sequence[tuple[Mapping[Bundle, Total], np.ndarray]]
    ) -> list[np.ndarray]:
        """Computes the seconds per step of bundles, without arrays sent one by one.

        A bundle is a set of collectives that the compiler may combine. For a bundle
        that is sent as one message, counts its transfer and its sync skew (seconds that
        devices wait for each other). For a bundle whose arrays are sent one by one,
        counts only its sync skew; the method `sending` computes the transfers. A bundle
        that depends on no computation has no sync skew.

        Args:
            asked: entries to price at once, which is faster than one by one. Each has
                bundles, with the bytes that a device sends each time, and indices of
                the points (meshes with a number of microbatches) to price them at.

        Returns:
            For each entry of `asked` the seconds on its points; float [points].
        """
        found = [np.zeros(len(points)) for _, points in asked]
        joined = [
            (number, one)
            for number, (together, points) in enumerate(asked)
            for one in self._joined(together, points)
        ]
        each_s = self._each_s([one for _, one in joined])
        for (number, _), seconds in zip(joined, each_s, strict=True):
            found[number] += seconds
        return found

    def _each_s(self, joined: Sequence["_Joined"]) -> list[np.ndarray]:
        """Computes the seconds per step of each bundle at each of its points.

        A bundle is a set of collectives that the compiler may combine, a point a mesh
        and a number of microbatches. All bundles of one kind of collective are computed
        at once. The seconds include transfers and sync skew as in `together_s`.
        """
        columns, platform = self.columns, self.columns.pool.device.platform
        found = [np.zeros(0)] * len(joined)
        kinds: set[CollectiveKind] = {one.bundle.kind for one in joined}
        for kind in kinds:
            places = [at for at, one in enumerate(joined) if one.bundle.kind == kind]
            some = [joined[at] for at in places]
            of, groups = columns.all_lie([one.bundle.axes for one in some])
            which = [lie[one.points] for lie, one in zip(of, some, strict=True)]
            num_bytes = np.concatenate([one.num_bytes for one in some])
            lies, num = np.concatenate(which), np.ones(len(num_bytes))
            waits = [np.full(len(one.points), not one.bundle.ahead) for one in some]
            each = sync_skews_s(groups)[lies] * np.concatenate(waits) * (num_bytes > 0)
            if some[0].bundle.is_one:
                num = messages(platform, kind, num_bytes)
                each += collectives_s(kind, num_bytes / num, groups, lies)
            ends = np.cumsum([len(one.points) for one in some])[:-1]
            parts = np.split(num, ends), np.split(each, ends)
            for at, one, times, seconds in zip(places, some, *parts, strict=True):
                micro = columns.parts((MICRO,))[one.points]
                often = micro if one.bundle.repeated else 1
                found[at] = one.bundle.times * often * times * seconds
        return found

    def _joined(
        self, together: Mapping[Bundle, Total], points: np.ndarray
    ) -> list["_Joined"]:
        """Computes the bytes of each bundle (combined collectives) at the given points.

        If two bundles may be combined (`Bundle.joins`) and use the same axes at a
        point, the first bundle gets the bytes of both at this point, and the second
        bundle gets 0.

        Args:
            together: for each bundle, the bytes that a device sends each time that the
                bundle is sent.
            points: indices of points (meshes with a number of microbatches).
        """
        found: list[tuple[_Joined, np.ndarray]] = []
        for one, total in together.items():
            num_bytes = total.at(points)
            used = self._used((*one.axes, MICRO) if one.repeated else one.axes)[points]
            for before, known in found:
                if before.bundle.joins(one):
                    same = used == known
                    known_bytes = before.num_bytes
                    known_bytes += np.where(same, num_bytes, 0.0)
                    num_bytes = np.where(same, 0.0, num_bytes)
            joined = _Joined(bundle=one, points=points, num_bytes=num_bytes)
            found.append((joined, used))
        return [joined for joined, _ in found]

    def _used(self, names: Axes) -> np.ndarray:
        """Returns for each point a bit mask of axes larger than one; int [points].

        Args:
            names: the axes to test; the bits of all other axes are 0.
        """
        if names not in self._axes_used:
            used = np.zeros(len(self.columns), np.int64)
            for axis in names:
                bit = 1 << _BITS.index(axis)
                used += np.where(self.columns.sizes[axis] > 1, bit, 0)
            self._axes_used[names] = used
        return self._axes_used[names]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Joined:
    """The bytes of a bundle (combined collectives) each time it is sent, by point.

    `points` has indices of points (meshes with a number of microbatches), `num_bytes`
    the bytes at each of them.
    """

    bundle: Bundle
    points: np.ndarray
    num_bytes: np.ndarray


def repeats_of(done: OperatorWork) -> Repeats:
    """Returns whether an operator runs once per microbatch or once per step.

    Returns `((MICRO,),)` (once per microbatch) if microbatches divide the operator's
    work, otherwise () (once per step).
    """
    return ((MICRO,),) if MICRO in done.divided_by else ()


# Works. Two shardings that divide the dims of a group in the same way give it the same
# work. This holds across clusters and pins too.


GroupKey = tuple[int, PatternKey]
"""Index of a group in `Workload.groups`, and the part of a division (which axes divide
which dims) that the work of the group's operator depends on."""

_KNOWN: WeakKeyDictionary[Workload, "Works"] = WeakKeyDictionary()


def works_of(question: Workload) -> "Works":
    """Returns the object that computes the work of a workload's operators.

    It is the same object on every call, so that its cache is shared.
    """
    if question not in _KNOWN:
        _KNOWN[question] = Works(question)
    return _KNOWN[question]


class Works:
    """Computes and caches the work of a device in each group of operators.

    A group has operators of equal cost, or operators that XLA fuses (`OpGroup`). It is
    given by its index in `Workload.groups`. The work depends on the division: which
    mesh axes divide which dims.
    """

    def __init__(self, question: Workload) -> None:
        """Starts with an empty cache."""
        # A reference to the workload would keep it alive in `_KNOWN` forever.
        self._graph, self._alias = question.graph, question.alias
        self._groups = question.groups
        self._known: dict[GroupKey, OperatorWork] = {}

    def dims(self, number: int) -> tuple[int, ...]:
        """Returns the dims of the operator that represents a group.

        A dim of a repeated layer is replaced by the one that stands for it in all equal
        layers, so that operators of equal layers have the same dims.

        Args:
            number: the index of the group in `Workload.groups`.
        """
        return self._instances[number].dims

    def key(self, number: int, division: ShardingAssignment) -> GroupKey:
        """Returns the cache key of a group's work; equal keys mean equal work.

        Args:
            number: the index of the group in `Workload.groups`.
            division: which mesh axes divide which dims.
        """
        return number, self._instances[number].key(division)

    def pattern(self, key: GroupKey) -> tuple[Pattern, PatternKey]:
        """Returns a key that is equal for groups whose operators differ only in dims.

        The key is the pattern of the group's operator (the operator with its dims
        renumbered from 0), and the part of the division that its work depends on. So
        two groups have equal keys only if the same axes divide corresponding dims. The
        numbers of operations may still differ.

        Args:
            key: the cache key of a group and a division, from the method `key`.
        """
        return self._instances[key[0]].pattern, key[1]

    def at(self, key: GroupKey) -> OperatorWork:
        """Returns the work of a device in one execution of a group's operator.

        Args:
            key: the cache key of a group and a division, from the method `key`.
        """
        if key not in self._known:
            self._known[key] = self._instances[key[0]].work(key[1])
        return self._known[key]

    @cached_property
    def _instances(self) -> list[Instance]:
        def root(dim: int) -> int:
            return self._alias.get(dim, dim)

        return [instance(self._graph, one.operator, root) for one in self._groups]


# Priced operators. Candidates share them: `tensor_sharding` and the sums of the search
# read the same tables.


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedOp:
    """Seconds and bytes of a group of operators, for each point.

    A group has operators of equal cost, or operators that XLA fuses (`OpGroup`). A
    point is a mesh and a number of microbatches. The figures hold for one division of
    the operators' dims by mesh axes.
    """

    group: OpGroup
    work: OperatorWork
    computing: Table
    """Seconds per step that each device computes the operators."""
    sending: tuple[Table, ...]
    """Seconds per step of each collective, as if sent alone. If the collective has a
    bundle, sync skew (devices wait for each other) is left out."""
    starts: Table
    """The number of operators launched in a step; 0 if they are fused into others."""
    bundles: tuple[tuple[Bundle, Table] | None, ...]
    """For each collective, the bundle (collectives that may be combined) with which it
    is sent, and its bytes each time the bundle is sent; None if it is sent alone."""

    @property
    def seconds(self) -> tuple[Table, ...]:
        """Tables of seconds per step, of computing and of each collective."""
        return (self.computing, *self.sending)


class Prices:
    """Computes the prices of a workload's groups of operators, for each point.

    Prices are the seconds of computing, and the seconds and bytes of collectives. A
    group has operators of equal cost, or operators that XLA fuses (`OpGroup`). A point
    is a mesh and a number of microbatches.
    """

    def __init__(self, question: Workload, rates: Rates) -> None:
        """Starts with an empty cache of priced operators.

        Args:
            question: the workload.
            rates: the cache of seconds, with the points (`rates.columns`).
        """
        self.question, self.rates, self.columns = question, rates, rates.columns
        self.works = works_of(question)
        self._ways: dict[Hashable, PricedOp] = {}

    def priced_ops(self, division: ShardingAssignment) -> list[PricedOp]:
        """Prices every group of operators of the workload under one division.

        The division says which axes divide which dims.
        """
        return self.all([(n, division) for n in range(len(self.question.groups))])

    def all(self, asked: Sequence[tuple[int, ShardingAssignment]]) -> list[PricedOp]:
        """Prices several groups of operators; returns one `PricedOp` for each.

        Args:
            asked: pairs of a group's index in `Workload.groups` and a division (which
                axes divide which dims).
        """
        keys = [self.works.key(number, division) for number, division in asked]
        new = [key for key in dict.fromkeys(keys) if key not in self._ways]
        self._ways |= zip(new, self._priced(new), strict=True)
        return [self._ways[key] for key in keys]

    def _priced(self, keys: Sequence[GroupKey]) -> list[PricedOp]:
        works = [self.works.at(key) for key in keys]
        sending = iter(
            self.rates.sending(
                [
                    self._message(key, done, sent)
                    for key, done in zip(keys, works, strict=True)
                    for sent in done.sent
                ]
            )
        )
        return [
            self._priced_op(key, done, itertools.islice(sending, len(done.sent)))
            for key, done in zip(keys, works, strict=True)
        ]

    def _message(
        self, key: GroupKey, done: OperatorWork, sent: CollectiveOp
    ) -> Message:
        found = self._bundle(self.question.groups[key[0]], done, sent)
        once = found is not None and not found.repeated
        repeats = () if once else repeats_of(done)
        return Message(sent=sent, repeats=repeats, meets=found is None)

    def _bundle(
        self, group: OpGroup, done: OperatorWork, sent: CollectiveOp
    ) -> Bundle | None:
        platform = self.columns.pool.device.platform
        return bundle_of(platform, group, done, sent, self.question.software)

    def _priced_op(
        self, key: GroupKey, done: OperatorWork, sending: Iterable[Table]
    ) -> PricedOp:
        group, rates = self.question.groups[key[0]], self.rates
        pattern = self.works.pattern(key)
        computing = rates.computing(
            self.question.graph,
            pattern,
            done,
            cold=group.uncached,
            moved=group.moved,
        )
        starts = 0.0 if group.operator.kind in CHEAP else group.times
        known = tuple(sending)
        return PricedOp(
            group=group,
            work=done,
            computing=_times(group.times, computing),
            sending=tuple(_times(group.times, one) for one in known),
            starts=_times(starts, rates.repeats(repeats_of(done))),
            bundles=tuple(
                self._bundled(group, done, sent, cases)
                for sent, (cases, _) in zip(done.sent, known, strict=True)
            ),
        )

    def _bundled(
        self, group: OpGroup, done: OperatorWork, sent: CollectiveOp, cases: Cases
    ) -> tuple[Bundle, Table] | None:
        """Finds the bundle of a group's collective, and the bytes that the group adds.

        A bundle is a set of collectives that the compiler may combine. The bytes are
        those that a device sends for all operators of the group each time that the
        bundle is sent. There is one number for each case of `cases`. Returns None if
        the collective is sent alone.
        """
        found = self._bundle(group, done, sent)
        if found is None:
            return None
        count = group.times / group.operator.trips
        parts = self.columns.parts(sent.amount.axes)[cases.first]
        return found, (cases, count * sent.amount.total / parts)


def bundle_of(
    platform: str,
    group: OpGroup,
    done: OperatorWork,
    sent: CollectiveOp,
    software: Software = XLA,
) -> Bundle | None:
    """Returns the bundle of a group's collective; None if it is sent alone.

    A bundle is a set of collectives that the compiler may combine. A collective is sent
    alone if more than the update needs its result (`OpGroup.last` is false), or if XLA
    never combines its kind.

    A collective of an operator that runs for each microbatch is sent for each
    microbatch. There is one exception: all-reduces, if the software first adds up the
    gradients of all microbatches on each device (`Software.sums_first`).

    Args:
        platform: the platform of the devices, such as `cuda`.
        group: the group of operators.
        done: the work of a device in the group's operator.
        sent: one of the operator's collectives.
        software: the software that runs the step.
    """
    if not group.last:
        return None
    place = group.operator.within, group.region == "update"
    repeated = bool(repeats_of(done))
    if software.sums_first and sent.kind == "all_reduce":
        repeated = False
    return bundle(platform, sent, group.operator.trips, repeated, place)


def _times(number: float, table: Table) -> Table:
    cases, values = table
    return cases, number * values


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Totals over the operators of a program, for each point (mesh, microbatches).

    `optimizer` has the seconds per step of the update's operators, `compute` those of
    all other operators. `starts` counts the operators launched in a step.
    """

    compute: Total
    optimizer: Total
    sending: Total
    """Seconds per step of collectives that are sent one by one."""
    waited: Total
    """The seconds in `sending` of collectives of activations, which the next operator
    waits for."""
    waited_together: dict[Bundle, Total]
    """The part of `together` that carries activations."""
    starts: Total
    together: dict[Bundle, Total]
    """For each bundle (collectives that the compiler may combine), the bytes of all its
    arrays each time it is sent. If the arrays are still sent one by one, as on CPU,
    `sending` has their seconds too."""


def sum_prices(ways: Iterable[PricedOp]) -> Sums:
    """Adds up the prices of a program's groups of operators.

    The fields of the result have these sums:

    * `optimizer`, `compute`: seconds of the update's operators, and of all others.
    * `sending`: seconds of collectives that are sent one by one.
    * `together`: bytes of bundles (collectives that the compiler may combine). Bundles
      whose arrays are still sent one by one, as on CPU, count in `sending`, too.
    * `waited`, `waited_together`: the parts of `sending` and `together` that are
      collectives of activations.
    * `starts`: the number of launched operators.
    """
    totals = Sums(
        compute=Total(),
        optimizer=Total(),
        sending=Total(),
        waited=Total(),
        waited_together={},
        starts=Total(),
        together={},
    )
    for way in ways:
        updates = way.group.region == "update"
        (totals.optimizer if updates else totals.compute).add(*way.computing)
        totals.starts.add(*way.starts)
        for done, alone, bundled in zip(
            way.work.sent, way.sending, way.bundles, strict=True
        ):
            into = [(totals.sending, totals.together)]
            if MICRO in done.amount.axes:
                into.append((totals.waited, totals.waited_together))
            for sent, together in into:
                if bundled is None or not bundled[0].is_one:
                    sent.add(*alone)
                if bundled is not None:
                    found, num_bytes = bundled
                    together.setdefault(found, Total()).add(*num_bytes)
    return totals
