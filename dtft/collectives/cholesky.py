"""Cholesky factors of positive definite matrices: encoding, broadcast and reduction.

A factor has as many numbers as the lower triangle. Computing a factor costs O(n^3), and
factors cannot be added (the factors of D=1 and D=4 are 1 and 2, whose sum 3 is the
factor of 9, not of 5). Sending the factor pays in two cases: the factor is rounded to
bfloat16 (this keeps D positive definite, but rounding D does not), or the receiver
needs the factor. Otherwise send the packed matrix (`dtft.collectives.symmetric`).

Shapes: n rows; m = n(n+1)/2 packed numbers. Factors are lower triangular, L L^T = D.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from dtft.collectives.hops import AxisName, as_array, axis_size, broadcast, check_root
from dtft.collectives.in_turn import in_turn_on_cpu
from dtft.collectives.packing import (
    check_square,
    mirror_lower,
    pack_lower,
    unpack_triangle,
)

NUM_ATTEMPTS = 7
"""Largest number of factorizations of one matrix in `cholesky_encode`: without jitter,
then with jitter times 1, 10, ..., 10^5."""


class CholeskyCode(NamedTuple):
    """Packed Cholesky factors of a batch of matrices."""

    packed: Array
    """[..., n(n+1)/2]: the factor in the wire dtype; zeros where not `ok`."""
    jitter: Array
    """[...]: value added to the diagonal; 0 if the matrix was factored unchanged, or
    could not be factored at all."""
    ok: Array
    """[...], bool: whether the factor exists and fits into the wire dtype."""


def cholesky_encode(
    matrix: Array, *, jitter: float = 1e-6, wire_dtype: DTypeLike | None = None
) -> CholeskyCode:
    """Factors symmetric positive definite matrices and packs the factors.

    Each matrix of a batch is factored separately. If the factorization fails, it is
    repeated with a shift of jitter * 10^i * mean(|diagonal|) added to the diagonal, for
    i = 0, 1, ..., 5, until it succeeds. In float32 a shift is at least 1e-31. So a
    singular matrix (also all zeros) is encoded as a nearby matrix, and the field
    `jitter` of the result holds the shift.

    The field `ok` is False for a matrix that is not finite, or not positive definite
    even with the largest shift. `ok` is also False if the wire dtype cannot hold the
    factor, such as float16 if elements of the matrix are above 4e9. No field ever holds
    NaN.

    Not differentiable in reverse mode, because of a loop of unknown length.

    Args:
        matrix: [..., n, n], floating; only the lower triangle is read. Narrower dtypes
            than float32 are factored in float32.
        jitter: first shift of the diagonal, relative to the mean absolute diagonal
            element.
        wire_dtype: dtype of the packed factor; None keeps the dtype of the
            factorization.

    Raises:
        ValueError: matrix is not square or not floating, jitter is not a positive
            Python number, or wire_dtype is not floating.

    >>> code = cholesky_encode(jnp.array([[4.0, 2.0], [2.0, 5.0]]))
    >>> cholesky_decode(code.packed, 2).tolist(), bool(code.ok), float(code.jitter)
    ([[4.0, 2.0], [2.0, 5.0]], True, 0.0)
    >>> bool(cholesky_encode(jnp.array([[1.0, 2.0], [2.0, 1.0]])).ok)  # eigenvalue -1
    False
    """
    matrix = as_array("matrix", matrix)
    n = check_factorable(matrix)
    if not isinstance(jitter, (int, float)) or not jitter > 0:
        raise ValueError(
            f"jitter={jitter!r} must be > 0, and a Python number. The default is 1e-6."
        )
    check_wire_dtype(wire_dtype)
    matrix = _at_least_float32(matrix)
    if n == 0:
        batch = matrix.shape[:-2]
        return CholeskyCode(
            pack_lower(matrix), jnp.zeros(batch, matrix.dtype), jnp.ones(batch, bool)
        )
    factor, added, ok = _factor_with_retries(matrix, jitter)
    narrow = _cast(factor, wire_dtype)
    ok &= _is_factor(narrow.astype(factor.dtype))
    zero = jnp.zeros_like(narrow)
    kept = jnp.where(ok[..., None, None], narrow, zero)
    return CholeskyCode(pack_lower(kept), added, ok)


def cholesky_decode(packed: Array, n: int) -> Array:
    """Multiplies packed Cholesky factors L to L L^T: [..., n(n+1)/2] -> [..., n, n].

    `n` is the number of rows of L. The result is exactly symmetric, in float32 at
    least. The product is computed at full precision, because TF32 could make the result
    indefinite.
    """
    factor = _at_least_float32(unpack_triangle(as_array("packed", packed), n))
    product = jnp.matmul(
        factor, jnp.swapaxes(factor, -1, -2), precision=lax.Precision.HIGHEST
    )
    return mirror_lower(product)


def broadcast_factor(
    matrix: Array,
    owner: int,
    axis_name: AxisName | None,
    *,
    jitter: float = 1e-6,
    wire_dtype: DTypeLike | None = None,
) -> Array:
    """Computes the Cholesky factor on one device, the owner, and broadcasts the factor.

    Args:
        matrix: [..., n, n] as in `cholesky_encode`; read on the owner only.
        owner: index along the axis of the device that computes the factor.
        axis_name: axis or axes; None means one device.
        jitter: first shift added to the diagonal of a matrix that cannot be factored,
            relative to the mean absolute diagonal element; see `cholesky_encode`.
        wire_dtype: dtype to which the factor is rounded before it is sent; None for no
            rounding. Every device, the owner too, gets the rounded factor, so all
            devices have the same bits.

    Returns:
        [..., n, n], lower triangular, in float32 at least. NaN for a matrix of the
        owner that could not be encoded.

    Raises:
        ValueError: matrix is not square or not floating; jitter is not a positive
            Python number; wire_dtype is not floating; the owner is not a static index
            along the axis; or the call is differentiated, which is not supported
            because factors are sent as integers. If a derivative is needed, broadcast
            the matrix and factor the matrix on every device.
    """
    matrix = _undifferentiable(as_array("matrix", matrix), "broadcast_factor")
    n = check_square(matrix)
    check_root("owner", owner, 1 if axis_name is None else axis_size(axis_name))

    def encode(own: Array) -> Array:
        return _poisoned(cholesky_encode(own, jitter=jitter, wire_dtype=wire_dtype))

    if axis_name is None:
        code = broadcast(encode(matrix), owner, None)
    else:
        own = lax.cond(
            lax.axis_index(axis_name) == owner,
            encode,
            lambda other: jnp.zeros_like(encode(other)),
            matrix,
        )
        bits = broadcast(_as_bits(own), owner, axis_name)
        code = lax.bitcast_convert_type(bits, own.dtype)
    return _at_least_float32(unpack_triangle(code, n))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _undifferentiable(matrix: Array, caller: str) -> Array:
    del caller
    return matrix


@_undifferentiable.defjvp
def _refuse(caller: str, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise ValueError(
        f"{caller}: matrix is differentiated, but its factor travels as integers, "
        "whose derivative would be exactly zero. Allowed: matrices that do not depend "
        "on what is differentiated. Pass jax.lax.stop_gradient(matrix), or send it "
        "with `broadcast` and factor it with jnp.linalg.cholesky on every device."
    )


def gather_codes(
    matrix: Array, axis_name: AxisName, wire_dtype: DTypeLike | None
) -> Array:
    """Factors this device's matrices and gathers all devices' packed Cholesky factors.

    Args:
        matrix: [..., n, n], as in `cholesky_encode`.
        axis_name: axis or axes of p devices.
        wire_dtype: dtype of the factors that are sent; see `cholesky_encode`.

    Returns:
        [p, ..., n(n+1)/2]: the lower triangles of the factors of each device, packed by
        `pack_lower`; NaN for a matrix that cannot be factored.
    """
    axis_size(axis_name)  # refuses an axis that is not bound
    own = _poisoned(cholesky_encode(matrix, wire_dtype=wire_dtype))
    bits = lax.all_gather(_as_bits(own), axis_name, to="invarying")
    return lax.bitcast_convert_type(bits, own.dtype)


def qr_combine(first: Array, second: Array) -> Array:
    """Computes the Cholesky factor of D1 + D2 from the factors L1 and L2 of D1 and D2.

    Neither D1 nor D2 is computed. R = qr([L1^T; L2^T]) satisfies R^T R = L1 L1^T + L2
    L2^T. The result is R^T, with signs such that the diagonal is >= 0, which makes the
    factor unique.

    Args:
        first: L1, [..., n, n], lower triangular.
        second: L2, of the same shape and dtype. Narrower dtypes than float32 are
            widened to float32.

    Raises:
        ValueError: the matrices are not square, or differ in shape or dtype.

    >>> one, two = jnp.array([[1.0]]), jnp.array([[2.0]])  # factors of 1 and 4
    >>> L = qr_combine(one, two)
    >>> round(float((L @ L.T)[0, 0]), 5)
    5.0
    """
    first, second = as_array("first", first), as_array("second", second)
    check_square(first)
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(
            f"second is {second.dtype}{second.shape}, first is {first.dtype}"
            f"{first.shape}. Allowed: the same. Both are factors of matrices to add."
        )
    wide = [_at_least_float32(factor) for factor in (first, second)]
    rows = [jnp.swapaxes(factor, -1, -2) for factor in wide]
    return _factor_of_rows(jnp.concatenate(rows, axis=-2))


def reduce_factors(factor: Array, axis_name: AxisName | None) -> Array:
    """Computes the Cholesky factor of a sum of matrices over the p devices of an axis.

    Each device has the factor L of its matrix D = L L^T; the result is the factor of
    the sum of all D. The packed factors are gathered: each device receives (p-1)
    n(n+1)/2 numbers. Every device then computes the same QR decomposition of all
    factors, a matrix [p n, n], so the results are equal. This is better conditioned
    than adding the matrices, because no D is computed.

    Args:
        factor: [..., n, n]; only the lower triangle is read. Narrower dtypes than
            float32 are widened to float32.
        axis_name: axis or axes of the enclosing `jax.shard_map` (not of a `jax.vmap`);
            None means one device.

    Returns:
        [..., n, n], lower triangular with a diagonal >= 0, in float32 at least.

    Raises:
        ValueError: the factor is not square, or the axis is not bound.
    """
    factor = as_array("factor", factor)
    n = check_square(factor)
    factor = _at_least_float32(factor)
    if axis_name is None:
        return _with_positive_diagonal(jnp.tril(factor))
    num = axis_size(axis_name)
    packed = lax.all_gather(pack_lower(factor), axis_name, to="invarying")
    rows = jnp.swapaxes(unpack_triangle(packed, n), -1, -2)
    rows = jnp.moveaxis(rows, 0, -3).reshape(*factor.shape[:-2], num * n, n)
    return _factor_of_rows(rows)


def check_factorable(matrix: Array) -> int:
    """Returns the number of rows n of a floating matrix [..., n, n].

    Raises:
        ValueError: the matrix is not floating, or not square.
    """
    if not jnp.issubdtype(matrix.dtype, jnp.floating):
        raise ValueError(
            f"matrix has dtype {matrix.dtype}. Allowed: floating. Integers and complex "
            "numbers have no factor here: cast, or send the matrix packed."
        )
    return check_square(matrix)


def check_wire_dtype(wire_dtype: DTypeLike | None) -> None:
    """Raises a ValueError unless the wire dtype is floating or None."""
    try:
        dtype = None if wire_dtype is None else jnp.dtype(wire_dtype)
        floating = dtype is None or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # no dtype at all
        floating = False
    if not floating:
        raise ValueError(
            f"wire_dtype={wire_dtype} is not floating. Allowed: floating dtypes, for "
            "example bfloat16, or None for the matrix's own."
        )


def _factor_with_retries(matrix: Array, jitter: float) -> tuple[Array, Array, Array]:
    n = matrix.shape[-1]
    diagonal = jnp.diagonal(matrix, axis1=-2, axis2=-1)
    # With the floor an all-zero matrix is encoded as a tiny multiple of the identity.
    floor = float(jnp.finfo(matrix.dtype).tiny / jnp.finfo(matrix.dtype).eps)
    scale = jnp.maximum(jnp.mean(jnp.abs(diagonal), axis=-1), floor / jitter)
    identity = jnp.broadcast_to(jnp.eye(n, dtype=matrix.dtype), matrix.shape)

    def attempt(added: Array) -> tuple[Array, Array, Array]:
        shifted = matrix + added[..., None, None] * identity
        factor = jnp.tril(in_turn_on_cpu(_cholesky, shifted))
        ok = jnp.isfinite(factor).all(axis=(-2, -1))
        zero = jnp.zeros_like(factor)
        return jnp.where(ok[..., None, None], factor, zero), added, ok

    def again(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        count, factor, added, ok = carry
        wanted = scale * (jitter * 10.0 ** (count - 1).astype(matrix.dtype))
        new_factor, _, new_ok = attempt(wanted)
        keep = ok[..., None, None]
        return (
            count + 1,
            jnp.where(keep, factor, new_factor),
            jnp.where(ok | ~new_ok, added, wanted),
            ok | new_ok,
        )

    carry = (jnp.asarray(1), *attempt(jnp.zeros_like(scale)))
    _, factor, added, ok = lax.while_loop(
        lambda carry: (carry[0] < NUM_ATTEMPTS) & ~jnp.all(carry[3]), again, carry
    )
    return factor, added, ok


def _is_factor(lower: Array) -> Array:
    """Whether each lower triangular matrix is finite and has a positive diagonal.

    Maps [..., n, n] to a bool array [...]. Such a matrix is a valid Cholesky factor.
    """
    diagonal = jnp.diagonal(lower, axis1=-2, axis2=-1)
    return jnp.isfinite(lower).all(axis=(-2, -1)) & (diagonal > 0).all(axis=-1)


def _cholesky(matrix: Array) -> Array:
    return lax.linalg.cholesky(matrix, symmetrize_input=False)


def _factor_of_rows(rows: Array) -> Array:
    upper = in_turn_on_cpu(lambda batch: jnp.linalg.qr(batch, mode="r"), rows)
    return _with_positive_diagonal(jnp.swapaxes(upper, -1, -2))


def _with_positive_diagonal(lower: Array) -> Array:
    """Flips the signs of columns so that the diagonal is >= 0; L L^T is unchanged."""
    diagonal = jnp.diagonal(lower, axis1=-2, axis2=-1)
    sign = jnp.where(diagonal < 0, -jnp.ones_like(diagonal), jnp.ones_like(diagonal))
    return lower * sign[..., None, :]


def _poisoned(code: CholeskyCode) -> Array:
    nan = jnp.full_like(code.packed, jnp.nan)
    return jnp.where(code.ok[..., None], code.packed, nan)


def _as_bits(x: Array) -> Array:
    """Reinterprets x as unsigned integers of the same width, for sending.

    XLA's CPU backend would send bfloat16 as float32, which has twice the bytes.
    """
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _cast(x: Array, dtype: DTypeLike | None) -> Array:
    return x if dtype is None else x.astype(dtype)


def _at_least_float32(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
