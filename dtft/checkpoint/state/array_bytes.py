"""Reads the bytes of arrays on devices, and computes fingerprints of arrays.

`host_bytes` returns the bytes of an array on one device, in row-major order.
`fingerprints` returns a checksum per array that does not depend on how the array is
sharded. Neither function keeps a reference to an array.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtft import _jax_internals

_LANES = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))
"""The two odd multipliers of `_mix` for each lane (one of the two sums that make a
fingerprint)."""


def fingerprints(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, str]:
    """Computes a fingerprint per array that does not depend on the array's sharding.

    The bits of an array are read as words of at most 32 bits, and each word is mixed
    with its position. A fingerprint is two sums of the mixed words modulo 2**32; the
    two sums mix the words with different multipliers. A change of any single word
    always changes the fingerprint. Storage keeps a fingerprint of every leaf that is
    not empty, because Orbax does not detect a flipped bit in its files. For arrays that
    span processes, all these processes must make the same call.

    Returns:
        Maps each key of `arrays` to a fingerprint of 16 hex digits. Arrays with equal
        words in equal positions have equal fingerprints. The fingerprints of 0.0 and
        -0.0 differ, because their bits differ.

    >>> zero = np.zeros(1, np.float32)
    >>> fingerprints({"a": zero}) == fingerprints({"a": -zero})
    False
    """
    words = {path: _host_words(array) for path, array in arrays.items()}
    groups: dict[frozenset[Any], list[str]] = {}
    for path, array in words.items():
        groups.setdefault(_devices(array), []).append(path)
    found: dict[str, str] = {}
    for paths in groups.values():  # one computation has one set of devices
        sums = np.asarray(_sums([words[path] for path in paths])).tolist()
        found |= {p: f"{a:08x}{b:08x}" for p, (a, b) in zip(paths, sums, strict=True)}
    return {path: found[path] for path in arrays}


def _devices(array: jax.Array | np.ndarray) -> frozenset[Any]:
    return frozenset(array.devices() if isinstance(array, jax.Array) else ())


def _host_words(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Converts a numpy array to unsigned words of at most 32 bits.

    A 64-bit number becomes two words, because jax by default narrows a 64-bit number
    to 32 bits. A jax array is returned unchanged.
    """
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


@functools.cache
def is_packed(dtype: np.dtype) -> bool:
    """Whether numbers of a dtype are smaller than a byte, so devices may pack them."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


def _whole_bytes(dtype: np.dtype) -> np.dtype:
    """Replaces a dtype smaller than a byte by int8, uint8 or float32.

    The new dtype can hold all values of `dtype`. Other dtypes are returned unchanged.
    """
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
    """Mixes the bits of 32-bit words; different words give different results.

    `first` and `second` are odd multipliers.
    """
    words = (words ^ (words >> jnp.uint32(16))) * jnp.uint32(first)
    words = (words ^ (words >> jnp.uint32(13))) * jnp.uint32(second)
    return words ^ (words >> jnp.uint32(16))


def on_accelerator(array: jax.Array) -> bool:
    """Whether an array on one device is in the memory of an accelerator."""
    return next(iter(array.devices())).platform != "cpu"


def host_bytes(array: jax.Array, *, is_remote: bool | None = None) -> memoryview:
    """Returns the bytes of an array on one device as a view, in row-major order.

    The array must be computed already. The buffer of a CPU array is viewed directly:
    `np.asarray` would keep a reference to the array, which silently cancels donation.
    The view is valid until the array is deleted or donated. Arrays on other devices,
    buffers that are not in row-major order and dtypes smaller than a byte are copied.
    The bytes of a number have the machine's byte order (little-endian in the example).

    Args:
        array: the array.
        is_remote: the result of `on_accelerator` for the array, if it is known.

    >>> import jax.numpy as jnp
    >>> array = jax.block_until_ready(jnp.array([1, 258], jnp.int16))
    >>> bytes(host_bytes(array))
    b'\\x01\\x00\\x02\\x01'
    """
    if not array.size:
        return memoryview(b"")
    is_remote = on_accelerator(array) if is_remote is None else is_remote
    # The device may pack numbers smaller than a byte; numpy unpacks such numbers.
    if is_remote or is_packed(array.dtype):
        return np.asarray(array).reshape(-1).view(np.uint8).data
    raw = _jax_internals.cpu_buffer(array)
    order = _jax_internals.order_of_dims(array)
    if order is None:
        return raw
    lying = np.frombuffer(raw, array.dtype).reshape([array.shape[i] for i in order])
    rows = np.ascontiguousarray(lying.transpose(np.argsort(order)))
    return rows.reshape(-1).view(np.uint8).data
