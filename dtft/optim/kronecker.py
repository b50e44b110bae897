"""Kronecker-factored statistics of arrays: cut into blocks, measured, and inverted.

How an array becomes matrices, and what is computed on them; all pure.

Legend: B blocks, M rows and N columns of a block, K one of the two; X, Y dims of the
whole matrix.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# Statistics decide by small eigenvalues: products in TF32 or bfloat16 would drown them.
_EXACT = jax.lax.Precision.HIGHEST


class Blocks(NamedTuple):
    """How one array is cut. Blocks are as equal as can be, so padding is small."""

    shape: tuple[int, ...]
    """The array's own."""
    rows: int
    """Dim X: all dims but the last, merged."""
    columns: int
    """Dim Y: the last dim."""
    grid: tuple[int, int]
    """Blocks in each dim."""
    block: tuple[int, int]
    """Shape of each block, (M, N)."""

    @property
    def number(self) -> int:
        """Number of blocks."""
        return self.grid[0] * self.grid[1]

    def cut(self, array: jax.Array) -> jax.Array:
        """The blocks [B, M, N] of the array, row by row; zeros where it ends.

        An array divided over Explicit mesh axes is gathered first: a merged dim has no
        sharding in types. Over Auto axes the partitioner decides.
        """
        (down, across), (rows, columns) = self.grid, self.block
        matrix_XY = _gathered(array).reshape(self.rows, self.columns)
        padding = [(0, down * rows - self.rows), (0, across * columns - self.columns)]
        matrix_XY = jnp.pad(matrix_XY, padding)
        blocks = matrix_XY.reshape(down, rows, across, columns).swapaxes(1, 2)
        return blocks.reshape(self.number, rows, columns)

    def join(self, blocks_BMN: jax.Array, like: jax.Array) -> jax.Array:
        """The array of its blocks, divided as `like` is: the inverse of `cut`."""
        (down, across), (rows, columns) = self.grid, self.block
        blocks = blocks_BMN.reshape(down, across, rows, columns).swapaxes(1, 2)
        matrix_XY = blocks.reshape(down * rows, across * columns)
        array = matrix_XY[: self.rows, : self.columns].reshape(self.shape)
        sharding = _explicit(like)
        return array if sharding is None else jax.sharding.reshard(array, sharding)


def blocks_of(shape: tuple[int, ...], block_size: int) -> Blocks | None:
    """How an array is seen as matrices; None where it is no matrix.

    All dims but the last are merged: a convolution's HWIO becomes (H W I, O), what
    reaches one output times the outputs. An array whose matrix has a dim of 0 or 1 (a
    vector or a scalar) is none.

    Args:
        shape: The array's shape.
        block_size: Largest rows and columns of a block.

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
    """(G G^T [B, M, M], G^T G [B, N, N]) of every block, symmetric to the last bit."""
    left_BMM = jnp.einsum("bmn,bkn->bmk", blocks_BMN, blocks_BMN, precision=_EXACT)
    right_BNN = jnp.einsum("bmn,bmk->bnk", blocks_BMN, blocks_BMN, precision=_EXACT)
    return _symmetric(left_BMM), _symmetric(right_BNN)


def inverse_root(
    statistic_BKK: jax.Array,
    exponent: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
) -> jax.Array:
    """(A + eps a I)^-exponent of every block A, a its largest eigenvalue.

    By eigendecomposition, in float64 where jax has it enabled and else in float32.
    Eigenvalues that rounding (or a lossy wire) has made negative count as 0. Where A
    is zero the root is the identity.

    Args:
        statistic_BKK: Positive semidefinite up to rounding, real.
        exponent: 1/4 in Shampoo.
        eps: Relative to the largest eigenvalue. Below about 1e-6 float32's rounding of
            the small eigenvalues shows.

    Returns:
        [B, K, K] in the dtype of the statistic.

    >>> inverse_root(jnp.diag(jnp.array([16.0, 1.0]))[None], 0.25, 0.0).tolist()
    [[[0.5, 0.0], [0.0, 1.0]]]
    """
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    values_BK, vectors_BKK = _eigh(statistic_BKK.astype(dtype))
    values_BK = jnp.maximum(values_BK, 0)
    largest_B1 = jnp.max(values_BK, axis=-1, keepdims=True)
    # `== 0`, not `> 0`: a statistic that is not a number must not become an identity.
    divisor_B1 = jnp.where(largest_B1 == 0, 1, largest_B1)
    power = -scalar(exponent, values_BK)
    # The root of the ratio times the root of the scale: neither under- nor overflows.
    ratio_BK = (values_BK / divisor_B1 + scalar(eps, values_BK)) ** power
    scaled_BK = ratio_BK * divisor_B1**power
    powers_BK = jnp.where(largest_B1 == 0, 1, scaled_BK)
    scaled_BKK = vectors_BKK * powers_BK[:, None, :]
    root_BKK = jnp.einsum("bij,bkj->bik", scaled_BKK, vectors_BKK, precision=_EXACT)
    return _symmetric(root_BKK).astype(statistic_BKK.dtype)


def precondition(
    left_BMM: jax.Array, blocks_BMN: jax.Array, right_BNN: jax.Array
) -> jax.Array:
    """The product left G right of every block."""
    half_BMN = jnp.einsum("bij,bjk->bik", left_BMM, blocks_BMN, precision=_EXACT)
    return jnp.einsum("bij,bjk->bik", half_BMN, right_BNN, precision=_EXACT)


def scalar(value: jax.typing.ArrayLike, like: jax.Array) -> Any:
    """Python numbers stay weak; traced hyperparameters take the dtype of `like`."""
    if isinstance(value, (int, float)):
        return value
    return jnp.asarray(value).astype(like.dtype)


def _explicit(array: jax.Array) -> NamedSharding | None:
    """The sharding in an array's type; None where no mesh axis is Explicit."""
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
