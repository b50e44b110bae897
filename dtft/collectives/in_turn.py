"""Factorizations of a batch of matrices, one after the other on CPU.

jaxlib 0.10.2 divides a batch for LAPACK over the thread pool and waits for it in a
thread of that same pool: with as many batches at work as there are threads, none is
left to do the work, and all wait for ever. A single matrix is done where it is called.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def in_turn_on_cpu(factorize: Callable[[Array], Any], matrices: Array) -> Any:
    """`factorize(matrices)`, on CPU matrix by matrix.

    Args:
        factorize: maps [..., m, n] to one or more arrays with the same leading dims.
        matrices: [..., m, n].

    >>> import jax.numpy as jnp
    >>> batch = jnp.eye(2)[None, None] * jnp.array([4.0, 9.0]).reshape(2, 1, 1, 1)
    >>> in_turn_on_cpu(jnp.linalg.cholesky, batch)[1, 0].tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    if matrices.ndim == 2:
        return factorize(matrices)
    leading = matrices.shape[:-2]

    def in_turn(batch: Array) -> Any:
        flat = batch.reshape(-1, *batch.shape[-2:])
        results = jax.lax.map(factorize, flat)
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), results)

    return jax.lax.platform_dependent(matrices, cpu=in_turn, default=factorize)
