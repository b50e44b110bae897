"""All-reduce of matrices that the caller declares symmetric, at half the bytes."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dtft.collectives.all_reduce import Algorithm, all_reduce, check_algorithm
from dtft.collectives.cholesky import (
    check_factorable,
    check_wire_dtype,
    cholesky_decode,
    gather_codes,
)
from dtft.collectives.hops import AxisName, as_array, axis_size
from dtft.collectives.packing import (
    check_square,
    mirror_lower,
    pack_lower,
    unpack_lower,
)
from dtft.collectives.wire_costs import Wire, WireCosts

Op = Literal["mean", "sum"]

AnyWire = Wire | Literal["auto"]
"""A wire format, or `auto` for the format that was measured as the cheapest."""


def all_reduce_symmetric(
    matrix: Array,
    axis_name: AxisName | None,
    *,
    op: Op = "sum",
    algorithm: Algorithm = "native",
    wire: AnyWire = "packed",
    wire_dtype: DTypeLike | None = None,
    costs: WireCosts | None = None,
) -> Array:
    """Sums or averages symmetric matrices over an axis, with exactly symmetric results.

    ``wire`` chooses what is sent:

    * ``packed`` (default): sends the lower triangle, half the bytes, exactly. With a
      narrow wire_dtype the result may not be positive definite: in bfloat16 the
      smallest eigenvalues of an ill-conditioned matrix turn negative (and on CPU
      bfloat16 saves no bytes, see `all_reduce`).
    * ``full``: sends all n^2 numbers. Meant for links faster than memory, and for
      comparisons.
    * ``cholesky``: sends the factors of positive definite matrices. Factors cannot be
      added, so every device gathers the factors of all p devices and adds the products
      L L^T: p/2 times the bytes of ``packed`` and O(p n^3) work. With wire_dtype
      bfloat16 the result stays positive definite (`benchmarks/cholesky_wire.py`). This
      wire works inside `jax.shard_map` only, not under a `jax.vmap` with an axis name.
    * ``auto``: the wire that `measure_wires` found the cheapest for matrices of this
      size on these devices and links, according to ``costs``.

    The function is differentiable with every wire. The derivative of ``cholesky`` is
    the derivative of the sum: jitter and rounding count as constants.

    Args:
        matrix: [..., n, n], declared symmetric; only the lower triangle is read.
        axis_name: axis or axes; None means one device: the result is the symmetric
            matrix of the lower triangle.
        op: "sum" (default) or "mean".
        algorithm: algorithm of `all_reduce`, such as "ring"; ``cholesky`` accepts only
            "native".
        wire: see above.
        wire_dtype: floating dtype to which a floating matrix is rounded before sending
            (partial sums too, see `all_reduce`); None keeps the matrix's dtype.
        costs: the result of `measure_wires`, with ``auto`` only.

    Returns:
        [..., n, n] of matrix's dtype. With ``cholesky`` the jitter of `cholesky_encode`
        is added to a singular matrix. A matrix of the batch gives NaN if any device
        cannot encode it, for example because it is not finite there. The other matrices
        of the batch are not affected.

    Raises:
        ValueError: the matrix is not square, an option is unknown, options are
            incompatible, wire_dtype would round integers, or the axis is not bound.
    """
    matrix = as_array("matrix", matrix)
    n = check_square(matrix)
    check_options(op, algorithm, wire, wire_dtype, costs)
    _check_rounding(matrix, wire_dtype)
    if costs is not None:
        factored = algorithm == "native" and jnp.issubdtype(matrix.dtype, jnp.floating)
        summed: tuple[Wire, ...] = ("full", "packed")
        wire = costs.cheapest(n, (*summed, "cholesky") if factored else summed)
    if wire == "cholesky":
        check_factorable(matrix)
    if axis_name is None:
        return mirror_lower(matrix)
    if wire == "cholesky":
        return _sum_of_products(matrix, axis_name, op, wire_dtype)
    sent = pack_lower(matrix) if wire == "packed" else matrix
    sent = sent if wire_dtype is None else sent.astype(wire_dtype)
    total = all_reduce(sent, axis_name, op=op, algorithm=algorithm)
    total = total.astype(matrix.dtype)
    return unpack_lower(total, n) if wire == "packed" else mirror_lower(total)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _sum_of_products(
    matrix: Array, axis_name: AxisName, op: Op, wire_dtype: DTypeLike | None
) -> Array:
    factors = gather_codes(matrix, axis_name, wire_dtype)
    total = cholesky_decode(factors, matrix.shape[-1]).sum(0)
    if op == "mean":
        total = total / jnp.asarray(axis_size(axis_name), total.dtype)
    return total.astype(matrix.dtype)


@_sum_of_products.defjvp
def _tangent_of_sum(
    axis_name: AxisName,
    op: Op,
    wire_dtype: DTypeLike | None,
    primals: tuple[Array],
    tangents: tuple[Array],
) -> tuple[Array, Array]:
    # Factors are sent as integers, which have no derivative: differentiate the sum.
    total = _sum_of_products(*primals, axis_name, op, wire_dtype)
    return total, all_reduce_symmetric(*tangents, axis_name, op=op)


def _check_rounding(matrix: Array, wire_dtype: DTypeLike | None) -> None:
    if wire_dtype is None or jnp.issubdtype(matrix.dtype, jnp.floating):
        return
    raise ValueError(
        f"wire_dtype={jnp.dtype(wire_dtype)} would round a matrix of {matrix.dtype}. "
        "Allowed with integer and complex matrices: None, which sends them exactly. "
        "Leave wire_dtype out, or cast the matrix first."
    )


def check_options(
    op: str,
    algorithm: Algorithm,
    wire: AnyWire,
    wire_dtype: DTypeLike | None,
    costs: WireCosts | None = None,
) -> None:
    """Checks options of `all_reduce_symmetric`.

    Raises:
        ValueError: an option is unknown, or two options are incompatible.
    """
    if op not in ("mean", "sum"):
        raise ValueError(f"op={op!r} is unknown here. Allowed: 'mean', 'sum'.")
    wires = (*get_args(Wire), "auto")
    if wire not in wires:
        raise ValueError(f"wire={wire!r} is unknown. Allowed: {wires}.")
    if costs is not None and not isinstance(costs, WireCosts):
        raise ValueError(
            f"costs={costs!r} is a {type(costs).__name__}. Allowed: a WireCosts, with "
            "wire='auto'. Pass what dtft.collectives.measure_wires returned, or "
            "WireCosts(seconds=...)."
        )
    if (wire == "auto") != (costs is not None):
        raise ValueError(
            f"wire={wire!r} with costs={costs!r}. Allowed: costs with wire='auto', and "
            "only with it. Pass what dtft.collectives.measure_wires returned for this "
            "mesh, or name a wire."
        )
    check_algorithm(algorithm)
    if wire == "cholesky" and algorithm != "native":
        raise ValueError(
            f"algorithm={algorithm!r} does not go with wire='cholesky': factors are "
            "gathered, not added. Use algorithm='native', or wire='packed'."
        )
    check_wire_dtype(wire_dtype)
