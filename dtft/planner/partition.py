"""What a division of dims over mesh axes means for every operator: work, collectives.

Given which mesh axes divide which dims, says per operator what each device computes and
what must be sent, as amounts divided by axes: the sizes of the axes come later, so that
thousands of meshes share one answer (`amounts`). Follows what XLA's partitioner does
with a program whose results are constrained to these shardings: a partial sum is added
up directly behind the operator that makes it. Pure; must not know seconds, links or
memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtft.planner.amounts import MICRO, Amount, Sent, Work
from dtft.planner.graph import Graph, Operator, Value
from dtft.planner.links import CollectiveKind
from dtft.planner.plan import Spec
from dtft.planner.products import convolution_sides, product_sizes
from dtft.planner.work_dims import WorkDims, position

Axes = tuple[str, ...]
PRODUCTS = ("matmul", "convolution")


@dataclass(frozen=True, kw_only=True)
class Division:
    """Which mesh axes divide which dims."""

    axes: Mapping[int, Axes]
    """Dim to the axes that divide it wherever it occurs."""
    alias: Mapping[int, int] = field(default_factory=dict)
    """Dim to the dim whose axes it has: equal layers share one decision."""
    rest: Mapping[frozenset[int], Mapping[int, Axes]] = field(default_factory=dict)
    """Dims of arrays whose sums are wanted divided further, and the axes that do it
    along which of them: gradients at ZeRO levels 2 and 3."""
    first: Mapping[frozenset[int], int] = field(default_factory=dict)
    """Dims of an array, and the one of them that has its axes before the others have
    theirs: of experts, in what they work on (`experts`), and of `weights`."""
    scatters: bool = False
    """Whether the backend sums and divides in one collective (reduce-scatter): GPU and
    TPU do; XLA's CPU backend sums everywhere, and each device keeps its part. It also
    sums over the axes of one dim after those of another, where others sum at once, and
    gathers what it looks for the largest of (`top_k`)."""
    spare: Axes = ()
    """Axes of the mesh for the dims of weights, whether they lie on any or not."""

    def of(self, dim: int) -> Axes:
        """The axes that divide a dim."""
        return self.axes.get(self.root(dim), ())

    def root(self, dim: int) -> int:
        """The dim that stands for it."""
        return self.alias.get(dim, dim)

    def spec(self, value: Value) -> Spec:
        """How a value is divided; of dims that want the same axis the first has it."""
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
        """The place of the dim that has its axes before the others."""
        roots = [self.root(dim) for dim in value.dims]
        dim = self.first.get(frozenset(roots))
        return None if dim is None else roots.index(dim)


def flat(spec: Sequence[Axes]) -> Axes:
    """The axes of a spec."""
    return tuple(axis for part in spec for axis in part)


def work(graph: Graph, operator: Operator, division: Division) -> Work:
    """What one execution of an operator takes on each device."""
    return _Placed(graph, operator, division).work()


class _Placed(WorkDims):
    """One operator under a division: what is sent for it."""

    def __init__(self, graph: Graph, operator: Operator, division: Division) -> None:
        super().__init__(graph, operator, division)
        self.spare = tuple(a for a in division.spare if a not in self.kept)
        self.sent: list[Sent] = []

    def work(self) -> Work:
        for index in range(len(self.inputs)):
            self._send_operand(index)
        for number in range(len(self.outputs)):
            self._send_result(number)
        return Work(
            operator=self.op,
            divided_by=tuple(a for a, dim in self.kept.items() if dim is not None),
            sizes=product_sizes(self.op, self.inputs, self.outputs, self._divides()),
            reads=tuple(
                Amount(total=value.num_bytes, axes=self._fitting(index))
                for index, value in enumerate(self.inputs)
            ),
            writes=tuple(
                Amount(total=value.num_bytes, axes=flat(spec))
                for value, spec in zip(self.outputs, self.out_specs, strict=True)
            ),
            sent=tuple(self.sent),
            sides=convolution_sides(
                self.op, self.inputs, self.outputs, self.division.root, self.kept
            ),
            turned_by=self._turned_by(),
        )

    def _turned_by(self) -> Axes:
        """Axes that leave partial sums in the transposed products that it reads."""
        axes = flat([self.division.of(dim) for dim in self.op.turned_over])
        return tuple(dict.fromkeys(axis for axis in axes if axis != MICRO))

    def _fitting(self, index: int) -> Axes:
        return tuple(a for a in flat(self.in_specs[index]) if self.fits(index, a))

    def _send_operand(self, index: int) -> None:
        """What an operand lacks, or has along another dim than the work."""
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
        amount = Amount(total=value.num_bytes, axes=rest)
        if gathered:
            self._add("all_gather", gathered, amount)
        if exchanged:
            self._add("all_to_all", exchanged, amount)

    def _further(self, value: Value) -> Axes:
        """Axes that divide a sum once it is made."""
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
            local = Amount(total=value.num_bytes, axes=flat(spec))
            self._add("all_to_all", moved, local)

    def _add_up_spread(
        self, value: Value, kept: Axes, partial: Axes, further: Axes
    ) -> None:
        """Of what all would make alike each makes some rows, and moves them then."""
        part = Amount(total=value.num_bytes, axes=(*kept, *self.spare))
        self._add("all_reduce", partial, part)
        moved = Amount(total=value.num_bytes, axes=(*kept, *further))
        self._add("permute", (*partial, *self.spare), moved)

    def _add_up(self, value: Value, wanted: Axes, partial: Axes) -> None:
        """Partial sums become sums, divided at once where that is wanted."""
        rest = tuple(axis for axis in wanted if axis not in partial)
        scattered = tuple(axis for axis in partial if axis in wanted)
        one_by_one = self.op.kind in PRODUCTS and not self.spare
        if not (one_by_one or self.division.scatters):
            scattered = ()
        added = tuple(axis for axis in partial if axis not in scattered)
        if scattered:
            whole = Amount(total=value.num_bytes, axes=rest)
            kind = "reduce_scatter" if self.division.scatters else "all_reduce"
            self._add(kind, scattered, whole)
        part = Amount(total=value.num_bytes, axes=(*rest, *scattered))
        for axes in self._together(added):
            self._add("all_reduce", axes, part)

    def _together(self, axes: Axes) -> list[Axes]:
        """Axes that are summed over in one collective."""
        if self.division.scatters:
            return [axes] if axes else []
        dims = dict.fromkeys(self.kept[axis] for axis in axes)
        return [tuple(a for a in axes if self.kept[a] == dim) for dim in dims]

    def _divides(self) -> dict[str, Axes]:
        """Axes along the rows, columns, depth and batch of a matmul."""
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

    def _add(self, kind: CollectiveKind, axes: Axes, amount: Amount) -> None:
        self.sent.append(Sent(kind=kind, axes=axes, amount=amount))
