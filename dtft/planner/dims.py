"""Named dims: which dims of a program's arrays are divided alike.

Two dims have the same number when some operator makes one of the other: a batch dim
keeps its number through every layer, and so does the width of a residual stream. Holds
the numbers; must not know what the operators are (`linking`), meshes or costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtft.planner.graph import Dim

Numbers = tuple[int, ...]


class Dims:
    """Disjoint sets of dims.

    >>> dims = Dims()
    >>> a, b, c = dims.new(4), dims.new(8), dims.new(8)
    >>> dims.join(a, b)
    >>> dims.find(a) == dims.find(b), dims.find(c) == dims.find(b)
    (True, False)
    >>> dims.of(a)
    Dim(sizes=(4, 8), loop=False)
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._sizes: list[set[int]] = []
        self._loop: list[bool] = []

    def new(self, size: int, *, loop: bool = False) -> int:
        """A dim that nothing is known of yet."""
        self._parent.append(len(self._parent))
        self._sizes.append({size})
        self._loop.append(loop)
        return len(self._parent) - 1

    def news(self, shape: Sequence[int]) -> Numbers:
        """New dims for an array."""
        return tuple(self.new(size) for size in shape)

    def find(self, number: int) -> int:
        """The number that stands for all dims joined with this one."""
        parent = self._parent
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    def join(self, one: int, other: int) -> None:
        """From now on both are divided alike; the lower number stands for them."""
        low, high = sorted((self.find(one), self.find(other)))
        if low == high:
            return
        self._parent[high] = low
        self._sizes[low] |= self._sizes[high]
        self._loop[low] |= self._loop[high]

    def of(self, number: int) -> Dim:
        """What is known of a dim."""
        root = self.find(number)
        return Dim(sizes=tuple(sorted(self._sizes[root])), loop=self._loop[root])


@dataclass(frozen=True, kw_only=True, slots=True)
class Linked:
    """How an equation's dims go together."""

    outputs: tuple[Numbers, ...]
    """Dims of each result."""
    summed: Numbers = ()
    """Dims that it sums over, or otherwise combines into one element."""
    whole: Numbers = ()
    """Dims of operands that it needs undivided."""


class Case:
    """One equation with what is known of its operands."""

    def __init__(self, dims: Dims, eqn: Any, operands: Sequence[Numbers]) -> None:
        self.dims, self.params = dims, eqn.params
        self.operands = operands
        self.shapes = [tuple(atom.aval.shape) for atom in eqn.invars]
        self.results = [tuple(atom.aval.shape) for atom in eqn.outvars]

    def kept(self, sources: Sequence[int | None], result: int = 0) -> Numbers:
        """Result dims: the number given, or a new one where there is none."""
        shape = self.results[result]
        return tuple(
            self.dims.new(size) if source is None else source
            for source, size in zip(sources, shape, strict=True)
        )

    def join_all(self, groups: Sequence[Sequence[int]]) -> None:
        """Joins the dims of each group."""
        for group in groups:
            for other in group[1:]:
                self.dims.join(group[0], other)
