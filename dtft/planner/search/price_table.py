"""Seconds of operators for many candidates at once: what costs alike is priced once.

Candidates are columns. A quantity that depends on few of their sizes is evaluated once
per distinct case and looked up for every candidate.
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

# Cases. Thousands of candidates differ in few respects at a time: the seconds of a
# matmul depend on how its sides are divided, those of a collective on its group and
# bytes. Candidates that cost alike are one case.


Axes = tuple[str, ...]
_FRACTION = 2**20
"""Members of a level are told apart down to this part of one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cases:
    """Points that are alike in one respect."""

    first: np.ndarray
    """Of each case the first of its points; int [cases]."""
    of: np.ndarray
    """The case of each point; int [points]."""
    sizes: Mapping[str, np.ndarray]
    """Sizes of the axes, and microbatches, of the first point of each case. Only what
    the respect tells apart is the same for its other points."""


class Columns:
    """The points of a space: its distinct meshes on the fabric, with microbatches.

    What a device does in forward, backward and update depends on the point alone; the
    other knobs come on top (`search`). A knob that changes what operators do is added
    here, one that does not is left to the search.
    """

    def __init__(self, pool: Pool, space: Space) -> None:
        """The points of a space.

        Args:
            pool: the devices.
            space: the candidates.
        """
        self.pool = pool
        self.first, self.of = distinct(
            [space.columns["mesh"], space.columns["microbatches"]]
        )
        """Of each point a candidate; the point of each candidate."""
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
        """Devices along several axes together; int64 [points]."""
        if axes not in self._parts:
            ones = np.ones(len(self), np.int64)
            self._parts[axes] = ones * parts(axes, self.sizes)
        return self._parts[axes]

    def lies(self, axes: Axes) -> tuple[np.ndarray, DeviceGroups]:
        """For each point the number of its group along some axes; and these groups."""
        if axes not in self._lies:
            of, groups = self._groups(axes)
            self._lies[axes] = of[self._mesh], groups
        return self._lies[axes]

    def all_lie(self, several: Iterable[Axes]) -> tuple[list[np.ndarray], DeviceGroups]:
        """The same for each of several, and all of their groups numbered in a row."""
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
        """As `lies`, for each mesh."""
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
        """Points that each of some groups of axes divides into as many parts."""
        key = frozenset(divisors)
        return self._known(key, lambda: [self.parts(axes) for axes in sorted(key)])

    def sending(self, axes: Axes, divisors: Iterable[Axes]) -> Cases:
        """The same, and whose groups along `axes` lie alike."""
        key = frozenset(divisors)
        columns = [self.parts(each) for each in sorted(key)]
        return self._known((axes, key), lambda: [self.lies(axes)[0], *columns])

    def together(self, cases: Iterable[Cases]) -> Cases:
        """Points that are alike in all of some respects."""
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
    """A number for each point: a sum of tables, each over its own cases.

    >>> even, third = (Cases(first=np.arange(n), of=np.arange(6) % n, sizes={})
    ...                for n in (2, 3))
    >>> total = Total()
    >>> total.add(even, np.array([0.0, 1.0]))
    >>> total.add(third, np.array([0.0, 10.0, 20.0]))
    >>> total.at(np.arange(6)).tolist()
    [0.0, 11.0, 20.0, 1.0, 10.0, 21.0]
    """

    def __init__(self) -> None:
        """Zero."""
        self.tables: dict[Cases, np.ndarray] = {}

    def add(self, cases: Cases, values: np.ndarray) -> None:
        """Adds a number for each case."""
        known = self.tables.get(cases)
        self.tables[cases] = values if known is None else known + values

    def at(self, points: np.ndarray) -> np.ndarray:
        """The sums of some points."""
        found = np.zeros(len(points))
        for cases, values in self.tables.items():
            found += values[cases.of[points]]
        return found


