"""Along which of its dims each mesh axis divides an operator's work.

What XLA's partitioner decides of a product when its operands and its result are divided
in ways that do not fit together, and what then has to move. Pure; must not know bytes
on a device, seconds or what is sent.
"""

from typing import TYPE_CHECKING

from dtft.planner.amounts import MICRO
from dtft.planner.graph import Graph, Operator
from dtft.planner.plan import Spec

if TYPE_CHECKING:
    from dtft.planner.partition import Division


class WorkDims:
    """One operator under a division: which axis goes along which of its dims."""

    def __init__(self, graph: Graph, operator: Operator, division: "Division") -> None:
        self.op, self.division = operator, division
        self.inputs = [graph.values[index] for index in operator.inputs]
        self.outputs = [graph.values[index] for index in operator.outputs]
        self.in_specs = [division.spec(value) for value in self.inputs]
        self.out_specs = [division.spec(value) for value in self.outputs]
        self.summed = set(map(division.root, operator.summed))
        self.whole = set(map(division.root, operator.whole))
        self.alone = operator.primitive == "top_k" and not division.scatters
        self.made = {division.root(d) for value in self.outputs for d in value.dims}
        self.kept = {axis: self._keep(axis) for axis in self._axes()}

    def _axes(self) -> list[str]:
        specs = (*self.in_specs, *self.out_specs)
        return list(dict.fromkeys(a for spec in specs for axes in spec for a in axes))

    def _keep(self, axis: str) -> int | None:
        """The dim along which this axis divides the work; None: all do all of it.

        XLA's partitioner takes for a product what needs no look at costs first: a dim
        that both operands are divided along, or one operand and the result
        (`PartitionBaseCase` in its `dot_handler.cc`).
        """
        dims: dict[int, None] = {}
        if self.alone and axis != MICRO:
            return None
        for value in (*self.inputs, *self.outputs):
            for dim in map(self.division.root, value.dims):
                if axis in self.division.of(dim) and dim not in self.whole:
                    dims[dim] = None
        if self.op.kind == "matmul" and len(dims) > 1:
            there = self._places(axis)
            dims = {dim: None for dim in dims if there.count(dim) > 1} or dims
        return min(dims, key=lambda dim: self._price(axis, dim), default=None)

    def _places(self, axis: str) -> list[int]:
        """Of operands and result the dim that an axis divides, where it divides one."""
        values = (*self.inputs, *self.outputs)
        specs = (*self.in_specs, *self.out_specs)
        found = [
            (value, position(spec, axis))
            for value, spec in zip(values, specs, strict=True)
        ]
        return [self.division.root(v.dims[at]) for v, at in found if at is not None]

    def _price(self, axis: str, dim: int) -> tuple[float, int]:
        """Bytes sent if the axis goes along `dim`, before division; ties: the first."""
        price = 0.0
        for value, spec in zip(self.inputs, self.in_specs, strict=True):
            at = position(spec, axis)
            if at is not None and self.division.root(value.dims[at]) != dim:
                price += value.num_bytes
        for value, spec in zip(self.outputs, self.out_specs, strict=True):
            at = position(spec, axis)
            if self.is_partial(dim):
                price += 2 * value.num_bytes
            elif at is not None and self.division.root(value.dims[at]) != dim:
                price += value.num_bytes
        return price, dim

    def is_partial(self, dim: int) -> bool:
        """Whether the work, divided along a dim, leaves partial sums."""
        if dim not in self.summed:
            return False
        if dim not in self.made:
            return True
        # It is there twice, divided at one place: is that the one summed over?
        return self.op.kind == "matmul" and not self._free(0, dim) | self._free(1, dim)

    def _free(self, index: int, dim: int) -> bool:
        """Whether an operand of a matmul is divided along `dim` where it is kept."""
        if self.op.kind != "matmul" or index > 1:
            return False
        spec, value = self.in_specs[index], self.inputs[index]
        return any(
            axes
            and self.division.root(d) == dim
            and at not in self.op.contracted[index]
            for at, (d, axes) in enumerate(zip(value.dims, spec, strict=True))
        )

    def fits(self, index: int, axis: str) -> bool:
        """Whether an operand that an axis divides is divided as the work is."""
        spec, value = self.in_specs[index], self.inputs[index]
        at = position(spec, axis)
        if at is None:
            return True
        dim = self.division.root(value.dims[at])
        if dim != self.kept[axis]:
            return False
        if self.op.kind != "matmul" or index > 1:
            return True
        if dim in self.summed and dim in self.made:
            # A product of a dim with itself: one of its places is summed over.
            return (at in self.op.contracted[index]) == self.is_partial(dim)
        return not (index == 1 and self._free(0, dim) and self.twice(dim))

    def twice(self, dim: int) -> bool:
        """Whether rows and columns of a product are the same dim."""
        return [self.division.root(d) for d in self.outputs[0].dims].count(dim) > 1


def position(spec: Spec, axis: str) -> int | None:
    """The dim that an axis divides."""
    return next((at for at, part in enumerate(spec) if axis in part), None)
