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


class Rates:
    """What was priced on the points of some columns."""

    def __init__(self, columns: Columns) -> None:
        """Nothing is priced yet."""
        self.columns = columns
        self._computing: dict[Hashable, Table] = {}
        self._sending: dict[Message, Table] = {}

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
        key = key, one.flops, one.special, one.strided, cold
        if key not in self._computing:
            columns, repeats = self.columns, repeats_of(done)
            amounts = done.sizes or (*done.reads, *done.writes, done.flops)
            amounts += (done.columns,) if done.columns is not None else ()
            cases = columns.divided({*repeats, *(amount.axes for amount in amounts)})
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
        for axes in repeats:
            seconds *= self.columns.parts(axes)[cases.first]
        for row in seconds:
            yield cases, row

    def together_s(
        self, together: Mapping[Bundle, Total], points: np.ndarray
    ) -> np.ndarray:
        """Seconds of a step of what is sent together, on some points.

        Args:
            together: what, and its bytes.
            points: of the columns.
        """
        columns, found = self.columns, np.zeros(len(points))
        for one, num_bytes in self._joined(together, points):
            num = messages(columns.pool.device.platform, one.kind, num_bytes)
            of, groups = columns.lies(one.axes)
            each = collectives_s(one.kind, num_bytes / num, groups, of[points])
            often = columns.parts((MICRO,))[points] if one.repeated else 1
            found += one.times * often * num * each
        return found

    def _joined(
        self, together: Mapping[Bundle, Total], points: np.ndarray
    ) -> list[tuple[Bundle, np.ndarray]]:
        """The bytes of bundles; those of one place that are among the same devices on
        a point are one there.
        """
        columns = self.columns
        found: list[tuple[Bundle, np.ndarray, np.ndarray]] = []
        for one, total in together.items():
            num_bytes = total.at(points)
            names = (*one.axes, MICRO) if one.repeated else one.axes
            used = np.zeros(len(points), np.int64)
            for axis in names:
                bit = 1 << _BITS.index(axis)
                used += np.where(columns.sizes[axis][points] > 1, bit, 0)
            for other, known, before in found:
                if (other.kind, other.place, other.times) == (
                    one.kind, one.place, one.times
                ):  # fmt: skip
                    before += np.where(used == known, num_bytes, 0.0)
                    num_bytes = np.where(used == known, 0.0, num_bytes)
            found.append((one, used, num_bytes))
        return [(one, num_bytes) for one, _, num_bytes in found]


def repeats_of(done: Work) -> Repeats:
    """What work is done anew for."""
    return ((MICRO,),) if MICRO in done.divided_by else ()
