"""Seconds of operators for many candidates at once, each way to divide one priced once.

A way is an operator with some of its dims divided; candidates share ways, and the exact
choice of `choosing` and the sums of the search read the same tables. Must not know how
candidates are made or which one is taken.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtft.planner.amounts import Sent, Work, parts
from dtft.planner.collective_cost import collectives_s
from dtft.planner.columns import Axes, Cases, Columns, Total
from dtft.planner.cost import computing_s, runs
from dtft.planner.groups import CHEAP, Group
from dtft.planner.partition import MICRO, Division, work
from dtft.planner.question import Question


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """A group of operators, divided in one way."""

    group: Group
    work: Work
    computing: tuple[Cases, np.ndarray]
    """Seconds of a step in which each device computes them."""
    sending: tuple[tuple[Cases, np.ndarray], ...]
    """Seconds of a step of each of their collectives."""
    starts: tuple[Cases, np.ndarray]
    """Operators that are started in a step."""

    @property
    def seconds(self) -> tuple[tuple[Cases, np.ndarray], ...]:
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
        self._ways: dict[object, Way] = {}

    def ways(self, division: Division) -> list[Way]:
        """Of each group of operators what it takes under a division."""
        numbers = range(len(self.question.groups))
        return [self.way(number, division) for number in numbers]

    def way(self, number: int, division: Division) -> Way:
        """The same of one group."""
        dims, sums = self._dims[number]
        extra = tuple(
            (place, tuple(division.rest[dims].items()))
            for place, dims in enumerate(sums)
            if dims in division.rest
        )
        axes = division.axes
        key = number, division.scatters, tuple([axes.get(d, ()) for d in dims]), extra
        if key not in self._ways:
            self._ways[key] = self._priced(self.question.groups[number], division)
        return self._ways[key]

    @cached_property
    def _dims(self) -> list[tuple[tuple[int, ...], list[frozenset[int]]]]:
        """For each group the dims that it has, and those of each of its results."""
        graph, alias, found = self.question.graph, self.question.alias, []
        for group in self.question.groups:
            read, written = (
                [
                    [alias.get(dim, dim) for dim in graph.values[index].dims]
                    for index in of
                ]
                for of in (group.operator.inputs, group.operator.outputs)
            )
            dims = dict.fromkeys(itertools.chain(*read, *written))
            found.append((tuple(dims), list(map(frozenset, written))))
        return found

    def dims(self, number: int) -> tuple[int, ...]:
        """The dims that a group of operators has, equal layers' as one."""
        return self._dims[number][0]

    def _priced(self, group: Group, division: Division) -> Way:
        graph, columns = self.question.graph, self.columns
        done = work(graph, group.operator, division)
        repeats: tuple[Axes, ...] = ((MICRO,),) if MICRO in done.divided_by else ()
        amounts = (*done.sizes, *done.reads, *done.writes, done.flops)
        cases = columns.divided({*repeats, *(amount.axes for amount in amounts)})
        times = group.times * runs(done, cases.sizes)
        seconds = times * computing_s(graph, columns.pool.device, done, cases.sizes)
        often = columns.divided(repeats)
        starts = 0.0 if group.operator.kind in CHEAP else group.times
        starts = starts * runs(done, often.sizes) * np.ones(len(often.first))
        return Way(
            group=group,
            work=done,
            computing=(cases, seconds * np.ones(len(cases.first))),
            sending=tuple(
                self.sending(sent, group.times, repeats) for sent in done.sent
            ),
            starts=(often, starts),
        )

    def sending(
        self, sent: Sent, times: float, repeats: tuple[Axes, ...]
    ) -> tuple[Cases, np.ndarray]:
        """Seconds of a step of one collective.

        Args:
            sent: what is sent.
            times: how often, in a step or for each microbatch.
            repeats: `((MICRO,),)` if it is for each microbatch.
        """
        cases = self.columns.sending(sent.axes, {*repeats, sent.amount.axes})
        of, groups = self.columns.lies(sent.axes)
        which = of[cases.first]
        num_bytes = sent.amount.at(cases.sizes) * np.ones(len(which))
        for axes in repeats:
            times = times * parts(axes, cases.sizes)
        seconds = collectives_s(sent.kind, num_bytes, groups, which)
        return cases, times * seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """What the operators of a program take together, by point."""

    compute: Total
    optimizer: Total
    sending: Total
    starts: Total


def summed(ways: Iterable[Way]) -> Sums:
    """The totals of a program's operators."""
    totals = Sums(compute=Total(), optimizer=Total(), sending=Total(), starts=Total())
    for way in ways:
        updates = way.group.region == "update"
        (totals.optimizer if updates else totals.compute).add(*way.computing)
        totals.starts.add(*way.starts)
        for cases, seconds in way.sending:
            totals.sending.add(cases, seconds)
    return totals
