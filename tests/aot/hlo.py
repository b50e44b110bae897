"""Reads the text of a compiled XLA program: kernels, copies, collectives, aliases.

Pure functions over text. Counts what the entry computation runs, and what it calls;
what is inside of a fusion is one kernel. Must not know JAX or a backend.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_COPIES = ("copy", "copy-start")
_FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    """Dtype and shape of the result, or of each element of a tuple."""
    operands: tuple[str, ...]
    called: str
    """The computation it calls; empty for none."""

    @property
    def largest(self) -> int:
        """Elements of the largest array of the result."""
        return max((math.prod(shape) for _, shape in self.arrays), default=0)

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(_bits(dtype) * math.prod(shape) for dtype, shape in self.arrays) // 8


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program."""

    computations: dict[str, tuple[Operation, ...]]
    entry: str
    aliases: dict[int, int]
    """Number of a flat output to that of the flat input whose buffer it takes."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What the entry computation runs, with what it calls in its place."""
        return tuple(self._walk(self.entry))

    def kernels(self, elements: int) -> list[Operation]:
        """What computes a result of `elements` or more; copies are not among it."""
        return [
            o
            for o in self.operations
            if o.largest >= elements and self._computes(o) and not self._copies(o)
        ]

    def copies(self, elements: int) -> list[Operation]:
        """What only copies `elements` or more, as an operation or a kernel."""
        return [o for o in self.operations if o.largest >= elements and self._copies(o)]

    def collectives(self) -> Counter[str]:
        """How often each kind of communication takes place."""
        found = (o.opcode.removesuffix("-start") for o in self.operations)
        return Counter(kind for kind in found if kind in _COLLECTIVES)

    def bytes_moved(self) -> int:
        """Bytes that kernels and copies read and write, each operand once."""
        sizes = {o.name: o.bytes for o in self.operations}
        return sum(
            o.bytes + sum(sizes.get(name, 0) for name in set(o.operands))
            for o in self.operations
            if o.opcode not in _FREE
        )

    def _computes(self, operation: Operation) -> bool:
        kind = operation.opcode.removesuffix("-start").removesuffix("-done")
        return kind not in (*_FREE, *_COLLECTIVES, "copy")

    def _copies(self, operation: Operation) -> bool:
        if operation.opcode in _COPIES:
            return True
        if operation.opcode != "fusion":
            return False
        inside = {o.opcode for o in self.computations.get(operation.called, ())}
        return "copy" in inside and inside <= {"copy", *_FREE}

    def _walk(self, computation: str) -> list[Operation]:
        found: list[Operation] = []
        for operation in self.computations[computation]:
            if operation.opcode == "call":
                found += self._walk(operation.called)
            else:
                found.append(operation)
        return found


def parse(text: str | None) -> Program:
    """Reads the text of `jax.stages.Compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, tuple[Operation, ...]] = {}
    entry, name, lines = "", "", []
    text = text or ""
    for line in text.splitlines():
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
    return Program(computations=computations, entry=entry, aliases=_aliases(text))


def _operation(line: str) -> Operation:
    name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].strip()
    opcode, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 1
    called = re.search(r"\b(?:calls|to_apply)=%?([\w.\-]+)", rest[end:])
    return Operation(
        name=name.removeprefix("%"),
        opcode=opcode,
        arrays=tuple(
            (dtype, tuple(int(size) for size in sizes.split(",") if size))
            for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", result)
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", rest[:end])),
        called=called[1] if called else "",
    )


def _closing(text: str) -> int:
    """Just behind the parenthesis that closes the one at the start."""
    depth = 0
    for position, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return position + 1
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def _aliases(text: str) -> dict[int, int]:
    head = text.split("\n", 1)[0]
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", head)
    return {int(output or 0): int(number) for output, number in pairs}


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)  # f32, s64, f8e4m3fn
    return int(digits[1]) if digits else 0
