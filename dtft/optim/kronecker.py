"""Kronecker-factored statistics of arrays, block by block, and their inverse roots.

An array is reshaped to a matrix and cut into blocks. All functions are pure.

Suffixes of array names are dims: B blocks, M rows and N columns of a block, K either of
M and N; X, Y rows and columns of the whole matrix.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# The inverse roots depend on the small eigenvalues, which rounding to TF32 or bfloat16
# would hide.
_EXACT = jax.lax.Precision.HIGHEST


class Blocks(NamedTuple):
    """The division of one array into blocks of equal shape, with little padding."""

    shape: tuple[int, ...]
    """Shape of the array."""
    rows: int
    """Size of dim X: all dims but the last, merged."""
    columns: int
    """Size of dim Y: the last dim."""
    grid: tuple[int, int]
    """Number of blocks along the rows and along the columns."""
    block: tuple[int, int]
    """Shape of each block, (M, N)."""

    @property
    def number(self) -> int:
        """Number of blocks."""
        return self.grid[0] * self.grid[1]

    def cut(self, array: jax.Array) -> jax.Array:
        """Cuts an array into blocks [B, M, N] in row-major order, padded with zeros.

        An array divided over Explicit mesh axes is gathered first, because the type of
        a merged dim cannot express its sharding. Over Auto axes XLA's partitioner
        decides whether to gather the array.
        """
        (down, across), (rows, columns) = self.grid, self.block
        matrix_XY = _gathered(array).reshape(self.rows, self.columns)
        padding = [(0, down * rows - self.rows), (0, across * columns - self.columns)]
        matrix_XY = jnp.pad(matrix_XY, padding)
        blocks = matrix_XY.reshape(down, rows, across, columns).swapaxes(1, 2)
        return blocks.reshape(self.number, rows, columns)

    def join(self, blocks_BMN: jax.Array, like: jax.Array) -> jax.Array:
        """Joins the blocks of `cut` to an array of the original shape.

        If the mesh of `like` has Explicit axes, the array gets the sharding of `like`.
        """
        (down, across), (rows, columns) = self.grid, self.block
        blocks = blocks_BMN.reshape(down, across, rows, columns).swapaxes(1, 2)
        matrix_XY = blocks.reshape(down * rows, across * columns)
        array = matrix_XY[: self.rows, : self.columns].reshape(self.shape)
        sharding = _explicit(like)
        return array if sharding is None else jax.sharding.reshard(array, sharding)


def blocks_of(shape: tuple[int, ...], block_size: int) -> Blocks | None:
    """Plans how an array is cut into blocks; returns None if it is not a matrix.

    All dims but the last are merged: a convolution kernel HWIO becomes (H W I, O).
    Vectors, scalars and arrays whose merged matrix has a dim of 0 or 1 do not count as
    matrices.

    Args:
        shape: The array's shape.
        block_size: Largest number of rows, and of columns, of a block.

    All blocks have one shape: in the example 18 rows give two blocks of 9 rows, because
    `block_size` is 10.

    >>> blocks_of((3, 3, 2, 16), block_size=10)
    Blocks(shape=(3, 3, 2, 16), rows=18, columns=16, grid=(2, 2), block=(9, 8))
    >>> blocks_of((16,), 10), blocks_of((1, 16), 10)
    (None, None)
    """
    if len(shape) < 2 or min(math.prod(shape[:-1]), shape[-1]) < 2:
        return None
    rows, columns = math.prod(shape[:-1]), shape[-1]
    down, across = -(-rows // block_size), -(-columns // block_size)
    block = (-(-rows // down), -(-columns // across))
    return Blocks(shape, rows, columns, (down, across), block)


def gram(blocks_BMN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns exactly symmetric G G^T [B, M, M] and G^T G [B, N, N] per block G."""
    left_BMM = jnp.einsum("bmn,bkn->bmk", blocks_BMN, blocks_BMN, precision=_EXACT)
    right_BNN = jnp.einsum("bmn,bmk->bnk", blocks_BMN, blocks_BMN, precision=_EXACT)
    return _symmetric(left_BMM), _symmetric(right_BNN)


