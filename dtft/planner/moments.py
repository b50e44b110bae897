"""Bytes at the fullest moment of a program, on thousands of meshes at once.

What is alive at a moment is a sum of totals, each divided by the sizes of some axes: so
moments are a matrix, and the bytes of many meshes its product with what each mesh
leaves of a byte. Pure; must not know seconds or how candidates are found.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dtft.planner.amounts import Sizes, parts
from dtft.planner.course import Course, What
from dtft.planner.partition import MICRO, Axes, Division, flat
from dtft.planner.patterns import Instance
from dtft.planner.plan import Spec
from dtft.planner.shards import AXIS, rest_place

_Beside = tuple[int, Sequence[tuple[int, float]]]
"""A moment, and totals of which so many bytes more are there."""
_Total = tuple[What, Axes, int]
"""What bytes are of, the axes that divide them, and of gradients that are kept divided
further a value that stands for all that are so alike; otherwise -1."""
_MOST_ALONE = 2**17
"""Multiplications that OpenBLAS does on one thread; it may use more from 2**18 on."""
_OF_GRADIENTS = ("gradient", "kept", "waiting", "sums")


@dataclass(frozen=True, kw_only=True, eq=False)
class Peak:
    """The most that is alive at one time, by term; bytes, one entry per candidate."""

    activations: np.ndarray
    gradients: np.ndarray


class Moments:
    """The moments that may be the fullest, under one division."""

    def __init__(self, course: Course, division: Division) -> None:
        """Divides what is alive.

        Args:
            course: of the program.
            division: which axes divide which dims; `MICRO` among them.
        """
        self.course, self.division = course, division
        self._graph = course.timeline.scheduled
        self.totals: dict[_Total, int] = {}
        """The number of each."""
        self._gathers = [list(self._gathered(one)) for one in course.instances]
        self.matrix = self._moments(self._columns(), list(self._beside()))
        """Bytes before division; float [moments, totals]."""

    def divisors(self) -> set[Axes]:
        """Axes that divide something together: what the bytes depend on."""
        found: set[Axes] = {(AXIS,), (MICRO,)}
        for _, axes, index in self.totals:
            found.add(axes)
            if index >= 0:
                found.update(self.division.spec(self._graph.values[index]))
        return found - {()}

    def on(self, sizes: Sizes) -> "Highest":
        """The same on some meshes.

        Args:
            sizes: axis to size, one entry per mesh.
        """
        return Highest(self, sizes)

    def _columns(self) -> list[int]:
        """For each kind of array its total; -1 for what is not there."""
        found: list[int] = []
        alike: dict[object, int] = {}
        loops = self.course.timeline.loop_dims
        for kind in self.course.kinds:
            value = self._graph.values[kind.value]
            spec = self.division.spec(value)
            axes, stands = flat(spec), -1
            if kind.divides:
                key = value.shape, spec, tuple(dim in loops for dim in value.dims)
                stands = alike.setdefault(key, kind.value)
            there = kind.what != "part" or MICRO in axes
            found.append(self._total((kind.what, axes, stands)) if there else -1)
        return found

    def _beside(self) -> Iterator[_Beside]:
        """Moments at which something is there beside what is alive: totals and bytes.

        Copies, and what operands are brought together in.
        """
        for moment, index in self.course.copied:
            value = self._graph.values[index]
            axes = flat(self.division.spec(value))
            yield moment, [(self._total(("plain", axes, -1)), value.num_bytes)]
        before: list[tuple[int, float]] = []
        for run in self.course.runs if any(self._gathers) else ():
            before = self._gathers[run.instance] + (before if run.beside else [])
            if before:
                yield run.moment, before

    def _gathered(self, operator: Instance) -> Iterator[tuple[int, float]]:
        for sent in operator.pattern.work(operator.key(self.division)).sent:
            if sent.kind in ("all_gather", "all_to_all"):
                yield self._total(("plain", sent.amount.axes, -1)), sent.amount.total

    def _moments(self, columns: Sequence[int], beside: Sequence[_Beside]) -> np.ndarray:
        """Bytes before division; float [moments, totals]."""
        into = np.zeros((len(columns), len(self.totals)))
        for kind, total in enumerate(columns):
            if total >= 0:
                into[kind, total] = 1
        full = [(moment, ()) for moment in self.course.full]
        rows = sorted([*full, *beside], key=lambda row: row[0])
        at = np.array([moment for moment, _ in rows])
        moments = _product(self.course.alive[at], into)
        for row, (_, more) in enumerate(rows):
            for total, num_bytes in more:
                moments[row, total] += num_bytes
        for within, total, num_bytes in self._shared():
            rows_of = slice(*np.searchsorted(at, (within.start, within.stop)))
            moments[rows_of, total] += num_bytes
        for one in self.course.yielded:
            if any(map(self.division.of, one.rows)):
                moments[at == one.moment, columns[one.kind]] -= one.num_bytes
        return moments

    def _shared(self) -> Iterator[tuple[range, int, float]]:
        """Moments at which something stays gathered for another product, its total and
        bytes.
        """
        for reread in self.course.rereads if any(self._gathers) else ():
            one, other = (self._gathers[instance] for instance in reread.instances)
            for total, num_bytes in one:
                if num_bytes == reread.num_bytes and (total, num_bytes) in other:
                    yield reread.moments, total, num_bytes

    def _total(self, total: _Total) -> int:
        return self.totals.setdefault(total, len(self.totals))


class Highest:
    """The fullest moment on some meshes, at each ZeRO level."""

    def __init__(self, moments: Moments, sizes: Sizes) -> None:
        """Nothing is looked at yet.

        Args:
            moments: of the program, under one division.
            sizes: axis to size, one entry per mesh.
        """
        self._moments, self._sizes = moments, sizes
        self._course, self._division = moments.course, moments.division
        self._values = moments.course.timeline.scheduled.values
        self._places: dict[int, tuple[Spec, np.ndarray]] = {}

    def peak(self, zero: int) -> Peak:
        """The fullest moment between the first operator and the last.

        Args:
            zero: the ZeRO level.
        """
        most, held = (self._whole, self._sums_divided, self._divided)[min(zero, 2)]
        if zero in (1, 2):
            update = self._update
            held = np.where(update > most, update, held)
            most = np.maximum(most, update)
        if zero == 3:
            most = most + self._laid_anew()
        return Peak(activations=most - held, gradients=held)

    @cached_property
    def _whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the fullest moment, and of gradients then, at ZeRO level 0."""
        return self._fullest(self._shares)

    @cached_property
    def _sums_divided(self) -> tuple[np.ndarray, np.ndarray]:
        """The same at level 1, at which sums over microbatches are divided.

        No constraint says so: XLA keeps what a loop carries divided as the optimizer
        state is that reads it.
        """
        return self._fullest(self._shares_divided(("sums",)))

    @cached_property
    def _divided(self) -> tuple[np.ndarray, np.ndarray]:
        """The same from level 2 on."""
        return self._fullest(self._shares_divided(_OF_GRADIENTS))

    def _shares_divided(self, kinds: Container[What]) -> np.ndarray:
        """What each device has of a byte, of some kinds divided as at rest."""
        shares, fsdp = self._shares.copy(), np.asarray(self._sizes[AXIS])
        for (kind, _, index), row in self._moments.totals.items():
            if index >= 0 and kind in kinds:
                place = self._place(index)[1]
                shares[row] = np.where(place >= 0, shares[row] / fsdp, shares[row])
        return shares

    def _fullest(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        matrix = self._moments.matrix
        alive = _product(matrix, shares)
        fullest, most = alive.argmax(axis=0), alive.max(axis=0)
        ours = [kind in _OF_GRADIENTS for kind, *_ in self._moments.totals]
        return most, np.einsum("cd,dc->c", matrix[fullest][:, ours], shares[ours])

    @cached_property
    def _shares(self) -> np.ndarray:
        """What each device has of a byte of each total; float [totals, meshes]."""
        sizes, totals = self._sizes, self._moments.totals
        number = np.asarray(sizes[MICRO])
        left = {
            axes: 1 / np.asarray(parts(axes, sizes), float)
            for axes in {axes for _, axes, _ in totals}
        }
        shares = np.ones((len(totals), len(number)))
        for (kind, axes, _), row in totals.items():
            shares[row] = left[axes]
            if kind == "waiting":
                shares[row] *= number == 1
            elif kind in ("sums", "part"):
                shares[row] *= number > 1
        return shares

    @cached_property
    def _update(self) -> Any:
        """Where each device updates a part: new parameters beside old ones, gathered.

        Old parameters are read until the last part is updated, so what is gathered
        has memory of its own; what is being updated is there thrice, laid out for it.
        """
        total: Any = 0.0
        largest: Any = 0.0
        for index, count in self._course.gradients:
            value = self._values[index]
            one = value.num_bytes / parts(flat(self._division.spec(value)), self._sizes)
            total, largest = total + count * one, np.maximum(largest, one)
        divides = np.asarray(self._sizes[AXIS])
        return np.where(divides > 1, total + 3 * largest / divides, 0.0)

    def _laid_anew(self) -> Any:
        """Parameters to be gathered along a dim that is not their first: XLA keeps a
        copy of a device's part with that dim first, from the first gather to the last.
        """
        total: Any = 0.0
        for index, count in self._course.gradients:
            spec, place = self._place(index)
            part = self._values[index].num_bytes / parts(
                (*flat(spec), AXIS), self._sizes
            )
            total = total + count * np.where(place > 0, part, 0.0)
        return total

    def _place(self, index: int) -> tuple[Spec, np.ndarray]:
        """How a gradient is divided where it is used, and the dim of it for `fsdp`."""
        if index not in self._places:
            value, loops = self._values[index], self._course.timeline.loop_dims
            spec = self._division.spec(value)
            self._places[index] = spec, rest_place(value, spec, self._sizes, loops)
        return self._places[index]


def _product(matrix: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """matrix @ shares, in parts for which BLAS starts no threads.

    Of a product so small they take longer than it does, where others keep the cores
    busy a hundred times so long.
    """
    found = np.empty((len(matrix), shares.shape[1]))
    step = max(1, _MOST_ALONE // max(1, matrix.size))
    for start in range(0, shares.shape[1], step):
        found[:, start : start + step] = matrix @ shares[:, start : start + step]
    return found
