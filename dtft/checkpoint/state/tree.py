"""Converts state trees to leaves by path, and typed PRNG keys to uint32 words.

`dtft._tree_paths` says how a path is written.

A typed key array has a dtype of JAX's own. In copies, in messages and in storage the
key array is replaced by its key data: uint32 words with one dim more than the key
array.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax

from dtft._tree_paths import paths_of

_SHOWN = 8
"""The number of paths that an error lists by name; further paths are only counted."""


def to_paths(tree: Any) -> dict[str, Any]:
    """Maps the path of each leaf of a tree to the leaf, in tree order.

    None is not a leaf.

    >>> to_paths({"b": [1, 2], "a": {"w": 3, "none": None}})
    {'a/w': 3, 'b/0': 1, 'b/1': 2}
    >>> to_paths({"mlp/~/linear_0": {"w": 1}})
    {'mlp%2F~%2Flinear_0/w': 1}

    Raises:
        ValueError: a key is empty, or two leaves have one path.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return dict(zip(_paths(structure), leaves, strict=True))


@functools.lru_cache(maxsize=16)
def _paths(structure: Any) -> tuple[str, ...]:
    """Returns each leaf's path in a treedef; cached, because treedefs are reused."""
    numbers = jax.tree_util.tree_unflatten(structure, range(structure.num_leaves))
    return paths_of(numbers)


def from_paths(like: Any, mapping: Mapping[str, Any]) -> Any:
    """Builds a tree with the structure of `like` and the leaves of `mapping`.

    >>> from_paths({"a": [0, 0]}, {"a/0": 1, "a/1": 2})
    {'a': [1, 2]}

    Raises:
        ValueError: `mapping` and `like` differ in paths; the message lists these paths.
    """
    expected = to_paths(like)
    if expected.keys() != mapping.keys():
        missing = [path for path in expected if path not in mapping]
        unexpected = [path for path in mapping if path not in expected]
        raise ValueError(
            f"mapping does not fit the tree: expected {len(expected)} leaves, found "
            f"{len(mapping)}. Expected but not found: {listed(missing)}. Found but "
            f"not expected: {listed(unexpected)}. Use the config that made the state."
        )
    structure = jax.tree_util.tree_structure(like)
    return jax.tree_util.tree_unflatten(structure, [mapping[p] for p in expected])


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Builds a dict of dicts from leaves by path, the form that Orbax stores.

    >>> nested({"a/b": 1, "c": 2})
    {'a': {'b': 1}, 'c': 2}

    Raises:
        ValueError: two paths differ only by "." instead of "/". Orbax joins keys by
            "." and would overwrite one leaf with the other.
    """
    tree: dict[str, Any] = {}
    names: dict[str, str] = {}
    for path, leaf in leaves.items():
        other = names.setdefault(path.replace("/", "."), path)
        if other != path:
            raise ValueError(
                f"leaves {other!r} and {path!r} have one name in Orbax, which joins "
                'keys by ".". Rename one of them.'
            )
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def listed(paths: list[str]) -> str:
    """Formats paths for an error: the first 8 by name, the rest as a count.

    >>> listed([]), listed(["a", "b"])
    ('none', 'a, b')
    """
    text = ", ".join(paths[:_SHOWN]) or "none"
    rest = len(paths) - _SHOWN
    return f"{text} and {rest} more" if rest > 0 else text


def with_plain_keys(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces every typed PRNG key array by its uint32 words.

    Waits until the words are computed. A struct of keys becomes a struct of words.

    Args:
        leaves: path to array or to `jax.ShapeDtypeStruct`.

    >>> with_plain_keys({"key": jax.random.key(7), "n": 1})
    {'key': Array([0, 7], dtype=uint32), 'n': 1}
    """
    return {
        path: _words(leaf) if _is_key(leaf) else leaf for path, leaf in leaves.items()
    }


def with_typed_keys(
    leaves: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any]:
    """Turns words into typed PRNG keys where `like` has keys; undoes `with_plain_keys`.

    Args:
        leaves: path to array; uint32 words for a path at which `like` has keys.
        like: path to array or to `jax.ShapeDtypeStruct`, with the same paths.

    >>> key = {"key": jax.random.key(7, impl="rbg")}
    >>> with_typed_keys(with_plain_keys(key), key)["key"].dtype == key["key"].dtype
    True
    """
    return {
        path: jax.random.wrap_key_data(leaf, impl=_implementation(like[path]))
        if _is_key(like[path])
        else leaf
        for path, leaf in leaves.items()
    }


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and _is_key_dtype(dtype)


@functools.lru_cache(maxsize=256)
def _is_key_dtype(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _words(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.block_until_ready(jax.random.key_data(leaf))
    found = jax.eval_shape(jax.random.key_data, leaf)
    # The dim of the words is not divided, so the sharding of the keys fits the words.
    return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=leaf.sharding)


def _implementation(leaf: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), leaf)
    return found[0]
