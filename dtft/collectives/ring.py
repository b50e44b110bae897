"""The two phases of a ring all-reduce: reduce-scatter, then all-gather.

Each device communicates only with its neighbors, p-1 times per phase, 1/p of the data
at a time. The order of summation is part of the interface: the sum of chunk c starts
with chunk c of device c+1, and adds chunk c of devices c+2, ..., p-1, 0, ..., c. So the
same inputs give the same bits in every run.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from dtft.collectives.hops import AxisName, as_array, axis_size, send_next


def ring_reduce_scatter(
    chunks: Array,
    axis_name: AxisName,
    combine: Callable[[Array, Array], Array] = jnp.add,
) -> Array:
    """Reduces chunk i onto device i.

    Args:
        chunks: [p, ...], one chunk for each device of the axis.
        axis_name: axis of `jax.shard_map` or `jax.vmap`.
        combine: elementwise and associative reduction, called once per hop as
            `combine(received, own)`.

    Returns:
        [...]: this device's chunk, reduced over all devices in the ring's order
        (like `lax.psum_scatter`, whose order is the backend's).

    Raises:
        ValueError: the number of chunks is not the number of devices, or the axis is
            not bound.

    Example: devices 0 to 3 with chunks a, b, c, d. In each of three hops every device
    sends a partial sum and adds its own part to the received partial sum::

                  before        after hop 1    after hop 2    after hop 3
        device 0  a0 b0 c0 d0   c3+c0          b2+b3+b0       a1+a2+a3+a0
        device 1  a1 b1 c1 d1   d0+d1          c3+c0+c1       b2+b3+b0+b1
        device 2  a2 b2 c2 d2   a1+a2          d0+d1+d2       c3+c0+c1+c2
        device 3  a3 b3 c3 d3   b2+b3          a1+a2+a3       d0+d1+d2+d3

    Below a, b, c, d are 1, 2, 3, 4, and the parts of device i are in decimal place i,
    so the digits of a sum show which devices contributed:

    >>> import jax
    >>> parts = jnp.array([[1, 2, 3, 4]]) * jnp.array([[1], [10], [100], [1000]])
    >>> parts.tolist()[2]  # a2 b2 c2 d2
    [100, 200, 300, 400]
    >>> phase_1 = jax.vmap(lambda x: ring_reduce_scatter(x, "ring"), axis_name="ring")
    >>> sums = phase_1(parts)
    >>> sums.tolist()  # a0+a1+a2+a3 on device 0, b0+b1+b2+b3 on device 1, ...
    [1111, 2222, 3333, 4444]
    >>> phase_2 = jax.vmap(lambda x: ring_all_gather(x, "ring"), axis_name="ring")
    >>> phase_2(sums).tolist()[2]  # the same four sums on every device
    [1111, 2222, 3333, 4444]
    """
    chunks, num = as_array("chunks", chunks), axis_size(axis_name)
    if chunks.shape[:1] != (num,):
        raise ValueError(
            f"chunks has shape {chunks.shape}, but the axis {axis_name!r} has {num} "
            "devices. Its first dim must be the number of devices: reshape or pad it."
        )
    # In the order of use: the chunk sent first comes first, the own chunk last.
    order = (lax.axis_index(axis_name) - 1 - jnp.arange(num, dtype=jnp.int32)) % num
    ordered = jnp.take(chunks, order, axis=0, mode="clip")
    total = ordered[0]
    for hop in range(1, num):
        total = combine(send_next(total, axis_name), ordered[hop])
    return total


def ring_all_gather(chunk: Array, axis_name: AxisName) -> Array:
    """Gathers the chunks of all devices on every device: [...] -> [p, ...].

    In the example each of four devices has one number; index 2 selects the result on
    device 2:

    >>> import jax
    >>> gather = jax.vmap(lambda x: ring_all_gather(x, "ring"), axis_name="ring")
    >>> gather(jnp.array([1111, 2222, 3333, 4444]))[2].tolist()
    [1111, 2222, 3333, 4444]
    """
    chunk, num = as_array("chunk", chunk), axis_size(axis_name)
    pieces = [chunk]
    for _ in range(1, num):
        pieces.append(send_next(pieces[-1], axis_name))
    # Piece k came from device i-k.
    order = (lax.axis_index(axis_name) - jnp.arange(num, dtype=jnp.int32)) % num
    return jnp.take(jnp.stack(pieces), order, axis=0, mode="clip")
