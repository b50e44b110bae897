"""Computes the work and collectives of operators whose dims are divided by mesh axes.

Follows XLA's SPMD partitioner. Amounts are symbolic in the sizes of the axes
(`ShardedSize`: a total and the axes that divide the total), so thousands of meshes
share one result.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dtft.planner.cluster import CollectiveKind
from dtft.planner.ir import PRODUCTS, Graph, Operator, Value, multiply_add_flops
from dtft.planner.types import Spec

# Symbolic sizes. The sizes of the axes are given at evaluation, each as one number or
# as an array with one entry per candidate mesh.


MICRO = "microbatches"
"""Name of the pseudo-axis of microbatches, which divides the batch in time: sums over
this axis need no collective."""
Sizes = Mapping[str, Any]
"""Map from an axis to its size: an int, or an array with one entry per candidate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedSize:
    """A number divided by the sizes of mesh axes, such as the bytes of an array.

    `total` is the number for all devices together, `axes` are the axes that divide it.

    >>> ShardedSize(total=48, axes=("tensor",)).at({"tensor": 4})
    12.0
    """

    total: float
    axes: tuple[str, ...] = ()

    def at(self, sizes: Sizes) -> Any:
        """Divides the total by the sizes of the axes: the share of each device.

        Args:
            sizes: map from an axis to its size, a number or an array with one entry per
                mesh. A missing axis has size one.
        """
        return self.total / parts(self.axes, sizes)


