"""Typed PRNG keys as the words that they are made of, and back.

A key array's dtype is JAX's own; memory, wire and storage carry its words, which are
uint32 with one dim more. Must not know where the leaves go.
"""

from collections.abc import Mapping
from typing import Any

import jax


def plain(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves, every typed key array as its words, ready.

    Args:
        leaves: path to array or to `jax.ShapeDtypeStruct`.

    >>> plain({"key": jax.random.key(7), "n": 1})
    {'key': Array([0, 7], dtype=uint32), 'n': 1}
    """
    return {
        path: _words(leaf) if _is_key(leaf) else leaf for path, leaf in leaves.items()
    }


def typed(leaves: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves, words as keys where `like` has keys; undoes `plain`.

    Args:
        leaves: path to array.
        like: path to array or to `jax.ShapeDtypeStruct`, with the same paths.

    >>> key = {"key": jax.random.key(7, impl="rbg")}
    >>> typed(plain(key), key)["key"].dtype == key["key"].dtype
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
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _words(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.block_until_ready(jax.random.key_data(leaf))
    found = jax.eval_shape(jax.random.key_data, leaf)
    # The words of a key lie together: the spec is that of the keys.
    return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=leaf.sharding)


def _implementation(leaf: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), leaf)
    return found[0]
