"""What one training step is made of: values, the operators between them, named dims.

The planner's own form of a program, free of JAX: `trace` makes it, everything else
reads it. A dim of two values that must be divided alike has one number (`Dim`), found
by following every operator; so a sharding is an assignment of mesh axes to these
numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

OperatorKind = Literal[
    "matmul",
    "convolution",
    "elementwise",
    "reduction",
    "layout",
    "gather",
    "scatter",
    "sort",
    "random",
    "collective",
    "opaque",
]
"""Classes of operators that cost alike.

`layout` moves bytes or only renames them (reshape, transpose, slice, concatenate,
convert); `opaque` is a primitive the tracer has no rule for: only its bytes are known.
"""

ITEM_BITS: Mapping[str, int] = {
    "bool": 8, "int2": 2, "int4": 4, "int8": 8, "int16": 16, "int32": 32, "int64": 64,
    "uint2": 2, "uint4": 4, "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64,
    "complex64": 64, "complex128": 128, "key<fry>": 64, "key<rbg>": 128,
    "key<urbg>": 128, "float0": 0,
}  # fmt: skip
"""Bits of one element; every float8 and float4 is matched by the digits in its name."""


def item_bits(dtype: str) -> int:
    """Bits of one element of a dtype, given by name.

    Raises:
        ValueError: there is no number in an unknown name; lists what is known.

    >>> item_bits("bfloat16"), item_bits("float8_e4m3fn"), item_bits("int4")
    (16, 8, 4)
    """
    if dtype in ITEM_BITS:
        return ITEM_BITS[dtype]
    digits = "".join(c if c.isdigit() else " " for c in dtype).split()
    if not digits:
        raise ValueError(
            f"dtype={dtype!r} has no known size. Known: {', '.join(ITEM_BITS)}, and "
            "float8 and float4 types."
        )
    return int(digits[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """An array of the program, as it is on one device that has all of it."""

    shape: tuple[int, ...]
    dtype: str
    dims: tuple[int, ...]
    """For each array dim the number of its `Dim`."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes; packed where elements are smaller than a byte."""
        return -(-self.size * item_bits(self.dtype) // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One primitive of the program."""

    primitive: str
    """JAX's name of it."""
    kind: OperatorKind
    inputs: tuple[int, ...]
    """Values read, indices into `Graph.values`; literals are left out."""
    outputs: tuple[int, ...]
    """Values written."""
    flops: float
    """Floating-point operations of one execution (multiply and add are two)."""
    special: float = 0.0
    """Of these, evaluations of functions such as exp, which cost more than one."""
    strided: float = 0.0
    """Elements of one execution that are read across the order in which they lie."""
    turned: float = 0.0
    """More of these, of products that are transposed: read so where a dim that the
    product sums over is divided."""
    turned_over: tuple[int, ...] = ()
    """The dims that those products sum over."""
    trips: int
    """How often it runs in a step: the lengths of the scans around it, multiplied."""
    summed: tuple[int, ...] = ()
    """Dims that are summed over: divided among devices they leave partial results."""
    contracted: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Places of the summed dims in the left and in the right operand of a matmul; of a
    convolution those of the channels that come in."""
    whole: tuple[int, ...] = ()
    """Dims that this operator needs undivided (sorted along, rolled, indexed)."""
    again: bool = False
    """Whether it is computed again in the backward pass (rematerialized)."""
    within: tuple[int, ...] = ()
    """Loops around it, outermost first, as indices into `Graph.loops`."""
    name: str = ""
    """Where the user's program asks for it: JAX's name stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedLoop:
    """A scan, or a while loop whose trips are known."""

    length: int
    primitive: str
    operators: tuple[int, int]
    """Its body: first operator, and the one after the last, in `Graph.operators`."""
    sliced: tuple[tuple[int, int], ...] = ()
    """Values outside, with a leading dim, and what the body sees of each in turn."""
    stacked: tuple[tuple[int, int], ...] = ()
    """Values the body makes, and where each is kept outside, with a leading dim."""
    carried: tuple[tuple[int, int, int, int], ...] = ()
    """Before the loop, into the body, out of the body, after the loop."""
    again: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """Dims of values that are divided alike."""

    sizes: tuple[int, ...]
    """The sizes it has, ascending: a merged dim is larger than its first part."""
    loop: bool = False
    """Whether it is what a scan goes along: its parts are needed one after another."""

    def divisible_by(self, parts: int) -> bool:
        """Whether every array that has it can be divided evenly."""
        return all(size % parts == 0 for size in self.sizes)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A traced step."""

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    """In the order in which the program runs them."""
    dims: tuple[Dim, ...]
    loops: tuple[CountedLoop, ...]
    inputs: Mapping[str, int]
    """Path of each argument's leaf, such as `state/params/up/kernel`, to its value."""
    outputs: Mapping[str, int]
    """Path of each result's leaf to its value."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Primitives without a rule, and the bytes that they read and write in a step."""

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, those computed again included."""
        return sum(op.flops * op.trips for op in self.operators)

    def bytes_of(self, operator: Operator) -> int:
        """Bytes that one execution reads and writes when nothing is fused."""
        num_bytes = self._num_bytes
        return sum([num_bytes[i] for i in (*operator.inputs, *operator.outputs)])

    @cached_property
    def _num_bytes(self) -> tuple[int, ...]:
        return tuple(value.num_bytes for value in self.values)
