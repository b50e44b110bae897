"""Counts in a compiled program: kernels, copies, collectives, bytes moved.

Counts what the entry computation runs, and what it calls; what is inside of a fusion is
one kernel. Must not know JAX or a backend.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

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


def kernel_bytes(program: HloProgram) -> int:
    """Bytes that kernels other than products read and write, in all turns of loops.

    Of an operand that a kernel only slices, the slices count; of an array that it
    changes in place, what is written.
    """
    shapes = {o.name: o for lines in program.computations.values() for o in lines}
    return sum(
        trips * _kernel_bytes(program, operation, shapes)
        for operation, trips in _executed(program, program.entry, 1)
        if not _is_product(program, operation)
    )


_PASSIVE = (*_FREE, "iota", "after-all", "partition-id", "replica-id")
_SLICES = ("dynamic-slice", "slice", "gather")


def _executed(
    program: HloProgram, computation: str, trips: int
) -> Iterator[tuple[Operation, int]]:
    for operation in program.computations[computation]:
        if operation.opcode in ("while", "call", "conditional"):
            inner = trips * (operation.trips or 1)
            for called in operation.called:
                yield from _executed(program, called, inner)
        elif operation.opcode not in _PASSIVE:
            yield operation, trips


def _is_product(program: HloProgram, operation: Operation) -> bool:
    if operation.opcode == "custom-call":
        names = ("gemm", "cublas", "cudnn")
        return any(name in operation.attributes for name in names)
    inside = (program.computations.get(name, ()) for name in operation.called)
    products = ("dot", "convolution")
    return operation.opcode in products or any(
        o.opcode in products for lines in inside for o in lines
    )


def _kernel_bytes(
    program: HloProgram, operation: Operation, shapes: Mapping[str, Operation]
) -> int:
    if operation.opcode == "fusion":
        return _fusion_bytes(program.computations[operation.called[0]])
    if operation.opcode in _SLICES:
        return 2 * operation.num_bytes
    if operation.opcode == "dynamic-update-slice":
        return 2 * shapes[operation.operands[1]].num_bytes
    read = (shapes[name].num_bytes for name in operation.operands if name in shapes)
    return operation.num_bytes + sum(read)


def _fusion_bytes(lines: Sequence[Operation]) -> int:
    named = {o.name: o for o in lines}
    readers: dict[str, list[Operation]] = defaultdict(list)
    for operation in lines:
        for name in operation.operands:
            readers[name].append(operation)

    def through(operation: Operation) -> Operation:
        while operation.opcode in ("bitcast", "convert"):
            operation = named[operation.operands[0]]
        return operation

    def final(name: str) -> Iterator[Operation]:
        for reader in readers[name]:
            if reader.opcode == "bitcast":
                yield from final(reader.name)
            else:
                yield reader

    root, total = lines[-1], 0
    in_place: set[str] = set()
    tops = [named[n] for n in root.operands] if root.opcode == "tuple" else [root]
    for top in tops:
        changed = through(top)
        if changed.opcode not in ("dynamic-update-slice", "scatter"):
            total += top.num_bytes
            continue
        into = through(named[changed.operands[0]])
        if changed.opcode == "scatter":  # updates, and elements read and written
            total += 3 * named[changed.operands[2]].num_bytes
            total += 0 if into.opcode == "parameter" else top.num_bytes
        else:
            total += named[changed.operands[1]].num_bytes
        in_place.add(into.name)
    for parameter in lines:
        if parameter.opcode != "parameter" or parameter.name in in_place:
            continue
        size, reading = parameter.num_bytes, list(final(parameter.name))
        if reading and all(o.opcode in _SLICES for o in reading):
            size = min(size, sum(o.num_bytes for o in reading))
        total += size
    return total
