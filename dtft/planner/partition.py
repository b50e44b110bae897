"""What a division of dims over mesh axes means for every operator: work, collectives.

Given which mesh axes divide which dims, says per operator what each device computes and
what must be sent, as amounts divided by axes: the sizes of the axes come later, so that
thousands of meshes share one answer (`amounts`). Follows what XLA's partitioner does
with a program whose results are constrained to these shardings. Pure; must not know
seconds, bytes per second or memory.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dtft.planner.amounts import Amount, Sent, Work
from dtft.planner.graph import Graph, Operator, Value
from dtft.planner.plan import Spec

Axes = tuple[str, ...]
MICRO = "microbatches"
"""Divides the batch like an axis, but in time: results add up and nothing is sent."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Which mesh axes divide which dims."""

    axes: Mapping[int, Axes]
    """Dim to the axes that divide it wherever it occurs."""
    scatters: bool = False
    """Whether the backend sums and divides in one collective (reduce-scatter): GPU and
    TPU do, XLA's CPU backend sums everywhere and takes a part."""
    alias: Mapping[int, int] = field(default_factory=dict)
    """Dim to the dim whose axes it has: equal layers share one decision."""

    def of(self, dim: int) -> Axes:
        """The axes that divide a dim."""
        return self.axes.get(self.alias.get(dim, dim), ())

    def spec(self, value: Value) -> Spec:
        """How a value is divided; of dims that want the same axis the first has it."""
        used: set[str] = set()
        spec: list[Axes] = []
        for dim, size in zip(value.dims, value.shape, strict=True):
            free = tuple(a for a in self.of(dim) if a not in used and size > 1)
            used.update(free)
            spec.append(free)
        return tuple(spec)


def divided(value: Value, spec: Spec) -> Amount:
    """Bytes of a value on each device."""
    return Amount(total=value.num_bytes, axes=_flat(spec))


def work(graph: Graph, operator: Operator, division: Division) -> Work:
    """What one execution of an operator takes on each device."""
    return _Placed(graph, operator, division).work()


def per_operator(
    graph: Graph, operators: Iterable[Operator], division: Division
) -> list[Work]:
    """`work` of many."""
    return [work(graph, operator, division) for operator in operators]


