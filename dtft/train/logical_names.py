"""Logical names of dims that a model's parameters carry, by path.

Flax keeps them in metadata: NNX variables in `out_sharding`
(`nnx.with_partitioning`), Linen boxes in `names` (`nn.with_partitioning`). Reads them
and nothing else; must not know plans or meshes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dtft.checkpoint.state import to_paths

Names = tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class _Named:
    """In place of an array: what its dims are called."""

    names: Names


def logical_names(params: Any, planned: Iterable[str]) -> dict[str, Names]:
    """The names of each array that has them; others are left out.

    Args:
        params: a tree with NNX variables (`nnx.state(model)`) or Linen boxes.
        planned: the plan's paths. It may have been made for the bare arrays of the same
            tree, whose paths lack the box's `value`.

    Raises:
        ValueError: no array has names.
    """
    named = jax.tree.map(_in_place, params, is_leaf=_has_names)
    known, found = frozenset(planned), {}
    for path, leaf in to_paths(named).items():
        bare = path.removesuffix("/value")
        found[path if path in known else bare] = leaf.names
    if not found:
        raise ValueError(
            "params has no array with logical names. Allowed: NNX variables or Linen "
            "boxes made with with_partitioning(initializer, names)."
        )
    return found


def _in_place(box: Any) -> Any:
    """A box with names for its array; nothing for a bare array."""
    if not _has_names(box):
        return None
    named = _Named(names=tuple(_names(box)))
    return jax.tree.map(lambda _: named, box)


def _names(leaf: Any) -> Any:
    return getattr(leaf, "out_sharding", None) or getattr(leaf, "names", None)


def _has_names(leaf: Any) -> bool:
    names = _names(leaf)
    if not isinstance(names, tuple | PartitionSpec) or not names:
        return False
    return all(name is None or isinstance(name, str) for name in names)