def inverse_root(
    statistic_BKK: jax.Array,
    exponent: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
) -> jax.Array:
    """Returns (A + eps a I)^-exponent of each block A; a is its largest eigenvalue.

    Uses an eigendecomposition, in float64 if JAX has float64 enabled, else in float32.
    Negative eigenvalues, which come from rounding or from a narrow wire dtype, count
    as 0. The root of a block of zeros is the identity.

    Args:
        statistic_BKK: Real matrices, positive semidefinite up to rounding.
        exponent: Power of the inverse root; 1/4 in the Shampoo paper.
        eps: Added to the eigenvalues, as a fraction of the largest. Below about 1e-6
            the result is affected by float32's rounding of the small eigenvalues.

    Returns:
        [B, K, K] in the dtype of the statistic.

    >>> inverse_root(jnp.diag(jnp.array([16.0, 1.0]))[None], 0.25, 0.0).tolist()
    [[[0.5, 0.0], [0.0, 1.0]]]
    """
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    values_BK, vectors_BKK = _eigh(statistic_BKK.astype(dtype))
    values_BK = jnp.maximum(values_BK, 0)
    largest_B1 = jnp.max(values_BK, axis=-1, keepdims=True)
    # `== 0`, not `> 0`: a statistic with NaN must not give the identity.
    divisor_B1 = jnp.where(largest_B1 == 0, 1, largest_B1)
    power = -scalar(exponent, values_BK)
    # Ratio and scale are raised separately, so neither power under- or overflows.
    ratio_BK = (values_BK / divisor_B1 + scalar(eps, values_BK)) ** power
    scaled_BK = ratio_BK * divisor_B1**power
    powers_BK = jnp.where(largest_B1 == 0, 1, scaled_BK)
    scaled_BKK = vectors_BKK * powers_BK[:, None, :]
    root_BKK = jnp.einsum("bij,bkj->bik", scaled_BKK, vectors_BKK, precision=_EXACT)
    return _symmetric(root_BKK).astype(statistic_BKK.dtype)


def precondition(
    left_BMM: jax.Array, blocks_BMN: jax.Array, right_BNN: jax.Array
) -> jax.Array:
    """Returns the matrix products left @ G @ right of each block G: [B, M, N]."""
    half_BMN = jnp.einsum("bij,bjk->bik", left_BMM, blocks_BMN, precision=_EXACT)
    return jnp.einsum("bij,bjk->bik", half_BMN, right_BNN, precision=_EXACT)


def scalar(value: jax.typing.ArrayLike, like: jax.Array) -> Any:
    """Converts a hyperparameter for arithmetic with `like`.

    A Python number is returned unchanged, because it is weakly typed. An array is cast
    to the dtype of `like`.
    """
    if isinstance(value, (int, float)):
        return value
    return jnp.asarray(value).astype(like.dtype)


def _explicit(array: jax.Array) -> NamedSharding | None:
    """Returns the sharding in an array's type; None if no mesh axis is Explicit."""
    sharding: Any = jax.typeof(array).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def _gathered(array: jax.Array) -> jax.Array:
    sharding = _explicit(array)
    if sharding is None:
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))


def _eigh(matrix_BKK: jax.Array) -> tuple[jax.Array, jax.Array]:
    from dtft.collectives.in_turn import in_turn_on_cpu

    def whole(batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, vectors = jnp.linalg.eigh(batch)
        return values, vectors

    return in_turn_on_cpu(whole, matrix_BKK)


def _symmetric(matrix_BKK: jax.Array) -> jax.Array:
    return (matrix_BKK + matrix_BKK.swapaxes(-1, -2)) / 2