def distinct(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of columns that differ: of each the first row, and the number of each row.

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
    """A number for each value, ascending, and how many there are."""
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
"""So many times more numbers than rows are looked up; more are sorted."""


# Rates. Programs of different remat share most operators, and collectives of many
# operators are alike, so each is priced once.


_BITS = (*AXES, MICRO)
Table = tuple[Cases, np.ndarray]
"""A number for each case."""
Repeats = tuple[Axes, ...]
"""What something is done anew for: `((MICRO,),)` for each microbatch, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A collective."""

    sent: CollectiveOp
    repeats: Repeats
    meets: bool = True
    """Whether sync skew (`cost.sync_skews_s`) counts for it, not for a whole bundle."""
    ahead: bool = False
    """Whether it waits for nothing that is computed, which hides a part of it."""


class Rates:
    """What was priced on the points of some columns."""

    def __init__(self, columns: Columns) -> None:
        """Nothing is priced yet."""
        self.columns = columns
        self._computing: dict[Hashable, Table] = {}
        self._sending: dict[Message, Table] = {}
        self._axes_used: dict[Axes, np.ndarray] = {}

    def repeats(self, repeats: Repeats) -> Table:
        """How often something is done in a step."""
        cases = self.columns.divided(repeats)
        times = np.ones(len(cases.first))
        for axes in repeats:
            times = times * self.columns.parts(axes)[cases.first]
        return cases, times

    def computing(
        self, graph: Graph, key: Hashable, done: OperatorWork, *, cold: bool
    ) -> Table:
        """Seconds of a step in which each device computes an operator.

        Args:
            graph: has the operator.
            key: of the work: equal keys and operations, equal work.
            done: the work.
            cold: as for `computing_s`.
        """
        one = done.operator
        key = key, one.flops, one.special, one.strided, one.turned, cold
        if key not in self._computing:
            columns, repeats = self.columns, repeats_of(done)
            amounts = done.sizes or (*done.reads, *done.writes, done.flops)
            amounts += done.sides or ()
            amounts += done.reads[:1] if one.strided else ()
            divisors = {*repeats, *(amount.axes for amount in amounts)}
            divisors |= {done.turned_by} if done.turned_by else set()
            cases = columns.divided(divisors)
            device = columns.pool.device
            seconds = computing_s(graph, device, done, cases.sizes, cold=cold)
            for axes in repeats:
                seconds = seconds * columns.parts(axes)[cases.first]
            self._computing[key] = cases, seconds * np.ones(len(cases.first))
        return self._computing[key]

    def sending(self, asked: Sequence[Message]) -> list[Table]:
        """Seconds of a step of each of some collectives."""
        alike: dict[object, list[Message]] = defaultdict(list)
        for one in dict.fromkeys(asked):
            if one not in self._sending:
                divisors = frozenset({*one.repeats, one.sent.amount.axes})
                alike[one.sent.kind, one.sent.axes, divisors].append(one)
        for some in alike.values():
            self._sending |= zip(some, self._priced(some), strict=True)
        return [self._sending[one] for one in asked]

    def _priced(self, alike: Sequence[Message]) -> Iterable[Table]:
        """The same of one kind, along the same axes, divided alike."""
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
        """Seconds of a step of what goes together, beyond what is sent by itself.

        Args:
            asked: what, with its bytes, and on which points of the columns. Many at
                once take little longer than one.

        Returns:
            For each of `asked` the seconds on its points.
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
        """Seconds of a step of each; all of a kind are priced in one evaluation."""
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
        """The bytes of bundles; those of one place that are among the same devices on
        a point are one there.
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
        """For each point a number that says which of some axes have parts."""
        if names not in self._axes_used:
            used = np.zeros(len(self.columns), np.int64)
            for axis in names:
                bit = 1 << _BITS.index(axis)
                used += np.where(self.columns.sizes[axis] > 1, bit, 0)
            self._axes_used[names] = used
        return self._axes_used[names]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Joined:
    """The bytes of a bundle on some points."""

    bundle: Bundle
    points: np.ndarray
    num_bytes: np.ndarray


def repeats_of(done: OperatorWork) -> Repeats:
    """What work is done anew for."""
    return ((MICRO,),) if MICRO in done.divided_by else ()


# Works. Two shardings that divide the dims of a group alike give it the same work, also
# for another cluster and other pins.


GroupKey = tuple[int, PatternKey]
"""Number of a group, and what of a division matters to it."""

_KNOWN: WeakKeyDictionary[Workload, "Works"] = WeakKeyDictionary()


def works_of(question: Workload) -> "Works":
    """The works of a question: always the same object."""
    if question not in _KNOWN:
        _KNOWN[question] = Works(question)
    return _KNOWN[question]


class Works:
    """Works of one question's groups of operators."""

    def __init__(self, question: Workload) -> None:
        """Nothing is looked at yet."""
        # Not the question itself, which would then never be forgotten.
        self._graph, self._alias = question.graph, question.alias
        self._groups = question.groups
        self._known: dict[GroupKey, OperatorWork] = {}

    def dims(self, number: int) -> tuple[int, ...]:
        """The dims that a group has, equal layers' as one."""
        return self._instances[number].dims

    def key(self, number: int, division: ShardingAssignment) -> GroupKey:
        """What of a division matters to a group: equal keys, equal work."""
        return number, self._instances[number].key(division)

    def pattern(self, key: GroupKey) -> tuple[Pattern, PatternKey]:
        """The same, of all groups that differ in operations and dims only."""
        return self._instances[key[0]].pattern, key[1]

    def at(self, key: GroupKey) -> OperatorWork:
        """What one execution of a group's operator takes."""
        if key not in self._known:
            self._known[key] = self._instances[key[0]].work(key[1])
        return self._known[key]

    @cached_property
    def _instances(self) -> list[Instance]:
        def root(dim: int) -> int:
            return self._alias.get(dim, dim)

        return [instance(self._graph, one.operator, root) for one in self._groups]


# Priced operators. Candidates share them; `tensor_sharding` and the sums of the search
# read the same tables.


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedOp:
    """A group of operators, divided in one way."""

    group: OpGroup
    work: OperatorWork
    computing: Table
    """Seconds of a step in which each device computes them."""
    sending: tuple[Table, ...]
    """Seconds of a step of each of their collectives."""
    starts: Table
    """Operators that are started in a step."""
    bundles: tuple[tuple[Bundle, Table] | None, ...]
    """For each collective what it is sent together with, and its bytes."""

    @property
    def seconds(self) -> tuple[Table, ...]:
        """All that it takes, one thing after another."""
        return (self.computing, *self.sending)


class Prices:
    """What groups of operators take on the points of some columns."""

    def __init__(self, question: Workload, rates: Rates) -> None:
        """Nothing is priced yet.

        Args:
            question: what is asked.
            rates: on the columns.
        """
        self.question, self.rates, self.columns = question, rates, rates.columns
        self.works = works_of(question)
        self._ways: dict[Hashable, PricedOp] = {}

    def priced_ops(self, division: ShardingAssignment) -> list[PricedOp]:
        """Of each group of operators what it takes under a division."""
        return self.all([(n, division) for n in range(len(self.question.groups))])

    def all(self, asked: Sequence[tuple[int, ShardingAssignment]]) -> list[PricedOp]:
        """The same of some groups, by number, each under its own division."""
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
        group = self.question.groups[key[0]]
        found = bundle_of(self.columns.pool.device.platform, group, done, sent)
        return Message(sent=sent, repeats=repeats_of(done), meets=found is None)

    def _priced_op(
        self, key: GroupKey, done: OperatorWork, sending: Iterable[Table]
    ) -> PricedOp:
        group, rates = self.question.groups[key[0]], self.rates
        pattern = self.works.pattern(key)
        computing = rates.computing(
            self.question.graph, pattern, done, cold=group.uncached
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
        """What a collective is sent together with, and its bytes."""
        found = bundle_of(self.columns.pool.device.platform, group, done, sent)
        if found is None:
            return None
        count = group.times / group.operator.trips
        parts = self.columns.parts(sent.amount.axes)[cases.first]
        return found, (cases, count * sent.amount.total / parts)


def bundle_of(
    platform: str, group: OpGroup, done: OperatorWork, sent: CollectiveOp
) -> Bundle | None:
    """The bundle that a group's collective is sent in; None if it is sent alone."""
    if not group.last:
        return None
    place = group.operator.within, group.region == "update"
    repeated = bool(repeats_of(done))
    return bundle(platform, sent, group.operator.trips, repeated, place)


def _times(number: float, table: Table) -> Table:
    cases, values = table
    return cases, number * values


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """What the operators of a program take together, by point."""

    compute: Total
    optimizer: Total
    sending: Total
    """What is sent by itself."""
    starts: Total
    together: dict[Bundle, Total]
    """What goes together, and its bytes."""


def sum_prices(ways: Iterable[PricedOp]) -> Sums:
    """The totals of a program's operators."""
    totals = Sums(
        compute=Total(), optimizer=Total(), sending=Total(), starts=Total(), together={}
    )
    for way in ways:
        updates = way.group.region == "update"
        (totals.optimizer if updates else totals.compute).add(*way.computing)
        totals.starts.add(*way.starts)
        for alone, bundled in zip(way.sending, way.bundles, strict=True):
            if bundled is None or not bundled[0].is_one:
                totals.sending.add(*alone)
            if bundled is not None:
                found, num_bytes = bundled
                totals.together.setdefault(found, Total()).add(*num_bytes)
    return totals
