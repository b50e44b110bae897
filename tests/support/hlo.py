"""Counts in a compiled program: kernels, copies, collectives, bytes moved.

Counts what the entry computation runs, and what it calls; what is inside of a fusion is
one kernel. Must not know JAX or a backend.
"""

import re
from collections import Counter

from dtft.planner.aot.hlo import HloProgram, Operation

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


def largest(operation: Operation) -> int:
    """Elements of the largest array of its result."""
    return max((array.size for array in operation.arrays), default=0)


def kernels(program: HloProgram, elements: int) -> list[Operation]:
    """What computes a result of `elements` or more; copies are not among it."""
    return [
        o
        for o in program.operations
        if largest(o) >= elements and _computes(o) and not _copies(program, o)
    ]


def copies(program: HloProgram, elements: int) -> list[Operation]:
    """What only copies `elements` or more, as an operation or a kernel."""
    return [
        o for o in program.operations if largest(o) >= elements and _copies(program, o)
    ]


def collectives(program: HloProgram) -> Counter[str]:
    """How often each kind of communication takes place."""
    found = (o.opcode.removesuffix("-start") for o in program.operations)
    return Counter(kind for kind in found if kind in _COLLECTIVES)


def aliases(text: str | None) -> dict[int, int]:
    """Flat outputs, and the flat inputs whose buffers they take; of a text."""
    head = (text or "").split("\n", 1)[0]
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", head)
    return {int(output or 0): int(number) for output, number in pairs}


def bytes_moved(program: HloProgram) -> int:
    """Bytes that kernels and copies read and write, each operand once."""
    sizes = {o.name: o.num_bytes for o in program.operations}
    return sum(
        o.num_bytes + sum(sizes.get(name, 0) for name in set(o.operands))
        for o in program.operations
        if o.opcode not in _FREE
    )


def _computes(operation: Operation) -> bool:
    kind = operation.opcode.removesuffix("-start").removesuffix("-done")
    return kind not in (*_FREE, *_COLLECTIVES, "copy")


def _copies(program: HloProgram, operation: Operation) -> bool:
    if operation.opcode in _COPIES:
        return True
    if operation.opcode != "fusion":
        return False
    inside = {o.opcode for o in program.computations.get(operation.called[0], ())}
    return "copy" in inside and inside <= {"copy", *_FREE}
