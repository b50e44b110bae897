"""What groups of operators take under divisions of a program, each way found once.

A group takes the same under two divisions that divide its own dims alike; and the same
question is asked again for other clusters and pins. Must not know seconds or meshes.
"""

from functools import cached_property
from weakref import WeakKeyDictionary

from dtft.planner.amounts import Work
from dtft.planner.partition import Division
from dtft.planner.patterns import Instance, Key, Pattern, instance
from dtft.planner.question import Question

GroupKey = tuple[int, Key]
"""Number of a group, and what of a division matters to it."""

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
        self._known: dict[GroupKey, Work] = {}

    def dims(self, number: int) -> tuple[int, ...]:
        """The dims that a group has, equal layers' as one."""
        return self._instances[number].dims

    def key(self, number: int, division: Division) -> GroupKey:
        """What of a division matters to a group: equal keys, equal work."""
        return number, self._instances[number].key(division)

    def pattern(self, key: GroupKey) -> tuple[Pattern, Key]:
        """The same, of all groups that differ in operations and dims only."""
        return self._instances[key[0]].pattern, key[1]

    def at(self, key: GroupKey) -> Work:
        """What one execution of a group's operator takes."""
        if key not in self._known:
            self._known[key] = self._instances[key[0]].work(key[1])
        return self._known[key]

    @cached_property
    def _instances(self) -> list[Instance]:
        def root(dim: int) -> int:
            return self._alias.get(dim, dim)

        return [instance(self._graph, one.operator, root) for one in self._groups]