def parts(axes: tuple[str, ...], sizes: Sizes) -> Any:
    """Multiplies the sizes of several axes; axes that are missing have size one.

    >>> parts(("replica", "tensor"), {"replica": np.array([2, 4]), "tensor": 2})
    array([4, 8])
    """
    product: Any = 1
    for axis in axes:
        product = product * sizes.get(axis, 1)
    return np.asarray(product) if isinstance(product, np.ndarray) else product


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveOp:
    """One collective of a step.

    `axes` are the mesh axes over which it communicates. `amount` has the bytes of its
    operand or of its result on one device, whichever is larger.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    amount: ShardedSize


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorWork:
    """The work of each device in one execution of an operator."""

    operator: Operator
    divided_by: tuple[str, ...]
    """Axes that divide the floating-point operations, `MICRO` included."""
    sizes: tuple[ShardedSize, ...]
    """Rows, columns, depth and batch of a matmul; empty for other operators."""
    reads: tuple[ShardedSize, ...]
    """Bytes of each operand."""
    writes: tuple[ShardedSize, ...]
    """Bytes of each result."""
    sent: tuple[CollectiveOp, ...]
    sides: tuple[ShardedSize, ShardedSize] | None = None
    """Columns and depth of a convolution (`convolution_sides`); None for other
    operators."""
    turned_by: tuple[str, ...] = ()
    """Mesh axes that divide the contracted dims in `Operator.turned_over`. If one of
    them is larger than 1, the elements in `turned` are read with a stride."""

    @property
    def flops(self) -> ShardedSize:
        """Floating-point operations of each device in one execution of the operator."""
        return ShardedSize(total=self.operator.flops, axes=self.divided_by)

    @property
    def special(self) -> ShardedSize:
        """The part of `flops` that evaluates functions such as exp, which cost more."""
        return ShardedSize(total=self.operator.special, axes=self.divided_by)

    @property
    def strided(self) -> ShardedSize:
        """Elements that a device reads with a stride: not in their order in memory."""
        return ShardedSize(total=self.operator.strided, axes=self.divided_by)

    @property
    def turned(self) -> ShardedSize:
        """Elements of transposed matmul results that may be read with a stride.

        They are read with a stride only if a mesh axis divides the contracted dim of
        the matmul (`turned_by`). `strided` does not count them.
        """
        return ShardedSize(total=self.operator.turned, axes=self.divided_by)


# Sizes of the part of a matmul or convolution that each device computes.


def product_sizes(
    operator: Operator,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    divides: Mapping[str, tuple[str, ...]],
) -> tuple[ShardedSize, ...]:
    """Computes the sizes m, n, k and b of a batched matmul, in this order.

    The matmul multiplies b pairs of matrices of shapes [m, k] and [k, n]. Each size has
    the mesh axes that divide it. Returns () if `divides` is empty, or the matmul has no
    operations.

    Args:
        operator: the matmul; its flops are those of b x m x n x k multiply-adds.
        inputs: its operands.
        outputs: its results.
        divides: mesh axes that divide the work along each of m, n, k and b; empty for
            an operator that is no matmul.
    """
    if not divides:
        return ()
    left, right, made = inputs[0].size, inputs[1].size, outputs[0].size
    each = multiply_add_flops(inputs[0].dtype)
    depth = operator.flops / (each * made) if made else 0.0
    if not depth:
        return ()
    rows, columns = left / depth, right / depth
    batch = max(1.0, rows * columns / made)
    totals = {"m": rows / batch, "n": columns / batch, "k": depth, "b": batch}
    return tuple(
        ShardedSize(total=total, axes=divides[name]) for name, total in totals.items()
    )


def convolution_sides(
    operator: Operator,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    root: Callable[[int], int],
    kept: Mapping[str, int | None],
) -> tuple[ShardedSize, ShardedSize] | None:
    """Returns n and k of the matmul (patches of the image by kernel) of a convolution.

    n (columns) is the number of output channels. k (depth, the contracted size) is the
    number of input channels times the number of positions of the kernel. In the
    backward pass, the second operand counts as the kernel. Returns None for other
    operators.

    Args:
        operator: an operator of any kind.
        inputs: its operands.
        outputs: its results.
        root: maps a dim to the dim that represents all dims that are divided alike.
        kept: map from a mesh axis to the dim along which it divides the work; None for
            no dim.
    """
    if operator.kind != "convolution" or len(inputs) < 2:
        return None
    right, made = inputs[1], outputs[0]
    sizes = dict(zip(map(root, right.dims), right.shape, strict=True))
    shared = sizes.keys() & set(map(root, made.dims))

    def along(dims: Set[int | None]) -> tuple[str, ...]:
        return tuple(axis for axis, dim in kept.items() if dim in dims)

    columns = ShardedSize(
        total=math.prod(sizes[dim] for dim in shared), axes=along({*shared})
    )
    places = operator.contracted[1]
    deep = {root(right.dims[place]) for place in places}
    depth = math.prod(right.shape[place] for place in places)
    return columns, ShardedSize(total=depth, axes=along({*deep}))


# If the shardings of operands and result of a product do not match, XLA's partitioner
# selects the division of the work and the arrays to reshard.


class WorkDims:
    """Finds the dim along which each mesh axis divides the work of one operator.

    The field `kept` maps each axis to this dim, or to None if the devices along the
    axis repeat the work. The axes that divide the operands and results are given (a
    `ShardingAssignment`). A dim of a repeated layer is replaced by the one that stands
    for it in all equal layers.
    """

    def __init__(
        self, graph: Graph, operator: Operator, division: "ShardingAssignment"
    ) -> None:
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
        """Finds the dim along which a mesh axis divides the operator's work.

        This is one of the dims that the axis divides in an operand or result: the dim
        for which the fewest bytes are communicated. Returns None if there is no such
        dim: then all devices along the axis repeat the work.

        For a matmul, a dim along which the axis divides two arrays (both operands, or
        one operand and the result) is preferred, as in `PartitionBaseCase` of XLA's
        `dot_handler.cc`.
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
        """Lists the dim that a mesh axis divides in each operand and result.

        A dim that the axis divides in several of them is listed several times. Operands
        and results that the axis does not divide are left out.
        """
        values = (*self.inputs, *self.outputs)
        specs = (*self.in_specs, *self.out_specs)
        found = [
            (value, position(spec, axis))
            for value, spec in zip(values, specs, strict=True)
        ]
        return [self.division.root(v.dims[at]) for v, at in found if at is not None]

    def _price(self, axis: str, dim: int) -> tuple[float, int]:
        """Computes the sort key of a dim along which a mesh axis may divide the work.

        The key is a pair: the bytes (of whole arrays) that must be gathered, resharded
        or reduced if the axis divides the work along this dim; and the dim. The bytes
        of a reduced result count twice.
        """
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
        """Returns whether dividing the work along a dim leaves partial sums.

        Only dims that the operator sums over (contracts or reduces) leave partial sums.
        """
        if dim not in self.summed:
            return False
        if dim not in self.made:
            return True
        # The dim occurs twice: partial sums arise if the contracted one is divided.
        return self.op.kind == "matmul" and not self._free(0, dim) | self._free(1, dim)

    def _free(self, index: int, dim: int) -> bool:
        """Returns whether a dim of a matmul's operand is divided, but not contracted.

        Returns False if no axis divides the dim in this operand, if the operand lacks
        the dim, if the matmul contracts it, and for operators other than matmuls.

        Args:
            index: the position of the operand, 0 or 1; False for higher positions.
            dim: the dim, an index into `Graph.dims`.
        """
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
        """Returns whether an axis divides an operand along the same dim as the work.

        Also returns True if the axis does not divide the operand. If False is returned,
        the operand must be resharded.

        Args:
            index: the position of the operand.
            axis: the mesh axis.
        """
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
            # A product of a dim with itself: one of its positions is contracted.
            return (at in self.op.contracted[index]) == self.is_partial(dim)
        return not (index == 1 and self._free(0, dim) and self.twice(dim))

    def twice(self, dim: int) -> bool:
        """Returns whether a dim occurs twice in the result, as in x @ x.T."""
        return [self.division.root(d) for d in self.outputs[0].dims].count(dim) > 1


