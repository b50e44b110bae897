"""Building blocks of hand-written collectives: axis size, send to neighbor, broadcast.

Call these functions inside `jax.shard_map`. `broadcast` does not work under `jax.vmap`
with an axis name, because `ppermute` under `vmap` accepts only permutations in which
every device sends.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

AxisName = str | tuple[str, ...]
"""A mesh axis, or several used as one axis (row-major, as in `lax.axis_index`)."""


def axis_size(axis_name: AxisName) -> int:
    """Returns the number p of devices along the axis, a Python int known while tracing.

    Raises:
        ValueError: `axis_name` is not bound here, is not a name or a tuple of names, or
            names an axis twice.
    """
    _check_axis_name(axis_name)
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is not bound here. Allowed: axes of the "
            "jax.shard_map (or jax.vmap) that this is called inside of. Name one of "
            "its axes, or pass axis_name=None for one device."
        ) from None


def as_array(argument: str, value: Any) -> Array:
    """Converts an array or a number to a JAX array.

    `argument` is the name of the caller's argument, for the error.

    Raises:
        ValueError: the value is anything else, such as a list, None or a string.
    """
    if isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        return jnp.asarray(value)
    raise ValueError(
        f"{argument} is a {type(value).__name__}. Allowed: one array. Convert a list "
        "with jnp.asarray; for a pytree map the call over its leaves with "
        "jax.tree.map."
    )


def send_next(x: Any, axis_name: AxisName) -> Any:
    """Sends x from device i to device i+1, and from the last device to device 0."""
    num = axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + 1) % num) for i in range(num)])


def to_chunks(x: Array, num: int) -> Array:
    """Reshapes any array to [num, ceil(size / num)], padded with zeros at the end.

    >>> to_chunks(jnp.arange(5), 3).tolist()
    [[0, 1], [2, 3], [4, 0]]
    """
    length = -(-x.size // num)
    return jnp.pad(x.reshape(-1), (0, num * length - x.size)).reshape(num, length)


def from_chunks(chunks: Array, shape: tuple[int, ...]) -> Array:
    """Inverse of `to_chunks`: drops the padding and restores the shape."""
    size = 1
    for dim in shape:
        size *= dim
    return chunks.reshape(-1)[:size].reshape(shape)


def varying_axes_are_tracked(axis_name: AxisName) -> bool:
    """Whether the call is inside `jax.shard_map(check_vma=True)` over this axis.

    With `check_vma=True` the type of a value lists the axes along which the value
    varies. The function looks at the type of this device's index along the axis, which
    differs between devices.
    """
    kind = jax.typeof(lax.axis_index(axis_name))
    # The attribute's name differs between the allowed versions of JAX.
    manual = getattr(kind, "manual_axis_type", None)
    varying = kind.vma if manual is None else manual.varying  # pyright: ignore
    return bool(varying)


def replicated(x: Array, axis_name: AxisName) -> Array:
    """Returns x with the type of a replicated value; x must be equal on all devices.

    Under `check_vma=True` the result of `ppermute` is typed as varying, so `out_specs`
    of `P()` would be refused. To prevent this, each of the axis's p devices contributes
    1/p of x to an all-gather, whose result is typed as replicated, at (p-1)/p of x's
    bytes per device. Without `check_vma=True` nothing is sent.
    """
    if not varying_axes_are_tracked(axis_name):
        return x
    chunks = to_chunks(x, axis_size(axis_name))
    own = lax.dynamic_index_in_dim(chunks, lax.axis_index(axis_name), keepdims=False)
    return from_chunks(lax.all_gather(own, axis_name, to="invarying"), x.shape)


def broadcast(x: Array, root: int, axis_name: AxisName | None) -> Array:
    """Copies the root's x to all p devices, bit for bit, in ceil(log2 p) tree rounds.

    Args:
        x: any array, of the same shape and dtype on every device.
        root: index of the sending device along the axis.
        axis_name: axis or axes; None means one device, and x is returned.

    Returns:
        The root's x. The root sends ceil(log2 p) times x's bytes, and every other
        device receives x once (`replicated` adds an all-gather under `check_vma=True`).

    Raises:
        ValueError: x is not an array, the axis is not bound, or the root is not an
            index along the axis.

    In the example device i holds the value 7 + i, and device 0 is the root:

    >>> mesh = jax.sharding.Mesh(jax.devices(), ("replica",))
    >>> from_0 = jax.shard_map(
    ...     lambda x: broadcast(x, 0, "replica"), mesh=mesh,
    ...     in_specs=jax.P("replica"), out_specs=jax.P())
    >>> from_0(7 + jnp.arange(jax.device_count())).tolist()
    [7]
    """
    x = as_array("x", x)
    if axis_name is None:
        check_root("root", root, 1)
        return x
    num = axis_size(axis_name)
    check_root("root", root, num)
    rank = (lax.axis_index(axis_name) - root) % num
    distance = 1
    while distance < num:
        pairs = [(i, i + distance) for i in range(min(distance, num - distance))]
        pairs = [((a + root) % num, (b + root) % num) for a, b in pairs]
        received = lax.ppermute(x, axis_name, pairs)
        is_new = (rank >= distance) & (rank < 2 * distance)
        x = lax.select(jnp.broadcast_to(is_new, x.shape), received, x)
        distance *= 2
    return replicated(x, axis_name)


def check_root(argument: str, root: Any, num: int) -> None:
    """Raises a ValueError unless `root` is an int from 0 to `num` - 1, not traced.

    `argument` is the name of the caller's argument, for the error.
    """
    if isinstance(root, Tracer):
        raise ValueError(
            f"{argument} is a traced {jax.typeof(root)}. Allowed: a Python int, since "
            "who sends to whom is fixed when the program is compiled. Mark it as a "
            "static argument of jax.jit."
        )
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)):
        raise ValueError(
            f"{argument}={root!r} is not an index. Allowed: an int, 0 to {num - 1}. "
            "Pass the index along the axis."
        )
    if not 0 <= root < num:
        raise ValueError(
            f"{argument}={root} is not a device of an axis of size {num}. Allowed: 0 "
            f"to {num - 1}. Pass the index along the axis, not a device id."
        )


def _check_axis_name(axis_name: Any) -> None:
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"axis_name={axis_name!r} is no name. Allowed: a str, or a tuple of them. "
            "Name an axis of the mesh; a number of a dim is none."
        )
    if len({*names}) < len(names):
        raise ValueError(
            f"axis_name={axis_name!r} names an axis twice. Allowed: each once. Leave "
            "the second out."
        )
