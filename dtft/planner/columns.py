"""Many candidates as columns: what divides them, how they lie on the fabric.

Thousands of candidates differ in few respects at a time: a matmul knows only by how
much each of its sides is divided, a collective only the group it is among and its
bytes. What costs alike is one case; a quantity is evaluated once per case and looked up
for every candidate. Decides nothing; must not know programs or what things cost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtft.planner.amounts import parts
from dtft.planner.axis_layout import Groups, members
from dtft.planner.cluster import Pool
from dtft.planner.meshes import AXES
from dtft.planner.partition import MICRO
from dtft.planner.space import Space

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
        self._lies: dict[Axes, tuple[np.ndarray, Groups]] = {}
        self._all_lie: dict[tuple[Axes, ...], tuple[list[np.ndarray], Groups]] = {}
        self._cases: dict[object, Cases] = {}

    def __len__(self) -> int:
        return len(self.first)

    def parts(self, axes: Axes) -> np.ndarray:
        """Devices along several axes together; int64 [points]."""
        if axes not in self._parts:
            ones = np.ones(len(self), np.int64)
            self._parts[axes] = ones * parts(axes, self.sizes)
        return self._parts[axes]

    def lies(self, axes: Axes) -> tuple[np.ndarray, Groups]:
        """For each point the number of its group along some axes; and these groups."""
        if axes not in self._lies:
            of, groups = self._groups(axes)
            self._lies[axes] = of[self._mesh], groups
        return self._lies[axes]

    def all_lie(self, several: Iterable[Axes]) -> tuple[list[np.ndarray], Groups]:
        """The same for each of several, and all of their groups numbered in a row."""
        key = tuple(several)
        if key not in self._all_lie:
            number = {axes: at for at, axes in enumerate(dict.fromkeys(key))}
            known = [self.lies(axes) for axes in number]
            sizes = [groups.sizes for _, groups in known]
            starts = np.cumsum([0, *map(len, sizes)])
            of = [one + start for (one, _), start in zip(known, starts, strict=False)]
            groups = Groups(sizes=np.concatenate(sizes), links=known[0][1].links)
            self._all_lie[key] = [of[number[axes]] for axes in key], groups
        return self._all_lie[key]

    def _groups(self, axes: Axes) -> tuple[np.ndarray, Groups]:
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
        return of, Groups(sizes=sizes[first], links=links)

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