def position(spec: Spec, axis: str) -> int | None:
    """Finds the position in a spec of the dim that an axis divides; None for no dim."""
    return next((at for at, part in enumerate(spec) if axis in part), None)


# Results are constrained to their shardings, so a partial sum is reduced directly after
# the operator that produces it.


Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShardingAssignment:
    """A division of a program: the mesh axes that divide each dim of its arrays.

    A dim is an index into `Graph.dims`; dims that must be divided by the same axes have
    one index.
    """

    axes: Mapping[int, Axes]
    """Map from a dim to the mesh axes that divide it in every array that has it."""
    alias: Mapping[int, int] = field(default_factory=dict)
    """Map from a dim to the dim whose axes it shares, such as the same dim of the first
    of several equal layers."""
    rest: Mapping[frozenset[int], Mapping[int, Axes]] = field(default_factory=dict)
    """Map from the set of an array's dims to the additional axes of each dim, for
    arrays whose sums are divided further (gradients at ZeRO levels 2 and 3)."""
    first: Mapping[frozenset[int], int] = field(default_factory=dict)
    """Map from the set of an array's dims to the dim that takes its axes before the
    other dims. This is the expert dim in inputs and outputs of expert layers
    (`Workload.expert_arrays`), and the dim divided first in `Workload.weights`."""
    scatters: bool = False
    """Whether the backend sums and divides in one collective (reduce-scatter).

    GPU and TPU do. XLA's CPU backend all-reduces, and each device keeps its part. If
    the axes of several dims leave partial sums, the CPU backend also all-reduces once
    for each dim; other backends all-reduce once in all. The CPU backend gathers the
    operand of `top_k`.
    """
    spare: Axes = ()
    """Mesh axes (`tensor`) along which devices would repeat an operator that these axes
    do not divide. If the operator is a scatter, XLA spreads its sums over these
    devices."""

    def of(self, dim: int) -> Axes:
        """Returns the axes that divide a dim; () for none."""
        return self.axes.get(self.root(dim), ())

    def root(self, dim: int) -> int:
        """Returns the dim that stands for a dim and for all that are divided alike.

        This is the entry of the dim in `alias`, such as the same dim of the first of
        several equal layers. Without an entry it is the dim itself.
        """
        return self.alias.get(dim, dim)

    def spec(self, value: Value) -> Spec:
        """Returns the spec of a value (an array of the program): the axes of each dim.

        Dims of size one have no axes. If several dims of the value have the same axis,
        the axis divides only one of them: the first, or the one that the field `first`
        names for such values.
        """
        wanted = [
            self.of(dim) if size > 1 else ()
            for dim, size in zip(value.dims, value.shape, strict=True)
        ]
        axes = flat(wanted)
        if len(set(axes)) == len(axes):
            return tuple(wanted)
        early = self._early(value) if self.first else None
        taken = set(wanted[early]) if early is not None else set()
        used: set[str] = set()
        spec: list[Axes] = []
        for place, some in enumerate(wanted):
            gone = used if place == early else used | taken
            free = tuple(axis for axis in some if axis not in gone)
            used.update(free)
            spec.append(free)
        return tuple(spec)

    def _early(self, value: Value) -> int | None:
        """Finds the position of the dim that gets its axes before all other dims.

        It matters if several dims of the value have the same axis, which can divide
        only one of them. Returns None if the field `first` names no dim for the value:
        then earlier dims get their axes before later ones.
        """
        roots = [self.root(dim) for dim in value.dims]
        dim = self.first.get(frozenset(roots))
        return None if dim is None else roots.index(dim)


