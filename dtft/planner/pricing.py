"""Seconds of operators for many candidates at once, each way to divide one priced once.

A way is an operator with some of its dims divided; candidates share ways, and the exact
choice of `choosing` and the sums of the search read the same tables. Must not know how
candidates are made or which one is taken.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.planner.amounts import Sent, Work
from dtft.planner.collective_cost import collectives_s
from dtft.planner.columns import Axes, Cases, Columns, Total
from dtft.planner.combining import Bundle, bundle, messages
from dtft.planner.cost import computing_s, runs
from dtft.planner.groups import CHEAP, Group
from dtft.planner.meshes import AXES
from dtft.planner.partition import MICRO, Division
from dtft.planner.question import Question
from dtft.planner.works import works_of

_BITS = (*AXES, MICRO)
Table = tuple[Cases, np.ndarray]
"""A number for each case."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A collective of a step."""

    sent: Sent
    times: float
    """How often it is sent, in a step or for each microbatch."""
    repeats: tuple[Axes, ...]
    """`((MICRO,),)` if it is for each microbatch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """A group of operators, divided in one way."""

    group: Group
    work: Work
    computing: Table
    """Seconds of a step in which each device computes them."""
    sending: tuple[Table, ...]
    """Seconds of a step of each of their collectives."""
    starts: Table
    """Operators that are started in a step."""
    bundles: tuple[tuple[Bundle, Table] | None, ...] = ()
    """For each collective what it is sent together with, and its bytes."""

    @property
    def seconds(self) -> tuple[Table, ...]:
        """All that it takes, one thing after another."""
        return (self.computing, *self.sending)


class Prices:
    """What groups of operators take on the points of some columns."""

    def __init__(self, question: Question, columns: Columns) -> None:
        """Nothing is priced yet.

        Args:
            question: what is asked.
            columns: for which sizes of axes.
        """
        self.question, self.columns = question, columns
        self.works = works_of(question)
        self._ways: dict[Hashable, Way] = {}

    def ways(self, division: Division) -> list[Way]:
        """Of each group of operators what it takes under a division."""
        return self.all([(n, division) for n in range(len(self.question.groups))])

    def all(self, asked: Sequence[tuple[int, Division]]) -> list[Way]:
        """The same of some groups, by number, each under its own division."""
        keys = [self.works.key(number, division) for number, division in asked]
        new = {
            key: one
            for key, one in zip(keys, asked, strict=True)
            if key not in self._ways
        }
        self._ways |= zip(new, self._priced(list(new.values())), strict=True)
        return [self._ways[key] for key in keys]

    def _priced(self, asked: Sequence[tuple[int, Division]]) -> list[Way]:
        groups = self.question.groups
        works = [self.works.of(number, division) for number, division in asked]
        messages = [
            Message(sent=sent, times=groups[number].times, repeats=_repeats(done))
            for (number, _), done in zip(asked, works, strict=True)
            for sent in done.sent
        ]
        sending = iter(self.sending(messages))
        return [
            self._way(
                groups[number], done, tuple(itertools.islice(sending, len(done.sent)))
            )
            for (number, _), done in zip(asked, works, strict=True)
        ]

    def _way(self, group: Group, done: Work, sending: tuple[Table, ...]) -> Way:
        columns, repeats = self.columns, _repeats(done)
        amounts = done.sizes or (*done.reads, *done.writes, done.flops)
        amounts += (done.columns,) if done.columns is not None else ()
        cases = columns.divided({*repeats, *(amount.axes for amount in amounts)})
        times = group.times * runs(done, cases.sizes)
        graph, device = self.question.graph, columns.pool.device
        cold = group.region == "update"
        seconds = times * computing_s(graph, device, done, cases.sizes, cold=cold)
        often = columns.divided(repeats)
        starts = 0.0 if group.operator.kind in CHEAP else group.times
        starts = starts * runs(done, often.sizes) * np.ones(len(often.first))
        return Way(
            group=group,
            work=done,
            computing=(cases, seconds * np.ones(len(cases.first))),
            sending=sending,
            starts=(often, starts),
            bundles=tuple(
                self._bundled(group, done, sent, cases)
                for sent, (cases, _) in zip(done.sent, sending, strict=True)
            ),
        )

    def _bundled(
        self, group: Group, done: Work, sent: Sent, cases: Cases
    ) -> tuple[Bundle, Table] | None:
        """What a collective is sent together with, and its bytes."""
        found = bundle_of(self.columns.pool.device.platform, group, done, sent)
        if found is None:
            return None
        count = group.times / group.operator.trips
        parts = self.columns.parts(sent.amount.axes)[cases.first]
        return found, (cases, count * sent.amount.total / parts)

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

    def sending(self, messages: Sequence[Message]) -> list[Table]:
        """Seconds of a step of each of some collectives."""
        alike: dict[object, list[int]] = defaultdict(list)
        for place, one in enumerate(messages):
            divisors = frozenset({*one.repeats, one.sent.amount.axes})
            alike[one.sent.kind, one.sent.axes, divisors].append(place)
        found: dict[int, Table] = {}
        for places in alike.values():
            some = [messages[place] for place in places]
            found |= zip(places, self._sending(some), strict=True)
        return [found[place] for place in range(len(messages))]

    def _sending(self, alike: Sequence[Message]) -> Iterator[Table]:
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
        for one, row in zip(alike, seconds, strict=True):
            yield cases, one.times * row


def bundle_of(platform: str, group: Group, done: Work, sent: Sent) -> Bundle | None:
    """What a collective of a group is sent together with; None if it stays alone."""
    if not group.last:
        return None
    within = group.operator.within
    place = within, group.region == "update"
    repeated = bool(_repeats(done))
    return bundle(platform, sent, group.operator.trips, repeated, place)


def _repeats(done: Work) -> tuple[Axes, ...]:
    """What work is done anew for."""
    return ((MICRO,),) if MICRO in done.divided_by else ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """What the operators of a program take together, by point."""

    compute: Total
    optimizer: Total
    sending: Total
    """What is sent alone."""
    starts: Total
    together: dict[Bundle, Total]
    """What is sent together, and its bytes."""


def summed(ways: Iterable[Way]) -> Sums:
    """The totals of a program's operators."""
    totals = Sums(
        compute=Total(), optimizer=Total(), sending=Total(), starts=Total(), together={}
    )
    for way in ways:
        updates = way.group.region == "update"
        (totals.optimizer if updates else totals.compute).add(*way.computing)
        totals.starts.add(*way.starts)
        for alone, bundled in zip(way.sending, way.bundles, strict=True):
            if bundled is None:
                totals.sending.add(*alone)
            else:
                found, num_bytes = bundled
                totals.together.setdefault(found, Total()).add(*num_bytes)
    return totals
