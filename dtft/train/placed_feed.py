"""What a placed step is given: the parts of its batch, and what each of them counts.

Must not know devices or what is computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dtft.checkpoint import tree
from dtft.train.placed_calls import EACH, Key
from dtft.train.placed_cut import Cut


def parts_of(batch: Any, num_parts: int) -> list[Any]:
    """A batch in equal parts, rows in order; arrays without dims belong to each.

    Args:
        batch: arrays, or shapes, with rows in dim 0.
        num_parts: parts, which divide the rows.

    Raises:
        ValueError: names the array whose rows cannot be divided.

    >>> [part["x"].tolist() for part in parts_of({"x": np.arange(4)}, 2)]
    [[0, 1], [2, 3]]
    """
    for path, leaf in tree.to_paths(batch).items():
        if np.ndim(leaf) and np.shape(leaf)[0] % num_parts:
            raise ValueError(
                f"microbatches={num_parts}: batch {path!r} has {np.shape(leaf)[0]} "
                f"rows. Use a batch whose rows are a multiple of {num_parts}."
            )

    def part(leaf: Any, index: int) -> Any:
        if not np.ndim(leaf):
            return leaf
        rows = np.shape(leaf)[0] // num_parts
        return leaf[index * rows : (index + 1) * rows]

    return [
        jax.tree.map(lambda leaf, j=j: part(leaf, j), batch) for j in range(num_parts)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Feed:
    """The arrays that a step's calls read and no call makes."""

    cut: Cut
    batch: tuple[int, ...]
    """Numbers of the batch's leaves in the program."""
    parts: Sequence[Any]
    """Of `parts_of`."""
    weights: Sequence[float]
    """What each part counts in means."""

    def of(self, key: Key) -> Iterator[tuple[Key, Any]]:
        """The arrays that a key of a call stands for: `EACH` is one per part."""
        for at in self._parts_of(key):
            yield key._replace(microbatch=at), self._value(key, at)

    def _parts_of(self, key: Key) -> Sequence[int | None]:
        every = key.microbatch == EACH
        return range(len(self.parts)) if every else [key.microbatch]

    def _value(self, key: Key, at: int | None) -> Any:
        if key.kind == "constant":
            return self.cut.constants[key.number]
        if key.kind == "total":
            return np.float32(sum(self.weights))
        assert at is not None
        if key.kind == "weight":
            return np.float32(self.weights[at])
        return jax.tree.leaves(self.parts[at])[self.batch.index(key.number)]
