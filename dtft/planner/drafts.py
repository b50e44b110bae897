"""What is found of a program while it is followed, before its dims are final.

Keeps values, operators and loops in the order in which they are met, and the dims that
go together. Must not know JAX's equations (`walk`) or what a graph is for.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import Literal

from dtft.planner.dims import Dims, Numbers
from dtft.planner.graph import Kind, Loop, item_bits

Known = int | Literal
"""An array of the program: the index of its value, or a number of its text."""


class Draft(NamedTuple):
    """A value before dims are final."""

    shape: tuple[int, ...]
    dtype: str
    dims: Numbers


@dataclass(slots=True)
class Step:
    """An operator before dims are final."""

    primitive: str
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float
    summed: Numbers
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    """Places of summed dims in the operands of a matmul."""
    whole: Numbers
    again: bool
    within: tuple[int, ...]
    trips: int
    name: str


class Drafts:
    """What was found so far."""

    def __init__(self) -> None:
        self.dims = Dims()
        self.values: list[Draft] = []
        self.steps: list[Step] = []
        self.loops: list[Loop | None] = []
        self.endless: Counter[str] = Counter()
        """Bytes of one pass of the loops whose trips are not known."""
        self._dtypes: dict[Any, str] = {}

    def value(self, aval: Any, dims: Numbers | None = None) -> int:
        """A new array; its dims are new where none are given."""
        shape = tuple(getattr(aval, "shape", ()))
        dtype = self._dtype(getattr(aval, "dtype", None))
        numbers = self.dims.news(shape) if dims is None else dims
        self.values.append(Draft(shape, dtype, numbers))
        return len(self.values) - 1

    def held(self, known: Known) -> int:
        """The array's value; a number of the text becomes one."""
        return self.value(known.aval) if isinstance(known, Literal) else known

    def copy(self, index: int) -> int:
        """Another array like this one, divided alike."""
        self.values.append(self.values[index])
        return len(self.values) - 1

    def part(self, index: int, along: int) -> int:
        """What a loop's body sees in turn of an array."""
        whole = self.values[index]
        self.dims.join(whole.dims[0], along)
        self.values.append(Draft(whole.shape[1:], whole.dtype, whole.dims[1:]))
        return len(self.values) - 1

    def carried(self, before: list[int], out: list[int]) -> list[int]:
        """What a loop leaves: divided as what it begins with and what it makes."""
        for one, two in zip(before, out, strict=True):
            self.join(one, two)
        return [self.copy(index) for index in before]

    def join(self, one: int, two: int) -> None:
        """From now on both arrays are divided alike."""
        pairs = zip(self.values[one].dims, self.values[two].dims, strict=True)
        for left, right in pairs:
            self.dims.join(left, right)

    def numbers(self, known: Known) -> Numbers:
        """Dims of an array."""
        if isinstance(known, Literal):
            shape: tuple[int, ...] = getattr(known.aval, "shape", ())
            return self.dims.news(shape)
        return self.values[known].dims

    def bytes_since(self, start: int) -> int:
        """Bytes that the operators from `start` on read and write, each once."""
        found = 0
        for step in self.steps[start:]:
            for index in (*step.inputs, *step.outputs):
                draft = self.values[index]
                found += math.prod(draft.shape) * item_bits(draft.dtype) // 8
        return found

    def _dtype(self, dtype: Any) -> str:
        if dtype not in self._dtypes:  # NumPy makes a dtype's name anew each time
            self._dtypes[dtype] = getattr(dtype, "name", "float0")
        return self._dtypes[dtype]
