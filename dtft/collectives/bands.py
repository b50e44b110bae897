"""Fills symmetric matrices from one stored triangle, a band of rows at a time.

A band is a few rows of the result. One part of each result row is copied from a row of
the stored triangle. The other part is copied from a column of the stored triangle. The
columns of a band are transposed together, because they fit into the cache. Used only on
CPU, where XLA would read the transpose of a whole large matrix element by element with
the stride of a row, and make further copies of the matrix. The module `packing`
documents the stored layout.
"""

import jax.numpy as jnp
from jax import Array, lax

BAND = 32
"""Number of matrix rows that `mirror_into` transposes and writes at a time."""


def mirror_into(
    out: Array, stored: Array, *, row: int, column: int, lower: bool
) -> Array:
    """Writes a block of a symmetric matrix into `out`, read from one stored triangle.

    The block has w rows and m columns and begins at (row, column) of `out`. Row i and
    column j of an element count from the first row and column of the block. `stored`
    has one of the two equal elements (i, j) and (j, i):

    * With `lower`, `stored` is [m, w]. Element (i, j) of the block is read from
      `stored[i, j]` if j <= i, else from `stored[j, i]`.
    * Without `lower`, `stored` is [w, m] with w = m. Element (i, j) of the block is
      read from `stored[i, j]` if j > i, else from `stored[j, i]`.

    Args:
        out: [n, n], the matrix to write into.
        stored: [m, w] or [w, m], see above; w >= 1.
        row: first row of the block.
        column: first column of the block.
        lower: whether `stored` holds the lower triangle.

    The example writes two rows of a 3 x 3 matrix, and leaves the third row unchanged:

    >>> stored = jnp.array([[1, 0], [2, 3], [4, 5]])
    >>> out = jnp.zeros((3, 3), stored.dtype)
    >>> mirror_into(out, stored, row=0, column=0, lower=True).tolist()
    [[1, 2, 4], [2, 3, 5], [0, 0, 0]]
    """
    width, length = stored.shape[1], stored.shape[0]
    band = min(BAND, width)
    num_bands = -(-width // band)
    shape = (band, length)

    def start(index: Array | int) -> Array:
        # The last band ends with the block, and may overlap the band before.
        return jnp.minimum(jnp.asarray(index, jnp.int32) * band, width - band)

    def crosswise(index: Array | int) -> Array:
        part = lax.dynamic_slice_in_dim(stored, start(index), band, axis=1)
        return part.T

    def write(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, across = carry
        first = start(index)
        along = lax.dynamic_slice_in_dim(stored, first, band, axis=0)
        along = jnp.pad(along, ((0, 0), (0, length - width)))
        i = lax.broadcasted_iota(jnp.int32, shape, 0) + first
        above = lax.broadcasted_iota(jnp.int32, shape, 1) > i
        values = jnp.where(above if lower else ~above, across, along)
        out = lax.dynamic_update_slice(out, values, (row + first, jnp.int32(column)))
        # Part of the carry, so that XLA cannot fuse the transpose into `where`.
        return out, crosswise(index + 1)

    return lax.fori_loop(0, num_bands, write, (out, crosswise(0)))[0]
