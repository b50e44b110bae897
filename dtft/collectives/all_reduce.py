"""All-reduce over mesh axes: XLA's collective, or an algorithm of known sum order.

Call `all_reduce` inside `jax.shard_map`. Under `jax.vmap` with an axis name only
``native``, ``ring``, and ``tree`` over a power of two devices work, because `ppermute`
under `vmap` accepts only permutations in which every device sends.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from dtft.collectives.hops import (
    AxisName,
    axis_size,
    broadcast,
    from_chunks,
    replicated,
    to_chunks,
    varying_axes_are_tracked,
)
from dtft.collectives.ring import ring_all_gather, ring_reduce_scatter

Op = Literal["mean", "sum", "max"]
"""Reduction operation."""

Algorithm = Literal["native", "ring", "tree", "gather"]
"""Communication pattern of an all-reduce, as documented in `all_reduce`."""


def all_reduce(
    x: Any,
    axis_name: AxisName | None,
    *,
    op: Op = "sum",
    algorithm: Algorithm = "native",
) -> Any:
    """Reduces x over the p devices of an axis; every device gets the same bits.

    * ``native`` (default, and the choice for accelerators): `lax.psum`, `lax.pmax`. The
      backend chooses the order of summation, which may differ between runs.
    * ``ring``: reduce-scatter, then all-gather (`dtft.collectives.ring`). The order of
      summation is fixed and documented, so every run gives the same bits. Suited to
      large arrays.
    * ``tree``: recursive doubling, about log2 p rounds of the whole array, also in a
      fixed order: device 0 with device 1, then pairs with pairs, and so on. If p is not
      a power of two, the devices beyond the largest power of two first send their
      values to the others and receive the result last. Suited to small arrays, where
      latency dominates.
    * ``gather``: every device sends to device 0, which combines in device order and
      broadcasts. p-1 arrays arrive on the link of device 0. Meant for comparisons.

    Partial results have x's dtype, so in bfloat16 and float16 ring and tree round after
    every addition (``gather`` computes sum and mean in float32 and rounds once). Cast x
    to float32 first to avoid this rounding. XLA's CPU backend sends bfloat16 as
    float32, so bfloat16 saves no bytes on CPU (measured at the network interface, jax
    0.10.2). ``mean`` is the sum divided by p, so the mean overflows if the sum does.
    Integer sums wrap. ``max`` propagates NaN with ring, tree and gather; ``native`` may
    drop a NaN, as on CPU.

    With `jax.shard_map(check_vma=True)` the result is typed as replicated, so
    `out_specs=P()` is accepted. The ring's second phase is then `lax.all_gather`
    (copies only: the same bits). Tree and gather then add one all-gather of (p-1)/p of
    the bytes; `check_vma=False` saves this all-gather.

    Reverse-mode differentiation works for mean and sum with every algorithm (the
    transposed program uses the same algorithm). ``max`` with ``native`` is not
    differentiable: JAX has no differentiation rule for `lax.pmax`.

    Args:
        x: an array or a pytree of arrays of any shape, each reduced separately.
        axis_name: mesh axis, or a tuple of axes used as one axis. None means one
            device: x is returned unchanged, so the same code serves one device and
            many.
        op: ``sum`` (default; not bool), ``mean`` (floating or complex) or ``max`` (not
            complex).
        algorithm: see above.

    Returns:
        A pytree like x.

    Raises:
        ValueError: an unknown op or algorithm, an op that is undefined for a leaf's
            dtype, a leaf that is not an array, or an axis that is not bound.

    >>> x = jnp.array([1.0, 2.0, 6.0])
    >>> ring = lambda v: all_reduce(v, "replica", algorithm="ring")
    >>> jax.vmap(ring, axis_name="replica")(x).tolist()
    [9.0, 9.0, 9.0]
    >>> all_reduce(x, None).tolist()
    [1.0, 2.0, 6.0]
    """
    _check_name("op", op, get_args(Op))
    check_algorithm(algorithm)
    arrays = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _checked_leaf(jax.tree_util.keystr(path), leaf, op), x
    )
    if axis_name is None:
        return arrays
    return jax.tree.map(
        lambda leaf: _reduce_leaf(leaf, axis_name, op, algorithm), arrays
    )


def bytes_sent(num_bytes: int, num_devices: int, algorithm: Algorithm) -> int:
    """Returns the bytes that the busiest device sends in one `all_reduce` of num_bytes.

    With p devices ``ring`` sends 2 (p-1) chunks of num_bytes / p, rounded up. ``tree``
    and ``gather`` send the whole array ceil(log2 p) times. ``native`` is counted as a
    ring, which backends use for large arrays. In ``gather`` the busiest device is
    device 0, which also *receives* (p-1) times num_bytes. The extra all-gather of
    `check_vma=True` is not counted.

    Raises:
        ValueError: the algorithm is unknown, `num_bytes` is below 0, or `num_devices`
            is below 1.

    >>> {a: bytes_sent(8000, 8, a) for a in ("ring", "tree", "gather")}
    {'ring': 14000, 'tree': 24000, 'gather': 24000}
    >>> bytes_sent(8000, 5, "tree")  # two rounds among 4, the result to the 5th
    24000
    """
    check_algorithm(algorithm)
    if num_bytes < 0 or num_devices < 1:
        raise ValueError(
            f"num_bytes={num_bytes}, num_devices={num_devices}. Allowed: 0 bytes or "
            "more, 1 device or more."
        )
    if num_devices == 1:
        return 0
    if algorithm in ("native", "ring"):
        return 2 * (num_devices - 1) * -(-num_bytes // num_devices)
    # Tree: floor(log2 p) rounds, and a folded device's result; gather: a broadcast.
    return num_bytes * (num_devices - 1).bit_length()


def _reduce_leaf(x: Array, axis_name: AxisName, op: Op, algorithm: Algorithm) -> Array:
    num = axis_size(axis_name)
    if algorithm == "native" or num == 1 or x.size == 0:
        if op == "max":
            return lax.pmax(x, axis_name)
        # Not lax.pmean: strict dtype promotion refuses its division of complex numbers.
        return _finish(lax.psum(x, axis_name), op, num)
    combine = jnp.maximum if op == "max" else jnp.add
    if algorithm == "ring":
        return _ring(x, axis_name, op, combine)
    if algorithm == "tree":
        return _finish(_tree(x, axis_name, combine), op, num)
    return _gather(x, axis_name, op, combine)


def _ring(
    x: Array, axis_name: AxisName, op: Op, combine: Callable[[Array, Array], Array]
) -> Array:
    num = axis_size(axis_name)
    own = ring_reduce_scatter(to_chunks(x, num), axis_name, combine)
    own = _finish(own, op, num)
    if varying_axes_are_tracked(axis_name):
        return from_chunks(lax.all_gather(own, axis_name, to="invarying"), x.shape)
    return from_chunks(ring_all_gather(own, axis_name), x.shape)


def _tree(
    x: Array, axis_name: AxisName, combine: Callable[[Array, Array], Array]
) -> Array:
    num = axis_size(axis_name)
    core = 1 << (num.bit_length() - 1)  # the largest power of two that fits
    extra = num - core
    index = lax.axis_index(axis_name)
    if extra:
        folded = lax.ppermute(x, axis_name, [(core + i, i) for i in range(extra)])
        x = _where(index < extra, combine(x, folded), x)
    distance = 1
    while distance < core:
        # Addition and maximum commute bit for bit, so both partners get equal results.
        partners = [(i, i ^ distance) for i in range(core)]
        x = combine(x, lax.ppermute(x, axis_name, partners))
        distance *= 2
    if extra:
        result = lax.ppermute(x, axis_name, [(i, core + i) for i in range(extra)])
        x = _where(index >= core, result, x)
    return replicated(x, axis_name)


def _gather(
    x: Array, axis_name: AxisName, op: Op, combine: Callable[[Array, Array], Array]
) -> Array:
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    wide = jnp.float32 if narrow else x.dtype
    total = x.astype(wide)
    num = axis_size(axis_name)
    for sender in range(1, num):
        received = lax.ppermute(x, axis_name, [(sender, 0)])
        total = combine(total, received.astype(wide))
    return broadcast(_finish(total, op, num).astype(x.dtype), 0, axis_name)


def _finish(total: Array, op: Op, num: int) -> Array:
    return total / jnp.asarray(num, total.dtype) if op == "mean" else total


def _where(condition: Array, x: Array, y: Array) -> Array:
    return lax.select(jnp.broadcast_to(condition, x.shape), x, y)


def check_algorithm(algorithm: str) -> None:
    """Raises a ValueError for an algorithm that `all_reduce` does not have."""
    _check_name("algorithm", algorithm, get_args(Algorithm))


def _check_name(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{argument}={value!r} is unknown. Allowed: {allowed}.")


def _checked_leaf(place: str, leaf: Any, op: Op) -> Array:
    try:
        if isinstance(leaf, (str, bytes)):  # jax might take it for a dtype
            raise TypeError
        array = jnp.asarray(leaf)
    except TypeError:
        raise ValueError(
            f"x{place}={leaf!r} is no array. Allowed: arrays and numbers. Leave it out "
            "of the tree."
        ) from None
    _check_dtype(array.dtype, op, f" (x{place})" if place else "")
    return array


def _check_dtype(dtype: Any, op: Op, place: str) -> None:
    if op == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"op='mean' of {dtype}{place} is not defined. Allowed: floating and "
            "complex. Cast to float32, or use op='sum'."
        )
    if op == "sum" and dtype == jnp.bool_:
        raise ValueError(
            f"op='sum' of bool{place} is not defined. Cast to int32, or use op='max' "
            "for 'any'."
        )
    if op == "max" and jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"op='max' of {dtype}{place} is not defined: complex numbers have no "
            "order. Reduce the magnitude, or real and imaginary part."
        )
