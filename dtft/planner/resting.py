"""Arrays between steps, for many candidates at once: bytes, gathers, kinds of sums.

Arrays that equal layers have alike are looked at once. Where `fsdp` lies on an array is
`shards`' decision; here it is asked for all sizes of axes together. Must not know
operators, or what is best.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dtft.planner import shards
from dtft.planner.amounts import Amount, Sent, parts
from dtft.planner.columns import Cases, Columns, Total, distinct
from dtft.planner.combining import Bundle
from dtft.planner.graph import Value
from dtft.planner.partition import MICRO, Axes, Division, flat
from dtft.planner.pricing import Prices
from dtft.planner.question import Question, Role
from dtft.planner.rates import Message


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Arrays of a role that are divided, gathered and updated alike."""

    value: Value
    passes: int
    """By how many passes of the model each is read."""
    changes: bool
    """Whether a step changes them."""


class Resting:
    """What the state of a question takes at rest, on the points of some columns."""

    def __init__(self, prices: Prices) -> None:
        """Nothing is looked at yet.

        Args:
            prices: of the question, on the columns.
        """
        self.prices = prices
        self._question: Question = prices.question
        self._columns: Columns = prices.columns
        self._loops = self._question.loop_dims
        self._gathers: dict[object, tuple[Cases, np.ndarray]] = {}
        self._places: dict[object, tuple[Cases, Axes, np.ndarray]] = {}

    @cached_property
    def arrays(self) -> Mapping[Role, Counter[Alike]]:
        """Arrays of each role, and how many are alike."""
        question, graph = self._question, self._question.graph
        found: dict[Role, Counter[Alike]] = {
            "parameter": Counter(), "optimizer": Counter(), "batch": Counter()
        }  # fmt: skip
        for path, role in question.roles.items():
            value = graph.values[graph.inputs[path]]
            dims = tuple(map(question.root, value.dims))
            alike = Alike(
                value=Value(shape=value.shape, dtype=value.dtype, dims=dims),
                passes=question.passes[path],
                changes=question.changes(path),
            )
            found[role][alike] += 1
        return found

    def num_bytes(self, role: Role, division: Division, divided: bool) -> Total:
        """Bytes of each device; of the batch all microbatches, there from the start.

        Args:
            role: which arrays.
            division: which axes divide which dims while computing.
            divided: whether `fsdp` divides them at rest.
        """
        total = Total()
        for cases, count, each in self.each(role, division, divided):
            total.add(cases, count * each)
        return total

    def each(
        self, role: Role, division: Division, divided: bool
    ) -> Iterator[tuple[Cases, int, np.ndarray]]:
        """As `num_bytes`, by array: how many are alike, bytes of each by case."""
        for alike, count in self.arrays[role].items():
            cases, used, place = self._placed(alike.value, division)
            axes = tuple(axis for axis in used if axis != MICRO)
            there = parts(axes, cases.sizes) * np.ones(len(cases.first))
            if divided:
                there = there * np.where(place >= 0, cases.sizes[shards.AXIS], 1)
            yield cases, count, alike.value.num_bytes / there

    def gathers(
        self, division: Division, zero: int
    ) -> tuple[Total, dict[Bundle, Total]]:
        """What brings divided parameters together in a step.

        Returns:
            Seconds of what is gathered by itself, and bytes of what goes together.
        """
        alone, together = Total(), dict[Bundle, Total]()
        platform = self._columns.pool.device.platform
        for alike, count in self.arrays["parameter"].items():
            num_slices = shards.slices(alike.value, self._loops)
            how = shards.times_gathered(alike.passes, alike.changes, zero, num_slices)
            if not how.times:
                continue
            cases, used, place = self._placed(alike.value, division)
            part = Amount(total=alike.value.num_bytes / how.slices, axes=used)
            sent = Sent(kind="all_gather", axes=(shards.AXIS,), amount=part)
            found = shards.gather_bundle(platform, sent, how)
            if found is None or not found.is_one:
                alone.add(*self._gather(alike, division, sent, count, how))
            if found is not None:
                num_bytes = count * (place >= 0) * part.at(cases.sizes)
                together.setdefault(found, Total()).add(cases, num_bytes)
        return alone, together

    def copying_s(
        self, division: Division, points: np.ndarray, zero: np.ndarray
    ) -> np.ndarray:
        """Seconds of a step in which gathered parameters are copied into order.

        A compiler that keeps every array in the order of its dims copies what it
        gathered along the last of them (`shards.turned_place`).

        Args:
            division: which axes divide which dims while computing.
            points: of the columns.
            zero: level of each.
        """
        found = np.zeros(len(points))
        each = self._columns.pool.device.efficiency.strided_s
        for level in np.unique(zero).tolist() if each else ():
            some = points[zero == level]
            often = self._columns.parts((MICRO,))[some] if level == 3 else 1
            found[zero == level] = each * often * self._turned(division, level).at(some)
        return found

    def _turned(self, division: Division, zero: int) -> Total:
        """Elements that are copied so in a step, or for a microbatch."""
        total = Total()
        for alike, count in self.arrays["parameter"].items():
            value = alike.value
            num_slices = shards.slices(value, self._loops)
            how = shards.times_gathered(alike.passes, alike.changes, zero, num_slices)
            if not how.times:
                continue
            cases, used, place = self._placed(value, division)
            turned = shards.turned_place(value)
            part = Amount(total=how.times * value.size, axes=used).at(cases.sizes)
            total.add(cases, count * part * ((place == turned) & (place >= 0)))
        return total

    def _gather(
        self,
        alike: Alike,
        division: Division,
        sent: Sent,
        count: int,
        how: shards.Gathered,
    ) -> tuple[Cases, np.ndarray]:
        """Seconds of a step in which arrays that are alike are gathered by themselves.

        Args:
            alike: the arrays.
            division: which axes divide which dims while computing.
            sent: one message.
            count: arrays that are alike.
            how: each is gathered.
        """
        key = alike, division.spec(alike.value), how
        if key not in self._gathers:
            placed, _, place = self._placed(alike.value, division)
            repeats: tuple[Axes, ...] = ((MICRO,),) if how.per_microbatch else ()
            message = Message(sent=sent, repeats=repeats, meets=False, ahead=how.ahead)
            sending, seconds = self.prices.rates.sending([message])[0]
            seconds = count * how.messages * seconds
            if not (place >= 0).all():
                both = self._columns.together([placed, sending])
                there = place[placed.of[both.first]] >= 0
                seconds = seconds[sending.of[both.first]] * there
                sending = both
            self._gathers[key] = sending, seconds
        return self._gathers[key]

    def sums(self, division: Division) -> tuple[list[Division], np.ndarray]:
        """Divisions with gradients divided as their parameters (ZeRO 2 and 3).

        Returns:
            Divisions, and for each point its own.
        """
        values = {str(n): one.value for n, one in enumerate(self.arrays["parameter"])}
        placed = [self._placed(value, division) for value in values.values()]
        if not placed:
            return [division], np.zeros(len(self._columns), np.int64)
        by_weights = self._columns.sizes[shards.BESIDE] > 1
        places = [place[cases.of] + 1 for cases, _, place in placed]
        first, of = distinct([by_weights.astype(np.int64), *places])
        divisions = []
        for point in first:
            sizes = {axis: int(c[point]) for axis, c in self._columns.sizes.items()}
            leaves = shards.leaves(values, division, sizes, True, self._loops)
            rest = shards.further(leaves, division, self._loops)
            spare = (shards.BESIDE,) if by_weights[point] else ()
            divisions.append(replace(division, rest=rest, spare=spare))
        return divisions, of

    def _placed(
        self, value: Value, division: Division
    ) -> tuple[Cases, Axes, np.ndarray]:
        """Axes that divide an array in use, and the place of `fsdp` at rest."""
        spec = division.spec(value)
        key = value, spec
        if key not in self._places:
            divisors, used = {axes for axes in spec if axes}, flat(spec)
            whole = tuple(axis for axis in used if axis != MICRO)
            cases = self._columns.divided({*divisors, used, whole, (shards.AXIS,)})
            place = shards.rest_place(value, spec, cases.sizes, self._loops)
            self._places[key] = cases, used, place
        return self._places[key]