def flat(spec: Sequence[Axes]) -> Axes:
    """Lists all axes of a spec, in the order of its dims."""
    return tuple(axis for part in spec for axis in part)


def work_of(
    graph: Graph, operator: Operator, division: ShardingAssignment
) -> OperatorWork:
    """Computes what each device computes, reads, writes and sends for an operator.

    The result is for one execution. It includes the collectives that the operator needs
    if `division` (which mesh axes divide which dims) holds for its operands and
    results.
    """
    return _Placed(graph, operator, division).work()


class _Placed(WorkDims):
    """Computes a device's work in one execution of an operator, and its collectives."""

    def __init__(
        self, graph: Graph, operator: Operator, division: ShardingAssignment
    ) -> None:
        super().__init__(graph, operator, division)
        self.spare = tuple(a for a in division.spare if a not in self.kept)
        self.sent: list[CollectiveOp] = []

    def work(self) -> OperatorWork:
        for index in range(len(self.inputs)):
            self._send_operand(index)
        for number in range(len(self.outputs)):
            self._send_result(number)
        return OperatorWork(
            operator=self.op,
            divided_by=tuple(a for a, dim in self.kept.items() if dim is not None),
            sizes=product_sizes(self.op, self.inputs, self.outputs, self._divides()),
            reads=tuple(
                ShardedSize(total=value.num_bytes, axes=self._fitting(index))
                for index, value in enumerate(self.inputs)
            ),
            writes=tuple(
                ShardedSize(total=value.num_bytes, axes=flat(spec))
                for value, spec in zip(self.outputs, self.out_specs, strict=True)
            ),
            sent=tuple(self.sent),
            sides=convolution_sides(
                self.op, self.inputs, self.outputs, self.division.root, self.kept
            ),
            turned_by=self._turned_by(),
        )

    def _turned_by(self) -> Axes:
        """Lists the axes that make the operator read matmul results with a stride.

        The operator reads transposed results of earlier matmuls. If an axis larger than
        1 divides a dim that such a matmul contracts (`Operator.turned_over`), XLA
        cannot merge matmul and transpose, and the result is read with a stride. The
        axes that divide these dims are listed, whatever their size; () if there are
        none. Microbatches do not count as an axis here.
        """
        axes = flat([self.division.of(dim) for dim in self.op.turned_over])
        return tuple(dict.fromkeys(axis for axis in axes if axis != MICRO))

    def _fitting(self, index: int) -> Axes:
        return tuple(a for a in flat(self.in_specs[index]) if self.fits(index, a))

    def _send_operand(self, index: int) -> None:
        """Adds the collectives that reshard an operand for the work of the operator.

        An axis needs a collective if it divides the operand along one dim and the work
        along another dim, or not at all. The collective is an all-to-all if the operand
        also has the dim along which the axis divides the work. Otherwise it is an
        all-gather.

        Args:
            index: the position of the operand.
        """
        value, spec = self.inputs[index], self.in_specs[index]
        moved = [axis for axis in flat(spec) if not self.fits(index, axis)]
        roots = set(map(self.division.root, value.dims))
        exchanged = tuple(
            axis
            for axis in moved
            if self.kept[axis] in roots
            and position(spec, axis) is not None
            and self.division.root(value.dims[position(spec, axis) or 0])
            != self.kept[axis]
        )
        gathered = tuple(axis for axis in moved if axis not in exchanged)
        rest = tuple(axis for axis in flat(spec) if axis not in gathered)
        amount = ShardedSize(total=value.num_bytes, axes=rest)
        if gathered:
            self._add("all_gather", gathered, amount)
        if exchanged:
            self._add("all_to_all", exchanged, amount)

    def _further(self, value: Value) -> Axes:
        """Lists the axes that divide a result in addition to the axes of its spec.

        From ZeRO level 2, these axes divide the sum of a gradient, as they divide its
        parameter between steps (`ShardingAssignment.rest`). Returns () for results that
        are no such gradient.
        """
        dims = frozenset(map(self.division.root, value.dims))
        return tuple(
            a for axes in self.division.rest.get(dims, {}).values() for a in axes
        )

    def _send_result(self, number: int) -> None:
        value, spec = self.outputs[number], self.out_specs[number]
        partial = tuple(
            axis
            for axis, dim in self.kept.items()
            if dim is not None and self.is_partial(dim) and axis != MICRO
        )
        further = self._further(value)
        if partial and further and self.spare and self.op.kind == "scatter":
            self._add_up_spread(value, flat(spec), partial, further)
        elif partial:
            self._add_up(value, (*flat(spec), *further), partial)
        moved = tuple(
            axis
            for axis, dim in self.kept.items()
            if dim is not None
            and not self.is_partial(dim)
            and (at := position(spec, axis)) is not None
            and self.division.root(value.dims[at]) != dim
            and dim in map(self.division.root, value.dims)
        )
        if moved:
            local = ShardedSize(total=value.num_bytes, axes=flat(spec))
            self._add("all_to_all", moved, local)

    def _add_up_spread(
        self, value: Value, kept: Axes, partial: Axes, further: Axes
    ) -> None:
        """Adds the collectives of a scatter whose rows are divided among spare axes.

        Spare axes (`ShardingAssignment.spare`) divide no dim of the scatter, so the
        devices along them would all compute the same sums. Instead, XLA divides the
        rows of the result among these devices. An all-reduce over `partial` adds up the
        partial sums of a device's rows. A permute then sends each row to the devices
        that have it under the axes `kept` and `further`.

        Args:
            value: the result.
            kept: axes that divide the result.
            partial: axes along which each device has a partial sum.
            further: axes that divide the sum further (`ShardingAssignment.rest`).
        """
        part = ShardedSize(total=value.num_bytes, axes=(*kept, *self.spare))
        self._add("all_reduce", partial, part)
        moved = ShardedSize(total=value.num_bytes, axes=(*kept, *further))
        self._add("permute", (*partial, *self.spare), moved)

    def _add_up(self, value: Value, wanted: Axes, partial: Axes) -> None:
        """Adds the collectives that add up partial sums of a result.

        These are a reduce-scatter over the axes that are both in `partial` and in
        `wanted`, and then an all-reduce over the other axes of `partial`.

        CPU has no reduce-scatter. There, matmuls, convolutions and kernels without
        spare axes (axes along which devices would repeat the operator) have an
        all-reduce in its place. All other operators have no collective in its place:
        they all-reduce over all axes of `partial`. The last all-reduce is divided into
        one for each group of axes (`_together`).

        Args:
            value: the result.
            wanted: axes that divide the sum afterwards.
            partial: axes along which each device has a partial sum.
        """
        rest = tuple(axis for axis in wanted if axis not in partial)
        scattered = tuple(axis for axis in partial if axis in wanted)
        one_by_one = self.op.kind in PRODUCTS and not self.spare
        if not (one_by_one or self.division.scatters):
            scattered = ()
        added = tuple(axis for axis in partial if axis not in scattered)
        if scattered:
            whole = ShardedSize(total=value.num_bytes, axes=rest)
            kind = "reduce_scatter" if self.division.scatters else "all_reduce"
            self._add(kind, scattered, whole)
        part = ShardedSize(total=value.num_bytes, axes=(*rest, *scattered))
        for axes in self._together(added):
            self._add("all_reduce", axes, part)

    def _together(self, axes: Axes) -> list[Axes]:
        """Groups axes along which devices have partial sums, one group per all-reduce.

        On CPU, there is one group for each dim along which the axes divide the work. On
        other platforms, all axes are one group.
        """
        if self.division.scatters:
            return [axes] if axes else []
        dims = dict.fromkeys(self.kept[axis] for axis in axes)
        return [tuple(a for a in axes if self.kept[a] == dim) for dim in dims]

    def _divides(self) -> dict[str, Axes]:
        """Finds the axes that divide a matmul's work; {} for other operators.

        The result maps the rows (`m`), columns (`n`), depth (`k`) and batch (`b`) of
        the matmul to the axes that divide the work along them.
        """
        if self.op.kind != "matmul" or len(self.inputs) < 2:
            return {}
        left, right = (
            {self.division.root(d) for d in value.dims} for value in self.inputs[:2]
        )
        found: dict[str, list[str]] = {"m": [], "n": [], "k": [], "b": []}
        for axis, dim in self.kept.items():
            if dim is None:
                continue
            if self.is_partial(dim):
                found["k"].append(axis)
            elif dim in left and dim in right and not self.twice(dim):
                found["m" if dim in self.summed else "b"].append(axis)
            else:
                found["m" if dim in left else "n"].append(axis)
        return {name: tuple(axes) for name, axes in found.items()}

    def _add(self, kind: CollectiveKind, axes: Axes, amount: ShardedSize) -> None:
        self.sent.append(CollectiveOp(kind=kind, axes=axes, amount=amount))
