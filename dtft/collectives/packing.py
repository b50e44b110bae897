"""Packs symmetric and triangular matrices as their lower triangle, half the bytes.

The layout is rectangular full packed (RFP; Gustavson et al., LAPACK Working Note 199):
the triangle is cut into two small triangles, of h and of k rows, and a block [k, h].
The code calls the block `square`, although it is a square only for even n. The two
small triangles are fitted into one rectangle. Packing uses static slices, a transpose
and a mask, without index arrays in the program. Packing is exact for every n and dtype,
and linear, so packed matrices can be summed. Shapes: n rows; k = n // 2; h = n - k.

Two triangles are merged by addition, each with zeros in place of the other, and not by
`where(mask, a, b.T)`: XLA's CPU compiler (jaxlib 0.10.2) puts whole tiles of `where` on
the stack, which overflows from about n = 1000
(tests/multiprocess/test_large_matrices.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dtft.collectives.bands import mirror_into
from dtft.collectives.hops import as_array

LARGE = 512
"""Number of rows n from which `unpack_lower` unpacks matrices in bands of rows on CPU
(`mirror_into`). For smaller matrices bands are not faster."""


def packed_size(n: int) -> int:
    """Returns the number of elements of the lower triangle, diagonal included.

    >>> packed_size(4)
    10
    """
    return n * (n + 1) // 2


def pack_lower(matrix: Array) -> Array:
    """Packs the lower triangle (diagonal included) of each matrix into a vector.

    Args:
        matrix: [..., n, n], any dtype, assumed to be symmetric or lower triangular.
            Elements above the diagonal are not used.

    Returns:
        [..., n(n+1)/2], the same dtype and exactly the same values (-0 may become 0).
        The order is that of LAPACK's rectangular full packed (RFP) layout, the same for
        every matrix of this n.

    Raises:
        ValueError: `matrix` is not an array, or its last two dims differ.

    >>> d = jnp.array([[1, 2, 4], [2, 3, 5], [4, 5, 6]])
    >>> sorted(pack_lower(d).tolist())
    [1, 2, 3, 4, 5, 6]
    >>> bool((unpack_lower(pack_lower(d), 3) == d).all())
    True
    """
    matrix = as_array("matrix", matrix)
    n = check_square(matrix)
    h = n - n // 2
    first, square, second = (
        matrix[..., :h, :h],
        matrix[..., h:, :h],
        matrix[..., h:, h:],
    )
    # The transposed second triangle fills the rectangle beside the first. For even n
    # both triangles have n/2 rows and together need one more row. For odd n the first
    # has one row more, and the second exactly fills the rest of its square.
    first, second = jnp.tril(first), jnp.swapaxes(jnp.tril(second), -1, -2)
    leading = [(0, 0)] * (matrix.ndim - 2)
    if n % 2 == 0:
        first = jnp.pad(first, [*leading, (1, 0), (0, 0)])
        second = jnp.pad(second, [*leading, (0, 1), (0, 0)])
    else:
        second = jnp.pad(second, [*leading, (0, 1), (1, 0)])
    lines = jnp.concatenate([first + second, square], axis=-2)
    return lines.reshape(*matrix.shape[:-2], packed_size(n))


def unpack_lower(packed: Array, n: int) -> Array:
    """Unpacks vectors to exactly symmetric matrices: [..., n(n+1)/2] -> [..., n, n].

    Raises:
        ValueError: the last dim is not n(n+1)/2, or n is not an int of 0 or more.
    """
    at_once = functools.partial(_unpack_at_once, n=n)
    if n < LARGE:
        return at_once(packed)
    in_bands = functools.partial(_unpack_in_bands, n=n)
    return jax.lax.platform_dependent(packed, cpu=in_bands, default=at_once)


def unpack_triangle(packed: Array, n: int) -> Array:
    """Unpacks vectors to lower triangular matrices: [..., n(n+1)/2] -> [..., n, n].

    Raises:
        ValueError: the last dim is not n(n+1)/2, or n is not an int of 0 or more.
    """
    first, square, second = _triangles(packed, n)
    corner = jnp.zeros_like(jnp.swapaxes(square, -1, -2))
    top = jnp.concatenate([jnp.tril(first), corner], axis=-1)
    bottom = jnp.concatenate([square, jnp.tril(second)], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def mirror_lower(matrix: Array) -> Array:
    """Makes matrices [..., n, n] symmetric: copies the lower triangle to the upper."""
    above = jnp.swapaxes(jnp.tril(matrix, -1), -1, -2)
    return jnp.tril(matrix) + above


def check_square(matrix: Any) -> int:
    """Returns the number of rows n of an array [..., n, n].

    Raises:
        ValueError: `matrix` is not an array, or its last two dims differ.
    """
    matrix = as_array("matrix", matrix)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(
            f"matrix has shape {matrix.shape}. Allowed: [..., n, n]. Only square "
            "matrices can be symmetric: pass the statistics, not the parameter."
        )
    return matrix.shape[-1]


def _unpack_at_once(packed: Array, n: int) -> Array:
    first, square, second = _triangles(packed, n)
    top = jnp.concatenate([mirror_lower(first), jnp.swapaxes(square, -1, -2)], axis=-1)
    bottom = jnp.concatenate([square, mirror_lower(second)], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def _unpack_in_bands(packed: Array, n: int) -> Array:
    lines = _lines(packed, n)
    if lines.ndim > 2:
        flat = packed.reshape(-1, packed.shape[-1])
        each = jax.vmap(functools.partial(_unpack_in_bands, n=n))(flat)
        return each.reshape(*packed.shape[:-1], n, n)
    k, h = n // 2, n - n // 2
    upper = lines[:k, n % 2 :][:, :k]  # the second triangle, transposed
    lower = lines[1 - n % 2 :]  # [n, h], the first triangle above the square
    out = jnp.pad(lower, ((0, 0), (0, k)))
    out = mirror_into(out, lower, row=0, column=0, lower=True)
    return mirror_into(out, upper, row=h, column=h, lower=False)


def _lines(packed: Array, n: int) -> Array:
    """Reshapes the vectors that `pack_lower` makes of matrices with n rows.

    The result, [..., n + 1 - n % 2, n - n // 2], is LAPACK's rectangular full packed
    (RFP) layout.

    Raises:
        ValueError: the last dim is not n(n+1)/2, or n is not an int of 0 or more.
    """
    packed = as_array("packed", packed)
    if not isinstance(n, int) or n < 0:
        raise ValueError(f"n={n!r} is not a number of rows. Allowed: int, 0 or more.")
    if packed.shape[-1:] != (packed_size(n),):
        raise ValueError(
            f"packed has shape {packed.shape}, but n={n} needs [..., {packed_size(n)}]"
            ". Pass the n of the matrix that was packed."
        )
    return packed.reshape(*packed.shape[:-1], n + 1 - n % 2, n - n // 2)


def _triangles(packed: Array, n: int) -> tuple[Array, Array, Array]:
    """Splits the packed lower triangles of matrices with n rows into their three parts.

    With k = n // 2 and h = n - k, the parts are the triangle of the first h rows [...,
    h, h], the block below this triangle [..., k, h], and the triangle to the right of
    this block [..., k, k]. Elements above the diagonals of the two triangles are
    arbitrary.
    """
    lines = _lines(packed, n)
    k, h = n // 2, n - n // 2
    if n % 2 == 0:
        first, second = lines[..., 1 : h + 1, :], lines[..., :h, :]
    else:
        first, second = lines[..., :h, :], lines[..., :k, 1:]
    return first, lines[..., h + 1 - n % 2 :, :], jnp.swapaxes(second, -1, -2)
