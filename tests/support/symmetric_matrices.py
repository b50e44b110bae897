"""Symmetric matrices of whole numbers, in every dtype that is reduced."""

from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES = (np.float32, np.float64, jnp.bfloat16, np.float16, np.int32, np.complex64)


def symmetric(n: int, batch: tuple[int, ...] = (), dtype: Any = np.float32) -> Any:
    """Whole numbers, so that sums are exact in every dtype."""
    values = np.random.default_rng(n).integers(-9, 9, size=(*batch, n, n))
    lower = np.tril(values)
    return (lower + np.tril(values, -1).swapaxes(-1, -2)).astype(jnp.dtype(dtype))
