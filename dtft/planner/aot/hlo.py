"""Reads the text of a compiled XLA program: operations, collectives, device groups.

The functions are pure. They read the syntax of jax 0.10 to 0.12.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from dtft.planner.plan import Collective

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)="
    r"%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """Type and shape of one array."""

    dtype: str
    """XLA's name of the type, such as `bf16`."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array; elements below one byte are packed."""
        return -(-self.size * bits(self.dtype) // 8)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a compiled program: one line of the program's text."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """The result; for a tuple, each array of the tuple."""
    operands: tuple[str, ...]
    """Names of the operations of the same computation whose results it reads."""
    attributes: str
    """Text after the operands: device groups, called computations, metadata."""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the operation calls."""
        branches = _BRANCHES.search(self.attributes)
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return (*_CALLED.findall(self.attributes), *names)

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def trips(self) -> int | None:
        """Number of times that the body of a while loop runs.

        None if XLA does not know the number, or the operation is no while loop.
        """
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def source(self) -> str:
        """JAX's name (`op_name`) of the operation's origin in the user's program.

        The operation's own name if the text has no `op_name`.
        """
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else self.name


@dataclass(frozen=True, kw_only=True)
class HloProgram:
    """The operations of a compiled program, by computation.

    A computation is a function in the program's text, such as the body of a loop.
    """

    computations: Mapping[str, tuple[Operation, ...]]
    entry: str
    """Name of the computation that runs the program."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Operations of the entry computation, which runs the program.

        A `call` is replaced by the operations of the computation that it calls.
        """
        return tuple(self._run_by(self.entry))

    def _run_by(self, computation: str) -> Iterator[Operation]:
        for operation in self.computations[computation]:
            if operation.opcode == "call":
                yield from self._run_by(operation.called[0])
            else:
                yield operation


def parse(text: str | None) -> HloProgram:
    """Reads the text of `jax.stages.Compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, tuple[Operation, ...]] = {}
    entry, name, lines = "", "", []
    for line in (text or "").splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(lines)
        elif name and " = " in line:
            lines.append(_operation(line))
    if not entry:
        raise ValueError("the text has no ENTRY: give Compiled.as_text().")
    return HloProgram(computations=computations, entry=entry)


def _operation(line: str) -> Operation:
    name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].strip()
    opcode, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 1
    return Operation(
        name=name.removeprefix("%"),
        opcode=opcode,
        arrays=tuple(
            Array(dtype=dtype, shape=_sizes(sizes))
            for dtype, sizes in _ARRAY.findall(result)
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", rest[:end])),
        attributes=rest[end:],
    )


def _sizes(text: str) -> tuple[int, ...]:
    """Reads sizes from text such as `8,<=4`; a bounded dim has its upper bound."""
    return tuple(int(size.removeprefix("<=")) for size in text.split(",") if size)


def _closing(text: str) -> int:
    """Finds the position after the parenthesis that closes the first parenthesis.

    Raises:
        ValueError: no parenthesis closes it.
    """
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def bits(dtype: str) -> int:
    """Returns the bits of an element of an XLA type; 0 for types without data.

    >>> bits("bf16"), bits("pred"), bits("f8e4m3fn")
    (16, 8, 8)
    """
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+?(\d+)", dtype)  # f32, s64, bf16, f8e4m3fn
    return int(digits[1]) if digits else 0


# Device groups of a collective. XLA spells them in three ways: as lists, as an iota and
# as source-target pairs. XLA numbers devices by their position in the mesh, so a group
# that holds all members along some axes is named by these axes.


Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}"
)
_PERMUTED = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")


def groups_of(attributes: str, mesh: Mapping[str, int]) -> Groups:
    """Reads the device groups of a collective from its text.

    Of a permutation, reads the (source, target) pairs of devices.

    The examples have XLA's three ways to write groups: as lists; as a shape, here the
    transpose of [[0, 1], [2, 3]]; and as the axes of a mesh that a group runs along.

    >>> groups_of("channel_id=1, replica_groups={{0,1},{2,3}}, x=1", {"a": 4})
    ((0, 1), (2, 3))
    >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0), x=1", {"a": 4})
    ((0, 2), (1, 3))
    >>> groups_of("replica_groups=mesh['i'=2,'j'=2] {'i'}, x=1", {"a": 4})
    ((0, 2), (1, 3))

    Args:
        attributes: the part of the operation's line after the operands.
        mesh: map from an axis to its size. Without groups in `attributes`, all devices
            of the mesh are one group.

    Raises:
        ValueError: the syntax of the groups is unknown.
    """
    everyone = tuple(range(math.prod(mesh.values())))
    if found := _LISTED.search(attributes):
        listed = re.findall(r"\{([\d,]*)\}", found[1])
        return tuple(_numbers(group) for group in listed) or (everyone,)
    if found := _IOTA.search(attributes):
        return _iota(*found.groups())
    if found := _MESH.search(attributes):
        return _along_axes(*found.groups())
    if "replica_groups=" not in attributes:
        return (everyone,)
    spelling = attributes.split("replica_groups=", 1)[1][:80]
    raise ValueError(
        f"replica_groups={spelling!r} is spelled as no known XLA does. Allowed: lists, "
        "iota and mesh. Report this with the versions of jax and jaxlib."
    )


@lru_cache(maxsize=4096)
def axes_of(
    groups: Groups, mesh: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, ...], int]:
    """Finds the mesh axes along which a collective communicates, and the group size.

    `groups` has the device numbers of each group. Members of a group differ in their
    position along the returned axes. The size is the number of devices of the largest
    group. It is smaller than the product of the axes' sizes if the group has only a
    part of an axis. For (source, target) pairs it is 2.

    >>> axes_of(((0, 2), (1, 3)), (("data", 2), ("tensor", 2)))
    (('data',), 2)

    Raises:
        ValueError: the groups name devices that the mesh does not have.
    """
    sizes = [size for _, size in mesh]
    highest = max((max(group, default=0) for group in groups), default=0)
    if highest >= math.prod(sizes):
        raise ValueError(
            f"mesh={dict(mesh)} has {math.prod(sizes)} devices, but the program names "
            f"number {highest}. Give the mesh that it was compiled for."
        )
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group, int), sizes))
        differs |= (places != places[:, :1]).any(axis=1)
    names = tuple(name for (name, _), yes in zip(mesh, differs, strict=True) if yes)
    return names, max(map(len, groups), default=1)


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))


def _iota(shape: str, source: str, order: str | None) -> Groups:
    sizes = _numbers(source)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if order:
        numbers = numbers.transpose(_numbers(order))
    return _rows(numbers.reshape(_numbers(shape)))


def _along_axes(axes: str, devices: str | None, chosen: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([^=,']+)'?=(\d+)", axes)}
    numbers = _devices(devices, tuple(sizes.values()))
    shape: list[int] = []
    first: dict[str, int] = {}
    parts = [_part(text) for text in chosen.split(",") if text.strip()]
    cuts = {name: {1, size} for name, size in sizes.items()}
    for name, before, size in parts:
        cuts[name] |= {before, before * (size or sizes[name])}
    for name in sizes:  # each axis is split into as many dims as it has parts
        first[name] = len(shape)
        ends = sorted(cuts[name])
        shape += [b // a for a, b in zip(ends, ends[1:], strict=False)]
    grouped: list[int] = []
    for name, before, size in parts:
        ends = sorted(cuts[name])
        last = ends.index(before * (size or sizes[name]))
        grouped += range(first[name] + ends.index(before), first[name] + last)
    others = [dim for dim in range(len(shape)) if dim not in grouped]
    members = math.prod(shape[dim] for dim in grouped)
    ordered = numbers.reshape(shape).transpose(*others, *grouped)
    return _rows(ordered.reshape(-1, members))


def _part(text: str) -> tuple[str, int, int]:
    """Reads a part of a mesh axis, such as `'x':(2)4`, from the groups of a collective.

    XLA may divide an axis into parts. In `'x':(2)4`, a part of axis x has size 4, and
    the sizes of the parts before it have the product 2. Returns the axis, this product
    and the size; for a whole axis, such as `'x'`, the product is 1 and the size 0.

    Raises:
        ValueError: the text is neither an axis nor a part of one.
    """
    found = re.fullmatch(r"\s*'?([^':]+)'?(?::\((\d+)\)(\d+))?\s*", text)
    if not found:
        raise ValueError(f"{text!r} is no axis of a group: 'name' or 'name':(2)4.")
    return found[1], int(found[2] or 1), int(found[3] or 0)


def _devices(text: str | None, shape: Sequence[int]) -> np.ndarray:
    """Reads the device numbers of an XLA mesh, in the mesh's shape.

    Args:
        text: the numbers in order, such as `0,2,1,3`, or a transpose of ascending
            numbers, such as `[2,2]<=[2,2]T(1,0)`. Without a transpose, and for None,
            the numbers are ascending.
        shape: sizes of the mesh axes.
    """
    found = _PERMUTED.match(text) if text else None
    if text and not found:
        return np.asarray(_numbers(text)).reshape(shape)
    order = _numbers(found[3]) if found else ()
    if found is None or not order:
        return np.arange(math.prod(shape)).reshape(shape)
    sizes = _numbers(found[2] or found[1])
    return np.arange(math.prod(shape)).reshape(sizes).transpose(order).reshape(shape)


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in numbers)


Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]

_KINDS: Mapping[str, Kind] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    # One member sends its operand to all others, and each receives as many bytes.
    "collective-broadcast": "permute",
}
_RENAMES = ("bitcast", "copy", "reshape", "transpose", "dynamic-slice", "slice")
"""Operations that move elements without changing them."""
_RUN_IN_PLACE = ("call", "fusion", "async", "while", "conditional")


@dataclass(frozen=True, kw_only=True)
class CompiledCollective(Collective):
    """A collective of a compiled program.

    `where` is JAX's name of its origin in the user's program (`Operation.source`).
    """

    dtype: str
    """XLA's name of the first operand's type."""
    operands: tuple[tuple[int, ...], ...]
    """Shapes of the operands on one device; several if XLA combined collectives."""
    group_size: int
    """Number of devices in a group."""
    trips_known: bool
    """Whether XLA knows the trip count of each loop around the collective. A loop with
    unknown trip count counts as one trip."""
    own_bytes: int
    """Bytes of one execution in the types of the user's program. XLA on CPU widens
    16-bit floats to 32 bits; `num_bytes` has the bytes after widening."""
    name: str
    """The operation's name in the text."""

    @property
    def widened(self) -> bool:
        """Whether XLA sends a wider type than the type in the program."""
        return self.own_bytes < self.num_bytes


def collectives(text: str, mesh: Mapping[str, int]) -> tuple[CompiledCollective, ...]:
    """Finds the collectives that a program runs, in the order of the program's text.

    An operation `-start` and its `-done` are one collective. A collective of several
    arrays is one result, with the sum of their bytes. In loops, `trips` is the product
    of the trip counts. Of a conditional, only the collectives of the branch with the
    most bytes are returned. Collectives in groups of a single device are left out.

    Args:
        text: text of `Compiled.as_text()`, for a program over all devices of `mesh`.
        mesh: map from an axis to its size, slowest-varying axis first. The device at
            position i of the mesh has the number i in the program.

    Raises:
        ValueError: the text is no program, or its groups do not belong to this mesh.
    """
    program = parse(text)
    return tuple(_collectives(program, program.entry, mesh, 1, True))


def _collectives(
    program: HloProgram,
    computation: str,
    mesh: Mapping[str, int],
    trips: int,
    known: bool,
) -> Iterator[CompiledCollective]:
    lines = {line.name: line for line in program.computations.get(computation, ())}
    for line in lines.values():
        opcode = line.opcode.removesuffix("-start")
        if opcode in _KINDS:
            groups = groups_of(line.attributes, mesh)
            axes, size = axes_of(groups, tuple(mesh.items()))
            if axes:
                own = _own_bytes(program, lines, line)
                yield _collective(lines, line, own, axes, size, trips, known)
        elif opcode in _RUN_IN_PLACE:
            inner = trips * (line.trips or 1) if opcode == "while" else trips
            sure = known and (opcode != "while" or line.trips is not None)
            branches = [
                list(_collectives(program, name, mesh, inner, sure))
                for name in line.called
            ]
            if opcode == "conditional":
                branches = [max(branches, key=_total, default=[])]
            for branch in branches:
                yield from branch


def _collective(
    lines: Mapping[str, Operation],
    line: Operation,
    own_bytes: int,
    axes: tuple[str, ...],
    group_size: int,
    trips: int,
    known: bool,
) -> CompiledCollective:
    kind = _KINDS[line.opcode.removesuffix("-start")]
    given = [array for name in line.operands for array in lines[name].arrays]
    times = group_size if kind == "all_gather" else 1
    return CompiledCollective(
        kind=kind,
        axes=axes,
        num_bytes=times * sum(array.num_bytes for array in given),
        own_bytes=times * own_bytes,
        trips=trips,
        where=line.source,
        dtype=given[0].dtype,
        operands=tuple(array.shape for array in given),
        group_size=group_size,
        trips_known=known,
        name=line.name,
    )


def _own_bytes(
    program: HloProgram, lines: Mapping[str, Operation], line: Operation
) -> int:
    """Counts the bytes of a collective's operands before XLA widened their types.

    Args:
        program: the compiled program.
        lines: the operations of the collective's computation, by name.
        line: the collective.
    """
    if "promoted" in line.attributes:  # XLA's mark of a sum in a wider type
        return sum(lines[name].num_bytes for name in line.operands) // 2
    return sum(
        lines[name].num_bytes // (2 if _is_widened(program, lines, lines[name]) else 1)
        for name in line.operands
    )


def _is_widened(
    program: HloProgram, lines: Mapping[str, Operation], maker: Operation
) -> bool:
    """Returns whether the value that an operation makes was widened from 16 to 32 bits.

    Follows the value back from `maker` through operations that only move elements
    (`_RENAMES`), and into fusions.

    Args:
        program: the compiled program.
        lines: the operations of the computation of `maker`, by name.
        maker: the operation that makes the value.
    """
    while True:
        if maker.opcode == "fusion":
            body = program.computations[maker.called[0]]
            lines, maker = {one.name: one for one in body}, body[-1]
        source = lines.get(maker.operands[0]) if maker.operands else None
        if source is None or not source.arrays:
            return False
        if maker.opcode == "convert":
            before, after = (bits(one.arrays[0].dtype) for one in (source, maker))
            return (before, after) == (16, 32)
        if maker.opcode not in _RENAMES:
            return False
        maker = source


def _total(found: list[CompiledCollective]) -> int:
    return sum(one.num_bytes * one.trips for one in found)
