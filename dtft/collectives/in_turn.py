"""Factors the matrices of a batch one after the other on CPU, to avoid a deadlock.

jaxlib 0.10.2 divides a LAPACK batch over a thread pool and waits in a thread of the
same pool. If as many batches run as the pool has threads, no thread is left for the
work, and all batches wait forever. A single matrix is factored in the calling thread.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def in_turn_on_cpu(factorize: Callable[[Array], Any], matrices: Array) -> Any:
    """Computes `factorize(matrices)`, on CPU one matrix after the other.

    On other platforms `factorize` is called once, for all matrices together.

    Args:
        factorize: maps [..., m, n] to one or more arrays with the same leading dims.
        matrices: [..., m, n].

    In the example the matrix at index [1, 0] is 9 times the identity:

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
