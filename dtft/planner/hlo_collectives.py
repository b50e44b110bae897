"""What a compiled XLA program communicates, trip counts of its loops included.

Pure functions over text, for the spellings of jax 0.10 to 0.12 (reference section 4).
Must not know JAX, plans' reasons or time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dtft.planner.hlo import Operation, Program, bits, parse
from dtft.planner.hlo_groups import axes_of, groups_of
from dtft.planner.plan import Collective

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]

_KINDS: Mapping[str, Kind] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    # One member sends its operand to the others: as much as any of them receives.
    "collective-broadcast": "permute",
}
_RENAMES = ("bitcast", "copy", "reshape", "transpose", "dynamic-slice", "slice")
"""Operations that leave elements as they are."""
_RUN_IN_PLACE = ("call", "fusion", "async", "while", "conditional")


@dataclass(frozen=True, kw_only=True)
class CompiledCollective(Collective):
    """Communication in a compiled program. `where` is JAX's name of its origin."""

    dtype: str
    """Of the first operand, XLA's name."""
    operands: tuple[tuple[int, ...], ...]
    """Shapes of what one device gives; several where XLA combined collectives."""
    group_size: int
    """Devices that communicate with each other."""
    trips_known: bool
    """Whether XLA says how often each loop around it runs; else `trips` counts one."""
    own_bytes: int
    """As `num_bytes`, in the program's types: CPU moves 16-bit floats as 32 bits."""
    name: str
    """The operation's name in the text."""

    @property
    def widened(self) -> bool:
        """Whether more is sent than the program says, in a wider type."""
        return self.own_bytes < self.num_bytes


def collectives(text: str, mesh: Mapping[str, int]) -> tuple[CompiledCollective, ...]:
    """What the program communicates in one run, in the order of its text.

    A -start and its -done are one. A collective of several arrays is one, with the sum
    of their bytes. In a loop, `trips` is the product of the trip counts around it. Of
    a conditional, the branch that communicates most bytes counts. Groups of a single
    device communicate nothing and are left out.

    Args:
        text: of `Compiled.as_text()`, for a program over all devices of `mesh`.
        mesh: axis name to size, slowest-varying first; the device of position i has
            the number i in the program.

    Raises:
        ValueError: the text is no program, or its groups are not of this mesh.
    """
    program = parse(text)
    return tuple(_collectives(program, program.entry, mesh, 1, True))


def _collectives(
    program: Program,
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
    program: Program, lines: Mapping[str, Operation], line: Operation
) -> int:
    """Bytes of the operands in the types that they had before XLA widened them."""
    if "promoted" in line.attributes:  # XLA's name of a sum in a wider type
        return sum(lines[name].num_bytes for name in line.operands) // 2
    return sum(
        lines[name].num_bytes // (2 if _is_widened(program, lines, lines[name]) else 1)
        for name in line.operands
    )


def _is_widened(
    program: Program, lines: Mapping[str, Operation], maker: Operation
) -> bool:
    """Whether a value of 32 bits is one of 16 bits that was converted before."""
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