class _Placed:
    """One operator under a division: which axis goes along which of its dims."""

    def __init__(self, graph: Graph, operator: Operator, division: Division) -> None:
        self.op, self.division = operator, division
        self.inputs = [graph.values[index] for index in operator.inputs]
        self.outputs = [graph.values[index] for index in operator.outputs]
        self.in_specs = [division.spec(value) for value in self.inputs]
        self.out_specs = [division.spec(value) for value in self.outputs]
        self.sent: list[Sent] = []
        self.kept = {axis: self._keep(axis) for axis in self._axes()}

    def work(self) -> Work:
        self._send_operands()
        self._send_results()
        return Work(
            operator=self.op,
            divided_by=tuple(a for a, dim in self.kept.items() if dim is not None),
            sizes=self._sizes(),
            reads=tuple(self._held(i) for i in range(len(self.inputs))),
            writes=tuple(
                divided(value, spec)
                for value, spec in zip(self.outputs, self.out_specs, strict=True)
            ),
            sent=tuple(self.sent),
        )

    def _axes(self) -> list[str]:
        specs = (*self.in_specs, *self.out_specs)
        return list(dict.fromkeys(a for spec in specs for part in spec for a in part))

    def _keep(self, axis: str) -> int | None:
        """The dim along which this axis divides the work; None: all do all of it."""
        whole = {self._root(dim) for dim in self.op.whole}
        dims: dict[int, None] = {}
        for value in (*self.inputs, *self.outputs):
            for dim in value.dims:
                root = self._root(dim)
                if axis in self.division.of(dim) and root not in whole:
                    dims[root] = None
        return min(dims, key=lambda dim: self._price(axis, dim), default=None)

    def _price(self, axis: str, dim: int) -> tuple[float, int]:
        """Bytes sent if the axis goes along `dim`, before division; ties: the first."""
        price = 0.0
        for value, spec in zip(self.inputs, self.in_specs, strict=True):
            at = self._position(value, spec, axis)
            if at is not None and self._root(value.dims[at]) != dim:
                price += value.num_bytes
        for value, spec in zip(self.outputs, self.out_specs, strict=True):
            at = self._position(value, spec, axis)
            if dim in map(self._root, self.op.summed):
                price += 2 * value.num_bytes
            elif at is not None and self._root(value.dims[at]) != dim:
                price += value.num_bytes
        return price, dim

    def _send_operands(self) -> None:
        for index, (value, spec) in enumerate(
            zip(self.inputs, self.in_specs, strict=True)
        ):
            moved = [
                axis
                for axis in self.kept
                if (at := self._position(value, spec, axis)) is not None
                and not self._fits(index, at, axis)
            ]
            if not moved:
                continue
            gathered = tuple(a for a in moved if not self._elsewhere(value, a))
            exchanged = tuple(a for a in moved if a not in gathered)
            rest = tuple(a for a in _flat(spec) if a not in moved)
            if gathered:
                whole = Amount(total=value.num_bytes, axes=rest + exchanged)
                self._add("all_gather", gathered, whole)
            if exchanged:
                local = Amount(total=value.num_bytes, axes=rest + exchanged)
                self._add("all_to_all", exchanged, local)

    def _fits(self, index: int, at: int, axis: str) -> bool:
        """Whether an operand is divided as the work is."""
        dim = self._root(self.inputs[index].dims[at])
        if dim != self.kept[axis]:
            return False
        return not (index == 1 and self._twice(dim))

    def _twice(self, dim: int) -> bool:
        """A product of a dim with itself: the right operand is needed whole."""
        if self.op.kind != "matmul" or dim in map(self._root, self.op.summed):
            return False
        return [self._root(d) for d in self.outputs[0].dims].count(dim) > 1

    def _elsewhere(self, value: Value, axis: str) -> bool:
        """Whether a value has the dim along which the axis divides the work."""
        return self.kept[axis] in map(self._root, value.dims)

    def _send_results(self) -> None:
        summed = set(map(self._root, self.op.summed))
        partial = tuple(
            a for a, dim in self.kept.items() if dim in summed and a != MICRO
        )
        for value, spec in zip(self.outputs, self.out_specs, strict=True):
            wanted = _flat(spec)
            if partial:
                scattered = tuple(
                    a for a in partial if a in wanted and self.division.scatters
                )
                added = tuple(a for a in partial if a not in scattered)
                rest = tuple(a for a in wanted if a not in partial)
                if scattered:
                    self._add(
                        "reduce_scatter",
                        scattered,
                        Amount(total=value.num_bytes, axes=rest),
                    )
                if added:
                    axes = rest + scattered
                    self._add(
                        "all_reduce", added, Amount(total=value.num_bytes, axes=axes)
                    )
            self._exchange_result(value, spec, partial)

    def _exchange_result(self, value: Value, spec: Spec, partial: Axes) -> None:
        """A result that the work leaves divided along another dim than is wanted."""
        moved = tuple(
            axis
            for axis, dim in self.kept.items()
            if dim is not None
            and axis not in partial
            and (at := self._position(value, spec, axis)) is not None
            and self._root(value.dims[at]) != dim
            and self._elsewhere(value, axis)
        )
        if moved:
            local = Amount(total=value.num_bytes, axes=_flat(spec))
            self._add("all_to_all", moved, local)

    def _add(self, kind: str, axes: Axes, amount: Amount) -> None:
        self.sent.append(Sent(kind=kind, axes=axes, amount=amount))

    def _held(self, index: int) -> Amount:
        """What an operand has on each device when it is used."""
        value, spec = self.inputs[index], self.in_specs[index]
        axes = []
        for axis in _flat(spec):
            at = self._position(value, spec, axis)
            if at is not None and self._fits(index, at, axis):
                axes.append(axis)
        return Amount(total=value.num_bytes, axes=tuple(axes))

    def _sizes(self) -> tuple[Amount, ...]:
        """Rows, columns, depth and batch of a product, each divided by its axes."""
        if self.op.kind != "matmul" or len(self.inputs) < 2:
            return ()
        left, right, out = self.inputs[0], self.inputs[1], self.outputs[0]
        summed = set(map(self._root, self.op.summed))
        k = math.prod(
            size
            for dim, size in zip(left.dims, left.shape, strict=True)
            if self._root(dim) in summed
        )
        rows, columns = left.size / max(1, k), right.size / max(1, k)
        batch = max(1.0, rows * columns / max(1, out.size))
        ins_left = set(map(self._root, left.dims))
        ins_right = set(map(self._root, right.dims))
        groups: dict[str, list[str]] = {"m": [], "n": [], "k": [], "b": []}
        for axis, dim in self.kept.items():
            if dim is None:
                continue
            if dim in summed:
                groups["k"].append(axis)
            elif dim in ins_left and dim in ins_right and not self._twice(dim):
                groups["b"].append(axis)
            else:
                groups["m" if dim in ins_left else "n"].append(axis)
        totals = {"m": rows / batch, "n": columns / batch, "k": float(k), "b": batch}
        return tuple(
            Amount(total=totals[name], axes=tuple(groups[name])) for name in "mnkb"
        )

    def _position(self, value: Value, spec: Spec, axis: str) -> int | None:
        return next((i for i, part in enumerate(spec) if axis in part), None)

    def _root(self, dim: int) -> int:
        return self.division.alias.get(dim, dim)


def _flat(spec: Sequence[Axes]) -> Axes:
    return tuple(axis for part in spec for axis in part)
