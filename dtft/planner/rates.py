"""Seconds of one execution and of one message, on the points of some columns.

Programs with another remat run most of the same operators, and collectives of many
operators are alike: each is priced once here, however often it comes. Must not know
which program it comes in, or how often.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.planner.amounts import Sent, Work
from dtft.planner.collective_cost import collectives_s
from dtft.planner.columns import Axes, Cases, Columns, Total
from dtft.planner.combining import Bundle, messages
from dtft.planner.cost import computing_s
from dtft.planner.graph import Graph
from dtft.planner.links import CollectiveKind
from dtft.planner.meeting import hiddens, meetings_s
from dtft.planner.meshes import AXES
from dtft.planner.partition import MICRO

_BITS = (*AXES, MICRO)
Table = tuple[Cases, np.ndarray]
"""A number for each case."""
Repeats = tuple[Axes, ...]
"""What something is done anew for: `((MICRO,),)` for each microbatch, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A collective."""

    sent: Sent
    repeats: Repeats
    meets: bool = True
    """Whether devices meet for it alone (`meeting`), not for all that go together."""
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
        self, graph: Graph, key: Hashable, done: Work, *, cold: bool
    ) -> Table:
        """Seconds of a step in which each device computes an operator.

        Args:
            graph: has the operator.
            key: of the work: equal keys and operations, equal work.
            done: the work.
            cold: as for `cost.computing_s`.
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
        seconds = seconds + meets * meetings_s(groups)[which]
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
            each = meetings_s(groups)[lies] * np.concatenate(waits) * (num_bytes > 0)
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


def repeats_of(done: Work) -> Repeats:
    """What work is done anew for."""
    return ((MICRO,),) if MICRO in done.divided_by else ()
