"""Bytes at the fullest moment of a program, on thousands of meshes at once.

What is alive at a moment is a sum of totals, each divided by the sizes of some axes: so
moments are a matrix, and the bytes of many meshes its product with what each mesh
leaves of a byte. Pure; must not know seconds or how candidates are found.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtft.planner.amounts import Sizes, parts
from dtft.planner.graph import Operator
from dtft.planner.lifetimes import Event
from dtft.planner.memory import Timeline
from dtft.planner.partition import MICRO, Axes, Division, flat, work
from dtft.planner.shards import AXIS, rest_place

_Total = tuple[str, Axes, int]
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

    def __init__(self, timeline: Timeline, division: Division) -> None:
        """Follows the program.

        Args:
            timeline: of the program.
            division: which axes divide which dims; `MICRO` among them.
        """
        self._timeline, self._graph = timeline, timeline.scheduled
        self._division = division
        self._totals: dict[_Total, int] = {}
        self._changes: list[tuple[int, float]] = []
        self._at: list[int] = []
        self._beside: list[list[tuple[int, float]]] = []
        self._gathers: dict[object, list[tuple[int, float]]] = {}
        self._alike: dict[object, int] = {}
        self._begin()
        self._follow()
        self._matrix = self._moments()

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

    def _begin(self) -> None:
        """With microbatches: a sum of each gradient, and the part of the batch that is
        worked on, taken out of it.
        """
        for index in self._timeline.gradients:
            self._change(*self._gradient(index, "sums"))
        for index in self._graph.inputs.values():
            axes = self._axes(index)
            if MICRO in axes:
                self._change(("part", axes, -1), self._num_bytes(index))
        self._note([])

    def _follow(self) -> None:
        before: list[tuple[int, float]] = []
        for event in self._timeline.events:
            if event.kind == "runs":
                operator = self._graph.operators[event.value]
                # Those of products that make gradients all run beside each other.
                beside = not self._timeline.of_gradients.isdisjoint(operator.outputs)
                before = self._gathered(operator) + (before if beside else [])
                if before:
                    self._note(before)
            elif event.kind == "copied":
                total = self._total(("plain", self._axes(event.value), -1))
                self._note([(total, self._num_bytes(event.value))])
            elif event.value in self._timeline.gradients:
                self._follow_gradient(event)
            else:
                sign = 1 if event.kind == "comes" else -1
                total = ("plain", self._axes(event.value), -1)
                self._change(total, sign * self._num_bytes(event.value))
                if event.kind == "comes":
                    self._note([])

    def _follow_gradient(self, event: Event) -> None:
        """A gradient is whole until it is made, then as it is kept (ZeRO 2 and 3).

        A microbatch's own goes into the sum as soon as it is made.
        """
        part_by_part = event.value in self._timeline.from_loops
        first = self._gradient(event.value, "kept" if part_by_part else "gradient")
        after = self._gradient(event.value, "waiting")
        if event.kind == "comes":
            self._change(*first)
            self._note([])
        elif event.kind == "made":
            self._change(first[0], -first[1])
            self._change(*after)
        else:
            self._change(after[0], -after[1])

    def _gradient(self, index: int, kind: str) -> tuple[_Total, float]:
        value, timeline = self._graph.values[index], self._timeline
        spec = self._division.spec(value)
        # A step of the user's own has no constraint that divides what no loop makes.
        divides = timeline.gathers or index in timeline.from_loops
        loops = tuple(dim in timeline.loop_dims for dim in value.dims)
        stands = self._alike.setdefault((value.shape, spec, loops), index)
        divided = divides and kind != "gradient"
        return (kind, flat(spec), stands if divided else -1), value.num_bytes

    def _gathered(self, operator: Operator) -> list[tuple[int, float]]:
        """What an operator's operands are brought together in."""
        values = [self._graph.values[i] for i in (*operator.inputs, *operator.outputs)]
        root = self._division.root
        dims = tuple(tuple(map(root, value.dims)) for value in values)
        shapes = tuple(value.shape for value in values)
        key = operator.primitive, dims, shapes, operator.contracted
        if key not in self._gathers:
            self._gathers[key] = [
                (self._total(("plain", sent.amount.axes, -1)), sent.amount.total)
                for sent in work(self._graph, operator, self._division).sent
                if sent.kind in ("all_gather", "all_to_all")
            ]
        return self._gathers[key]

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

    def _change(self, total: _Total, num_bytes: float) -> None:
        self._changes.append((self._total(total), num_bytes))

    def _note(self, beside: Iterable[tuple[int, float]]) -> None:
        """A moment that may be the fullest, with what is there beside what is alive."""
        self._at.append(len(self._changes))
        self._beside.append(list(beside))

    def _moments(self) -> np.ndarray:
        """Bytes before division; float [moments, totals]."""
        changes = np.zeros((len(self._changes) + 1, len(self._totals)))
        for row, (total, num_bytes) in enumerate(self._changes, start=1):
            changes[row, total] = num_bytes
        moments = changes.cumsum(axis=0)[self._at]
        for row, beside in enumerate(self._beside):
            for total, num_bytes in beside:
                moments[row, total] += num_bytes
        return moments
