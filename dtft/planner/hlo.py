"""Reads the text of a compiled XLA program: computations and their operations.

Pure functions over text, for the spellings of jax 0.10 to 0.12 (reference section 4).
Must not know JAX, a backend or what is looked for in a program.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    """XLA's name, such as `bf16`."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes; packed where elements are smaller than a byte."""
        return -(-self.size * bits(self.dtype) // 8)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """The result, or each element of a tuple."""
    operands: tuple[str, ...]
    attributes: str
    """What stands behind the operands: groups, called computations, metadata."""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations it names."""
        branches = _BRANCHES.search(self.attributes)
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return (*_CALLED.findall(self.attributes), *names)

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def trips(self) -> int | None:
        """Of a while loop: how often its body runs; None where XLA does not say."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def source(self) -> str:
        """What of the user's program it comes from, as JAX named it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else self.name


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program."""

    computations: Mapping[str, tuple[Operation, ...]]
    entry: str

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What the entry computation runs, with what it calls in its place."""
        return tuple(self._run_by(self.entry))

    def _run_by(self, computation: str) -> Iterator[Operation]:
        for operation in self.computations[computation]:
            if operation.opcode == "call":
                yield from self._run_by(operation.called[0])
            else:
                yield operation


def parse(text: str | None) -> Program:
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
    return Program(computations=computations, entry=entry)


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
    """Of `8,<=4` the most that there can be."""
    return tuple(int(size.removeprefix("<=")) for size in text.split(",") if size)


def _closing(text: str) -> int:
    """Just behind the parenthesis that closes the one at the start."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def bits(dtype: str) -> int:
    """Bits of an element of one of XLA's types; 0 for those that have none.

    >>> bits("bf16"), bits("pred"), bits("f8e4m3fn")
    (16, 8, 8)
    """
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+?(\d+)", dtype)  # f32, s64, bf16, f8e4m3fn
    return int(digits[1]) if digits else 0
