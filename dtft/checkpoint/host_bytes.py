"""The bytes of one device's array in row-major order, without keeping the array.

`np.asarray` of a CPU array keeps a view on it, and a view silently cancels donation, so
the buffer is read directly; that shows the numbers as they lie there, which need not be
row by row. Must not know slices, leaves or steps.
"""

import jax
import numpy as np

from dtft import _jax_internals
from dtft.checkpoint.fingerprint import is_packed


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
