"""Bytes of arrays on devices: read without keeping the array, and fingerprinted.

`host_bytes` returns one device's array in row-major order. `fingerprints` returns a
checksum per array that does not depend on how the array is sharded.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtft import _jax_internals

# A fingerprint per array that does not depend on how the array is sharded.
#
# Orbax does not notice a flipped bit in its files, so every stored leaf carries one. It
# is a sum modulo 2**32 (in two lanes) over mixed words and positions: any single
# changed word changes it for certain.


_LANES = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))
"""Odd multipliers of the mixing function, per lane."""


def fingerprints(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, str]:
    """Sixteen hex digits per array, equal for equal words in equal places.

    Arrays that span processes need all of them to make the same call. Empty arrays
    have none and may not be given.

    >>> zero = np.zeros(1, np.float32)
    >>> fingerprints({"a": zero}) == fingerprints({"a": -zero})
    False
    """
    words = {path: _host_words(array) for path, array in arrays.items()}
    groups: dict[frozenset[Any], list[str]] = {}
    for path, array in words.items():
        groups.setdefault(_devices(array), []).append(path)
    found: dict[str, str] = {}
    for paths in groups.values():  # one computation cannot mix sets of devices
        sums = np.asarray(_sums([words[path] for path in paths])).tolist()
        found |= {p: f"{a:08x}{b:08x}" for p, (a, b) in zip(paths, sums, strict=True)}
    return {path: found[path] for path in arrays}


def _devices(array: jax.Array | np.ndarray) -> frozenset[Any]:
    return frozenset(array.devices() if isinstance(array, jax.Array) else ())


def _host_words(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Numpy arrays as unsigned words: jax would narrow 64-bit values."""
    if isinstance(array, jax.Array):
        return array
    if array.dtype.kind == "c":
        return _host_words(np.stack([np.real(array), np.imag(array)]))
    array = array.astype(_whole_bytes(array.dtype), copy=False)
    size = array.dtype.itemsize
    if size > 4:
        return np.ascontiguousarray(array)[..., None].view(np.uint32)
    return np.ascontiguousarray(array).reshape(array.shape).view(f"uint{8 * size}")


@jax.jit
def _sums(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_sum(_words(array)) for array in arrays])


def _words(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([_words(array.real), _words(array.imag)])
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    array = array.astype(_whole_bytes(array.dtype))
    bits = array.dtype.itemsize * 8
    words = jax.lax.bitcast_convert_type(array, f"uint{min(bits, 32)}")
    return words.astype(jnp.uint32)


def is_packed(dtype: np.dtype) -> bool:
    """Whether numbers are smaller than a byte, so that devices may pack them."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


def _whole_bytes(dtype: np.dtype) -> np.dtype:
    """A dtype for the same values whose numbers are whole bytes."""
    if not is_packed(dtype):
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32)
    signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return np.dtype(np.int8 if signed else np.uint8)


def _sum(words: jax.Array) -> jax.Array:
    place = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(words.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        place = place + index * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    lanes = [
        jnp.sum(_mix(words ^ _mix(place, *lane), *lane), dtype=jnp.uint32)
        for lane in _LANES
    ]
    return jnp.stack(lanes)


def _mix(words: jax.Array, first: int, second: int) -> jax.Array:
    """A bijection of 32-bit words."""
    words = (words ^ (words >> jnp.uint32(16))) * jnp.uint32(first)
    words = (words ^ (words >> jnp.uint32(13))) * jnp.uint32(second)
    return words ^ (words >> jnp.uint32(16))


# The bytes of one device's array in row-major order, without keeping the array.
#
# `np.asarray` of a CPU array keeps a view on it, and a view silently cancels donation,
# so the buffer is read directly; that shows the numbers as they lie there, which need
# not be row by row.


def host_bytes(array: jax.Array) -> memoryview:
    """What is in a ready array on one device, as long as that lives undonated.

    >>> import jax.numpy as jnp
    >>> array = jax.block_until_ready(jnp.array([1, 258], jnp.int16))
    >>> bytes(host_bytes(array))
    b'\\x01\\x00\\x02\\x01'
    """
    if not array.size:
        return memoryview(b"")
    # Numbers of less than a byte may lie packed on the device; numpy unpacks them.
    if next(iter(array.devices())).platform != "cpu" or is_packed(array.dtype):
        return np.asarray(array).reshape(-1).view(np.uint8).data
    raw = _jax_internals.cpu_buffer(array)
    order = _major_to_minor(array)
    if order == tuple(range(array.ndim)):
        return raw
    lying = np.frombuffer(raw, array.dtype).reshape([array.shape[i] for i in order])
    rows = np.ascontiguousarray(lying.transpose(np.argsort(order)))
    return rows.reshape(-1).view(np.uint8).data


def _major_to_minor(array: jax.Array) -> tuple[int, ...]:
    layout = array.format.layout  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(range(array.ndim)) if layout is None else layout.major_to_minor
