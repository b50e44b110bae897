"""Bytes at the fullest moment of a program, on thousands of meshes at once.

What is alive at a moment is a sum of totals, each divided by the sizes of some axes: so
moments are a matrix, and the bytes of many meshes its product with what each mesh
leaves of a byte. Pure; must not know seconds or how candidates are found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.planner.amounts import Sizes, parts
from dtft.planner.course import Course, What
from dtft.planner.partition import MICRO, Axes, Division, flat
from dtft.planner.patterns import Instance
from dtft.planner.shards import AXIS, rest_place

_Beside = tuple[int, Sequence[tuple[int, float]]]
"""A moment, and totals of which so many bytes more are there."""
_Total = tuple[What, Axes, int]
"""What bytes are of, the axes that divide them, and of gradients that are kept divided
further a value that stands for all that are so alike; otherwise -1."""
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
        self._course, self._timeline = course, course.timeline
        self._graph, self._division = course.timeline.scheduled, division
        self._totals: dict[_Total, int] = {}
        self._matrix = self._moments(self._columns(), list(self._beside()))

    def divisors(self) -> set[Axes]:
        """Axes that divide something together: what the bytes depend on."""
        found: set[Axes] = {(AXIS,), (MICRO,)}
        for _, axes, index in self._totals:
            found.add(axes)
            if index >= 0:
                found.update(self._division.spec(self._graph.values[index]))
        return found - {()}

    def peak(self, sizes: Sizes, zero: int) -> Peak:
        """The fullest moment between the first operator and the last.

        Args:
            sizes: axis to size, one entry per candidate.
            zero: the ZeRO level.
        """
        number = np.asarray(sizes[MICRO])
        shares = np.ones((len(self._totals), len(number)))
        for total, row in self._totals.items():
            shares[row] = self._share(total, sizes, zero)
        alive = self._matrix @ shares
        fullest, most = alive.argmax(axis=0), alive.max(axis=0)
        ours = np.array([kind in _OF_GRADIENTS for kind, *_ in self._totals], bool)
        held = np.einsum("cd,dc->c", self._matrix[fullest][:, ours], shares[ours])
        if zero in (1, 2):
            update = self._update(sizes)
            held = np.where(update > most, update, held)
            most = np.maximum(most, update)
        if zero == 3:
            most = most + self._laid_anew(sizes)
        return Peak(activations=most - held, gradients=held)

    def _share(self, total: _Total, sizes: Sizes, zero: int) -> Any:
        """What each device has of a byte."""
        kind, axes, index = total
        alone = np.asarray(sizes[MICRO]) == 1
        share = 1 / np.asarray(parts(axes, sizes), float)
        if index >= 0 and zero >= 2:
            value = self._graph.values[index]
            spec = self._division.spec(value)
            place = rest_place(value, spec, sizes, self._timeline.loop_dims)
            share = np.where(place >= 0, share / np.asarray(sizes[AXIS]), share)
        if kind == "waiting":
            return np.where(alone, share, 0.0)
        return np.where(alone, 0.0, share) if kind in ("sums", "part") else share

    def _columns(self) -> list[int]:
        """For each kind of array its total; -1 for what is not there."""
        found: list[int] = []
        alike: dict[object, int] = {}
        loops = self._timeline.loop_dims
        for kind, index in self._course.kinds.items():
            value = self._graph.values[index]
            spec = self._division.spec(value)
            axes, stands = flat(spec), -1
            if kind.divides:
                key = value.shape, spec, tuple(dim in loops for dim in value.dims)
                stands = alike.setdefault(key, index)
            there = kind.what != "part" or MICRO in axes
            found.append(self._total((kind.what, axes, stands)) if there else -1)
        return found

    def _beside(self) -> Iterator[_Beside]:
        """Moments at which something is there beside what is alive: totals and bytes.

        Copies, and what operands are brought together in.
        """
        for moment, index in self._course.copied:
            value = self._graph.values[index]
            axes = flat(self._division.spec(value))
            yield moment, [(self._total(("plain", axes, -1)), value.num_bytes)]
        gathered = [list(self._gathered(one)) for one in self._course.instances]
        before: list[tuple[int, float]] = []
        for run in self._course.runs if any(gathered) else ():
            before = gathered[run.instance] + (before if run.beside else [])
            if before:
                yield run.moment, before

    def _gathered(self, operator: Instance) -> Iterator[tuple[int, float]]:
        for sent in operator.pattern.work(operator.key(self._division)).sent:
            if sent.kind in ("all_gather", "all_to_all"):
                yield self._total(("plain", sent.amount.axes, -1)), sent.amount.total

    def _moments(self, columns: Sequence[int], beside: Sequence[_Beside]) -> np.ndarray:
        """Bytes before division; float [moments, totals]."""
        into = np.zeros((len(columns), len(self._totals)))
        for kind, total in enumerate(columns):
            if total >= 0:
                into[kind, total] = 1
        full = [(moment, ()) for moment in self._course.full]
        rows = sorted([*full, *beside], key=lambda row: row[0])
        moments = self._course.alive[[moment for moment, _ in rows]] @ into
        for row, (_, more) in enumerate(rows):
            for total, num_bytes in more:
                moments[row, total] += num_bytes
        return moments

    def _update(self, sizes: Sizes) -> Any:
        """Where each device updates a part: new parameters beside old ones, gathered.

        Old parameters are read until the last part is updated, so what is gathered
        has memory of its own; what is being updated is there thrice, laid out for it.
        """
        total: Any = 0.0
        largest: Any = 0.0
        for index in self._timeline.gradients:
            one = self._num_bytes(index) / parts(self._axes(index), sizes)
            total, largest = total + one, np.maximum(largest, one)
        divides = np.asarray(sizes[AXIS])
        return np.where(divides > 1, total + 3 * largest / divides, 0.0)

    def _laid_anew(self, sizes: Sizes) -> Any:
        """Parameters to be gathered along a dim that is not their first: XLA keeps a
        copy of a device's part with that dim first, from the first gather to the last.
        """
        total: Any = 0.0
        for index in self._timeline.gradients:
            value = self._graph.values[index]
            spec = self._division.spec(value)
            place = rest_place(value, spec, sizes, self._timeline.loop_dims)
            part = value.num_bytes / parts((*flat(spec), AXIS), sizes)
            total = total + np.where(place > 0, part, 0.0)
        return total

    def _num_bytes(self, index: int) -> int:
        return self._graph.values[index].num_bytes

    def _axes(self, index: int) -> Axes:
        return flat(self._division.spec(self._graph.values[index]))

    def _total(self, total: _Total) -> int:
        return self._totals.setdefault(total, len(self._totals))
