"""What groups of operators take under divisions of a program, each way found once.

A group takes the same under two divisions that divide its own dims alike; and the same
question is asked again for other clusters and pins. Must not know seconds or meshes.
"""

import itertools
from collections.abc import Hashable
from functools import cached_property
from weakref import WeakKeyDictionary

from dtft.planner.amounts import Work
from dtft.planner.partition import Division, work
from dtft.planner.question import Question

_KNOWN: WeakKeyDictionary[Question, "Works"] = WeakKeyDictionary()


def works_of(question: Question) -> "Works":
    """The works of a question: always the same object."""
    if question not in _KNOWN:
        _KNOWN[question] = Works(question)
    return _KNOWN[question]


class Works:
    """Works of one question's groups of operators."""

    def __init__(self, question: Question) -> None:
        """Nothing is looked at yet."""
        # Not the question itself, which would then never be forgotten.
        self._graph, self._alias = question.graph, question.alias
        self._groups = question.groups
        self._known: dict[Hashable, Work] = {}

    def dims(self, number: int) -> tuple[int, ...]:
        """The dims that a group has, equal layers' as one."""
        return self._dims[number][0]

    def key(self, number: int, division: Division) -> Hashable:
        """What of a division matters to a group: equal keys, equal work."""
        dims, results = self._dims[number]
        rest = tuple(
            (place, tuple(division.rest[dims].items()))
            for place, dims in enumerate(results)
            if dims in division.rest
        )
        axes = division.axes
        backend = division.scatters, division.spare if rest else ()
        return number, backend, tuple([axes.get(d, ()) for d in dims]), rest

    def of(self, number: int, division: Division) -> Work:
        """What one execution of a group's operator takes."""
        key = self.key(number, division)
        if key not in self._known:
            operator = self._groups[number].operator
            self._known[key] = work(self._graph, operator, division)
        return self._known[key]

    @cached_property
    def _dims(self) -> list[tuple[tuple[int, ...], list[frozenset[int]]]]:
        """For each group the dims that it has, and those of each of its results."""
        found = []
        for group in self._groups:
            read, written = (
                [self._roots(index) for index in indices]
                for indices in (group.operator.inputs, group.operator.outputs)
            )
            dims = dict.fromkeys(itertools.chain(*read, *written))
            found.append((tuple(dims), list(map(frozenset, written))))
        return found

    def _roots(self, index: int) -> list[int]:
        return [self._alias.get(dim, dim) for dim in self._graph.values[index].dims]
