"""Seconds of operators for many candidates at once, each way to divide one priced once.

A way is an operator with some of its dims divided; candidates share ways, and the exact
choice of `choosing` and the sums of the search read the same tables. Must not know how
candidates are made or which one is taken.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from dtft.planner.amounts import Sent, Work
from dtft.planner.columns import Cases, Total
from dtft.planner.combining import Bundle, bundle
from dtft.planner.groups import CHEAP, Group
from dtft.planner.partition import Division
from dtft.planner.question import Question
from dtft.planner.rates import Message, Rates, Table, repeats_of
from dtft.planner.works import GroupKey, works_of


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
    bundles: tuple[tuple[Bundle, Table] | None, ...]
    """For each collective what it is sent together with, and its bytes."""

    @property
    def seconds(self) -> tuple[Table, ...]:
        """All that it takes, one thing after another."""
        return (self.computing, *self.sending)


class Prices:
    """What groups of operators take on the points of some columns."""

    def __init__(self, question: Question, rates: Rates) -> None:
        """Nothing is priced yet.

        Args:
            question: what is asked.
            rates: on the columns.
        """
        self.question, self.rates, self.columns = question, rates, rates.columns
        self.works = works_of(question)
        self._ways: dict[Hashable, Way] = {}

    def ways(self, division: Division) -> list[Way]:
        """Of each group of operators what it takes under a division."""
        return self.all([(n, division) for n in range(len(self.question.groups))])

    def all(self, asked: Sequence[tuple[int, Division]]) -> list[Way]:
        """The same of some groups, by number, each under its own division."""
        keys = [self.works.key(number, division) for number, division in asked]
        new = [key for key in dict.fromkeys(keys) if key not in self._ways]
        self._ways |= zip(new, self._priced(new), strict=True)
        return [self._ways[key] for key in keys]

    def _priced(self, keys: Sequence[GroupKey]) -> list[Way]:
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
            self._way(key, done, itertools.islice(sending, len(done.sent)))
            for key, done in zip(keys, works, strict=True)
        ]

    def _message(self, key: GroupKey, done: Work, sent: Sent) -> Message:
        group = self.question.groups[key[0]]
        found = bundle_of(self.columns.pool.device.platform, group, done, sent)
        return Message(sent=sent, repeats=repeats_of(done), meets=found is None)

    def _way(self, key: GroupKey, done: Work, sending: Iterable[Table]) -> Way:
        group, rates = self.question.groups[key[0]], self.rates
        pattern = self.works.pattern(key)
        computing = rates.computing(self.question.graph, pattern, done, cold=group.cold)
        starts = 0.0 if group.operator.kind in CHEAP else group.times
        known = tuple(sending)
        return Way(
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
        self, group: Group, done: Work, sent: Sent, cases: Cases
    ) -> tuple[Bundle, Table] | None:
        """What a collective is sent together with, and its bytes."""
        found = bundle_of(self.columns.pool.device.platform, group, done, sent)
        if found is None:
            return None
        count = group.times / group.operator.trips
        parts = self.columns.parts(sent.amount.axes)[cases.first]
        return found, (cases, count * sent.amount.total / parts)


def bundle_of(platform: str, group: Group, done: Work, sent: Sent) -> Bundle | None:
    """What a collective of a group is sent together with; None if it stays alone."""
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
            if bundled is None or not bundled[0].is_one:
                totals.sending.add(*alone)
            if bundled is not None:
                found, num_bytes = bundled
                totals.together.setdefault(found, Total()).add(*num_bytes)
    return totals
