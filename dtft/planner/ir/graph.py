"""The graph of a training step: values, operators, loops and dims.

The graph is the planner's representation of a program and contains no JAX types.
`trace` builds it. Dims that must be divided in the same way form one set (`Dim`) with
one number. The sets are found by propagation through every operator. A sharding assigns
mesh axes to the numbers.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    "kernel",
    "opaque",
]
"""Kinds of operators, by their cost.

`layout` moves bytes or only relabels them (reshape, transpose, slice, concatenate,
convert). `kernel` is a kernel that XLA does not make, but whose operation count is
known (cuDNN's attention). `opaque` is a primitive whose operation count is unknown:
only its bytes are known.
"""

ITEM_BITS: Mapping[str, int] = {
    "bool": 8, "int2": 2, "int4": 4, "int8": 8, "int16": 16, "int32": 32, "int64": 64,
    "uint2": 2, "uint4": 4, "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64,
    "complex64": 64, "complex128": 128, "key<fry>": 64, "key<rbg>": 128,
    "key<urbg>": 128, "float0": 0,
}  # fmt: skip
"""Bits of one element by dtype name. `item_bits` takes the bits of float8 and float4
types from the names."""


def item_bits(dtype: str) -> int:
    """Returns the number of bits of one element of a dtype, given by name.

    Raises:
        ValueError: the name is unknown and contains no number; lists the known names.

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
    """An array of the program: undivided, or one device's part inside a shard_map."""

    shape: tuple[int, ...]
    dtype: str
    dims: tuple[int, ...]
    """For each dim of the array, the index of its set of dims in `Graph.dims`."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes; elements smaller than a byte are packed."""
        return -(-self.size * item_bits(self.dtype) // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One application of a primitive in the program."""

    primitive: str
    """JAX's name of the primitive; for a custom kernel, the kernel's name."""
    kind: OperatorKind
    inputs: tuple[int, ...]
    """Indices into `Graph.values` of the operands; literals are left out."""
    outputs: tuple[int, ...]
    """Indices into `Graph.values` of the results."""
    flops: float
    """Operations of one execution on all devices, counted as in the module `flops`."""
    special: float = 0.0
    """The part of `flops` in functions such as exp, which cost more than additions."""
    strided: float = 0.0
    """Elements of one execution that are read with a stride, across memory order."""
    turned: float = 0.0
    """Elements, of transposed results of matmuls, that are read with a stride only if a
    mesh axis divides a dim in `turned_over`. `strided` does not count them."""
    turned_over: tuple[int, ...] = ()
    """The contracted dims of the matmuls whose transposed results `turned` counts."""
    trips: int
    """Executions in a step: the product of the lengths of the loops around it; 0 in
    every branch of a `cond` but the branch with the most flops."""
    summed: tuple[int, ...] = ()
    """Dims that are summed or otherwise reduced; dividing them among devices leaves
    partial results."""
    contracted: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Positions of the contracted dims in the left and right operand of a
    `dot_general`; for a convolution, positions of the input channels. Empty for other
    primitives."""
    precision: str = ""
    """JAX's precision of a matmul or convolution: `high`, `highest`, or the name of a
    `jax.lax.DotAlgorithmPreset`; empty for the default."""
    whole: tuple[int, ...] = ()
    """Dims that this operator needs undivided, because it sorts, rolls or indexes along
    them."""
    again: bool = False
    """Whether the operator is recomputed in the backward pass (rematerialized)."""
    unread: bool = False
    """Whether nothing needs the results. XLA removes such an operator, so it costs
    nothing."""
    within: tuple[int, ...] = ()
    """Loops around the operator, outermost first, as indices into `Graph.loops`."""
    manual: bool = False
    """Whether the operator is inside of a shard_map, where the program itself divides
    the arrays."""
    name: str = ""
    """JAX's name stack of the operator: the functions of the user's program around it,
    such as `transpose(jvp(layer))/mul`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedLoop:
    """A scan or while loop of the program.

    `length` is the number of iterations; 1 for a while loop with an unknown trip count.
    `again` says whether the backward pass recomputes the loop (rematerialization).
    """

    length: int
    primitive: str
    operators: tuple[int, int]
    """Range [start, stop) of the body in `Graph.operators`."""
    sliced: tuple[tuple[int, int], ...] = ()
    """Pairs: an array outside of the loop, and the value in the body that is its slice
    along the first dim in each iteration."""
    stacked: tuple[tuple[int, int], ...] = ()
    """Pairs: a value of the body, and the array outside of the loop that stacks the
    values of all iterations along its first dim."""
    carried: tuple[tuple[int, int, int, int], ...] = ()
    """For each carried array, the indices of its values: before the loop, at the start
    of the body, at the end of the body, after the loop."""
    again: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A set of dims, of one or several values, that are divided in the same way."""

    sizes: tuple[int, ...]
    """The distinct sizes of the dims, ascending. A set has several sizes because of
    reshapes: a merged dim is in the set of the first dim that it is merged from, and a
    split dim is in the set of the first dim that it is split into."""
    loop: bool = False
    """Whether a scan slices or stacks arrays along the dim: each iteration needs
    another part of the dim."""

    def divisible_by(self, parts: int) -> bool:
        """Whether every array with this dim can be divided into `parts` evenly."""
        return all(size % parts == 0 for size in self.sizes)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph of a traced program, such as a training step."""

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    """Operators in program order."""
    dims: tuple[Dim, ...]
    loops: tuple[CountedLoop, ...]
    inputs: Mapping[str, int]
    """Map from the path of each argument's leaf, such as `state/params/up/kernel`, to
    the index of its value."""
    outputs: Mapping[str, int]
    """Map from the path of each result's leaf to the index of its value."""
    constants: tuple[int, ...] = ()
    """Arrays that the traced function closes over and the program needs, as indices
    into `values`."""
    barred: frozenset[int] = frozenset()
    """Values that the backward pass of a rematerialized part reads through an
    optimization barrier: saved values and cotangents. XLA fuses no operators across the
    barrier."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Map from a primitive of unknown cost to the bytes that it reads and writes in a
    step. Contains the primitives without a rule. Also contains `while` if a trip count
    is unknown, with the bytes of one iteration."""

    @property
    def flops(self) -> float:
        """Operations of a step on all devices, including recomputation.

        Operators whose results nothing needs are left out.
        """
        return sum(op.flops * op.trips for op in self.operators if not op.unread)

    def bytes_of(self, operator: Operator) -> int:
        """Returns the bytes of an operator's operands and results.

        Without fusion, these are read and written in one execution.
        """
        num_bytes = self._num_bytes
        return sum([num_bytes[i] for i in (*operator.inputs, *operator.outputs)])

    def descendants(self, start: Iterable[int]) -> set[int]:
        """Returns the values in `start` and all values that are computed from them.

        Follows operators, and loops: slices in the body, arrays that stack values of
        the body, and carried values. All values are given by their indices.
        """
        found, waiting = set[int](), list(start)
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += self.successors.get(index, ())
        return found

    @cached_property
    def successors(self) -> Mapping[int, Sequence[int]]:
        """Map from the index of a value to the indices of the values next after it.

        These are the results of the operators that read the value; and for a value of a
        loop its slices, the array that stacks it, or the values that it is carried to.
        """
        found: dict[int, list[int]] = defaultdict(list)
        for operator in self.operators:
            for index in operator.inputs:
                found[index] += operator.outputs
        for loop in self.loops:
            for one, other in (*loop.sliced, *loop.stacked):
                found[one].append(other)
            for before, into, out, after in loop.carried:
                found[before].append(into)
                found[out] += (into, after)
        return dict(found)

    def operand_dtype(self, operator: Operator) -> str:
        """Returns the dtype of an operator's first operand; `float32` without operands.

        For a convolution, and for a `dot_general` that contracts dims, returns the
        wider dtype of both operands, because XLA converts the other operand to it.
        """
        both = operator.inputs[: 2 if any(operator.contracted) else 1]
        dtypes = [self.values[index].dtype for index in both]
        return max(dtypes, key=item_bits, default="float32")

    @cached_property
    def _num_bytes(self) -> tuple[int, ...]:
        return tuple(value.num_bytes for value in self.values)
